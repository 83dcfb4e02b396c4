"""Changes of single jobs by an operator: run one now, replay one with another payload, fire a schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tampu.errors import ConfigError, DecodeError, QueueFullError
from tampu.inspect.dead_letters import DlqFilter
from tampu.inspect.jobs import decoded_job
from tampu.wire.codec import SEALED, queue_codec
from tampu.wire.entry import job_fields
from tampu.wire.envelope import encode_job
from tampu.wire.job import Job
from tampu.wire.payload import decode_slot, encode_slot, encode_value, wrap_bin
from tampu.wire.repeat import decode_spec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tampu.inspect.admin import QueueAdmin


async def run_now(admin: QueueAdmin, job_ids: Sequence[str]) -> int:
    """Make delayed jobs due now, and wake the promoter. Return how many; others are left alone."""
    client, keys = admin.client, admin.keys
    moved = 0
    for job_id in job_ids:
        member = await admin.delayed_member(job_id) or await admin.find_delayed_member(job_id)
        now_ms = await client.server_time_ms()
        # XX: a job that was promoted in the meantime is not delayed again.
        if member is not None and await client.call("ZADD", keys.delayed, "XX", "CH", now_ms, member):
            moved += 1
            await client.call_many([("XADD", keys.wake, "MAXLEN", 1, "*", "due", now_ms), ("EXPIRE", keys.wake, 3600)])
            await admin.audit("run-now", detail=job_id)
    return moved


async def edit_and_replay(admin: QueueAdmin, dlq_id: str, payload: Any) -> bool:
    """Replay a dead letter with another payload. Return False if it is gone.

    A sealed payload is replaced by one that the codec of the environment seals; without it, `ConfigError` is raised.
    """
    letters = await admin.peek_dlq(1, DlqFilter(ids=[dlq_id]))
    job = decoded_job(letters[0].payload, letters[0].name) if letters else None
    if job is None:
        return False
    codec = queue_codec(admin.name)
    if codec is None and _is_sealed(job):
        raise ConfigError("this payload is sealed: set the codec in the environment to replace it")
    sealed = None if codec is None else wrap_bin(codec.seal_payload(encode_value(payload), job.name))
    edited = job.for_replay()._replaced(_slot=sealed or encode_slot(payload, job.payload_format))
    done, _ = await admin._replay([(dlq_id, encode_job(edited), letters[0].name, job.id)])
    if done:
        await admin.audit("edit", detail=job.id)
    return bool(done)


def _is_sealed(job: Job[Any]) -> bool:
    try:
        value = decode_slot(job.payload_slot)
    except DecodeError:
        return True
    return isinstance(value, bytes) and value.startswith(SEALED)


async def fire(admin: QueueAdmin, spec_key: str) -> tuple[str, str]:
    """Add the job of a schedule once, now, and return its name and its ID. The schedule does not change."""
    packed = await admin.packed_spec(spec_key)
    if packed is None:
        raise ConfigError(f"{admin.name} has no schedule {spec_key!r}")
    try:
        spec = decode_spec(packed)
        spec.payload  # noqa: B018 - decode now, so that an undecodable payload is reported here
    except DecodeError as error:
        raise ConfigError(f"the schedule {spec_key!r} cannot be fired: {error}") from error
    now_ms = await admin.client.server_time_ms()
    job: Job[Any] = Job.new(None, now_ms=lambda: now_ms)._replaced(_slot=spec.payload_slot)
    length = int(await admin.client.call("XLEN", admin.keys.stream))
    if length >= admin._max_stream_len:
        raise QueueFullError(f"queue {admin.name!r} is full: it has {length:,} jobs")
    await admin.client.call("XADD", admin.keys.stream, "*", *job_fields(encode_job(job), spec.job_name))
    await admin.audit("fire", detail=spec_key)
    return spec.job_name, job.id
