"""The options of an add, and the forms in which callers may give them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Self, TypedDict, TypeVar

from tampu.base.checks import check_delay_ms, check_job_id, check_job_name, invalid
from tampu.base.clock import wall_clock_ms
from tampu.errors import ConfigError
from tampu.wire.extras import JobExtras, check_headers, encode_extras
from tampu.wire.limits import check_key
from tampu.wire.repeat import MissedFiresPolicy, RepeatableSpec, RepeatPattern
from tampu.wire.retry import BackoffKind, BackoffSpec, JobRetryOverride

T = TypeVar("T")

#: Milliseconds from now, or an absolute time; a timedelta is accepted too.
DelayMs = int | float | datetime | timedelta
#: Time between retries: a timedelta or milliseconds, a `BackoffSpec`, or a dict of its fields.
Backoff = timedelta | int | BackoffSpec | Mapping[str, Any]
Repeat = RepeatPattern | Mapping[str, Any]
MissedFires = MissedFiresPolicy | Mapping[str, Any]

#: The keys that a job of `add_bulk` may have besides `name` and `data`.
BULK_OPTIONS = ("delay_ms", "delay", "job_id", "attempts", "backoff", "repeat", "missed_fires")
#: How long a debounced job waits at most if no `at_most` is given: a year, in milliseconds.
MAX_WAIT_MS = 366 * 86_400_000
MISSED_FIRES_ALONE = "missed_fires needs repeat: pass repeat=RepeatPattern.cron(...) or .every(...) too"


@dataclass(frozen=True, kw_only=True)
class AddOptions:
    """The options of one add. The methods can be chained: `AddOptions().with_name("mail").with_id("7")`."""

    #: The job's ID: a second add with the same ID is ignored for `dedup_ttl_secs`. Defaults to a new ULID.
    id: str | None = None
    #: Retry settings of this job. Defaults to the worker's.
    retry: JobRetryOverride | None = None
    #: The job's name, by which workers choose the task; at most 256 bytes. Defaults to no name.
    name: str = ""

    # Not a field: see `TaskAddOptions`.
    _tail = b""

    def __post_init__(self) -> None:
        if self.id is not None:
            check_job_id(self.id)
        if self.retry is not None and not isinstance(self.retry, JobRetryOverride):
            raise invalid("retry", self.retry, "a JobRetryOverride or None")
        check_job_name(self.name)

    def with_id(self, id: str) -> Self:  # noqa: A002 - the field's name
        """Return a copy with this ID."""
        return replace(self, id=id)

    def with_retry(self, retry: JobRetryOverride) -> Self:
        """Return a copy with these retry settings."""
        return replace(self, retry=retry)

    def with_name(self, name: str) -> Self:
        """Return a copy with this name."""
        return replace(self, name=name)


@dataclass(frozen=True, kw_only=True)
class TaskAddOptions(AddOptions):
    """Options of an add by `task.using(...)`."""

    #: Headers, timeouts and expiry, encoded; see `tampu.wire.extras`.
    _tail: bytes = b""


def wrong_type(field: str, value: object, allowed: str) -> TypeError:
    """Return a `TypeError`, as the drop-in API raises, with the text of `invalid`."""
    return TypeError(str(invalid(field, value, allowed)))


def delay_or_instant(delay_ms: DelayMs | None, delay: timedelta | float | None) -> tuple[float, datetime | None]:
    """Return (seconds from now, absolute time or None) of a delay given as either argument."""
    if delay_ms is not None and delay is not None:
        raise ConfigError("pass either delay_ms (milliseconds or a datetime) or delay (a timedelta), not both")
    if delay is not None:
        if not isinstance(delay, timedelta):
            raise wrong_type("delay", delay, "a timedelta; delay_ms takes milliseconds")
        if delay < timedelta(0):
            raise invalid("delay", delay, "a non-negative timedelta")
        return int(delay.total_seconds() * 1000) / 1000, None
    if delay_ms is None:
        return 0.0, None
    if isinstance(delay_ms, timedelta):  # other implementations accept it too
        return delay_or_instant(None, delay_ms)
    if isinstance(delay_ms, datetime):
        return 0.0, delay_ms if delay_ms.tzinfo is not None else delay_ms.replace(tzinfo=UTC)
    if isinstance(delay_ms, bool) or not isinstance(delay_ms, int | float):
        raise wrong_type("delay_ms", delay_ms, "milliseconds or a datetime")
    if not math.isfinite(delay_ms) or delay_ms < 0:
        raise invalid("delay_ms", delay_ms, "a finite non-negative number of milliseconds")
    return int(delay_ms) / 1000, None


def _made(kind: type[T], field: str, value: object, also: str = "") -> T:
    """Return a value of this kind that is given as one or as a dict of its fields."""
    if isinstance(value, kind):
        return value
    if not isinstance(value, Mapping):
        raise wrong_type(field, value, f"{also}a {kind.__name__} or a dict of its fields")
    try:
        return kind(**value)
    except TypeError as error:
        raise ConfigError(f"{field} must have the fields of a {kind.__name__}: {error}") from None


def backoff_spec(backoff: Backoff) -> BackoffSpec:
    """Return the spec of a backoff given in any form."""
    if isinstance(backoff, int | timedelta) and not isinstance(backoff, bool):
        return BackoffSpec.fixed(backoff)
    return _made(BackoffSpec, "backoff", backoff, "a timedelta, whole milliseconds, ")


def add_options(name: str, job_id: str | None, attempts: int | None, backoff: Backoff | None) -> AddOptions:
    """Return the options of one add. Raises `ConfigError` or `TypeError` for a value that is not allowed."""
    if job_id is not None and (not isinstance(job_id, str) or not job_id.strip()):
        raise invalid("job_id", job_id, "text that is not blank")
    retry = None
    if attempts is not None or backoff is not None:
        retry = JobRetryOverride(attempts, None if backoff is None else backoff_spec(backoff))
    return AddOptions(id=job_id, name=name, retry=retry)


def with_key(options: AddOptions, key: str | None) -> AddOptions:
    """Return the options of an add with the key of its job."""
    if key is None:
        return options
    tail = encode_extras(JobExtras(key=key))
    return TaskAddOptions(id=options.id, name=options.name, retry=options.retry, _tail=tail)


def retry_over(own: JobRetryOverride | None, task: JobRetryOverride | None) -> JobRetryOverride | None:
    """Return the retry settings of a job: its own, and the task's where it has none."""
    if own is None or task is None:
        return own or task
    attempts = task.max_attempts if own.max_attempts is None else own.max_attempts
    return JobRetryOverride(attempts, task.backoff if own.backoff is None else own.backoff)


