"""Pages of jobs at a bounded cost: a cursor, a number of entries and a time limit; the page says how far it looked."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

from tampu.errors import ConfigError, DecodeError
from tampu.inspect.jobs import (
    JobSearch,
    JobState,
    ListedState,
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
    task: str = ""
    #: Text in the ID, the name or the error, upper or lower case.
    words: str = ""

    def __bool__(self) -> bool:
        return bool(self.task or self.words)

    def matches(self, job: JobState) -> bool:
        """Return True if a job matches, which is redacted if the text is searched."""
        if self.task and job.name != self.task:
            return False
        letter = job.dead_letter
        return self.finds(f"{job.id} {job.name} {'' if letter is None else letter.error_text}")

    def finds(self, shown: str) -> bool:
        """Return True if the text is in what is shown."""
        return not self.words or self.words.lower() in shown.lower()


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

    @property
    def is_full(self) -> bool:
        """Return True if the page has room for no more jobs."""
        return len(self.jobs) + len(self.ends) >= PAGE


async def walk(client: Client, keys: QueueKeys, state: str, wanted: Wanted, cursor: str | None = None) -> Walked:
    """Return a page of jobs: the oldest waiting, the first due, the longest running; dead and finished newest first.

    Raises `ConfigError` for a state or a cursor that does not exist.
    """
    if state not in WALKED_STATES:
        raise ConfigError(f"state must be one of {', '.join(WALKED_STATES)}; got {state!r}")
    if cursor is not None and not _CURSOR.fullmatch(cursor):
        raise ConfigError(f"cursor must be one of an earlier page; got {cursor!r}")
    return await _Walk(client, keys, wanted, cursor).run(state)


class _Walk:
    def __init__(self, client: Client, keys: QueueKeys, wanted: Wanted, cursor: str | None) -> None:
        self._client = client
        self._keys = keys
        self._wanted = wanted
        self._cursor = cursor
        self._found = Walked()
        self._deadline = time.monotonic() + MAX_SECS
        self._now_ms = 0
        self._step = STEP if wanted else PAGE + 1

    async def run(self, state: WalkedState) -> Walked:
        self._now_ms = await self._client.server_time_ms()
        if state in ("waiting", "running"):
            if state == "running" or self._cursor is None:
                await self._walk_pending(state)
            if state == "waiting" and not self._found.is_full:
                await self._walk_stream(self._keys.stream, state, self._cursor or await self._first_waiting())
        elif state == "delayed":
            await self._walk_delayed(int(self._cursor or 0) if (self._cursor or "0").isdigit() else 0)
        else:
            await self._walk_stream(
                self._keys.dlq if state == "dead" else self._keys.events, state, self._cursor or "+"
            )
        return self._found

    async def _first_waiting(self) -> str:
        groups = await stream_groups(self._client, self._keys.stream)
        last = max((entry_order(group["last-delivered-id"]) for group in groups), default=None)
        return "-" if last is None else f"({last[0]}-{last[1]}"

    def _is_over(self) -> bool:
        return self._found.looked >= MAX_READ or time.monotonic() > self._deadline

    def _take(self, job: JobState) -> None:
        if self._wanted.matches(redacted_state(job) if self._wanted.words else job):
            self._found.jobs.append(job)

    async def _walk_pending(self, state: ListedState) -> None:
        """Take the jobs that run, or of those that workers have fetched the ones that do not."""
        async for job, is_running in JobSearch(self._client, self._keys)._pending(self._now_ms):
            self._found.looked += 1
            if is_running == (state == "running"):
                self._take(job)
            if self._is_over() or (state == "running" and len(self._found.jobs) >= STEP) or self._found.is_full:
                break
        self._found.jobs.sort(key=lambda job: -(job.age_ms or 0))

    async def _walk_stream(self, stream: str, state: WalkedState, start: str) -> None:
        while True:
            span = (start, "+") if state == "waiting" else (start, "-")
            command = "XRANGE" if state == "waiting" else "XREVRANGE"
            entries = await self._client.call(command, stream, *span, "COUNT", self._step)
            for entry_id, fields in entries:
                self._found.looked += 1
                start = f"({text(entry_id)}"
                self._take_entry(entry_id, fields, state)
                if self._found.is_full:
                    self._found.cursor = start
                    return
            if len(entries) < self._step:
                return
            if self._is_over():
                self._found.cursor = start
                return
            if sum(len(part) for _, fields in entries for part in fields) > LARGE_BYTES:
                self._step = PAGE

    def _take_entry(self, entry_id: bytes, fields: list[bytes], state: WalkedState) -> None:
        if state == "waiting":
            self._take(_in_stream(entry_id, fields, "waiting", self._now_ms))
        elif state == "dead":
            letter = decode_dlq_fields(text(entry_id), fields)
            age_ms = max(self._now_ms - entry_ms(entry_id), 0)
            known = {"dead_letter": letter, "entry_id": letter.dlq_id, "age_ms": age_ms}
            self._take(_state(decoded_job(letter.payload, letter.name), letter.name, "dead", **known))
        else:
            event = decode_event_fields(fields)
            is_wanted = event.name in ENDS and self._wanted.task in ("", event.job_name)
            if is_wanted and self._wanted.finds(f"{event.job_id} {event.job_name} {event.fields.get('reason', '')}"):
                self._found.ends.append((text(entry_id), redacted_event(event)))

    async def _walk_delayed(self, start: int) -> None:
        while True:
            last = start + self._step - 1
            flat = await self._client.call("ZRANGE", self._keys.delayed, start, last, "WITHSCORES")
            for member, score in zip(flat[::2], flat[1::2], strict=True):
                self._found.looked += 1
                start += 1
                name, job = decoded_member(member)
                age_ms = None if job is None else max(self._now_ms - job.created_at_ms, 0)
                self._take(_state(job, name, "delayed", run_at_ms=score_ms(score), age_ms=age_ms))
                if self._found.is_full:
                    self._found.cursor = str(start)
                    return
            if len(flat) < 2 * self._step:
                return
            if self._is_over():
                self._found.cursor = str(start)
                return


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
