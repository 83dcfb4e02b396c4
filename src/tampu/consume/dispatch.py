"""Finds the task by a job's name, also in the processes that run tasks."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
import sys
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from tampu.base.event_loop import LoopThread
from tampu.consume.context import ProgressReporter, set_current_job
from tampu.consume.dependencies import ProcessValues, Provided, WorkerValues, dependencies_of
from tampu.consume.execute import Target, run_inside
from tampu.consume.handlers import is_coroutine_handler
from tampu.consume.processes import Processes
from tampu.embedded.server import acquire, join_throw_away, release
from tampu.errors import ConfigError, DecodeError
from tampu.redis.client import Client
from tampu.redis.settings import parse_url
from tampu.wire.codec import QueueCodec
from tampu.wire.keys import QueueKeys
from tampu.wire.task_codec import Arguments

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

    from tampu.consume.dependencies import Dependency
    from tampu.consume.execute import AroundRun
    from tampu.consume.pool import DaemonThreads
    from tampu.consume.retries import RetryRules
    from tampu.redis.settings import ConnectionSettings
    from tampu.wire.codec import PayloadCodec
    from tampu.wire.job import Job
    from tampu.wire.task_codec import Results


class TaskQueue(Protocol):
    """The part of a task's queue that a dispatcher uses."""

    @property
    def name(self) -> str: ...
    @property
    def url(self) -> str: ...
    @property
    def connection_settings(self) -> ConnectionSettings: ...
    @property
    def around_runs(self) -> Sequence[AroundRun]: ...


class ServedTask(Protocol):
    """The part of a task that a dispatcher uses; implemented by `tampu.task.Task`."""

    @property
    def name(self) -> str: ...
    @property
    def queue(self) -> TaskQueue: ...
    @property
    def function(self) -> Callable[..., Any]: ...
    @property
    def arguments(self) -> Arguments: ...
    @property
    def dependencies(self) -> Mapping[str, Dependency]: ...
    @property
    def results(self) -> Results: ...
    @property
    def timeout(self) -> float | None: ...
    @property
    def soft_timeout(self) -> float | None: ...
    @property
    def process(self) -> bool: ...
    @property
    def rules(self) -> RetryRules | None: ...


