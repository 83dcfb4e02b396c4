"""Decode envelopes in forms that no current writer produces but ChasquiMQ 1.3.0 accepts.

These are arrays of 3 slots, maps by field name or number, wide integers, ids as bin, and bytes after the envelope.
`decode_job` also gets its error messages from here: msgspec's typed decoder does not name the invalid field.
"""

from __future__ import annotations

from typing import Any

from tampu.errors import DecodeError
from tampu.wire.job import Job
from tampu.wire.retry import BackoffSpec, JobRetryOverride, WireBackoff, from_wire_backoff
from tampu.wire.scan import NIL, U32, U64, fields_of, read_text, reader, variant_of

_FIELDS = ("id", "payload", "created_at_ms", "attempt", "retry")
_RETRY_FIELDS = ("max_attempts", "backoff")
_BACKOFF_FIELDS = ("kind", "delay_ms", "max_delay_ms", "multiplier", "jitter_ms")
_BACKOFF_KINDS = ("fixed", "exponential")

_read_u64 = reader(U64)
_read_u32 = reader(U32)
_read_optional_u64 = reader(U64 | None)
_read_optional_u32 = reader(U32 | None)
_read_optional_float = reader(float | None)


def decode_any_envelope(data: bytes, name: str = "") -> Job[Any]:
    """Decode an envelope of any accepted form. Slower than `decode_job`, which falls back to it."""
    try:
        slots = fields_of(data, _FIELDS, in_array=3, in_map=3)
        job_id = read_text(slots["id"])
        created_at_ms = _read_u64(slots["created_at_ms"])
        attempt = _read_u32(slots["attempt"]) if "attempt" in slots else 0
        retry = _read_retry(slots.get("retry", NIL))
    except DecodeError as error:
        raise DecodeError(f"not a job envelope: {error}") from error
    return Job.from_wire(job_id, slots["payload"], created_at_ms, attempt, retry, name)


def _read_retry(slot: bytes) -> JobRetryOverride | None:
    if slot == NIL:
        return None
    slots = fields_of(slot, _RETRY_FIELDS, in_array=2, in_map=0)
    max_attempts = _read_optional_u32(slots.get("max_attempts", NIL))
    return JobRetryOverride(max_attempts, _read_backoff(slots.get("backoff", NIL)))


def _read_backoff(slot: bytes) -> BackoffSpec | None:
    if slot == NIL:
        return None
    slots = fields_of(slot, _BACKOFF_FIELDS, in_array=5, in_map=2)
    kind, content = variant_of(slots["kind"], _BACKOFF_KINDS)
    if content != NIL:
        raise DecodeError("a backoff kind must not have content")
    return from_wire_backoff(
        WireBackoff(
            kind or "unknown",
            _read_u64(slots["delay_ms"]),
            _read_optional_u64(slots.get("max_delay_ms", NIL)),
            _read_optional_float(slots.get("multiplier", NIL)),
            _read_optional_u64(slots.get("jitter_ms", NIL)),
        )
    )
