"""The stored form of a repeatable: `[key, job_name, pattern, payload, limit, start_after_ms, end_before_ms, fired]`.

The policy for missed fires is a ninth slot when it is not Skip. Enum variants are one-entry maps to positional arrays:
`{"Every": [interval_ms]}`. The slot `fired` is always 0: the real counter is a hash field of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from tampu.errors import ConfigError, DecodeError, EncodeError
from tampu.wire.repeat import MissedFiresPolicy, RepeatPattern, StoredSpec
from tampu.wire.scan import NIL, end_of_value, is_array
from tampu.wire.serde import U8, U32, U64, fields_of, read_text, reader, variant_of

if TYPE_CHECKING:
    from collections.abc import Callable

_FIELDS = (
    "key",
    "job_name",
    "pattern",
    "payload",
    "limit",
    "start_after_ms",
    "end_before_ms",
    "fired",
    "missed_fires",
)
_encode = msgspec.msgpack.Encoder().encode

_read_u64: Callable[[bytes], int] = reader(U64)
_read_u32: Callable[[bytes], int] = reader(U32)
_read_optional_u64: Callable[[bytes], int | None] = reader(U64 | None)
_read_bytes: Callable[[bytes], bytes] = reader(bytes)
_read_octets: Callable[[bytes], list[int]] = reader(list[U8])


def encode_spec(spec: StoredSpec) -> bytes:
    """A spec as 1.3.0 writes it, byte for byte."""
    pattern = spec.pattern
    variant = (
        {"Every": [pattern.interval_ms]} if pattern.kind == "every" else {"Cron": [pattern.expression, pattern.tz]}
    )
    slots: list[Any] = [spec.key, spec.job_name, variant, spec.payload_slot]
    slots += (spec.limit, spec.start_after_ms, spec.end_before_ms, 0)
    policy = spec.missed_fires
    if policy.kind == "fire-once":
        slots.append("FireOnce")
    elif policy.kind == "fire-all":
        slots.append({"FireAll": [policy.max_catchup]})
    try:
        return _encode(slots)
    except (UnicodeEncodeError, OverflowError) as error:
        raise EncodeError(f"repeatable {spec.key!r} cannot be encoded: {error}") from error


def decode_spec(data: bytes) -> StoredSpec:
    """A spec of any implementation: 7 to 9 slots, or a map by field name; `DecodeError` when there is none."""
    try:
        slots = fields_of(data, _FIELDS, in_array=7, in_map=4)
        _read_u64(slots.get("fired", b"\x00"))  # not used, but a spec where it is no number is no spec
        return StoredSpec(
            key=read_text(slots["key"]),
            job_name=read_text(slots["job_name"]),
            pattern=_read_pattern(slots["pattern"]),
            payload_slot=_read_payload(slots["payload"]),
            limit=_read_optional_u64(slots.get("limit", NIL)),
            start_after_ms=_read_optional_u64(slots.get("start_after_ms", NIL)),
            end_before_ms=_read_optional_u64(slots.get("end_before_ms", NIL)),
            missed_fires=_read_policy(slots["missed_fires"]) if "missed_fires" in slots else MissedFiresPolicy.skip(),
        )
    except (DecodeError, ConfigError) as error:  # ConfigError: a pattern no scheduler could run
        raise DecodeError(f"not a repeatable spec: {error}") from error


def _read_payload(slot: bytes) -> bytes:
    """The one value in the payload. Bytes behind it are cut off: they would end up in the middle of an envelope."""
    payload = bytes(_read_octets(slot)) if is_array(slot) else _read_bytes(slot)
    return payload[: end_of_value(payload)]


def _read_pattern(slot: bytes) -> RepeatPattern:
    name, content = variant_of(slot, ("Cron", "Every"))
    if name == "Every":
        fields = fields_of(content, ("interval_ms",), in_array=1, in_map=1)
        return RepeatPattern.every(_read_u64(fields["interval_ms"]))
    if name == "Cron":
        fields = fields_of(content, ("expression", "tz"), in_array=2, in_map=1)
        tz = fields.get("tz", NIL)
        return RepeatPattern.cron(read_text(fields["expression"]), tz=None if tz == NIL else read_text(tz))
    raise DecodeError("unknown pattern")


def _read_policy(slot: bytes) -> MissedFiresPolicy:
    name, content = variant_of(slot, ("Skip", "FireOnce", "FireAll"))
    if name == "FireAll":
        fields = fields_of(content, ("max_catchup",), in_array=1, in_map=1)
        return MissedFiresPolicy.from_wire(_read_u32(fields["max_catchup"]))
    if name is None or content != NIL:
        raise DecodeError("unknown policy for missed fires")
    return MissedFiresPolicy.skip() if name == "Skip" else MissedFiresPolicy.fire_once()