class Dispatcher:
    """Finds how the jobs of a queue run."""

    def __init__(
        self,
        tasks: Mapping[str, ServedTask],
        threads: DaemonThreads,
        *,
        store_results: bool,
        codec: PayloadCodec | None = None,
        worker: str = "",
        events_kept: int = 0,
        processes: int | None = None,
        jobs_per_process: int | None = None,
        worker_values: WorkerValues | None = None,
    ) -> None:
        self._tasks = tasks
        self._threads = threads
        self._store_results = store_results
        self._codec = codec
        self._worker = worker
        self._events_kept = events_kept
        self._process_limits = processes, jobs_per_process
        self._worker_values = worker_values or WorkerValues()
        self._targets: dict[str, Target] = {}
        self._processes: list[Processes] = []
        self._remotes: dict[str, RemoteTaskCall] = {}
        #: Called before the first job of a task with `process=True`, which may be registered while the worker runs.
        self.when_process_task: Callable[[], object] = lambda: None

    def target_of(self, job: Job[Any]) -> Target:
        """Return how a job runs."""
        target = self._targets.get(job.name)
        if target is None:
            task = self._tasks[job.name]
            target = self._targets[job.name] = self._target(task, task.timeout, task.soft_timeout)
        if job._tail:
            target = self._own_target(job) or target
        return target

    def reserve(self, job: Job[Any]) -> AbstractAsyncContextManager[None] | None:
        """Return the context that reserves a process for a job that needs one; None for other jobs."""
        task = self._tasks.get(job.name)
        return self._processes_for(task).reserve() if task is not None and task.process else None

    def _own_target(self, job: Job[Any]) -> Target | None:
        """Return the target of a job with its own timeouts; None if it has none."""
        extras = job.extras
        if extras.timeout_ms is None and extras.soft_timeout_ms is None:
            return None
        task = self._tasks[job.name]
        timeout = task.timeout if extras.timeout_ms is None else extras.timeout_ms / 1000
        soft = task.soft_timeout if extras.soft_timeout_ms is None else extras.soft_timeout_ms / 1000
        return self._target(task, timeout, soft)

    def close(self) -> None:
        """End the processes."""
        for processes in self._processes:
            processes.close()

    def _target(self, task: ServedTask, timeout_secs: float | None, soft_secs: float | None) -> Target:
        codec = QueueCodec.of(self._codec, task.queue.name)
        open_slot = None if codec is None else codec.slot_opener(task.name)
        is_async = is_coroutine_handler(task.function)
        is_in_thread = not task.process and not is_async
        provided = None
        if task.dependencies and not task.process:
            provided = Provided(task.dependencies, self._worker_values, is_async=is_async)
        return Target(
            task_call(task.function, task.arguments, open_slot, provided, is_async=is_async),
            threads=self._threads if is_in_thread else None,
            processes=self._processes_for(task) if task.process else None,
            timeout_secs=timeout_secs,
            soft_secs=soft_secs,
            rules=task.rules,
            open_first=partial(_opened, codec) if task.process and codec is not None else None,
            encode=task.results.encode if self._store_results else None,
            provided=provided,
        )

    def _processes_for(self, task: ServedTask) -> Processes:
        """Return the processes that all tasks share: one per concurrent job, not one per job and task."""
        if task.name not in self._remotes:
            self._remotes = {
                other.name: RemoteTaskCall.of(other, self._worker, self._events_kept)
                for other in self._tasks.values()
                if other.process
            }
            self.when_process_task()
            self._processes.append(Processes(RemoteCalls(self._remotes), self._threads, *self._process_limits))
        return self._processes[-1]


def _call_provided(
    call: Callable[[Callable[..., Any], dict[str, Any]], Any], function: Callable[..., Any], /, **values: Any
) -> Any:
    return call(function, values)


def _opened(codec: QueueCodec, job: Job[Any]) -> Job[Any]:
    """Open a payload for a process: the keys stay in the worker, the process gets a plain payload."""
    try:
        return job._replaced(_slot=codec.open_slot(job.payload_slot, job.name))
    except DecodeError as error:
        error.job_id = job.id
        raise


def task_call(
    function: Callable[..., Any],
    arguments: Arguments,
    open_slot: Callable[[bytes], bytes] | None = None,
    provided: Provided | None = None,
    *,
    is_async: bool,
) -> Callable[[Job[Any]], Any]:
    """Return a function that calls a task's function with the arguments in a job. `open_slot` opens sealed payloads."""
    if provided is not None:
        function = partial(_call_provided, provided.call, function)
    if is_django_ready() and not is_async:
        function = _with_fresh_connections(function)
    decode = arguments.decode

    def call(job: Job[Any]) -> Any:
        slot = job._slot
        try:
            if open_slot is not None:
                slot = open_slot(slot)
            values = decode(slot)
        except DecodeError as error:
            error.job_id = job.id
            raise
        return function(**values)

    return call


