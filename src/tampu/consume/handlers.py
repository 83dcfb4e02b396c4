"""Errors that a handler may raise, outcomes that it may return, and the verdicts of retry rules on its errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from tampu.base.checks import check_delay_ms, check_text
from tampu.errors import DecodeError, Error
from tampu.wire.dlq import DlqReason

if TYPE_CHECKING:
    from datetime import timedelta


class HandlerError(Error):
    """Wraps an error that a handler raises. The job is retried, or dead-lettered after `HandlerError.unrecoverable`."""

    code = "CMQ-010"

    def __init__(self, source: BaseException | str, *, is_unrecoverable: bool = False) -> None:
        super().__init__(str(source))
        self._source = source if isinstance(source, BaseException) else RuntimeError(source)
        self._is_unrecoverable = is_unrecoverable

    @classmethod
    def new(cls, source: BaseException | str) -> Self:
        """Return an error after which the job is retried."""
        return cls(source)

    @classmethod
    def unrecoverable(cls, source: BaseException | str) -> Self:
        """Return an error after which the job becomes a dead letter without further attempts."""
        return cls(source, is_unrecoverable=True)

    def is_unrecoverable(self) -> bool:
        """Return True if the job is not retried."""
        return self._is_unrecoverable

    def source_err(self) -> BaseException:
        """Return the wrapped error."""
        return self._source

    def into_source(self) -> BaseException:
        """Return the wrapped error."""
        return self._source


class UnrecoverableError(Error, RuntimeError):
    """Raise this error or a subclass to make the job a dead letter without further attempts."""

    code = "CMQ-024"


def is_unrecoverable(error: BaseException) -> bool:
    """Return True if the job is not retried. Compares class names, so another package's `UnrecoverableError` counts."""
    if isinstance(error, HandlerError):
        return error.is_unrecoverable() or is_unrecoverable(error.source_err())
    for kind in type(error).__mro__:  # noqa: SIM110 - any() takes three times as long, for every failed attempt
        if kind.__name__ == "UnrecoverableError":
            return True
    return False


def reason_to_give_up(error: BaseException, job_id: str) -> DlqReason | None:
    """Return why the job is not retried after this error, or None if it is."""
    if is_unrecoverable(error):
        return DlqReason.UNRECOVERABLE
    if isinstance(error, DecodeError) and error.job_id == job_id:
        return DlqReason.DECODE_FAILED  # a retry would read the same payload
    return None


class GiveUp(Exception):  # noqa: N818 - internal: stands for the error it carries
    """Raised by a task's retry rules: `source` is not worth another attempt."""

    def __init__(self, source: BaseException) -> None:
        super().__init__(str(source))
        self.source = source


class RetryAfter(Exception):  # noqa: N818 - internal: stands for the error it carries
    """Raised by a task's retry rules: retry `source` after `after_ms`."""

    def __init__(self, source: BaseException, after_ms: int) -> None:
        super().__init__(str(source))
        self.source = source
        self.after_ms = after_ms


@dataclass(frozen=True, slots=True)
class Snooze:
    """Return this from a handler to run the job again after `after` (a timedelta or seconds). It uses up no attempt."""

    after: timedelta | float

    @property
    def after_ms(self) -> int:
        """Return the delay in milliseconds. Raises `ConfigError` if it is negative or not a duration."""
        return check_delay_ms(self.after, "after")


@dataclass(frozen=True, slots=True)
class Retry:
    """Return this from a handler to retry the job after `after` (a timedelta or seconds). It uses up an attempt."""

    after: timedelta | float

    @property
    def after_ms(self) -> int:
        """Return the delay in milliseconds. Raises `ConfigError` if it is negative or not a duration."""
        return check_delay_ms(self.after, "after")


@dataclass(frozen=True, slots=True)
class PutBack:
    """Returned by the dispatcher: put the job back for another worker after `after_ms`. Uses up no attempt."""

    after_ms: int
    why: str


@dataclass(frozen=True, slots=True)
class Cancel:
    """Return this from a handler to make the job a dead letter with this reason."""

    reason: str

    def __post_init__(self) -> None:
        check_text("reason", self.reason)


#: What a handler may return instead of a result. It is not in the type of `job.result()`.
HandlerOutcome = Retry | Snooze | Cancel
