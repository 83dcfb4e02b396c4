"""What a handler may raise and return, and what `on_failure` receives."""

from __future__ import annotations

import asyncio
import inspect
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self

from tampu.base.checks import check_delay_ms, check_text
from tampu.errors import DecodeError, Error
from tampu.wire.dlq import DlqReason

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from datetime import timedelta

    from tampu.consume.outcomes import DeadLetter


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


def is_coroutine_handler(handler: Callable[..., Any]) -> bool:
    """Return True if calling it returns a coroutine; an object with an `async def __call__` counts."""
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(type(handler).__call__)


class RemoteError(Exception):
    """An error that a handler raised in another process: `error_type` is its type's name, `str()` its text."""

    def __init__(
        self,
        error_type: str,
        text: str,
        remote_traceback: str,
        give_up: DlqReason | None,
        after_ms: int | None = None,
    ) -> None:
        super().__init__(text)
        self.error_type = error_type
        self.remote_traceback = remote_traceback
        #: Why the job is not retried; None if it is.
        self.give_up = give_up
        #: When the task's retry rules want it retried, in milliseconds; None leaves it to the backoff.
        self.after_ms = after_ms


@dataclass(frozen=True, slots=True)
class _Again:
    after: timedelta | float

    @property
    def after_ms(self) -> int:
        """Return the delay in milliseconds. Raises `ConfigError` if it is negative or not a duration."""
        return check_delay_ms(self.after, "after")


class Snooze(_Again):
    """Return this from a handler to run the job again after `after` (a timedelta or seconds). It uses up no attempt."""


class Hold(Exception):  # noqa: N818 - not an error of the job
    """Raise this in a handler to let the job's key rest for `after` (a timedelta or seconds); the job runs again then.

    For an answer such as HTTP 429. It uses up no attempt. In a queue without limits, only this job waits.
    """

    def __init__(self, after: timedelta | float) -> None:
        super().__init__(after)
        self.after_ms = check_delay_ms(after, "after")


class Retry(_Again):
    """Return this from a handler to retry the job after `after` (a timedelta or seconds). It uses up an attempt."""


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


@dataclass(frozen=True, slots=True)
class NoResult:
    """Replaces a return value that cannot be stored. The job has succeeded; `why` is for the readers of its result."""

    why: str


#: What a handler may return instead of a result. It is not in the type of `job.result()`.
HandlerOutcome = Retry | Snooze | Cancel


logger = logging.getLogger("tampu.worker")


@dataclass(frozen=True, kw_only=True)
class FailedJob:
    """A dead-lettered job, as `on_failure` receives it."""

    id: str
    queue: str
    #: Name of the task.
    name: str
    #: The arguments of the task, by name; None if they cannot be decoded.
    arguments: dict[str, Any] | None
    #: Why it was dead-lettered, such as "retries_exhausted".
    reason: str
    #: Type and text of its last error; empty if there was none.
    error_type: str
    error: str
    #: How often it ran.
    attempts: int


class AddsJobs(Protocol):
    """The part of a task that is used when `on_failure` is one."""

    def add(self, failed: FailedJob, /) -> Awaitable[Any]: ...


class FailureCalls:
    """The calls of `on_failure` of one queue. They run concurrently with jobs; a shutdown waits for them."""

    def __init__(self, queue_name: str, find: Callable[[str], Callable[[FailedJob], Any] | AddsJobs | None]) -> None:
        self._queue = queue_name
        self._find = find
        self._calls: set[asyncio.Task[None]] = set()

    def __call__(self, outcome: DeadLetter) -> None:
        """Start the call for a job whose dead letter has been written."""
        callee = self._find(outcome.delivery.job.name)
        if callee is not None:
            task = asyncio.get_running_loop().create_task(self._call(callee, outcome), name="tampu-on-failure")
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)

    async def finish(self, timeout_secs: float) -> None:
        """Wait for the calls that were started."""
        if self._calls:
            await asyncio.wait(self._calls, timeout=timeout_secs)

    async def _call(self, callee: Callable[[FailedJob], Any] | AddsJobs, outcome: DeadLetter) -> None:
        job = outcome.delivery.job
        try:
            failed = self._described(outcome)
            add = getattr(callee, "add", None)
            result = add(failed) if add is not None else callee(failed)  # type: ignore[operator]  # not a task
            if inspect.isawaitable(result):
                await result
        except Exception:
            logger.exception(
                "on_failure of %s raised an exception; the dead letter of job %s is kept", job.name, job.id
            )

    def _described(self, outcome: DeadLetter) -> FailedJob:
        job, letter = outcome.delivery.job, outcome.letter
        try:
            arguments = job.payload
        except DecodeError:
            arguments = None
        return FailedJob(
            id=job.id,
            queue=self._queue,
            name=job.name,
            arguments=arguments if isinstance(arguments, dict) else None,
            reason=letter.reason,
            error_type=letter.error_type or "",
            error=letter.error or letter.detail or "",
            attempts=outcome.runs,
        )
