"""Runs one delivery: calls the handler and turns what it returns or raises into an outcome."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from typing import TYPE_CHECKING, Any

from tampu.base.clock import boot_clock_ns, wall_clock_ms
from tampu.base.event_loop import is_in_a_task
from tampu.consume import outcomes
from tampu.consume.forks import ForkGuard, leave
from tampu.consume.handlers import (
    Cancel,
    GiveUp,
    PutBack,
    Retry,
    RetryAfter,
    Snooze,
    UnrecoverableError,
    reason_to_give_up,
)
from tampu.consume.outcomes import Outcome
from tampu.consume.paused_tasks import PausedTasks
from tampu.consume.processes import RemoteError
from tampu.metrics import JobOutcome, JobOutcomeKind, MetricsSink, tell
from tampu.redis.codes import OutcomeKind
from tampu.wire.codec import QueueCodec
from tampu.wire.dlq import DlqReason
from tampu.wire.retry import backoff_ms

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from contextlib import AbstractAsyncContextManager

    from tampu.config import ConsumerConfig
    from tampu.consume.cancels import Cancels
    from tampu.consume.inflight import Delivery
    from tampu.consume.job_log import JobLog
    from tampu.consume.leases import Leases
    from tampu.consume.settle import Settler
    from tampu.consume.starts import StartMarks
    from tampu.wire.job import Job

# Globals: they are compared for every job.
_SUCCESS, _RESULT = OutcomeKind.SUCCESS, OutcomeKind.RESULT


class Runner:
    """Runs deliveries with one handler."""

    def __init__(
        self,
        handler: Callable[[Job[Any]], Awaitable[Any]],
        config: ConsumerConfig,
        settler: Settler,
        leases: Leases,
        starts: StartMarks,
        cancels: Cancels,
        log: JobLog,
        *,
        now_ms: Callable[[], int] = wall_clock_ms,
        random_below: Callable[[int], int] = random.randrange,
    ) -> None:
        self._handler = handler
        self._config = config
        self._settler = settler
        self._leases = leases
        self._starts = starts
        self._cancels = cancels
        self._marked = cancels.marked
        self._now_ms = now_ms
        self._random_below = random_below
        self._events = config.events_enabled
        self._metrics = config.metrics
        codec = QueueCodec.of(config.codec, config.queue_name)
        #: Seals results, unless the settler seals those of a window together.
        self._codec = None if codec is None or codec.seals_many else codec
        self._observes = type(config.metrics).job_outcome is not MetricsSink.job_outcome
        #: Returns a context that waits for what a job's handler needs, such as a process; None if it needs nothing.
        self.reserve: Callable[[Job[Any]], AbstractAsyncContextManager[None] | None] = _nothing_to_reserve
        #: Set before running handlers are cancelled because the worker stops.
        self.is_stopping = False
        self._fork_guard = ForkGuard()
        self._log = log
        self._logs_starts = log.has_starts
        #: The tasks whose jobs are put back instead of run.
        self.paused = PausedTasks(config.queue_name)
        self._pauses = self.paused.pauses
        #: Deliveries that did not start, though their start may have been recorded: handed back at shutdown.
        self.unstarted: list[Delivery] = []

    async def run_reserved(self, delivery: Delivery) -> None:
        """Run one delivery as soon as its handler can start.

        Until then, the job has not started: another worker may take it over, and it is not recorded as a last attempt.
        """
        async with contextlib.AsyncExitStack() as stack:
            if not self._is_put_aside(delivery.job) and (reserved := self.reserve(delivery.job)) is not None:
                self._cancels.reserving.add(delivery)
                try:
                    await stack.enter_async_context(reserved)
                except asyncio.CancelledError:
                    if self.is_stopping:
                        self.unstarted.append(delivery)
                        raise
                    # Cancelled by a cancel mark, which `run` looks up.
                except BaseException as error:
                    # The process cannot be started: the handler gets the same error, which fails the job.
                    if _is_for_the_process(error):
                        raise
                finally:
                    self._cancels.reserving.discard(delivery)
            await self.run(delivery)

    async def run(self, delivery: Delivery) -> None:
        """Run one delivery and pass its outcome to the settler."""
        started = boot_clock_ns()
        if started > self._leases.valid_until_ns:
            # This process was suspended or the server unreachable: another worker may have taken over waiting entries.
            await self._leases.confirm()
            started = boot_clock_ns()
        if delivery.is_lost:
            # Another worker took it over while it waited here.
            delivery.done()
            return
        if delivery.job._tail and self._is_expired(delivery.job):
            delivery.has_outcome = True
            self._settler.add(self._expired(delivery))
            return
        if self._pauses and delivery.job.name in self._pauses:
            delivery.has_outcome = True
            delay_ms = self.paused.delay_ms(delivery.job.name)
            self._settler.add(outcomes.retry(delivery, self._now_ms(), 0, "", delay_ms, counts=False))
            return
        if self._marked and delivery.job.id in self._marked:
            reason = await self._cancels.reason_for(delivery)
            if reason is not None:
                delivery.has_outcome = True
                self._settler.add(self._cancelled(delivery, 0, reason, ran=False))
                return
            started = boot_clock_ns()
        if delivery.is_last_attempt:
            try:
                is_ours = await self._starts.begin(delivery)
            except asyncio.CancelledError:
                self.unstarted.append(delivery)
                raise
            if not is_ours:
                delivery.done()
                return
            started = boot_clock_ns()
        delivery.is_running = True
        delivery.started_ns = started
        if self._logs_starts:
            self._log.started(delivery.job, max_attempts_of(delivery.job, self._config))
        if self._events:
            self._settler.started(delivery, self._now_ms())
        try:
            result = await self._handler(delivery.job)
            if self._fork_guard.is_child:
                leave(None)
            outcome = self._returned(delivery, started, result)
        except asyncio.CancelledError as cancelled:
            if self.is_stopping and not self._fork_guard.is_child:
                raise  # the entry stays pending, and another worker takes it over
            outcome = self._raised(delivery, started, cancelled)
        except BaseException as error:
            if self._fork_guard.is_child:
                leave(error)
            if _is_for_the_process(error):
                raise
            outcome = self._raised(delivery, started, error)
        delivery.has_outcome = True
        self._settler.add(outcome)
        if outcome.kind is _SUCCESS or outcome.kind is _RESULT:
            if delivery.job.attempt:
                self._log.recovered(delivery.job, outcome.duration_us)
        elif not self._settler.has_room(outcome.kind):
            await self._settler.wait_for_room(outcome.kind)

    def _is_put_aside(self, job: Job[Any]) -> bool:
        """Return True if `run` will not call the handler. Such a job must not wait for a free process."""
        return job.name in self._pauses or self._is_expired(job)

    def _is_expired(self, job: Job[Any]) -> bool:
        expires_at_ms = job.extras.expires_at_ms
        return expires_at_ms is not None and job.attempt == 0 and self._now_ms() > expires_at_ms

    def _expired(self, delivery: Delivery) -> Outcome:
        outcome = outcomes.dead_letter(
            delivery,
            self._now_ms(),
            0,
            reason=DlqReason.EXPIRED,
            worker=self._config.consumer_id,
            detail="not started before its expiry",
            ran=False,
        )
        self._log.not_run(outcome, None)
        return outcome

    def _cancelled(self, delivery: Delivery, duration_us: int, reason: str, *, ran: bool) -> Outcome:
        self._log.cancelled(delivery.job, reason, was_running=ran)
        return outcomes.cancelled(delivery, self._now_ms(), duration_us, reason, ran=ran)

    def _returned(self, delivery: Delivery, started_ns: int, result: Any) -> Outcome:
        duration_us = (boot_clock_ns() - started_ns) // 1000
        if result.__class__ is bytes and result and self._config.store_results:
            if self._codec is not None:
                result = self._codec.seal_result(result, delivery.job.id)
            outcome = Outcome(_RESULT, delivery, self._now_ms(), duration_us, (result,))
        elif result is None:
            outcome = Outcome(_SUCCESS, delivery, self._now_ms() if self._events else 0, duration_us, ())
        elif isinstance(result, PutBack):
            return outcomes.retry(delivery, self._now_ms(), duration_us, result.why, result.after_ms, counts=False)
        elif isinstance(result, Snooze):
            return outcomes.retry(delivery, self._now_ms(), duration_us, "", result.after_ms, counts=False)
        elif isinstance(result, Retry):
            outcome = self._retry(delivery, duration_us, RetryAsked("by the handler"), result.after_ms)
        elif isinstance(result, Cancel):
            outcome = self._dead(delivery, duration_us, UnrecoverableError(result.reason), DlqReason.UNRECOVERABLE)
        elif not self._config.store_results:
            outcome = outcomes.success(delivery, self._now_ms(), duration_us)
        elif not isinstance(result, bytes | bytearray | memoryview):
            raise TypeError(f"with store_results a handler must return bytes or None; got {type(result).__name__}")
        elif not result:
            outcome = outcomes.success(delivery, self._now_ms(), duration_us)
        else:
            packed = bytes(result)
            if self._codec is not None:
                packed = self._codec.seal_result(packed, delivery.job.id)
            outcome = outcomes.success_with_result(delivery, self._now_ms(), duration_us, packed)
        if self._observes:
            # A handler that returns Retry or Cancel has not succeeded.
            is_success = outcome.kind in (_SUCCESS, _RESULT)
            self._observe(delivery, JobOutcomeKind.OK if is_success else JobOutcomeKind.ERR, duration_us)
        return outcome

    def _raised(self, delivery: Delivery, started_ns: int, error: BaseException) -> Outcome:
        if self._fork_guard.is_child:
            leave(error)
        duration_us = (boot_clock_ns() - started_ns) // 1000
        job = delivery.job
        if job._cancellation is not None and job._cancellation.reason is not None:
            return self._cancelled(delivery, duration_us, job._cancellation.reason, ran=True)
        if isinstance(error, GiveUp):
            return self._dead(delivery, duration_us, error.source, DlqReason.UNRECOVERABLE)
        if isinstance(error, RetryAfter):
            return self._retry(delivery, duration_us, error.source, error.after_ms)
        if self._observes:
            is_panic = not isinstance(error, Exception)
            self._observe(delivery, JobOutcomeKind.PANIC if is_panic else JobOutcomeKind.ERR, duration_us)
        reason = error.give_up if isinstance(error, RemoteError) else reason_to_give_up(error, job.id)
        if reason is not None:
            return self._dead(delivery, duration_us, error, reason)
        if isinstance(error, RemoteError) and error.after_ms is not None:
            return self._retry(delivery, duration_us, error, error.after_ms)
        spec = job.retry.backoff if job.retry is not None else None
        wait_ms = backoff_ms(job.attempt + 1, spec, self._config.retry, self._random_below)
        return self._retry(delivery, duration_us, error, wait_ms)

    def _retry(self, delivery: Delivery, duration_us: int, error: BaseException, wait_ms: int) -> Outcome:
        attempts = max_attempts_of(delivery.job, self._config)
        if delivery.job.attempt + 1 >= attempts:
            return self._dead(delivery, duration_us, error, DlqReason.RETRIES_EXHAUSTED)
        outcome = outcomes.retry(
            delivery,
            self._now_ms(),
            duration_us,
            outcomes.error_text(error),
            wait_ms,
            traceback=outcomes.event_traceback(error) if self._events else "",
        )
        self._log.failed(outcome, error, attempts)
        return outcome

    def _dead(self, delivery: Delivery, duration_us: int, error: BaseException, reason: DlqReason) -> Outcome:
        worker = self._config.consumer_id
        outcome = outcomes.dead_letter(delivery, self._now_ms(), duration_us, reason=reason, worker=worker, error=error)
        self._log.failed(outcome, error, max_attempts_of(delivery.job, self._config))
        return outcome

    def _observe(self, delivery: Delivery, kind: JobOutcomeKind, duration_us: int) -> None:
        job = delivery.job
        entered_ms = int(delivery.entry_id.partition(b"-")[0])
        wait_ms = max(self._now_ms() - duration_us // 1000 - entered_ms, 0)
        tell(self._metrics.job_outcome, JobOutcome(kind, job.attempt + 1, duration_us, job.name, wait_ms))


def _is_for_the_process(error: BaseException) -> bool:
    """Return True for Ctrl-C and for the end of this coroutine. A handler's `sys.exit()` only fails its job."""
    if isinstance(error, KeyboardInterrupt):
        return threading.current_thread() is threading.main_thread()
    # A coroutine that is closed because its event loop is gone gets a GeneratorExit outside of any asyncio task.
    return isinstance(error, GeneratorExit) and not is_in_a_task()


class RetryAsked(Exception):  # noqa: N818 - not an error: its name is what dead letters and events show
    """The error of a job whose handler returned `Retry`."""


def max_attempts_of(job: Job[Any], config: ConsumerConfig) -> int:
    """Return the total number of runs that a job may have, including the first."""
    own = job.retry.max_attempts if job.retry is not None else None
    return config.max_attempts if own is None else own


def _nothing_to_reserve(_job: Job[Any]) -> None:
    return None
