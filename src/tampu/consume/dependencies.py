"""Dependencies: parameters of a task that its worker provides, such as a database session.

def session() -> Iterator[Session]:
    with Session(engine) as opened:
        yield opened

@queue.task
def welcome(user_id: int, *, db: Session = Depends(session)) -> None: ...

They are not part of the payload. A generator is closed after the run, as a context manager: it gets the exception of
the run; if the provider raises another exception, the run fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, get_args, overload

from tampu.base.checks import invalid
from tampu.errors import ConfigError
from tampu.wire.task_codec import hints_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping

T = TypeVar("T")

logger = logging.getLogger("tampu.worker")


class Values(Protocol):
    """The values that live longer than a job."""

    async def get(self, dependency: Dependency, /) -> Any: ...


#: Providers that tests use instead of others; see `tampu.testing.override`.
OVERRIDES: dict[Any, Any] = {}
#: What was provided on the event loop for the run of this context.
_provided: ContextVar[Mapping[str, Any] | None] = ContextVar("tampu_provided", default=None)


@dataclass(frozen=True)
class Dependency:
    """What `Depends` returns at run time."""

    provider: Callable[..., Any]
    per: Literal["job", "worker"]

    @property
    def used(self) -> Callable[..., Any]:
        """Return the provider, or what a test uses instead."""
        provider: Callable[..., Any] = OVERRIDES.get(self.provider, self.provider)
        return provider

    @property
    def is_async(self) -> bool:
        """True if its provider, or that of one of its own dependencies, is asynchronous."""
        used = self.used
        if inspect.isasyncgenfunction(used) or inspect.iscoroutinefunction(used):
            return True
        return any(inner.is_async for inner in dependencies_of(used).values())

    @property
    def needs_loop(self) -> bool:
        """True if it must be provided on the event loop: it is asynchronous, or something lives as long as a worker."""
        if self.per == "worker" or self.is_async:
            return True
        return any(inner.needs_loop for inner in dependencies_of(self.used).values())


@overload
def Depends(provider: Callable[..., AsyncIterator[T]], *, per: Literal["job", "worker"] = "job") -> T: ...
@overload
def Depends(provider: Callable[..., Iterator[T]], *, per: Literal["job", "worker"] = "job") -> T: ...
@overload
def Depends(provider: Callable[..., Awaitable[T]], *, per: Literal["job", "worker"] = "job") -> T: ...
@overload
def Depends(provider: Callable[..., T], *, per: Literal["job", "worker"] = "job") -> T: ...


def Depends(provider: Callable[..., Any], *, per: Literal["job", "worker"] = "job") -> Any:  # noqa: N802 - as FastAPI's
    """Declare a parameter that the worker provides: `db: Session = Depends(session)`.

    `provider` is a function, a coroutine function, or a generator function of either kind that yields once. Its own
    parameters may be dependencies too. `per="worker"` calls it once per worker and closes it after the last job; in a
    process of `process=True` tasks, once per process.

    For type checkers the value has the type that the provider returns or yields, and the parameter has a default, so
    that `task.add(...)` does not ask for it.
    """
    if not callable(provider):
        raise invalid("provider", provider, "a function that returns or yields the value")
    if per not in ("job", "worker"):
        raise invalid("per", per, "'job' or 'worker'")
    if per == "worker" and (inner := [d for d in dependencies_of(provider).values() if d.per == "job"]):
        raise ConfigError(
            f"{_name(provider)} lives as long as a worker, so it cannot depend on {_name(inner[0].provider)}, which "
            "lives as long as a job"
        )
    return Dependency(provider, per)


@functools.cache
def dependencies_of(function: Callable[..., Any]) -> dict[str, Dependency]:
    """Return the dependencies of a function by parameter name, given as defaults or inside `Annotated`."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of a type in C
        return {}
    hints = hints_of(function)
    found = {}
    for parameter in parameters:
        given = (parameter.default, *get_args(hints.get(parameter.name)))
        if declared := [part for part in given if isinstance(part, Dependency)]:
            found[parameter.name] = declared[0]
    return found


