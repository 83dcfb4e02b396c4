"""Finds the task by a job's name and runs it on the event loop, in a thread or in a process."""

from __future__ import annotations

import functools
import importlib
import logging
import os
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from tampu.base.event_loop import LoopThread
from tampu.consume.context import set_current_job
from tampu.consume.handlers import Cancel, PutBack, Retry, Snooze, UnrecoverableError
from tampu.consume.invoke import in_process, in_thread, is_coroutine_handler, on_loop
from tampu.consume.processes import Processes
from tampu.consume.progress import ProgressReporter
from tampu.consume.retry_rules import with_rules
from tampu.consume.soft_timeout import call_in_process, with_soft_timeout
from tampu.embedded.server import acquire, join_throw_away, release
from tampu.errors import DecodeError, EncodeError
from tampu.redis.client import Client
from tampu.redis.settings import parse_url
from tampu.wire.codec import QueueCodec
from tampu.wire.keys import QueueKeys
from tampu.wire.payload import encode_value
from tampu.wire.task_codec import Arguments

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from contextlib import AbstractAsyncContextManager

    from tampu.consume.invoke import DaemonThreads
    from tampu.consume.retry_rules import RetryRules
    from tampu.redis.settings import ConnectionSettings
    from tampu.wire.codec import PayloadCodec
    from tampu.wire.job import Job
    from tampu.wire.task_codec import Results

    Caller = Callable[[Job[Any]], Awaitable[Any]]

logger = logging.getLogger("tampu.worker")

#: A job with an unknown name is put back for a worker that knows it: after this delay at first, after a quarter of the
#: time it has been unknown later (up to the longest delay), and no longer than the patience. Each put-back writes four
#: events; once a second for an hour, they would push all others out of the events stream.
UNKNOWN_DELAY_MS = 1000
UNKNOWN_LONGEST_DELAY_MS = 30_000
UNKNOWN_PATIENCE_SECS = 3600.0
#: An unknown job that was not seen for this long was with another worker meanwhile: its patience starts again.
UNKNOWN_ABSENCE_SECS = 600.0
#: Unknown jobs remembered. Beyond that the oldest are forgotten, and their patience starts again.
MAX_REMEMBERED = 10_000
#: Shortest time between two log lines about one unknown name, in seconds.
COMPLAINT_SECS = 60.0


