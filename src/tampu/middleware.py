"""Middleware: code around every add and every run of a queue's jobs, and a call at their end.

class Tenant(Middleware):
    async def on_add(self, call_next, add):
        add.headers["tenant"] = tenant.get()
        return await call_next(add)

    async def on_run(self, call_next, job):
        tenant.set(job.headers["tenant"])
        return await call_next(job)

queue = Queue("emails", middleware=[Tenant()])
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from tampu.base.checks import invalid
from tampu.consume.outcomes import Cancelled, DeadLetter, Retried
from tampu.errors import ConfigError
from tampu.produce.options import TaskAddOptions
from tampu.produce.producer import Producer
from tampu.wire.extras import check_headers, decode_extras, encode_extras
from tampu.wire.job import Job, JobId
from tampu.wire.payload import decode_value

if TYPE_CHECKING:
    from datetime import datetime, timedelta

    from tampu.config import ProducerConfig
    from tampu.consume.outcomes import Observers, Outcome
    from tampu.produce.options import AddOptions
    from tampu.redis.settings import ConnectionSettings

logger = logging.getLogger("tampu.worker")


@dataclass(kw_only=True)
class PendingAdd:
    """One add, or one bulk, as `Middleware.on_add` sees it. Changed `headers` are stored with the jobs."""

    #: Name of the queue.
    queue: str
    #: Name of the task.
    name: str
    #: Headers of all its jobs: those of the queue, and over them those of `task.using(headers=...)`.
    headers: dict[str, str]
    #: Explicit ID of the job, if it has one.
    id: str | None
    _packed: Sequence[bytes] = field(repr=False)

    @property
    def payloads(self) -> list[Any]:
        """The payload of each job: for a task, a dict of its arguments. Decoded anew at every call."""
        return [decode_value(packed) for packed in self._packed]


@dataclass(frozen=True, kw_only=True)
class JobEnd:
    """The end of a run, or of a job that did not run, as `Middleware.on_end` receives it."""

    job: Job[Any]
    #: Name of the queue.
    queue: str
    #: What became of the job. After "retried" and "snoozed" it runs again.
    kind: Literal["succeeded", "retried", "snoozed", "dead", "cancelled"]
    #: Why: the reason of a dead letter or of a cancel; otherwise empty.
    reason: str
    #: The exception of the run. None if there was none, or no run.
    error: BaseException | None
    #: Seconds until the next run of a job that was retried or snoozed.
    retry_in: float | None
    #: Duration of the run in seconds; 0 if the job did not run.
    duration: float
    #: False if a job ended without a run: it expired, was cancelled, kept killing its workers or cannot be read.
    ran: bool


NextAdd = Callable[[PendingAdd], Awaitable[list[JobId]]]
NextRun = Callable[[Job[Any]], Awaitable[Any]]


class Middleware:
    """Derive from this class, override what you need, and pass an object to `Queue(middleware=[...])`.

    The first object of the list is the outermost. What is not overridden costs nothing.
    """

    async def on_add(self, call_next: NextAdd, add: PendingAdd) -> list[JobId]:
        """Run around each add, and once around each bulk. Return what `call_next` returns, or raise to refuse the add.

        Jobs that a schedule adds do not pass here, because the leader of the queue adds them.
        """
        return await call_next(add)

    async def on_run(self, call_next: NextRun, job: Job[Any]) -> Any:
        """Run around each run of a job. Return the result of the job.

        `call_next` returns what the function returned, or raises what it raised. Without calling it, the function does
        not run. An exception that is not raised again counts as a success. Around a `process=True` task it is called
        in the process of the task.
        """
        return await call_next(job)

    def on_end(self, end: JobEnd) -> Awaitable[None] | None:
        """Run at the end of every run, and of a job that ends without one. May be a coroutine function.

        It is called in the worker. An exception is logged; the job is not affected. A job that is still delayed when
        it is cancelled ends without a worker, and without this call.
        """


#: The other form of a middleware of a `Worker`: a function that takes a job and returns an async context manager.
Around = Callable[[Job[Any]], AbstractAsyncContextManager[object]]


def check_middleware(given: Any, *, or_functions: bool = False) -> tuple[Any, ...]:
    """Return the middleware as a tuple, or raise `ConfigError`."""
    allowed = "objects of classes derived from Middleware"
    if or_functions:
        allowed += ", or functions that take a job and return an async context manager"
    found = tuple(given) if isinstance(given, Iterable) else (given,)
    for one in found:
        if not isinstance(one, Middleware) and (not or_functions or inspect.isclass(one) or not callable(one)):
            raise invalid("middleware", one, allowed)
    return found


def overriding(middleware: Iterable[Any], method: str) -> list[Any]:
    """Return this method of each object that overrides it."""
    base = getattr(Middleware, method)
    return [getattr(one, method) for one in middleware if getattr(type(one), method, base) is not base]


def around_runs(middleware: Iterable[Middleware | Around]) -> list[Callable[[NextRun, Job[Any]], Awaitable[Any]]]:
    """Return what runs around each run, outermost first."""
    calls: list[Callable[[NextRun, Job[Any]], Awaitable[Any]]] = []
    for one in middleware:
        calls += overriding([one], "on_run") if isinstance(one, Middleware) else [partial(_inside, one)]
    return calls


async def _inside(around: Around, call_next: NextRun, job: Job[Any]) -> Any:
    async with around(job):
        return await call_next(job)


class ObservedProducer(Producer[Any]):
    """A producer whose adds pass through the middleware of a queue, and get its headers."""

    def __init__(
        self,
        settings: ConnectionSettings,
        config: ProducerConfig,
        on_add: Sequence[Callable[[NextAdd, PendingAdd], Awaitable[list[JobId]]]],
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(settings, config)
        self._on_add = on_add
        self._headers = headers

    async def add_packed(
        self,
        packed: bytes,
        opts: AddOptions,
        *,
        delay: timedelta | float | None = None,
        run_at: datetime | float | None = None,
    ) -> JobId:
        send = super().add_packed

        async def last(options: list[AddOptions]) -> list[JobId]:
            return [await send(packed, options[0], delay=delay, run_at=run_at)]

        return (await self._through([packed], [opts], last))[0]

    async def add_packed_bulk(
        self,
        packed: Sequence[bytes],
        opts: AddOptions,
        *,
        delay: timedelta | float | None = None,
        run_at: datetime | float | None = None,
    ) -> list[JobId]:
        send = super().add_packed_bulk
        return await self._through(packed, [opts], lambda options: send(packed, options[0], delay=delay, run_at=run_at))

    async def add_packed_each(
        self,
        packed: Sequence[bytes],
        options: Sequence[AddOptions],
        *,
        delay: timedelta | float | None = None,
        run_at: datetime | float | None = None,
    ) -> list[JobId]:
        if not packed:
            return []
        send = super().add_packed_each
        return await self._through(packed, options, lambda options: send(packed, options, delay=delay, run_at=run_at))

    async def add_debounced(self, packed: bytes, opts: AddOptions, quiet_ms: int, at_most_ms: int | None) -> JobId:
        send = super().add_debounced

        async def last(options: list[AddOptions]) -> list[JobId]:
            return [await send(packed, options[0], quiet_ms, at_most_ms)]

        return (await self._through([packed], [opts], last))[0]

    async def _through(
        self,
        packed: Sequence[bytes],
        options: Sequence[AddOptions],
        send: Callable[[list[AddOptions]], Awaitable[list[JobId]]],
    ) -> list[JobId]:
        """Send jobs through the middleware. Their options differ at most in the keys of limits."""
        opts, extras = options[0], decode_extras(options[0]._tail)

        async def last(add: PendingAdd) -> list[JobId]:
            headers = check_headers(add.headers)
            return await send([_with_headers(one, headers) for one in options])

        call: NextAdd = last
        for around in reversed(self._on_add):
            call = partial(around, call)
        headers = {**self._headers, **extras.headers}
        queue = self._keys.queue_name
        ids = await call(PendingAdd(queue=queue, name=opts.name, headers=headers, id=opts.id, _packed=packed))
        if not isinstance(ids, list) or len(ids) != len(packed):
            raise ConfigError(f"on_add must return what call_next returns, or raise; got {ids!r}")
        return ids


def _with_headers(options: AddOptions, headers: dict[str, str]) -> AddOptions:
    tail = encode_extras(decode_extras(options._tail)._replace(headers=headers))
    return TaskAddOptions(id=options.id, retry=options.retry, name=options.name, _tail=tail)


class EndCalls:
    """The `on_end` calls of one queue. Coroutines run concurrently with jobs; a shutdown waits for them."""

    def __init__(self, queue_name: str, calls: Sequence[Callable[[JobEnd], Awaitable[None] | None]]) -> None:
        self._queue = queue_name
        self._calls = calls
        self._running: set[asyncio.Task[None]] = set()

    def observe_with(self, observers: Observers) -> None:
        """Call them for the jobs that the observers are called for."""
        observers.succeeded.append(self._ended)
        observers.recovered.append(self._ended)
        observers.snoozed.append(self._ended)
        observers.failed.append(self._ended)

    async def finish(self, timeout_secs: float) -> None:
        """Wait for the calls that were started."""
        if self._running:
            await asyncio.wait(self._running, timeout=timeout_secs)

    def _ended(self, outcome: Outcome, error: BaseException | None = None) -> None:
        end = _end_of(self._queue, outcome, error)
        for call in self._calls:
            try:
                awaitable = call(end)
            except Exception:
                self._complain(end)
                continue
            if awaitable is not None:
                task = asyncio.get_running_loop().create_task(self._await(awaitable, end), name="tampu-on-end")
                self._running.add(task)
                task.add_done_callback(self._running.discard)

    async def _await(self, awaitable: Awaitable[None], end: JobEnd) -> None:
        try:
            await awaitable
        except Exception:
            self._complain(end)

    def _complain(self, end: JobEnd) -> None:
        logger.exception("on_end raised an exception for job %s; the job is not affected", end.job.id)


def _end_of(queue: str, outcome: Outcome, error: BaseException | None) -> JobEnd:
    reason, retry_in = "", None
    kind: Literal["succeeded", "retried", "snoozed", "dead", "cancelled"] = "succeeded"
    if isinstance(outcome, Retried):
        kind, retry_in = "snoozed" if error is None else "retried", outcome.backoff_ms / 1000
    elif isinstance(outcome, DeadLetter):
        kind, reason = "dead", outcome.letter.reason
    elif isinstance(outcome, Cancelled):
        kind, reason = "cancelled", outcome.reason.decode()
    return JobEnd(
        job=outcome.delivery.job,
        queue=queue,
        kind=kind,
        reason=reason,
        error=error,
        retry_in=retry_in,
        duration=outcome.duration_us / 1_000_000,
        ran=outcome.ran,
    )
