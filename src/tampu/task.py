"""Tasks: functions that run as jobs. The payload of a job is the function's arguments by name."""

from __future__ import annotations

import copy
import functools
import inspect
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Protocol, TypedDict, TypeVar, cast, overload

from tampu.base.checks import check_bool, check_delay_ms, check_job_id, check_job_name, invalid, shown
from tampu.base.clock import wall_clock_ms
from tampu.consume.dependencies import dependencies_of
from tampu.consume.handlers import is_coroutine_handler
from tampu.consume.retries import RetryRules
from tampu.errors import ConfigError
from tampu.produce.options import Using, add_options, repeatable_spec
from tampu.wire.job import Job, JobId
from tampu.wire.payload import wrap_bin
from tampu.wire.repeat import RepeatPattern
from tampu.wire.task_codec import Arguments, KeyedArguments, Results

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable
    from datetime import datetime, timedelta
    from typing import TypeAlias, Unpack

    from tampu.consume.handlers import FailedJob, HandlerOutcome
    from tampu.consume.retries import Errors, RetryDecision
    from tampu.inspect.jobs import JobState
    from tampu.produce.options import AddOptions, Backoff, MissedFires, UsingOptions
    from tampu.queue import Queue
    from tampu.sync import SyncConfiguredTask, SyncTask

    #: A task, which gets a job, or a function or coroutine function, called in the worker.
    OnFailure: TypeAlias = "Task[[FailedJob], Any] | ConfiguredTask[[FailedJob], Any] | Callable[[FailedJob], object]"

P = ParamSpec("P")
R = TypeVar("R")
#: What an add and a bulk of synchronous code return.
J = TypeVar("J")
Js = TypeVar("Js")


class TaskOptions(TypedDict, total=False):
    """The options of `@queue.task(...)`; `Queue.task` describes them."""

    name: str | None
    attempts: int | None
    backoff: Backoff | None
    timeout: float | None
    soft_timeout: float | None
    process: bool
    retry_on: Errors | None
    no_retry_on: Errors | None
    retry: RetryDecision | None
    on_failure: OnFailure | None
    key: Callable[..., str] | None
    cron: str | None
    every: timedelta | float | None
    tz: str | None


class ScheduleOptions(TypedDict, total=False):
    """Optional arguments of `cron`, `every` and `schedule`."""

    #: Key of the schedule, by default `<task>::<pattern>`. A schedule with the same key is replaced, so two schedules
    #: of one task with the same pattern and different arguments need different keys.
    key: str
    #: Maximum number of fires.
    limit: int | None
    #: Do not fire up to, or after, these epoch times, in milliseconds.
    start_after_ms: int | None
    end_before_ms: int | None
    #: What to do about fires that were due while no worker was running. Defaults to skipping them.
    missed_fires: MissedFires | None


class TaskJob(Job[dict[str, Any]], Generic[R]):
    """A job added by a task. `result` has the return type of the function."""

    __slots__ = ()

    if TYPE_CHECKING:
        id: JobId  # pyright: ignore[reportIncompatibleVariableOverride]  # an added job's ID knows whether it is new

        async def result(self, timeout: float = 30.0) -> R:  # noqa: ASYNC109 - the argument's name on this level
            """Wait up to `timeout` seconds for the job to finish and return the function's return value."""
            ...

        async def state(self) -> JobState:
            """Return the job's current state, with its progress, result or dead letter."""
            ...


