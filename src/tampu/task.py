"""Tasks: functions that run as jobs. The payload on the wire is the function's arguments by name."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Protocol, TypedDict, TypeVar, cast, overload

from tampu.base.checks import check_bool, check_delay_ms, check_job_name, invalid
from tampu.consume.invoke import is_coroutine_handler
from tampu.consume.retry_rules import RetryRules
from tampu.errors import ConfigError
from tampu.produce.options import add_options
from tampu.produce.using import Using
from tampu.wire.job import Job
from tampu.wire.repeat import RepeatPattern
from tampu.wire.task_codec import Arguments, Results

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Mapping
    from datetime import datetime, timedelta
    from typing import Unpack

    from tampu.consume.retry_rules import Errors, RetryDecision
    from tampu.produce.options import Backoff, MissedFires
    from tampu.produce.using import UsingOptions
    from tampu.queue import Queue
    from tampu.sync import SyncConfiguredTask, SyncTask
    from tampu.wire.job import JobContext

P = ParamSpec("P")
R = TypeVar("R")


class ScheduleOptions(TypedDict, total=False):
    """What `cron`, `every` and `schedule` take besides pattern and arguments."""

    #: The key it is registered under, `<task>::<pattern>` by default. Two schedules of one task with the same pattern
    #: and other arguments need keys of their own: the same key replaces.
    key: str
    #: Fires in all.
    limit: int | None
    #: No fires up to, or after, these instants, in epoch milliseconds.
    start_after_ms: int | None
    end_before_ms: int | None
    #: What to do with fires that fell due while no worker ran; they are dropped by default.
    missed_fires: MissedFires | None


class TaskJob(Job[dict[str, Any]], Generic[R]):
    """A job that a task's `add` gave back: a `Job` whose `result` is of the type that the function returns."""

    __slots__ = ()

    if TYPE_CHECKING:

        async def result(self, timeout: float = 30.0) -> R:  # noqa: ASYNC109 - the argument's name on this level
            """What the function returned."""
            ...


class Task(Generic[P, R]):
    """A function that can be added as a job; calling it runs it here and now, as if it were no task."""

    def __init__(
        self,
        queue: Queue,
        function: Callable[..., Any],
        name: str | None = None,
        *,
        attempts: int | None = None,
        backoff: Backoff | None = None,
        timeout: float | None = None,
        process: bool = False,
        retry_on: Errors | None = None,
        no_retry_on: Errors | None = None,
        retry: RetryDecision | None = None,
    ) -> None:
        self.queue = queue
        self.function = function = check_function(function)
        self.name = check_job_name(name or function.__name__, "task name")
        #: What goes with each job.
        self.add_options = add_options(self.name, None, attempts, backoff)
        #: Seconds after which a run has failed.
        self.timeout = _check_timeout(timeout)
        #: Whether it runs in a process of its own.
        self.process = check_bool("process", process)
        if process and "<locals>" in function.__qualname__:
            raise ConfigError(
                f"task {self.name!r}: process=True needs a function at the top of a module, which another process can "
                "import; this one is inside another function"
            )
        #: Which errors are worth another attempt; None leaves it to `attempts`.
        self.rules = RetryRules.of(retry_on, no_retry_on, retry)
        self.arguments = Arguments(function, self.name)
        self.results = Results(function)
        functools.update_wrapper(self, function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R | Coroutine[Any, Any, R]:
        result: R = self.function(*args, **kwargs)
        return result

    def __repr__(self) -> str:
        return f"Task({self.name!r}, queue={self.queue.name!r})"

    async def add(self, *args: P.args, **kwargs: P.kwargs) -> TaskJob[R]:
        """Add a job that calls the function with these arguments."""
        return self._job(await self.queue._add_task(self, self.arguments.encode(args, kwargs)))

    async def add_in(self, delay: timedelta | float, /, *args: P.args, **kwargs: P.kwargs) -> TaskJob[R]:
        """The same, after a delay (a timedelta or seconds)."""
        return self._job(await self.queue._add_task(self, self.arguments.encode(args, kwargs), delay=delay))

    async def add_at(self, run_at: datetime | float, /, *args: P.args, **kwargs: P.kwargs) -> TaskJob[R]:
        """The same, at an instant (a datetime, naive = UTC, or epoch seconds)."""
        return self._job(await self.queue._add_task(self, self.arguments.encode(args, kwargs), run_at=run_at))

    async def add_unique(self, job_id: str, /, *args: P.args, **kwargs: P.kwargs) -> TaskJob[R]:
        """The same, unless a job of this id was added lately; `job.id.is_new` tells."""
        return self._job(await self.queue._add_task(self, self.arguments.encode(args, kwargs), job_id=job_id))

    def using(self, **options: Unpack[UsingOptions]) -> ConfiguredTask[P, R]:
        """Return this task with other options for its adds: `task.using(delay=60, unique="42").add(...)`.

        The result can be kept and used again. Options not given are the task's own. See `UsingOptions` for all of them.
        """
        return ConfiguredTask(self, Using().with_options(options))

    async def add_bulk(self, calls: Iterable[Any]) -> list[TaskJob[R]]:
        """Add one job per item: a tuple of arguments, a dict of keyword arguments, or the single argument itself.

        All are checked before anything is sent. An argument that is itself a tuple or dict goes into a tuple of one.
        """
        jobs = await self.queue._add_tasks(self, [self.arguments.encode(*call_arguments(item)) for item in calls])
        return [self._job(job) for job in jobs]

    def _job(self, job: Job[Any]) -> TaskJob[R]:
        return cast("TaskJob[R]", job)

    async def cron(
        self,
        expression: str,
        kwargs: Mapping[str, Any] | None = None,
        *,
        tz: str | None = None,
        **options: Unpack[ScheduleOptions],
    ) -> str:
        """Call the function with `kwargs` by a cron expression in `tz`; the key it is registered under.

        Safe to call at every start: an identical registration is left as it is. Options are those of `schedule`.
        """
        return await self.schedule(RepeatPattern.cron(expression, tz=tz), kwargs, **options)

    async def every(
        self,
        interval: timedelta | float,
        kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[ScheduleOptions],
    ) -> str:
        """Call the function with `kwargs` every so often (a timedelta or seconds); otherwise as `cron`."""
        return await self.schedule(RepeatPattern.every(check_delay_ms(interval, "interval")), kwargs, **options)

    async def schedule(
        self, pattern: RepeatPattern, kwargs: Mapping[str, Any] | None = None, **options: Unpack[ScheduleOptions]
    ) -> str:
        """Call the function with `kwargs` by a pattern; the key it is registered under.

        `key`, `limit` (fires in all), `start_after_ms`, `end_before_ms` and `missed_fires` are optional.
        """
        packed = self.arguments.encode((), dict(kwargs or {}))
        return await self.queue._ensure_repeat(self, pattern, packed, **options)

    @property
    def sync(self) -> SyncTask[P, R]:
        """The same calls for code without an event loop."""
        from tampu.sync import SyncTask  # here: synchronous programs only need it

        return SyncTask(self)


class ConfiguredTask(Generic[P, R]):
    """A task with options for its adds, made by `task.using(...)`."""

    __slots__ = ("_using", "task")

    def __init__(self, task: Task[P, R], using: Using) -> None:
        self.task = task
        self._using = using

    def __repr__(self) -> str:
        return f"{self.task!r}.using({self._using!r})"

    def using(self, **options: Unpack[UsingOptions]) -> ConfiguredTask[P, R]:
        """Return this with more options; those given again replace the earlier ones."""
        return ConfiguredTask(self.task, self._using.with_options(options))

    async def add(self, *args: P.args, **kwargs: P.kwargs) -> TaskJob[R]:
        """Add a job that calls the function with these arguments."""
        task = self.task
        return task._job(await task.queue._add_task(task, task.arguments.encode(args, kwargs), **self._when()))

    async def add_bulk(self, calls: Iterable[Any]) -> list[TaskJob[R]]:
        """Add one job per item, as `Task.add_bulk`. All run at the same time; `unique` does not go with a bulk."""
        task = self.task
        packed = [task.arguments.encode(*call_arguments(item)) for item in calls]
        return [task._job(job) for job in await task.queue._add_tasks(task, packed, **self._when_bulk())]

    @property
    def sync(self) -> SyncConfiguredTask[P, R]:
        """The same calls for code without an event loop."""
        from tampu.sync import SyncConfiguredTask  # here: only synchronous programs need it

        return SyncConfiguredTask(self)

    def _when(self) -> dict[str, Any]:
        using, task = self._using, self.task
        options = using.add_options(task.name, task.add_options.retry)
        return {"delay": using.delay, "run_at": using.at, "options": options}

    def _when_bulk(self) -> dict[str, Any]:
        if self._using.unique is not None:
            raise ConfigError("unique goes with one job: add_bulk takes no unique")
        return self._when()


class FunctionTask(Task[P, R]):
    """A task of a `def`."""

    if TYPE_CHECKING:

        def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...


class CoroutineTask(Task[P, R]):
    """A task of an `async def`."""

    if TYPE_CHECKING:

        def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]: ...