@dataclass(frozen=True)
class RemoteTaskCall:
    """Calls a task's function in another process, which finds the task by its module and name."""

    module: str
    name: str
    queue_name: str
    url: str = field(repr=False)
    #: The folder of the worker's temporary server, if the queue is on it: in a child, `embedded://` starts another one.
    throw_away: str | None
    worker: str
    events_kept: int
    soft_timeout: float | None
    is_coroutine: bool
    #: True if the worker has set up Django: the task's module may import models, which needs that in the child too.
    needs_django: bool
    has_middleware: bool

    @classmethod
    def of(cls, task: ServedTask, worker: str, events_kept: int) -> RemoteTaskCall:
        """Return the call of a task, ready to be pickled."""
        settings = task.queue.connection_settings
        throw_away = None
        if settings.kind == "embedded" and settings.data_dir is None:
            server = acquire()
            throw_away = str(server.data_dir)
            release(server)
        function, queue = task.function, task.queue
        needs_django = is_django_ready() and bool(os.environ.get("DJANGO_SETTINGS_MODULE"))
        return cls(
            *(function.__module__, function.__qualname__, queue.name, queue.url, throw_away, worker, events_kept),
            *(task.soft_timeout, is_coroutine_handler(function), needs_django, bool(queue.around_runs)),
        )

    def __call__(self, job: Job[Any]) -> Any:
        call, rules, reporter, around, provided = _found(self)
        job._context = reporter
        set_current_job(job)
        own_ms = job.extras.soft_timeout_ms
        soft_secs = self.soft_timeout if own_ms is None else own_ms / 1000
        target = Target(call, soft_secs=soft_secs, rules=rules)
        run: Callable[[Job[Any]], Any] = target.run_on_loop if self.is_coroutine else target.call_in_process
        if not around and provided is None:
            return run(job)

        async def start(job: Job[Any]) -> Any:
            async with contextlib.nullcontext() if provided is None else provided.on_loop():
                result = run(job)
                return await result if inspect.isawaitable(result) else result

        return run_inside(around, start, job)


@dataclass(frozen=True)
class RemoteCalls:
    """The tasks that a worker's process can run, by job name."""

    remotes: dict[str, RemoteTaskCall]

    def __call__(self, job: Job[Any]) -> Any:
        return self.remotes[job.name](job)


def is_django_ready() -> bool:
    """Return True if this process has called `django.setup()`."""
    registry: Any = sys.modules.get("django.apps")
    return registry is not None and registry.apps.ready


def _with_fresh_connections(function: Callable[..., Any]) -> Callable[..., Any]:
    """Close broken and outdated database connections of the thread around each run, as Django does for a request."""
    close_old_connections = importlib.import_module("django.db").close_old_connections

    def call(**values: Any) -> Any:
        close_old_connections()
        try:
            return function(**values)
        finally:
            close_old_connections()

    return call


_process_values = ProcessValues()


@functools.cache
def _found(
    remote: RemoteTaskCall,
) -> tuple[Callable[[Job[Any]], Any], RetryRules | None, ProgressReporter, Sequence[AroundRun], Provided | None]:
    """Return, in the child, the task's call, its rules, its progress reporter, its middleware and its dependencies."""
    if remote.throw_away is not None:
        join_throw_away(remote.throw_away)
    if remote.needs_django:
        importlib.import_module("django").setup()
    found: Any = importlib.import_module(remote.module)
    for part in remote.name.split("."):
        found = getattr(found, part)
    settings = parse_url(remote.url)
    if isinstance(getattr(found, "arguments", None), Arguments):
        function, arguments, rules, around = found.function, found.arguments, found.rules, found.queue.around_runs
        if found.queue.url == remote.url:
            settings = found.queue.connection_settings  # it has the credentials, which are not pickled
    else:  # the task was bound to another name than the function's
        if remote.has_middleware:
            raise ConfigError(f"{remote.name} in {remote.module} must be the task itself: its queue has middleware")
        function, arguments, rules, around = found, Arguments(found, remote.name, dependencies_of(found)), None, []
    dependencies = dependencies_of(function)
    provided = Provided(dependencies, _process_values, is_async=remote.is_coroutine) if dependencies else None
    call = task_call(function, arguments, provided=provided, is_async=remote.is_coroutine)
    return call, rules, LoopThread().run(_make_reporter(settings, remote)), around, provided


async def _make_reporter(settings: ConnectionSettings, remote: RemoteTaskCall) -> ProgressReporter:
    keys = QueueKeys(remote.queue_name)
    client = Client(settings, keys.tag.encode())
    return ProgressReporter(client, keys, worker=remote.worker, events_kept=remote.events_kept)
