"""Functions as tasks of a queue, and their jobs. `tampu.task` says what a task can do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast, overload

from tampu.add_arguments import repeatable_spec
from tampu.checks import check_job_id
from tampu.clock import wall_clock_ms
from tampu.engine.callers import is_coroutine_handler
from tampu.errors import ConfigError
from tampu.queue.answers import Answers
from tampu.queue.encoded import Encoded
from tampu.task import CoroutineTask, FunctionTask, Task, TaskContext
from tampu.wire.job import Job
from tampu.wire.payload import wrap_bin

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from datetime import datetime, timedelta

    from tampu.add_arguments import Backoff, MissedFires
    from tampu.queue import Queue
    from tampu.task import TaskMaker
    from tampu.wire.repeat import RepeatPattern

P = ParamSpec("P")
R = TypeVar("R")


class TaskMaking(Answers):
    """Makes tasks, and adds the jobs of tasks."""

    @overload
    def task(  # type: ignore[overload-overlap]  # the first that fits counts
        self, function: Callable[P, Coroutine[Any, Any, R]], /
    ) -> CoroutineTask[P, R]: ...
    @overload
    def task(self, function: Callable[P, R], /) -> FunctionTask[P, R]: ...
    @overload
    def task(
        self,
        /,
        *,
        name: str | None = None,
        attempts: int | None = None,
        backoff: Backoff | None = None,
        timeout: float | None = None,
        process: bool = False,
    ) -> TaskMaker: ...

    def task(self, function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
        """Make a function a task of this queue, under its own name unless `name` says otherwise.

        `attempts` and `backoff` go with each job; `timeout` is in seconds; `process=True` runs it in a process of its
        own, for CPU work.
        """

        def register(function: Callable[..., Any]) -> Task[Any, Any]:
            kind: type[Task[Any, Any]] = CoroutineTask if is_coroutine_handler(function) else FunctionTask
            task = kind(cast("Queue", self), function, **options)  # which is the one class that is made of this
            if task.name in self.tasks:
                raise ConfigError(f"queue {self.name!r} has a task named {task.name!r} already: give one another name")
            self.tasks[task.name] = task
            return task

        return register if function is None else register(function)

    async def _add_task(
        self,
        task: Task[Any, Any],
        packed: bytes,
        *,
        delay: timedelta | float | None = None,
        run_at: datetime | float | None = None,
        job_id: str | None = None,
    ) -> Job[Any]:
        options = task.add_options
        if job_id is not None:
            options = options.with_id(check_job_id(job_id, "job_id"))
        payload = Encoded(packed)
        if delay is not None:
            added = await self._producer.add_in_with_options(delay, payload, options)
        elif run_at is not None:
            added = await self._producer.add_at_with_options(run_at, payload, options)
        else:
            added = await self._producer.add_with_options(payload, options)
        return self._task_job(added, task, packed)

    async def _add_tasks(self, task: Task[Any, Any], packed: list[bytes]) -> list[Job[Any]]:
        ids = await self._producer.add_bulk_with_options([Encoded(one) for one in packed], task.add_options)
        return [self._task_job(job_id, task, one) for job_id, one in zip(ids, packed, strict=True)]

    async def _ensure_repeat(
        self,
        task: Task[Any, Any],
        pattern: RepeatPattern,
        packed: bytes,
        *,
        missed_fires: MissedFires | None = None,
        **bounds: Any,
    ) -> str:
        return await self._producer.ensure_repeatable(
            repeatable_spec(task.name, Encoded(packed), pattern, missed_fires, **bounds)
        )

    def _task_job(self, job_id: str, task: Task[Any, Any], packed: bytes) -> Job[Any]:
        job: Job[Any] = Job.from_wire(job_id, wrap_bin(packed), wall_clock_ms(), 0, None, task.name)
        job._context = TaskContext(self, task)
        return job
