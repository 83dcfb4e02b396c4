"""Calls a handler on the event loop, in a thread or in a process, each with its timeout."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from concurrent.futures import Executor, Future
from contextvars import copy_context
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from tampu.consume.forks import ForkGuard, leave
from tampu.wire.job import Cancellation

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tampu.consume.processes import Processes
    from tampu.wire.job import Job

    Handler = Callable[[Job[Any]], Any]
    Caller = Callable[[Job[Any]], Awaitable[Any]]

P = ParamSpec("P")
T = TypeVar("T")


def is_coroutine_handler(handler: Handler) -> bool:
    """Return True if calling it returns a coroutine; an object with an `async def __call__` counts."""
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(type(handler).__call__)


def on_loop(handler: Handler, timeout_secs: float | None) -> Caller:
    """Return a caller that runs an `async def` handler on the event loop and cancels it at its timeout."""
    if timeout_secs is None:
        return handler

    async def call(job: Job[Any]) -> Any:
        try:
            async with asyncio.timeout(timeout_secs) as limit:
                return await handler(job)
        except TimeoutError:
            if limit.expired():
                raise TimeoutError(f"the handler was cancelled at its timeout of {timeout_secs:g} s") from None
            raise  # raised by the handler itself

    return call


def in_thread(handler: Handler, threads: Executor, timeout_secs: float | None) -> Caller:
    """Return a caller that runs a `def` handler in a thread, which cannot be killed: a late run fails when it ends."""
    loop = asyncio.get_running_loop()
    fork_guard = ForkGuard()

    def handle(job: Job[Any]) -> Any:
        try:
            result = handler(job)
        except BaseException as error:
            if fork_guard.is_child:
                leave(error)
            if isinstance(error, StopIteration | GeneratorExit | KeyboardInterrupt):
                # A future rejects StopIteration, GeneratorExit would close the coroutine that awaits it, and
                # KeyboardInterrupt would look like Ctrl-C to the worker.
                raise RuntimeError(f"the handler raised {type(error).__name__}") from error
            raise
        if fork_guard.is_child:
            leave(None)
        return result

    async def call(job: Job[Any]) -> Any:
        started = time.monotonic()
        job._cancellation = Cancellation()  # a thread cannot be cancelled: the handler has to look
        # In a copy of this context: variables that a hook or middleware has set reach the handler.
        result = await loop.run_in_executor(threads, copy_context().run, handle, job)
        if inspect.isawaitable(result):
            result = await result
        if timeout_secs is not None and (took := time.monotonic() - started) > timeout_secs:
            raise TimeoutError(f"the handler took {took:.1f} s; its timeout is {timeout_secs:g} s")
        return result

    return call


def in_process(processes: Processes, timeout_secs: float | None) -> Caller:
    """Return a caller that runs a handler in a process and kills the process at the timeout."""

    async def call(job: Job[Any]) -> Any:
        try:
            return await processes.run(job, timeout_secs)
        except TimeoutError:
            raise TimeoutError(f"the handler was killed at its timeout of {timeout_secs:g} s") from None

    return call


class DaemonThreads(Executor):
    """Runs calls in up to `most` daemon threads, started on demand.

    The standard library's executor joins its threads at exit: a handler that never ends would keep the process alive.
    """

    def __init__(self, most: int, name: str) -> None:
        self._most = most
        self._name = name
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        #: Counts the threads that wait for a call.
        self._idle = threading.Semaphore(0)
        self._started = 0
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call `function` in a thread. Raises `RuntimeError` after `shutdown`."""
        future: Future[T] = Future()

        def call() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = function(*args, **kwargs)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        with self._lock:
            if self._closed:
                raise RuntimeError("cannot run a handler in a thread after shutdown")
            self._calls.put(call)
            if not self._idle.acquire(blocking=False) and self._started < self._most:
                threading.Thread(target=self._serve, name=f"{self._name}-{self._started}", daemon=True).start()
                self._started += 1
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End each thread after its current call. Never waits, whatever `wait` says: a call may never end."""
        with self._lock:
            self._closed = True
            for _ in range(self._started):
                self._calls.put(None)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # otherwise the job would stay in memory until the next one arrives
            self._idle.release()
