"""The queue people use: adds jobs, makes tasks of functions, and answers questions about its jobs.

queue = Queue("emails")

@queue.task(attempts=5, backoff=BackoffSpec.exponential(200))
async def welcome(to: str, subject: str = "hi") -> dict: ...

job = await welcome.add("ada@example.com")
print(await job.result(timeout=10))
"""

from __future__ import annotations

import asyncio
import threading
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar, overload

from tampu.add_arguments import (
    BULK_OPTIONS,
    MISSED_FIRES_ALONE,
    Backoff,
    DelayMs,
    MissedFires,
    Repeat,
    add_options,
    bulk_entry,
    delay_or_instant,
    repeat_pattern,
    repeatable_spec,
)
from tampu.checks import check_job_id, refuse
from tampu.clock import wall_clock_ms
from tampu.engine.callers import is_coroutine_handler
from tampu.engine.config import ProducerConfig
from tampu.engine.producer import Producer
from tampu.errors import ConfigError, Error
from tampu.job_state import JobState, find_job
from tampu.queue_events import QueueEvents
from tampu.redis.settings import parse_url, resolve_url
from tampu.sync_queue import SyncQueue
from tampu.task import CoroutineTask, FunctionTask, Task, TaskContext
from tampu.waiters import Waiters
from tampu.wire.job import Job
from tampu.wire.keys import QueueKeys
from tampu.wire.payload import wrap_bin
from tampu.wire.results import decode_result

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
    from datetime import datetime, timedelta
    from types import TracebackType

    from tampu.engine.dead_letters import ReplayCount
    from tampu.engine.options import AddOptions
    from tampu.task import TaskMaker
    from tampu.wire.job import JobId
    from tampu.wire.repeat import RepeatableMeta, RepeatPattern

P = ParamSpec("P")
R = TypeVar("R")


class _Encoded:
    """A payload that is MessagePack already."""

    __slots__ = ("packed",)

    def __init__(self, packed: bytes) -> None:
        self.packed = packed


