"""The worker that applications use: runs the tasks of one or more queues, or one handler, until it is stopped.

Worker(queue).run_sync()              # in a script; Ctrl-C stops it after its running jobs have finished
await Worker("emails", handler).run() # the form that chasquimq has
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from tampu.base.checks import check_int, invalid
from tampu.base.event_loop import SIGNAL_SECS, close_runner, new_event_loop
from tampu.config import ConsumerConfig, SchedulerConfig, settings_of
from tampu.consume.context import ProgressReporter
from tampu.consume.dependencies import WorkerValues
from tampu.consume.dispatch import Dispatcher
from tampu.consume.execute import Execution, Target, call_hook, decode_first
from tampu.consume.handlers import FailureCalls, is_coroutine_handler
from tampu.consume.pool import DaemonThreads, Share
from tampu.consume.runtime import Runtime
from tampu.errors import ConfigError
from tampu.maintain.supervise import supervise
from tampu.middleware import EndCalls, around_runs, check_middleware, overriding
from tampu.queue import Queue
from tampu.redis.settings import parse_url, resolve_url
from tampu.wire.job import Job
from tampu.wire.payload import encode_value
from tampu.wire.retry import RetryConfig

if TYPE_CHECKING:
    from typing import Unpack

    from tampu.config import ConsumerSettings
    from tampu.consume.heartbeat import Blocked
    from tampu.middleware import Around, Middleware
    from tampu.redis.client import Client
    from tampu.task import OnFailure

    #: Hooks may be coroutine functions: an awaitable that they return is awaited.
    Hook = Callable[[], object]
    BeforeJob = Callable[[Job[Any]], object]
    AfterJob = Callable[[Job[Any], BaseException | None], object]

#: Called for each job: a coroutine function, or a function that runs in a thread.
Handler = Callable[[Job[Any]], Any]

logger = logging.getLogger("tampu.worker")

#: Attempts of a job that does not set its own: of a task, and of the drop-in form with a handler, as in chasquimq.
TASK_ATTEMPTS = 7
HANDLER_ATTEMPTS = 25
#: Waits of about 1, 3, 9, 27, 81 and 243 s: the last of 7 attempts runs after six to eight minutes. An outage or deploy
#: of a few minutes leaves no dead letters, and a short one delays jobs only a little.
TASK_RETRY = RetryConfig(
    initial_backoff_ms=1000, multiplier=3.0, max_backoff_ms=86_400_000, jitter_ms=0, jitter_ratio=0.25
)


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
        concurrency: Maximum number of jobs that run at the same time, of all queues together.
        weights: By queue name, how many jobs it gets in relation to the others while several have jobs waiting.
            Defaults to 1 for each.
        reserve: By queue name, slots that are kept free for its jobs. Defaults to none.
        limit: By queue name, the most slots it may have. Defaults to all.
        max_attempts: Maximum number of attempts, unless the job sets it. Defaults to 7 for tasks and 25 for a handler,
            as in chasquimq.
        group: Consumer group.
        consumer_id: Name of this worker in the group; a random suffix makes it unique. Defaults to `<host>:<pid>`.
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
        on_startup: See the table above, also for `on_shutdown`, `before_job` and `after_job`.
        middleware: Around the runs of all its queues, outside of that of the queues: `Middleware` objects, of which
            `on_run` and `on_end` are called, in this process; or functions that take a job and return an async context
            manager. The first one is outermost.
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
        weights: Mapping[str, int] | None = None,
        reserve: Mapping[str, int] | None = None,
        limit: Mapping[str, int] | None = None,
        max_attempts: int | None = None,
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
        before_job: BeforeJob | None = None,
        after_job: AfterJob | None = None,
        middleware: Iterable[Middleware | Around] = (),
        processes: int | None = None,
        jobs_per_process: int | None = None,
        **settings: Unpack[ConsumerSettings],
    ) -> None:
        if queue is not None and queue_name is not None:
            raise ConfigError("queue and queue_name are two names for the same argument: pass only one")
        served = queue_name if queue is None else queue
        if not isinstance(served, str) and (url, redis_url, tls) != (None, None, False):
            raise ConfigError("url and tls can only be given with a queue name: a Queue has its own")
        self._queues = _queues(
            served, handler, resolve_url(url, redis_url, tls=tls) if isinstance(served, str) else None
        )
        self._handler = handler
        self._credential_provider = credential_provider
        # Callers of tasks expect results and patient retries; with a handler the defaults are those of chasquimq.
        has_tasks = handler is None
        attempts = TASK_ATTEMPTS if has_tasks else HANDLER_ATTEMPTS
        #: Settings of its consumers, except for `queue_name`.
        self.config = settings_of(
            "Worker",
            ConsumerConfig,
            settings,
            concurrency=concurrency,
            max_attempts=attempts if max_attempts is None else max_attempts,
            group=group,
            consumer_id=consumer_id,
            block_ms=read_block_ms,
            batch=read_count,
            claim_min_idle_ms=claim_min_idle_ms,
            max_payload_bytes=max_payload_bytes,
            dlq_max_stream_len=dlq_max_stream_len,
            events_enabled=events_enabled,
            delayed_enabled=delayed_enabled,
            run_scheduler=run_scheduler,
            store_results=has_tasks if store_results is None else store_results,
            result_ttl_secs=None if result_ttl_ms is None else -(-check_int("result_ttl_ms", result_ttl_ms) // 1000),
            scheduler=None if scheduler_tick_ms is None else SchedulerConfig(tick_interval_ms=scheduler_tick_ms),
            retry=TASK_RETRY if has_tasks else None,
        )
        self._weights = _by_queue("weights", weights, low=1)
        self._reserve = _by_queue("reserve", reserve, low=0)
        self._limit = _by_queue("limit", limit, low=1)
        self._check_shares()
        self._middleware = check_middleware(middleware, or_functions=True)
        self._processes = None if processes is None else check_int("processes", processes, low=1)
        self._jobs_per_process = (
            None if jobs_per_process is None else check_int("jobs_per_process", jobs_per_process, low=1)
        )
        self._hooks: dict[str, Callable[..., object] | None] = {
            "startup": on_startup,
            "shutdown": on_shutdown,
            "before": before_job,
            "after": after_job,
        }
        self._shutdown: asyncio.Event | None = None
        self._running: asyncio.Future[None] | None = None
        self._background: asyncio.Task[None] | None = None
        #: Done once the worker has started, for `async with`.
        self._started: asyncio.Future[None] | None = None
        self._serving: _Serving | None = None
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
        """True once `close` has been called."""
        return self._closed

    def seconds_since_last_read(self) -> float | None:
        """Return the seconds since the server last answered a read, or None before the first answer.

        With queues on several servers, the longest time counts. Use it for health checks.
        """
        at = None if self._serving is None else self._serving.runtime.last_read_at
        return None if at is None else time.monotonic() - at

    @property
    def is_healthy(self) -> bool:
        """False while a handler blocks the event loop for too long, or the leases of running jobs cannot be renewed."""
        return self._serving is None or self._serving.runtime.is_healthy

    @property
    def connections(self) -> int:
        """Number of its open connections to servers."""
        return 0 if self._serving is None else self._serving.runtime.connections

    @property
    def slots_used(self) -> dict[str, int]:
        """Number of slots in use, by queue name. Jobs that run, or wait in this worker to be started, use a slot."""
        queues = [] if self._serving is None else self._serving.runtime.queues
        return {queue.name: queue.share.occupied for queue in queues}

    # --- queues

    def add_queue(self, queue: Queue) -> None:
        """Serve one more queue; a running worker does so at once. Raises `ConfigError` if it serves it already."""
        (queue,) = _queues(queue, self._handler, None)
        _refuse_twice([*self._queues, queue])
        self._queues.append(queue)
        if self._serving is not None and not self._closed:
            self._serve(queue, self._serving)

    def _check_shares(self) -> None:
        names = {queue.name for queue in self._queues}
        for field, given in (("weights", self._weights), ("reserve", self._reserve), ("limit", self._limit)):
            if unknown := sorted(set(given) - names):
                raise ConfigError(f"{field} names {unknown[0]!r}, but the worker serves no such queue")
        for name, slots in self._reserve.items():
            if slots > self._limit.get(name, self.config.concurrency):
                raise ConfigError(f"reserve for {name!r} is more than the slots it may have")
        kept = sum(self._reserve.values())
        if kept > self.config.concurrency - (set(self._reserve) != names):
            raise ConfigError(
                f"reserve keeps {kept} of {self.config.concurrency} slots, which leaves none for the other queues"
            )

    @property
    def blocked(self) -> Blocked | None:
        """Job, place and duration if the event loop is blocked, otherwise None. It can be read from any thread."""
        return None if self._serving is None else self._serving.runtime.watch.blocked

    def running_jobs(self) -> list[Job[Any]]:
        """Return the jobs that are running now."""
        return (
            [] if self._serving is None else [delivery.job for delivery in self._serving.runtime.running_deliveries()]
        )

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
        """Run jobs until SIGINT or SIGTERM, from synchronous code. Uses uvloop if it is installed.

        On the first signal it takes no more jobs and finishes the running ones; a second signal, at least a second
        later, ends the process.
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
        """Start the worker in the background: `async with Worker(queue): ...` runs jobs until the block ends.

        An error of the `on_startup` hook is raised here.
        """
        loop = asyncio.get_running_loop()
        self._started = loop.create_future()
        if self.is_running:
            self._started.set_result(None)
        self._background = loop.create_task(self.run(), name="tampu-worker")
        try:
            await asyncio.wait([self._started, self._background], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._background.cancel()
            raise
        if self._background.done():
            await self._background  # raises the cause: the block would wait for results that never come
        return self

    async def __aexit__(self, *_error: object) -> None:
        """Stop the worker: it finishes its running jobs."""
        await self.close()
        if self._background is not None:
            background, self._background = self._background, None
            await background

    async def _run_until_signal(self) -> None:
        loop = asyncio.get_running_loop()
        closing: set[asyncio.Task[None]] = set()

        def drain() -> None:
            if not closing:
                closing.add(loop.create_task(self.close()))
                loop.call_later(SIGNAL_SECS, give_up_signals)

        def give_up_signals() -> None:
            # The second signal gets its default action: the user does not want to wait.
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(NotImplementedError, ValueError):  # not on this platform, or not the main thread
                loop.add_signal_handler(number, drain)
        await self.run()

    async def _run(self, shutdown: asyncio.Event) -> None:
        await call_hook(self._hooks["startup"])
        self._serving = serving = _Serving(self.config)
        try:
            for queue in self._queues:
                self._serve(queue, serving)
            if self._started is not None and not self._started.done():
                self._started.set_result(None)
            await serving.runtime.run(shutdown)
        finally:
            self._serving = None
            self.abandoned = serving.runtime.abandoned
            await serving.end()
            await call_hook(self._hooks["shutdown"])

    def _serve(self, queue: Queue, serving: _Serving) -> None:
        """Let the runtime serve a queue."""
        config = serving.runtime.config
        provider = self._credential_provider or queue._credential_provider
        link = serving.runtime.link(parse_url(queue.url, credential_provider=provider), queue.name)
        events_kept = config.events_max_stream_len if config.events_enabled else 0
        reporter = ProgressReporter(link.client, queue.keys, worker=config.consumer_id, events_kept=events_kept)
        if self._shutdown is not None:
            reporter.is_stopping = self._shutdown.is_set
        serving.reporters.append(reporter)
        codec = queue.codec if config.codec is None else config.codec
        if self._handler is None:
            dispatcher = Dispatcher(
                queue.tasks,
                serving.threads,
                store_results=config.store_results,
                codec=codec,
                worker=config.consumer_id,
                events_kept=events_kept,
                processes=self._processes,
                jobs_per_process=self._jobs_per_process,
                worker_values=serving.worker_values,
            )
            serving.dispatchers.append(dispatcher)
            find = dispatcher.target_of
        else:
            target = Target(
                self._handler,
                threads=None if is_coroutine_handler(self._handler) else serving.threads,
                open_first=decode_first,
                encode=encode_value if config.store_results else None,
            )
            find = lambda job: target  # noqa: E731
        middleware = (*self._middleware, *queue.middleware)
        # The middleware of the queue runs in the process of a task, which finds the queue by the task's module.
        around = around_runs(middleware), around_runs(self._middleware)
        execution = Execution(find, reporter, self._hooks["before"], self._hooks["after"], *around)
        share = Share(
            weight=self._weights.get(queue.name, 1),
            reserve=self._reserve.get(queue.name, 0),
            limit=self._limit.get(queue.name),
        )
        served = serving.runtime.add(link, queue.name, execution.run, share, codec)
        if on_end := overriding(middleware, "on_end"):
            ends = EndCalls(queue.name, on_end)
            ends.observe_with(served.observers)
            served.finishers.append(ends.finish)
        if self._handler is None:
            served.admission.names = queue.tasks
            reserve = partial(setattr, served.admission, "reserve", dispatcher.reserve)
            if any(task.process for task in queue.tasks.values()):
                reserve()
            if all(task.process for task in queue.tasks.values()):
                # Jobs that wait for a process stay at the server: here they would hold slots of other queues. One is
                # fetched ahead if there is a slot to spare, so that no process has to wait for it.
                limit = self._processes or os.cpu_count() or 1
                limit += config.concurrency > limit + 1
                share.limit = limit if share.limit is None else min(share.limit, limit)
            dispatcher.when_process_task = reserve  # one that is registered later
            if config.run_scheduler and queue.tasks:
                declaring = _declaring(queue, link.client, provider)
                serving.declaring.append(asyncio.get_running_loop().create_task(declaring, name="tampu-schedules"))
            served.call_on_failure(FailureCalls(queue.name, partial(_on_failure_of, queue)))


class _Serving:
    """The parts of one run of a worker."""

    def __init__(self, config: ConsumerConfig) -> None:
        self.runtime = Runtime(config)
        self.threads = DaemonThreads(config.concurrency, "tampu-task")
        self.dispatchers: list[Dispatcher] = []
        self.reporters: list[ProgressReporter] = []
        self.worker_values = WorkerValues()
        #: Store the schedules that tasks declare.
        self.declaring: list[asyncio.Task[None]] = []

    async def end(self) -> None:
        """End its processes, threads and dependencies."""
        for declaring in self.declaring:
            declaring.cancel()
        await asyncio.gather(*self.declaring, return_exceptions=True)
        for dispatcher in self.dispatchers:
            dispatcher.close()
        self.threads.shutdown()
        await self.worker_values.close()
        for reporter in self.reporters:
            await reporter.close()


async def _declaring(queue: Queue, client: Client, credential_provider: Any) -> None:
    """Store the schedules that the queue's tasks declare, however long that takes."""
    is_done = False

    async def declare() -> None:
        nonlocal is_done
        tasks = list(queue.tasks.values())
        # Most workers have nothing to declare or to remove, and need no connection of a producer.
        stored = await client.call("ZMSCORE", queue.keys.repeat, *(task.declared_key for task in tasks))
        if any(task.declared is not None for task in tasks) or any(score is not None for score in stored):
            given: Any = {**vars(queue._config), "credential_provider": credential_provider}
            async with Queue(given.pop("queue_name"), url=queue.url, **given) as own:
                for task in tasks:
                    own.tasks[task.name] = task._on(own).task
                await own.declare_schedules()
        is_done = True

    await supervise(f'schedules of queue "{queue.name}"', declare, lambda: is_done)


def _on_failure_of(queue: Queue, name: str) -> OnFailure | None:
    task = queue.tasks.get(name)
    return None if task is None else task.on_failure


def _queues(queue: Queue | str | Iterable[Queue] | None, handler: Handler | None, url: str | None) -> list[Queue]:
    if handler is not None and not callable(handler):
        raise invalid("handler", handler, "a function that takes a job")
    if isinstance(queue, str):
        if handler is None:
            raise ConfigError("a queue name needs a handler: Worker('emails', handler); or pass a Queue with tasks")
        return [Queue(queue, url=url)]
    queues = [queue] if isinstance(queue, Queue) else list(queue) if isinstance(queue, Iterable) else []
    if not queues or not all(isinstance(served, Queue) for served in queues):
        raise invalid("queue", queue, "a queue name, a Queue or several of them")
    _refuse_twice(queues)
    for served in queues:
        if handler is None and not served.tasks:
            raise ConfigError(f"queue {served.name!r} has no tasks to run; import the module that defines them")
    return queues


def _refuse_twice(queues: Iterable[Queue]) -> None:
    seen: set[tuple[str, str]] = set()
    for served in queues:
        if (served.name, served.url) in seen:
            raise ConfigError(f"queue {served.name!r} is given twice; register all its tasks on one Queue object")
        seen.add((served.name, served.url))


def _by_queue(field: str, given: Mapping[str, int] | None, *, low: int) -> dict[str, int]:
    if given is not None and not isinstance(given, Mapping):
        raise invalid(field, given, "a dict of queue names and whole numbers")
    return {name: check_int(f"{field}[{name!r}]", value, low=low) for name, value in (given or {}).items()}
