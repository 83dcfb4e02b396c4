"""Adds that wait for a commit: checked and encoded when they are requested, sent when the transaction has committed."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, ParamSpec

from tampu.base.checks import check_job_id
from tampu.task import ConfiguredTask, Task, call_arguments

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from datetime import datetime, timedelta

    from tampu.queue import Queue

P = ParamSpec("P")

#: Names listed in the note of a failed send; a transaction may hold thousands of jobs.
MAX_NAMES = 10


@dataclass(frozen=True, slots=True)
class DeferredAdd:
    """One job that is ready to be sent."""

    #: The task, with the options of this add.
    configured: ConfiguredTask[Any, Any]
    #: The arguments, encoded. Changing a list that was passed as an argument does not change the job.
    packed: bytes

    @property
    def task(self) -> Task[Any, Any]:
        """The task."""
        return self.configured.task

    def check(self) -> None:
        """Raise now for what an add would refuse: after the commit, it is too late to roll back."""
        producer, when = self.task.queue.producer, self.configured._when()
        producer._adder.check_size(self.packed, when["options"].retry)
        if when["delay"] is not None:
            producer._due_after(when["delay"])
        if when["run_at"] is not None:
            producer._due_at(when["run_at"])


class DeferringTask(ABC, Generic[P]):
    """A task whose adds take effect when the transaction commits. The adds return nothing: no job exists yet."""

    def __init__(self, task: Task[P, Any] | ConfiguredTask[P, Any]) -> None:
        self._configured = task.using() if isinstance(task, Task) else task

    def add(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Add a job after the commit."""
        self._defer_one(self._configured, args, kwargs)

    def add_in(self, delay: timedelta | float, /, *args: P.args, **kwargs: P.kwargs) -> None:
        """Add a job after the commit that runs after `delay` (a timedelta or seconds), counted from the commit."""
        self._defer_one(self._configured.using(delay=delay), args, kwargs)

    def add_at(self, run_at: datetime | float, /, *args: P.args, **kwargs: P.kwargs) -> None:
        """Add a job after the commit that runs at an instant (a datetime, naive = UTC, or epoch seconds)."""
        self._defer_one(self._configured.using(at=run_at), args, kwargs)

    def add_unique(self, job_id: str, /, *args: P.args, **kwargs: P.kwargs) -> None:
        """Add a job after the commit, unless a job with this ID was added within `dedup_ttl_secs`."""
        self._defer_one(self._configured.using(unique=check_job_id(job_id, "job_id")), args, kwargs)

    def add_bulk(self, calls: Iterable[Any]) -> None:
        """Add one job per item after the commit; items as in `Task.add_bulk`."""
        self._configured._when_bulk()  # refuses options of a single job
        adds = [DeferredAdd(self._configured, self._packed(*call_arguments(item))) for item in calls]
        for add in adds:
            add.check()
        if adds:
            self._defer(adds)

    def _packed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
        return self._configured.task.arguments.encode(args, kwargs)

    def _defer_one(self, configured: ConfiguredTask[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        add = DeferredAdd(configured, self._packed(args, kwargs))
        add.check()
        self._defer([add])

    @abstractmethod
    def _defer(self, adds: list[DeferredAdd]) -> None:
        """Send these when the current transaction commits, and never if it rolls back."""


async def send(adds: Sequence[DeferredAdd]) -> None:
    """Send the adds of a committed transaction, in one window per queue. Raise the first error."""
    _raise_first(adds, await _sent(adds))


def send_blocking(adds: Sequence[DeferredAdd]) -> None:
    """Do the same from synchronous code."""
    by_queue: dict[Queue, list[DeferredAdd]] = {}
    for add in adds:
        by_queue.setdefault(add.task.queue, []).append(add)
    ordered: list[DeferredAdd] = []
    answers: list[Any] = []
    for queue, group in by_queue.items():  # all queues are tried, even if one fails
        ordered += group
        answers += queue.sync._run(_sent(group, queue.sync._inner))
    _raise_first(ordered, answers)


async def _sent(adds: Sequence[DeferredAdd], queue: Queue | None = None) -> list[Any]:
    answers: list[Any] = await asyncio.gather(
        *((queue or add.task.queue)._add_task(add.task, add.packed, **add.configured._when()) for add in adds),
        return_exceptions=True,
    )
    return answers


def _raise_first(adds: Sequence[DeferredAdd], answers: Sequence[Any]) -> None:
    failed = [(add, answer) for add, answer in zip(adds, answers, strict=True) if isinstance(answer, BaseException)]
    if not failed:
        return
    names = ", ".join(f"{add.task.name} (queue {add.task.queue.name})" for add, _ in failed[:MAX_NAMES])
    more = f" and {len(failed) - MAX_NAMES} more" if len(failed) > MAX_NAMES else ""
    error = failed[0][1]
    error.add_note(
        f"The transaction is committed, but {len(failed)} of its {len(adds)} jobs were not confirmed: {names}{more}"
    )
    raise error