class Queue:
    """One queue. Make one per process and queue, and share it between tasks of one event loop; `sync` is for the rest.

    `url` is `redis://`, `rediss://`, `unix://`, `redis+sentinel://`, `redis+cluster://` or `embedded://`; without it
    `TAMPU_URL` counts, then `redis://127.0.0.1:6379`. It connects at the first use.
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
        **settings: Any,
    ) -> None:
        self._url = resolve_url(url, redis_url, tls=tls)
        self._credential_provider = credential_provider
        self._connection_settings = parse_url(self._url, credential_provider=credential_provider)
        refuse_unknown_settings("Queue", settings, ProducerConfig)
        if max_stream_len is not None:
            settings["max_stream_len"] = max_stream_len
        if max_delay_secs is not None:
            settings["max_delay_secs"] = max_delay_secs
        self._config = ProducerConfig(queue_name=name, **settings)
        self._keys = QueueKeys(name)
        self._producer: Producer[Any] = Producer(self._connection_settings, self._config)
        self._producer.encode_with(_encode_or_pass(self._producer))
        self._waiters = Waiters(self._producer.pipe, self._keys, self._follow)
        self._closed = False
        self._sync: SyncQueue | None = None
        self._sync_guard = threading.Lock()
        #: The tasks registered here, by name: what a worker of this queue runs.
        self.tasks: dict[str, Task[Any, Any]] = {}

    # --- what it is

    @property
    def name(self) -> str:
        """The queue's name."""
        return self._keys.queue_name

    @property
    def url(self) -> str:
        """The URL it connects to."""
        return self._url

    @property
    def keys(self) -> QueueKeys:
        """The names of its keys."""
        return self._keys

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""
        return self._closed

    @property
    def producer(self) -> Producer[Any]:
        """The producer underneath."""
        return self._producer

    @property
    def sync(self) -> SyncQueue:
        """The same calls for code without an event loop; any number of threads may use it."""
        if self._sync is None:
            twin = Queue(self.name, url=self._url, credential_provider=self._credential_provider, **_own(self._config))
            with self._sync_guard:  # of several threads that ask first, all get the same
                self._sync = self._sync or SyncQueue(twin, self.tasks)
        return self._sync

    def __repr__(self) -> str:
        return f"Queue({self.name!r})"

    async def close(self) -> None:
        """Send what was added and close the connections."""
        if self._closed:
            return
        self._closed = True
        await self._waiters.close()
        await self._producer.close()
        if self._sync is not None:
            self._sync.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # --- tasks

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
            task = kind(self, function, **options)
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
        payload = _Encoded(packed)
        if delay is not None:
            added = await self._producer.add_in_with_options(delay, payload, options)
        elif run_at is not None:
            added = await self._producer.add_at_with_options(run_at, payload, options)
        else:
            added = await self._producer.add_with_options(payload, options)
        return self._task_job(added, task, packed)

    async def _add_tasks(self, task: Task[Any, Any], packed: list[bytes]) -> list[Job[Any]]:
        ids = await self._producer.add_bulk_with_options([_Encoded(one) for one in packed], task.add_options)
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
            repeatable_spec(task.name, _Encoded(packed), pattern, missed_fires, **bounds)
        )

    def _task_job(self, job_id: str, task: Task[Any, Any], packed: bytes) -> Job[Any]:
        job: Job[Any] = Job.from_wire(job_id, wrap_bin(packed), wall_clock_ms(), 0, None, task.name)
        job._context = TaskContext(self, task)
        return job

    # --- adding

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
        """Add one job under `name`. `job.id.is_new` tells whether an explicit `job_id` was new."""
        if repeat is not None:
            return await self.upsert_repeatable_job(
                name, data, repeat=repeat_pattern(repeat), missed_fires=missed_fires
            )
        if missed_fires is not None:
            raise ConfigError(MISSED_FIRES_ALONE)
        seconds, instant = delay_or_instant(delay_ms, delay)
        options = add_options(name, job_id, attempts, backoff)
        return self._added(await self._send(data, options, seconds, instant), name, data)

    async def _send(self, data: Any, options: AddOptions, seconds: float, instant: datetime | None) -> JobId:
        if instant is not None:
            return await self._producer.add_at_with_options(instant, data, options)
        if seconds > 0:
            return await self._producer.add_in_with_options(seconds, data, options)
        return await self._producer.add_with_options(data, options)

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
        """`add` with an id that is required: the same id is not added again for `dedup_ttl_secs`."""
        if job_id is None:
            raise refuse("job_id", job_id, "text that is not blank")
        return await self.add(
            name,
            data,
            delay_ms=delay_ms,
            delay=delay,
            attempts=attempts,
            backoff=backoff,
            job_id=job_id,
            repeat=repeat,
        )

    async def add_bulk(self, jobs: Iterable[Mapping[str, Any]]) -> list[Job[Any]]:
        """Add many jobs: dicts with `name`, `data`, and what else `add` takes. All are checked before any is sent.

        Should some be refused all the same (a full queue), the error's `accepted` names those that got in.
        """
        entries = [bulk_entry(job) for job in jobs]
        if not any(entry.get(option) is not None for entry in entries for option in BULK_OPTIONS):
            named = [(entry.get("name") or "", entry["data"]) for entry in entries]
            ids = await self._producer.add_bulk_named(named)
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
        """An add that is checked and encoded and only has to be sent."""
        name = name or ""
        payload = _Encoded(self._producer.encode(data))
        if repeat is not None:
            spec = repeatable_spec(name, payload, repeat, missed_fires)

            async def register() -> Job[Any]:
                return self._added(await self._producer.upsert_repeatable(spec), name, data)

            return register
        if missed_fires is not None:
            raise ConfigError(MISSED_FIRES_ALONE)
        seconds, instant = delay_or_instant(delay_ms, delay)
        options = add_options(name, job_id, attempts, backoff)

        async def send() -> Job[Any]:
            return self._added(await self._send(payload, options, seconds, instant), name, data)

        return send

    def _added(self, job_id: str, name: str, data: Any) -> Job[Any]:
        # Not Job(...): what was sent a moment ago need not be checked and encoded again.
        job: Job[Any] = Job.from_wire(job_id, b"", wall_clock_ms(), 0, None, name)
        job._payload = data
        job._context = self
        return job

    async def cancel_delayed(self, job_id: str) -> bool:
        """Cancel a job that waits for its time or its retry; False when it is not waiting."""
        return await self._producer.cancel_delayed(job_id)

    # --- repeatable jobs

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
        """Register a repeatable job, or replace it; the job's id is the key it is registered under.

        `attempts`, `backoff` and `job_id` are accepted and not used: the wire format has no place for them.
        """
        del attempts, backoff, job_id
        bounds = {"limit": limit, "start_after_ms": start_after_ms, "end_before_ms": end_before_ms}
        spec = repeatable_spec(name, data, repeat, missed_fires, **bounds)
        return self._added(await self._producer.upsert_repeatable(spec), name, data)

    async def get_repeatable_jobs(self, limit: int = 100) -> list[RepeatableMeta]:
        """Up to `limit` repeatable jobs, the next to fire first."""
        return await self._producer.list_repeatable(limit)

    async def remove_repeatable_by_key(self, key: str) -> bool:
        """Remove a repeatable job; whether it was there."""
        return await self._producer.remove_repeatable(key)

    # --- dead letters

    async def peek_dlq(self, limit: int = 20, **wanted: Any) -> list[dict[str, Any]]:
        """Up to `limit` dead letters as dicts, oldest first; filters are `ids`, `reason`, `name`, `older_than`."""
        return [asdict(entry) for entry in await self._producer.peek_dlq(limit, **wanted)]

    async def replay_dlq(self, limit: int = 100, **wanted: Any) -> ReplayCount:
        """Move up to `limit` dead letters back into the queue; how many were moved."""
        return await self._producer.replay_dlq(limit, **wanted)

    async def remove_dlq(self, limit: int = 100, **wanted: Any) -> int:
        """Throw away up to `limit` dead letters; how many there were."""
        return await self._producer.remove_dlq(limit, **wanted)

    # --- results and states

    async def get_job_result(self, job_id: str) -> Any:
        """What the handler returned; None when it returned None, or there is no result (yet, or any more)."""
        packed = await self._producer.get_result(job_id)
        return None if packed is None else decode_result(packed)

    async def get_job_result_bulk(self, job_ids: Sequence[str]) -> list[Any]:
        """Several results at once, in the order of the ids."""
        results = await self._producer.get_result_bulk(list(job_ids))
        return [None if packed is None else decode_result(packed) for packed in results]

    async def get_job(self, job_id: str) -> JobState:
        """Where a job is: waiting, delayed until when, running where, done with what, dead and why."""
        return await find_job(self._producer.ready_pipe(), self._keys, check_job_id(job_id))

    async def wait_for_result(self, job_id: str, timeout_secs: float) -> Any:
        """What a job's handler returns, once it has; `Job.result` is the usual way to ask."""
        self._producer.ready_pipe()
        return await self._waiters.wait(job_id, timeout_secs)

    def report_progress(self, job: Job[Any], fraction: float, note: str) -> None:
        """Only a running job makes progress."""
        raise RuntimeError("this job is not running here: progress() is for a handler's own job")

    def events(self, *, last_event_id: str = "$") -> QueueEvents:
        """The queue's events from now on, or from an id."""
        return QueueEvents(
            self.name, url=self._url, last_event_id=last_event_id, credential_provider=self._credential_provider
        )

    def _follow(self) -> QueueEvents:
        return self.events()

    # --- the whole queue

    async def pause(self) -> None:
        """Have all workers stop taking jobs, within about a second; what runs goes on."""
        await self._producer.ready_pipe().call("SET", self._keys.paused, "1")

    async def resume(self) -> bool:
        """Have the workers go on; False when the queue was not paused."""
        return bool(await self._producer.ready_pipe().call("DEL", self._keys.paused))

    async def is_paused(self) -> bool:
        """Whether it is paused."""
        return bool(await self._producer.ready_pipe().call("EXISTS", self._keys.paused))

    async def purge(self, *, waiting: bool = True, delayed: bool = True) -> int:
        """Delete jobs that wait, now or for their time; running ones, dead letters and repeatables stay. How many."""
        return await self._producer.purge(waiting=waiting, delayed=delayed)


def refuse_unknown_settings(owner: str, settings: Mapping[str, Any], config: type[Any]) -> None:
    """`TypeError`, as for any argument that a function does not have."""
    allowed = {field.name for field in fields(config)} - {"queue_name"}
    for name in settings:
        if name not in allowed:
            raise TypeError(f"{owner}() got an unexpected setting {name!r}; see {config.__name__} for those it has")


def _own(config: ProducerConfig) -> dict[str, Any]:
    """The settings of a config, for another queue like it."""
    return {name: value for name, value in vars(config).items() if name != "queue_name"}


def _encode_or_pass(producer: Producer[Any]) -> Callable[[Any], bytes]:
    """Values are encoded as ever; a task's arguments are encoded already."""
    encode = producer.encode

    def encode_or_pass(value: Any) -> bytes:
        return value.packed if type(value) is _Encoded else encode(value)

    return encode_or_pass
