"""The worker's log lines about single jobs (started, failed, retried, dead-lettered, recovered), and their metrics.

The first failure of each kind is logged with its traceback; later ones are one line with a count. A storm of failures
or recoveries is logged at a bounded rate, and the lines left out are counted. Payloads are never logged.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from tampu.base.clock import wall_clock_ms
from tampu.consume.handlers import RemoteError
from tampu.consume.outcomes import Cancelled, DeadLetter, Retried, error_text, error_type, plain_text
from tampu.consume.processes import own_traceback, traceback_text
from tampu.consume.retries import max_attempts_of
from tampu.metrics import DlqRouted, JobOutcome, JobOutcomeKind, MetricsSink, ReaderBatch, RetryScheduled, tell

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from tampu.consume.inflight import Delivery
    from tampu.consume.outcomes import Observers, Outcome, Success
    from tampu.wire.job import Job

logger = logging.getLogger("tampu.job")

#: Failures logged per second on average, and in one burst; the same again for recoveries.
LINES_PER_SEC = 10.0
BURST = 50
#: Kinds of failures remembered; then all are forgotten, and tracebacks are logged once more.
MAX_KINDS = 1000


class _Count:
    """Failures of one kind: of one task, with one type of error, raised at one place."""

    __slots__ = ("error_type", "left_out", "place", "seen", "task")

    def __init__(self, task: str, error: BaseException | None) -> None:
        self.task = task
        self.error_type = "" if error is None else error_type(error)
        #: Where the error was raised, as `file:line`.
        self.place = _remote_place(error) if isinstance(error, RemoteError) else ""
        if not self.place and error is not None and (trace := _innermost(error)) is not None:
            self.place = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
        self.seen = 0
        #: Failures since the last line.
        self.left_out = 0


class _Rate:
    """Allows `LINES_PER_SEC` lines on average, and `BURST` at once."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._allowance = float(BURST)
        self._refilled_at = now()

    def allows_line(self) -> bool:
        """Return True, and use up a line, if one may be logged."""
        now = self._now()
        self._allowance = min(self._allowance + (now - self._refilled_at) * LINES_PER_SEC, float(BURST))
        self._refilled_at = now
        if self._allowance < 1:
            return False
        self._allowance -= 1
        return True


