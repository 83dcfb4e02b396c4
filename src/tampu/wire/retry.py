"""Retries: the worker's backoff curve, the per-job override, and the delay before the next retry."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import timedelta
from enum import StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Self, TypeVar

import msgspec

from tampu.base.checks import MAX_U32, check_float, check_int, invalid
from tampu.wire.scan import U32, U64  # noqa: TC001 - msgspec reads the annotations at run time

if TYPE_CHECKING:
    from collections.abc import Callable

DEFAULT_INITIAL_BACKOFF_MS = 100
DEFAULT_MAX_BACKOFF_MS = 30_000
DEFAULT_MULTIPLIER = 2.0
DEFAULT_JITTER_MS = 100


class BackoffKind(StrEnum):
    """Growth of the delay. `UNKNOWN` stands for a kind written by a newer version; it is treated as `EXPONENTIAL`."""

    FIXED = "fixed"
    EXPONENTIAL = "exponential"
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryConfig:
    """The worker's backoff curve. A job's `JobRetryOverride` takes precedence.

    | field | unit | default | meaning |
    |---|---|---|---|
    | `initial_backoff_ms` | ms | 100 | delay before the first retry |
    | `max_backoff_ms` | ms | 30000 | maximum delay, before jitter |
    | `multiplier` | | 2.0 | factor by which the delay grows with each retry |
    | `jitter_ms` | ms | 100 | random jitter added to the delay, up to this |
    | `jitter_ratio` | | 0.0 | more random jitter, up to this share of the delay |

    Workers that serve tasks have another default, `tampu.worker.TASK_RETRY`.
    """

    initial_backoff_ms: int = DEFAULT_INITIAL_BACKOFF_MS
    max_backoff_ms: int = DEFAULT_MAX_BACKOFF_MS
    multiplier: float = DEFAULT_MULTIPLIER
    jitter_ms: int = DEFAULT_JITTER_MS
    jitter_ratio: float = 0.0

    def __post_init__(self) -> None:
        for name in ("initial_backoff_ms", "max_backoff_ms", "jitter_ms"):
            check_int(f"retry.{name}", getattr(self, name))
        # As a float: an int to the power of a large attempt number would exhaust the memory before it is capped.
        object.__setattr__(self, "multiplier", check_float("retry.multiplier", self.multiplier))
        if check_float("retry.jitter_ratio", self.jitter_ratio) > 1:
            raise invalid("retry.jitter_ratio", self.jitter_ratio, "a number from 0 to 1")


@dataclass(frozen=True, slots=True)
class BackoffSpec:
    """The backoff of one job. Fields that are None use the worker's `RetryConfig`; `max_delay_ms` caps both kinds."""

    kind: BackoffKind
    delay_ms: int
    max_delay_ms: int | None = None
    multiplier: float | None = None
    jitter_ms: int | None = None

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "kind", BackoffKind(self.kind))
        except ValueError:
            raise invalid("backoff.kind", self.kind, "'fixed' or 'exponential'") from None
        check_int("backoff.delay_ms", self.delay_ms)
        for name in ("max_delay_ms", "jitter_ms"):
            if (value := getattr(self, name)) is not None:
                check_int(f"backoff.{name}", value)
        if self.multiplier is not None:
            object.__setattr__(self, "multiplier", check_float("backoff.multiplier", self.multiplier))

    @classmethod
    def fixed(cls, delay_ms: int | timedelta, jitter_ms: int | timedelta | None = None) -> Self:
        """Wait `delay_ms` (milliseconds or a timedelta) before every retry."""
        return cls(BackoffKind.FIXED, _ms(delay_ms), jitter_ms=_ms(jitter_ms))

    @classmethod
    def exponential(
        cls,
        initial_ms: int | timedelta,
        *,
        multiplier: float = DEFAULT_MULTIPLIER,
        max_ms: int | timedelta | None = None,
        jitter_ms: int | timedelta | None = None,
    ) -> Self:
        """Wait `initial_ms` before the first retry and `multiplier` times longer before each next, up to `max_ms`.

        Each is a timedelta or a number of milliseconds.
        """
        return cls(BackoffKind.EXPONENTIAL, _ms(initial_ms), _ms(max_ms), multiplier, _ms(jitter_ms))

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that are not None."""
        return without_none(asdict(self) | {"kind": str(self.kind)})


def without_none(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}


def _ms(duration: Any) -> Any:
    return duration // timedelta(milliseconds=1) if isinstance(duration, timedelta) else duration


@dataclass(frozen=True, slots=True)
class JobRetryOverride:
    """The attempts and the backoff of one job; None means the worker's setting."""

    max_attempts: int | None = None
    backoff: BackoffSpec | None = None

    def __post_init__(self) -> None:
        if self.max_attempts is not None:
            check_int("retry.max_attempts", self.max_attempts, high=MAX_U32)
        if self.backoff is not None and not isinstance(self.backoff, BackoffSpec):
            raise invalid("retry.backoff", self.backoff, "a BackoffSpec or None")


