"""Reads, replays and removes the dead letters of a queue, chosen by ID, reason, name, error or age."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

from tampu.base.checks import check_delay_ms, check_int, check_text, invalid
from tampu.base.limits import split_into_calls
from tampu.errors import DecodeError
from tampu.redis import calls
from tampu.wire.dlq import DlqEntry, DlqReason, decode_dlq_fields
from tampu.wire.envelope import decode_job, encode_job

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from datetime import timedelta

    from tampu.redis.client import Client
    from tampu.wire.keys import QueueKeys

#: Letters read in one call.
PAGE = 200
#: How long the replay counts are kept after the last replay, in seconds.
REPLAY_COUNTS_TTL_SECS = 30 * 24 * 3600


class ReplayCount(int):
    """The number of letters moved. `skipped` counts letters with an unreadable envelope, which were left in place;
    `queue_is_full` is True if the replay stopped because the queue is full."""

    skipped: int = 0
    queue_is_full: bool = False


REASONS = tuple(reason.value for reason in DlqReason)
_ENTRY_ID = re.compile(r"[0-9]{1,20}-[0-9]{1,20}")


class DlqQuery(TypedDict, total=False):
    """Filters for dead letters. Without any, a call applies to all of them."""

    #: Only letters with these IDs.
    ids: Sequence[str] | None
    #: Only letters with this `DlqReason`, such as "retries_exhausted".
    reason: str | None
    #: Only jobs with this name.
    name: str | None
    #: Only letters with this type of error, such as "ConnectionError".
    error_type: str | None
    #: Only letters whose error contains this text, upper or lower case.
    match: str | None
    #: Only letters at least this old: a timedelta or seconds.
    older_than: timedelta | float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class DlqFilter:
    """Filters dead letters. A field that is None matches every letter."""

    #: IDs of letters. They are read directly, in this order, whatever their age.
    ids: Sequence[str] | None = None
    #: IDs of letters or of the jobs in them; to find a job's, the whole stream is read.
    any_ids: Sequence[str] | None = None
    reason: str | None = None
    name: str | None = None
    error_type: str | None = None
    #: Text in the error, upper or lower case.
    match: str | None = None
    #: Only letters at least this old, in milliseconds, by the server's clock.
    older_than_ms: int | None = None

    def __post_init__(self) -> None:
        for dlq_id in self.ids or ():
            if isinstance(self.ids, str) or not isinstance(dlq_id, str) or not _ENTRY_ID.fullmatch(dlq_id):
                raise invalid("ids", self.ids, "a list of dead-letter IDs, such as ['1700000000000-0']")
        if self.reason is not None and self.reason not in REASONS:
            raise invalid("reason", self.reason, f"one of {', '.join(REASONS)}")
        for field, value in (("name", self.name), ("error_type", self.error_type), ("match", self.match)):
            if value is not None:
                check_text(field, value, blank_ok=True)
        if self.older_than_ms is not None:
            check_int("older_than_ms", self.older_than_ms)

    @classmethod
    def of(cls, query: DlqQuery) -> DlqFilter:
        """Return the filter for a call's arguments. Raises `ConfigError` for a value that is not allowed."""
        for unknown in query.keys() - DlqQuery.__annotations__.keys():
            raise TypeError(f"unknown filter {unknown!r}; allowed: {', '.join(DlqQuery.__annotations__)}")
        older_than = query.get("older_than")
        older_than_ms = None if older_than is None else check_delay_ms(older_than, "older_than")
        compared = {field: query.get(field) for field in ("ids", "reason", "name", "error_type", "match")}
        return cls(**compared, older_than_ms=older_than_ms)  # type: ignore[arg-type]  # the types of the TypedDict

    @classmethod
    def by_any_id(cls, ids: Sequence[str], **others: Any) -> DlqFilter:
        """Return a filter for IDs of letters or of jobs. It is fast if all of them look like IDs of letters."""
        if all(_ENTRY_ID.fullmatch(one) for one in ids):
            return cls(ids=ids or None, **others)
        return cls(any_ids=ids, **others)

    @property
    def compares(self) -> bool:
        """Return True if a letter must be read to know whether it matches."""
        return any(one is not None for one in (self.reason, self.name, self.error_type, self.match, self.any_ids))

    def matches(self, entry: DlqEntry) -> bool:
        """Return True if everything but the age matches."""
        return (
            (self.reason is None or entry.reason == self.reason)
            and (self.name is None or entry.name == self.name)
            and (self.error_type is None or entry.error_type == self.error_type)
            and (self.match is None or self.match.lower() in _error_of(entry).lower())
            and (self.any_ids is None or entry.dlq_id in self.any_ids or _job_id_of(entry) in self.any_ids)
        )