class TaskAdds(Generic[P, R]):
    """The methods that add jobs of a task: of `Task`, and of `task.using(...)` with its options."""

    task: Task[P, R]
    #: Encodes the arguments of a call.
    arguments: Arguments
    _using: Using | None = None

    async def add(self, *args: P.args, **kwargs: P.kwargs) -> TaskJob[R]:
        """Add a job that calls the function with these arguments, and return it."""
        return await self._send(self.arguments.encode(args, kwargs))

    async def add_in(self, delay: timedelta | float, /, *args: P.args, **kwargs: P.kwargs) -> TaskJob[R]:
        """Add a job that runs after `delay` (a timedelta or seconds)."""
        return await self._send(self.arguments.encode(args, kwargs), delay=delay)

    async def add_at(self, run_at: datetime | float, /, *args: P.args, **kwargs: P.kwargs) -> TaskJob[R]:
        """Add a job that runs at `run_at` (a datetime or epoch seconds). A naive datetime is UTC."""
        return await self._send(self.arguments.encode(args, kwargs), at=run_at)

    async def add_unique(self, job_id: str, /, *args: P.args, **kwargs: P.kwargs) -> TaskJob[R]:
        """Add a job unless a job with this ID was added within `dedup_ttl_secs`.

        `job.id.is_new` is False if nothing was added.
        """
        return await self._send(self.arguments.encode(args, kwargs), unique=check_job_id(job_id, "job_id"))

    async def add_bulk(self, calls: Iterable[Any]) -> list[TaskJob[R]]:
        """Add one job per item: a tuple of arguments, a dict of keyword arguments, or a single argument.

        All items are checked before any is sent. Wrap a single argument that is itself a tuple or dict in a tuple. Of
        `using`, `delay` or `at` applies to all jobs; `unique` is not allowed.
        """
        return await self._send_bulk(self._encode_calls(calls))

    def using(self, **options: Unpack[UsingOptions]) -> ConfiguredTask[P, R]:
        """Return an object that adds jobs of this task with these options: `task.using(delay=60).add(...)`.

        It can be reused. Options that are not given keep their values. `UsingOptions` lists all options.
        """
        return ConfiguredTask(self.task, (self._using or Using()).with_options(options))

    def _on(self, queue: Queue) -> TaskAdds[P, R]:
        """Return these adds for another queue object, such as the one that serves synchronous code."""
        task = copy.copy(self.task)
        task.task, task.queue = task, queue
        return task if self._using is None else ConfiguredTask(task, self._using)

    async def _send(
        self,
        packed: bytes,
        *,
        delay: timedelta | float | None = None,
        at: datetime | float | None = None,
        unique: str | None = None,
    ) -> TaskJob[R]:
        """Add a job. The keyword arguments override the options of `using`."""
        task = self.task
        options = task.add_options
        if self._using is not None:
            options, delay, at = self._options(delay=delay, at=at, unique=unique, key=self._key_of(packed))
            if (joins := self._using.joins) is not None:
                own_id, quiet_ms, at_most_ms = joins
                added = await task.queue.producer.add_debounced(packed, options.with_id(own_id), quiet_ms, at_most_ms)
                return task._job_of(added, packed)
        elif unique is not None:
            options = options.with_id(unique)
        job_id = await task.queue.producer.add_packed(packed, options, delay=delay, run_at=at)
        return task._job_of(job_id, packed)

    async def _send_bulk(self, packed: list[bytes]) -> list[TaskJob[R]]:
        options, delay, at = self._bulk_options()
        producer = self.task.queue.producer
        if not isinstance(self.arguments, KeyedArguments):
            ids = await producer.add_packed_bulk(packed, options, delay=delay, run_at=at)
        else:
            keys = list(map(self._key_of, packed))
            by_key = {key: self._options(key=key)[0] for key in dict.fromkeys(keys)}
            ids = await producer.add_packed_each(packed, [by_key[key] for key in keys], delay=delay, run_at=at)
        return list(map(self.task._job_of, ids, packed))

    def _key_of(self, packed: bytes) -> str | None:
        """Return the key of a call by the task's key function; None if `using` has one, or there is no function."""
        using = self._using
        return getattr(packed, "key", None) if using is None or using.key is None else None

    def _options(self, **when: Any) -> tuple[AddOptions, timedelta | float | None, datetime | float | None]:
        """Return (options, delay, instant) of an add that happens now."""
        options = self.task.add_options
        if self._using is None:
            return options, None, None
        given: Any = {option: value for option, value in when.items() if value is not None}
        using = self._using.with_options(given) if given else self._using
        return using.add_options(options.name, options.retry), using.delay, using.at

    def _bulk_options(self) -> tuple[AddOptions, timedelta | float | None, datetime | float | None]:
        if self._using is not None and self._using.unique is not None:
            raise ConfigError("unique is the ID of a single job, so add_bulk does not accept it: call add for each job")
        if self._using is not None and self._using.joins is not None:
            raise ConfigError("add_bulk does not accept debounce and throttle: call add for each job")
        return self._options()

    def _encode_calls(self, calls: Iterable[Any]) -> list[bytes]:
        return [self.arguments.encode(*call_arguments(item)) for item in calls]