class WorkerValues:
    """The values of dependencies that live as long as a worker. Each is opened and closed in one asyncio task.

    The first job that needs one waits for it, but does not run its provider: the job may be cancelled.
    """

    def __init__(self) -> None:
        self._values: dict[Dependency, asyncio.Future[Any]] = {}
        self._opened: list[tuple[asyncio.Event, asyncio.Task[None]]] = []

    async def get(self, dependency: Dependency) -> Any:
        """Return the value, opened once."""
        future = self._values.get(dependency)
        if future is None:
            loop = asyncio.get_running_loop()
            future = self._values[dependency] = loop.create_future()
            end = asyncio.Event()
            self._opened.append((end, loop.create_task(self._hold(dependency, future, end), name="tampu-dependency")))
        return await asyncio.shield(future)

    async def close(self) -> None:
        """Close all values, the last one first."""
        while self._opened:
            end, task = self._opened.pop()
            end.set()
            await asyncio.wait([task])

    async def _hold(self, dependency: Dependency, future: asyncio.Future[Any], end: asyncio.Event) -> None:
        try:
            async with contextlib.AsyncExitStack() as stack:
                value = await _opened(dependency, stack, self, {})
                if not future.done():
                    future.set_result(value)
                await end.wait()
        except Exception as error:
            if future.done():
                logger.exception("closing %s raised an exception", _name(dependency.provider))
            else:
                self._values.pop(dependency, None)  # the next job tries again
                future.set_exception(error)


class ProcessValues:
    """The values of dependencies that live as long as a process of `process=True` tasks. They end with it, unclosed."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._values: dict[Dependency, Any] = {}

    async def get(self, dependency: Dependency) -> Any:
        """Return the value, opened once."""
        return _entered(dependency, self._stack, self._values)


class Provided:
    """The dependencies of one task."""

    def __init__(self, dependencies: Mapping[str, Dependency], worker: Values, *, is_async: bool) -> None:
        self._dependencies = dependencies
        self._worker = worker
        #: True if all are provided on the event loop, where the function runs too.
        self._is_async = is_async

    @contextlib.asynccontextmanager
    async def on_loop(self) -> AsyncIterator[None]:
        """Provide those that need the event loop; all of them for a coroutine function."""
        async with contextlib.AsyncExitStack() as stack:
            shared: dict[Dependency, Any] = {}
            values = {
                name: await _value(dependency, stack, self._worker, shared)
                for name, dependency in self._dependencies.items()
                if self._is_async or dependency.needs_loop
            }
            token = _provided.set(values)
            try:
                yield
            finally:
                _provided.reset(token)

    def call(self, function: Callable[..., Any], values: dict[str, Any]) -> Any:
        """Call the function with its arguments and dependencies. The other ones are provided here, in its thread."""
        provided = dict(_provided.get() or {})
        with contextlib.ExitStack() as stack:
            shared: dict[Dependency, Any] = {}
            for name, dependency in self._dependencies.items():
                if name not in provided:
                    provided[name] = _entered(dependency, stack, shared)
            return function(**values | provided)  # in this order: no payload can pass a dependency


async def _value(
    dependency: Dependency, stack: contextlib.AsyncExitStack, worker: Values, shared: dict[Dependency, Any]
) -> Any:
    """Return the value of a dependency. `shared` has those of the same run: a session is opened once."""
    if dependency.per == "worker":
        return await worker.get(dependency)
    if dependency not in shared:
        shared[dependency] = await _opened(dependency, stack, worker, shared)
    return shared[dependency]


async def _opened(
    dependency: Dependency, stack: contextlib.AsyncExitStack, worker: Values, shared: dict[Dependency, Any]
) -> Any:
    provider = dependency.used
    inner = {name: await _value(other, stack, worker, shared) for name, other in dependencies_of(provider).items()}
    value: Any
    if inspect.isasyncgenfunction(provider):
        value = await stack.enter_async_context(contextlib.asynccontextmanager(provider)(**inner))
    elif inspect.isgeneratorfunction(provider):
        value = stack.enter_context(contextlib.contextmanager(provider)(**inner))
    else:
        value = provider(**inner)
        if inspect.isawaitable(value):
            value = await value
    return value


def _entered(dependency: Dependency, stack: contextlib.ExitStack, shared: dict[Dependency, Any]) -> Any:
    if dependency not in shared:
        provider = dependency.used
        inner = {name: _entered(other, stack, shared) for name, other in dependencies_of(provider).items()}
        if inspect.isgeneratorfunction(provider):
            shared[dependency] = stack.enter_context(contextlib.contextmanager(provider)(**inner))
        else:
            shared[dependency] = provider(**inner)
    return shared[dependency]


def _name(provider: Callable[..., Any]) -> str:
    return getattr(provider, "__name__", repr(provider))
