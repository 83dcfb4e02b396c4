"""The stored form of a repeatable: `[key, job_name, pattern, payload, limit, start_after_ms, end_before_ms, fired]`.

The policy for missed fires is a ninth slot when it is not Skip. Enum variants are one-entry maps to positional arrays:
`{"Every": [interval_ms]}`. The slot `fired` is always 0: the real counter is a hash field of its own.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tampu.checks import MAX_U32, MAX_U64, check_int, shown
from tampu.errors import DecodeError
from tampu.wire.payload import decode_value
from tampu.wire.repeat import MissedFiresPolicy, RepeatPattern, StoredSpec
from tampu.wire.scan import end_of_value

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
_OPTIONAL_FROM = 7  # the first seven slots must be there
_encode = msgspec.msgpack.Encoder().encode


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
    return _encode(slots)


def decode_spec(data: bytes) -> StoredSpec:
    """A spec of any implementation: 7 to 9 slots, or a map by field name; `DecodeError` when there is none."""
    value = decode_value(data[: end_of_value(data)])
    if isinstance(value, list):
        if not _OPTIONAL_FROM <= len(value) <= len(_FIELDS):
            raise DecodeError(f"a repeatable spec has {_OPTIONAL_FROM} to {len(_FIELDS)} slots; got {len(value)}")
        value = dict(zip(_FIELDS, value, strict=False))
    elif not isinstance(value, dict):
        raise DecodeError(f"a repeatable spec is an array or a map; got {shown(value)}")
    try:
        return StoredSpec(
            key=_text(value["key"]),
            job_name=_text(value["job_name"]),
            pattern=_pattern(value["pattern"]),
            payload_slot=_payload(value["payload"]),
            limit=_optional_u64(value.get("limit")),
            start_after_ms=_optional_u64(value.get("start_after_ms")),
            end_before_ms=_optional_u64(value.get("end_before_ms")),
            missed_fires=_policy(value.get("missed_fires", "Skip")),
        )
    except KeyError as missing:
        raise DecodeError(f"a repeatable spec lacks {missing}") from None
    except (ValueError, TypeError) as error:  # ConfigError is a ValueError: a pattern no scheduler could run
        raise DecodeError(f"not a repeatable spec: {error}") from error


def _text(value: object) -> str:
    if isinstance(value, bytes):
        return value.decode()
    if not isinstance(value, str):
        raise TypeError(f"expected text; got {shown(value)}")
    return value


def _optional_u64(value: object) -> int | None:
    return None if value is None else check_int("number", value, high=MAX_U64)


def _payload(value: object) -> bytes:
    if isinstance(value, list):
        return bytes(value)  # ValueError or TypeError unless all are bytes
    if not isinstance(value, bytes):
        raise TypeError(f"expected the payload as bin; got {shown(value)}")
    return value


def _variant(value: object, names: tuple[str, ...]) -> tuple[str, object]:
    """(variant name, its content) of an enum: a name, or a map of one name or index."""
    if isinstance(value, str | bytes):
        return _text(value), None
    if isinstance(value, dict) and len(value) == 1:
        tag, content = next(iter(value.items()))
        if isinstance(tag, int) and not isinstance(tag, bool):
            if not 0 <= tag < len(names):
                raise ValueError(f"expected a variant of {names}; got number {tag}")
            return names[tag], content
        return _text(tag), content
    raise TypeError(f"expected one of {', '.join(names)}; got {shown(value)}")


def _arguments(content: object, *fields: str) -> list[object]:
    """A variant's fields, positional or by name; trailing ones may be missing from a map."""
    if isinstance(content, list) and len(content) == len(fields):
        return content
    if isinstance(content, dict):
        return [content.get(name) for name in fields]
    raise TypeError(f"expected {', '.join(fields)}; got {shown(content)}")


def _pattern(value: object) -> RepeatPattern:
    name, content = _variant(value, ("Cron", "Every"))
    if name == "Every":
        (interval_ms,) = _arguments(content, "interval_ms")
        return RepeatPattern("every", interval_ms=check_int("interval_ms", interval_ms, low=1))
    if name == "Cron":
        expression, tz = _arguments(content, "expression", "tz")
        return RepeatPattern("cron", _text(expression), None if tz is None else _text(tz))
    raise ValueError(f"unknown pattern {name!r}")


def _policy(value: object) -> MissedFiresPolicy:
    name, content = _variant(value, ("Skip", "FireOnce", "FireAll"))
    if name == "Skip":
        return MissedFiresPolicy.skip()
    if name == "FireOnce":
        return MissedFiresPolicy.fire_once()
    if name == "FireAll":
        (max_catchup,) = _arguments(content, "max_catchup")
        return MissedFiresPolicy.fire_all(check_int("max_catchup", max_catchup, low=1, high=MAX_U32))
    raise ValueError(f"unknown policy {name!r}")
