"""The options of `task.using(...)`: when a job runs, how often, for how long, and what it carries."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, TypedDict

from tampu.base.checks import check_delay_ms, check_job_id, invalid
from tampu.base.clock import wall_clock_ms
from tampu.errors import ConfigError
from tampu.produce.options import add_options, retry_over
from tampu.wire.extras import JobExtras, check_headers, encode_extras
from tampu.wire.retry import BackoffKind, BackoffSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tampu.produce.options import AddOptions
    from tampu.wire.retry import JobRetryOverride


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
            changes["backoff"] = _backoff(changes["backoff"])
        for option in changes.keys() & {"timeout", "soft_timeout"}:
            timeout = changes.pop(option)
            changes[f"{option}_ms"] = None if timeout is None else _positive_ms(timeout, option)
        if changes.get("expires") is not None and not isinstance(changes["expires"], datetime):
            _positive_ms(changes["expires"], "expires")
        if changes.get("headers") is not None:
            changes["headers"] = check_headers(changes["headers"])
        return replace(self, **changes)

    def add_options(self, name: str, task_retry: JobRetryOverride | None) -> AddOptions:
        """Return the options of an add that happens now. What is not set here is the task's."""
        options = add_options(name, self.unique, self.attempts, self.backoff)
        extras = JobExtras(self.headers or {}, self.timeout_ms, self._expires_at_ms(), self.soft_timeout_ms)
        return replace(options, retry=retry_over(options.retry, task_retry), tail=encode_extras(extras))

    def _expires_at_ms(self) -> int | None:
        if self.expires is None:
            return None
        if isinstance(self.expires, datetime):
            instant = self.expires if self.expires.tzinfo is not None else self.expires.replace(tzinfo=UTC)
            return int(instant.timestamp() * 1000)
        return wall_clock_ms() + check_delay_ms(self.expires, "expires")


def _backoff(value: object) -> BackoffSpec:
    if isinstance(value, BackoffSpec):
        return value
    if isinstance(value, timedelta):
        return BackoffSpec(BackoffKind.FIXED, _positive_ms(value, "backoff"))
    raise invalid(
        "backoff", value, "a timedelta or a BackoffSpec, such as BackoffSpec.exponential(timedelta(seconds=1))"
    )


def _positive_ms(value: Any, field: str) -> int:
    milliseconds = check_delay_ms(value, field)
    if milliseconds <= 0:
        raise invalid(field, value, "a timedelta or seconds above 0")
    return milliseconds
