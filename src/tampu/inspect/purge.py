"""Removes jobs that no worker holds: one delayed job, or all of a queue. `cancel.py` cancels a job in any state."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tampu.inspect.job_state import find_delayed_member
from tampu.redis import calls

if TYPE_CHECKING:
    from tampu.redis.client import Client
    from tampu.wire.keys import QueueKeys

#: Waiting jobs, and delayed jobs, deleted in one step of `purge`.
PURGE_BATCH = 500


async def cancel_delayed(client: Client, keys: QueueKeys, job_id: str) -> bool:
    """Cancel a job that waits for its due time or its retry. Return False if there is no such delayed job."""
    names = (keys.delayed, keys.delayed_index(job_id), keys.dedup_marker(job_id), keys.due)
    is_cancelled = await calls.cancel_delayed(client, *names, job_id=job_id)
    if is_cancelled is None:
        # Not found by its id: another implementation added the job, or too many are due in the same millisecond.
        member = await find_delayed_member(client, keys, job_id)
        is_cancelled = member is not None and await calls.cancel_delayed(client, *names, job_id=job_id, member=member)
    return bool(is_cancelled)


async def purge(client: Client, keys: QueueKeys, *, waiting: bool, delayed: bool) -> int:
    """Delete waiting jobs, delayed jobs or both, with their dedup markers and indexes. Return how many were deleted.

    Jobs added meanwhile are kept. A long queue is purged in steps, each of which is atomic.
    """
    deleted, delayed_to_go, last = 0, -1 if delayed else 0, b"+" if waiting else b""
    while delayed_to_go or last:
        count, delayed_to_go, last = await calls.purge(
            client,
            *(keys.stream, keys.delayed, keys.due),
            tag=keys.tag,
            most=PURGE_BATCH,
            delayed_to_go=delayed_to_go,
            last=last,
        )
        deleted += count
    return deleted
