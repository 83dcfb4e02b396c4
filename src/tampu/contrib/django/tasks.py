"""A backend for `django.tasks` (Django 6), and for the same API in the package django-tasks on older Django.

    # settings.py
    TASKS = {"default": {"BACKEND": "tampu.contrib.django.tasks.TampuBackend", "OPTIONS": {"attempts": 5}}}

    # worker.py, run by: tampu worker worker:worker
    django.setup()
    worker = tasks_worker()

A task's queue is the tampu queue of that name. A job is named after the task's module path; its payload is
`{"args": [...], "kwargs": {...}}`.

| option | meaning |
|---|---|
| `url` | server URL; defaults to `TAMPU_URL`, then to `redis://127.0.0.1:6379` |
| `attempts` | maximum number of attempts, 5 by default; until the last one has failed, the status is READY |
| `backoff` | wait between attempts, as for `Queue.add` |
| others | settings of `Queue` |
"""

from __future__ import annotations

import builtins
import os
import re
import socket
import threading
import time
import traceback
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import django
from django.utils import timezone
from django.utils.module_loading import import_string

from tampu.base.clock import wall_clock_ms
from tampu.consume.admission import UnknownNames
from tampu.consume.handlers import is_unrecoverable
from tampu.contrib.django import fresh_connections
from tampu.queue import Queue
from tampu.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tampu.inspect.jobs import JobState
    from tampu.wire.job import Job

if TYPE_CHECKING or django.VERSION >= (6, 0):
    from django.tasks import task_backends
    from django.tasks.backends.base import BaseTaskBackend
    from django.tasks.base import Task, TaskContext, TaskError, TaskResult, TaskResultStatus
    from django.tasks.exceptions import TaskResultDoesNotExist
    from django.tasks.signals import task_enqueued, task_finished, task_started
else:
    from django_tasks import task_backends
    from django_tasks.backends.base import BaseTaskBackend
    from django_tasks.base import Task, TaskContext, TaskError, TaskResult, TaskResultStatus
    from django_tasks.exceptions import TaskResultDoesNotExist
    from django_tasks.signals import task_enqueued, task_finished, task_started

#: Maximum number of attempts, unless OPTIONS has `attempts`.
DEFAULT_ATTEMPTS = 5
#: How often to search for a job that is not found: it may have moved during the search, and a quick retry moves often.
MAX_LOOKS = 5

_STATUS = {
    "waiting": TaskResultStatus.READY,
    "delayed": TaskResultStatus.READY,
    "running": TaskResultStatus.RUNNING,
    "done": TaskResultStatus.SUCCESSFUL,
    "dead": TaskResultStatus.FAILED,
}

#: One queue per name and settings for the whole process: Django makes a backend for every thread.
_queues: dict[str, Queue] = {}
_queues_guard = threading.Lock()


