"""The job envelope: `[id, payload, created_at_ms, attempt]`, plus the retry override when there is one.

Written as ChasquiMQ 1.3.0 writes it, byte for byte. Read as 1.3.0 reads it: 3, 4 or 5 slots, maps by field name,
wide integers, ids as bin, bytes behind the envelope; beyond it, payloads of either format.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from tampu.errors import DecodeError, EncodeError
from tampu.wire.job import Job
from tampu.wire.retry import (
    BackoffSpec,
    JobRetryOverride,
    WireBackoff,
    WireRetry,
    from_wire_backoff,
    from_wire_retry,
    to_wire_retry,
)
from tampu.wire.scan import NIL
from tampu.wire.serde import REFUSALS, U32, U64, fields_of, read_text, reader, variant_of

if TYPE_CHECKING:
    from collections.abc import Iterable


class _Envelope(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    id: str
    payload: msgspec.Raw
    created_at_ms: U64
    attempt: U32 = 0
    retry: WireRetry | None = None


class BinEnvelope(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """An envelope whose payload is in format 'bin': `payload` is the user's value as MessagePack."""

    id: str
    payload: bytes
    created_at_ms: U64
    attempt: U32 = 0
    retry: WireRetry | None = None


_decode_envelope = msgspec.msgpack.Decoder(_Envelope).decode
_decode_bin_envelope = msgspec.msgpack.Decoder(BinEnvelope).decode
_encode = msgspec.msgpack.Encoder().encode

_read_u64 = reader(U64)
_read_u32 = reader(U32)
_read_optional_u64 = reader(U64 | None)
_read_optional_u32 = reader(U32 | None)
_read_optional_float = reader(float | None)

_FIELDS = ("id", "payload", "created_at_ms", "attempt", "retry")
_RETRY_FIELDS = ("max_attempts", "backoff")
_BACKOFF_FIELDS = ("kind", "delay_ms", "max_delay_ms", "multiplier", "jitter_ms")
_BACKOFF_KINDS = ("fixed", "exponential")


def encode_envelope(
    job_id: str, slot: bytes, created_at_ms: int, attempt: int = 0, retry: JobRetryOverride | None = None
) -> bytes:
    """An envelope around a payload slot that is already encoded."""
    try:
        head = _encode(str(job_id))  # of a subclass too, such as the JobId of an add
        tail = _encode(created_at_ms) + _encode(attempt)
    except (UnicodeEncodeError, OverflowError) as error:
        raise EncodeError(f"job {job_id!r} cannot be encoded: {error}") from error
    if retry is None:
        return b"\x94%b%b%b" % (head, slot, tail)
    return b"\x95%b%b%b%b" % (head, slot, tail, _encode(to_wire_retry(retry)))


def fresh_envelope(
    job_id: str, payload: bytes | msgspec.Raw, created_at_ms: int, retry: JobRetryOverride | None
) -> bytes:
    """The envelope of a job that was never run; its payload is wrapped, or stands inline when it is `Raw`."""
    if retry is None:
        return _encode((job_id, payload, created_at_ms, 0))
    return _encode((job_id, payload, created_at_ms, 0, to_wire_retry(retry)))


def fresh_envelopes(
    ids: Iterable[str],
    payloads: Iterable[bytes | msgspec.Raw],
    created_at_ms: int,
    retry: JobRetryOverride | None = None,
) -> list[bytes]:
    """The same for many at once, without a call for each."""
    pairs = zip(ids, payloads, strict=True)
    if retry is None:
        return [_encode((job_id, payload, created_at_ms, 0)) for job_id, payload in pairs]
    wire_retry = to_wire_retry(retry)
    return [_encode((job_id, payload, created_at_ms, 0, wire_retry)) for job_id, payload in pairs]


def encode_job(job: Job[Any]) -> bytes:
    """The envelope of a job. Its name is not part of it: it travels as a field of its own."""
    return encode_envelope(job.id, job._slot, job.created_at_ms, job.attempt, job.retry)


def decode_job(data: bytes, name: str = "") -> Job[Any]:
    """The job in an envelope; `DecodeError` when there is none. `name` is what the field `n` said."""
    try:
        envelope = _decode_envelope(data)
    except REFUSALS:
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


def decode_bin_envelopes(many: Iterable[bytes | None]) -> list[BinEnvelope] | None:
    """Envelopes as nearly all writers write them, for those who read many at once.

    None when one of them is not of that form: then `decode_job` reads each, or says why not.
    """
    try:
        return list(map(_decode_bin_envelope, many))  # type: ignore[arg-type]
    except (*REFUSALS, TypeError):
        return None


def decode_id_and_time(data: bytes) -> tuple[str, int]:
    """(job id, created at in ms) of an envelope, for those who only pass it on; `DecodeError` when there is none."""
    try:
        envelope = _decode_envelope(data)
    except REFUSALS:
        job = _decode_leniently(data, "")
        return job.id, job.created_at_ms
    return envelope.id, envelope.created_at_ms


def _decode_leniently(data: bytes, name: str) -> Job[Any]:
    """The forms no writer of today uses but 1.3.0 reads; slower, and where every refusal gets its text."""
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
        raise DecodeError("a backoff's kind has no content")
    return from_wire_backoff(
        WireBackoff(
            kind or "unknown",
            _read_u64(slots["delay_ms"]),
            _read_optional_u64(slots.get("max_delay_ms", NIL)),
            _read_optional_float(slots.get("multiplier", NIL)),
            _read_optional_u64(slots.get("jitter_ms", NIL)),
        )
    )
