"""Calls a task's `on_failure` once its job was dead-lettered: a function, or another task, which gets a job."""

from __future__ import annotations

import asyncio
import inspect
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from tampu.errors import DecodeError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tampu.consume.outcomes import Outcome

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

    def __call__(self, outcome: Outcome) -> None:
        """Start the call for a job whose dead letter has been written."""
        wanted = self._find(outcome.delivery.job.name)
        if wanted is not None:
            task = asyncio.get_running_loop().create_task(self._call(wanted, outcome), name="tampu-on-failure")
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)

    async def finish(self, timeout_secs: float) -> None:
        """Wait for the calls that were started."""
        if self._calls:
            await asyncio.wait(self._calls, timeout=timeout_secs)

    async def _call(self, wanted: Callable[[FailedJob], Any] | AddsJobs, outcome: Outcome) -> None:
        job = outcome.delivery.job
        try:
            failed = self._described(outcome)
            add = getattr(wanted, "add", None)
            result = add(failed) if add is not None else wanted(failed)  # type: ignore[operator]  # not a task
            if inspect.isawaitable(result):
                await result
        except Exception:
            logger.exception(
                "on_failure of %s raised an exception; the dead letter of job %s is kept", job.name, job.id
            )

    def _described(self, outcome: Outcome) -> FailedJob:
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
