"""Threads for handlers that are not coroutines. Daemons: one that never ends does not keep the process from ending."""

from __future__ import annotations

import threading
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
T = TypeVar("T")


class DaemonThreads(Executor):
    """At most `most` threads, started when they are needed. (Those of the standard library are waited for at exit.)"""

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
