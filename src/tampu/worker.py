"""The worker that applications use: runs the tasks of one or more queues, or one handler, until it is stopped.

Worker(queue).run_sync()              # in a script; Ctrl-C stops it after its running jobs have finished
await Worker("emails", handler).run() # the form that chasquimq has
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from tampu.base.checks import check_int, invalid
from tampu.base.event_loop import close_runner, new_event_loop
from tampu.config import ConsumerConfig, SchedulerConfig
from tampu.consume.consumer import Consumer
from tampu.consume.dispatch import Dispatcher, encode_outcome
from tampu.consume.forks import ForkGuard, leave
from tampu.consume.invoke import DaemonThreads, in_thread, is_coroutine_handler
from tampu.consume.progress import ProgressReporter
from tampu.errors import ConfigError
from tampu.queue import Queue, refuse_unknown_settings
from tampu.redis.settings import parse_url, resolve_url
from tampu.wire.job import Job
from tampu.wire.payload import encode_value

if TYPE_CHECKING:
    from collections.abc import Awaitable
    from contextlib import AbstractAsyncContextManager
    from types import TracebackType

    Hook = Callable[..., Any]
    Middleware = Callable[[Job[Any]], AbstractAsyncContextManager[Any]]
    Inner = Callable[[Job[Any]], Awaitable[Any]]

#: Called for each job: a coroutine function, or a function that runs in a thread.
Handler = Callable[[Job[Any]], Any]

logger = logging.getLogger("tampu.worker")

#: Attempts of a job that does not set its own: of a task, and of the drop-in form with a handler, as in chasquimq.
TASK_ATTEMPTS = 5
HANDLER_ATTEMPTS = 25


class _Default(int):
    """A default that differs from the same number given by the caller."""


_DEFAULT_ATTEMPTS = _Default(HANDLER_ATTEMPTS)


class Worker:
    """Runs jobs of a `Queue`, of several queues, or of a queue given by name with a handler.

        Worker(queue).run_sync()

    | hook | called |
    |---|---|
    | `on_startup()` | before the first job |
    | `on_shutdown()` | after the last job |
    | `before_job(job)` | before each run; an exception fails the run |
    | `after_job(job, error)` | after each run; `error` is None if it succeeded; an exception is only logged |

    Hooks can be coroutine functions.

    Args:
        queue: A `Queue`, several of them, or a queue name.
        handler: Called for each job instead of the queue's tasks. Required with a queue name.
        queue_name: Another name for `queue`.
        url: Server URL, for a queue given by name.
        redis_url: Another name for `url`.
        tls: Connect with TLS, for a queue given by name.
        concurrency: Maximum number of jobs that run at the same time, per queue.
        max_attempts: Maximum number of attempts of jobs that set none. Defaults to 5 for tasks and 25 for a handler,
            as in chasquimq.
        group: Consumer group.
        consumer_id: Name of this worker in the group; must be unique per process. Defaults to `<host>:<pid>:<random>`.
        read_block_ms: `ConsumerConfig.block_ms`.
        read_count: `ConsumerConfig.batch`.
        claim_min_idle_ms: `ConsumerConfig.claim_min_idle_ms`.
        max_payload_bytes: `ConsumerConfig.max_payload_bytes`.
        dlq_max_stream_len: `ConsumerConfig.dlq_max_stream_len`.
        events_enabled: Write to the events stream.
        delayed_enabled: Run a promoter too.
        run_scheduler: Run a scheduler too.
        scheduler_tick_ms: `SchedulerConfig.tick_interval_ms`.
        store_results: Store return values. Defaults to True for tasks and False for a handler.
        result_ttl_ms: How long results are kept, in milliseconds.
        credential_provider: Callable or redis-py `CredentialProvider` that returns the credentials.
        on_startup: See the table above.
        on_shutdown: See the table above.
        before_job: See the table above.
        after_job: See the table above.
        middleware: Functions that take a job and return an async context manager. Each run happens inside all of
            them, the first one outermost: for error trackers, tracing or database sessions.
        processes: Maximum number of processes for `process=True` tasks. Defaults to the number of CPU cores.
        jobs_per_process: Replace a process after this many jobs, for tasks that leak memory. Defaults to never.
        **settings: Any other field of `ConsumerConfig`.

    Raises:
        ConfigError: A setting is invalid, or there is nothing to run.
    """

    def __init__(
        self,
        queue: Queue | str | Iterable[Queue] | None = None,
        handler: Handler | None = None,
        *,
        queue_name: str | None = None,
        url: str | None = None,
        redis_url: str | None = None,
        tls: bool = False,
        concurrency: int = 100,
        max_attempts: int = _DEFAULT_ATTEMPTS,
        group: str = "default",
        consumer_id: str | None = None,
        read_block_ms: int | None = None,
        read_count: int | None = None,
        claim_min_idle_ms: int | None = None,
        max_payload_bytes: int | None = None,
        dlq_max_stream_len: int | None = None,
        events_enabled: bool = True,
        delayed_enabled: bool = True,
        run_scheduler: bool = True,
        scheduler_tick_ms: int | None = None,
        store_results: bool | None = None,
        result_ttl_ms: int | None = None,
        credential_provider: Any = None,
        on_startup: Hook | None = None,
        on_shutdown: Hook | None = None,
        before_job: Hook | None = None,
        after_job: Hook | None = None,
        middleware: Iterable[Middleware] = (),
        processes: int | None = None,
        jobs_per_process: int | None = None,
        **settings: Any,
    ) -> None:
        if queue is not None and queue_name is not None:
            raise ConfigError("queue and queue_name are two names for the same argument: give only one")
        served = queue_name if queue is None else queue
        if not isinstance(served, str) and (url, redis_url, tls) != (None, None, False):
            raise ConfigError("url and tls can only be given with a queue name: a Queue has its own")
        self._queues = _queues(
            served, handler, resolve_url(url, redis_url, tls=tls) if isinstance(served, str) else None
        )
        self._handler = handler
        self._credential_provider = credential_provider
        # Callers of tasks expect results; with a handler the default is that of chasquimq.
        stores = (handler is None) if store_results is None else store_results
        given: dict[str, Any] = {
            "concurrency": concurrency,
            "max_attempts": _attempts(max_attempts, handler),
            "group": group,
            "consumer_id": consumer_id,
            "block_ms": read_block_ms,
            "batch": read_count,
            "claim_min_idle_ms": claim_min_idle_ms,
            "max_payload_bytes": max_payload_bytes,
            "dlq_max_stream_len": dlq_max_stream_len,
            "events_enabled": events_enabled,
            "delayed_enabled": delayed_enabled,
            "run_scheduler": run_scheduler,
            "store_results": stores,
            "result_ttl_secs": None if result_ttl_ms is None else -(-check_int("result_ttl_ms", result_ttl_ms) // 1000),
            "scheduler": None if scheduler_tick_ms is None else SchedulerConfig(tick_interval_ms=scheduler_tick_ms),
            **settings,
        }
        refuse_unknown_settings("Worker", settings, ConsumerConfig)
        self._config = ConsumerConfig(**{name: value for name, value in given.items() if value is not None})
        self._middleware = tuple(middleware)
        self._processes = None if processes is None else check_int("processes", processes, low=1)
        self._jobs_per_process = (
            None if jobs_per_process is None else check_int("jobs_per_process", jobs_per_process, low=1)
        )
        self._hooks = {"startup": on_startup, "shutdown": on_shutdown, "before": before_job, "after": after_job}
        self._shutdown: asyncio.Event | None = None
        self._running: asyncio.Future[None] | None = None
        self._background: asyncio.Task[None] | None = None
        self._consumers: list[Consumer] = []
        self._closed = False
        #: Number of jobs that exceeded the shutdown deadline and were abandoned; other workers retry them.
        self.abandoned = 0

    # --- properties

    @property
    def name(self) -> str:
        """Name of the queue, or names joined by commas."""
        return ",".join(queue.name for queue in self._queues)

    @property
    def queues(self) -> tuple[Queue, ...]:
        """The queues it serves."""
        return tuple(self._queues)

    @property
    def is_running(self) -> bool:
        """True while it runs jobs."""
        return self._running is not None and not self._running.done()

    @property
    def is_closed(self) -> bool:
        """True once `close` was called."""
        return self._closed

    @property
    def config(self) -> ConsumerConfig:
        """Settings of its consumers, except for `queue_name`."""
        return self._config

    def seconds_since_last_read(self) -> float | None:
        """Return the seconds since the server of any queue last answered a read, or None before the first answer.

        With several queues, the longest time counts. Use it for health checks.
        """
        times = [consumer.last_read_at for consumer in self._consumers]
        if not times or any(at is None for at in times):
            return None
        return time.monotonic() - min(at for at in times if at is not None)

    @property
    def is_healthy(self) -> bool:
        """False while a handler blocks the event loop for too long, or the leases of running jobs cannot be renewed."""
        return all(consumer.is_healthy for consumer in self._consumers)

    # --- running

    async def run(self) -> None:
        """Run jobs until `close` is called. A second call waits for the same run."""
        if self._running is not None and not self._running.done():
            await asyncio.shield(self._running)
            return
        self._shutdown = asyncio.Event()
        if self._closed:
            return
        self._running = asyncio.ensure_future(self._run(self._shutdown))
        await self._running

    def run_sync(self) -> None:
        """Run jobs until SIGINT or SIGTERM, without an event loop. Uses uvloop if it is installed.

        On the first signal it takes no more jobs and finishes the running ones; a second signal ends the process.
        """
        runner = asyncio.Runner(loop_factory=new_event_loop)
        main = self._run_until_signal()
        try:
            runner.run(main)
        finally:
            main.close()  # it never started if this was called inside an event loop
            close_runner(runner)

    async def close(self) -> None:
        """Stop: take no more jobs and finish the running ones. Then `run` returns."""
        self._closed = True
        if self._shutdown is not None:
            self._shutdown.set()

    async def __aenter__(self) -> Self:
        """Start the worker in the background: `async with Worker(queue): ...` runs jobs until the block ends."""
        self._background = asyncio.get_running_loop().create_task(self.run(), name="tampu-worker")
        await asyncio.sleep(0)  # a worker that cannot start says so at the end of the block, or here
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the worker: it finishes its running jobs."""
        await self.close()
        if self._background is not None:
            background, self._background = self._background, None
            await background

    async def _run_until_signal(self) -> None:
        loop = asyncio.get_running_loop()
        closing: set[asyncio.Task[None]] = set()

        def drain() -> None:
            # The second signal gets its default action: the user does not want to wait.
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
            closing.add(loop.create_task(self.close()))

        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(NotImplementedError, ValueError):  # not on this platform, or not the main thread
                loop.add_signal_handler(number, drain)
        await self.run()

    async def _run(self, shutdown: asyncio.Event) -> None:
        await self._call_hook("startup")
        threads = DaemonThreads(self._config.concurrency * len(self._queues), "tampu-task")
        dispatchers: list[Dispatcher] = []
        reporters: list[ProgressReporter] = []
        try:
            async with asyncio.TaskGroup() as group:
                for queue in self._queues:
                    codec = self._config.codec or queue.codec
                    config = replace(self._config, queue_name=queue.name, codec=codec)
                    provider = self._credential_provider or queue._credential_provider
                    consumer = Consumer(queue.url, config, credential_provider=provider)
                    self._consumers.append(consumer)
                    events_kept = config.events_max_stream_len if config.events_enabled else 0
                    settings = parse_url(queue.url, credential_provider=provider)
                    reporter = ProgressReporter(
                        settings, queue.keys, worker=config.consumer_id, events_kept=events_kept
                    )
                    reporters.append(reporter)
                    if self._handler is None:
                        dispatcher = Dispatcher(
                            queue.tasks,
                            threads,
                            store_results=config.store_results,
                            worker=config.consumer_id,
                            events_kept=events_kept,
                            processes=self._processes,
                            jobs_per_process=self._jobs_per_process,
                        )
                        dispatchers.append(dispatcher)
                        handler = self._wrapped(dispatcher, reporter, dispatcher.knows)
                    else:
                        inner = _encoding(self._handler, threads, store=config.store_results)
                        handler = self._wrapped(inner, reporter, lambda job: True)
                    group.create_task(consumer.run(handler, shutdown), name=f"tampu-{queue.name}")
        except* Exception as errors:
            shutdown.set()
            raise errors.exceptions[0] from None
        finally:
            for dispatcher in dispatchers:
                dispatcher.close()
            threads.shutdown()
            self.abandoned = sum(consumer.abandoned for consumer in self._consumers)
            self._consumers.clear()
            for reporter in reporters:
                await reporter.close()
            await self._call_hook("shutdown")

    def _wrapped(self, inner: Inner, progress: ProgressReporter, is_run: Callable[[Job[Any]], bool]) -> Inner:
        """Return the handler wrapped in progress reporting, hooks and middleware.

        `is_run` is False for jobs that the handler will not run.
        """
        if self._middleware:
            inner = _inside(self._middleware, inner, is_run)
        if self._hooks["before"] is None and self._hooks["after"] is None:

            async def plain(job: Job[Any]) -> Any:
                job._context = progress
                try:
                    return await inner(job)
                finally:
                    progress.forget(job)

            return plain

        fork_guard = ForkGuard()

        async def hooked(job: Job[Any]) -> Any:
            if not is_run(job):
                return await inner(job)
            job._context = progress
            error: BaseException | None = None
            try:
                await self._call_hook("before", job)
                return await inner(job)
            except BaseException as raised:
                error = raised
                raise
            finally:
                if fork_guard.is_child:
                    leave(error)
                progress.forget(job)
                await self._call_after(job, error)

        return hooked

    async def _call_after(self, job: Job[Any], error: BaseException | None) -> None:
        try:
            await self._call_hook("after", job, error)
        except Exception:
            # The outcome of the job is decided, and a hook must not change it: a success would run again.
            logger.exception("hook after_job raised an exception for job %s; the job is not affected", job.id)

    async def _call_hook(self, name: str, *args: Any) -> None:
        hook = self._hooks[name]
        if hook is not None:
            result = hook(*args)
            if inspect.isawaitable(result):
                await result


