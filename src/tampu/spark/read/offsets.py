"""Positions in a stream: entry IDs, the extent of a stream, and entries that were trimmed before they were read."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from tampu.base.checks import MAX_U64
from tampu.errors import ConfigError, Error
from tampu.redis.faults import ServerError
from tampu.wire.entry import entry_order

if TYPE_CHECKING:
    from tampu.spark.options import ReadOptions, Stream
    from tampu.spark.server import QueueServer
    from tampu.wire.keys import QueueKeys

logger = logging.getLogger("tampu.spark")


class EntryId(NamedTuple):
    """An entry ID; compares in the order of the stream."""

    ms: int
    seq: int

    def __str__(self) -> str:
        return f"{self.ms}-{self.seq}"

    @property
    def next(self) -> EntryId:
        """The next higher ID."""
        return EntryId(self.ms, self.seq + 1) if self.seq < MAX_U64 else EntryId(self.ms + 1, 0)

    @property
    def previous(self) -> EntryId:
        """The next lower ID; the lowest one returns itself."""
        if self.seq:
            return EntryId(self.ms, self.seq - 1)
        return EntryId(self.ms - 1, MAX_U64) if self.ms else self


#: Lower than every entry: no entry has this ID.
BEFORE_ALL = EntryId(0, 0)


def parse_entry_id(text: str | bytes, where: str = "entry id") -> EntryId:
    """Parse an ID such as `1700000000000-3`; `1700000000000` means `1700000000000-0`. A `ConfigError` names `where`."""
    shown = text.decode(errors="replace") if isinstance(text, bytes) else text
    ms, dash, seq = shown.partition("-")
    if not (ms.isascii() and ms.isdigit() and (not dash or (seq.isascii() and seq.isdigit()))):
        raise ConfigError(f"{where} must be a stream ID such as 1700000000000-0; got {shown!r}")
    found = EntryId(*entry_order(shown))
    if max(found) > MAX_U64:
        raise ConfigError(f"{where} must be a stream ID of two 64-bit numbers; got {shown!r}")
    return found


class DataLossError(Error):
    """Entries were trimmed before they were read, and `failOnDataLoss` is true."""

    code = "CMQ-030"


@dataclass(frozen=True, slots=True)
class Position:
    """Position up to which a queue has been read, and the partitions of the micro-batch that ends here."""

    #: ID of the last entry read.
    id: EntryId
    #: Number of entries ever added up to `id`; None if unknown.
    added: int | None = None
    #: Last IDs of all partitions but the final one. None in checkpoints that were written before cuts were stored.
    cuts: tuple[EntryId, ...] | None = None
    #: Number of entries that were added to former streams of the queue, which were deleted and created again.
    former: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the form that Spark stores in a checkpoint."""
        found: dict[str, Any] = {"id": str(self.id)}
        if self.added is not None:
            found["added"] = self.added
        if self.cuts is not None:
            found["cuts"] = [str(cut) for cut in self.cuts]
        if self.former:
            found["former"] = self.former
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
            value.get("former", 0),
        )


#: Stands for the end of a stream, wherever that is when a query starts.
LATEST = Position(EntryId(MAX_U64, MAX_U64))


@dataclass(frozen=True, slots=True)
class Extent:
    """The contents of a stream at one moment."""

    length: int
    #: None if the stream is empty.
    first: EntryId | None
    #: The ID assigned last, even if that entry is gone.
    last_generated: EntryId
    #: Entries ever added; None on servers before Redis 7.0.
    added: int | None
    #: Highest ID that was deleted by XDEL; trimming does not count.
    max_deleted: EntryId

    @property
    def end(self) -> Position:
        """The position after all entries."""
        return Position(self.last_generated, self.added)


EMPTY = Extent(0, None, BEFORE_ALL, 0, BEFORE_ALL)