class JobLog:
    """The log of the jobs of one queue."""

    def __init__(self, queue_name: str, max_attempts: int = 0, now: Callable[[], float] = time.monotonic) -> None:
        self._queue = queue_name
        #: Of jobs that do not set it.
        self._max_attempts = max_attempts
        #: By `_parts_of` their failures.
        self._counts: dict[tuple[object, ...], _Count] = {}
        self._failures = _Rate(now)
        self._recoveries = _Rate(now)
        #: Recoveries since the last line about one.
        self._recoveries_left_out = 0

    def observe_with(self, observers: Observers) -> None:
        """Log the jobs that the observers are called for."""
        if logger.isEnabledFor(logging.DEBUG):  # asked once, because a start is on the path of every job
            observers.started.append(self._started)
        observers.recovered.append(lambda outcome: self.recovered(outcome.delivery.job, outcome.duration_us))
        observers.failed.append(self._ended)

    def _ended(self, outcome: Outcome, error: BaseException | None) -> None:
        job = outcome.delivery.job
        if isinstance(outcome, Cancelled):
            self.cancelled(job, outcome.reason.decode(), was_running=outcome.ran)
        elif isinstance(outcome, DeadLetter) and not outcome.ran:
            self.not_run(outcome, error)
        elif isinstance(outcome, Retried | DeadLetter):
            self.failed(outcome, error, max_attempts_of(job, self._max_attempts))

    def _started(self, delivery: Delivery) -> None:
        """Log at DEBUG that a handler starts."""
        job = delivery.job
        attempts = max_attempts_of(job, self._max_attempts)
        logger.debug(
            "%s started: attempt %d of %d",
            self._label(job),
            job.attempt + 1,
            attempts,
            extra=self._fields(job, "started", attempts=attempts),
        )

    def recovered(self, job: Job[Any], duration_us: int) -> None:
        """Log at INFO that a job succeeded after it had failed."""
        if not logger.isEnabledFor(logging.INFO):
            return  # before the line is made, which takes 3 us
        if not self._recoveries.allows_line():
            self._recoveries_left_out += 1
            return
        left_out, self._recoveries_left_out = self._recoveries_left_out, 0
        logger.info(
            "%s succeeded on attempt %d in %s%s",
            self._label(job),
            job.attempt + 1,
            _duration(duration_us),
            f" ({left_out:,} other recoveries not logged)" if left_out else "",
            extra=self._fields(job, "recovered", duration_us=duration_us),
        )

    def cancelled(self, job: Job[Any], reason: str, *, was_running: bool) -> None:
        """Log at INFO that a job was cancelled."""
        logger.info(
            "%s was cancelled %s%s",
            self._label(job),
            "while it ran" if was_running else "before it started",
            f": {reason}" if reason else "",
            extra=self._fields(job, "cancelled", reason=reason),
        )

    def abandoned(self, job: Job[Any]) -> None:
        """Log at WARNING that a handler was cut off at shutdown. Its job has not failed: another worker runs it."""
        logger.warning(
            "%s was abandoned at shutdown on attempt %d; another worker will run it again",
            self._label(job),
            job.attempt + 1,
            extra=self._fields(job, "abandoned"),
        )

    def failed(self, outcome: Retried | DeadLetter, error: BaseException | None, attempts: int) -> None:
        """Log a failed attempt and what follows: at WARNING if the job is retried, at ERROR if it is dead-lettered."""
        job = outcome.delivery.job
        parts = _parts_of(job.name, error)
        count = self._counts.get(parts)
        if count is None:
            if len(self._counts) >= MAX_KINDS:
                self.flush()
                self._counts.clear()
            count = self._counts[parts] = _Count(job.name, error)
        count.seen += 1
        is_first = count.seen == 1
        if not is_first and not self._failures.allows_line():
            count.left_out += 1
            return
        more = ""
        if not is_first:
            more = f" (seen {count.seen:,} times" + (f", {count.left_out:,} not logged)" if count.left_out else ")")
        count.left_out = 0
        if isinstance(outcome, Retried):
            level, event = logging.WARNING, "failed"
            backoff_ms: int | None = outcome.backoff_ms
            after = f"retrying in {_seconds(outcome.backoff_ms)}"
        else:
            level, event, backoff_ms = logging.ERROR, "dead-lettered", None
            after = f"moved to dead letters ({outcome.reason.as_str()})"
        text = "no error was reported" if error is None else _encodable(error_text(error))
        logger.log(
            level,
            "%s failed: attempt %d of %d, after %s: %s; %s%s",
            self._label(job),
            outcome.runs,
            attempts,
            _duration(outcome.duration_us),
            text,
            after,
            more,
            exc_info=_exception(error) if is_first else None,
            extra=self._fields(
                job,
                event,
                attempt=outcome.runs,
                attempts=attempts,
                duration_us=outcome.duration_us,
                error_type=count.error_type,
                error=text,
                retry_in_ms=backoff_ms,
            ),
        )

    def not_run(self, outcome: DeadLetter, error: BaseException | None) -> None:
        """Log at ERROR that a job was dead-lettered without being run: it cannot be read, or no attempt is left."""
        job = outcome.delivery.job
        if not self._failures.allows_line():
            return
        reason = outcome.reason.as_str()
        logger.error(
            "%s was moved to dead letters without running (%s)%s",
            self._label(job),
            reason,
            "" if error is None else f": {_encodable(error_text(error))}",
            extra=self._fields(job, "dead-lettered", reason=reason),
        )

    def no_result(self, job: Job[Any], why: str) -> None:
        """Log at ERROR that a job succeeded, but its result cannot be stored."""
        if self._failures.allows_line():
            text = "%s succeeded, but its result was not stored: %s"
            logger.error(text, self._label(job), _encodable(why), extra=self._fields(job, "no-result"))

    def flush(self) -> None:
        """Log how many failures were left out since their last line."""
        for count in self._counts.values():
            if count.left_out and self._failures.allows_line():
                logger.warning(
                    "%s: %s failed %s more times with %s at %s",
                    self._queue,
                    count.task or "(unnamed)",
                    f"{count.left_out:,}",
                    count.error_type or "no error",
                    count.place or "an unknown place",
                    extra={"fields": {"event": "failed", "queue": self._queue, "task": count.task}},
                )
                count.left_out = 0

    def _label(self, job: Job[Any]) -> str:
        return f"{self._queue}: {job.name or '(unnamed)'} {job.id}"

    def _fields(self, job: Job[Any], event: str, **values: object) -> dict[str, object]:
        known = {"event": event, "queue": self._queue, "task": job.name, "job_id": job.id, "attempt": job.attempt + 1}
        return {"fields": known | values}


