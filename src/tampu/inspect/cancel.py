"""Cancels jobs: removes a delayed job at once, and marks a waiting or running one for its worker to drop."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Literal

from tampu.base.limits import CANCEL_TTL_SECS
from tampu.inspect.job_state import find_delayed_member, find_job
from tampu.redis import calls

if TYPE_CHECKING:
    from tampu.redis.client import Client
    from tampu.wire.keys import QueueKeys

#: What became of a request to cancel a job; see `Queue.cancel`.
CancelOutcome = Literal["cancelled", "requested", "finished", "unknown"]

#: Longest reason, in characters.
MAX_REASON = 500


async def cancel_job(client: Client, keys: QueueKeys, job_id: str, reason: str) -> CancelOutcome:
    """Cancel a job, wherever it is."""
    used = (
        *(keys.delayed, keys.delayed_index(job_id), keys.dedup_marker(job_id)),
        *(keys.cancel_mark(job_id), keys.cancel_marks, keys.events, keys.due),
    )
    call = partial(calls.cancel_job, client, *used, job_id=job_id, reason=reason[:MAX_REASON], ttl_secs=CANCEL_TTL_SECS)
    if await call() == 1:
        return "cancelled"
    state = (await find_job(client, keys, job_id)).state
    if state == "cancelled":
        return "cancelled"
    if state in ("done", "dead"):
        return "finished"
    if state == "unknown":
        return "unknown"
    # It may have moved since: into the delayed set for a retry, or out of it. The script looks there first.
    member = await find_delayed_member(client, keys, job_id) if state == "delayed" else None
    return "cancelled" if await call(member=member, is_in_stream=True) == 1 else "requested"
