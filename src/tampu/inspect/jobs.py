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
from tampu.inspect.streams import stream_groups, stream_pages, text
from tampu.wire.dlq import DlqEntry, decode_dlq_fields
from tampu.wire.entry import decode_delayed_member, due_field, entry_ms, entry_order, read_job_fields, score_ms
from tampu.wire.envelope import decode_job
from tampu.wire.heartbeat import decode_heartbeat
from tampu.wire.payload import decode_result
from tampu.wire.ulid import decode_ulid_time

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tampu.inspect.streams import Entry
    from tampu.redis.client import Client
    from tampu.wire.codec import QueueCodec
    from tampu.wire.heartbeat import Heartbeat
    from tampu.wire.job import Job
    from tampu.wire.keys import QueueKeys

State = Literal["waiting", "delayed", "running", "done", "dead", "cancelled", "unknown"]
ListedState = Literal["waiting", "running", "delayed", "dead"]
LISTED_STATES: tuple[ListedState, ...] = ("waiting", "running", "delayed", "dead")

#: Entries per page, and maximum number of pages, of each search through a stream.
PAGE = 500
MAX_PAGES = 20
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


async def find_job(client: Client, keys: QueueKeys, job_id: str, codec: QueueCodec | None = None) -> JobState:
    """Return the state of a job, checking the cheapest places first. `codec` opens its result."""
    result, mark, *hints = await client.call_many(
        [("GET", keys.result(job_id)), ("GET", keys.cancel_mark(job_id)), *_delayed_hints(keys, job_id)]
    )
    if result is not None:
        return _done(result, job_id, codec)
    if mark is not None and mark.startswith(b"c"):
        return JobState(id=job_id, state="cancelled", reason=mark[1:].decode(errors="replace"))
    delayed = await _delayed(client, keys, job_id, await _hinted_member(client, keys, job_id, *hints))
    if delayed is not None:
        return delayed
    found = await _find_in_stream(client, keys, job_id)
    if found is not None:
        return found
    letter = await find_dead_letter(client, keys, job_id, all_pages=True)
    if letter is not None:
        name, attempts = letter.name, letter.attempts
        return JobState(id=job_id, state="dead", name=name, attempt=attempts, dead_letter=letter)
    # Other implementations store no index of generated ids and of retries, so the set must be searched.
    member = await find_delayed_member(client, keys, job_id, MAX_DELAYED_PAGES)
    delayed = await _delayed(client, keys, job_id, member)
    if delayed is not None:
        return delayed
    # A job that finished during the search had left each place before it was checked.
    result = await client.call("GET", keys.result(job_id))
    return JobState(id=job_id, state="unknown") if result is None else _done(result, job_id, codec)


async def find_dead_letter(client: Client, keys: QueueKeys, job_id: str, *, all_pages: bool = False) -> DlqEntry | None:
    """Return the newest dead letter of a job, or None. It cannot be older than the job.

    `all_pages` searches all letters since then, 50,000 of them in about 0.6 s; otherwise up to `MAX_PAGES` pages.
    """
    start = await _born_ms(client, job_id) or "-"
    needle = job_id.encode(errors="replace")
    async for dlq_id, fields in _walk(client, keys.dlq, str(start), backwards=True, all_pages=all_pages):
        if not any(needle in field for field in fields):
            continue  # decoding takes longer than reading
        letter = decode_dlq_fields(dlq_id.decode(), fields)
        if job_of(letter.payload, job_id) is not None:
            return letter
    return None


def decoded_job(envelope: bytes | None, name: str = "") -> Job[Any] | None:
    """Return the job in an envelope, or None if there is none, or the bytes are not an envelope."""
    try:
        return None if envelope is None else decode_job(envelope, name)
    except DecodeError:
        return None


def job_of(envelope: bytes, job_id: str) -> Job[Any] | None:
    """Return the job in an envelope if it has this ID, else None."""
    if job_id.encode(errors="replace") not in envelope:
        return None
    job = decoded_job(envelope)
    return job if job is not None and job.id == job_id else None


