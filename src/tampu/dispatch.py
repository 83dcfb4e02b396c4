"""Finds the task for a job's name and calls it: on the loop, in a thread, or in a process, as the task says."""

from __future__ import annotations

import importlib
import logging
import time
from typing import TYPE_CHECKING, Any

from tampu.engine.callers import in_process, in_thread, is_coroutine_handler, on_loop
from tampu.engine.handlers import Cancel, PutBack
from tampu.engine.processes import Processes
from tampu.errors import DecodeError
from tampu.wire.payload import encode_value

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from concurrent.futures import ThreadPoolExecutor

    from tampu.task import Task
    from tampu.wire.job import Job

logger = logging.getLogger("tampu.worker")

#: How long a job of an unknown name waits for a worker that knows it, each time and in all.
UNKNOWN_DELAY_MS = 1000
UNKNOWN_PATIENCE_SECS = 3600.0
#: Unknown jobs remembered; beyond, the oldest are forgotten and get more patience.
MAX_REMEMBERED = 10_000


class Dispatcher:
    """The handler of a worker that serves tasks: `await dispatcher(job)` gives what the consumer wants to know."""

    def __init__(
        self,
        tasks: dict[str, Task[Any, Any]],
        threads: ThreadPoolExecutor,
        *,
        store_results: bool,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tasks = tasks
        self._threads = threads
        self._store_results = store_results
        self._now = now
        self._callers: dict[str, Callable[[Job[Any]], Awaitable[Any]]] = {}
        self._processes: list[Processes] = []
        self._unknown_since: dict[str, float] = {}

    async def __call__(self, job: Job[Any]) -> Any:
        caller = self._callers.get(job.name)
        if caller is None:
            task = self._tasks.get(job.name)
            if task is None:
                return self._unknown(job)
            caller = self._callers[job.name] = self._caller(task)
        result = await caller(job)
        return encode_outcome(result, store=self._store_results)

    def close(self) -> None:
        """End the processes."""
        for processes in self._processes:
            processes.close()

    def _caller(self, task: Task[Any, Any]) -> Callable[[Job[Any]], Awaitable[Any]]:
        timeout = task.options.timeout
        call = TaskCall(task)
        if task.options.process:
            processes = Processes(RemoteTaskCall(task), self._threads)
            self._processes.append(processes)
            return in_process(processes, timeout)
        if is_coroutine_handler(task.function):
            return on_loop(call, timeout)
        return in_thread(call, self._threads, timeout)

    def _unknown(self, job: Job[Any]) -> PutBack | Cancel:
        """During a deploy old workers meet new jobs: put them back for those who know them, but not for ever."""
        since = self._unknown_since.setdefault(job.id, self._now())
        if len(self._unknown_since) > MAX_REMEMBERED:
            self._unknown_since.pop(next(iter(self._unknown_since)))
        text = f"no handler named {job.name!r}"
        if self._now() - since > UNKNOWN_PATIENCE_SECS:
            del self._unknown_since[job.id]
            return Cancel(text)
        if since == self._now() or self._now() - since < 1:
            logger.warning("%s: job %s is put back for a worker that has one", text, job.id)
        return PutBack(UNKNOWN_DELAY_MS, text)


class TaskCall:
    """Calls a task's function with the arguments in a job."""

    def __init__(self, task: Task[Any, Any]) -> None:
        self._task = task

    def __call__(self, job: Job[Any]) -> Any:
        return self._task.function(**arguments_of(self._task, job))


def arguments_of(task: Task[Any, Any], job: Job[Any]) -> dict[str, Any]:
    """The keyword arguments in a job; `DecodeError` when they do not fit the function."""
    try:
        return task.arguments.decode(job.payload_slot)
    except DecodeError as error:
        error.job_id = job.id
        raise


class RemoteTaskCall:
    """The same in another process: the task is found there by the name of its module, not sent."""

    def __init__(self, task: Task[Any, Any]) -> None:
        self._module = task.function.__module__
        self._name = task.function.__qualname__

    def __call__(self, job: Job[Any]) -> Any:
        found: Any = importlib.import_module(self._module)
        for part in self._name.split("."):
            found = getattr(found, part)
        return TaskCall(found)(job)


def encode_outcome(result: Any, *, store: bool) -> Any:
    """A handler's return value in the consumer's terms: outcomes as they are, values as MessagePack."""
    if isinstance(result, PutBack | Cancel) or type(result).__name__ == "Retry":
        return result
    return encode_value(result) if store else None