class TaskMaker(Protocol):
    """What `@queue.task(...)` is: makes a task of a function, typed like it."""

    # A coroutine is a value too, as the second says; the first that fits counts.
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[P, Coroutine[Any, Any, R]], /
    ) -> CoroutineTask[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> FunctionTask[P, R]: ...


class TaskContext:
    """What a job that a task added is connected to: its result is of the type that the function returns."""

    __slots__ = ("_queue", "_task")

    def __init__(self, queue: JobContext, task: Task[Any, Any]) -> None:
        self._queue = queue
        self._task = task

    async def wait_for_result(self, job_id: str, timeout_secs: float) -> Any:
        """What the function returned."""
        return self._task.results.convert(await self._queue.wait_for_result(job_id, timeout_secs))

    def report_progress(self, job: Job[Any], fraction: float, note: str) -> None:
        """Only a running job makes progress."""
        self._queue.report_progress(job, fraction, note)


def task_of(queue: Queue, function: Callable[..., Any], **options: Any) -> Task[Any, Any]:
    """Create the task of a function, typed by whether it is a coroutine function."""
    kind: type[Task[Any, Any]] = CoroutineTask if is_coroutine_handler(function) else FunctionTask
    return kind(queue, function, **options)


def check_function(function: object) -> Callable[..., Any]:
    """Something that can be a task."""
    if not callable(function):
        raise ConfigError(
            f"a task is made of a function, as in @queue.task or @queue.task(name='mail'); got {function!r}"
        )
    if not hasattr(function, "__qualname__") or inspect.isclass(function):  # a functools.partial, say
        raise ConfigError(f"a task is made of a function; wrap {function!r} in one")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigError(f"task {function.__qualname__!r} has a yield: a job returns once, it gives no series")
    return function


def _check_timeout(timeout: object) -> float | None:
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0:
        raise invalid("timeout", timeout, "a number of seconds above 0")
    return float(timeout)


def call_arguments(item: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the (args, kwargs) that an item of `add_bulk` stands for."""
    if isinstance(item, dict):
        return (), item
    if isinstance(item, tuple):
        return item, {}
    return (item,), {}
