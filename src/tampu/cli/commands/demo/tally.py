"""Counts the events of the shop's queues, and takes snapshots of the queues."""

from __future__ import annotations

import asyncio
import statistics
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tampu.cli.payloads import envelope_of
from tampu.inspect.snapshot import QueueSnapshot, take_snapshot

if TYPE_CHECKING:
    from tampu.queue import Queue
    from tampu.wire.events import QueueEvent

#: Number of events kept for the view, and their names: `active` is left out, because every job has one.
LATEST = 12
SHOWN = frozenset({"failed", "retry-scheduled", "dlq", "waiting", "completed"})
#: Number of snapshots over which rates are computed.
RATE_LOOKS = 8


@dataclass(slots=True)
class Line:
    """An event for the view; consecutive equal events are counted in one line."""

    queue: str
    event: QueueEvent
    count: int = 1


@dataclass
class TaskTally:
    """Event counts of one task."""

    counts: Counter[str] = field(default_factory=Counter)
    durations_us: list[int] = field(default_factory=list)

    @property
    def typical_ms(self) -> float | None:
        """Return the median duration of a run, in milliseconds."""
        return statistics.median(self.durations_us) / 1000 if self.durations_us else None


class Tally:
    """Follows the events of several queues."""

    def __init__(self, queues: list[Queue]) -> None:
        self._queues = queues
        self.tasks: dict[str, TaskTally] = {}
        self.by_queue: dict[str, Counter[str]] = {queue.name: Counter() for queue in queues}
        self.latest: deque[Line] = deque(maxlen=LATEST)
        self.snapshots: dict[str, QueueSnapshot] = {}
        self.done_history: dict[str, deque[tuple[int, int]]] = {
            queue.name: deque(maxlen=RATE_LOOKS) for queue in queues
        }
        #: ID of a job that was dead-lettered, replayed and completed.
        self.example_job: str | None = None

    async def follow(self) -> None:
        """Count until cancelled."""
        async with asyncio.TaskGroup() as group:
            for queue in self._queues:
                group.create_task(self._follow(queue))

    async def _follow(self, queue: Queue) -> None:
        async with queue.events(last_event_id="0-0") as events:
            async for event in events:
                self._count(queue.name, event)

    def _count(self, queue_name: str, event: QueueEvent) -> None:
        self.by_queue[queue_name][event.name] += 1
        if not event.job_id:
            return
        task = self.tasks.setdefault(event.job_name, TaskTally())
        task.counts[event.name] += 1
        duration_us = event.fields.get("duration_us")
        if isinstance(duration_us, int):
            task.durations_us.append(duration_us)
        if event.name in SHOWN:
            self._show(queue_name, event)

    def _show(self, queue_name: str, event: QueueEvent) -> None:
        last = self.latest[-1] if self.latest else None
        if last is not None and (last.event.name, last.event.job_name) == (event.name, event.job_name):
            last.event = event
            last.count += 1
        else:
            self.latest.append(Line(queue_name, event))

    async def look(self) -> None:
        """Take a snapshot of each queue."""
        for queue in self._queues:
            snapshot = await take_snapshot(queue.producer.ready_client(), queue.keys, sizes=False)
            self.snapshots[queue.name] = snapshot
            done = self.by_queue[queue.name]["completed"]
            self.done_history[queue.name].append((snapshot.taken_at_ms, done))

    @property
    def is_quiet(self) -> bool:
        """Return whether no job is waiting, running or delayed, and all events are counted."""
        return len(self.snapshots) == len(self._queues) and all(
            not (one.length or one.delayed) and self.by_queue[name].total() >= one.events
            for name, one in self.snapshots.items()
        )

    def done_per_sec(self, queue_name: str) -> float:
        """Return the recent number of jobs completed per second."""
        history = self.done_history[queue_name]
        if len(history) < 2 or history[-1][0] <= history[0][0]:
            return 0.0
        return (history[-1][1] - history[0][1]) * 1000 / (history[-1][0] - history[0][0])

    def total(self, event: str) -> int:
        """Return the number of events with that name in all queues."""
        return sum(counts[event] for counts in self.by_queue.values())

    @staticmethod
    def id_of_letter(letter: dict[str, Any]) -> str | None:
        """Return the ID of the job in a dead letter."""
        job = envelope_of(letter["payload"])
        return None if job is None else job.id