class TampuBackend(BaseTaskBackend):
    """Adds Django's tasks to tampu queues and finds their results."""

    supports_defer = True
    supports_async_task = True
    supports_get_result = True

    def __init__(self, alias: str, params: Mapping[str, Any]) -> None:
        super().__init__(alias, dict(params))
        options = dict(self.options)
        self._retry = {"attempts": options.pop("attempts", DEFAULT_ATTEMPTS), "backoff": options.pop("backoff", None)}
        self._settings = options
        self._unknown = UnknownNames(time.monotonic)
        self._worker_id = f"{socket.gethostname()}:{os.getpid()}"

    def queue(self, name: str) -> Queue:
        """Return the tampu queue of this name."""
        key = f"{name} {sorted(self._settings.items())!r}"
        with _queues_guard:
            if key not in _queues:
                _queues[key] = Queue(name, **self._settings)
            return _queues[key]

    # --- adding

    def enqueue(self, task: Task[Any, Any], args: Any, kwargs: Any) -> TaskResult[Any, Any]:
        """Add a job for a task, now. Inside a transaction: `transaction.on_commit(partial(task.enqueue, ...))`."""
        self.validate_task(task)
        result = _result(task, "", TaskResultStatus.READY, {"args": args, "kwargs": kwargs}, backend=self.alias)
        payload = {"args": result.args, "kwargs": result.kwargs}
        queue = self.queue(task.queue_name).sync
        job = queue.add(task.module_path, payload, delay_ms=task.run_after, **self._retry)
        result = replace(result, id=str(job.id), enqueued_at=timezone.now())
        task_enqueued.send(type(self), task_result=result)
        return result

    # --- running

    def run(self, job: Job[Any]) -> Any:
        """Run the task of a job: the handler of `tasks_worker`."""
        task = _task_named(job.name)
        if task is None:
            return self._unknown.outcome_of(job)
        started_ms = wall_clock_ms()
        result = _result(
            task.using(backend=self.alias),
            job.id,
            TaskResultStatus.RUNNING,
            job.payload,
            backend=self.alias,
            enqueued_ms=job.created_at_ms,
            started_ms=started_ms,
            worker_ids=[self._worker_id] * (job.attempt + 1),
        )
        task_started.send(type(self), task_result=result)
        try:
            value = fresh_connections(_call)(task, result)
        except BaseException as error:
            if is_unrecoverable(error) or job.attempt + 1 >= _attempts(job):
                result.errors.append(TaskError(exception_class_path=_path(type(error)), traceback=_text(error)))
                self._finish(result, TaskResultStatus.FAILED, wall_clock_ms())
            raise
        finished_ms = wall_clock_ms()
        object.__setattr__(result, "_return_value", value)
        self._finish(result, TaskResultStatus.SUCCESSFUL, finished_ms)
        # What `get_result` needs to describe a task that is no longer in the queue.
        return {
            "task": job.name,
            "args": result.args,
            "kwargs": result.kwargs,
            "return_value": value,
            "enqueued_ms": job.created_at_ms,
            "started_ms": started_ms,
            "finished_ms": finished_ms,
            "worker_ids": result.worker_ids,
        }

    def _finish(self, result: TaskResult[Any, Any], status: TaskResultStatus, finished_ms: int) -> None:
        object.__setattr__(result, "status", status)  # Django's own backends change results this way
        object.__setattr__(result, "finished_at", _instant(finished_ms))
        task_finished.send(type(self), task_result=result)

    # --- results

    def get_result(self, result_id: str) -> TaskResult[Any, Any]:
        """Find a task in the queues of this backend. Results are kept for the worker's `result_ttl_secs` (1 hour)."""
        for _ in range(MAX_LOOKS):
            for name in sorted(self.queues):
                queue = self.queue(name)
                state = queue.sync.get_job(result_id)
                found = None if state.state == "unknown" else self._described(queue, state)
                if found is not None:
                    return found
        raise TaskResultDoesNotExist(result_id)

    def _described(self, queue: Queue, state: JobState) -> TaskResult[Any, Any] | None:
        """Return the result for a job's state; None if the job has moved on."""
        status = _STATUS.get(state.state, TaskResultStatus.FAILED)
        if state.state == "done":
            stored = state.result if isinstance(state.result, dict) else {}
            task = _task_named(stored.get("task", ""))
            if task is None:
                raise TaskResultDoesNotExist(state.id)
            times = {name: stored[name] for name in ("enqueued_ms", "started_ms", "finished_ms", "worker_ids")}
            result = _result(self._placed(task, queue), state.id, status, stored, backend=self.alias, **times)
            object.__setattr__(result, "_return_value", stored["return_value"])
            return result
        job = queue.sync._run(_stored_job(queue.sync._inner, state))
        if job is None:
            return None
        task = _task_named(state.name)
        if task is None:
            raise TaskResultDoesNotExist(state.id)
        runs = state.attempt or 0
        letter = state.dead_letter
        result = _result(
            self._placed(task, queue),
            state.id,
            status,
            job.payload,
            backend=self.alias,
            enqueued_ms=job.created_at_ms,
            finished_ms=None if letter is None else letter.failed_at_ms,
            worker_ids=[(letter.worker if letter else state.worker) or ""] * (runs + (state.state == "running")),
        )
        if letter is not None:
            text = letter.traceback or ""
            result.errors.append(TaskError(exception_class_path=_dead_path(letter.error_type, text), traceback=text))
        return result

    def _placed(self, task: Task[Any, Any], queue: Queue) -> Task[Any, Any]:
        return task.using(backend=self.alias, queue_name=queue.name)


def tasks_worker(backend: str = "default", **settings: Any) -> Worker:
    """Return a worker for the queues of a backend in `TASKS`. `settings` are passed to `Worker`."""
    found = task_backends[backend]
    if not isinstance(found, TampuBackend):
        raise TypeError(f"TASKS[{backend!r}] is {type(found).__name__}, not TampuBackend")
    queues = [found.queue(name) for name in sorted(found.queues)]
    return Worker(queues, found.run, **({"store_results": True} | settings))


def _call(task: Task[Any, Any], result: TaskResult[Any, Any]) -> Any:
    context: list[Any] = [TaskContext(task_result=result)] if task.takes_context else []
    return task.call(*context, *result.args, **result.kwargs)


def _result(
    task: Task[Any, Any],
    result_id: str,
    status: TaskResultStatus,
    call: Mapping[str, Any],
    *,
    backend: str,
    enqueued_ms: int | None = None,
    started_ms: int | None = None,
    finished_ms: int | None = None,
    worker_ids: list[str] | None = None,
) -> TaskResult[Any, Any]:
    return TaskResult(
        task=task,
        id=result_id,
        status=status,
        enqueued_at=_instant(enqueued_ms),
        started_at=_instant(started_ms),
        last_attempted_at=_instant(started_ms),
        finished_at=_instant(finished_ms),
        args=list(call["args"]),
        kwargs=dict(call["kwargs"]),
        backend=backend,
        errors=[],
        worker_ids=list(worker_ids or []),
    )


def _instant(ms: int | None) -> datetime | None:
    return None if ms is None else datetime.fromtimestamp(ms / 1000, UTC)


def _task_named(path: str) -> Task[Any, Any] | None:
    """Return the task of a module path; None if there is none."""
    try:
        found = import_string(path)
    except ImportError:
        return None
    return found if isinstance(found, Task) else None


async def _stored_job(queue: Queue, state: JobState) -> Job[Any] | None:
    return await queue.producer.admin.stored_job(state)


def _attempts(job: Job[Any]) -> int:
    limit = None if job.retry is None else job.retry.max_attempts
    return DEFAULT_ATTEMPTS if limit is None else limit


def _path(kind: type[BaseException]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _text(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def _dead_path(name: str | None, text: str) -> str:
    """Return the module path of a dead letter's error: it has the name, and its traceback the path."""
    name = name or "Exception"
    paths = re.findall(rf"^((?:\w+\.)*{re.escape(name)})(?::|$)", text, re.MULTILINE)
    path: str = paths[-1] if paths else name
    return f"builtins.{path}" if hasattr(builtins, path) else path
