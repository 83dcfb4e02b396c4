"""Repeatable jobs: when they fire and what happens to missed fires. Their stored form is in `stored_spec.py`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Generic, Literal, Self, TypeVar

from tampu.checks import MAX_U32, check_int, check_job_name, check_text, refuse
from tampu.wire.cron import next_fire, parse_cron
from tampu.wire.payload import PayloadFormat, decode_slot, encode_slot
from tampu.wire.zones import parse_zone

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RepeatPattern:
    """When a repeatable fires: a cron expression in a time zone, or every so many milliseconds."""

    kind: Literal["cron", "every"]
    expression: str | None = None
    tz: str | None = None
    interval_ms: int | None = None

    def __post_init__(self) -> None:
        if self.kind == "cron":
            parse_cron(check_text("pattern.expression", self.expression))
            if self.tz is not None:
                parse_zone(check_text("pattern.tz", self.tz, blank_ok=True))
            if self.interval_ms is not None:
                raise refuse("pattern.interval_ms", self.interval_ms, "left out of a cron pattern")
        elif self.kind == "every":
            check_int("pattern.interval_ms", self.interval_ms, low=1)
            if self.expression is not None or self.tz is not None:
                raise refuse("pattern.expression and tz", (self.expression, self.tz), "left out of an every pattern")
        else:
            raise refuse("pattern.kind", self.kind, "'cron' or 'every'")

    @classmethod
    def cron(cls, expression: str, *, tz: str | None = None) -> Self:
        """By a cron expression (5 fields, 6 with seconds, 7 with a year) in `tz`: an IANA name, an offset, or UTC."""
        return cls("cron", expression, tz)

    @classmethod
    def every(cls, interval_ms: int) -> Self:
        """Every `interval_ms` milliseconds, counted from when it is registered."""
        return cls("every", interval_ms=interval_ms)

    def signature(self) -> str:
        """The stable text that a spec's key is made of when the caller gives none."""
        if self.kind == "every":
            return f"every:{self.interval_ms}"
        return f"cron:{self.expression}:{'UTC' if self.tz is None else self.tz}"

    def to_dict(self) -> dict[str, Any]:
        """The fields that are set."""
        fields = {
            "kind": self.kind,
            "expression": self.expression,
            "tz": self.tz,
            "interval_ms": self.interval_ms,
        }
        return {name: value for name, value in fields.items() if value is not None}

    def next_fire_ms(self, after_ms: int) -> int | None:
        """The first fire strictly after `after_ms`; None when there is none any more."""
        if self.kind == "every":
            return after_ms + (self.interval_ms or 0)
        return next_fire(self.expression or "", self.tz, after_ms)


@dataclass(frozen=True, slots=True)
class MissedFiresPolicy:
    """What to do with fires that fell due while no scheduler ran."""

    kind: Literal["skip", "fire-once", "fire-all"] = "skip"
    max_catchup: int | None = None

    def __post_init__(self) -> None:
        if self.kind == "fire-all":
            check_int("missed_fires.max_catchup", self.max_catchup, low=1, high=MAX_U32)
        elif self.kind in ("skip", "fire-once"):
            if self.max_catchup is not None:
                raise refuse("missed_fires.max_catchup", self.max_catchup, f"left out with {self.kind!r}")
        else:
            raise refuse("missed_fires.kind", self.kind, "'skip', 'fire-once' or 'fire-all'")

    @classmethod
    def skip(cls) -> Self:
        """Drop them (the default): no herd after a restart."""
        return cls("skip")

    @classmethod
    def fire_once(cls) -> Self:
        """One fire for all of them."""
        return cls("fire-once")

    @classmethod
    def fire_all(cls, max_catchup: int) -> Self:
        """Each of them, oldest first, at most `max_catchup` (1 or more)."""
        if isinstance(max_catchup, bool) or not isinstance(max_catchup, int):
            raise TypeError(f"max_catchup must be a whole number of 1 or more; got {max_catchup!r}")
        return cls("fire-all", max_catchup)

    def to_dict(self) -> dict[str, Any]:
        """The fields that are set."""
        return {"kind": self.kind} | ({} if self.max_catchup is None else {"max_catchup": self.max_catchup})

    @classmethod
    def from_wire(cls, max_catchup: int) -> Self:
        """`fire_all` as another implementation stored it. There it may be 0: no missed fire is made up for."""
        policy = object.__new__(cls)
        object.__setattr__(policy, "kind", "fire-all")
        object.__setattr__(policy, "max_catchup", max_catchup)
        return policy


