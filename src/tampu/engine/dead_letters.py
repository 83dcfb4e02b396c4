"""Dead letters of a queue: look at them, put them back, throw them away; by id or by what they have in common."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tampu.checks import check_int, refuse
from tampu.engine.window import MAX_BYTES
from tampu.errors import DecodeError
from tampu.redis.scripts import load_script
from tampu.wire.dlq import DlqEntry, decode_dlq_fields
from tampu.wire.envelope import decode_job, encode_job

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from tampu.redis.pipe import Pipe
    from tampu.wire.keys import QueueKeys

REPLAY = load_script("replay")

#: Letters read, and moved, in one call.
PAGE = 200
#: How long the counts of replays are kept after the last one, in seconds.
REPLAY_COUNTS_TTL_SECS = 30 * 24 * 3600


class ReplayCount(int):
    """How many letters were moved. `skipped`: of those looked at, the ones whose envelope cannot be read;
    `queue_is_full`: whether it stopped because the stream has no room."""

    skipped: int = 0
    queue_is_full: bool = False


_ENTRY_ID = re.compile(r"[0-9]{1,20}-[0-9]{1,20}")


@dataclass(frozen=True, kw_only=True, slots=True)
class DlqFilter:
    """Which letters are meant; what is None does not matter."""

    ids: Sequence[str] | None = None
    reason: str | None = None
    name: str | None = None
    #: Only letters at least so old, in milliseconds, by the server's clock.
    older_than_ms: int | None = None

    def __post_init__(self) -> None:
        for dlq_id in self.ids or ():
            if isinstance(self.ids, str) or not isinstance(dlq_id, str) or not _ENTRY_ID.fullmatch(dlq_id):
                raise refuse("ids", self.ids, "a list of ids of dead letters, such as ['1700000000000-0']")
        if self.older_than_ms is not None:
            check_int("older_than_ms", self.older_than_ms)

    def matches(self, entry: DlqEntry) -> bool:
        """Whether reason and name fit."""
        return (self.reason is None or entry.reason == self.reason) and (self.name is None or entry.name == self.name)


class DeadLetters:
    """The dlq stream of one queue."""

    def __init__(self, pipe: Pipe, keys: QueueKeys, max_stream_len: int) -> None:
        self._pipe = pipe
        self._keys = keys
        self._max_stream_len = max_stream_len

    async def peek(self, limit: int, wanted: DlqFilter) -> list[DlqEntry]:
        """Up to `limit` letters, oldest first."""
        found: list[DlqEntry] = []
        async for page in self._pages(wanted, limit):
            found += page[: limit - len(found)]
            if len(found) >= limit:
                break
        return found

    async def replay(self, limit: int, wanted: DlqFilter) -> ReplayCount:
        """Move up to `limit` letters back, oldest first. Those that cannot be read stay and never block the others."""
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
                letters.append((entry.dlq_id, encode_job(job.with_attempt(0)), entry.name, job.id))
            for some in _slices(letters):
                count, is_full = await self._move(some)
                moved += count
                queue_is_full = bool(is_full)
                if queue_is_full:
                    break
            if queue_is_full or moved >= limit:
                break
        result = ReplayCount(moved)
        result.skipped = skipped
        result.queue_is_full = queue_is_full
        return result

    async def _move(self, letters: list[tuple[str, bytes, str, str]]) -> tuple[int, int]:
        keys = (self._keys.dlq, self._keys.stream, self._keys.replays)
        arguments = [part for letter in letters for part in letter]
        # Sent again after a lost reply it finds the letters gone and moves nothing twice; only the count is lost.
        reply = await self._pipe.run(REPLAY, keys, [self._max_stream_len, REPLAY_COUNTS_TTL_SECS, *arguments])
        return reply[0], reply[1]

    async def remove(self, limit: int, wanted: DlqFilter) -> int:
        """Throw away up to `limit` letters, oldest first; how many there were."""
        removed = 0
        async for page in self._pages(wanted, limit):
            ids = [entry.dlq_id for entry in page[: limit - removed]]
            if ids:
                removed += await self._pipe.call("XDEL", self._keys.dlq, *ids)
            if removed >= limit:
                break
        return removed

    async def _pages(self, wanted: DlqFilter, limit: int) -> AsyncIterator[list[DlqEntry]]:
        """The letters that match, page by page; the walk goes on behind what it has seen, whatever is done to it."""
        if limit <= 0:
            return
        if wanted.ids is not None:
            for dlq_id in wanted.ids:
                yield await self._range(dlq_id, dlq_id, 1, wanted)
            return
        end = "+"
        if wanted.older_than_ms is not None:
            seconds, microseconds = await self._pipe.call("TIME")
            end = str(max(int(seconds) * 1000 + int(microseconds) // 1000 - wanted.older_than_ms, 0))
        start = "-"
        while True:
            entries = await self._pipe.call("XRANGE", self._keys.dlq, start, end, "COUNT", PAGE)
            yield _decoded(entries, wanted)
            if len(entries) < PAGE:
                return
            start = "(" + entries[-1][0].decode()

    async def _range(self, start: str, end: str, count: int, wanted: DlqFilter) -> list[DlqEntry]:
        return _decoded(await self._pipe.call("XRANGE", self._keys.dlq, start, end, "COUNT", count), wanted)


def _slices(letters: list[tuple[str, bytes, str, str]]) -> Iterator[list[tuple[str, bytes, str, str]]]:
    """Letters for one script call each: a larger one travels alone."""
    some: list[tuple[str, bytes, str, str]] = []
    size = 0
    for letter in letters:
        if some and size + len(letter[1]) > MAX_BYTES:
            yield some
            some, size = [], 0
        some.append(letter)
        size += len(letter[1])
    if some:
        yield some


def _decoded(entries: list[tuple[bytes, list[bytes]]], wanted: DlqFilter) -> list[DlqEntry]:
    letters = (decode_dlq_fields(entry_id.decode(), fields) for entry_id, fields in entries)
    return [letter for letter in letters if wanted.matches(letter)]
