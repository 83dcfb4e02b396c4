"""Finds the current state of a job without reading the whole stream of jobs, and lists jobs by state.

A search checks the result, the index of delayed jobs and the pending entries, then the streams around the time in the
job's ID and at their ends. Dead letters are searched completely, from the newest to the age of the job.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from tampu.base.clock import wall_clock_ms
from tampu.errors import DecodeError, ResultNotStored
from tampu.inspect.snapshot import heartbeat_age_ms, read_heartbeats
from tampu.inspect.streams import stream_entries, stream_groups, text
from tampu.wire.dlq import DlqEntry, decode_dlq_fields
from tampu.wire.entry import decode_delayed_member, due_field, entry_ms, read_job_fields, score_ms
from tampu.wire.envelope import decode_job
from tampu.wire.heartbeat import decode_heartbeat
from tampu.wire.payload import decode_result
from tampu.wire.ulid import decode_ulid_time

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tampu.redis.client import Client
    from tampu.wire.codec import QueueCodec
    from tampu.wire.heartbeat import Heartbeat
    from tampu.wire.job import Job
    from tampu.wire.keys import QueueKeys

State = Literal["waiting", "delayed", "running", "done", "dead", "cancelled", "unknown"]
ListedState = Literal["waiting", "running", "delayed", "dead"]
LISTED_STATES: tuple[ListedState, ...] = ("waiting", "running", "delayed", "dead")

#: Maximum number of pages of each search through a stream.
MAX_PAGES = 20
#: Entries, or members of the delayed set, read in one call.
PAGE = 500
#: Maximum number of pages of a search through the delayed set, for jobs of other implementations.
MAX_DELAYED_PAGES = 200
#: How far clocks may be apart, in milliseconds.
CLOCK_SKEW_MS = 5000


@dataclass(frozen=True, kw_only=True, slots=True)
class JobState:
    """The current state of a job. `unknown` means that it finished without storing a result, or never existed."""

    id: str
    state: State
    name: str = ""
    #: Number of runs so far.
    attempt: int | None = None
    created_at_ms: int | None = None
    #: Delayed: when it runs, in epoch milliseconds.
    run_at_ms: int | None = None
    #: Running, or waiting in a worker that has fetched it: the consumer group, the worker, and how long ago it last
    #: renewed the lease, in milliseconds.
    group: str | None = None
    worker: str | None = None
    idle_ms: int | None = None
    #: Running: the progress that this attempt last reported, from 0 to 1, and its note. None if it reported none.
    progress: float | None = None
    progress_note: str | None = None
    #: Done: the stored result.
    result: Any = None
    #: Dead: the dead letter.
    dead_letter: DlqEntry | None = None
    #: How long it has been running, how long ago it failed (dead), or was added; in milliseconds. Set in lists of jobs.
    age_ms: int | None = None
    #: Cancelled: the reason. Done: why there is no result, if it could not be stored.
    reason: str | None = None
    #: ID of its entry in the stream of waiting and running jobs, or of dead letters.
    entry_id: str | None = None


class JobSearch:
    """Finds and lists the jobs of one queue."""

    def __init__(self, client: Client, keys: QueueKeys, codec: QueueCodec | None = None) -> None:
        self.client = client
        self.keys = keys
        #: Opens results.
        self.codec = codec

    async def job(self, job_id: str) -> JobState:
        """Return the state of a job, checking the cheapest places first."""
        keys = self.keys
        result, mark = await self.client.call("MGET", keys.result(job_id), keys.cancel_mark(job_id))
        if result is not None:
            return self._done(result, job_id)
        if mark is not None and mark.startswith(b"c"):
            return JobState(id=job_id, state="cancelled", reason=mark[1:].decode(errors="replace"))
        delayed = await self._delayed(job_id, await self.delayed_member(job_id))
        if delayed is not None:
            return delayed
        found = await self._find_in_stream(job_id)
        if found is not None:
            return found
        letter = await self.find_dead_letter(job_id, max_pages=math.inf)
        if letter is not None:
            name, attempts = letter.name, letter.attempts
            return JobState(id=job_id, state="dead", name=name, attempt=attempts, dead_letter=letter)
        # Other implementations store no index of generated ids and of retries, so the set must be searched.
        delayed = await self._delayed(job_id, await self.find_delayed_member(job_id, MAX_DELAYED_PAGES))
        if delayed is not None:
            return delayed
        # A job that finished during the search had left each place before it was checked.
        result = await self.client.call("GET", keys.result(job_id))
        return JobState(id=job_id, state="unknown") if result is None else self._done(result, job_id)

    def _done(self, packed: bytes, job_id: str) -> JobState:
        result: Any = packed
        try:
            result = decode_result(packed if self.codec is None else self.codec.open_result(packed, job_id))
        except ResultNotStored as error:
            return JobState(id=job_id, state="done", reason=str(error))
        except DecodeError:
            pass
        return JobState(id=job_id, state="done", result=result)

    async def find_dead_letter(self, job_id: str, max_pages: float = MAX_PAGES) -> DlqEntry | None:
        """Return the newest dead letter of a job, or None. It cannot be older than the job.

        All letters since then are searched, 50,000 of them in about 0.6 s, or `max_pages` pages.
        """
        start = str(await self._born_ms(job_id) or "-")
        needle = job_id.encode(errors="replace")
        walk = stream_entries(self.client, self.keys.dlq, start, newest_first=True, page=PAGE, max_pages=max_pages)
        async for dlq_id, fields in walk:
            if not any(needle in field for field in fields):
                continue  # decoding takes longer than reading
            letter = decode_dlq_fields(dlq_id.decode(), fields)
            job = decoded_job(letter.payload)
            if job is not None and job.id == job_id:
                return letter
        return None

    async def _born_ms(self, job_id: str) -> int | None:
        """Return the earliest server time at which a job can have been added; None if its ID is not a ULID.

        Entry IDs are the server's time, a ULID is that of its producer, which is most likely this machine.
        """
        try:
            born_ms = decode_ulid_time(job_id)
        except DecodeError:
            return None
        server_ms = await self.client.server_time_ms()
        born_ms -= max(wall_clock_ms() - server_ms, 0)
        return None if born_ms > server_ms + CLOCK_SKEW_MS else max(born_ms - CLOCK_SKEW_MS, 0)

    async def _find_in_stream(self, job_id: str) -> JobState | None:
        since = await self._born_ms(job_id)
        # Around the id's time: jobs that still wait. At the end: jobs just retried or promoted. At the beginning: jobs
        # that have been running for long.
        walks = [("-", True), ("-", False)]
        if since is not None:
            walks = [(str(since), False), (str(since), True), ("-", False)]
        needle = job_id.encode(errors="replace")
        for start, newest_first in walks:
            async for entry_id, fields in stream_entries(
                self.client, self.keys.stream, start, newest_first=newest_first, page=PAGE, max_pages=MAX_PAGES
            ):
                envelope, name = read_job_fields(fields)
                job = decoded_job(envelope) if envelope is not None and needle in envelope else None
                if job is not None and job.id == job_id:
                    return await self._waiting_or_running(entry_id, name, job)
        return None

    async def _waiting_or_running(self, entry_id: bytes, name: str, job: Job[Any]) -> JobState:
        keys = self.keys
        waiting = _state(job, name, "waiting", entry_id=entry_id.decode())
        for group in [found["name"] for found in await stream_groups(self.client, keys.stream)]:
            pending = await self.client.call("XPENDING", keys.stream, group, entry_id, entry_id, 1)
            if pending:
                _, consumer, idle_ms, _ = pending[0]
                stored, packed = await self.client.call_many(
                    [("GET", keys.progress(job.id)), ("GET", keys.heartbeat(text(group), text(consumer)))]
                )
                progress, note = _progress(stored, job.attempt)
                beat = None if packed is None else decode_heartbeat(packed)
                is_waiting = progress is None and beat is not None and beat.keeps_waiting(job.id)
                return replace(
                    waiting,
                    state="waiting" if is_waiting else "running",
                    progress=progress,
                    progress_note=note,
                    group=text(group),
                    worker=text(consumer),
                    idle_ms=idle_ms,
                )
        return waiting

    # --- delayed jobs

    async def _delayed(self, job_id: str, member: bytes | None) -> JobState | None:
        score = None if member is None else await self.client.call("ZSCORE", self.keys.delayed, member)
        if member is None or score is None:
            return None
        name, job = decoded_member(member)
        return replace(_state(job, name, "delayed", run_at_ms=score_ms(score)), id=job_id)

    async def delayed_member(self, job_id: str) -> bytes | None:
        """Return the member of a delayed job, or None if it cannot be found without a search."""
        keys = self.keys
        indexed, due_time = await self.client.call_many(
            [("GET", keys.delayed_index(job_id)), ("HGET", keys.due, due_field(job_id))]
        )
        score = int.from_bytes(due_time or b"", "big")
        found = await self.client.call("ZRANGEBYSCORE", keys.delayed, score, score, "LIMIT", 0, PAGE) if score else []
        return next((bytes(member) for member in found if _has_id(member, job_id)), indexed)

    async def find_delayed_member(self, job_id: str, max_pages: float = math.inf) -> bytes | None:
        """Return the member of a delayed job, or None. Scans the delayed set page by page."""
        cursor = b""
        while cursor != b"0" and max_pages > 0:
            cursor, flat = await self.client.call("ZSCAN", self.keys.delayed, cursor or b"0", "COUNT", PAGE)
            max_pages -= 1
            for member in flat[::2]:
                if _has_id(member, job_id):
                    return bytes(member)
        return None

    async def _pending(self, now_ms: int) -> AsyncIterator[tuple[JobState, bool]]:
        """Yield the pending entries, each with True if it is running, according to its worker's heartbeat.

        Without a heartbeat, every pending entry counts as running.
        """
        client, stream = self.client, self.keys.stream
        for group in await stream_groups(client, stream):
            group_name = text(group["name"])
            beats: dict[str, tuple[Heartbeat | None, int]] = {}
            position = "-"
            while position:
                pending = await client.call("XPENDING", stream, group["name"], position, "+", PAGE)
                entries = await client.call_many([("XRANGE", stream, entry[0], entry[0]) for entry in pending])
                new = sorted({text(consumer) for _, consumer, _, _ in pending} - beats.keys())
                beats |= zip(new, await read_heartbeats(client, self.keys, group_name, new), strict=True)
                for (entry_id, consumer, idle_ms, _), found in zip(pending, entries, strict=True):
                    if not found:
                        continue  # deleted, and not yet swept
                    known = {"group": group_name, "worker": text(consumer), "idle_ms": idle_ms}
                    job = _in_stream(entry_id, found[0][1], "running", now_ms, **known)
                    beat, ttl_ms = beats[text(consumer)]
                    if beat is not None and (running := beat.find_running(job.id)) is not None:
                        job = replace(job, age_ms=running.running_ms + heartbeat_age_ms(ttl_ms))
                    yield job, beat is None or not beat.keeps_waiting(job.id)
                position = f"({text(pending[-1][0])}" if len(pending) == PAGE else ""


def decoded_job(envelope: bytes | None, name: str = "") -> Job[Any] | None:
    """Return the job in an envelope, or None if there is none, or the bytes are not an envelope."""
    try:
        return None if envelope is None else decode_job(envelope, name)
    except DecodeError:
        return None


def decoded_member(member: bytes) -> tuple[str, Job[Any] | None]:
    """Return the name and the job of a member of the delayed set; None if it cannot be decoded."""
    try:
        name, envelope = decode_delayed_member(member)
    except DecodeError:
        return "", None
    return name, decoded_job(envelope, name)


def _has_id(member: bytes, job_id: str) -> bool:
    """Return True if a member of the delayed set is the job with this ID."""
    job = decoded_member(member)[1] if job_id.encode(errors="replace") in member else None
    return job is not None and job.id == job_id


def _progress(stored: bytes | None, attempt: int) -> tuple[float | None, str | None]:
    """Return the progress and note of this attempt; None if it has not reported any."""
    parts = (stored or b"").decode(errors="replace").split(" ", 2)
    if len(parts) < 3 or parts[0] != str(attempt):
        return None, None
    try:
        return float(parts[1]), parts[2]
    except ValueError:
        return None, None


def _in_stream(entry_id: bytes, fields: list[bytes], state: ListedState, now_ms: int, **known: Any) -> JobState:
    envelope, name = read_job_fields(fields)
    age_ms = max(now_ms - entry_ms(entry_id), 0)
    return _state(decoded_job(envelope, name), name, state, entry_id=text(entry_id), age_ms=age_ms, **known)


def _state(job: Job[Any] | None, name: str, state: ListedState, **known: Any) -> JobState:
    if job is not None:
        known |= {"attempt": job.attempt, "created_at_ms": job.created_at_ms}
    return JobState(id="" if job is None else job.id, state=state, name=name, **known)