def _check_bounds(limit: int | None, start_after_ms: int | None, end_before_ms: int | None) -> None:
    for name, value in (("limit", limit), ("start_after_ms", start_after_ms), ("end_before_ms", end_before_ms)):
        if value is not None:
            check_int(name, value)


@dataclass(frozen=True, slots=True)
class RepeatableSpec(Generic[T]):
    """A recurring job. Build it with `RepeatableSpec(name, pattern, payload).with_limit(10)` and so on."""

    job_name: str
    pattern: RepeatPattern
    payload: T
    key: str = ""
    #: Fires in all; None or 0 means without end.
    limit: int | None = None
    start_after_ms: int | None = None
    end_before_ms: int | None = None
    missed_fires: MissedFiresPolicy = field(default_factory=MissedFiresPolicy)

    def __post_init__(self) -> None:
        check_job_name(self.job_name, "job_name")
        check_text("key", self.key, blank_ok=True)
        _check_bounds(self.limit, self.start_after_ms, self.end_before_ms)
        if not isinstance(self.pattern, RepeatPattern):
            raise refuse("pattern", self.pattern, "a RepeatPattern")
        if not isinstance(self.missed_fires, MissedFiresPolicy):
            raise refuse("missed_fires", self.missed_fires, "a MissedFiresPolicy")

    def with_key(self, key: str) -> Self:
        """The same spec under this key instead of `<job_name>::<signature>`."""
        return replace(self, key=key)

    def with_limit(self, limit: int) -> Self:
        """The same spec, fired at most so many times."""
        return replace(self, limit=limit)

    def with_start_after_ms(self, ms: int) -> Self:
        """The same spec, without fires up to this instant."""
        return replace(self, start_after_ms=ms)

    def with_end_before_ms(self, ms: int) -> Self:
        """The same spec, without fires after this instant."""
        return replace(self, end_before_ms=ms)

    def with_missed_fires(self, policy: MissedFiresPolicy) -> Self:
        """The same spec with this policy for missed fires."""
        return replace(self, missed_fires=policy)

    def resolved_key(self) -> str:
        """The key it is stored under."""
        return self.key or f"{self.job_name}::{self.pattern.signature()}"

    def stored(self, payload_format: PayloadFormat = "bin") -> StoredSpec:
        """The form that is written."""
        return self.stored_with(encode_slot(self.payload, payload_format))

    def stored_with(self, payload_slot: bytes) -> StoredSpec:
        """The form that is written, around a payload that is encoded already."""
        return StoredSpec(
            key=self.resolved_key(),
            job_name=self.job_name,
            pattern=self.pattern,
            payload_slot=payload_slot,
            limit=self.limit,
            start_after_ms=self.start_after_ms,
            end_before_ms=self.end_before_ms,
            missed_fires=self.missed_fires,
        )


@dataclass(frozen=True, slots=True)
class RepeatableMeta:
    """What a listing tells of a repeatable: all but its payload."""

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
    """A spec as it is stored. `payload_slot` goes into each fire's envelope as it is."""

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
        """The user's value; `DecodeError` when the slot holds none."""
        return decode_slot(self.payload_slot)

    def meta(self, next_fire_ms: int) -> RepeatableMeta:
        """What a listing tells of it."""
        return RepeatableMeta(
            key=self.key,
            job_name=self.job_name,
            pattern=self.pattern,
            next_fire_ms=next_fire_ms,
            limit=self.limit,
            start_after_ms=self.start_after_ms,
            end_before_ms=self.end_before_ms,
            missed_fires=self.missed_fires,
        )