class BlockingAdds(ABC, Generic[P, J, Js]):
    """The methods of `TaskAdds` for synchronous code, where an add returns `J` and a bulk `Js`."""

    def __init__(self, task: TaskAdds[P, Any]) -> None:
        self._adds = task

    def add(self, *args: P.args, **kwargs: P.kwargs) -> J:
        """Add a job that calls the function with these arguments; see `Task.add`."""
        return self._send(args, kwargs)

    def add_in(self, delay: timedelta | float, /, *args: P.args, **kwargs: P.kwargs) -> J:
        """Add a job that runs after `delay` (a timedelta or seconds); see `Task.add_in`."""
        return self._send(args, kwargs, delay=delay)

    def add_at(self, run_at: datetime | float, /, *args: P.args, **kwargs: P.kwargs) -> J:
        """Add a job that runs at `run_at` (a datetime or epoch seconds); see `Task.add_at`."""
        return self._send(args, kwargs, at=run_at)

    def add_unique(self, job_id: str, /, *args: P.args, **kwargs: P.kwargs) -> J:
        """Add a job unless a job with this ID was added within `dedup_ttl_secs`; see `Task.add_unique`."""
        return self._send(args, kwargs, unique=check_job_id(job_id, "job_id"))

    @abstractmethod
    def add_bulk(self, calls: Iterable[Any]) -> Js:
        """Add one job per item; see `Task.add_bulk`."""

    @abstractmethod
    def _send(self, args: tuple[Any, ...], kwargs: dict[str, Any], **when: Any) -> J: ...