class TaskQueue(Protocol):
    """The part of a task's queue that a dispatcher uses."""

    @property
    def name(self) -> str: ...
    @property
    def url(self) -> str: ...
    @property
    def connection_settings(self) -> ConnectionSettings: ...


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
    """The handler of a worker that serves tasks: `await dispatcher(job)` runs the task and returns its outcome."""

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
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tasks = tasks
        self._threads = threads
        self._store_results = store_results
        self._codec = codec
        self._worker = worker
        self._events_kept = events_kept
        self._process_limits = processes, jobs_per_process
        self._callers: dict[str, Caller] = {}
        self._processes: list[Processes] = []
        self._remotes: dict[str, RemoteTaskCall] = {}
        #: Called before the first job of a task with `process=True`, which may be registered while the worker runs.
        self.when_process_task: Callable[[], None] = _ignore
        self._unknown = UnknownNames(now)

    def knows(self, job: Job[Any]) -> bool:
        """Return True if there is a task for this job."""
        return job.name in self._tasks

    async def __call__(self, job: Job[Any]) -> Any:
        return await self.caller_of(job)(job)

    def caller_of(self, job: Job[Any]) -> Caller:
        """Return the function that runs this job. Awaiting its result saves a coroutine per job."""
        caller = self._callers.get(job.name)
        if caller is None:
            task = self._tasks.get(job.name)
            if task is None:
                return self._put_back
            caller = self._callers[job.name] = self._caller(task, task.timeout, task.soft_timeout)
        if job._tail:
            caller = self._own_caller(job) or caller
        return caller

    def reserve(self, job: Job[Any]) -> AbstractAsyncContextManager[None] | None:
        """Return the context that reserves a process for a job that needs one; None for other jobs."""
        task = self._tasks.get(job.name)
        return self._processes_for(task).reserve() if task is not None and task.process else None

    async def _put_back(self, job: Job[Any]) -> Any:
        return self._unknown.outcome_of(job)

    def _own_caller(self, job: Job[Any]) -> Caller | None:
        """Return the caller of a job with its own timeouts; None if it has none."""
        extras = job.extras
        if extras.timeout_ms is None and extras.soft_timeout_ms is None:
            return None
        task = self._tasks[job.name]
        timeout = task.timeout if extras.timeout_ms is None else extras.timeout_ms / 1000
        soft = task.soft_timeout if extras.soft_timeout_ms is None else extras.soft_timeout_ms / 1000
        return self._caller(task, timeout, soft)

    def close(self) -> None:
        """End the processes."""
        for processes in self._processes:
            processes.close()

    def _caller(self, task: ServedTask, timeout_secs: float | None, soft_secs: float | None) -> Caller:
        codec = QueueCodec.of(self._codec, task.queue.name)
        encode = task.results.encode if self._store_results else None
        is_coroutine = is_coroutine_handler(task.function)
        open_slot = None if codec is None else codec.slot_opener(task.name)
        called = with_rules(TaskCall(task.function, task.arguments, open_slot), task.rules)
        called = with_soft_timeout(called, soft_secs, is_coroutine=is_coroutine)
        if task.process:
            call = in_process(self._processes_for(task), timeout_secs)
            if codec is not None:
                call = _opened_first(call, codec)
        elif is_coroutine:
            call = on_loop(called, timeout_secs)
        else:
            call = in_thread(called, self._threads, timeout_secs)

        async def encoded(job: Job[Any]) -> Any:
            return encode_outcome(await call(job), encode)

        return encoded

    def _processes_for(self, task: ServedTask) -> Processes:
        """Return the processes that all tasks share: one per concurrent job, not one per job and task."""
        if task.name not in self._remotes:
            self._remotes = {
                one.name: RemoteTaskCall.of(one, self._worker, self._events_kept)
                for one in self._tasks.values()
                if one.process
            }
            self.when_process_task()
            self._processes.append(Processes(RemoteCalls(self._remotes), self._threads, *self._process_limits))
        return self._processes[-1]


def _ignore() -> None:
    """Do nothing."""


class UnknownNames:
    """Decides about jobs without a task here: during a deploy old workers receive new jobs."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        #: By job id: when it was first and last seen.
        self._seen: dict[str, tuple[float, float]] = {}
        self._complained_at: dict[str, float] = {}

    def outcome_of(self, job: Job[Any]) -> PutBack | Cancel:
        """Put the job back for a worker that knows its name, or cancel it after `UNKNOWN_PATIENCE_SECS`."""
        now = self._now()
        first, last = self._seen.pop(job.id, (now, now))
        if now - last > UNKNOWN_ABSENCE_SECS:
            first = now
        text = f"no handler named {job.name!r}"
        if now - first > UNKNOWN_PATIENCE_SECS:
            return Cancel(text)
        self._seen[job.id] = first, now
        if len(self._seen) > MAX_REMEMBERED:
            self._seen.pop(next(iter(self._seen)))
        self._complain(job, text, now)
        delay_ms = min(max(UNKNOWN_DELAY_MS, int((now - first) * 250)), UNKNOWN_LONGEST_DELAY_MS)
        return PutBack(delay_ms, text)

    def _complain(self, job: Job[Any], text: str, now: float) -> None:
        if now - self._complained_at.get(job.name, float("-inf")) < COMPLAINT_SECS:
            return
        if len(self._complained_at) >= MAX_REMEMBERED:
            self._complained_at.clear()
        self._complained_at[job.name] = now
        logger.warning("%s on this worker: job %s and others like it are put back for another worker", text, job.id)


def _opened_first(call: Caller, codec: QueueCodec) -> Caller:
    """Return a caller that opens the payload here: the keys stay in the worker, the process gets a plain payload."""

    async def opened(job: Job[Any]) -> Any:
        try:
            slot = codec.open_slot(job.payload_slot, job.name)
        except DecodeError as error:
            error.job_id = job.id
            raise
        return await call(job._replaced(_slot=slot))

    return opened


class TaskCall:
    """Calls a task's function with the arguments in a job."""

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: Arguments,
        open_slot: Callable[[bytes], bytes] | None = None,
    ) -> None:
        self._function = function
        self._arguments = arguments
        #: Opens sealed payloads; None if the queue has no codec.
        self._open_slot = open_slot

    def __call__(self, job: Job[Any]) -> Any:
        slot = job._slot
        try:
            if self._open_slot is not None:
                slot = self._open_slot(slot)
            arguments = self._arguments.decode(slot)
        except DecodeError as error:
            error.job_id = job.id
            raise
        set_current_job(job)
        return self._function(**arguments)


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
        return cls(
            *(function.__module__, function.__qualname__, queue.name, queue.url, throw_away, worker, events_kept),
            *(task.soft_timeout, is_coroutine_handler(function), _is_django_ready()),
        )

    def __call__(self, job: Job[Any]) -> Any:
        call, reporter = _found(self)
        job._context = reporter
        own_ms = job.extras.soft_timeout_ms
        soft_secs = self.soft_timeout if own_ms is None else own_ms / 1000
        if self.is_coroutine:
            return with_soft_timeout(call, soft_secs, is_coroutine=True)(job)
        return call_in_process(call, job, soft_secs)


