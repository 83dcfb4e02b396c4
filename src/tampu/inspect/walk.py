"""Pages of jobs at a bounded cost: a cursor, a number of entries and a time limit; the page says how far it looked."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from tampu.errors import ConfigError, DecodeError
from tampu.inspect.jobs import (
    JobSearch,
    JobState,
    _in_stream,
    _state,
    decoded_job,
    decoded_member,
)
from tampu.inspect.streams import stream_groups, text
from tampu.inspect.views import redacted_event, redacted_state
from tampu.wire.dlq import decode_dlq_fields
from tampu.wire.entry import entry_ms, entry_order, score_ms
from tampu.wire.events import QueueEvent, decode_event_fields
from tampu.wire.limits import CLOSED
from tampu.wire.ulid import decode_ulid_time

if TYPE_CHECKING:
    from tampu.redis.client import Client
    from tampu.wire.keys import QueueKeys

#: States that can be walked: `finished` jobs are found in the events.
WalkedState = Literal["waiting", "running", "delayed", "dead", "finished"]
WALKED_STATES: tuple[WalkedState, ...] = get_args(WalkedState)
#: Jobs on one page, and entries read in one call.
PAGE = 50
STEP = 500
#: Most entries that one walk reads, and longest time that it takes, in seconds.
MAX_READ = 10_000
MAX_SECS = 0.25
#: Events that show that a job has ended.
ENDS = ("completed", "cancelled", "dlq")
#: Most bytes of one page of entries: a page of large jobs is cut into smaller steps.
LARGE_BYTES = 4 * 1024 * 1024

_CURSOR = re.compile(r"\(?[0-9]{1,20}(?:-[0-9]{1,20})?")


@dataclass(frozen=True, slots=True)
class Wanted:
    """A filter of jobs: all of what is given must match, as it is shown: a redacted text is not searched."""

    #: Name of the task.
    task: str | None = None
    #: Text in the ID, the name or the error, upper or lower case.
    words: str = ""
    #: Minimum time since a running job started, a dead one failed, or any other was added.
    older_than_ms: int | None = None

    def __bool__(self) -> bool:
        return self != Wanted()

    def matches(self, job: JobState) -> bool:
        """Return True if a job matches."""
        if self.task is not None and job.name != self.task:
            return False
        if self.older_than_ms is not None and (job.age_ms is None or job.age_ms < self.older_than_ms):
            return False
        if not self.words:
            return True
        letter = redacted_state(job).dead_letter
        return self.finds(f"{job.id} {job.name} {'' if letter is None else letter.error_text}")

    def finds(self, shown: str) -> bool:
        """Return True if the text is in what is shown."""
        return self.words.lower() in shown.lower()


@dataclass(slots=True)
class Walked:
    """One page of jobs."""

    jobs: list[JobState] = field(default_factory=list)
    #: Finished jobs: the ID of each event, and the event.
    ends: list[tuple[str, QueueEvent]] = field(default_factory=list)
    #: Where the next page starts; None at the end.
    cursor: str | None = None
    #: Entries that were read.
    looked: int = 0


class Walk:
    """Finds the jobs of one queue in one state, page by page.

    The oldest waiting jobs first, the first due, the longest running; dead and finished ones newest first unless
    `oldest_first`.
    """

    def __init__(
        self, search: JobSearch, state: WalkedState, wanted: Wanted, *, limit: int = PAGE, oldest_first: bool = False
    ) -> None:
        self._search = search
        self._client = search.client
        self._state = state
        self._wanted = wanted
        self._limit = limit
        self._forward = state == "waiting" or oldest_first
        self._now_ms = 0
        self._found = Walked()
        self._deadline = 0.0
        #: The groups of a limited queue.
        self._closed: list[bytes] = []

    async def page(self, cursor: str | None = None) -> Walked:
        """Return a page of jobs. Raises `ConfigError` for a cursor that is not one of an earlier page."""
        if cursor is not None and not _CURSOR.fullmatch(cursor):
            raise ConfigError(f"cursor must be one of an earlier page; got {cursor!r}")
        keys = self._search.keys
        self._found, self._deadline = Walked(), time.monotonic() + MAX_SECS
        self._now_ms = await self._client.server_time_ms()
        if self._state == "running" or (self._state == "waiting" and cursor is None):
            await self._walk_pending()
        if self._state == "waiting":
            first = await self._first_waiting()
            await self._walk_stream(keys.stream, cursor or first)
        elif self._state == "delayed":
            await self._walk_delayed(int(cursor) if cursor and cursor.isdigit() else 0)
        elif self._state != "running":
            await self._walk_stream(keys.dlq if self._state == "dead" else keys.events, cursor or "+-"[self._forward])
        return self._found

    async def _first_waiting(self) -> str:
        groups = await stream_groups(self._client, self._search.keys.stream)
        self._closed = [group["name"] for group in groups if text(group["last-delivered-id"]) == CLOSED]
        open_groups = [group for group in groups if group["name"] not in self._closed]
        last = max((entry_order(group["last-delivered-id"]) for group in open_groups), default=None)
        return "-" if last is None else f"({last[0]}-{last[1]}"

    async def _held(self, stream: str, entries: list[Any]) -> set[bytes]:
        """Return which entries of a page were delivered: of a limited queue, all others wait."""
        held: set[bytes] = set()
        for group in self._closed if entries else ():
            page = (entries[0][0], entries[-1][0], len(entries))
            held.update(pending[0] for pending in await self._client.call("XPENDING", stream, group, *page))
        return held

    def _is_full(self) -> bool:
        return len(self._found.jobs) + len(self._found.ends) >= self._limit

    def _is_over(self) -> bool:
        return self._is_full() or self._found.looked >= MAX_READ or time.monotonic() > self._deadline

    @property
    def _step(self) -> int:
        return STEP if self._wanted else min(STEP, self._limit + 1)

    def _take(self, job: JobState) -> None:
        if self._wanted.matches(job):
            self._found.jobs.append(job)

    async def _walk_pending(self) -> None:
        """Take the jobs that run; for waiting ones, of those that workers have fetched the ones that do not run yet."""
        async for job, is_running in self._search._pending(self._now_ms):
            self._found.looked += 1
            if is_running == (self._state == "running"):
                self._take(job if is_running else replace(job, state="waiting"))
            if self._found.looked >= MAX_READ:
                break
        if self._state == "running":
            self._found.jobs.sort(key=lambda job: -(job.age_ms or 0))
            del self._found.jobs[max(self._limit, STEP) :]

    async def _walk_stream(self, stream: str, start: str) -> None:
        command, end = ("XRANGE", "+") if self._forward else ("XREVRANGE", "-")
        step = self._step
        while True:
            if self._is_over():
                self._found.cursor = start
                return
            entries = await self._client.call(command, stream, start, end, "COUNT", step)
            held = await self._held(stream, entries) if self._closed else ()
            for entry_id, fields in entries:
                self._found.looked += 1
                start = f"({text(entry_id)}"
                if entry_id not in held:
                    self._take_entry(entry_id, fields)
                if self._is_full():
                    self._found.cursor = start
                    return
            if len(entries) < step:
                return
            if sum(len(part) for _, fields in entries for part in fields) > LARGE_BYTES:
                step = PAGE

    def _take_entry(self, entry_id: bytes, fields: list[bytes]) -> None:
        if self._state == "waiting":
            self._take(_in_stream(entry_id, fields, "waiting", self._now_ms))
        elif self._state == "dead":
            letter = decode_dlq_fields(text(entry_id), fields)
            age_ms = max(self._now_ms - entry_ms(entry_id), 0)
            job = decoded_job(letter.payload, letter.name)
            known = {"dead_letter": letter, "entry_id": letter.dlq_id, "age_ms": age_ms}
            self._take(_state(job, letter.name, "dead", **known))
        else:
            event = redacted_event(decode_event_fields(fields))
            is_wanted = event.name in ENDS and self._wanted.task in (None, event.job_name)
            if is_wanted and self._wanted.finds(f"{event.job_id} {event.job_name} {event.fields.get('reason', '')}"):
                self._found.ends.append((text(entry_id), event))

    async def _walk_delayed(self, start: int) -> None:
        step, flat = self._step, [b""]
        while flat and not self._is_over():
            last = start + step - 1
            flat = await self._client.call("ZRANGE", self._search.keys.delayed, start, last, "WITHSCORES")
            for member, score in zip(flat[::2], flat[1::2], strict=True):
                self._found.looked += 1
                start += 1
                name, job = decoded_member(member)
                age_ms = None if job is None else max(self._now_ms - job.created_at_ms, 0)
                self._take(_state(job, name, "delayed", run_at_ms=score_ms(score), age_ms=age_ms))
                if self._is_full():
                    break
            if len(flat) < 2 * step and not self._is_full():
                return
        self._found.cursor = str(start) if flat else None


async def read_events(client: Client, keys: QueueKeys, job_id: str) -> tuple[list[tuple[str, QueueEvent]], bool]:
    """Return a job's events, oldest first, each with its ID, and False if not all events since its creation were read.

    Two bounded walks: forward from the time in the job's ID, and back from the end.
    """
    try:
        start = str(max(decode_ulid_time(job_id) - 60_000, 0))
    except DecodeError:
        start = "-"
    found: dict[bytes, QueueEvent] = {}
    needle = job_id.encode(errors="replace")

    async def search(command: str, first: str, last: str, deadline: float) -> str | None:
        """Search one way; return where it stopped, None at the end."""
        for _ in range(MAX_READ // STEP):
            entries = await client.call(command, keys.events, first, last, "COUNT", STEP)
            for entry_id, fields in entries:
                if needle in fields and (event := decode_event_fields(fields)).job_id == job_id:
                    found[entry_id] = event
            if len(entries) < STEP:
                return None
            first = f"({text(entries[-1][0])}"
            if time.monotonic() > deadline:
                break
        return first

    left = await search("XRANGE", start, "+", time.monotonic() + MAX_SECS / 2)
    if left is not None:
        left = await search("XREVRANGE", "+", left, time.monotonic() + MAX_SECS / 2)
    return [(text(entry_id), found[entry_id]) for entry_id in sorted(found, key=entry_order)], left is None
