"""Positions in a stream: entry ids, what a stream holds, and which entries were trimmed before they were read."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from tampu.base.checks import MAX_U64
from tampu.errors import ConfigError, Error
from tampu.redis.faults import ServerError

if TYPE_CHECKING:
    from tampu.spark.options import ReadOptions, Stream
    from tampu.spark.server import QueueServer
    from tampu.wire.keys import QueueKeys

logger = logging.getLogger("tampu.spark")


class EntryId(NamedTuple):
    """An id; compares as the stream orders."""

    ms: int
    seq: int

    def __str__(self) -> str:
        return f"{self.ms}-{self.seq}"

    @property
    def next(self) -> EntryId:
        """The smallest id behind this one."""
        return EntryId(self.ms, self.seq + 1) if self.seq < MAX_U64 else EntryId(self.ms + 1, 0)

    @property
    def previous(self) -> EntryId:
        """The largest id before this one; of the first it is the first."""
        if self.seq:
            return EntryId(self.ms, self.seq - 1)
        return EntryId(self.ms - 1, MAX_U64) if self.ms else self


#: Before every entry: no entry has this id.
BEFORE_ALL = EntryId(0, 0)


def parse_entry_id(text: str | bytes, where: str = "entry id") -> EntryId:
    """`1700000000000-3`, or `1700000000000` for its first; `ConfigError` names `where`."""
    shown = text.decode(errors="replace") if isinstance(text, bytes) else text
    ms, dash, seq = shown.partition("-")
    if not (ms.isascii() and ms.isdigit() and (not dash or (seq.isascii() and seq.isdigit()))):
        raise ConfigError(f"{where} must be a stream id such as 1700000000000-0; got {shown!r}")
    found = EntryId(int(ms), int(seq or 0))
    if max(found) > MAX_U64:
        raise ConfigError(f"{where} must be a stream id of two numbers of 64 bits; got {shown!r}")
    return found


class DataLossError(Error):
    """Entries were trimmed before they were read, and `failOnDataLoss` is true."""

    code = "CMQ-030"


@dataclass(frozen=True, slots=True)
class Position:
    """How far a queue has been read, and how the micro-batch that ends here is partitioned."""

    #: ID of the last entry read.
    id: EntryId
    #: Number of entries ever added up to `id`; None if unknown.
    added: int | None = None
    #: Last IDs of all partitions but the final one. None in checkpoints that were written before cuts were stored.
    cuts: tuple[EntryId, ...] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the form that Spark stores in a checkpoint."""
        found: dict[str, Any] = {"id": str(self.id)}
        if self.added is not None:
            found["added"] = self.added
        if self.cuts is not None:
            found["cuts"] = [str(cut) for cut in self.cuts]
        return found

    @classmethod
    def from_json(cls, value: Any) -> Position:
        """Return the position in a checkpoint, or of an ID given by the user."""
        if isinstance(value, str):
            return cls(parse_entry_id(value, "offset"))
        cuts = value.get("cuts")
        return cls(
            parse_entry_id(value["id"], "offset"),
            value.get("added"),
            None if cuts is None else tuple(parse_entry_id(cut, "offset") for cut in cuts),
        )


@dataclass(frozen=True, slots=True)
class Extent:
    """What a stream holds at one moment."""

    length: int
    #: None when it is empty.
    first: EntryId | None
    #: The id given out last, whether or not that entry is still there.
    last_generated: EntryId
    #: Entries ever added; None on servers before Redis 7.0.
    added: int | None
    #: The highest id deleted by hand, which trimming is not.
    max_deleted: EntryId

    @property
    def end(self) -> Position:
        """Behind all that is there."""
        return Position(self.last_generated, self.added)


EMPTY = Extent(0, None, BEFORE_ALL, 0, BEFORE_ALL)


def stream_key(keys: QueueKeys, stream: Stream) -> str:
    """The key of a stream."""
    return {"events": keys.events, "dlq": keys.dlq, "jobs": keys.stream}[stream]


def extent_of(server: QueueServer, key: str) -> Extent:
    """What the stream holds now; a key that is not there holds nothing."""
    try:
        flat = server.call("XINFO", "STREAM", key)
    except ServerError as error:
        if "no such key" in str(error):
            return EMPTY
        raise
    found = dict(zip(flat[::2], flat[1::2], strict=True))
    first = found[b"first-entry"]
    return Extent(
        length=found[b"length"],
        first=None if first is None else parse_entry_id(first[0]),
        last_generated=parse_entry_id(found[b"last-generated-id"]),
        added=found.get(b"entries-added"),
        max_deleted=parse_entry_id(found.get(b"max-deleted-entry-id", b"0-0")),
    )


@dataclass(frozen=True, slots=True)
class Gap:
    """Entries that were trimmed before they were read; `entries` is None when they cannot be counted."""

    queue: str
    stream: str
    start: EntryId
    first: EntryId | None
    entries: int | None

    def __str__(self) -> str:
        count = "an unknown number of entries were" if self.entries is None else f"{self.entries} entries were"
        return (
            f"{self.stream} of queue {self.queue!r}: {count} trimmed before they were read. Requested was what follows "
            f"{self.start}, the first entry present is {self.first or 'none'}"
        )


def find_gap(queue: str, stream: str, start: Position, end: Position, extent: Extent) -> Gap | None:
    """What is missing between two positions, as far as it can be told.

    Letters that were replayed or removed by hand are gone on purpose: behind the first of those nothing is claimed.
    """
    if start.id == BEFORE_ALL or start.id >= end.id or (extent.first is not None and extent.first <= start.id):
        return None
    if extent.added is None:
        if extent.first is None or extent.first > start.id.next:
            logger.debug("this server does not count what was added: whether entries were trimmed cannot be told")
        return None
    if extent.max_deleted > start.id:
        return None
    trimmed = extent.added - extent.length
    if start.added is None:
        # Somebody's own id: if anything was ever trimmed and this id lies before what is left, it may be missing.
        return Gap(queue, stream, start.id, extent.first, None) if trimmed > 0 else None
    known_end = extent.added if end.added is None else min(end.added, extent.added)
    lost = min(trimmed, known_end) - start.added
    return Gap(queue, stream, start.id, extent.first, lost) if lost > 0 else None


def report_gap(gap: Gap | None, *, fail: bool) -> None:
    """Raise, or warn."""
    if gap is None:
        return
    if fail:
        raise DataLossError(
            f"{gap}. To go on without them set option failOnDataLoss=false; to keep more of them raise the stream's "
            "limit (events_max_stream_len, dlq_max_stream_len) or read more often"
        )
    logger.warning("%s", gap)


def starting_position(options: ReadOptions, queue: str, extent: Extent) -> Position:
    """Where the first batch of a query starts."""
    if options.starting_timestamp_ms is not None:
        return Position(EntryId(options.starting_timestamp_ms, 0).previous)
    if options.starting == "latest":
        return extent.end
    if isinstance(options.starting, str):
        return Position(BEFORE_ALL)
    return Position(options.starting.get(queue, BEFORE_ALL))


def count_between(start: Position, end: Position, extent: Extent) -> int | None:
    """About how many entries lie between two positions; None when only reading them would tell.

    An estimate: entries deleted by hand are not told apart from trimmed ones, and counters may have been reset.
    """
    if extent.first is None:
        return 0
    is_from_first, is_to_last = start.id < extent.first, end.id >= extent.last_generated
    if is_from_first and is_to_last:
        return extent.length
    if extent.added is None:
        return None
    before = extent.added - extent.length if is_from_first else start.added
    until = extent.added if is_to_last else end.added
    return None if before is None or until is None or until < before else until - before