@dataclass(frozen=True)
class RemoteCalls:
    """The tasks that a worker's process can run, by job name."""

    remotes: dict[str, RemoteTaskCall]

    def __call__(self, job: Job[Any]) -> Any:
        return self.remotes[job.name](job)


def _is_django_ready() -> bool:
    """Return True if this process has called `django.setup()` with a settings module, which a child can do too."""
    registry: Any = sys.modules.get("django.apps")
    return registry is not None and registry.apps.ready and bool(os.environ.get("DJANGO_SETTINGS_MODULE"))


@functools.cache
def _found(remote: RemoteTaskCall) -> tuple[Callable[[Job[Any]], Any], ProgressReporter]:
    """Return, in the child, the task's call and its progress reporter."""
    if remote.throw_away is not None:
        join_throw_away(remote.throw_away)
    if remote.needs_django:
        importlib.import_module("django").setup()
    found: Any = importlib.import_module(remote.module)
    for part in remote.name.split("."):
        found = getattr(found, part)
    settings = parse_url(remote.url)
    if isinstance(getattr(found, "arguments", None), Arguments):
        call = with_rules(TaskCall(found.function, found.arguments), found.rules)
        if found.queue.url == remote.url:
            settings = found.queue.connection_settings  # it has the credentials, which are not pickled
    else:  # the task was bound to another name than the function's
        call = TaskCall(found, Arguments(found, remote.name))
    return call, LoopThread().run(_make_reporter(settings, remote))


async def _make_reporter(settings: ConnectionSettings, remote: RemoteTaskCall) -> ProgressReporter:
    keys = QueueKeys(remote.queue_name)
    client = Client(settings, keys.tag.encode())
    return ProgressReporter(client, keys, worker=remote.worker, events_kept=remote.events_kept)


#: A tuple: `isinstance` with a union takes four times as long, for every job.
_OUTCOMES = (PutBack, Cancel, Retry, Snooze)


def encode_outcome(result: Any, encode: Callable[[Any], bytes] | None = encode_value) -> Any:
    """Return a handler's result for the consumer: outcomes unchanged, values as MessagePack if results are stored."""
    if isinstance(result, _OUTCOMES):
        return result
    if encode is None:
        return None
    try:
        return encode(result)
    except EncodeError as error:
        # A retry would repeat the work and fail with the same value.
        raise UnrecoverableError(f"the work is done, but its result cannot be stored: {error}") from error
