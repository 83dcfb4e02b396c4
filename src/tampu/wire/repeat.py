"""Repeatable jobs: patterns, policies for missed fires, and the stored form of a spec.

The stored form is `[key, job_name, pattern, payload, limit, start_after_ms, end_before_ms, fired]`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeVar

import msgspec

from tampu.base.checks import MAX_U32, check_int, check_job_name, check_text, invalid
from tampu.errors import ConfigError, DecodeError, EncodeError
from tampu.wire.payload import PayloadFormat, decode_slot, encode_slot
from tampu.wire.retry import unchecked, without_none
from tampu.wire.scan import NIL, U8, U32, U64, end_of_value, fields_of, is_array, read_text, reader, variant_of

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

_FIELDS = ("key", "job_name", "pattern", "payload", "limit", "start_after_ms", "end_before_ms", "fired", "missed_fires")
_encode = msgspec.msgpack.Encoder().encode

_read_u64: Callable[[bytes], int] = reader(U64)
_read_u32: Callable[[bytes], int] = reader(U32)
_read_optional_u64: Callable[[bytes], int | None] = reader(U64 | None)
_read_bytes: Callable[[bytes], bytes] = reader(bytes)
_read_octets: Callable[[bytes], list[int]] = reader(list[U8])


@dataclass(frozen=True, slots=True)
class RepeatPattern:
    """When a repeatable fires: by a cron expression in a time zone, or every `interval_ms` milliseconds."""

    kind: Literal["cron", "every"]
    expression: str | None = None
    tz: str | None = None
    interval_ms: int | None = None

    def __post_init__(self) -> None:
        if self.kind == "cron":
            # Imported here: the cron modules load slowly, and most programs do not use them.
            from tampu.wire.cron.schedule import parse_cron
            from tampu.wire.cron.zones import parse_zone

            parse_cron(check_text("pattern.expression", self.expression))
            if self.tz is not None:
                parse_zone(check_text("pattern.tz", self.tz, blank_ok=True))
            if self.interval_ms is not None:
                raise invalid("pattern.interval_ms", self.interval_ms, "None in a cron pattern")
        elif self.kind == "every":
            check_int("pattern.interval_ms", self.interval_ms, low=1)
            if self.expression is not None or self.tz is not None:
                raise invalid("pattern.expression and tz", (self.expression, self.tz), "None in an 'every' pattern")
        else:
            raise invalid("pattern.kind", self.kind, "'cron' or 'every'")

    @classmethod
    def cron(cls, expression: str, *, tz: str | None = None) -> Self:
        """Fire at the times of a cron expression (5 fields, 6 with seconds, 7 with a year) in `tz` (default: UTC).

        `tz` is an IANA name or an offset such as "+05:30": `RepeatPattern.cron("0 9 * * 1-5", tz="Europe/Paris")`.
        """
        return cls("cron", expression, tz)

    @classmethod
    def every(cls, interval_ms: int) -> Self:
        """Fire every `interval_ms` milliseconds, starting one interval after registration."""
        return cls("every", interval_ms=interval_ms)

    def signature(self) -> str:
        """Return the stable text that a spec's default key is built from."""
        if self.kind == "every":
            return f"every:{self.interval_ms}"
        return f"cron:{self.expression}:{'UTC' if self.tz is None else self.tz}"

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that are not None."""
        return without_none(asdict(self))

    def next_fire_ms(self, after_ms: int) -> int | None:
        """Return the first fire strictly after `after_ms`; None if there is none."""
        if self.kind == "every":
            return after_ms + (self.interval_ms or 0)
        from tampu.wire.cron.schedule import next_fire

        return next_fire(self.expression or "", self.tz, after_ms)


@dataclass(frozen=True, slots=True)
class MissedFiresPolicy:
    """Policy for fires that fell due while no scheduler ran."""

    kind: Literal["skip", "fire-once", "fire-all"] = "skip"
    max_catchup: int | None = None

    def __post_init__(self) -> None:
        if self.kind == "fire-all":
            check_int("missed_fires.max_catchup", self.max_catchup, low=1, high=MAX_U32)
        elif self.kind in ("skip", "fire-once"):
            if self.max_catchup is not None:
                raise invalid("missed_fires.max_catchup", self.max_catchup, f"None for {self.kind!r}")
        else:
            raise invalid("missed_fires.kind", self.kind, "'skip', 'fire-once' or 'fire-all'")

    @classmethod
    def skip(cls) -> Self:
        """Drop missed fires (the default): no burst of jobs after a restart."""
        return cls("skip")

    @classmethod
    def fire_once(cls) -> Self:
        """Fire once for all missed fires."""
        return cls("fire-once")

    @classmethod
    def fire_all(cls, max_catchup: int) -> Self:
        """Fire once for each missed fire, oldest first, at most `max_catchup` (1 or more)."""
        if isinstance(max_catchup, bool) or not isinstance(max_catchup, int):
            raise TypeError(f"max_catchup must be a whole number of 1 or more; got {max_catchup!r}")
        return cls("fire-all", max_catchup)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that are not None."""
        return without_none(asdict(self))


#: The fields that a spec, its stored form and its form in listings share.
_SHARED = ("job_name", "pattern", "limit", "start_after_ms", "end_before_ms", "missed_fires")


def _shared(spec: object) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in _SHARED}


