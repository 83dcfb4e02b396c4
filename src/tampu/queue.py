"""The queue that applications use: adds jobs, turns functions into tasks, and looks up jobs and results.

queue = Queue("emails")

@queue.task(attempts=5, backoff=timedelta(seconds=1))
async def welcome(to: str, subject: str = "hi") -> dict: ...

job = await welcome.add("ada@example.com")
print(await job.result(timeout=10))
"""

from __future__ import annotations

import asyncio
import difflib
import logging
import threading
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar, overload

from tampu.base.checks import check_bool, check_delay_ms, check_int, check_job_id, invalid, shown
from tampu.base.clock import wall_clock_ms
from tampu.config import ProducerConfig, settings_of
from tampu.errors import ConfigError, Error
from tampu.events import QueueEvents, Waiters
from tampu.inspect.jobs import LISTED_STATES, JobState
from tampu.produce.options import (
    BULK_OPTIONS,
    MISSED_FIRES_ALONE,
    Backoff,
    DelayMs,
    MissedFires,
    Repeat,
    add_options,
    bulk_entry,
    delay_or_instant,
    repeatable_spec,
    retry_over,
    with_key,
)
from tampu.produce.producer import Producer
from tampu.redis.settings import parse_url, resolve_url
from tampu.task import Task, TaskContext, task_of
from tampu.wire.extras import check_headers
from tampu.wire.job import Job
from tampu.wire.keys import QueueKeys
from tampu.wire.limits import Limit, limit_fields, own_field
from tampu.wire.payload import decode_result, is_no_result

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
    from datetime import datetime, timedelta
    from typing import Unpack

    from tampu.config import ProducerSettings
    from tampu.consume.execute import AroundRun
    from tampu.consume.handlers import HandlerOutcome
    from tampu.inspect.admin import CancelOutcome
    from tampu.inspect.dead_letters import DlqQuery, LetterCluster, ReplayCount
    from tampu.inspect.jobs import ListedState
    from tampu.inspect.snapshot import WorkerInfo
    from tampu.middleware import Middleware
    from tampu.sync import SyncQueue
    from tampu.task import CoroutineTask, FunctionTask, TaskMaker, TaskOptions
    from tampu.wire.codec import PayloadCodec
    from tampu.wire.limits import Limits
    from tampu.wire.repeat import RepeatableMeta, RepeatPattern

P = ParamSpec("P")
R = TypeVar("R")

logger = logging.getLogger("tampu.queue")

#: Names without a task that are remembered, so that each is logged once; others are not logged.
MAX_UNKNOWN_NAMES = 1000


