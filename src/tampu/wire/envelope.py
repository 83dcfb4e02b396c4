"""The job envelope: `[id, payload, created_at_ms, attempt]`, plus the retry override when there is one.

Encoding is byte for byte that of ChasquiMQ 1.3.0. Decoding accepts payloads of either format, and the
other forms that 1.3.0 accepts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from tampu.errors import DecodeError, EncodeError
from tampu.wire.extras import split_extras
from tampu.wire.job import Job
from tampu.wire.payload import bin_header
from tampu.wire.retry import (
    BackoffSpec,
    JobRetryOverride,
    WireBackoff,
    WireRetry,
    from_wire_backoff,
    from_wire_retry,
    to_wire_retry,
)
from tampu.wire.scan import NIL, REFUSALS, U32, U64, fields_of, read_text, reader, variant_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class _Envelope(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    id: str
    payload: msgspec.Raw
    created_at_ms: U64
    attempt: U32 = 0
    retry: WireRetry | None = None


class BinEnvelope(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """An envelope with a payload in format 'bin': `payload` is the user's value as MessagePack."""

    id: str
    payload: bytes
    created_at_ms: U64
    attempt: U32 = 0
    retry: WireRetry | None = None


_decode_envelope = msgspec.msgpack.Decoder(_Envelope).decode
_decode_bin_envelope = msgspec.msgpack.Decoder(BinEnvelope).decode
_encode = msgspec.msgpack.Encoder().encode


def encode_envelope(
    job_id: str, slot: bytes, created_at_ms: int, attempt: int = 0, retry: JobRetryOverride | None = None
) -> bytes:
    """Return the envelope of a job whose payload slot is already encoded."""
    try:
        head = _encode(str(job_id))  # msgspec does not encode subclasses of str, such as JobId
        tail = _encode(created_at_ms) + _encode(attempt)
    except (UnicodeEncodeError, OverflowError) as error:
        raise EncodeError(f"job {job_id!r} cannot be encoded: {error}") from error
    if retry is None:
        return b"\x94%b%b%b" % (head, slot, tail)
    return b"\x95%b%b%b%b" % (head, slot, tail, _encode(to_wire_retry(retry)))


def fresh_envelope(
    job_id: str, payload: bytes | msgspec.Raw, created_at_ms: int, retry: JobRetryOverride | None
) -> bytes:
    """Return the envelope of a new job. The payload is wrapped in a bin; `Raw` is written inline."""
    if retry is None:
        return _encode((job_id, payload, created_at_ms, 0))
    return _encode((job_id, payload, created_at_ms, 0, to_wire_retry(retry)))


def fresh_envelopes(
    ids: Iterable[str],
    payloads: Iterable[bytes | msgspec.Raw],
    created_at_ms: int,
    retry: JobRetryOverride | None = None,
) -> list[bytes]:
    """Return the envelopes of new jobs. Faster than calling `fresh_envelope` for each."""
    end = (created_at_ms, 0) if retry is None else (created_at_ms, 0, to_wire_retry(retry))
    return [_encode((job_id, payload, *end)) for job_id, payload in zip(ids, payloads, strict=True)]


class _Frames(dict[int, bytes]):
    """By payload size: the format of an envelope as an argument of a command; takes ID, payload and end."""

    def __missing__(self, size: int) -> bytes:
        header = bin_header(size)
        length = 2 + ULID_BYTES + len(header) + size + _END_BYTES
        frame = b"$%d\r\n\x94\xba%%b%b%%b%%b\r\n" % (length, header.replace(b"%", b"%%"))
        if len(self) < MAX_FRAMES:
            self[size] = frame
        return frame


#: Length of a generated ID, and of the end of an envelope: the time in nine bytes and the attempt 0.
ULID_BYTES = 26
_END_BYTES = 10
#: Sizes of payloads whose format is kept.
MAX_FRAMES = 10_000
_frame_of = _Frames().__getitem__


def packed_envelopes(ids: list[str], payloads: Sequence[bytes], created_at_ms: int) -> bytes | None:
    """Return the envelopes of new jobs with generated IDs as arguments of a command, all made by one format.

    None if the time is not that of a clock set right: then `fresh_envelopes` makes them.
    """
    end = _encode(created_at_ms) + b"\x00"
    if len(end) != _END_BYTES:
        return None
    values = [end] * (3 * len(ids))
    values[::3] = "\n".join(ids).encode().split(b"\n")
    values[1::3] = payloads
    return b"".join(map(_frame_of, map(len, payloads))) % tuple(values)


def fresh_envelope_ends(
    job_id: str, payload_bytes: int, created_at_ms: int, retry: JobRetryOverride | None, *, inline: bool
) -> tuple[bytes, bytes]:
    """Return what comes before and after a payload in the envelope of a new job, for payloads too large to copy."""
    head = (b"\x94" if retry is None else b"\x95") + _encode(job_id)
    tail = _encode(created_at_ms) + b"\x00"
    return (
        head if inline else head + bin_header(payload_bytes),
        tail if retry is None else tail + _encode(to_wire_retry(retry)),
    )


def encode_job(job: Job[Any]) -> bytes:
    """Return the envelope of a job, without its name, which is a separate field."""
    return encode_envelope(job.id, job._slot, job.created_at_ms, job.attempt, job.retry) + job._tail


def decode_job(data: bytes, name: str = "") -> Job[Any]:
    """Decode an envelope. `name` is the value of the field `n`. Raises `DecodeError`."""
    tail = b""
    try:
        envelope = _decode_envelope(data)
    except REFUSALS:
        head, tail = split_extras(data)
        try:
            # Only once: an entry can hold thousands of frames, and reading the envelope again for each takes a second.
            envelope = _decode_envelope(head)
        except REFUSALS:
            return decode_any_envelope(head, name, tail)
    retry = None if envelope.retry is None else from_wire_retry(envelope.retry)
    return Job.from_wire(
        envelope.id, bytes(envelope.payload), envelope.created_at_ms, envelope.attempt, retry, name, tail
    )


def decode_bin_envelopes(many: Iterable[bytes | None]) -> list[BinEnvelope] | None:
    """Decode many envelopes in format 'bin', which nearly all writers use.

    Return None if one of them has another form; `decode_job` then decodes each, or raises.
    """
    try:
        return list(map(_decode_bin_envelope, many))  # type: ignore[arg-type]
    except (*REFUSALS, TypeError):
        return None


_FIELDS = ("id", "payload", "created_at_ms", "attempt", "retry")
_RETRY_FIELDS = ("max_attempts", "backoff")
_BACKOFF_FIELDS = ("kind", "delay_ms", "max_delay_ms", "multiplier", "jitter_ms")
_BACKOFF_KINDS = ("fixed", "exponential")

_read_u64 = reader(U64)
_read_u32 = reader(U32)
_read_optional_u64 = reader(U64 | None)
_read_optional_u32 = reader(U32 | None)
_read_optional_float = reader(float | None)


def decode_any_envelope(data: bytes, name: str, tail: bytes) -> Job[Any]:
    """Decode an envelope of any accepted form. Slower than `decode_job`, which falls back to it."""
    try:
        slots = fields_of(data, _FIELDS, in_array=3, in_map=3)
        job_id = read_text(slots["id"])
        created_at_ms = _read_u64(slots["created_at_ms"])
        attempt = _read_u32(slots["attempt"]) if "attempt" in slots else 0
        retry = _read_retry(slots.get("retry", NIL))
    except DecodeError as error:
        raise DecodeError(f"not a job envelope: {error}") from error
    return Job.from_wire(job_id, slots["payload"], created_at_ms, attempt, retry, name, tail)


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
