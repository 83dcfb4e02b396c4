"""The synchronous API, for code without an event loop such as scripts and Django views.

    with SyncProducer("redis://127.0.0.1:6379", ProducerConfig(queue_name="emails")) as producer:
        producer.add({"to": "ada@example.com"})

Each method does the same as the asynchronous method of the same name; an event loop in a thread does the work. The
objects can be shared between threads, and a forked child reconnects. Do not call them in a coroutine: they block.
"""

# `id` is the name of this field throughout the API.

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Self, TypeVar

from tampu.base.event_loop import LoopThread, blocking
from tampu.produce.producer import Producer
from tampu.queue import Queue
from tampu.redis.settings import DEFAULT_URL, parse_url
from tampu.task import BlockingAdds, Task
from tampu.wire.job import Job, JobId, check_poll_interval

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Unpack

    from tampu.config import ProducerConfig
    from tampu.inspect.jobs import JobState
    from tampu.produce.options import UsingOptions
    from tampu.redis.settings import CredentialCallback
    from tampu.task import TaskAdds

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")


class SyncJob(Job[Any], Generic[R]):
    """A job added from synchronous code. `result()` blocks instead of returning an awaitable."""

    __slots__ = ("_run",)
    _run: Callable[[Any], Any]

    if TYPE_CHECKING:
        id: JobId  # pyright: ignore[reportIncompatibleVariableOverride]  # an added job's ID knows whether it is new

    @classmethod
    def of(cls, job: Job[Any], run: Callable[[Any], Any]) -> SyncJob[R]:
        """Return a copy of `job` that uses `run` to wait for its result."""
        same: SyncJob[R] = cls.__new__(cls)
        for slot in Job.__slots__:
            setattr(same, slot, getattr(job, slot, None))
        same._run = run
        return same

    def result(self, timeout: float = 30.0) -> R:  # type: ignore[override]  # blocks, unlike the method it overrides
        """Wait up to `timeout` seconds for the job to finish and return its result.

        Raises:
            JobFailed: The job was dead-lettered.
            JobCancelled: The job was cancelled.
            TimeoutError: The job did not finish in time.
        """
        found: R = self._run(super().result(timeout))
        return found

    def state(self) -> JobState:  # type: ignore[override]
        """Return the job's current state, with its progress, result or dead letter."""
        found: JobState = self._run(super().state())
        return found

    def wait_for_result(self, *, timeout: float = 30.0, poll_interval: float = 0.1) -> R:  # type: ignore[override]
        """Return `result(timeout)`. `poll_interval` is accepted for compatibility; there is no polling."""
        check_poll_interval(poll_interval)
        return self.result(timeout)


class SyncQueue:
    """The methods of a `Queue` for synchronous code: `queue.sync.add(...)`.

    Each method does the same as the method of `Queue` with the same name. A `SyncQueue` can be shared between
    threads, and a forked child reconnects. In a coroutine, use the queue itself: these calls block.
    """

    def __init__(self, queue: Queue) -> None:
        self._inner = queue
        self._thread = LoopThread()
        self._run = self._thread.run
        #: Name of the queue.
        self.name = queue.name
        self.tasks = queue.tasks

    @property
    def is_closed(self) -> bool:
        """True after `close`, until the queue is used again."""
        return self._inner.is_closed

    def close(self) -> None:
        """Close the connection and stop the thread. The next use of the queue opens it again."""
        if not self._inner.is_closed:
            self._run(self._inner.close())
        self._thread.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def add(self, name: str, data: Any, **options: Any) -> SyncJob[Any]:
        """Add one job by name; see `Queue.add`."""
        return SyncJob.of(self._run(self._inner.add(name, data, **options)), self._run)

    def add_unique(self, name: str, data: Any, *, job_id: str, **options: Any) -> SyncJob[Any]:
        """Add one job unless a job with this ID was added within `dedup_ttl_secs`; see `Queue.add_unique`."""
        return SyncJob.of(self._run(self._inner.add_unique(name, data, job_id=job_id, **options)), self._run)

    def add_bulk(self, jobs: Iterable[Mapping[str, Any]]) -> list[SyncJob[Any]]:
        """Add many jobs; see `Queue.add_bulk`."""
        return [SyncJob.of(job, self._run) for job in self._run(self._inner.add_bulk(jobs))]

    cancel = blocking(Queue.cancel)
    cancel_delayed = blocking(Queue.cancel_delayed)
    upsert_repeatable_job = blocking(Queue.upsert_repeatable_job)
    get_repeatable_jobs = blocking(Queue.get_repeatable_jobs)
    remove_repeatable_by_key = blocking(Queue.remove_repeatable_by_key)
    peek_dlq = blocking(Queue.peek_dlq)
    replay_dlq = blocking(Queue.replay_dlq)
    remove_dlq = blocking(Queue.remove_dlq)
    get_job_result = blocking(Queue.get_job_result)
    get_job_result_bulk = blocking(Queue.get_job_result_bulk)
    declare_schedules = blocking(Queue.declare_schedules)
    schedules = blocking(Queue.schedules)
    remove_schedule = blocking(Queue.remove_schedule)
    get_job = blocking(Queue.get_job)
    jobs = blocking(Queue.jobs)
    workers = blocking(Queue.workers)
    wait_for_result = blocking(Queue.wait_for_result)
    pause = blocking(Queue.pause)
    resume = blocking(Queue.resume)
    is_paused = blocking(Queue.is_paused)
    pause_reason = blocking(Queue.pause_reason)
    paused_tasks = blocking(Queue.paused_tasks)
    limit = blocking(Queue.limit)
    limits = blocking(Queue.limits)
    clear_limits = blocking(Queue.clear_limits)
    purge = blocking(Queue.purge)
    drain = blocking(Queue.drain)
    delete = blocking(Queue.delete)
    dlq_summary = blocking(Queue.dlq_summary)


