"""The worker people use: runs the tasks of one or several queues, or one handler, until it is stopped.

Worker(queue).run_sync()              # a script; Ctrl-C drains and ends it
await Worker("emails", handler).run() # the drop-in form
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from tampu.checks import refuse
from tampu.dispatch import Dispatcher, encode_outcome
from tampu.engine.callers import in_thread, is_coroutine_handler
from tampu.engine.config import ConsumerConfig, SchedulerConfig
from tampu.engine.consumer import Consumer
from tampu.errors import ConfigError
from tampu.progress import ProgressReporter
from tampu.queue import Queue
from tampu.redis.settings import resolve_url

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable
    from types import TracebackType

    from tampu.wire.job import Job

    Handler = Callable[[Job[Any]], Any]
    Hook = Callable[..., Any]

logger = logging.getLogger("tampu.worker")


class Worker:
    """Runs jobs. Takes a `Queue`, several of them, or a queue's name and a handler.

    | hook | called |
    |---|---|
    | `on_startup()` | before the first job |
    | `on_shutdown()` | after the last |
    | `before_job(job)` | before each run; raising fails the run |
    | `after_job(job, error)` | after each run; `error` is None when it succeeded |

    All hooks may be coroutine functions. Settings not listed here are those of `ConsumerConfig`.
    """

    def __init__(
        self,
        queue: Queue | str | Iterable[Queue],
        handler: Handler | None = None,
        *,
        url: str | None = None,
        redis_url: str | None = None,
        tls: bool = False,
        concurrency: int = 100,
        max_attempts: int = 25,
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
        **settings: Any,
    ) -> None:
        self._queues = _queues(queue, handler, resolve_url(url, redis_url, tls=tls) if isinstance(queue, str) else None)
        self._handler = handler
        self._credential_provider = credential_provider
        # A queue with tasks is asked for results; the drop-in form keeps its default.
        stores = (handler is None) if store_results is None else store_results
        given: dict[str, Any] = {
            "concurrency": concurrency,
            "max_attempts": max_attempts,
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
            "result_ttl_secs": None if result_ttl_ms is None else -(-result_ttl_ms // 1000),
            "scheduler": None if scheduler_tick_ms is None else SchedulerConfig(tick_interval_ms=scheduler_tick_ms),
            **settings,
        }
        try:
            self._config = ConsumerConfig(**{name: value for name, value in given.items() if value is not None})
        except TypeError as error:
            raise ConfigError(f"Worker: {error}") from None
        self._hooks = {"startup": on_startup, "shutdown": on_shutdown, "before": before_job, "after": after_job}
        self._shutdown: asyncio.Event | None = None
        self._running: asyncio.Future[None] | None = None
        self._consumers: list[Consumer] = []
        self._closed = False

    # --- what it is

    @property
    def name(self) -> str:
        """The queue's name; several are joined by commas."""
        return ",".join(queue.name for queue in self._queues)

    @property
    def is_running(self) -> bool:
        """Whether it runs jobs at the moment."""
        return self._running is not None and not self._running.done()

    @property
    def is_closed(self) -> bool:
        """Whether it was told to stop."""
        return self._closed

    @property
    def config(self) -> ConsumerConfig:
        """The settings of its consumers; the queue's name differs from one to the other."""
        return self._config

    def seconds_since_last_read(self) -> float | None:
        """How long ago a server last answered a read, at the worst queue; None before the first. For health checks."""
        times = [consumer.last_read_at for consumer in self._consumers]
        if not times or any(at is None for at in times):
            return None
        return time.monotonic() - min(at for at in times if at is not None)

    @property
    def is_healthy(self) -> bool:
        """False while a handler has blocked the event loop for too long."""
        return all(consumer.is_healthy for consumer in self._consumers)

    # --- running

    async def run(self) -> None:
        """Run jobs until `close`. Called twice it waits for the same run."""
        if self._running is not None and not self._running.done():
            await asyncio.shield(self._running)
            return
        self._shutdown = asyncio.Event()
        if self._closed:
            return
        self._running = asyncio.ensure_future(self._run(self._shutdown))
        await self._running

    def run_sync(self) -> None:
        """Run jobs until SIGINT or SIGTERM, for scripts without an event loop. uvloop is used when it is installed."""
        runner = asyncio.Runner(loop_factory=_loop_factory())
        with runner:
            runner.run(self._run_until_signal())

    async def close(self) -> None:
        """Have it stop: it takes no more jobs, finishes those it runs, and `run` returns."""
        self._closed = True
        if self._shutdown is not None:
            self._shutdown.set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _run_until_signal(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(NotImplementedError, ValueError):  # not on this platform, or not the main thread
                loop.add_signal_handler(number, lambda: loop.create_task(self.close()))
        await self.run()

    async def _run(self, shutdown: asyncio.Event) -> None:
        await self._call_hook("startup")
        threads = ThreadPoolExecutor(self._config.concurrency, "tampu-task")
        dispatchers: list[Dispatcher] = []
        try:
            async with asyncio.TaskGroup() as group:
                for queue in self._queues:
                    config = replace(self._config, queue_name=queue.name)
                    consumer = Consumer(
                        queue.url, config, credential_provider=self._credential_provider or queue._credential_provider
                    )
                    self._consumers.append(consumer)
                    handler = self._handler_for(queue, config, threads, dispatchers)
                    group.create_task(consumer.run(handler, shutdown), name=f"tampu-{queue.name}")
        except* Exception as errors:
            shutdown.set()
            raise errors.exceptions[0] from None
        finally:
            for dispatcher in dispatchers:
                dispatcher.close()
            threads.shutdown(wait=False, cancel_futures=True)
            self._consumers.clear()
            await self._call_hook("shutdown")

    def _handler_for(
        self, queue: Queue, config: ConsumerConfig, threads: ThreadPoolExecutor, dispatchers: list[Dispatcher]
    ) -> Callable[[Job[Any]], Awaitable[Any]]:
        progress = ProgressReporter(queue, config)
        if self._handler is None:
            dispatcher = Dispatcher(queue.tasks, threads, store_results=config.store_results)
            dispatchers.append(dispatcher)
            inner: Callable[[Job[Any]], Awaitable[Any]] = dispatcher
        else:
            inner = _encoding(self._handler, threads, store=config.store_results)
        before, after = self._hooks["before"], self._hooks["after"]
        if before is None and after is None:

            async def plain(job: Job[Any]) -> Any:
                job._context = progress
                return await inner(job)

            return plain

        async def hooked(job: Job[Any]) -> Any:
            job._context = progress
            error: BaseException | None = None
            try:
                await self._call_hook("before", job)
                return await inner(job)
            except BaseException as raised:
                error = raised
                raise
            finally:
                await self._call_hook("after", job, error)

        return hooked

    async def _call_hook(self, name: str, *args: Any) -> None:
        hook = self._hooks[name]
        if hook is not None:
            result = hook(*args)
            if inspect.isawaitable(result):
                await result


def _queues(queue: Queue | str | Iterable[Queue], handler: Handler | None, url: str | None) -> list[Queue]:
    if isinstance(queue, str):
        if handler is None:
            raise ConfigError("Worker(name) needs a handler; or give it a Queue, whose tasks it runs")
        return [Queue(queue, url=url)]
    queues = [queue] if isinstance(queue, Queue) else list(queue)
    if not queues or not all(isinstance(one, Queue) for one in queues):
        raise refuse("queue", queue, "a queue's name, a Queue or several of them")
    if handler is None and not any(one.tasks for one in queues):
        raise ConfigError(f"none of the queues {', '.join(one.name for one in queues)} has a task: nothing to run")
    return queues


def _encoding(handler: Handler, threads: ThreadPoolExecutor, *, store: bool) -> Callable[[Job[Any]], Awaitable[Any]]:
    call = handler if is_coroutine_handler(handler) else in_thread(handler, threads, None)

    async def encoded(job: Job[Any]) -> Any:
        job.payload  # noqa: B018 - a payload that cannot be read is a failure of the job, not of the handler
        return encode_outcome(await call(job), store=store)

    return encoded


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
