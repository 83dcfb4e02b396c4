"""Describes in one sentence what a job is doing, for callers whose wait for its result timed out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tampu.inspect.job_state import find_job
from tampu.inspect.pauses import pause_reason
from tampu.inspect.workers import list_workers

if TYPE_CHECKING:
    from tampu.inspect.job_state import JobState
    from tampu.redis.client import Client
    from tampu.wire.keys import QueueKeys


async def whereabouts(client: Client, keys: QueueKeys, job_id: str) -> str:
    """Return what a job is doing, such as `it is waiting, and no worker serves queue 'emails'`."""
    state = await find_job(client, keys, job_id)
    if state.state == "waiting":
        return await _waiting(client, keys, state)
    if state.state == "running":
        done = "" if state.progress is None else f" ({state.progress:.0%})"
        return f"it is running on worker {state.worker}{done}"
    if state.state == "delayed":
        return _delayed(state, await client.server_time_ms())
    if state.state == "done":
        return "its result has just been stored"
    if state.state == "unknown":
        return "it is not in the queue: its worker does not store results, or there is no such job"
    return f"it is {state.state}"


async def _waiting(client: Client, keys: QueueKeys, state: JobState) -> str:
    if state.worker is not None:
        return f"it is waiting for a free slot on worker {state.worker}"
    reason = await pause_reason(client, keys)
    if reason is not None:
        return f"queue {keys.queue_name!r} is paused" + (f": {reason}" if reason else "")
    workers = await list_workers(client, keys)
    if not workers:
        return f"it is waiting, and no worker serves queue {keys.queue_name!r}"
    length = await client.call("XLEN", keys.stream)
    return f"it is waiting; jobs in the queue: {length:,}, workers: {len(workers):,}"


def _delayed(state: JobState, now_ms: int) -> str:
    left_secs = ((state.run_at_ms or 0) - now_ms) / 1000
    when = f"is due in {left_secs:.1f} s" if left_secs > 0 else f"is overdue by {-left_secs:.1f} s; no worker runs"
    if state.attempt:
        return f"attempt {state.attempt} failed, and the next one {when}"
    return f"it is delayed and {when}"