class JobMetrics:
    """The metrics of the jobs of one queue."""

    def __init__(self, sink: MetricsSink) -> None:
        self._sink = sink

    def observe_with(self, observers: Observers) -> None:
        """Report the jobs that the observers are called for, as far as the sink has methods for that."""
        sink = type(self._sink)
        if sink.reader_batch is not MetricsSink.reader_batch:
            observers.received.append(lambda *counts: tell(self._sink.reader_batch, ReaderBatch(*counts)))
        if sink.job_outcome is not MetricsSink.job_outcome:
            observers.succeeded.append(self._succeeded)
            observers.recovered.append(self._succeeded)
            observers.failed.append(self._failed)
        if sink.retry_scheduled is not MetricsSink.retry_scheduled or sink.dlq_routed is not MetricsSink.dlq_routed:
            observers.settled.append(self._settled)

    def _succeeded(self, outcome: Success) -> None:
        self._ran(outcome, JobOutcomeKind.OK)

    def _failed(self, outcome: Outcome, error: BaseException | None) -> None:
        if error is not None and outcome.ran:
            self._ran(outcome, JobOutcomeKind.ERR if isinstance(error, Exception) else JobOutcomeKind.PANIC)

    def _ran(self, outcome: Outcome, kind: JobOutcomeKind) -> None:
        job, duration_us = outcome.delivery.job, outcome.duration_us
        entered_ms = int(outcome.delivery.entry_id.partition(b"-")[0])
        wait_ms = max(wall_clock_ms() - duration_us // 1000 - entered_ms, 0)
        tell(self._sink.job_outcome, JobOutcome(kind, job.attempt + 1, duration_us, job.name, wait_ms))

    def _settled(self, outcome: Outcome) -> None:
        name = outcome.delivery.job.name
        if isinstance(outcome, DeadLetter):
            tell(self._sink.dlq_routed, DlqRouted(outcome.reason, outcome.runs, name))
        elif isinstance(outcome, Retried):
            tell(self._sink.retry_scheduled, RetryScheduled(outcome.runs + 1, outcome.backoff_ms, name))


def _parts_of(task: str, error: BaseException | None) -> tuple[object, ...]:
    """Return what a failure has in common with others of its kind, which is quicker to find than the texts to make."""
    if isinstance(error, RemoteError):
        return task, error.error_type, _remote_place(error)
    trace = None if error is None else _innermost(error)
    return (task, type(error)) if trace is None else (task, type(error), trace.tb_frame.f_code, trace.tb_lineno)


def _innermost(error: BaseException) -> TracebackType | None:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace


def _remote_place(error: RemoteError) -> str:
    return next((line.strip() for line in reversed(error.remote_traceback.splitlines()) if "File " in line), "")


def _exception(error: BaseException | None) -> tuple[type[BaseException], BaseException, TracebackType | None] | None:
    """Return what a log handler needs to show an error, without the frames that led to the handler."""
    if error is None:
        return None
    if isinstance(error, RemoteError):
        # Raised in another process: shown under its own name, with the traceback that came as text.
        return _stand_in(error.error_type, str(error), error.remote_traceback)
    if _encodable(text := plain_text(error)) != text:
        # A lone surrogate in its text would break handlers that write UTF-8.
        return _stand_in(error_type(error), text, traceback_text(error))
    return type(error), error, own_traceback(error)


def _stand_in(name: str, text: str, trace: str) -> tuple[type[BaseException], BaseException, None]:
    """Return an exception of this name and text whose traceback is only known as text."""
    kind = type(_encodable(name), (Exception,), {"__module__": "builtins"})
    raised: BaseException = kind(_encodable(text))
    raised.add_note(_encodable(trace).rstrip())
    return kind, raised, None


def _encodable(text: str) -> str:
    """Return text that can be written as UTF-8: lone surrogates are replaced."""
    return text.encode(errors="replace").decode()


def _duration(microseconds: int) -> str:
    return f"{microseconds / 1000:.3g} ms" if microseconds < 1_000_000 else f"{microseconds / 1_000_000:.3g} s"


def _seconds(milliseconds: int) -> str:
    return f"{milliseconds / 1000:g} s"