def stream_key(keys: QueueKeys, stream: Stream) -> str:
    """Return the key of a stream."""
    return {"events": keys.events, "dlq": keys.dlq, "jobs": keys.stream}[stream]


def extent_of(server: QueueServer, key: str) -> Extent:
    """Return the current extent of a stream; a missing key is empty."""
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
    """Entries that were gone before they were read; `entries` is None if they cannot be counted."""

    queue: str
    stream: str
    start: EntryId
    first: EntryId | None
    entries: int | None
    #: Whether the stream was deleted and created again.
    is_new_stream: bool = False

    def __str__(self) -> str:
        where = f"{self.stream} of queue {self.queue!r}"
        what = f"requested were the entries after {self.start}, the first entry present is {self.first or 'none'}"
        if self.is_new_stream:
            return f"{where}: the stream was deleted and created again; {what}"
        count = "an unknown number of entries were" if self.entries is None else f"{self.entries} entries were"
        return f"{where}: {count} trimmed or deleted before they were read; {what}"


def is_recreated(start: Position, extent: Extent) -> bool:
    """Return whether the stream was deleted and created again since `start`, as far as its IDs and counters say."""
    if extent.last_generated == BEFORE_ALL:
        return False  # the key is missing: nothing to read until an entry is added
    if extent.last_generated < start.id:
        return True
    if extent.added is None or start.added is None:
        return False
    # All entries up to `start` are gone: of the stream they were read from, at least as many must be.
    is_read_gone = extent.first is not None and extent.first > start.id
    return extent.added < start.added or (is_read_gone and extent.added - extent.length < start.added)


def find_gap(queue: str, stream: str, start: Position, end: Position, extent: Extent) -> Gap | None:
    """Return what is missing between two positions, as far as the server's counters say.

    Dead letters and jobs are deleted on purpose, by replays and by workers: after the first deletion behind `start`
    nothing is claimed about them. Events are not.
    """
    if start.id == BEFORE_ALL:
        return None
    if is_recreated(start, extent):
        return Gap(queue, stream, start.id, extent.first, None, is_new_stream=True)
    if start.id >= end.id or (extent.first is not None and extent.first <= start.id):
        return None
    if extent.added is None:
        if extent.first is None or extent.first > start.id.next:
            logger.debug("this server does not count added entries: trimmed entries cannot be detected")
        return None
    if stream != "events" and extent.max_deleted > start.id:
        return None
    gone = extent.added - extent.length
    if start.added is None:
        # An ID given by the user: if anything was ever trimmed, entries between it and the first one may be gone.
        return Gap(queue, stream, start.id, extent.first, None) if gone > 0 else None
    known_end = extent.added if end.added is None else min(end.added, extent.added)
    lost = min(gone, known_end) - start.added
    return Gap(queue, stream, start.id, extent.first, lost) if lost > 0 else None


def report_gap(gap: Gap | None, *, fail: bool) -> None:
    """Raise `DataLossError`, or log a warning."""
    if gap is None:
        return
    if fail:
        raise DataLossError(
            f"{gap}. To continue without them, set option failOnDataLoss=false. To keep more entries, raise the limit "
            "of the stream (events_max_stream_len, dlq_max_stream_len) or read more often"
        )
    logger.warning("%s", gap)


def starting_position(options: ReadOptions, queue: str, extent: Extent) -> Position:
    """Return where the first batch of a query starts."""
    if options.starting_timestamp_ms is not None:
        return Position(EntryId(options.starting_timestamp_ms, 0).previous)
    if options.starting == "latest":
        return extent.end
    if isinstance(options.starting, str):
        return Position(BEFORE_ALL)
    start = options.starting.get(queue, Position(BEFORE_ALL))
    return extent.end if start == LATEST else start


def count_between(start: Position, end: Position, extent: Extent) -> int | None:
    """Return about how many entries lie between two positions; None if that is unknown.

    An estimate: entries deleted by XDEL count like trimmed ones, and counters may have been reset.
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
