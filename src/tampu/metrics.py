"""What the engine tells an observer in its own process. A sink that raises never hurts a job."""

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
    """A lock was won, or is held by somebody else. Told on changes only."""

    ACQUIRED = "acquired"
    HELD = "held"


class JobOutcomeKind(StrEnum):
    """How a handler's run ended. `PANIC`: a BaseException, or a worker process that died."""

    OK = "ok"
    ERR = "err"
    PANIC = "panic"


@dataclass(frozen=True, slots=True)
class PromoterTick:
    """One round of the promoter."""

    promoted: int
    #: Jobs left in the delayed set.
    depth: int
    #: How late the oldest overdue job is, in milliseconds; 0 when none is overdue.
    oldest_pending_lag_ms: int


@dataclass(frozen=True, slots=True)
class ReaderBatch:
    """One read that brought something."""

    size: int
    #: Entries that had been delivered before.
    reclaimed: int


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """One run of a handler."""

    kind: JobOutcomeKind
    attempt: int
    handler_duration_us: int
    name: str


@dataclass(frozen=True, slots=True)
class RetryScheduled:
    """A job was moved to the delayed set for another run."""

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
    """Receives the engine's observations. Override what you need; the rest does nothing.

    Called on the event loop: return quickly.
    """

    def for_queue(self, queue_name: str) -> MetricsSink:
        """The sink that is told of this queue; itself, for one that does not tell queues apart."""
        return self

    def promoter_tick(self, tick: PromoterTick) -> None:
        """After every round of the promoter."""

    def promoter_lock_outcome(self, outcome: LockOutcome) -> None:
        """When the promoter's lock was won or lost."""

    def reader_batch(self, batch: ReaderBatch) -> None:
        """After a read that brought something."""

    def job_outcome(self, outcome: JobOutcome) -> None:
        """After every run of a handler."""

    def retry_scheduled(self, retry: RetryScheduled) -> None:
        """After a retry was written."""

    def dlq_routed(self, dlq: DlqRouted) -> None:
        """After a dead letter was written."""


def tell(receiver: Callable[[T], None], observation: T) -> None:
    """Call one method of a sink; what it raises is logged and goes no further."""
    try:
        receiver(observation)
    except Exception:
        logger.exception("the metrics sink failed; no job is affected")


class NoopSink(MetricsSink):
    """Drops everything."""


_NOOP = NoopSink()


def noop_sink() -> MetricsSink:
    """The default sink, one for all."""
    return _NOOP


@dataclass
class InMemorySink(MetricsSink):
    """Keeps everything in lists, for tests."""

    promoter_ticks: list[PromoterTick] = field(default_factory=list)
    lock_outcomes: list[LockOutcome] = field(default_factory=list)
    reader_batches: list[ReaderBatch] = field(default_factory=list)
    job_outcomes: list[JobOutcome] = field(default_factory=list)
    retries: list[RetryScheduled] = field(default_factory=list)
    dead_letters: list[DlqRouted] = field(default_factory=list)

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
