"""Adds that wait for a commit: checked and encoded when they are requested, sent when the transaction has committed."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ParamSpec

from tampu.task import BlockingAdds

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tampu.queue import Queue
    from tampu.task import Task, TaskAdds

P = ParamSpec("P")

#: Names listed in the note of a failed send; a transaction may hold thousands of jobs.
MAX_NAMES = 10


@dataclass(frozen=True, slots=True)
class DeferredAdd:
    """One job that is ready to be sent."""

    #: The task, with the options of this add.
    adds: TaskAdds[Any, Any]
    #: The arguments, encoded. Changing a list that was passed as an argument does not change the job.
    packed: bytes

    @property
    def task(self) -> Task[Any, Any]:
        """The task."""
        return self.adds.task

    def check(self) -> None:
        """Raise now for what an add would refuse: after the commit, it is too late to roll back."""
        producer = self.task.queue.producer
        options, delay, at = self.adds._options()
        producer._adder.check_size(self.packed, options.retry)
        producer._due(delay, at)


class DeferringTask(BlockingAdds[P, None, None]):
    """A task whose adds take effect when the transaction commits. The adds return nothing: no job exists yet.

    A `delay` is counted from the commit.
    """

    def add_bulk(self, calls: Iterable[Any]) -> None:
        """Add one job per item after the commit; items as in `Task.add_bulk`."""
        self._adds._bulk_options()
        self._check_and_defer([DeferredAdd(self._adds, packed) for packed in self._adds._encode_calls(calls)])

    def _send(self, args: tuple[Any, ...], kwargs: dict[str, Any], **when: Any) -> None:
        adds = self._adds.using(**when)
        self._check_and_defer([DeferredAdd(adds, adds.arguments.encode(args, kwargs))])

    def _check_and_defer(self, adds: list[DeferredAdd]) -> None:
        for add in adds:
            add.check()
        if adds:
            self._defer(adds)

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
    bound = [(add.adds if queue is None else add.adds._on(queue), add.packed) for add in adds]
    return list(await asyncio.gather(*(task._send(packed) for task, packed in bound), return_exceptions=True))


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
