"""Runs one delivery: calls the handler and turns whatever comes out of it into an outcome."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from typing import TYPE_CHECKING, Any

from tampu.clock import wall_clock_ms
from tampu.engine import outcomes
from tampu.engine.handlers import Cancel, PutBack, Retry, UnrecoverableError, is_unrecoverable
from tampu.engine.metrics import JobOutcome, JobOutcomeKind, MetricsSink
from tampu.engine.processes import RemoteError
from tampu.errors import DecodeError
from tampu.wire.dlq import DlqReason
from tampu.wire.retry import backoff_ms

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tampu.engine.config import ConsumerConfig
    from tampu.engine.delivery import Delivery
    from tampu.engine.outcomes import Outcome
    from tampu.engine.settle import Settler
    from tampu.wire.job import Job

logger = logging.getLogger("tampu.worker")


class Runner:
    """Runs deliveries with one handler."""

    def __init__(
        self,
        handler: Callable[[Job[Any]], Awaitable[Any]],
        config: ConsumerConfig,
        settler: Settler,
        *,
        now_ms: Callable[[], int] = wall_clock_ms,
        random_below: Callable[[int], int] = random.randrange,
    ) -> None:
        self._handler = handler
        self._config = config
        self._settler = settler
        self._now_ms = now_ms
        self._random_below = random_below
        self._events = config.events_enabled
        self._metrics = config.metrics
        self._observes = type(config.metrics).job_outcome is not MetricsSink.job_outcome

    async def run(self, delivery: Delivery) -> None:
        """Run one delivery and hand its outcome to the settler."""
        if delivery.is_lost:
            # Somebody else took it over while it waited here.
            self._done(delivery)
            return
        delivery.is_running = True
        if self._events:
            self._settler.started(delivery, self._now_ms())
        started = time.perf_counter_ns()
        try:
            result = await self._handler(delivery.job)
        except asyncio.CancelledError as cancelled:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                # The worker is being stopped: the entry stays pending, and others take it over.
                self._done(delivery)
                raise
            outcome = self._failure(delivery, started, cancelled)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt | GeneratorExit):
                raise  # meant for the process, or for this coroutine; `sys.exit()` in a handler is only its failure
            outcome = self._failure(delivery, started, error)
        else:
            outcome = self._success(delivery, started, result)
        self._settler.add(outcome)
        if outcome.kind != b"s" and self._settler.is_crowded():
            await self._settler.wait_for_room()
        if delivery.job_done is not None:
            self._done(delivery)

    def _done(self, delivery: Delivery) -> None:
        if delivery.job_done is not None:
            delivery.job_done()
            delivery.job_done = None

    def _success(self, delivery: Delivery, started_ns: int, result: Any) -> Outcome:
        duration_us = (time.perf_counter_ns() - started_ns) // 1000
        if self._observes:
            self._observe(delivery, JobOutcomeKind.OK, duration_us)
        if result is None:
            return outcomes.success(delivery, self._now_ms() if self._events else 0, duration_us)
        if isinstance(result, Retry):
            return self._retry(delivery, duration_us, "retry asked for by the handler", result.after_ms)
        if isinstance(result, PutBack):
            return outcomes.retry(delivery, self._now_ms(), duration_us, result.why, result.after_ms, counts=False)
        if isinstance(result, Cancel):
            return self._dead(delivery, duration_us, UnrecoverableError(result.reason), detail=result.reason)
        if self._config.store_results and result:
            return outcomes.success_with_result(
                delivery, self._now_ms(), duration_us, bytes(result), self._config.result_ttl_secs
            )
        return outcomes.success(delivery, self._now_ms(), duration_us)

    def _failure(self, delivery: Delivery, started_ns: int, error: BaseException) -> Outcome:
        duration_us = (time.perf_counter_ns() - started_ns) // 1000
        job = delivery.job
        is_panic = not isinstance(error, Exception)
        if self._observes:
            self._observe(delivery, JobOutcomeKind.PANIC if is_panic else JobOutcomeKind.ERR, duration_us)
        if is_unrecoverable(error) or (isinstance(error, RemoteError) and error.is_unrecoverable):
            return self._dead(delivery, duration_us, error)
        if isinstance(error, DecodeError) and error.job_id == job.id:
            return self._dead(delivery, duration_us, error, reason=DlqReason.DECODE_FAILED)
        limit = max_attempts_of(job, self._config)
        if job.attempt + 1 >= limit:
            return self._dead(delivery, duration_us, error, reason=DlqReason.RETRIES_EXHAUSTED)
        spec = job.retry.backoff if job.retry is not None else None
        wait_ms = backoff_ms(job.attempt + 1, spec, self._config.retry, self._random_below)
        return self._retry(delivery, duration_us, outcomes.error_text(error), wait_ms)

    def _retry(self, delivery: Delivery, duration_us: int, reason: str, wait_ms: int) -> Outcome:
        job = delivery.job
        if job.attempt + 1 >= max_attempts_of(job, self._config):
            return self._dead(delivery, duration_us, RuntimeError(reason), reason=DlqReason.RETRIES_EXHAUSTED)
        return outcomes.retry(delivery, self._now_ms(), duration_us, reason, wait_ms)

    def _dead(
        self,
        delivery: Delivery,
        duration_us: int,
        error: BaseException,
        *,
        reason: DlqReason = DlqReason.UNRECOVERABLE,
        detail: str | None = None,
    ) -> Outcome:
        return outcomes.dead_letter(
            delivery,
            self._now_ms(),
            duration_us,
            reason=reason,
            worker=self._config.consumer_id,
            error=error,
            detail=detail,
        )

    def _observe(self, delivery: Delivery, kind: JobOutcomeKind, duration_us: int) -> None:
        job = delivery.job
        try:
            self._metrics.job_outcome(JobOutcome(kind, job.attempt + 1, duration_us, job.name))
        except Exception:
            logger.exception("the metrics sink failed; the job is not affected")


def max_attempts_of(job: Job[Any], config: ConsumerConfig) -> int:
    """Runs a job may have in all."""
    own = job.retry.max_attempts if job.retry is not None else None
    return config.max_attempts if own is None else own
