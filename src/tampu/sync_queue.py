"""A queue for code without an event loop: the same methods, blocking. An event loop in a thread does the work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from tampu.loop_thread import LoopThread
from tampu.wire.job import Job, check_poll_interval

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from types import TracebackType

    from tampu.engine.dead_letters import ReplayCount
    from tampu.job_state import JobState
    from tampu.queue import Queue
    from tampu.task import Task
    from tampu.wire.repeat import RepeatableMeta

R = TypeVar("R")


class SyncJob(Job[Any], Generic[R]):
    """A job that synchronous code added: `result()` waits, without `await`."""

    __slots__ = ("_run",)
    _run: Callable[[Any], Any]

    @classmethod
    def of(cls, job: Job[Any], run: Callable[[Any], Any]) -> SyncJob[R]:
        """The same job, waited for by `run`."""
        same: SyncJob[R] = cls.__new__(cls)
        for slot in Job.__slots__:
            setattr(same, slot, getattr(job, slot))
        same._run = run
        return same

    def result(self, timeout: float = 30.0) -> R:  # type: ignore[override]  # that is what it is for
        """What the handler returned, once it has; raises as `Job.result` does."""
        found: R = self._run(super().result(timeout))
        return found

    def wait_for_result(self, *, timeout: float = 30.0, poll_interval: float = 0.1) -> R:  # type: ignore[override]
        """The same as `result`; `poll_interval` is accepted, but nothing is polled."""
        check_poll_interval(poll_interval)
        return self.result(timeout)


class SyncQueue:
    """A queue's methods for code without an event loop. Threads may share it; a forked child connects anew.

    Each method does what its namesake of `Queue` does. Inside a coroutine use the queue itself: these calls block.
    """

    def __init__(self, queue: Queue, tasks: dict[str, Task[Any, Any]]) -> None:
        self._queue = queue
        self._thread = LoopThread()
        self._run = self._thread.run
        self.tasks = tasks

    @property
    def name(self) -> str:
        """The queue's name."""
        return self._queue.name

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""
        return self._queue.is_closed

    def close(self) -> None:
        """Close the connection and end the thread."""
        if not self._queue.is_closed:
            self._run(self._queue.close())
        self._thread.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def add(self, name: str, data: Any, **options: Any) -> SyncJob[Any]:
        """As `Queue.add`."""
        return SyncJob.of(self._run(self._queue.add(name, data, **options)), self._run)

    def add_unique(self, name: str, data: Any, *, job_id: str, **options: Any) -> SyncJob[Any]:
        """As `Queue.add_unique`."""
        return SyncJob.of(self._run(self._queue.add_unique(name, data, job_id=job_id, **options)), self._run)

    def add_bulk(self, jobs: Iterable[Mapping[str, Any]]) -> list[SyncJob[Any]]:
        """As `Queue.add_bulk`."""
        return [SyncJob.of(job, self._run) for job in self._run(self._queue.add_bulk(jobs))]

    def cancel_delayed(self, job_id: str) -> bool:
        """As `Queue.cancel_delayed`."""
        return self._run(self._queue.cancel_delayed(job_id))

    def upsert_repeatable_job(self, name: str, data: Any, **options: Any) -> Job[Any]:
        """As `Queue.upsert_repeatable_job`."""
        return self._run(self._queue.upsert_repeatable_job(name, data, **options))

    def get_repeatable_jobs(self, limit: int = 100) -> list[RepeatableMeta]:
        """As `Queue.get_repeatable_jobs`."""
        return self._run(self._queue.get_repeatable_jobs(limit))

    def remove_repeatable_by_key(self, key: str) -> bool:
        """As `Queue.remove_repeatable_by_key`."""
        return self._run(self._queue.remove_repeatable_by_key(key))

    def peek_dlq(self, limit: int = 20, **wanted: Any) -> list[dict[str, Any]]:
        """As `Queue.peek_dlq`."""
        return self._run(self._queue.peek_dlq(limit, **wanted))

    def replay_dlq(self, limit: int = 100, **wanted: Any) -> ReplayCount:
        """As `Queue.replay_dlq`."""
        return self._run(self._queue.replay_dlq(limit, **wanted))

    def remove_dlq(self, limit: int = 100, **wanted: Any) -> int:
        """As `Queue.remove_dlq`."""
        return self._run(self._queue.remove_dlq(limit, **wanted))

    def get_job_result(self, job_id: str) -> Any:
        """As `Queue.get_job_result`."""
        return self._run(self._queue.get_job_result(job_id))

    def get_job_result_bulk(self, job_ids: Sequence[str]) -> list[Any]:
        """As `Queue.get_job_result_bulk`."""
        return self._run(self._queue.get_job_result_bulk(job_ids))

    def get_job(self, job_id: str) -> JobState:
        """As `Queue.get_job`."""
        return self._run(self._queue.get_job(job_id))

    def wait_for_result(self, job_id: str, timeout_secs: float = 30.0) -> Any:
        """What a job's handler returns, once it has."""
        return self._run(self._queue.wait_for_result(job_id, timeout_secs))

    def pause(self) -> None:
        """As `Queue.pause`."""
        self._run(self._queue.pause())

    def resume(self) -> bool:
        """As `Queue.resume`."""
        return self._run(self._queue.resume())

    def is_paused(self) -> bool:
        """As `Queue.is_paused`."""
        return self._run(self._queue.is_paused())

    def purge(self, *, waiting: bool = True, delayed: bool = True) -> int:
        """As `Queue.purge`."""
        return self._run(self._queue.purge(waiting=waiting, delayed=delayed))
