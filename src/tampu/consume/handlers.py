"""What a handler may say: errors, and outcomes as values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from tampu.base.checks import check_delay_ms, check_text
from tampu.errors import DecodeError, Error
from tampu.wire.dlq import DlqReason

if TYPE_CHECKING:
    from datetime import timedelta


class HandlerError(Error):
    """A handler's failure that wraps another error. Recoverable, unless made with `unrecoverable`."""

    code = "CMQ-010"

    def __init__(self, source: BaseException | str, *, is_unrecoverable: bool = False) -> None:
        super().__init__(str(source))
        self._source = source if isinstance(source, BaseException) else RuntimeError(source)
        self._is_unrecoverable = is_unrecoverable

    @classmethod
    def new(cls, source: BaseException | str) -> Self:
        """A failure that is worth another try."""
        return cls(source)

    @classmethod
    def unrecoverable(cls, source: BaseException | str) -> Self:
        """A failure that no further try can mend: straight to the dead letters."""
        return cls(source, is_unrecoverable=True)

    def is_unrecoverable(self) -> bool:
        """Whether it goes straight to the dead letters."""
        return self._is_unrecoverable

    def source_err(self) -> BaseException:
        """The error it wraps."""
        return self._source

    def into_source(self) -> BaseException:
        """The error it wraps."""
        return self._source


class UnrecoverableError(Error, RuntimeError):
    """Raise it, or a subclass, to send a job straight to the dead letters."""

    code = "CMQ-024"


def is_unrecoverable(error: BaseException) -> bool:
    """By class name along the MRO, so that another package's `UnrecoverableError` means the same."""
    if isinstance(error, HandlerError):
        return error.is_unrecoverable() or is_unrecoverable(error.source_err())
    return any(kind.__name__ == "UnrecoverableError" for kind in type(error).__mro__)


def reason_to_give_up(error: BaseException, job_id: str) -> DlqReason | None:
    """Why a failure is not worth another try; None when it is."""
    if is_unrecoverable(error):
        return DlqReason.UNRECOVERABLE
    if isinstance(error, DecodeError) and error.job_id == job_id:
        return DlqReason.DECODE_FAILED  # its payload will be no better the next time
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
    """Returned by a handler: run the job again after this long (a timedelta or seconds). It uses no attempt."""

    after: timedelta | float

    @property
    def after_ms(self) -> int:
        """The wait in milliseconds."""
        return check_delay_ms(self.after, "after")


@dataclass(frozen=True, slots=True)
class Retry:
    """Returned by a handler: run the job again after this long (a timedelta or seconds). It counts as an attempt."""

    after: timedelta | float

    @property
    def after_ms(self) -> int:
        """The wait in milliseconds."""
        return check_delay_ms(self.after, "after")


@dataclass(frozen=True, slots=True)
class PutBack:
    """Returned by a dispatcher: this worker cannot run the job; another may, after `after_ms`. Counts no attempt."""

    after_ms: int
    why: str


@dataclass(frozen=True, slots=True)
class Cancel:
    """Returned by a handler: this job is not to be done; it becomes a dead letter with this reason."""

    reason: str

    def __post_init__(self) -> None:
        check_text("reason", self.reason)