class SyncConfiguredTask(BlockingAdds[P, SyncJob[R], list[SyncJob[R]]], Generic[P, R]):
    """The adds of `task.using(...)` for code without an event loop."""

    def __init__(self, task: TaskAdds[P, R], queue: SyncQueue) -> None:
        super().__init__(task)
        self._inner, self._queue, self._run = task.task, queue, queue._run

    def using(self, **options: Unpack[UsingOptions]) -> SyncConfiguredTask[P, R]:
        """Return an object that adds jobs of this task with these options; see `Task.using`."""
        return SyncConfiguredTask(self._adds.using(**options), self._queue)

    def add_bulk(self, calls: Iterable[Any]) -> list[SyncJob[R]]:
        """Add one job per item; see `Task.add_bulk`."""
        jobs = self._run(self._adds._send_bulk(self._adds._encode_calls(calls)))
        return [SyncJob.of(job, self._run) for job in jobs]

    def _send(self, args: tuple[Any, ...], kwargs: dict[str, Any], **when: Any) -> SyncJob[R]:
        packed = self._adds.arguments.encode(args, kwargs)
        return SyncJob.of(self._run(self._adds._send(packed, **when)), self._run)


class SyncTask(SyncConfiguredTask[P, R]):
    """The methods of a `Task` for synchronous code: `task.sync.add(...)`. `job.result()` blocks."""

    def job(self, job_id: str) -> SyncJob[R]:
        """Return a job of this task by its ID, to wait for its result or read its state; see `Task.job`."""
        return SyncJob.of(self._inner.job(job_id), self._run)

    cron = blocking(Task[..., Any].cron)
    every = blocking(Task[..., Any].every)
    schedule = blocking(Task[..., Any].schedule)


class SyncProducer(Generic[T]):
    """Adds jobs to a queue from synchronous code.

    Each method does the same as the method of `Producer` with the same name.

    Args:
        url: Server URL. Defaults to `redis://127.0.0.1:6379`.
        config: Settings. Defaults to `ProducerConfig()`.
        credential_provider: Callable or redis-py `CredentialProvider` that returns the credentials.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        config: ProducerConfig | None = None,
        *,
        credential_provider: CredentialCallback | Any = None,
    ) -> None:
        self._thread = LoopThread()
        self._inner: Producer[T] = Producer(parse_url(url, credential_provider=credential_provider), config)
        self._run = self._thread.run
        #: Unique ID of this producer.
        self.producer_id = self._inner.producer_id
        #: Keys of waiting jobs, delayed jobs and dead letters.
        self.stream_key, self.delayed_key = self._inner.stream_key, self._inner.delayed_key
        self.dlq_key = self._inner.dlq_key

    # --- opening and closing

    @classmethod
    def connect(cls, url: str = DEFAULT_URL, config: ProducerConfig | None = None) -> Self:
        """Return a connected producer. Raise `RedisError` if the server cannot be reached."""
        return cls(url, config).open()

    def open(self) -> Self:
        """Connect now. Otherwise the producer connects on first use."""
        self._run(self._inner.open())
        return self

    def close(self) -> None:
        """Close the connection and stop the thread."""
        self._run(self._inner.close())
        self._thread.stop()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, *_error: object) -> None:
        self.close()

    add = blocking(Producer[T].add)
    add_with_id = blocking(Producer[T].add_with_id)
    add_with_options = blocking(Producer[T].add_with_options)
    add_bulk = blocking(Producer[T].add_bulk)
    add_bulk_with_options = blocking(Producer[T].add_bulk_with_options)
    add_bulk_named = blocking(Producer[T].add_bulk_named)
    add_in = blocking(Producer[T].add_in)
    add_at = blocking(Producer[T].add_at)
    add_in_bulk = blocking(Producer[T].add_in_bulk)
    add_in_with_options = blocking(Producer[T].add_in_with_options)
    add_at_with_options = blocking(Producer[T].add_at_with_options)
    add_in_with_id = blocking(Producer[T].add_in_with_id)
    add_at_with_id = blocking(Producer[T].add_at_with_id)
    add_in_bulk_with_ids = blocking(Producer[T].add_in_bulk_with_ids)
    cancel_delayed = blocking(Producer[T].cancel_delayed)
    cancel_delayed_bulk = blocking(Producer[T].cancel_delayed_bulk)
    peek_dlq = blocking(Producer[T].peek_dlq)
    replay_dlq = blocking(Producer[T].replay_dlq)
    remove_dlq = blocking(Producer[T].remove_dlq)
    upsert_repeatable = blocking(Producer[T].upsert_repeatable)
    ensure_repeatable = blocking(Producer[T].ensure_repeatable)
    list_repeatable = blocking(Producer[T].list_repeatable)
    remove_repeatable = blocking(Producer[T].remove_repeatable)
    get_result = blocking(Producer[T].get_result)
    get_result_bulk = blocking(Producer[T].get_result_bulk)