def _inside(middleware: Sequence[Middleware], inner: Inner, is_run: Callable[[Job[Any]], bool]) -> Inner:
    """Return `inner`, run inside the context managers of all middleware."""

    async def call(job: Job[Any]) -> Any:
        if not is_run(job):
            return await inner(job)
        async with contextlib.AsyncExitStack() as stack:
            for enter in middleware:
                await stack.enter_async_context(enter(job))
            return await inner(job)

    return call


def _attempts(given: int, handler: Handler | None) -> int:
    if given is not _DEFAULT_ATTEMPTS:
        return given
    return TASK_ATTEMPTS if handler is None else HANDLER_ATTEMPTS


def _queues(queue: Queue | str | Iterable[Queue] | None, handler: Handler | None, url: str | None) -> list[Queue]:
    if handler is not None and not callable(handler):
        raise invalid("handler", handler, "a function that takes a job")
    if isinstance(queue, str):
        if handler is None:
            raise ConfigError("a queue name needs a handler: Worker('emails', handler); or pass a Queue with tasks")
        return [Queue(queue, url=url)]
    queues = [queue] if isinstance(queue, Queue) else list(queue) if isinstance(queue, Iterable) else []
    if not queues or not all(isinstance(one, Queue) for one in queues):
        raise invalid("queue", queue, "a queue name, a Queue or several of them")
    seen: set[tuple[str, str]] = set()
    for one in queues:
        if (one.name, one.url) in seen:
            raise ConfigError(f"queue {one.name!r} is given twice; register all its tasks on one Queue object")
        seen.add((one.name, one.url))
        if handler is None and not one.tasks:
            raise ConfigError(f"queue {one.name!r} has no tasks to run; import the module that defines them")
    return queues


def _encoding(handler: Handler, threads: DaemonThreads, *, store: bool) -> Inner:
    call = handler if is_coroutine_handler(handler) else in_thread(handler, threads, None)
    encode = encode_value if store else None

    async def encoded(job: Job[Any]) -> Any:
        job.payload  # noqa: B018 - decode it here: an undecodable payload is an error of the job, not of the handler
        return encode_outcome(await call(job), encode)

    return encoded