class Task(TaskAdds[P, R]):
    """A function registered with `@queue.task`. Calling it runs the function directly; `add` adds a job.

        @queue.task(attempts=5)
        async def welcome(to: str) -> str: ...

        job = await welcome.add("ada@example.com")
        print(await job.result(timeout=10))

    Arguments are checked against the function's signature before anything is sent: a wrong call raises `TypeError`, a
    value that cannot be encoded `EncodeError`. All methods that add jobs also raise `QueueFullError` and `RedisError`.
    """

    def __init__(self, queue: Queue, function: Callable[..., Any], **options: Unpack[TaskOptions]) -> None:
        self.task = self
        self.queue = queue
        self.function = function = check_function(function)
        self.name = check_job_name(options.get("name") or function.__name__, "task name")
        backoff, on_failure = options.get("backoff"), options.get("on_failure")
        if isinstance(backoff, int) and not isinstance(backoff, bool):
            warnings.warn(
                f"backoff={backoff} means {backoff} milliseconds; pass timedelta(milliseconds={backoff}), because all "
                "other durations of a task are in seconds",
                DeprecationWarning,
                stacklevel=4,
            )
        #: Options of each job: name, attempts and backoff.
        self.add_options = add_options(self.name, None, options.get("attempts"), backoff)
        #: Maximum duration of a run, in seconds.
        self.timeout = _check_timeout("timeout", options.get("timeout"))
        #: When `SoftTimeout` is raised in a run, in seconds after its start.
        self.soft_timeout = _check_timeout("soft_timeout", options.get("soft_timeout"))
        if self.timeout is not None and self.soft_timeout is not None and self.soft_timeout >= self.timeout:
            raise invalid("soft_timeout", options.get("soft_timeout"), f"less than timeout ({self.timeout:g} s)")
        #: True if it runs in a separate process.
        self.process = check_bool("process", options.get("process", False))
        if self.process and "<locals>" in function.__qualname__:
            raise ConfigError(
                f"task {self.name!r}: process=True needs a function at module level, which another process can import; "
                "this one is defined inside another function"
            )
        #: Which errors are worth another attempt; None leaves it to `attempts`.
        self.rules = RetryRules.of(options.get("retry_on"), options.get("no_retry_on"), options.get("retry"))
        if on_failure is not None and not callable(on_failure) and not isinstance(on_failure, ConfiguredTask):
            raise invalid("on_failure", on_failure, "a task or a function that takes a FailedJob")
        #: Called when a job of this task was dead-lettered.
        self.on_failure = on_failure
        #: The parameters that its worker provides; see `Depends`.
        self.dependencies = dependencies_of(function)
        if self.process and any(found.per == "worker" and found.is_async for found in self.dependencies.values()):
            raise ConfigError(f"task {self.name!r}: process=True needs a def provider for per='worker'")
        key = options.get("key")
        if key is not None and not callable(key):
            raise invalid("key", key, "a function of the task's arguments that returns the job's key")
        if key is None:
            self.arguments = Arguments(function, self.name, self.dependencies)
        else:
            self.arguments = KeyedArguments(function, self.name, key, self.dependencies)
            self._using = Using()  # each job has its own options
        self.results = Results(function)
        #: The schedule that workers keep for the task.
        self.declared = _declared(options)
        if self.declared is not None:
            try:
                self._pack_arguments(None)
            except TypeError as error:
                raise ConfigError(f"a declared schedule passes no arguments: {error}") from None
        functools.update_wrapper(self, function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R | Coroutine[Any, Any, R]:
        if self.dependencies:
            given = inspect.signature(self.function).bind_partial(*args, **kwargs).arguments
            if missing := self.dependencies.keys() - given.keys():
                raise TypeError(f"pass {', '.join(sorted(missing))}: a direct call of a task is provided with nothing")
        result: R = self.function(*args, **kwargs)
        return result

    def __repr__(self) -> str:
        return f"Task({self.name!r}, queue={self.queue.name!r})"

    def job(self, job_id: str) -> TaskJob[R]:
        """Return a job of this task by its ID, to wait for its result or read its state. Does not call the server."""
        return self._job_of(JobId(check_job_id(job_id)), b"")

    def _job_of(self, job_id: JobId, packed: bytes) -> TaskJob[R]:
        job: Job[Any] = Job.from_wire(job_id, wrap_bin(packed), wall_clock_ms(), 0, None, self.name)
        job._context = TaskContext(self.queue, self)
        return cast("TaskJob[R]", job)

    @property
    def declared_key(self) -> str:
        """Key of the schedule declared with `@queue.task(cron=...)`. It stays the same when the expression changes."""
        return f"{self.name}::declared"

    async def cron(
        self,
        expression: str,
        kwargs: Mapping[str, Any] | None = None,
        *,
        tz: str | None = None,
        **options: Unpack[ScheduleOptions],
    ) -> str:
        """Create a schedule that calls the function according to a cron expression.

            await report.cron("0 9 * * 1-5", {"kind": "daily"}, tz="America/Lima")

        Calling it again with the same arguments changes nothing, so it can run every time your program starts.

        Args:
            expression: Cron expression, with optional seconds and years.
            kwargs: Arguments of the function.
            tz: IANA time zone name or offset. Defaults to UTC.
            **options: See `ScheduleOptions`: `key`, `limit`, `start_after_ms`, `end_before_ms`, `missed_fires`.

        Returns:
            The key of the schedule.
        """
        return await self.schedule(RepeatPattern.cron(expression, tz=tz), kwargs, **options)

    async def every(
        self,
        interval: timedelta | float,
        kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[ScheduleOptions],
    ) -> str:
        """Create a schedule that calls the function at a fixed interval (a timedelta or seconds).

        Arguments, options and return value are those of `cron`.
        """
        return await self.schedule(RepeatPattern.every(check_delay_ms(interval, "interval")), kwargs, **options)

    async def schedule(
        self, pattern: RepeatPattern, kwargs: Mapping[str, Any] | None = None, **options: Unpack[ScheduleOptions]
    ) -> str:
        """Create a schedule that calls the function according to a `RepeatPattern`.

        Arguments, options and return value are those of `cron`.
        """
        bounds: dict[str, Any] = {"missed_fires": None, **options}
        spec = repeatable_spec(self.name, None, pattern, **bounds)
        return await self.queue.producer.register_packed(spec, self._pack_arguments(kwargs), keep_identical=True)

    def _pack_arguments(self, kwargs: Mapping[str, Any] | None) -> bytes:
        if not isinstance(kwargs, Mapping | None):
            raise TypeError(
                f"task {self.name!r}: a schedule's arguments must be a dict of names and values, got {shown(kwargs)}; "
                "nothing was sent"
            )
        return self.arguments.encode((), dict(kwargs or {}))

    @property
    def sync(self) -> SyncTask[P, R]:
        """The methods of this task for synchronous code."""
        from tampu.sync import SyncTask  # imported here, because only synchronous programs need it

        return SyncTask(self._on(self.queue.sync._inner), self.queue.sync)


class ConfiguredTask(TaskAdds[P, R]):
    """A task with options for its adds, made by `task.using(...)`."""

    def __init__(self, task: Task[P, R], using: Using) -> None:
        self.task = task
        self.arguments = task.arguments
        self._using = using

    def __repr__(self) -> str:
        return f"{self.task!r}.using({self._using!r})"

    @property
    def sync(self) -> SyncConfiguredTask[P, R]:
        """Return the synchronous form of these calls."""
        from tampu.sync import SyncConfiguredTask  # here: only synchronous programs need it

        return SyncConfiguredTask(self._on(self.task.queue.sync._inner), self.task.queue.sync)


class FunctionTask(Task[P, R]):
    """A task made from a `def` function."""

    if TYPE_CHECKING:

        def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...


class CoroutineTask(Task[P, R]):
    """A task made from an `async def` function."""

    if TYPE_CHECKING:

        def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]: ...