class Queue:
    """A queue. Create one object per queue and process, and share it within one event loop.

        queue = Queue("emails")

        @queue.task(attempts=5)
        async def welcome(to: str) -> None: ...

        await welcome.add("ada@example.com")

    It connects on first use. From synchronous code, use `queue.sync`.

    Args:
        name: Name of the queue.
        url: Server URL: `redis://`, `rediss://`, `unix://`, `redis+sentinel://`, `redis+cluster://` or `embedded://`.
            Defaults to `TAMPU_URL`, then to `redis://127.0.0.1:6379`.
        redis_url: Another name for `url`.
        tls: Connect with TLS.
        max_stream_len: Maximum length of the stream. Defaults to 1,000,000.
        max_delay_secs: Maximum delay in seconds; 0 = no limit. Defaults to 30 days.
        credential_provider: Callable or redis-py `CredentialProvider` that returns the credentials.
        codec: Encrypts or signs payloads and results: `EncryptedCodec` or `SignedCodec`.
        strict: Refuse to add a job by the name of a task that this queue does not have. By default such an add is
            logged as a warning, once per name: the task may be defined in another program.
        middleware: `Middleware` objects around the adds and runs of its jobs, the first one outermost.
        headers: Headers of all jobs added by this object; `task.using(headers=...)` adds to them.
        **settings: Any other field of `ProducerConfig`.

    Raises:
        ConfigError: A setting or the URL is invalid.
    """

    def __init__(
        self,
        name: str,
        *,
        url: str | None = None,
        redis_url: str | None = None,
        tls: bool = False,
        max_stream_len: int | None = None,
        max_delay_secs: int | None = None,
        credential_provider: Any = None,
        codec: PayloadCodec | None = None,
        strict: bool = False,
        middleware: Iterable[Middleware] = (),
        headers: Mapping[str, str] | None = None,
        **settings: Unpack[ProducerSettings],
    ) -> None:
        #: URL of the server.
        self.url = resolve_url(url, redis_url, tls=tls)
        self._credential_provider = credential_provider
        #: Address and credentials of the server.
        self.connection_settings = parse_url(self.url, credential_provider=credential_provider)
        limits = {"max_stream_len": max_stream_len, "max_delay_secs": max_delay_secs}
        self._config = settings_of("Queue", ProducerConfig, settings, queue_name=name, codec=codec, **limits)
        self._strict = check_bool("strict", strict)
        self._unknown_names: set[str] = set()
        #: Names of its keys on the server.
        self.keys = QueueKeys(name)
        #: Codec of the queue's payloads and results.
        self.codec = codec
        #: The middleware of the adds and runs of its jobs.
        self.middleware: tuple[Middleware, ...] = ()
        self.headers = {} if headers is None else check_headers(headers)
        if middleware:
            from tampu.middleware import check_middleware  # here: it needs the parts of a worker, most programs do not

            self.middleware = check_middleware(middleware)
        self._renew()
        self._closed = False
        self._sync: SyncQueue | None = None
        self._sync_guard = threading.Lock()
        #: The tasks registered on this queue, by name; a worker of this queue runs them.
        self.tasks: dict[str, Task[Any, Any]] = {}

    @property
    def name(self) -> str:
        """Name of the queue."""
        return self.keys.queue_name

    @property
    def is_closed(self) -> bool:
        """True after `close`, until the queue is used again."""
        return self._closed and not self.producer.is_used

    @property
    def sync(self) -> SyncQueue:
        """The methods of this queue for synchronous code. It can be shared between threads."""
        if self._sync is None:
            from tampu.sync import SyncQueue  # imported here, because it derives its methods from this class

            settings: Any = {name: value for name, value in vars(self._config).items() if name != "queue_name"}
            provider = self._credential_provider
            settings |= {"middleware": self.middleware, "headers": self.headers}
            twin = Queue(self.name, url=self.url, credential_provider=provider, strict=self._strict, **settings)
            twin.tasks = self.tasks
            with self._sync_guard:  # several threads may be first: all must get the same object
                self._sync = self._sync or SyncQueue(twin)
        return self._sync

    def __repr__(self) -> str:
        return f"Queue({self.name!r})"

    async def close(self) -> None:
        """Send all jobs added so far and close the connections. The next use of the queue opens it again."""
        if not self.is_closed:
            self._closed = True
            producer, waiters = self.producer, self._waiters
            self._renew()
            await waiters.close()
            await producer.close()
        if self._sync is not None:
            self._sync.close()

    def _renew(self) -> None:
        #: The producer that adds its jobs.
        self.producer: Producer[Any] = self._new_producer()
        self._waiters = Waiters(self.producer._admin, self.events)

    def _new_producer(self) -> Producer[Any]:
        if self.middleware or self.headers:
            from tampu.middleware import ObservedProducer, overriding

            on_add = overriding(self.middleware, "on_add")
            if self.headers or on_add:
                return ObservedProducer(self.connection_settings, self._config, on_add, self.headers)
        return Producer(self.connection_settings, self._config)

    @property
    def around_runs(self) -> Sequence[AroundRun]:
        """What its middleware runs around each run of a job."""
        if not self.middleware:
            return ()
        from tampu.middleware import around_runs

        return around_runs(self.middleware)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    def events(self, *, last_event_id: str = "$") -> QueueEvents:
        """Return the queue's events from now on, or after the event with the ID `last_event_id`."""
        provider = self._credential_provider
        return QueueEvents(self.name, url=self.url, last_event_id=last_event_id, credential_provider=provider)

    # --- tasks

    @overload
    def task(  # type: ignore[overload-overlap]  # the first overload that matches is used
        self, function: Callable[P, Coroutine[Any, Any, R | HandlerOutcome]], /
    ) -> CoroutineTask[P, R]: ...
    @overload
    def task(self, function: Callable[P, R | HandlerOutcome], /) -> FunctionTask[P, R]: ...
    @overload
    def task(self, /, **options: Unpack[TaskOptions]) -> TaskMaker: ...

    def task(self, function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
        """Register a function as a task of this queue. Use it as a decorator, with or without options.

            @queue.task(attempts=5, backoff=BackoffSpec.exponential(timedelta(seconds=1)), timeout=30)
            async def welcome(to: str, subject: str = "hi") -> None: ...

        Args:
            function: The function. `async def` runs on the event loop, `def` in a thread.
            **options: `name` of the task, by default the function's name; `attempts`, the maximum number of attempts,
                and `backoff`, the delay between them (a timedelta, a `BackoffSpec` or a dict of its fields), which are
                stored with each job; `timeout`, the maximum duration of a run in seconds, and `soft_timeout`, after
                which `SoftTimeout` is raised inside it; `process=True` to run it in a separate process, for CPU-bound
                work; `retry_on`, the exceptions that are retried, and `no_retry_on`,
                those that are not; or `retry`, a function of the exception and the attempt number that returns
                True, False or the time to wait; `on_failure`, a task or a function that is called with a `FailedJob`
                once a job has been dead-lettered; `key`, a function of the task's arguments that returns the key by
                which limits count a job, such as `key=lambda order: order.tenant`, see `limit`; `cron`, a cron
                expression with its time zone `tz`, or `every`, an interval (a timedelta or seconds): workers keep this
                schedule, see `declare_schedules`.

        Returns:
            The task. Calling it runs the function directly; `task.add(...)` adds a job.

        Raises:
            ConfigError: The function or an option is invalid, or the queue already has a task with this name.
        """

        def register(function: Callable[..., Any]) -> Task[Any, Any]:
            task = task_of(self, function, **options)
            if task.name in self.tasks:
                raise ConfigError(
                    f"queue {self.name!r} already has a task named {task.name!r}; choose another with name=..."
                )
            self.tasks[task.name] = task
            return task

        return register if function is None else register(function)

    # --- adding by name

    async def add(
        self,
        name: str,
        data: Any,
        *,
        delay_ms: DelayMs | None = None,
        delay: timedelta | None = None,
        attempts: int | None = None,
        backoff: Backoff | None = None,
        job_id: str | None = None,
        repeat: Repeat | None = None,
        missed_fires: MissedFires | None = None,
    ) -> Job[Any]:
        """Add one job by name.

        Args:
            name: Name of the job; the worker runs the task with this name.
            data: Payload: any value that MessagePack can encode. For a task of this queue, a dict of its arguments,
                which are checked as in `task.add`.
            delay_ms: Run it after this many milliseconds, or at a datetime.
            delay: Run it after this timedelta.
            attempts: Maximum number of attempts. Defaults to the task's, then to the worker's `max_attempts`.
            backoff: Delay between attempts: a timedelta or milliseconds, a `BackoffSpec` or a dict of its fields.
                Defaults to the task's, then to the worker's `retry`.
            job_id: Explicit ID; a second add with the same ID within `dedup_ttl_secs` is ignored.
            repeat: Register a schedule with this pattern instead of adding a job.
            missed_fires: What the schedule does about fires missed while no worker was running.

        Returns:
            The job. `job.id.is_new` is False if a job with the same explicit ID was added before.

        Raises:
            ConfigError: An argument is invalid, or `strict` is set and the queue has no such task.
            TypeError: The payload does not fit the task.
            EncodeError: The payload cannot be encoded.
            QueueFullError: The queue has reached its `max_stream_len`.
            RedisError: The server cannot be reached.
        """
        return await self._prepared(data, name, delay_ms, delay, attempts, backoff, job_id, repeat, missed_fires)()

    async def add_unique(
        self,
        name: str,
        data: Any,
        *,
        job_id: str,
        delay_ms: DelayMs | None = None,
        delay: timedelta | None = None,
        attempts: int | None = None,
        backoff: Backoff | None = None,
        repeat: Repeat | None = None,
    ) -> Job[Any]:
        """Add one job unless a job with this ID was added within `dedup_ttl_secs`. Takes the same options as `add`."""
        if job_id is None:
            raise invalid("job_id", job_id, "text that is not blank")
        return await self._prepared(data, name, delay_ms, delay, attempts, backoff, job_id, repeat)()

    async def add_bulk(self, jobs: Iterable[Mapping[str, Any]]) -> list[Job[Any]]:
        """Add many jobs, given as dicts with `name`, `data` and any option of `add`.

        All jobs are checked before any is sent. If the server then refuses some because the queue is full, the
        error's `accepted` holds the IDs of the jobs that were added.
        """
        entries = [bulk_entry(job) for job in jobs]
        # Without tasks there is nothing to check a job against: all go into one call.
        if (
            not self.tasks
            and type(self.producer) is Producer
            and not any(entry.get(option) is not None for entry in entries for option in BULK_OPTIONS)
        ):
            named = [(entry.get("name") or "", entry["data"]) for entry in entries]
            ids = await self.producer.add_bulk_named(named)
            return [self._added(job_id, name, data) for job_id, (name, data) in zip(ids, named, strict=True)]
        sending = [self._prepared(**entry) for entry in entries]
        answers = await asyncio.gather(*(send() for send in sending), return_exceptions=True)
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        if errors:
            if isinstance(errors[0], Error):
                errors[0].accepted = [job.id for job in answers if isinstance(job, Job)]
            raise errors[0]
        return [job for job in answers if isinstance(job, Job)]

    def _prepared(
        self,
        data: Any,
        name: str | None = None,
        delay_ms: DelayMs | None = None,
        delay: timedelta | None = None,
        attempts: int | None = None,
        backoff: Backoff | None = None,
        job_id: str | None = None,
        repeat: Repeat | None = None,
        missed_fires: MissedFires | None = None,
    ) -> Callable[[], Awaitable[Job[Any]]]:
        """Check and encode a job; the returned function sends it."""
        name = "" if name is None else name
        packed = self._encoded(name, data)
        if repeat is not None:
            spec = repeatable_spec(name, None, repeat, missed_fires)

            async def register() -> Job[Any]:
                key = await self.producer.register_packed(spec, packed, keep_identical=False)
                return self._added(key, name, data)

            return register
        if missed_fires is not None:
            raise ConfigError(MISSED_FIRES_ALONE)
        seconds, instant = delay_or_instant(delay_ms, delay)
        options = add_options(name, job_id, attempts, backoff)
        task = self.tasks.get(name)
        if task is not None:
            options = replace(options, retry=retry_over(options.retry, task.add_options.retry))
            options = with_key(options, getattr(packed, "key", None))

        async def send() -> Job[Any]:
            added = await self.producer.add_packed(packed, options, delay=seconds or None, run_at=instant)
            return self._added(added, name, data)

        return send

    def _encoded(self, name: str, data: Any) -> bytes:
        """Encode the payload of a job added by name. For a task of this queue, it must be the task's arguments."""
        task = self.tasks.get(name)
        if task is None:
            if self.tasks:
                self._complain_of(name)
            return self.producer.encode(data)
        if not isinstance(data, Mapping):
            raise TypeError(
                f"task {name!r}: the payload must be a dict of the task's arguments, got {shown(data)}; "
                "nothing was sent"
            )
        return task.arguments.encode((), dict(data))

    def _complain_of(self, name: str) -> None:
        """Raise, or log once, that no task has this name. The task may be defined in another program."""
        if not self._strict and name in self._unknown_names:
            return
        close = difflib.get_close_matches(name, self.tasks, n=1)
        text = f"queue {self.name!r} has no task named {name!r} in this program"
        hint = f"; did you mean {close[0]!r}?" if close else f"; its tasks are {', '.join(sorted(self.tasks)[:10])}"
        if self._strict:
            raise ConfigError(f"{text}{hint}")
        if len(self._unknown_names) < MAX_UNKNOWN_NAMES:
            self._unknown_names.add(name)
            logger.warning("%s%s", text, hint)

    def _added(self, job_id: str, name: str, data: Any) -> Job[Any]:
        # Not Job(...): the payload has already been checked and encoded.
        job: Job[Any] = Job.from_wire(job_id, b"", wall_clock_ms(), 0, None, name)
        job._payload = data
        task = self.tasks.get(name)
        job._context = self if task is None else TaskContext(self, task)
        return job

    async def cancel(self, job_id: str, *, reason: str = "") -> CancelOutcome:
        """Cancel a job. `job.result()` of a cancelled job raises `JobCancelled`.

        | returned | meaning |
        |---|---|
        | `"cancelled"` | it was delayed, or waited for a retry, and is removed |
        | `"requested"` | it is waiting or running: its worker drops or cancels it, within about two seconds |
        | `"finished"` | too late: it is done or a dead letter |
        | `"unknown"` | no such job: it finished without storing a result, or never existed |

        A running `async def` task gets `asyncio.CancelledError`, and a `process=True` task is killed. A `def` task in
        a thread continues until it calls `current_job().check_cancelled()`. `reason` is at most 500 characters.
        """
        return await self.producer.admin.cancel(job_id, reason)

    async def cancel_delayed(self, job_id: str) -> bool:
        """Cancel a delayed job, or one that waits for a retry. Return False if there is no such delayed job."""
        return await self.producer.cancel_delayed(job_id)

    # --- schedules

    async def upsert_repeatable_job(
        self,
        name: str,
        data: Any,
        *,
        repeat: RepeatPattern,
        limit: int | None = None,
        start_after_ms: int | None = None,
        end_before_ms: int | None = None,
        attempts: int | None = None,
        backoff: Backoff | None = None,
        job_id: str | None = None,
        missed_fires: MissedFires | None = None,
    ) -> Job[Any]:
        """Create or replace a schedule. The ID of the returned job is the key of the schedule.

        Args:
            name: Name of the jobs.
            data: Payload of the jobs.
            repeat: When to fire: `RepeatPattern.cron(...)` or `RepeatPattern.every(...)`.
            limit: Maximum number of fires.
            start_after_ms: Do not fire up to this epoch time, in milliseconds.
            end_before_ms: Do not fire after this epoch time, in milliseconds.
            attempts: Accepted and ignored, like `backoff` and `job_id`: the wire format does not store them.
            backoff: Ignored.
            job_id: Ignored.
            missed_fires: What to do about fires missed while no worker was running. Defaults to skipping them.
        """
        del attempts, backoff, job_id
        bounds = {"limit": limit, "start_after_ms": start_after_ms, "end_before_ms": end_before_ms}
        spec = repeatable_spec(name, None, repeat, missed_fires, **bounds)
        key = await self.producer.register_packed(spec, self._encoded(name, data), keep_identical=False)
        return self._added(key, name, data)

    async def declare_schedules(self) -> None:
        """Store the schedules that the tasks declare, `@queue.task(cron="0 3 * * *")`. Workers do this at their start.

        A changed one replaces the stored one; one that its task no longer declares is removed. Schedules that were
        created in other ways, and those of tasks that this queue object does not have, are left alone.
        """
        for task in list(self.tasks.values()):
            if task.declared is not None:
                await task.schedule(task.declared, key=task.declared_key)
            elif await self.producer.admin.packed_spec(task.declared_key) is not None:
                await self.remove_schedule(task.declared_key)

    async def schedules(self, limit: int = 100) -> list[RepeatableMeta]:
        """Return up to `limit` schedules, soonest first."""
        return await self.producer.list_repeatable(limit)

    async def remove_schedule(self, key: str) -> bool:
        """Remove a schedule. Return False if there is none with this key."""
        return await self.producer.remove_repeatable(key)

    async def get_repeatable_jobs(self, limit: int = 100) -> list[RepeatableMeta]:
        """Alias of `schedules`."""
        return await self.schedules(limit)

    async def remove_repeatable_by_key(self, key: str) -> bool:
        """Alias of `remove_schedule`."""
        return await self.remove_schedule(key)

    # --- results and states

    async def get_job_result(self, job_id: str) -> Any:
        """Return the return value of a job's handler, or None if it returned None or no result is stored.

        Raises `ResultNotStored` if the job succeeded, but its result could not be stored.
        """
        packed = await self.producer.get_result(job_id)
        return None if packed is None else decode_result(packed)

    async def get_job_result_bulk(self, job_ids: Sequence[str]) -> list[Any]:
        """Return the results of several jobs in one call, in the order of the IDs; None where no result is stored."""
        results = await self.producer.get_result_bulk(list(job_ids))
        return [None if packed is None or is_no_result(packed) else decode_result(packed) for packed in results]

    async def get_job(self, job_id: str) -> JobState:
        """Return the state of a job: waiting, delayed, running, done, dead or cancelled, with its details.

        If it is not waiting or done, the dead letters are searched, newest first: 50,000 of them take about 0.6 s.
        """
        return await self.producer.admin.job(check_job_id(job_id))

    async def jobs(
        self,
        state: ListedState = "waiting",
        *,
        name: str | None = None,
        older_than: timedelta | float | None = None,
        limit: int = 100,
    ) -> list[JobState]:
        """Return up to `limit` jobs that are "waiting", "running", "delayed" or "dead", oldest first.

        `older_than` (a timedelta or seconds) is the minimum time since a running job started, a dead one failed, or any
        other was added. A large queue is read in steps until `limit` jobs match.
        """
        if state not in LISTED_STATES:
            raise invalid("state", state, "one of " + ", ".join(LISTED_STATES))
        older_than_ms = None if older_than is None else check_delay_ms(older_than, "older_than")
        admin = self.producer.admin
        check_int("limit", limit, low=1)
        return await admin.jobs(state, name=name, older_than_ms=older_than_ms, limit=limit)

    async def workers(self) -> list[WorkerInfo]:
        """Return the live workers of this queue, with host, process, version and running jobs."""
        return await self.producer.admin.workers()

    async def wait_for_result(self, job_id: str, timeout_secs: float = 30.0) -> Any:
        """Wait up to `timeout_secs` for a job to finish and return its result. `Job.result` is the usual way.

        Raises:
            JobFailed: The job was dead-lettered.
            JobCancelled: The job was cancelled.
            ResultNotStored: The job succeeded, but its result could not be stored.
            TimeoutError: The job did not finish in time.
        """
        self.producer.ready_client()
        return await self._waiters.wait(job_id, timeout_secs)

    # --- dead letters

    async def peek_dlq(self, limit: int = 20, **query: Unpack[DlqQuery]) -> list[dict[str, Any]]:
        """Return up to `limit` dead letters as dicts, oldest first, or with `newest=True` newest first.

        Filter by `ids`, `cluster`, `reason`, `name`, `error_type`, `match` (text in the error), `older_than` and
        `newer_than`.
        """
        return [asdict(entry) for entry in await self.producer.peek_dlq(limit, **query)]

    async def dlq_summary(self) -> list[LetterCluster]:
        """Return the dead letters grouped by task, reason and error, the largest group first."""
        return await self.producer.admin.dlq_summary()

    async def replay_dlq(self, limit: int = 100, **query: Unpack[DlqQuery]) -> ReplayCount:
        """Move up to `limit` dead letters back into the queue and return how many. Takes the filters of `peek_dlq`."""
        return await self.producer.replay_dlq(limit, **query)

    async def remove_dlq(self, limit: int = 100, **query: Unpack[DlqQuery]) -> int:
        """Delete up to `limit` dead letters and return how many. Takes the filters of `peek_dlq`."""
        return await self.producer.remove_dlq(limit, **query)

    # --- the whole queue

    async def pause(
        self, *, task: str | None = None, reason: str = "", until: datetime | timedelta | float | None = None
    ) -> None:
        """Tell all workers to stop taking jobs; it takes effect within about a second. Running jobs finish.

        Args:
            task: Pause only this task: workers put its jobs back, which uses up no attempt. Once it is resumed, they
                run within a minute, or a quarter of the length of the pause if that is shorter.
            reason: Shown by `tampu inspect`, `tampu doctor` and `tampu job why`.
            until: When to resume automatically: a datetime (naive means UTC), or a timedelta or seconds from now.
        """
        await self.producer.admin.pause(task, reason, until)

    async def pause_reason(self, *, task: str | None = None) -> str | None:
        """Return why the queue, or this task, is paused: "" if no reason was given, None if it is not paused."""
        return await self.producer.admin.pause_reason(task)

    async def paused_tasks(self) -> dict[str, str]:
        """Return the names of paused tasks, each with its reason."""
        return {name: pause.reason for name, pause in (await self.producer.admin.paused_tasks()).items()}

    async def resume(self, *, task: str | None = None) -> bool:
        """Resume the queue, or only this task. Return False if it was not paused."""
        return await self.producer.admin.resume(task)

    async def is_paused(self) -> bool:
        """Return True while the queue is paused."""
        return await self.pause_reason() is not None

    async def limit(
        self,
        *,
        key: str | None = None,
        task: str | None = None,
        concurrency: float | None = None,
        rate: str | None = None,
        burst: int | None = None,
        weight: float | None = None,
        ordered: bool | None = None,
        per_key: Limit | None = None,
    ) -> None:
        """Limit how many jobs run, in all workers; it takes effect at once.

            await queue.limit(concurrency=200, per_key=Limit(concurrency=2, rate="100/m"))
            await queue.limit(key="acme", concurrency=10, weight=3)
            await queue.limit(task="charge", rate="10/s")

        Without `key` and `task` it limits the queue; a job counts for the limits of its queue, task and key. Keys that
        wait take turns. A call replaces the whole limit of its queue, task or key: the last call wins. While it has
        limits, only workers of a version with limits run the jobs of a queue.

        Args:
            key: Limit only this key, with what it does not set inherited from `per_key`. Jobs get their key from
                `@queue.task(key=...)` or `task.using(key=...)`, by default the name of their task.
            task: Limit only this task.
            concurrency: Jobs that run at the same time; 0 = none start.
            rate: Starts per unit of time, such as "10/s" or "100/m", evenly spaced.
            burst: Starts that may follow each other at once after a pause, within the rate.
            weight: Share of the key beside others that wait. Defaults to 1.
            ordered: Run one job of the key at a time, in the order of the adds, also through retries.
            per_key: Limit of every key without its own.

        Raises:
            ConfigError: A value is not allowed.
        """
        limit = Limit(concurrency=concurrency, rate=rate, burst=burst, weight=weight, ordered=ordered)
        fields = limit_fields(limit, key=key, task=task, per_key=per_key)
        given = {"key": key, "task": task, **limit.as_dict(), "per_key": per_key and per_key.as_dict()}
        detail = ", ".join(f"{name}={value}" for name, value in given.items() if value is not None)
        await self.producer.admin.limit(fields, detail)

    async def limits(self) -> Limits:
        """Return the limits of the queue, of every key, and of single keys and tasks."""
        return await self.producer.admin.limits()

    async def clear_limits(self, *, key: str | None = None, task: str | None = None) -> None:
        """Remove the limit of a key or a task; without either, remove all limits of the queue.

        Once all are removed and the jobs that wait have started, all workers read the queue again.
        """
        if key is not None and task is not None:
            raise ConfigError("pass key or task, not both")
        field = own_field(key, task)
        await self.producer.admin.limit({field: b""} if field else {}, f"clear {field[1:]}".rstrip())

    async def purge(self, *, waiting: bool = True, delayed: bool = True) -> int:
        """Delete waiting and delayed jobs and return how many. Their explicit IDs can be added again.

        Running jobs, dead letters, schedules, results and events are kept, and so are jobs added during the purge.
        """
        return await self.producer.purge(waiting=waiting, delayed=delayed)

    async def drain(self, timeout: timedelta | float | None = None) -> None:  # noqa: ASYNC109 - as in `Job.result`
        """Wait until no job is waiting, running or due. Raises `TimeoutError` after `timeout`.

        Does not wait for jobs that are delayed to a later time. Stop your producers first: a queue to which jobs are
        added all the time never drains.
        """
        timeout_secs = None if timeout is None else check_delay_ms(timeout, "timeout") / 1000
        await self.producer.admin.drain(timeout_secs)

    async def delete(self, *, force: bool = False) -> int:
        """Delete the queue with everything in it, results and events too. Return how many keys were deleted.

        Raises `ConfigError` if the queue still has jobs, dead letters, schedules or live workers, unless `force`.
        """
        return await self.producer.admin.delete(force=force)
