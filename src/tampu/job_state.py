"""Where a job is right now, found without reading a whole stream.

Result, index and pending list first; then the streams around the time that the job's id carries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from tampu.errors import DecodeError
from tampu.wire.dlq import DlqEntry, decode_dlq_fields
from tampu.wire.entry import read_job_fields
from tampu.wire.envelope import decode_job
from tampu.wire.results import decode_result
from tampu.wire.ulid import decode_ulid_time

if TYPE_CHECKING:
    from tampu.redis.pipe import Pipe
    from tampu.wire.keys import QueueKeys

State = Literal["waiting", "delayed", "running", "done", "dead", "unknown"]

#: Entries looked at in one step, and steps at the most, of each stream.
PAGE = 500
MAX_PAGES = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class JobState:
    """What is known of a job. `unknown` means: finished without a stored result, or never there."""

    id: str
    state: State
    name: str = ""
    attempt: int | None = None
    created_at_ms: int | None = None
    #: Delayed: when it runs, in epoch ms.
    run_at_ms: int | None = None
    #: Running: by which consumer of which group, and for how long it has not been renewed.
    group: str | None = None
    worker: str | None = None
    idle_ms: int | None = None
    #: Done: what the handler returned.
    result: Any = None
    #: Dead: the letter.
    dead_letter: DlqEntry | None = None
    entry_id: str | None = None


async def find_job(pipe: Pipe, keys: QueueKeys, job_id: str) -> JobState:
    """Look for a job in the order in which it is cheapest to find."""
    result, member = await pipe.call_many([("GET", keys.result(job_id)), ("GET", keys.delayed_index(job_id))])
    if result is not None:
        return JobState(id=job_id, state="done", result=_decoded(result))
    if member is not None:
        score = await pipe.call("ZSCORE", keys.delayed, member)
        if score is not None:
            return JobState(id=job_id, state="delayed", run_at_ms=int(float(score)))
    return (
        await _find_in_stream(pipe, keys, job_id)
        or await _find_dead(pipe, keys, job_id)
        or JobState(id=job_id, state="unknown")
    )


def _decoded(result: bytes) -> Any:
    try:
        return decode_result(result)
    except DecodeError:
        return result


def _starts(job_id: str) -> list[str]:
    """Where to begin: a second before the id's own time (clocks differ), else at the beginning."""
    try:
        return [str(max(decode_ulid_time(job_id) - 1000, 0)), "-"]
    except DecodeError:
        return ["-"]


async def _find_in_stream(pipe: Pipe, keys: QueueKeys, job_id: str) -> JobState | None:
    for start in _starts(job_id):
        entry = await _scan(pipe, keys.stream, start, job_id)
        if entry is not None:
            return await _waiting_or_running(pipe, keys, job_id, entry)
    return None


async def _scan(pipe: Pipe, stream: str, start: str, job_id: str) -> tuple[bytes, list[bytes]] | None:
    needle = job_id.encode(errors="replace")
    for _ in range(MAX_PAGES):
        entries = await pipe.call("XRANGE", stream, start, "+", "COUNT", PAGE)
        for entry_id, fields in entries:
            envelope, _ = read_job_fields(fields)
            if envelope is not None and needle in envelope and _is_job(envelope, job_id):
                return entry_id, fields
        if len(entries) < PAGE:
            return None
        start = "(" + entries[-1][0].decode()
    return None


def _is_job(envelope: bytes, job_id: str) -> bool:
    try:
        return decode_job(envelope).id == job_id
    except DecodeError:
        return False


async def _waiting_or_running(pipe: Pipe, keys: QueueKeys, job_id: str, entry: tuple[bytes, list[bytes]]) -> JobState:
    entry_id, fields = entry
    envelope, name = read_job_fields(fields)
    job = decode_job(envelope or b"")
    known: dict[str, Any] = {
        "id": job_id,
        "name": name,
        "attempt": job.attempt,
        "created_at_ms": job.created_at_ms,
        "entry_id": entry_id.decode(),
    }
    groups = await pipe.call("XINFO", "GROUPS", keys.stream)
    for flat in groups:
        group = dict(zip(flat[::2], flat[1::2], strict=True))[b"name"]
        pending = await pipe.call("XPENDING", keys.stream, group, entry_id, entry_id, 1)
        if pending:
            _, consumer, idle_ms, _ = pending[0]
            return JobState(
                **known,
                state="running",
                group=group.decode(errors="replace"),
                worker=consumer.decode(errors="replace"),
                idle_ms=idle_ms,
            )
    return JobState(**known, state="waiting")


async def _find_dead(pipe: Pipe, keys: QueueKeys, job_id: str) -> JobState | None:
    end = "+"
    for _ in range(MAX_PAGES):
        entries = await pipe.call("XREVRANGE", keys.dlq, end, "-", "COUNT", PAGE)
        for dlq_id, fields in entries:
            letter = decode_dlq_fields(dlq_id.decode(), fields)
            if job_id.encode(errors="replace") in letter.payload and _is_job(letter.payload, job_id):
                return JobState(id=job_id, state="dead", name=letter.name, attempt=letter.attempts, dead_letter=letter)
        if len(entries) < PAGE:
            return None
        end = "(" + entries[-1][0].decode()
    return None
