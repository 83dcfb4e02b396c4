"""Runs handlers in processes of their own: for CPU work, for C code that holds the GIL, for what may crash or hang.

A process runs one job at a time. It is killed when the job exceeds its timeout, and replaced when it dies; a death
costs the one job that was running in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import multiprocessing
import traceback
from typing import TYPE_CHECKING, Any

from tampu.engine.handlers import is_unrecoverable
from tampu.errors import ConfigError
from tampu.wire.job import Job

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import ThreadPoolExecutor
    from multiprocessing.connection import Connection


class ProcessDied(BaseException):
    """The process died while it ran the job; counted as a panic."""


class RemoteError(Exception):
    """A handler's error in another process. `error_type` is its type's name, the text is its own."""

    def __init__(self, error_type: str, text: str, remote_traceback: str, is_unrecoverable: bool) -> None:
        super().__init__(text)
        self.error_type = error_type
        self.remote_traceback = remote_traceback
        self.is_unrecoverable = is_unrecoverable


class _Child:
    """One worker process and our end of its pipe."""

    def __init__(self, handler: Callable[[Job[Any]], Any]) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would copy locks that threads of ours may hold
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, handler), name="tampu-handler", daemon=True)
        self._process.start()
        theirs.close()

    def call(self, job: Job[Any]) -> Any:
        """Run one job there and wait for it; blocks."""
        try:
            self._ours.send((job.id, job.payload_slot, job.created_at_ms, job.attempt, job.retry, job.name))
            outcome = self._ours.recv()
        except (EOFError, OSError):
            self._process.join(5)
            raise ProcessDied(f"the handler's process died with exit code {self._process.exitcode}") from None
        if outcome[0] == "ok":
            return outcome[1]
        raise RemoteError(*outcome[1:])

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> None:
        self._process.kill()
        self._process.join(5)
        self._ours.close()


def _serve(pipe: Connection, handler: Callable[[Job[Any]], Any]) -> None:
    """The child's whole life: take a job, run the handler, answer."""
    while True:
        try:
            parts = pipe.recv()
        except (EOFError, KeyboardInterrupt):
            return
        try:
            result = handler(Job.from_wire(*parts))
            if inspect.isawaitable(result):
                result = asyncio.run(_awaited(result))
            pipe.send(("ok", result))
        except Exception as error:
            text = "".join(traceback.format_exception(error))
            pipe.send(("error", type(error).__name__, str(error), text, is_unrecoverable(error)))


async def _awaited(result: Any) -> Any:
    return await result


def refuse_inside_starting_child() -> None:
    """A child imports the main script again: one that starts its worker there without a guard would never end."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ConfigError(
            "this is a process that is just starting to run handlers, and the main script starts a worker in it: "
            "put what the script does under `if __name__ == '__main__':`"
        )


class Processes:
    """As many processes as jobs run at once; made when they are first needed."""

    def __init__(self, handler: Callable[[Job[Any]], Any], threads: ThreadPoolExecutor) -> None:
        self._handler = handler
        self._threads = threads
        self._free: list[_Child] = []
        self._busy: set[_Child] = set()

    async def run(self, job: Job[Any], timeout_secs: float | None) -> Any:
        """Run one job in a process; `TimeoutError` after the process was killed."""
        loop = asyncio.get_running_loop()
        child = self._free.pop() if self._free else await loop.run_in_executor(self._threads, _Child, self._handler)
        self._busy.add(child)
        call = loop.run_in_executor(self._threads, child.call, job)
        try:
            return await asyncio.wait_for(asyncio.shield(call), timeout_secs)
        except (TimeoutError, asyncio.CancelledError):
            child.kill()
            with contextlib.suppress(BaseException):
                await call
            raise
        finally:
            self._busy.discard(child)
            if child.is_alive and call.done():
                self._free.append(child)
            else:
                child.end()

    def close(self) -> None:
        """End all processes."""
        for child in [*self._free, *self._busy]:
            child.end()
        self._free.clear()