def repeatable_spec(
    name: str, data: Any, repeat: Repeat, missed_fires: MissedFires | None, **bounds: Any
) -> RepeatableSpec[Any]:
    """Return the spec to register for a repeatable job."""
    policy = MissedFiresPolicy() if missed_fires is None else missed_fires_policy(missed_fires)
    return RepeatableSpec(name, repeat_pattern(repeat), data, missed_fires=policy, **bounds)


def repeat_pattern(repeat: Repeat) -> RepeatPattern:
    """Return the pattern of a `repeat` given in any form."""
    return _made(RepeatPattern, "repeat", repeat)


def missed_fires_policy(policy: MissedFires) -> MissedFiresPolicy:
    """Return the policy of `missed_fires` given in any form."""
    return _made(MissedFiresPolicy, "missed_fires", policy)


def bulk_entry(job: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a job of `add_bulk` whose keys are all known. Raises `ConfigError`, or `KeyError` without `data`."""
    for key in job.keys() - {"name", "data", *BULK_OPTIONS}:
        raise ConfigError(f"unknown key {key!r} in a job of add_bulk; allowed: name, data, {', '.join(BULK_OPTIONS)}")
    if "data" not in job:
        raise KeyError("data")
    return job


# --- task.using


class UsingOptions(TypedDict, total=False):
    """Options of `task.using`. Durations are seconds or a timedelta."""

    #: Run after this time.
    delay: timedelta | float | None
    #: Run at this instant: a datetime (naive means UTC) or epoch seconds.
    at: datetime | float | None
    #: The job's ID: a second add with the same ID within `dedup_ttl_secs` adds nothing.
    unique: str | None
    #: Maximum number of runs, including the first.
    attempts: int | None
    #: Wait between attempts: a timedelta for a fixed wait, or a `BackoffSpec`.
    backoff: BackoffSpec | timedelta | None
    #: Maximum duration of a run; overrides the task's timeout.
    timeout: timedelta | float | None
    #: When `SoftTimeout` is raised inside the task; overrides the task's.
    soft_timeout: timedelta | float | None
    #: A job that has not started after this time, or by this datetime, is dead-lettered as `expired`.
    expires: timedelta | float | datetime | None
    #: Text values that are stored with the job; handlers read them as `job.headers`.
    headers: Mapping[str, str] | None
    #: The key by which limits count the job, such as a tenant; see `Queue.limit`.
    key: str | None
    #: The job's ID: run once, `quiet` after the last add with this ID, and at most `at_most` after the first. The last
    #: arguments win.
    debounce: str | None
    quiet: timedelta | float | None
    at_most: timedelta | float | None
    #: The job's ID: run at once, but only one job in `every`. The last arguments win.
    throttle: str | None
    every: timedelta | float | None


@dataclass(frozen=True, kw_only=True)
class Using:
    """Checked options of `task.using`, not yet bound to the time of an add."""

    delay: timedelta | float | None = None
    at: datetime | float | None = None
    unique: str | None = None
    attempts: int | None = None
    backoff: BackoffSpec | None = None
    timeout_ms: int | None = None
    soft_timeout_ms: int | None = None
    expires: timedelta | float | datetime | None = None
    headers: dict[str, str] | None = None
    key: str | None = None
    debounce: str | None = None
    quiet: timedelta | float | None = None
    at_most: timedelta | float | None = None
    throttle: str | None = None
    every: timedelta | float | None = None

    def with_options(self, options: UsingOptions) -> Using:
        """Return these options with others over them. Raises `ConfigError` for values that are not allowed."""
        for unknown in options.keys() - UsingOptions.__annotations__.keys():
            raise TypeError(f"using() has no option {unknown!r}; it has {', '.join(UsingOptions.__annotations__)}")
        changes: dict[str, Any] = dict(options)
        if changes.get("delay") is not None and changes.get("at") is not None:
            raise ConfigError("pass either delay or at to using(), not both")
        if changes.get("delay") is not None:
            check_delay_ms(changes["delay"], "delay")
            changes["at"] = None
        elif changes.get("at") is not None:
            changes["delay"] = None
        if changes.get("unique") is not None:
            check_job_id(changes["unique"], "unique")
        if changes.get("backoff") is not None:
            changes["backoff"] = _using_backoff(changes["backoff"])
        for option in changes.keys() & {"timeout", "soft_timeout"}:
            timeout = changes.pop(option)
            changes[f"{option}_ms"] = None if timeout is None else _positive_ms(timeout, option)
        if changes.get("expires") is not None and not isinstance(changes["expires"], datetime):
            _positive_ms(changes["expires"], "expires")
        if changes.get("headers") is not None:
            changes["headers"] = check_headers(changes["headers"])
        if changes.get("key") is not None:
            check_key(changes["key"])
        using = replace(self, **changes)
        using._check_joining()
        return using

    def _check_joining(self) -> None:
        """Raise `ConfigError` if the options of debounce and throttle contradict each other or are not complete."""
        for option, needed, value in (("debounce", "quiet", self.quiet), ("throttle", "every", self.every)):
            job_id = getattr(self, option)
            if (job_id is None) is not (value is None):
                raise ConfigError(f"using() needs both {option}= and {needed}=, as in {option}='doc-9', {needed}=5")
            if job_id is not None:
                check_job_id(job_id, option)
                _positive_ms(value, needed)
        if self.at_most is not None and (self.debounce is None or _ms(self.at_most) < _ms(self.quiet)):
            raise ConfigError("at_most needs debounce=, and must not be shorter than quiet")
        given = [self.debounce, self.throttle, self.unique, self.delay, self.at]
        if (self.debounce or self.throttle) and sum(value is not None for value in given) > 1:
            raise ConfigError("pass only one of debounce, throttle, unique, delay and at to using()")

    @property
    def joins(self) -> tuple[str, int, int | None] | None:
        """The ID of a debounced or throttled job, `quiet` or `every`, and `at_most` of a debounced one, in ms."""
        if self.debounce is not None:
            quiet_ms = _ms(self.quiet)
            return self.debounce, quiet_ms, MAX_WAIT_MS if self.at_most is None else _ms(self.at_most)
        return None if self.throttle is None else (self.throttle, _ms(self.every), None)

    def add_options(self, name: str, task_retry: JobRetryOverride | None) -> AddOptions:
        """Return the options of an add that happens now. What is not set here is the task's."""
        options = add_options(name, self.unique, self.attempts, self.backoff)
        times = self.timeout_ms, self._expires_at_ms(), self.soft_timeout_ms
        extras = JobExtras(self.headers or {}, *times, self.key)
        retry = retry_over(options.retry, task_retry)
        return TaskAddOptions(id=options.id, name=name, retry=retry, _tail=encode_extras(extras))

    def _expires_at_ms(self) -> int | None:
        if self.expires is None:
            return None
        if isinstance(self.expires, datetime):
            instant = self.expires if self.expires.tzinfo is not None else self.expires.replace(tzinfo=UTC)
            return int(instant.timestamp() * 1000)
        return wall_clock_ms() + check_delay_ms(self.expires, "expires")


def _using_backoff(value: object) -> BackoffSpec:
    if isinstance(value, BackoffSpec):
        return value
    if isinstance(value, timedelta):
        return BackoffSpec(BackoffKind.FIXED, _positive_ms(value, "backoff"))
    raise invalid(
        "backoff", value, "a timedelta or a BackoffSpec, such as BackoffSpec.exponential(timedelta(seconds=1))"
    )


def _ms(value: Any) -> int:
    return check_delay_ms(value, "a duration")


def _positive_ms(value: Any, field: str) -> int:
    milliseconds = check_delay_ms(value, field)
    if milliseconds <= 0:
        raise invalid(field, value, "a timedelta or seconds above 0")
    return milliseconds
