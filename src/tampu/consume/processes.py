"""Runs handlers in separate processes: for CPU work, C code that holds the GIL, and code that may crash or hang.

A process runs one job at a time. It is killed when the job exceeds its timeout and replaced when it dies, which fails
only the job it was running. Each process leads a process group that is killed with it, so that nothing the handler
started keeps running during the retry.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import inspect
import json
import logging
import multiprocessing
import os
import signal
import socket
import threading
import time
import traceback
from contextvars import ContextVar, copy_context
from functools import cache, partial
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

from tampu.consume.handlers import NoResult, RemoteError
from tampu.consume.retries import judgement_of
from tampu.errors import ConfigError
from tampu.wire.job import Job
from tampu.wire.typed import TypedPayload

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess
    from types import TracebackType

    from tampu.consume.pool import DaemonThreads

#: The modules between a worker's loop and a handler; their frames are cut from tracebacks.
_CALLERS = ("tampu.consume.", "tampu.worker", "asyncio.")
#: How long a process may take to exit once it has closed its pipe or was killed, in seconds.
EXIT_SECS = 5.0
#: Signals that stop a worker; its handler processes ignore them.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
#: Held while a handler process writes to its worker: an exception would cut the message in half.
WRITING = threading.Lock()


class ProcessDied(BaseException):
    """The process died while it ran the job; metrics count it as a panic."""


class _DiedIdle(ProcessDied):
    """The process died before it took the job."""


class _Child:
    """One handler process and the worker's end of its pipe."""

    def __init__(self, handler: Callable[[Job[Any]], Any]) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would copy locks that other threads may hold
        self._ours, theirs = context.Pipe()
        given = theirs, handler, logging.root.level
        self._process = context.Process(target=_serve, args=given, name="tampu-handler", daemon=True)
        # Block them in the child until it ignores them, which is only after its imports.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        # Before multiprocessing's own exit handler, which would send SIGTERM and wait.
        atexit.register(self.kill)
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
        try:
            outcome = self._receive()
        except Exception as error:  # only a return value may be of a type that cannot be unpickled
            return NoResult(f"it cannot be unpickled: {error}")
        if outcome[0] == "ok":
            return outcome[1]
        raise RemoteError(*outcome[1:])

    def _receive(self) -> Any:
        """Return its next message. Log records before that are logged here, by the handlers of this process."""
        try:
            while (message := self._ours.recv())[0] == "log":
                with contextlib.suppress(Exception):  # of a handler
                    record = logging.makeLogRecord(json.loads(message[1]))
                    if (logger := logging.getLogger(record.name)).isEnabledFor(record.levelno):
                        logger.handle(record)
            return message
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
        atexit.unregister(self.kill)
        with self._lock:
            self._ours.close()

    def _wait_for_exit(self) -> None:
        # Not join(timeout): that waits for a pipe which the handler's own children may hold open.
        deadline = time.monotonic() + EXIT_SECS
        while self.is_alive and time.monotonic() < deadline:
            time.sleep(0.002)


class _LogToWorker(logging.Handler):
    """Sends log records from a handler process to its worker, as JSON: a field may have any type."""

    def __init__(self, pipe: Connection) -> None:
        super().__init__()
        self._pipe = pipe

    def emit(self, record: logging.LogRecord) -> None:
        values = vars(record) | {"msg": record.getMessage(), "args": None, "exc_info": None}
        if record.exc_info:
            values["exc_text"] = logging.Formatter().formatException(record.exc_info)
        with contextlib.suppress(Exception):  # the worker is gone, or a field cannot be shown
            _send(self._pipe, ("log", json.dumps(values, default=str)))


def _send(pipe: Connection, message: object) -> None:
    with WRITING:
        pipe.send(message)


def kill_group(process: BaseProcess) -> None:
    """Kill a process with its process group, or alone if it does not lead one yet."""
    if process.pid is None:
        return
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        process.kill()


def _serve(pipe: Connection, handler: Callable[[Job[Any]], Any], log_level: int) -> None:
    """Run in the child: receive jobs, run the handler, send the results."""
    os.setsid()
    logs = _LogToWorker(pipe)
    logging.basicConfig(handlers=[logs], level=log_level)
    logging.captureWarnings(True)
    os.register_at_fork(after_in_child=partial(logging.root.removeHandler, logs))
    # Let the handler start processes: they are in this group and are killed with it.
    multiprocessing.current_process().daemon = False
    # A process that inherited the pipe would hide this process's death from the worker.
    os.set_inheritable(pipe.fileno(), False)
    os.register_at_fork(after_in_child=pipe.close)
    # Ctrl-C is for the worker, which drains; so is a SIGTERM, which systemd sends to all processes. `_end_with_parent`
    # kills this process when the worker dies. The handler's own programs and forks end on SIGTERM, even if it arrives
    # before a fork has reset it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    own_pid = os.getpid()
    signal.signal(signal.SIGTERM, lambda *_: None if os.getpid() == own_pid else os._exit(128 + signal.SIGTERM))
    os.register_at_fork(after_in_child=partial(signal.signal, signal.SIGTERM, signal.SIG_DFL))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    threading.Thread(target=_end_with_parent, name="tampu-parent-watch", daemon=True).start()
    pipe.send("ready")
    while True:
        try:
            parts = pipe.recv()
        except EOFError:
            return
        _send(pipe, "taken")
        job: Job[Any] = Job.from_wire(*parts)
        try:
            result = handler(job)
            if inspect.isawaitable(result):
                result = asyncio.run(_awaited(result))
            try:
                _send(pipe, ("ok", result))
            except Exception as error:
                _send(pipe, ("ok", NoResult(f"it cannot be pickled: {error}")))
        except Exception as error:
            text = traceback_text(error)
            _send(pipe, ("error", type(error).__name__, str(error), text, *judgement_of(error, job)))


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
    return await result


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

    There are at most `limit`, by default one per CPU core. After `jobs_each` jobs, a process is replaced.
    """

    def __init__(
        self,
        handler: Callable[[Job[Any]], Any],
        threads: DaemonThreads,
        limit: int | None = None,
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
        self._slots = asyncio.Semaphore(limit or os.cpu_count() or 1)
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
        call = self._threads.call(copy_context().run, child.call, job)  # its log records find the job in the context
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
