"""Metrics: the observations that producers and workers report to a sink. An error in a sink never affects a job."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from tampu.wire.dlq import DlqReason

T = TypeVar("T")

logger = logging.getLogger("tampu.worker")


class LockOutcome(StrEnum):
    """A lock was acquired, or is held by another process. Reported on changes only."""

    ACQUIRED = "acquired"
    HELD = "held"


class JobOutcomeKind(StrEnum):
    """Result of a run of a handler. `PANIC` is a BaseException or a worker process that died."""

    OK = "ok"
    ERR = "err"
    PANIC = "panic"


@dataclass(frozen=True, slots=True)
class PromoterTick:
    """One round of the promoter."""

    promoted: int
    #: Jobs left in the delayed set.
    depth: int
    #: Age of the oldest overdue job in milliseconds; 0 if none is overdue.
    oldest_pending_lag_ms: int


@dataclass(frozen=True, slots=True)
class ReaderBatch:
    """One read that returned at least one entry."""

    size: int
    #: Number of entries that had been delivered before.
    reclaimed: int


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """One run of a handler."""

    kind: JobOutcomeKind
    attempt: int
    handler_duration_us: int
    name: str
    #: How long the job was in the stream before this run, in milliseconds, by the clocks of the server and of this
    #: machine. Time in the delayed set does not count.
    wait_ms: int = 0


@dataclass(frozen=True, slots=True)
class QueueDepth:
    """The length of a queue, as a worker saw it. All workers of a queue see the same values, except for `running`."""

    #: Jobs that were not delivered to a worker.
    waiting: int
    #: How long the oldest of them has been waiting, in milliseconds; 0 if there is none.
    oldest_waiting_ms: int
    #: Jobs that were delivered to a worker and not settled.
    pending: int
    #: Jobs in the delayed set: delayed ones, and those that wait for a retry.
    delayed: int
    #: Dead letters that are stored now.
    dead: int
    #: Jobs that this worker is running, and how many it may run at the same time.
    running: int
    concurrency: int


@dataclass(frozen=True, slots=True)
class RetryScheduled:
    """A job was moved to the delayed set for another attempt."""

    attempt: int
    backoff_ms: int
    name: str


@dataclass(frozen=True, slots=True)
class DlqRouted:
    """A job was dead-lettered."""

    reason: DlqReason
    attempt: int
    name: str


class MetricsSink:
    """Receives metrics. Override the methods you need; the others do nothing.

    Methods are called on the event loop: return quickly.
    """

    def for_queue(self, queue_name: str) -> MetricsSink:
        """Return the sink for this queue. Defaults to this sink itself."""
        return self

    def promoter_tick(self, tick: PromoterTick) -> None:
        """Record one round of the promoter."""

    def promoter_lock_outcome(self, outcome: LockOutcome) -> None:
        """Record that the promoter's lock was acquired or lost."""

    def reader_batch(self, batch: ReaderBatch) -> None:
        """Record a read that returned at least one entry."""

    def job_outcome(self, outcome: JobOutcome) -> None:
        """Record one run of a handler."""

    def queue_depth(self, depth: QueueDepth) -> None:
        """Record the length of the queue. Workers measure it every 5 s, if this method is overridden."""

    def retry_scheduled(self, retry: RetryScheduled) -> None:
        """Record that a retry was scheduled."""

    def dlq_routed(self, dlq: DlqRouted) -> None:
        """Record that a job was dead-lettered."""


def tell(receiver: Callable[[T], None], observation: T) -> None:
    """Call one method of a sink; log an exception instead of raising it."""
    try:
        receiver(observation)
    except Exception:
        logger.exception("the metrics sink raised an exception; jobs are not affected")


class NoopSink(MetricsSink):
    """Discards all metrics."""


_NOOP = NoopSink()


def noop_sink() -> MetricsSink:
    """Return the default sink, which discards all metrics."""
    return _NOOP


@dataclass
class InMemorySink(MetricsSink):
    """Stores all metrics in lists, for tests."""

    promoter_ticks: list[PromoterTick] = field(default_factory=list)
    lock_outcomes: list[LockOutcome] = field(default_factory=list)
    reader_batches: list[ReaderBatch] = field(default_factory=list)
    job_outcomes: list[JobOutcome] = field(default_factory=list)
    retries: list[RetryScheduled] = field(default_factory=list)
    dead_letters: list[DlqRouted] = field(default_factory=list)
    depths: list[QueueDepth] = field(default_factory=list)

    def promoter_tick(self, tick: PromoterTick) -> None:
        self.promoter_ticks.append(tick)

    def promoter_lock_outcome(self, outcome: LockOutcome) -> None:
        self.lock_outcomes.append(outcome)

    def reader_batch(self, batch: ReaderBatch) -> None:
        self.reader_batches.append(batch)

    def job_outcome(self, outcome: JobOutcome) -> None:
        self.job_outcomes.append(outcome)

    def retry_scheduled(self, retry: RetryScheduled) -> None:
        self.retries.append(retry)

    def dlq_routed(self, dlq: DlqRouted) -> None:
        self.dead_letters.append(dlq)

    def queue_depth(self, depth: QueueDepth) -> None:
        self.depths.append(depth)