def _done(packed: bytes, job_id: str, codec: QueueCodec | None) -> JobState:
    result: Any = packed
    try:
        result = decode_result(packed if codec is None else codec.open_result(packed, job_id))
    except ResultNotStored as error:
        return JobState(id=job_id, state="done", reason=str(error))
    except DecodeError:
        pass
    return JobState(id=job_id, state="done", result=result)


async def _born_ms(client: Client, job_id: str) -> int | None:
    """Return the earliest server time at which a job can have been added; None if its ID is not a ULID.

    Entry IDs are the server's time, a ULID is that of its producer, which is most likely this machine.
    """
    try:
        born_ms = decode_ulid_time(job_id)
    except DecodeError:
        return None
    server_ms = await client.server_time_ms()
    born_ms -= max(wall_clock_ms() - server_ms, 0)
    return None if born_ms > server_ms + CLOCK_SKEW_MS else max(born_ms - CLOCK_SKEW_MS, 0)


async def _walk(
    client: Client, stream: str, since: str, *, backwards: bool = False, all_pages: bool = False
) -> AsyncIterator[Entry]:
    """Yield entries of a stream since `since`, oldest or newest first: all, or up to `MAX_PAGES` pages."""
    left = math.inf if all_pages else MAX_PAGES
    async for entries in stream_pages(client, stream, since, newest_first=backwards, page=PAGE):
        for entry in entries:
            yield entry
        left -= 1
        if left <= 0:
            return


async def _find_in_stream(client: Client, keys: QueueKeys, job_id: str) -> JobState | None:
    since = await _born_ms(client, job_id)
    # Around the id's time: jobs that still wait. At the end: jobs just retried or promoted. At the beginning: jobs that
    # have been running for long.
    walks = [("-", True), ("-", False)]
    if since is not None:
        walks = [(str(since), False), (str(since), True), ("-", False)]
    for start, backwards in walks:
        async for entry_id, fields in _walk(client, keys.stream, start, backwards=backwards):
            envelope, name = read_job_fields(fields)
            job = None if envelope is None else job_of(envelope, job_id)
            if job is not None:
                return await _waiting_or_running(client, keys, entry_id, name, job)
    return None


async def _waiting_or_running(client: Client, keys: QueueKeys, entry_id: bytes, name: str, job: Job[Any]) -> JobState:
    known: dict[str, Any] = {
        "id": job.id,
        "name": name,
        "attempt": job.attempt,
        "created_at_ms": job.created_at_ms,
        "entry_id": entry_id.decode(),
    }
    for group in [found["name"] for found in await stream_groups(client, keys.stream)]:
        pending = await client.call("XPENDING", keys.stream, group, entry_id, entry_id, 1)
        if pending:
            _, consumer, idle_ms, _ = pending[0]
            stored, packed = await client.call_many(
                [("GET", keys.progress(job.id)), ("GET", keys.heartbeat(text(group), text(consumer)))]
            )
            progress, note = _progress(stored, job.attempt)
            beat = None if packed is None else decode_heartbeat(packed)
            is_waiting = progress is None and beat is not None and beat.keeps_waiting(job.id)
            return JobState(
                **known,
                state="waiting" if is_waiting else "running",
                progress=progress,
                progress_note=note,
                group=text(group),
                worker=text(consumer),
                idle_ms=idle_ms,
            )
    return JobState(**known, state="waiting")


def _progress(stored: bytes | None, attempt: int) -> tuple[float | None, str | None]:
    """Return the progress and note of this attempt; None if it has not reported any."""
    parts = (stored or b"").decode(errors="replace").split(" ", 2)
    if len(parts) < 3 or parts[0] != str(attempt):
        return None, None
    try:
        return float(parts[1]), parts[2]
    except ValueError:
        return None, None