def backoff_ms(
    retry_number: int, spec: BackoffSpec | None, defaults: RetryConfig, random_below: Callable[[int], int]
) -> int:
    """Return the delay before retry `retry_number` (1 = the first). `random_below(n)` must return a number in [0, n).

    Jitter is added after the cap, as in ChasquiMQ.
    """
    if spec is None:
        spec = BackoffSpec(BackoffKind.EXPONENTIAL, defaults.initial_backoff_ms)
    multiplier = defaults.multiplier if spec.multiplier is None else spec.multiplier
    cap = defaults.max_backoff_ms if spec.max_delay_ms is None else spec.max_delay_ms
    base = float(spec.delay_ms)
    if spec.kind is not BackoffKind.FIXED:
        try:
            base *= multiplier ** max(retry_number - 1, 0)
        except OverflowError:
            base = float(cap)
    # Not min(): 0 * inf is nan. Every comparison with nan is false, and nan must give the cap.
    capped = int(base) if 0 <= base <= cap else (0 if base < 0 else cap)
    jitter = spec.jitter_ms
    if jitter is None:
        jitter = defaults.jitter_ms + int(capped * defaults.jitter_ratio)
    return capped + (random_below(jitter) if jitter > 0 else 0)


# --- The wire forms, for msgspec's typed decoder: arrays of exactly this length, with numbers in range


class WireBackoff(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, gc=False):
    """`[kind, delay_ms, max_delay_ms, multiplier, jitter_ms]`; all slots are required."""

    kind: str
    delay_ms: U64
    max_delay_ms: U64 | None
    multiplier: float | None
    jitter_ms: U64 | None


class WireRetry(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, gc=False):
    """`[max_attempts, backoff]`; both slots are required."""

    max_attempts: U32 | None
    backoff: WireBackoff | None


_KINDS = {str(kind): kind for kind in BackoffKind}

Record = TypeVar("Record")


def unchecked(kind: type[Record], *values: object) -> Record:
    """Return a dataclass without its checks: values that another implementation wrote are accepted as they are."""
    record = object.__new__(kind)
    for name, value in zip(kind.__slots__, values, strict=True):  # type: ignore[attr-defined]  # all have slots
        object.__setattr__(record, name, value)
    return record


def from_wire_backoff(wire: WireBackoff) -> BackoffSpec:
    """Return a backoff from the wire, without checks."""
    kind = _KINDS.get(wire.kind, BackoffKind.UNKNOWN)
    return unchecked(BackoffSpec, kind, wire.delay_ms, wire.max_delay_ms, wire.multiplier, wire.jitter_ms)


def from_wire_retry(wire: WireRetry) -> JobRetryOverride:
    """Return an override from the wire, without checks."""
    # Not cached: an unknown kind is any text, of up to 1 MiB.
    is_known = wire.backoff is None or wire.backoff.kind in _KINDS
    return _known_retry(wire) if is_known else _known_retry.__wrapped__(wire)


@lru_cache(maxsize=1024)  # runs for each job, and the jobs of a queue share a few overrides
def _known_retry(wire: WireRetry) -> JobRetryOverride:
    backoff = None if wire.backoff is None else from_wire_backoff(wire.backoff)
    return unchecked(JobRetryOverride, wire.max_attempts, backoff)


def to_wire_retry(retry: JobRetryOverride) -> WireRetry:
    """Return the wire form of an override."""
    spec = retry.backoff
    if spec is None:
        return WireRetry(retry.max_attempts, None)
    multiplier = None if spec.multiplier is None else float(spec.multiplier)
    backoff = WireBackoff(str(spec.kind), spec.delay_ms, spec.max_delay_ms, multiplier, spec.jitter_ms)
    return WireRetry(retry.max_attempts, backoff)
