"""Lists jobs by state: waiting, running, delayed or dead, filtered by name and age."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from tampu.errors import DecodeError
from tampu.inspect.job_state import JobState
from tampu.inspect.snapshot import as_dict, entry_ms, text
from tampu.inspect.workers import heartbeat_age_ms, read_heartbeats
from tampu.redis.faults import ServerError
from tampu.wire.dlq import decode_dlq_fields
from tampu.wire.entry import decode_delayed_member, read_job_fields, score_ms
from tampu.wire.envelope import decode_job

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tampu.redis.client import Client
    from tampu.wire.heartbeat import Heartbeat
    from tampu.wire.job import Job
    from tampu.wire.keys import QueueKeys

ListedState = Literal["waiting", "running", "delayed", "dead"]
LISTED_STATES: tuple[ListedState, ...] = ("waiting", "running", "delayed", "dead")

#: Entries read in one step.
PAGE = 500


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
    walk = {"waiting": _waiting, "running": _running, "delayed": _delayed, "dead": _dead}[state]
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


async def _waiting(client: Client, keys: QueueKeys, now_ms: int) -> AsyncIterator[JobState]:
    """Walk the entries that have not started: those that wait in a worker, then those that no group has delivered."""
    async for job, is_running in _pending(client, keys, now_ms):
        if not is_running:
            yield replace(job, state="waiting")
    groups = await _groups(client, keys)
    start = max((_order(text(group["last-delivered-id"])) for group in groups), default=None)
    position = "-" if start is None else f"({start[0]}-{start[1]}"
    while True:
        entries = await client.call("XRANGE", keys.stream, position, "+", "COUNT", PAGE)
        for entry_id, fields in entries:
            yield _in_stream(entry_id, fields, "waiting", now_ms)
        if len(entries) < PAGE:
            return
        position = f"({text(entries[-1][0])}"


async def _running(client: Client, keys: QueueKeys, now_ms: int) -> AsyncIterator[JobState]:
    """Walk the entries whose handlers run."""
    async for job, is_running in _pending(client, keys, now_ms):
        if is_running:
            yield job


async def _pending(client: Client, keys: QueueKeys, now_ms: int) -> AsyncIterator[tuple[JobState, bool]]:
    """Yield the pending entries, each with True if it is running, according to its worker's heartbeat.

    Without a heartbeat, every pending entry counts as running.
    """
    for group in await _groups(client, keys):
        group_name = text(group["name"])
        beats: dict[str, tuple[Heartbeat | None, int]] = {}
        position = "-"
        while True:
            pending = await client.call("XPENDING", keys.stream, group["name"], position, "+", PAGE)
            entries = await client.call_many([("XRANGE", keys.stream, one[0], one[0]) for one in pending])
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


async def _delayed(client: Client, keys: QueueKeys, now_ms: int) -> AsyncIterator[JobState]:
    """Walk the delayed set by due time."""
    start = 0
    while True:
        flat = await client.call("ZRANGE", keys.delayed, start, start + PAGE - 1, "WITHSCORES")
        for member, score in zip(flat[::2], flat[1::2], strict=True):
            job = name = None
            try:
                name, envelope = decode_delayed_member(member)
                job = decode_job(envelope, name)
            except DecodeError:
                pass
            yield _state(job, name or "", "delayed", now_ms, run_at_ms=score_ms(score))
        if len(flat) < 2 * PAGE:
            return
        start += PAGE


async def _dead(client: Client, keys: QueueKeys, now_ms: int) -> AsyncIterator[JobState]:
    """Walk the dead letters."""
    position = "-"
    while True:
        entries = await client.call("XRANGE", keys.dlq, position, "+", "COUNT", PAGE)
        for entry_id, fields in entries:
            letter = decode_dlq_fields(text(entry_id), fields)
            try:
                job = decode_job(letter.payload, letter.name)
            except DecodeError:
                job = None
            age_ms = max(now_ms - entry_ms(entry_id), 0)
            yield _state(job, letter.name, "dead", now_ms, dead_letter=letter, entry_id=text(entry_id), age_ms=age_ms)
        if len(entries) < PAGE:
            return
        position = f"({text(entries[-1][0])}"


async def _groups(client: Client, keys: QueueKeys) -> list[dict[str, Any]]:
    try:
        return [as_dict(flat) for flat in await client.call("XINFO", "GROUPS", keys.stream)]
    except ServerError as error:
        if "no such key" in str(error):
            return []
        raise


def _in_stream(entry_id: bytes, fields: list[bytes], state: ListedState, now_ms: int, **known: Any) -> JobState:
    envelope, name = read_job_fields(fields)
    try:
        job = None if envelope is None else decode_job(envelope, name)
    except DecodeError:
        job = None
    age_ms = max(now_ms - entry_ms(entry_id), 0)
    return _state(job, name, state, now_ms, entry_id=text(entry_id), age_ms=age_ms, **known)


def _state(job: Job[Any] | None, name: str, state: ListedState, now_ms: int, **known: Any) -> JobState:
    if job is None:
        return JobState(id="", state=state, name=name, **known)
    known.setdefault("age_ms", max(now_ms - job.created_at_ms, 0))
    return JobState(id=job.id, state=state, name=name, attempt=job.attempt, created_at_ms=job.created_at_ms, **known)


def _order(entry_id: str) -> tuple[int, int]:
    milliseconds, _, sequence = entry_id.partition("-")
    return int(milliseconds), int(sequence or 0)