async def _delayed(client: Client, keys: QueueKeys, job_id: str, member: bytes | None) -> JobState | None:
    score = None if member is None else await client.call("ZSCORE", keys.delayed, member)
    if member is None or score is None:
        return None
    run_at_ms = score_ms(score)
    name, job = decoded_member(member)
    if job is None:
        return JobState(id=job_id, state="delayed", run_at_ms=run_at_ms)
    return JobState(
        id=job_id, state="delayed", name=name, attempt=job.attempt, created_at_ms=job.created_at_ms, run_at_ms=run_at_ms
    )


def decoded_member(member: bytes) -> tuple[str, Job[Any] | None]:
    """Return the name and the job of a member of the delayed set; None if it cannot be decoded."""
    try:
        name, envelope = decode_delayed_member(member)
    except DecodeError:
        return "", None
    return name, decoded_job(envelope, name)


async def delayed_member(client: Client, keys: QueueKeys, job_id: str) -> bytes | None:
    """Return the member of a delayed job, or None if it cannot be found without a search."""
    return await _hinted_member(client, keys, job_id, *await client.call_many(_delayed_hints(keys, job_id)))


def _delayed_hints(keys: QueueKeys, job_id: str) -> list[tuple[str, ...]]:
    """Return the commands that look up a delayed job: one returns its member, the other its due time."""
    return [("GET", keys.delayed_index(job_id)), ("HGET", keys.due, due_field(job_id))]


async def _hinted_member(
    client: Client, keys: QueueKeys, job_id: str, indexed: bytes | None, due_time: bytes | None
) -> bytes | None:
    score = int.from_bytes(due_time or b"", "big")
    found = await client.call("ZRANGEBYSCORE", keys.delayed, score, score, "LIMIT", 0, PAGE) if score else []
    return next((bytes(member) for member in found if _has_id(member, job_id)), indexed)


async def find_delayed_member(
    client: Client, keys: QueueKeys, job_id: str, max_pages: float = math.inf
) -> bytes | None:
    """Return the member of a delayed job, or None. Scans the delayed set page by page."""
    cursor, pages = b"0", 0
    while pages < max_pages:
        cursor, flat = await client.call("ZSCAN", keys.delayed, cursor, "COUNT", PAGE)
        pages += 1
        for member in flat[::2]:
            if _has_id(member, job_id):
                return bytes(member)
        if cursor == b"0":
            break
    return None


def _has_id(member: bytes, job_id: str) -> bool:
    """Return True if a member of the delayed set is the job with this ID."""
    job = decoded_member(member)[1] if job_id.encode(errors="replace") in member else None
    return job is not None and job.id == job_id


# --- lists of jobs


async def list_jobs(
    client: Client,
    keys: QueueKeys,
    state: ListedState,
    *,
    name: str | None = None,
    older_than_ms: int | None = None,
    limit: int = 100,
) -> list[JobState]:
    """Return up to `limit` jobs in a state, oldest first.

    `older_than_ms` is the minimum time since a running job started, a dead one failed, or any other was added.
    """
    walk = {"waiting": _list_waiting, "running": _list_running, "delayed": _list_delayed, "dead": _list_dead}[state]
    now_ms = await client.server_time_ms()
    found: list[JobState] = []
    async for job in walk(client, keys, now_ms):
        if name is not None and job.name != name:
            continue
        if older_than_ms is not None and (job.age_ms is None or job.age_ms < older_than_ms):
            continue
        found.append(job)
        if len(found) >= limit:
            break
    if state == "running":
        found.sort(key=lambda job: -(job.age_ms or 0))
    return found


async def _list_waiting(client: Client, keys: QueueKeys, now_ms: int) -> AsyncIterator[JobState]:
    """Walk the entries that have not started: those that wait in a worker, then those that no group has delivered."""
    async for job, is_running in _pending(client, keys, now_ms):
        if not is_running:
            yield replace(job, state="waiting")
    groups = await stream_groups(client, keys.stream)
    last = max((entry_order(group["last-delivered-id"]) for group in groups), default=None)
    async for entries in stream_pages(client, keys.stream, "-" if last is None else f"({last[0]}-{last[1]}"):
        for entry_id, fields in entries:
            yield _in_stream(entry_id, fields, "waiting", now_ms)