@dataclass(frozen=True, slots=True)
class RepeatableSpec(Generic[T]):
    """A recurring job, for example `RepeatableSpec("report", RepeatPattern.cron("0 9 * * *"), {}).with_limit(10)`."""

    job_name: str
    pattern: RepeatPattern
    payload: T
    key: str = ""
    #: Total number of fires; None or 0 means no limit.
    limit: int | None = None
    start_after_ms: int | None = None
    end_before_ms: int | None = None
    missed_fires: MissedFiresPolicy = field(default_factory=MissedFiresPolicy)

    def __post_init__(self) -> None:
        check_job_name(self.job_name, "job_name")
        check_text("key", self.key, blank_ok=True)
        for name in ("limit", "start_after_ms", "end_before_ms"):
            if (value := getattr(self, name)) is not None:
                check_int(name, value)
        if not isinstance(self.pattern, RepeatPattern):
            raise invalid("pattern", self.pattern, "a RepeatPattern")
        if not isinstance(self.missed_fires, MissedFiresPolicy):
            raise invalid("missed_fires", self.missed_fires, "a MissedFiresPolicy")

    def with_key(self, key: str) -> Self:
        """Return a copy with this key instead of `<job_name>::<signature>`."""
        return replace(self, key=key)

    def with_limit(self, limit: int) -> Self:
        """Return a copy that fires at most `limit` times."""
        return replace(self, limit=limit)

    def with_start_after_ms(self, ms: int) -> Self:
        """Return a copy that fires only after this instant (epoch milliseconds)."""
        return replace(self, start_after_ms=ms)

    def with_end_before_ms(self, ms: int) -> Self:
        """Return a copy that does not fire after this instant (epoch milliseconds)."""
        return replace(self, end_before_ms=ms)

    def with_missed_fires(self, policy: MissedFiresPolicy) -> Self:
        """Return a copy with this policy for missed fires."""
        return replace(self, missed_fires=policy)

    def resolved_key(self) -> str:
        """Return the key that the spec is stored under."""
        return self.key or f"{self.job_name}::{self.pattern.signature()}"

    def stored(self, payload_format: PayloadFormat = "bin") -> StoredSpec:
        """Return the stored form, with the payload encoded."""
        return self.stored_with(encode_slot(self.payload, payload_format))

    def stored_with(self, payload_slot: bytes) -> StoredSpec:
        """Return the stored form with an already encoded payload."""
        return StoredSpec(key=self.resolved_key(), payload_slot=payload_slot, **_shared(self))


@dataclass(frozen=True, slots=True)
class RepeatableMeta:
    """A repeatable job as returned by listings, without its payload."""

    key: str
    job_name: str
    pattern: RepeatPattern
    next_fire_ms: int
    limit: int | None = None
    start_after_ms: int | None = None
    end_before_ms: int | None = None
    missed_fires: MissedFiresPolicy = field(default_factory=MissedFiresPolicy)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredSpec:
    """A spec as it is stored. `payload_slot` is copied into each fire's envelope."""

    key: str
    job_name: str
    pattern: RepeatPattern
    payload_slot: bytes
    limit: int | None = None
    start_after_ms: int | None = None
    end_before_ms: int | None = None
    missed_fires: MissedFiresPolicy = field(default_factory=MissedFiresPolicy)

    @property
    def payload(self) -> Any:
        """The decoded payload. Raises `DecodeError` if it is not valid MessagePack."""
        return decode_slot(self.payload_slot)

    def meta(self, next_fire_ms: int) -> RepeatableMeta:
        """Return the form used in listings."""
        return RepeatableMeta(key=self.key, next_fire_ms=next_fire_ms, **_shared(self))


def encode_spec(spec: StoredSpec) -> bytes:
    """Encode a spec byte for byte as ChasquiMQ 1.3.0 does.

    An enum variant is a one-key map to a positional array: `{"Every": [interval_ms]}`. The slot `fired` is always 0:
    the counter is a separate field of the hash. The policy for missed fires is a ninth slot, left out for Skip.
    """
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
    """Decode a spec of any implementation: 7 to 9 slots, or a map by field name. Raises `DecodeError`."""
    try:
        slots = fields_of(data, _FIELDS, in_array=7, in_map=4)
        _read_u64(slots.get("fired", b"\x00"))  # unused, but it must be a number
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
    except (DecodeError, ConfigError) as error:  # ConfigError: the pattern is not valid
        raise DecodeError(f"not a repeatable spec: {error}") from error


def _read_payload(slot: bytes) -> bytes:
    """Return the payload without trailing bytes, which would corrupt the envelopes of the schedule's jobs."""
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
    raise DecodeError("the pattern must be Cron or Every")


def _read_policy(slot: bytes) -> MissedFiresPolicy:
    name, content = variant_of(slot, ("Skip", "FireOnce", "FireAll"))
    if name == "FireAll":
        fields = fields_of(content, ("max_catchup",), in_array=1, in_map=1)
        # Another implementation may have stored 0: drop all missed fires.
        return unchecked(MissedFiresPolicy, "fire-all", _read_u32(fields["max_catchup"]))
    if name is None or content != NIL:
        raise DecodeError("the policy for missed fires must be Skip, FireOnce or FireAll")
    return MissedFiresPolicy.skip() if name == "Skip" else MissedFiresPolicy.fire_once()