class TaskMaker(Protocol):
    """Type of `@queue.task(...)`: turns a function into a task with the same signature."""

    # A coroutine function also matches the second overload; the first one that matches is used.
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[P, Coroutine[Any, Any, R | HandlerOutcome]], /
    ) -> CoroutineTask[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, R | HandlerOutcome], /) -> FunctionTask[P, R]: ...


class TaskContext:
    """Connects a job added by a task to its queue, and converts its result to the function's return type."""

    __slots__ = ("_queue", "_task")

    def __init__(self, queue: Any, task: Task[Any, Any]) -> None:
        self._queue = queue
        self._task = task

    async def wait_for_result(self, job_id: str, timeout_secs: float) -> Any:
        """Wait for the job's result and convert it."""
        return self._task.results.convert(await self._queue.wait_for_result(job_id, timeout_secs))

    async def get_job(self, job_id: str) -> Any:
        """Return the job's state."""
        return await self._queue.get_job(job_id)


def task_of(queue: Queue, function: Callable[..., Any], **options: Any) -> Task[Any, Any]:
    """Create the task of a function: a `CoroutineTask` or a `FunctionTask`."""
    for unknown in options.keys() - TaskOptions.__annotations__.keys():
        raise TypeError(f"a task has no option {unknown!r}; it has {', '.join(TaskOptions.__annotations__)}")
    kind: type[Task[Any, Any]] = CoroutineTask if is_coroutine_handler(function) else FunctionTask
    return kind(queue, function, **options)


def check_function(function: object) -> Callable[..., Any]:
    """Return the function, or raise `ConfigError` if it cannot be a task."""
    if not callable(function):
        raise ConfigError(f"a task needs a function, as in @queue.task or @queue.task(name='mail'); got {function!r}")
    if not hasattr(function, "__qualname__") or inspect.isclass(function):  # for example a functools.partial
        raise ConfigError(f"a task needs a plain function; wrap {function!r} in one")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigError(f"task {function.__qualname__!r} contains yield; a task must return a single value")
    return function


def _declared(options: TaskOptions) -> RepeatPattern | None:
    cron, every, tz = options.get("cron"), options.get("every"), options.get("tz")
    if cron is not None and every is None:
        return RepeatPattern.cron(cron, tz=tz)
    if tz is not None or cron is not None:
        raise ConfigError("a schedule is declared with cron=, to which tz= belongs, or with every=")
    return None if every is None else RepeatPattern.every(check_delay_ms(every, "every"))


def _check_timeout(field: str, timeout: object) -> float | None:
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0:
        raise invalid(field, timeout, "a number of seconds above 0")
    return float(timeout)


def call_arguments(item: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the (args, kwargs) of an item of `add_bulk`."""
    if isinstance(item, dict):
        return (), item
    if isinstance(item, tuple):
        return item, {}
    return (item,), {}
