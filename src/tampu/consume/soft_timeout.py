"""Raises `SoftTimeout` inside a handler some time before its hard timeout.

| handler | where it is raised |
|---|---|
| `async def` | where it awaits |
| `def` in a thread | at its next `current_job().check_cancelled()`: a thread cannot be interrupted |
| `def` in a process | wherever it is, by a signal |
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from typing import TYPE_CHECKING, Any

from tampu.errors import SoftTimeout

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator

    from tampu.wire.job import Job

    Handler = Callable[[Job[Any]], Any]


def _text(secs: float) -> str:
    return f"the handler reached its soft timeout of {secs:g} s"


def with_soft_timeout(handler: Handler, secs: float | None, *, is_coroutine: bool) -> Handler:
    """Return a handler for the event loop or a thread that gets `SoftTimeout` when its time has passed."""
    if secs is None:
        return handler

    async def on_loop(job: Job[Any]) -> Any:
        with _reported(secs):
            return await _Interruptible(handler(job), secs, job)

    def in_thread(job: Job[Any]) -> Any:
        if job._cancellation is not None:
            job._cancellation.soft_timeout_at = time.monotonic() + secs
        with _reported(secs):
            return handler(job)

    return on_loop if is_coroutine else in_thread


def call_in_process(handler: Handler, job: Job[Any], secs: float | None) -> Any:
    """Call a handler in the main thread of a handler process, and interrupt it at its soft timeout."""
    if secs is None:
        return handler(job)

    def interrupt(*_: object) -> None:
        raise SoftTimeout(_text(secs))

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, secs)
    try:
        with _reported(secs):
            return handler(job)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def _reported(secs: float) -> Iterator[None]:
    """Turn a `SoftTimeout` that the handler did not catch into the error of its run."""
    try:
        yield
    except SoftTimeout as reached:
        raise TimeoutError(_text(secs)) from reached


class _Interruptible:
    """Awaits a coroutine and throws `SoftTimeout` into it when its time has passed.

    The timer cancels the asyncio task, which ends whatever the coroutine awaits; this class then replaces the
    `CancelledError` on its way in.
    """

    def __init__(self, coroutine: Awaitable[Any], secs: float, job: Job[Any]) -> None:
        self._coroutine: Coroutine[Any, Any, Any] = coroutine  # type: ignore[assignment]  # of an `async def`
        self._secs = secs
        self._job = job
        self._is_due = False

    def __await__(self) -> Generator[Any, Any, Any]:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None  # noqa: S101 - handlers run in one

        def interrupt() -> None:
            self._is_due = True
            task.cancel()

        timer = loop.call_later(self._secs, interrupt)
        step, value = self._coroutine.send, None
        try:
            while True:
                try:
                    awaited = step(value)
                except StopIteration as end:
                    return end.value
                try:
                    step, value = self._coroutine.send, (yield awaited)
                except GeneratorExit:
                    self._coroutine.close()
                    raise
                except BaseException as error:
                    step, value = self._coroutine.throw, self._replaced(error, task)
        finally:
            timer.cancel()

    def _replaced(self, error: BaseException, task: asyncio.Task[Any]) -> Any:
        # A cancel of the job goes first: it asks for an end, not for a tidier one.
        if not self._is_due or self._job.is_cancelled or not isinstance(error, asyncio.CancelledError):
            return error
        self._is_due = False
        task.uncancel()
        return SoftTimeout(_text(self._secs))
