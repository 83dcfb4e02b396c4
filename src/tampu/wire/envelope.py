"""The job envelope: `[id, payload, created_at_ms, attempt]`, plus the retry override when there is one.

Written as ChasquiMQ 1.3.0 writes it, byte for byte. Read as 1.3.0 reads it: 3, 4 or 5 slots, maps by field name,
wide integers, ids as bin, bytes behind the envelope; beyond it, payloads of either format.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from tampu.checks import MAX_U32, MAX_U64
from tampu.errors import DecodeError, EncodeError
from tampu.wire.job import Job
from tampu.wire.retry import (
    JobRetryOverride,
    MapBackoff,
    WireBackoff,
    WireRetry,
    from_wire_backoff,
    from_wire_retry,
    to_wire_retry,
)
from tampu.wire.scan import bin_content, is_array, is_map, slots_of

_U64 = Annotated[int, msgspec.Meta(ge=0, le=MAX_U64)]
_U32 = Annotated[int, msgspec.Meta(ge=0, le=MAX_U32)]


class _Envelope(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    id: str
    payload: msgspec.Raw
    created_at_ms: _U64
    attempt: _U32 = 0
    retry: WireRetry | None = None


#: What a typed decoder may raise on hostile bytes: all of it means "this is no envelope".
_REFUSALS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError, TypeError, OverflowError)

_decode_envelope = msgspec.msgpack.Decoder(_Envelope).decode
_decode_str = msgspec.msgpack.Decoder(str).decode
_decode_u64 = msgspec.msgpack.Decoder(_U64).decode
_decode_u32 = msgspec.msgpack.Decoder(_U32).decode
_decode_opt_u32 = msgspec.msgpack.Decoder(_U32 | None).decode
_decode_backoff = msgspec.msgpack.Decoder(WireBackoff).decode
_decode_map_backoff = msgspec.msgpack.Decoder(MapBackoff).decode
_encode = msgspec.msgpack.Encoder().encode

_FIELDS = ("id", "payload", "created_at_ms", "attempt", "retry")


def encode_envelope(
    job_id: str, slot: bytes, created_at_ms: int, attempt: int = 0, retry: JobRetryOverride | None = None
) -> bytes:
    """An envelope around a payload slot that is already encoded."""
    try:
        head = _encode(job_id)
        tail = _encode(created_at_ms) + _encode(attempt)
    except (UnicodeEncodeError, OverflowError) as error:
        raise EncodeError(f"job {job_id!r} cannot be encoded: {error}") from error
    if retry is None:
        return b"\x94%b%b%b" % (head, slot, tail)
    return b"\x95%b%b%b%b" % (head, slot, tail, _encode(to_wire_retry(retry)))


def encode_job(job: Job[Any]) -> bytes:
    """The envelope of a job. Its name is not part of it: it travels as a field of its own."""
    return encode_envelope(job.id, job._slot, job.created_at_ms, job.attempt, job.retry)


def decode_job(data: bytes, name: str = "") -> Job[Any]:
    """The job in an envelope; `DecodeError` when there is none. `name` is what the field `n` said."""
    try:
        envelope = _decode_envelope(data)
    except _REFUSALS:
        return _decode_leniently(data, name)
    retry = envelope.retry
    return Job.from_wire(
        envelope.id,
        bytes(envelope.payload),
        envelope.created_at_ms,
        envelope.attempt,
        None if retry is None else from_wire_retry(retry),
        name,
    )


def _decode_leniently(data: bytes, name: str) -> Job[Any]:
    """The forms no writer of today uses but 1.3.0 reads; slower, and where every refusal gets its text."""
    slots = _named_slots(data, _FIELDS, required=3)
    try:
        id_slot = slots["id"]
        id_bytes = bin_content(id_slot)
        job_id = _decode_str(id_slot) if id_bytes is None else id_bytes.decode()
        created_at_ms = _decode_u64(slots["created_at_ms"])
        attempt = _decode_u32(slots["attempt"]) if "attempt" in slots else 0
        retry = _decode_retry(slots["retry"]) if "retry" in slots else None
    except _REFUSALS as error:
        raise DecodeError(f"not a job envelope: {error}") from error
    slot = slots["payload"]
    return Job.from_wire(job_id, slot, created_at_ms, attempt, retry, name)


def _named_slots(data: bytes, fields: tuple[str, ...], required: int) -> dict[str, bytes]:
    """An array's or a map's slots by field name. Missing trailing fields are absent, unknown map keys ignored."""
    slots = slots_of(data)
    if is_array(data):
        if not required <= len(slots) <= len(fields):
            raise DecodeError(f"expected {required} to {len(fields)} slots; got {len(slots)}")
        return dict(zip(fields, slots, strict=False))
    named: dict[str, bytes] = {}
    for key_slot, value in zip(slots[::2], slots[1::2], strict=True):
        try:
            key = _decode_str(key_slot)
        except _REFUSALS:
            raise DecodeError("a map key is not text") from None
        if key in named:
            raise DecodeError(f"field {key!r} is there twice")
        if key in fields:
            named[key] = value
    missing = [field for field in fields[:required] if field not in named]
    if missing:
        raise DecodeError(f"missing {', '.join(missing)}")
    return named


def _decode_retry(slot: bytes) -> JobRetryOverride | None:
    if slot == b"\xc0":
        return None
    # An array must have both slots; in a map both may be missing.
    slots = _named_slots(slot, ("max_attempts", "backoff"), required=2 if is_array(slot) else 0)
    max_attempts = _decode_opt_u32(slots.get("max_attempts", b"\xc0"))
    backoff_slot = slots.get("backoff", b"\xc0")
    if backoff_slot == b"\xc0":
        return JobRetryOverride(max_attempts)
    wire = _decode_map_backoff(backoff_slot) if is_map(backoff_slot) else _decode_backoff(backoff_slot)
    return JobRetryOverride(max_attempts, from_wire_backoff(wire))