class DeadLetters:
    """The dead letters of one queue."""

    def __init__(self, client: Client, keys: QueueKeys, max_stream_len: int) -> None:
        self._client = client
        self._keys = keys
        self._max_stream_len = max_stream_len

    async def peek(self, limit: int, wanted: DlqFilter) -> list[DlqEntry]:
        """Return up to `limit` letters, oldest first."""
        found: list[DlqEntry] = []
        async for page in self._pages(wanted, limit):
            found += page[: limit - len(found)]
            if len(found) >= limit:
                break
        return found

    async def count(self, wanted: DlqFilter) -> int:
        """Return the number of letters that match."""
        if wanted == DlqFilter():
            return int(await self._client.call("XLEN", self._keys.dlq))
        return sum([len(page) async for page in self._pages(wanted)])

    async def replay(
        self, limit: int, wanted: DlqFilter, on_progress: Callable[[int], None] | None = None
    ) -> ReplayCount:
        """Move up to `limit` letters back into the queue, oldest first. Unreadable ones are skipped.

        `on_progress` is called with the number moved so far.
        """
        moved = skipped = 0
        queue_is_full = False
        async for page in self._pages(wanted, limit):
            letters: list[tuple[str, bytes, str, str]] = []
            for entry in page:
                if moved + len(letters) >= limit:
                    break
                try:
                    job = decode_job(entry.payload)
                except DecodeError:
                    skipped += 1
                    continue
                letters.append((entry.dlq_id, encode_job(job.for_replay()), entry.name, job.id))
            for some in split_into_calls((letter, len(letter[1])) for letter in letters):
                count, queue_is_full = await self._move(some)
                moved += count
                if on_progress is not None:
                    on_progress(moved)
                if queue_is_full:
                    break
            if queue_is_full or moved >= limit:
                break
        result = ReplayCount(moved)
        result.skipped = skipped
        result.queue_is_full = queue_is_full
        return result

    async def _move(self, letters: list[tuple[str, bytes, str, str]]) -> tuple[int, bool]:
        # A cancel that came too late, when the job had failed for good, must not cancel the replayed job.
        await self._client.call("DEL", *(self._keys.cancel_mark(job_id) for _, _, _, job_id in letters))
        return await calls.replay(
            self._client,
            *(self._keys.dlq, self._keys.stream, self._keys.replays),
            max_stream_len=self._max_stream_len,
            counts_ttl_secs=REPLAY_COUNTS_TTL_SECS,
            letters=letters,
        )

    async def remove(self, limit: int, wanted: DlqFilter, on_progress: Callable[[int], None] | None = None) -> int:
        """Delete up to `limit` letters, oldest first. Return how many. `on_progress` is called as in `replay`."""
        removed = 0
        async for page in self._pages(wanted, limit):
            ids = [entry.dlq_id for entry in page[: limit - removed]]
            if ids:
                removed += await self._client.call("XDEL", self._keys.dlq, *ids)
                if on_progress is not None:
                    on_progress(removed)
            if removed >= limit:
                break
        return removed

    async def _pages(self, wanted: DlqFilter, limit: int = PAGE) -> AsyncIterator[list[DlqEntry]]:
        """Yield the matching letters, page by page. Letters of earlier pages may be moved or deleted meanwhile.

        A letter may be as large as its job, so the first page has at most `limit` letters.
        """
        if limit <= 0:
            return
        if wanted.ids is not None:
            for dlq_id in wanted.ids:
                yield _decoded(await self._client.call("XRANGE", self._keys.dlq, dlq_id, dlq_id), wanted)
            return
        end = "+"
        if wanted.older_than_ms is not None:
            end = str(max(await self._client.server_time_ms() - wanted.older_than_ms, 0))
        start = "-"
        size = PAGE if wanted.compares else min(limit, PAGE)
        while True:
            entries = await self._client.call("XRANGE", self._keys.dlq, start, end, "COUNT", size)
            yield _decoded(entries, wanted)
            if len(entries) < size:
                return
            size = min(2 * size, PAGE)  # the caller needs more, such as after letters that cannot be replayed
            start = "(" + entries[-1][0].decode()


def _decoded(entries: list[tuple[bytes, list[bytes]]], wanted: DlqFilter) -> list[DlqEntry]:
    letters = (decode_dlq_fields(entry_id.decode(), fields) for entry_id, fields in entries)
    return [letter for letter in letters if wanted.matches(letter)]


def _error_of(letter: DlqEntry) -> str:
    said = letter.error or letter.detail or ""
    return f"{letter.error_type}: {said}" if letter.error_type else said


def _job_id_of(letter: DlqEntry) -> str | None:
    try:
        return decode_job(letter.payload).id
    except DecodeError:
        return None
