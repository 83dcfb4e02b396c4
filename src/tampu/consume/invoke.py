"""How a handler is called: on the event loop, in a thread, or in a process; each with its timeout."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from concurrent.futures import Executor, Future
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
    """Whether calling it gives a coroutine; an object with an `async def __call__` counts."""
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(type(handler).__call__)


def on_loop(handler: Handler, timeout_secs: float | None) -> Caller:
    """An `async def` handler on the event loop; it is cancelled at its timeout."""
    if timeout_secs is None:
        return handler

    async def call(job: Job[Any]) -> Any:
        try:
            async with asyncio.timeout(timeout_secs) as limit:
                return await handler(job)
        except TimeoutError:
            if limit.expired():
                raise TimeoutError(f"the handler was cancelled at its timeout of {timeout_secs:g} s") from None
            raise  # its own

    return call


def in_thread(handler: Handler, threads: Executor, timeout_secs: float | None) -> Caller:
    """A `def` handler in a thread. A thread cannot be killed: at its timeout it has failed, but only when it ends."""
    loop = asyncio.get_running_loop()
    fork_guard = ForkGuard()

    def handle(job: Job[Any]) -> Any:
        try:
            result = handler(job)
        except BaseException as error:
            if fork_guard.is_child:
                leave(error)
            if isinstance(error, StopIteration | GeneratorExit | KeyboardInterrupt):
                # A future cannot carry the first, closes the coroutine that awaits it with the second, and the third
                # would look like Ctrl-C to the worker.
                raise RuntimeError(f"the handler raised {type(error).__name__}") from error
            raise
        if fork_guard.is_child:
            leave(None)
        return result

    async def call(job: Job[Any]) -> Any:
        started = time.monotonic()
        job._cancellation = Cancellation()  # a thread cannot be cancelled: the handler has to look
        result = await loop.run_in_executor(threads, handle, job)
        if inspect.isawaitable(result):
            result = await result
        if timeout_secs is not None and (took := time.monotonic() - started) > timeout_secs:
            raise TimeoutError(f"the handler took {took:.1f} s, its timeout is {timeout_secs:g} s")
        return result

    return call


def in_process(processes: Processes, timeout_secs: float | None) -> Caller:
    """A handler in a process, which is killed at the timeout."""

    async def call(job: Job[Any]) -> Any:
        try:
            return await processes.run(job, timeout_secs)
        except TimeoutError:
            raise TimeoutError(f"the handler was killed at its timeout of {timeout_secs:g} s") from None

    return call


class DaemonThreads(Executor):
    """At most `most` daemon threads, started when they are needed.

    The standard library's executor waits for its threads at exit: a handler that never ends would keep the process.
    """

    def __init__(self, most: int, name: str) -> None:
        self._most = most
        self._name = name
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        #: Threads that wait for a call.
        self._idle = threading.Semaphore(0)
        self._started = 0
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Have a thread call `function`."""
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
                raise RuntimeError("these threads take no more calls")
            self._calls.put(call)
            if not self._idle.acquire(blocking=False) and self._started < self._most:
                threading.Thread(target=self._serve, name=f"{self._name}-{self._started}", daemon=True).start()
                self._started += 1
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Let the threads end when they are done. Whatever is asked for, nobody waits for a call that never ends."""
        with self._lock:
            self._closed = True
            for _ in range(self._started):
                self._calls.put(None)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # or the last job would be kept until the next one comes
            self._idle.release()
