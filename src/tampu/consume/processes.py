"""Runs handlers in separate processes: for CPU work, C code that holds the GIL, and code that may crash or hang.

A process runs one job at a time. It is killed when the job exceeds its timeout and replaced when it dies, which fails
only the job it was running. Each process leads a process group that is killed with it, so that nothing the handler
started keeps running during the retry.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import multiprocessing
import os
import signal
import socket
import threading
import time
import traceback
from contextvars import ContextVar
from functools import cache
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

from tampu.consume.forks import ForkGuard, leave
from tampu.consume.handlers import GiveUp, RetryAfter, reason_to_give_up
from tampu.errors import ConfigError
from tampu.wire.dlq import DlqReason
from tampu.wire.job import Job
from tampu.wire.typed import TypedPayload

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess
    from types import TracebackType

    from tampu.consume.invoke import DaemonThreads

#: The modules between a worker's loop and a handler; their frames are cut from tracebacks.
_CALLERS = ("tampu.consume.", "tampu.worker", "asyncio.")
#: How long a process may take to exit once it has closed its pipe or was killed, in seconds.
EXIT_SECS = 5.0


class ProcessDied(BaseException):
    """The process died while it ran the job; metrics count it as a panic."""


class _DiedIdle(ProcessDied):
    """The process died before it took the job."""


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


class _Child:
    """One handler process and the worker's end of its pipe."""

    def __init__(self, handler: Callable[[Job[Any]], Any]) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would copy locks that other threads may hold
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, handler), name="tampu-handler", daemon=True)
        # Block SIGINT in the child until it ignores the signal, which is only after its imports.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        theirs.close()
        self._lock = threading.Lock()
        #: Number of jobs it has run.
        self.jobs = 0
        #: True if it must not run another job.
        self.is_spent = False
        self._receive()  # "ready": start and imports must not count towards a job's timeout

    def call(self, job: Job[Any]) -> Any:
        """Run one job in the process and return its result. Blocks; raises `RemoteError` or `ProcessDied`."""
        with contextlib.suppress(OSError):  # it has died: receiving raises that
            self._ours.send((job.id, job.payload_slot, job.created_at_ms, job.attempt, job.retry, job.name, job._tail))
        try:
            self._receive()  # "taken"
        except ProcessDied as error:
            raise _DiedIdle(str(error)) from None
        outcome = self._receive()
        if outcome[0] == "ok":
            return outcome[1]
        raise RemoteError(*outcome[1:])

    def _receive(self) -> Any:
        try:
            return self._ours.recv()
        except (EOFError, OSError):
            if not self.is_spent:
                self._wait_for_exit()  # a kill before its own exit would hide its exit code
            self.kill()
            self.end()
            raise ProcessDied(f"the handler's process died with exit code {self._process.exitcode}") from None

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def kill(self) -> None:
        """Kill its process group and wake the thread that waits for its answer."""
        self.is_spent = True
        kill_group(self._process)
        with self._lock, contextlib.suppress(OSError):  # this end or the other is closed
            # A process that left the group may still hold the other end: do not wait for it.
            ours = socket.socket(fileno=self._ours.fileno())
            try:
                ours.shutdown(socket.SHUT_RDWR)
            finally:
                ours.detach()

    def end(self) -> None:
        """Kill it if it is alive, reap it and close this end of the pipe."""
        if self.is_alive:  # the pid of a dead process may have been reused
            self.kill()
            self._wait_for_exit()
        with self._lock:
            self._ours.close()

    def _wait_for_exit(self) -> None:
        # Not join(timeout): that waits for a pipe which the handler's own children may hold open.
        deadline = time.monotonic() + EXIT_SECS
        while self.is_alive and time.monotonic() < deadline:
            time.sleep(0.002)


def kill_group(process: BaseProcess) -> None:
    """Kill a process with its process group, or alone if it does not lead one yet."""
    if process.pid is None:
        return
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        process.kill()


def _serve(pipe: Connection, handler: Callable[[Job[Any]], Any]) -> None:
    """Run in the child: receive jobs, run the handler, send the results."""
    os.setsid()
    # Let the handler start processes: they are in this group and are killed with it.
    multiprocessing.current_process().daemon = False
    # A process that inherited the pipe would hide this process's death from the worker.
    os.set_inheritable(pipe.fileno(), False)
    os.register_at_fork(after_in_child=pipe.close)
    # Ctrl-C is for the worker, which drains. `_end_with_parent` kills this process when the worker dies.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))
    threading.Thread(target=_end_with_parent, name="tampu-parent-watch", daemon=True).start()
    fork_guard = ForkGuard()
    pipe.send("ready")
    while True:
        try:
            parts = pipe.recv()
        except EOFError:
            return
        pipe.send("taken")
        job: Job[Any] = Job.from_wire(*parts)
        try:
            result = handler(job)
            if inspect.isawaitable(result):
                result = asyncio.run(_awaited(result))
            if fork_guard.is_child:
                leave(None)
            pipe.send(("ok", result))
        except BaseException as error:
            if fork_guard.is_child:
                leave(error)
            if not isinstance(error, Exception):
                raise
            give_up, after_ms = reason_to_give_up(error, job.id), None
            if isinstance(error, GiveUp):
                error, give_up = error.source, DlqReason.UNRECOVERABLE
            elif isinstance(error, RetryAfter):
                after_ms, error = error.after_ms, error.source
            pipe.send(("error", type(error).__name__, str(error), traceback_text(error), give_up, after_ms))


