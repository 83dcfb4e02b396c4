"""Event loops: a factory that prefers uvloop, and a loop in its own thread for synchronous programs."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import weakref
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Coroutine

#: A stop signal that follows another within this time, in seconds, is the same request: `timeout`, for example, signals
#: its program and then the program's process group.
SIGNAL_SECS = 1.0

P = ParamSpec("P")
T = TypeVar("T")


class LoopThread:
    """Runs coroutines for any thread and waits for them. The thread starts on first use."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        _all_threads.add(self)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and return its result. Ctrl-C cancels it."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._running_loop())
        try:
            return future.result()
        except BaseException:
            if not future.done():
                future.cancel()
            raise

    def stop(self) -> None:
        """Stop the thread; the next `run` starts another. Callers that wait for a coroutine get a CancelledError."""
        with self._guard:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is None or thread is None:
            return
        # Cancel the tasks before stopping the loop: otherwise threads that wait for them would wait forever.
        asyncio.run_coroutine_threadsafe(_end_tasks(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._guard:
            if self._loop is None:
                self._loop = new_event_loop()
                # A daemon thread: a program that forgets to close must still exit.
                self._thread = threading.Thread(target=self._loop.run_forever, name="tampu-loop", daemon=True)
                self._thread.start()
            return self._loop

    def _forget(self) -> None:
        """Reset in a forked child: the thread does not exist there, and the lock may have been held during the fork."""
        self._guard = threading.Lock()
        if self._loop is not None:
            _left_alone.append(self._loop)
        self._loop = self._thread = None


def blocking(method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[Any, P], T]:
    """Return the blocking form of a coroutine method, for a class with `_inner`, the asynchronous object, and `_run`.

    Type checkers see the same parameters and the plain result.
    """

    @wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        result: T = self._run(method(self._inner, *args, **kwargs))
        return result

    return call


async def _end_tasks() -> None:
    await _cancel_others(None)
    await asyncio.get_running_loop().shutdown_asyncgens()


def close_runner(runner: asyncio.Runner, patience_secs: float = 1.0) -> None:
    """Close a runner and its event loop. Tasks that ignore their cancellation are abandoned after `patience_secs`.

    `Runner.close` would wait for them forever.
    """
    if is_in_a_task():
        return  # a runner cannot run inside an event loop, so it has not created one
    loop = runner.get_loop()
    stubborn = loop.run_until_complete(_cancel_others(patience_secs))
    if not stubborn:
        runner.close()
        return
    for task in stubborn:
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # it is abandoned on purpose
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


async def _cancel_others(patience_secs: float | None) -> set[asyncio.Task[Any]]:
    """Cancel all other tasks; return those that did not end in time."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if not others:
        return set()
    _, pending = await asyncio.wait(others, timeout=patience_secs)
    return pending


def is_in_a_task() -> bool:
    """Return whether this code runs in a task of an event loop."""
    try:
        return asyncio.current_task() is not None
    except RuntimeError:  # no running event loop
        return False


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Create an event loop, from uvloop if it is installed. Can be used as a `loop_factory`."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


_all_threads: weakref.WeakSet[LoopThread] = weakref.WeakSet()
#: Loops of the parent process. Kept alive: garbage collection would close sockets that the parent uses.
_left_alone: list[asyncio.AbstractEventLoop] = []


def _after_fork_in_child() -> None:
    for thread in list(_all_threads):
        thread._forget()


os.register_at_fork(after_in_child=_after_fork_in_child)


def ignore_signals(loop: asyncio.AbstractEventLoop, numbers: Collection[signal.Signals]) -> None:
    """Ignore signals that the loop has handled so far, because the process ends: they must not change its exit code."""
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)  # until it is ignored, one would end the process
    for number in numbers:
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_IGN)
