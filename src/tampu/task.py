"""Tasks: functions that run as jobs. The payload on the wire is the function's arguments by name."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, get_type_hints

import msgspec

from tampu.checks import check_delay_ms, check_job_name
from tampu.errors import ConfigError
from tampu.wire.payload import decode_slot, encode_value
from tampu.wire.repeat import RepeatPattern
from tampu.wire.typed import TypedPayload

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping
    from datetime import datetime, timedelta

    from tampu.add_arguments import MissedFires
    from tampu.queue import Queue
    from tampu.wire.job import Job

P = ParamSpec("P")
R = TypeVar("R")


class TaskOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a task's jobs are retried and run."""

    attempts: int | None = None
    backoff: Any = None
    #: Seconds after which a run has failed.
    timeout: float | None = None
    #: Whether to run in a process of its own.
    process: bool = False


class Arguments:
    """A function's arguments as one payload: bound and checked before they are sent, and again before they are used."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._signature = signature = inspect.signature(function)
        self._takes_any_keyword = False
        hints = _hints(function)
        fields: list[tuple[str, Any]] = []
        self._untyped: set[str] = set()
        for name, parameter in signature.parameters.items():
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
                raise ConfigError(
                    f"task {function.__name__!r}: parameter {name!r} has no name on the wire; "
                    "use parameters that can be passed by keyword"
                )
            if parameter.kind is parameter.VAR_KEYWORD:
                self._takes_any_keyword = True
                continue
            hint = hints.get(name, Any)
            if hint is Any:
                self._untyped.add(name)
            fields.append((name, hint))
        self._fields = fields
        self._codec = None if self._takes_any_keyword else _codec(function.__name__, fields)
        if self._codec is None:
            self._untyped = {name for name, _ in fields}

    def encode(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
        """The payload of a call; a `TypeError` or `EncodeError` when the call would not work."""
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        values = dict(bound.arguments)
        if self._codec is None:
            for name, parameter in self._signature.parameters.items():
                if parameter.kind is parameter.VAR_KEYWORD:
                    values |= values.pop(name, {})
            return encode_value(values)
        for name in self._untyped:
            encode_value(values[name])  # what has no type to say how it is written must be plain
        return self._codec.encode(self._codec.payload_type(**values))

    def decode(self, slot: bytes) -> dict[str, Any]:
        """The keyword arguments in a payload; `DecodeError` when they do not fit the function."""
        if self._codec is None:
            value: dict[str, Any] = decode_slot(slot)
            return value
        struct = self._codec.decode_slot(slot)
        return {name: getattr(struct, name) for name, _ in self._fields}


def _hints(function: Callable[..., Any]) -> Mapping[str, Any]:
    try:
        return get_type_hints(function)
    except Exception:  # a name that exists for type checkers only
        return {}


def _codec(name: str, fields: list[tuple[str, Any]]) -> TypedPayload | None:
    """How typed arguments are written; None when one of the types is no matter for MessagePack."""
    try:
        return TypedPayload(msgspec.defstruct(f"{name}_arguments", fields, kw_only=True))
    except (ConfigError, TypeError):
        return None


class Task(Generic[P, R]):
    """A function that can be added as a job; calling it runs it here and now, as if it were no task."""

    def __init__(self, queue: Queue, function: Callable[P, Awaitable[R] | R], name: str, options: TaskOptions) -> None:
        self.queue = queue
        self.function = function
        self.name = check_job_name(name, "task name")
        self.options = options
        self.arguments = Arguments(function)
        self.__doc__ = function.__doc__
        self.__name__ = getattr(function, "__name__", name)
        self.__wrapped__ = function

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Awaitable[R] | R:
        return self.function(*args, **kwargs)

    async def add(self, *args: P.args, **kwargs: P.kwargs) -> Job[Any]:
        """Add a job that calls the function with these arguments."""
        return await self.queue._add_task(self, self.arguments.encode(args, kwargs))

    async def add_in(self, delay: timedelta | float, /, *args: P.args, **kwargs: P.kwargs) -> Job[Any]:
        """The same, after a delay (a timedelta or seconds)."""
        return await self.queue._add_task(self, self.arguments.encode(args, kwargs), delay=delay)

    async def add_at(self, run_at: datetime | float, /, *args: P.args, **kwargs: P.kwargs) -> Job[Any]:
        """The same, at an instant (a datetime, naive = UTC, or epoch seconds)."""
        return await self.queue._add_task(self, self.arguments.encode(args, kwargs), run_at=run_at)

    async def add_unique(self, job_id: str, /, *args: P.args, **kwargs: P.kwargs) -> Job[Any]:
        """The same, unless a job of this id was added lately."""
        return await self.queue._add_task(self, self.arguments.encode(args, kwargs), job_id=job_id)

    async def add_bulk(self, calls: Iterable[Any]) -> list[Job[Any]]:
        """Add one job per item: a tuple of arguments, a dict of keyword arguments, or the single argument itself."""
        return await self.queue._add_tasks(self, [self.arguments.encode(*_call(item)) for item in calls])

    async def cron(
        self, expression: str, kwargs: Mapping[str, Any] | None = None, *, tz: str | None = None, **options: Any
    ) -> str:
        """Call the function with `kwargs` by a cron expression in `tz`; the key it is registered under.

        Safe to call at every start: an identical registration is left as it is. Options are those of `schedule`.
        """
        return await self.schedule(RepeatPattern.cron(expression, tz=tz), kwargs, **options)

    async def every(self, interval: timedelta | float, kwargs: Mapping[str, Any] | None = None, **options: Any) -> str:
        """Call the function with `kwargs` every so often (a timedelta or seconds); otherwise as `cron`."""
        return await self.schedule(RepeatPattern.every(check_delay_ms(interval, "interval")), kwargs, **options)

    async def schedule(
        self,
        pattern: RepeatPattern,
        kwargs: Mapping[str, Any] | None = None,
        *,
        key: str = "",
        limit: int | None = None,
        start_after_ms: int | None = None,
        end_before_ms: int | None = None,
        missed_fires: MissedFires | None = None,
    ) -> str:
        """Call the function with `kwargs` by a pattern; the key it is registered under."""
        return await self.queue._ensure_repeat(
            self,
            pattern,
            self.arguments.encode((), dict(kwargs or {})),
            key=key,
            limit=limit,
            start_after_ms=start_after_ms,
            end_before_ms=end_before_ms,
            missed_fires=missed_fires,
        )

    @property
    def sync(self) -> SyncTask[P]:
        """The same calls for code without an event loop."""
        return SyncTask(self)


class SyncTask(Generic[P]):
    """A task's adds for code without an event loop."""

    def __init__(self, task: Task[P, Any]) -> None:
        self._task = task

    def add(self, *args: P.args, **kwargs: P.kwargs) -> Job[Any]:
        """Add a job that calls the function with these arguments."""
        queue = self._task.queue.sync
        return queue._run(queue._queue._add_task(self._task, self._task.arguments.encode(args, kwargs)))

    def add_in(self, delay: timedelta | float, /, *args: P.args, **kwargs: P.kwargs) -> Job[Any]:
        """The same, after a delay."""
        queue = self._task.queue.sync
        return queue._run(queue._queue._add_task(self._task, self._task.arguments.encode(args, kwargs), delay=delay))

    def add_at(self, run_at: datetime | float, /, *args: P.args, **kwargs: P.kwargs) -> Job[Any]:
        """The same, at an instant."""
        queue = self._task.queue.sync
        return queue._run(queue._queue._add_task(self._task, self._task.arguments.encode(args, kwargs), run_at=run_at))

    def add_bulk(self, calls: Iterable[Any]) -> list[Job[Any]]:
        """Add one job per item."""
        queue = self._task.queue.sync
        encoded = [self._task.arguments.encode(*_call(item)) for item in calls]
        return queue._run(queue._queue._add_tasks(self._task, encoded))


def _call(item: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(item, dict):
        return (), item
    if isinstance(item, tuple):
        return item, {}
    return (item,), {}
