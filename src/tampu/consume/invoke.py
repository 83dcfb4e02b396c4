"""Calls a handler on the event loop, in a thread or in a process, each with its timeout."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
import time
from collections import deque
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from tampu.consume.forks import ForkGuard, leave
from tampu.wire.job import Cancellation

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tampu.consume.processes import Processes
    from tampu.wire.job import Job

    Handler = Callable[[Job[Any]], Any]
    Caller = Callable[[Job[Any]], Awaitable[Any]]
    _Call = tuple[asyncio.Future[Any], Callable[..., Any], tuple[Any, ...], dict[str, Any]]

logger = logging.getLogger("tampu.worker")

#: Calls that take longer than this on average, in nanoseconds, each get a thread at once.
SLOW_CALL_NS = 200_000
#: Weight of one call in that average.
PACE_WEIGHT = 0.05
#: How soon more threads are woken if calls still wait, in seconds.
WAKE_AGAIN_SECS = 0.001

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


def in_thread(handler: Handler, threads: DaemonThreads, timeout_secs: float | None) -> Caller:
    """Return a caller that runs a `def` handler in a thread, which cannot be killed: a late run fails when it ends."""
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
        result = await threads.call(copy_context().run, handle, job)
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


class DaemonThreads:
    """Runs calls in up to `most` daemon threads, started on demand, for one event loop.

    The standard library's executor joins its threads at exit: a handler that never ends would keep the process alive.
    It also wakes a thread for each call and the event loop for each result, which takes longer than most calls. Here
    the threads share one deque, and the loop is woken once for all results that are ready by then. Quick calls stay in
    one thread. Others are woken at once if the average call takes long, else while calls wait: twice as many every
    millisecond.
    """

    def __init__(self, most: int, name: str) -> None:
        self._most = most
        self._name = name
        self._loop = asyncio.get_running_loop()
        self._calls: deque[_Call] = deque()
        self._results: deque[tuple[asyncio.Future[Any], Any, BaseException | None]] = deque()
        #: One lock per thread that waits for a call; releasing it wakes the thread.
        self._idle: list[threading.Lock] = []
        self._started = 0
        self._pace_ns = 0.0
        self._is_waking = False
        self._ticker: asyncio.TimerHandle | None = None
        self._is_collecting = False
        self._has_complained = False
        self._closed = False

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """Call `function` in a thread. Raises `RuntimeError` after `shutdown`."""
        if self._closed:
            raise RuntimeError("cannot run a handler in a thread after shutdown")
        future: asyncio.Future[T] = self._loop.create_future()
        self._calls.append((future, function, args, kwargs))
        if not self._is_waking:
            # At the end of this turn of the event loop, when all its calls are there.
            self._is_waking = True
            self._loop.call_soon(self._wake)
        return future

    def shutdown(self) -> None:
        """End each thread after its current call. Never waits: a call may never end."""
        self._closed = True
        while self._idle:
            self._idle.pop().release()

    def _wake(self) -> None:
        """Wake threads for the calls of this turn."""
        self._is_waking = False
        if self._pace_ns > SLOW_CALL_NS:
            self._wake_threads(len(self._calls))
        elif self._started == len(self._idle):
            self._wake_threads(1)
        if self._ticker is None and self._calls:
            self._ticker = self._loop.call_later(WAKE_AGAIN_SECS, self._wake_more)

    def _wake_more(self) -> None:
        self._ticker = None
        if self._calls and not self._closed:
            self._wake_threads(max(self._started - len(self._idle), 1))
            self._ticker = self._loop.call_later(WAKE_AGAIN_SECS, self._wake_more)

    def _wake_threads(self, count: int) -> None:
        for _ in range(min(count, len(self._calls))):
            if self._idle:
                self._idle.pop().release()
            elif self._started < self._most:
                thread = threading.Thread(target=self._serve, name=f"{self._name}-{self._started}", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # a limit of the system: tried again while calls wait
                    if not self._has_complained:
                        logger.error("cannot start a thread for handlers; %d run: %s", self._started, error)
                        self._has_complained = True
                    return
                self._started += 1

    def _serve(self) -> None:
        calls, clock = self._calls, time.perf_counter_ns
        lock = threading.Lock()
        lock.acquire()
        while True:
            try:
                future, function, args, kwargs = calls.popleft()
            except IndexError:
                self._idle.append(lock)
                if not self._closed:
                    lock.acquire()
                if self._closed:
                    return
                continue
            result = error = None
            started = clock()
            try:
                if not future.cancelled():
                    result = function(*args, **kwargs)
            except BaseException as raised:
                error = raised
            self._pace_ns += (clock() - started - self._pace_ns) * PACE_WEIGHT
            self._results.append((future, result, error))
            # Otherwise the job would stay in memory until the next one arrives.
            del future, function, args, kwargs, result, error
            if not self._is_collecting:
                self._is_collecting = True
                try:
                    self._loop.call_soon_threadsafe(self._collect)
                except RuntimeError:  # the loop is closed: this thread has outlived its worker
                    return

    def _collect(self) -> None:
        self._is_collecting = False  # before the first look: a result that arrives now schedules another
        results = self._results
        while results:
            future, result, error = results.popleft()
            if future.done():
                continue  # its caller was cancelled
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)