async def _list_running(client: Client, keys: QueueKeys, now_ms: int) -> AsyncIterator[JobState]:
    """Walk the entries whose handlers run."""
    async for job, is_running in _pending(client, keys, now_ms):
        if is_running:
            yield job


async def _pending(client: Client, keys: QueueKeys, now_ms: int) -> AsyncIterator[tuple[JobState, bool]]:
    """Yield the pending entries, each with True if it is running, according to its worker's heartbeat.

    Without a heartbeat, every pending entry counts as running.
    """
    for group in await stream_groups(client, keys.stream):
        group_name = text(group["name"])
        beats: dict[str, tuple[Heartbeat | None, int]] = {}
        position = "-"
        while True:
            pending = await client.call("XPENDING", keys.stream, group["name"], position, "+", PAGE)
            entries = await client.call_many([("XRANGE", keys.stream, entry[0], entry[0]) for entry in pending])
            new = sorted({text(consumer) for _, consumer, _, _ in pending} - beats.keys())
            beats |= zip(new, await read_heartbeats(client, keys, group_name, new), strict=True)
            for (entry_id, consumer, idle_ms, _), found in zip(pending, entries, strict=True):
                if not found:
                    continue  # deleted, and not yet swept
                known = {"group": group_name, "worker": text(consumer), "idle_ms": idle_ms}
                job = _in_stream(entry_id, found[0][1], "running", now_ms, **known)
                beat, ttl_ms = beats[text(consumer)]
                if beat is not None and (running := beat.find_running(job.id)) is not None:
                    job = replace(job, age_ms=running.running_ms + heartbeat_age_ms(ttl_ms))
                yield job, beat is None or not beat.keeps_waiting(job.id)
            if len(pending) < PAGE:
                break
            position = f"({text(pending[-1][0])}"


async def _list_delayed(client: Client, keys: QueueKeys, now_ms: int) -> AsyncIterator[JobState]:
    """Walk the delayed set by due time."""
    start = 0
    while True:
        flat = await client.call("ZRANGE", keys.delayed, start, start + PAGE - 1, "WITHSCORES")
        for member, score in zip(flat[::2], flat[1::2], strict=True):
            name, job = decoded_member(member)
            yield _state(job, name, "delayed", now_ms, run_at_ms=score_ms(score))
        if len(flat) < 2 * PAGE:
            return
        start += PAGE


async def _list_dead(client: Client, keys: QueueKeys, now_ms: int) -> AsyncIterator[JobState]:
    """Walk the dead letters."""
    async for entries in stream_pages(client, keys.dlq):
        for entry_id, fields in entries:
            letter = decode_dlq_fields(text(entry_id), fields)
            job = decoded_job(letter.payload, letter.name)
            age_ms = max(now_ms - entry_ms(entry_id), 0)
            yield _state(job, letter.name, "dead", now_ms, dead_letter=letter, entry_id=text(entry_id), age_ms=age_ms)


def _in_stream(entry_id: bytes, fields: list[bytes], state: ListedState, now_ms: int, **known: Any) -> JobState:
    envelope, name = read_job_fields(fields)
    job = decoded_job(envelope, name)
    age_ms = max(now_ms - entry_ms(entry_id), 0)
    return _state(job, name, state, now_ms, entry_id=text(entry_id), age_ms=age_ms, **known)


def _state(job: Job[Any] | None, name: str, state: ListedState, now_ms: int, **known: Any) -> JobState:
    if job is None:
        return JobState(id="", state=state, name=name, **known)
    known.setdefault("age_ms", max(now_ms - job.created_at_ms, 0))
    return JobState(id=job.id, state=state, name=name, attempt=job.attempt, created_at_ms=job.created_at_ms, **known)
