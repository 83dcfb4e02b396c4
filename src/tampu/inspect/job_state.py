"""Finds the current state of a job without reading a whole stream.

It checks the result, the index of delayed jobs and the pending entries, then the streams around the time in the job's
ID and at their ends.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from tampu.base.clock import wall_clock_ms
from tampu.errors import DecodeError
from tampu.inspect.snapshot import text
from tampu.wire.dlq import DlqEntry, decode_dlq_fields
from tampu.wire.entry import decode_delayed_member, due_field, read_job_fields, score_ms
from tampu.wire.envelope import decode_job
from tampu.wire.heartbeat import decode_heartbeat
from tampu.wire.payload import decode_result
from tampu.wire.ulid import decode_ulid_time

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tampu.redis.client import Client
    from tampu.wire.codec import QueueCodec
    from tampu.wire.job import Job
    from tampu.wire.keys import QueueKeys

State = Literal["waiting", "delayed", "running", "done", "dead", "cancelled", "unknown"]

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
    #: Cancelled: the reason.
    reason: str | None = None
    #: ID of its entry in the stream of waiting and running jobs, or of dead letters.
    entry_id: str | None = None


async def find_job(client: Client, keys: QueueKeys, job_id: str, codec: QueueCodec | None = None) -> JobState:
    """Return the state of a job, checking the cheapest places first. `codec` opens its result."""
    result, mark, *hints = await client.call_many(
        [("GET", keys.result(job_id)), ("GET", keys.cancel_mark(job_id)), *_delayed_hints(keys, job_id)]
    )
    if result is not None:
        return JobState(id=job_id, state="done", result=_decoded(result, job_id, codec))
    if mark is not None and mark.startswith(b"c"):
        return JobState(id=job_id, state="cancelled", reason=mark[1:].decode(errors="replace"))
    delayed = await _delayed(client, keys, job_id, await _hinted_member(client, keys, job_id, *hints))
    if delayed is not None:
        return delayed
    found = await _find_in_stream(client, keys, job_id)
    if found is not None:
        return found
    letter = await find_dead_letter(client, keys, job_id)
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
    return JobState(id=job_id, state="unknown" if result is None else "done", result=_decoded(result, job_id, codec))


async def find_dead_letter(client: Client, keys: QueueKeys, job_id: str) -> DlqEntry | None:
    """Return the newest dead letter of a job, or None. It cannot be older than the job."""
    since = await _born_ms(client, job_id)
    async for dlq_id, fields in _walk(client, keys.dlq, "-" if since is None else str(since), backwards=True):
        letter = decode_dlq_fields(dlq_id.decode(), fields)
        if job_of(letter.payload, job_id) is not None:
            return letter
    return None


def job_of(envelope: bytes, job_id: str) -> Job[Any] | None:
    """Return the job in an envelope if it has this ID, else None."""
    if job_id.encode(errors="replace") not in envelope:
        return None
    try:
        job = decode_job(envelope)
    except DecodeError:
        return None
    return job if job.id == job_id else None


def _decoded(result: bytes | None, job_id: str, codec: QueueCodec | None) -> Any:
    if result is None:
        return None
    try:
        return decode_result(result if codec is None else codec.open_result(result, job_id))
    except DecodeError:
        return result


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
    client: Client, stream: str, since: str, *, backwards: bool = False
) -> AsyncIterator[tuple[bytes, list[bytes]]]:
    """Yield entries of a stream since `since`, oldest or newest first, up to `MAX_PAGES` pages."""
    command, start, end = ("XREVRANGE", "+", since) if backwards else ("XRANGE", since, "+")
    for _ in range(MAX_PAGES):
        entries = await client.call(command, stream, start, end, "COUNT", PAGE)
        for entry_id, fields in entries:
            yield entry_id, fields
        if len(entries) < PAGE:
            return
        start = "(" + entries[-1][0].decode()


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
    groups = await client.call("XINFO", "GROUPS", keys.stream)
    for flat in groups:
        group = dict(zip(flat[::2], flat[1::2], strict=True))[b"name"]
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
    try:
        name, envelope = decode_delayed_member(member)
        job = decode_job(envelope, name)
    except DecodeError:
        return JobState(id=job_id, state="delayed", run_at_ms=run_at_ms)
    return JobState(
        id=job_id,
        state="delayed",
        name=name,
        attempt=job.attempt,
        created_at_ms=job.created_at_ms,
        run_at_ms=run_at_ms,
    )


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
    for member in found:
        with contextlib.suppress(DecodeError):
            if job_of(decode_delayed_member(member)[1], job_id) is not None:
                return bytes(member)
    return indexed


async def find_delayed_member(
    client: Client, keys: QueueKeys, job_id: str, max_pages: float = math.inf
) -> bytes | None:
    """Return the member of a delayed job, or None. Scans the delayed set page by page."""
    needle = job_id.encode(errors="replace")
    cursor, pages = b"0", 0
    while pages < max_pages:
        cursor, flat = await client.call("ZSCAN", keys.delayed, cursor, "COUNT", PAGE)
        pages += 1
        for member in flat[::2]:
            with contextlib.suppress(DecodeError):
                if needle in member and job_of(decode_delayed_member(member)[1], job_id) is not None:
                    return bytes(member)
        if cursor == b"0":
            break
    return None