def own_traceback(error: BaseException) -> TracebackType | None:
    """Return an error's traceback from the handler's first frame on: the frames before it are the same for all."""
    first = error.__traceback__
    while first is not None and str(first.tb_frame.f_globals.get("__name__", "")).startswith(_CALLERS):
        first = first.tb_next
    return first or error.__traceback__


def traceback_text(error: BaseException) -> str:
    """Return an error's own traceback as text."""
    return "".join(traceback.format_exception(type(error), error, own_traceback(error)))


async def _awaited(result: Any) -> Any:
    fork_guard = ForkGuard()
    try:
        result = await result
    except BaseException as error:
        if fork_guard.is_child:
            leave(error)  # before asyncio closes the event loop, whose selector the parent shares
        raise
    if fork_guard.is_child:
        leave(None)
    return result


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.killpg(os.getpgrp(), signal.SIGKILL)


def call_typed(handler: Callable[[Job[Any]], Any], payload_type: Any, job: Job[Any]) -> Any:
    """Call a handler with typed payloads, in a child: the type is pickled, its codec is made here."""
    job._decode = _typed_payload(payload_type).decode_slot
    return handler(job)


@cache
def _typed_payload(payload_type: Any) -> TypedPayload:
    return TypedPayload(payload_type)


def refuse_inside_starting_child() -> None:
    """Raise `ConfigError` if a main script without a guard starts a worker in a child that imports the script."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ConfigError(
            "a handler process imported the main script, which starts another worker: put the code that starts the "
            "worker under `if __name__ == '__main__':`"
        )


class _Reservation:
    """A process reserved for one job; `child` is None once the job uses it."""

    __slots__ = ("child", "processes")

    def __init__(self, processes: Processes, child: _Child) -> None:
        self.processes = processes
        self.child: _Child | None = child


_reserved: ContextVar[_Reservation | None] = ContextVar("tampu_reserved_process", default=None)


class Processes:
    """Handler processes, started on demand and reused; a job waits while all are busy.

    There are at most `most`, by default one per CPU core. With `jobs_each`, a process is replaced after this many jobs.
    """

    def __init__(
        self,
        handler: Callable[[Job[Any]], Any],
        threads: DaemonThreads,
        most: int | None = None,
        jobs_each: int | None = None,
    ) -> None:
        try:
            ForkingPickler.dumps(handler)
        except Exception as error:
            raise ConfigError(
                f"a handler that runs in a process must be importable: define it at the top level of a module: {error}"
            ) from error
        self._handler = handler
        self._threads = threads
        self._free: list[_Child] = []
        self._busy: set[_Child] = set()
        self._slots = asyncio.Semaphore(most or os.cpu_count() or 1)
        self._jobs_each = jobs_each

    @contextlib.asynccontextmanager
    async def reserve(self) -> AsyncIterator[None]:
        """Wait for a process and reserve it for the job that runs inside the `async with` block.

        A worker does this before it checks the job's lease and records its start: a job that is still waiting for a
        process has not started.
        """
        async with self._slots:
            child = self._take_free()
            if child is None:
                child = await self._start()
            self._busy.add(child)
            reservation = _Reservation(self, child)
            _reserved.set(reservation)
            try:
                yield
            finally:
                _reserved.set(None)
                if reservation.child is not None:
                    self._busy.discard(child)
                    self._free.append(child)

    async def run(self, job: Job[Any], timeout_secs: float | None) -> Any:
        """Run one job in a process and return its result. Raises `TimeoutError` once the process was killed."""
        reservation = _reserved.get()
        if reservation is None or reservation.processes is not self or (child := reservation.child) is None:
            async with self._slots:
                return await self._run(job, timeout_secs)
        reservation.child = None
        with contextlib.suppress(_DiedIdle):
            return await self._run_in(child, job, timeout_secs)
        return await self._run(job, timeout_secs)

    async def _run(self, job: Job[Any], timeout_secs: float | None) -> Any:
        while (child := self._take_free()) is not None:
            # It may have died since: then it does not take the job, and the next process runs it.
            with contextlib.suppress(_DiedIdle):
                return await self._run_in(child, job, timeout_secs)
        child = await self._start()
        return await self._run_in(child, job, timeout_secs)

    async def _run_in(self, child: _Child, job: Job[Any], timeout_secs: float | None) -> Any:
        self._busy.add(child)
        call = self._threads.call(child.call, job)
        try:
            return await asyncio.wait_for(asyncio.shield(call), timeout_secs)
        except (TimeoutError, asyncio.CancelledError):
            child.kill()
            with contextlib.suppress(BaseException):
                await call
            raise
        finally:
            self._busy.discard(child)
            child.jobs += 1
            if child.is_spent or child.jobs == self._jobs_each:
                child.end()
            else:
                self._free.append(child)

    async def _start(self) -> _Child:
        """Start a process. If the caller is cancelled, the process is kept for a later job."""
        starting = asyncio.ensure_future(self._threads.call(_Child, self._handler))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(self._keep)
            raise

    def _keep(self, started: asyncio.Future[_Child]) -> None:
        if not started.cancelled() and started.exception() is None:
            self._free.append(started.result())

    def _take_free(self) -> _Child | None:
        while self._free:
            child = self._free.pop()
            if child.is_alive:
                return child
            child.end()  # it died while idle: no job failed
        return None

    def close(self) -> None:
        """Kill all processes."""
        for child in [*self._free, *self._busy]:
            child.end()
        self._free.clear()
