"""Runs one delivery: the gates, the handler with all that is around it, and the outcome. It reads from top to bottom.

| function | runs | at its timeout | `SoftTimeout` is raised |
|---|---|---|---|
| `async def` | on the event loop | it is cancelled | where it awaits |
| `def` | in a thread | it cannot be stopped: a late success is a success | at its next `check_cancelled()` |
| with `process=True` | in a process | the process is killed | wherever it is, by a signal |
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import random
import signal
import time
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any

from tampu.base.clock import boot_clock_ns, wall_clock_ms
from tampu.consume.admission import Bury, Drop, is_for_the_process
from tampu.consume.context import set_current_job
from tampu.consume.handlers import Cancel, Hold, NoResult, PutBack, RemoteError, Retry, Snooze, UnrecoverableError
from tampu.consume.outcomes import Cancelled, DeadLetter, Outcome, Retried, Success, error_text, event_traceback
from tampu.consume.processes import WRITING
from tampu.consume.retries import decide
from tampu.errors import EncodeError, SoftTimeout
from tampu.wire.codec import QueueCodec
from tampu.wire.dlq import DlqReason
from tampu.wire.job import Cancellation
from tampu.wire.payload import encode_no_result, encode_value

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence

    from tampu.config import ConsumerConfig
    from tampu.consume.admission import Admission, Verdict
    from tampu.consume.context import ProgressReporter
    from tampu.consume.dependencies import Provided
    from tampu.consume.inflight import Delivery
    from tampu.consume.job_log import JobLog
    from tampu.consume.outcomes import Observers
    from tampu.consume.pool import DaemonThreads
    from tampu.consume.processes import Processes
    from tampu.consume.retries import RetryRules
    from tampu.consume.settle import Settler
    from tampu.wire.job import Job

    #: Runs around a run: it gets what to call next, and the job.
    AroundRun = Callable[[Callable[[Job[Any]], Awaitable[Any]], Job[Any]], Awaitable[Any]]

logger = logging.getLogger("tampu.worker")


class RetryAsked(Exception):  # noqa: N818 - not an error: its name is what dead letters and events show
    """The error of a job whose handler returned `Retry`."""


class Runner:
    """Runs the deliveries of one queue, and turns what the handler returns or raises into outcomes."""

    def __init__(
        self,
        handler: Callable[[Job[Any]], Awaitable[Any]],
        config: ConsumerConfig,
        settler: Settler,
        admission: Admission,
        observers: Observers,
        log: JobLog,
    ) -> None:
        self._handler = handler
        self._config = config
        self._settler = settler
        self._admission = admission
        self._events = config.events_enabled
        codec = QueueCodec.of(config.codec, config.queue_name)
        #: Seals results, unless the settler seals those of a window together.
        self._codec = None if codec is None or codec.seals_many else codec
        self._on_start, self._on_failure = observers.started, observers.failed
        self._on_success, self._on_recovery = observers.succeeded, observers.recovered
        self._on_snooze = observers.snoozed
        self._log = log

    async def run(self, delivery: Delivery, *, is_admitted: bool = False) -> None:
        """Run one delivery, unless a gate is closed, and pass its outcome to the settler."""
        started = boot_clock_ns()
        if not is_admitted and not self._admission.is_open(delivery, started):
            async with contextlib.AsyncExitStack() as held:
                verdict = await self._admission.verdict(delivery, held)
                if verdict is None:
                    await self.run(delivery, is_admitted=True)
                else:
                    await self._put_aside(delivery, verdict)
            return
        delivery.is_running = True
        delivery.started_ns = started
        for observer in self._on_start:
            observer(delivery)
        try:
            result = await self._handler(delivery.job)
            outcome = self._returned(delivery, started, result)
        except asyncio.CancelledError as cancelled:
            if self._admission.is_stopping:
                # Its coroutine or process has ended, so another worker may run it at once. A thread has not, and a last
                # attempt has its mark: such an entry stays pending, and another worker takes it over.
                if delivery.job._cancellation is None and not delivery.is_last_attempt:
                    self._admission.unstarted.append(delivery)
                raise
            outcome = self._raised(delivery, started, cancelled)
        except BaseException as error:
            if is_for_the_process(error):
                raise
            outcome = self._raised(delivery, started, error)
        if not isinstance(outcome, Success):
            await self._settle(delivery, outcome)
            return
        delivery.has_outcome = True
        self._settler.add(outcome)
        for observe in self._on_success if outcome.runs == 1 else self._on_recovery:
            observe(outcome)

    async def _put_aside(self, delivery: Delivery, verdict: Verdict) -> None:
        """Settle a delivery that a gate did not admit."""
        outcome: Outcome
        if isinstance(verdict, Drop):
            if verdict.reason is None:
                delivery.done()
                return
            outcome = self._cancelled(delivery, 0, verdict.reason, ran=False)
        elif isinstance(verdict, Bury):
            reason, detail, worker = verdict.reason, verdict.detail, self._config.consumer_id
            outcome = DeadLetter(delivery, wall_clock_ms(), 0, reason=reason, worker=worker, detail=detail, ran=False)
            self._observe(outcome, None)
        else:
            if self._events and (isinstance(verdict, Cancel) or verdict.why):
                self._settler.started(delivery)  # a `failed` event follows
            outcome = self._returned(delivery, boot_clock_ns(), verdict)
        await self._settle(delivery, outcome)

    async def _settle(self, delivery: Delivery, outcome: Outcome) -> None:
        delivery.has_outcome = True
        self._settler.add(outcome)
        if not self._settler.has_room(type(outcome)):
            await self._settler.wait_for_room(type(outcome))

    def _cancelled(self, delivery: Delivery, duration_us: int, reason: str, *, ran: bool) -> Outcome:
        outcome = Cancelled(delivery, wall_clock_ms(), duration_us, reason, ran=ran)
        self._observe(outcome, None)
        return outcome

    def _returned(self, delivery: Delivery, started_ns: int, result: Any) -> Outcome:
        duration_us = (boot_clock_ns() - started_ns) // 1000
        outcome: Outcome
        if result.__class__ is bytes and result and self._config.store_results:
            if self._codec is not None:
                result = self._sealed(result, delivery.job, self._codec)
            outcome = Success(delivery, wall_clock_ms(), duration_us, result)
        elif result is None:
            outcome = Success(delivery, wall_clock_ms() if self._events else 0, duration_us)
        elif isinstance(result, PutBack):
            outcome = Retried(delivery, wall_clock_ms(), duration_us, result.why, result.after_ms, counts=False)
        elif isinstance(result, Snooze):
            outcome = Retried(delivery, wall_clock_ms(), duration_us, "", result.after_ms, counts=False)
            for observer in self._on_snooze:
                observer(outcome)
        elif isinstance(result, Retry):
            outcome = self._failed(delivery, duration_us, RetryAsked("by the handler"), result.after_ms)
        elif isinstance(result, Cancel):
            outcome = self._failed(delivery, duration_us, UnrecoverableError(result.reason))
        elif not self._config.store_results or (isinstance(result, bytes | bytearray | memoryview) and not result):
            outcome = Success(delivery, wall_clock_ms(), duration_us)
        else:
            if isinstance(result, bytes | bytearray | memoryview):
                packed = bytes(result)
            else:
                text = f"the handler must return bytes or None; got {type(result).__name__}"
                packed = self._no_result(delivery.job, result.why if isinstance(result, NoResult) else text)
            if self._codec is not None:
                packed = self._sealed(packed, delivery.job, self._codec)
            outcome = Success(delivery, wall_clock_ms(), duration_us, packed)
        return outcome

    def _sealed(self, packed: bytes, job: Job[Any], codec: QueueCodec) -> bytes:
        try:
            return codec.seal_result(packed, job.id)
        except Exception as error:
            return self._no_result(job, f"the codec failed: {error_text(error)}")

    def _no_result(self, job: Job[Any], why: str) -> bytes:
        """Log that a result cannot be stored, and return what is stored instead. The work is done: the job succeeds."""
        self._log.no_result(job, why)
        return encode_no_result(why)

    def _raised(self, delivery: Delivery, started_ns: int, error: BaseException) -> Outcome:
        duration_us = (boot_clock_ns() - started_ns) // 1000
        job = delivery.job
        if job._cancellation is not None and job._cancellation.reason is not None:
            return self._cancelled(delivery, duration_us, job._cancellation.reason, ran=True)
        if isinstance(error, Hold) or (isinstance(error, RemoteError) and error.error_type == Hold.__name__):
            rest_ms = error.after_ms or 0
            if delivery.queue.gate is not None:
                delivery.queue.gate.rest(job, rest_ms)
            held = Retried(delivery, wall_clock_ms(), duration_us, "", rest_ms, counts=False)
            for observer in self._on_snooze:
                observer(held)
            return held
        return self._failed(delivery, duration_us, error)

    def _failed(
        self, delivery: Delivery, duration_us: int, error: BaseException, after_ms: int | None = None
    ) -> Outcome:
        decision = decide(error, delivery.job, self._config, random.randrange, after_ms)
        now_ms = wall_clock_ms()
        outcome: DeadLetter | Retried
        if isinstance(decision, DlqReason):
            worker = self._config.consumer_id
            outcome = DeadLetter(delivery, now_ms, duration_us, reason=decision, worker=worker, error=error)
        else:
            trace = event_traceback(error) if self._events else ""
            outcome = Retried(delivery, now_ms, duration_us, error_text(error), decision, traceback=trace)
        self._observe(outcome, error)
        return outcome

    def _observe(self, outcome: Outcome, error: BaseException | None) -> None:
        for observer in self._on_failure:
            observer(outcome, error)


class Execution:
    """Runs the jobs of one queue. `find` returns the target of a job."""

    def __init__(
        self,
        find: Callable[[Job[Any]], Target],
        progress: ProgressReporter,
        before: Callable[..., object] | None = None,
        after: Callable[..., object] | None = None,
        around: Sequence[AroundRun] = (),
        around_processes: Sequence[AroundRun] = (),
    ) -> None:
        self._find = find
        self._progress = progress
        self._before = before
        self._after = after
        #: What runs around each run, and around the runs of tasks in processes, where the rest is called.
        self._around = around
        self._around_processes = around_processes

    async def run(self, job: Job[Any]) -> Any:
        """Run a job. Return its encoded result, or the outcome that its function returned."""
        target = self._find(job)
        job._context = self._progress
        set_current_job(job)
        error: BaseException | None = None
        try:
            if self._before is not None:
                await call_hook(self._before, job)
            if not self._around:
                return encode_outcome(await target.start(job), target.encode)
            around = self._around_processes if target.is_in_process else self._around
            return encode_outcome(await run_inside(around, target.start, job), target.encode)
        except BaseException as raised:
            error = raised
            raise
        finally:
            if self._progress.reports:
                self._progress.forget(job)
            if self._after is not None:
                try:
                    await call_hook(self._after, job, error)
                except Exception:
                    # The outcome of the job is decided, and a hook must not change it: a success would run again.
                    logger.exception("hook after_job raised an exception for job %s; the job is not affected", job.id)
            error = None  # otherwise it and this frame would keep each other in memory


def run_inside(
    around: Sequence[AroundRun], start: Callable[[Job[Any]], Awaitable[Any]], job: Job[Any]
) -> Awaitable[Any]:
    """Run a job inside all of these, the first one outermost."""
    for call in reversed(around):
        start = partial(call, start)
    return start(job)


async def call_hook(hook: Callable[..., object] | None, *args: Any) -> None:
    """Call a hook, which may be a coroutine function, if there is one."""
    result = None if hook is None else hook(*args)
    if inspect.isawaitable(result):
        await result


class Target:
    """How the jobs of one task run, or all jobs of a handler: in `processes`, in `threads` or on the event loop."""

    def __init__(
        self,
        call: Callable[[Job[Any]], Any],
        *,
        threads: DaemonThreads | None = None,
        processes: Processes | None = None,
        timeout_secs: float | None = None,
        soft_secs: float | None = None,
        rules: RetryRules | None = None,
        open_first: Callable[[Job[Any]], Job[Any]] | None = None,
        encode: Callable[[Any], bytes] | None = None,
        provided: Provided | None = None,
    ) -> None:
        #: Decodes the arguments in a job and calls the function.
        self._call = call
        self._threads = threads
        self._processes = processes
        self._timeout_secs = timeout_secs
        self._soft_secs = soft_secs
        self._rules = rules
        #: Opens the payload before the function is called; returns the job to run.
        self._open_first = open_first
        #: Encodes results; None if they are not stored.
        self.encode = encode
        options = (threads, processes, timeout_secs, soft_secs, rules, open_first)
        #: Runs a job. Most tasks are coroutine functions without options: their own coroutine is all that is awaited.
        self.start: Callable[[Job[Any]], Awaitable[Any]] = call if options == (None,) * len(options) else self._run
        if provided is not None:
            self.start = partial(_run_provided, provided, self.start)

    @property
    def is_in_process(self) -> bool:
        """True if the function runs in another process."""
        return self._processes is not None

    async def _run(self, job: Job[Any]) -> Any:
        timeout_secs = self._timeout_secs
        if self._open_first is not None:
            job = self._open_first(job)
        if self._threads is not None:
            return await self._run_in_thread(job, self._threads)
        try:
            if self._processes is not None:
                return await self._processes.run(job, timeout_secs)
            if timeout_secs is None:
                return await self.run_on_loop(job)
            async with asyncio.timeout(timeout_secs) as limit:
                return await self.run_on_loop(job)
        except TimeoutError:
            if timeout_secs is None or (self._processes is None and not limit.expired()):
                raise  # raised by the handler itself
            ended = "cancelled" if self._processes is None else "killed"
            raise TimeoutError(f"the handler was {ended} at its timeout of {timeout_secs:g} s") from None

    async def run_on_loop(self, job: Job[Any]) -> Any:
        """Run an `async def` function, and interrupt it at its soft timeout."""
        try:
            awaitable = self._call(job)
            return await (awaitable if self._soft_secs is None else _Interruptible(awaitable, self._soft_secs, job))
        except (Exception, SoftTimeout) as error:
            self._judge(error, job)
            raise

    async def _run_in_thread(self, job: Job[Any], threads: DaemonThreads) -> Any:
        started = time.monotonic()
        job._cancellation = Cancellation()  # a thread cannot be cancelled: the handler has to look
        # In a copy of this context: variables that a hook or middleware has set reach the handler.
        result = await threads.call(copy_context().run, self._call_in_thread, job)
        if inspect.isawaitable(result):
            result = await self._awaited(result, job)
        timeout_secs = self._timeout_secs
        if timeout_secs is not None and (took := time.monotonic() - started) > timeout_secs:
            text = "%s %s took %.1f s in a thread, which its timeout of %g s cannot stop; its success counts"
            logger.warning(text, job.name or "job", job.id, took, timeout_secs)
        return result

    def _call_in_thread(self, job: Job[Any]) -> Any:
        if self._soft_secs is not None and job._cancellation is not None:
            job._cancellation.soft_timeout_at = time.monotonic() + self._soft_secs
        try:
            return self._call(job)
        except (StopIteration, GeneratorExit, KeyboardInterrupt) as error:
            # A future rejects StopIteration, GeneratorExit would close the coroutine that awaits it, and
            # KeyboardInterrupt would look like Ctrl-C to the worker.
            shown = RuntimeError(f"the handler raised {type(error).__name__}")
            self._judge(error, job, shown)
            raise shown from error
        except (Exception, SoftTimeout) as error:
            self._judge(error, job)
            raise

    def call_in_process(self, job: Job[Any]) -> Any:
        """Call a `def` function in the main thread of a handler process, and interrupt it at its soft timeout."""
        secs = self._soft_secs

        def interrupt(*_: object) -> None:
            if WRITING.locked():
                signal.setitimer(signal.ITIMER_REAL, 0.01)
                return
            raise SoftTimeout(_soft_text(secs or 0))

        before = None if secs is None else signal.signal(signal.SIGALRM, interrupt)
        try:
            if secs is not None:
                signal.setitimer(signal.ITIMER_REAL, secs)
            result = self._call(job)
            return self._awaited(result, job) if inspect.isawaitable(result) else result
        except (Exception, SoftTimeout) as error:
            self._judge(error, job)
            raise
        finally:
            if secs is not None:
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, before)

    async def _awaited(self, result: Awaitable[Any], job: Job[Any]) -> Any:
        """Await what a `def` function has returned."""
        try:
            return await result
        except (Exception, SoftTimeout) as error:
            self._judge(error, job)
            raise

    def _judge(self, error: BaseException, job: Job[Any], shown: BaseException | None = None) -> None:
        """Ask the task's rules about an error of the function. `shown` is raised instead of it.

        They are asked here, where the function runs: they may be slow, and only its process has its error.
        """
        judgement = None
        if self._rules is not None and isinstance(error, Exception):
            judgement = self._rules.judge(error, job.attempt + 1)
        if judgement is not None:
            job._judged = (shown or error, judgement)
        elif self._soft_secs is not None and isinstance(error, SoftTimeout):
            raise TimeoutError(_soft_text(self._soft_secs)) from error


async def _run_provided(provided: Provided, start: Callable[[Job[Any]], Awaitable[Any]], job: Job[Any]) -> Any:
    async with provided.on_loop():
        return await start(job)


def decode_first(job: Job[Any]) -> Job[Any]:
    """Decode the payload, so that one that cannot be decoded is an error of the job, not of the handler."""
    job.payload  # noqa: B018 - decoded and kept
    return job


def _soft_text(secs: float) -> str:
    return f"the handler reached its soft timeout of {secs:g} s"


class _Interruptible:
    """Awaits a coroutine and throws `SoftTimeout` into it when its time has passed.

    The timer cancels the asyncio task, which ends whatever the coroutine awaits; this class then replaces the
    `CancelledError` on its way in.
    """

    def __init__(self, coroutine: Awaitable[Any], secs: float, job: Job[Any]) -> None:
        self._coroutine: Coroutine[Any, Any, Any] = coroutine  # type: ignore[assignment]  # of an `async def`
        self._secs = secs
        self._job = job
        self._is_due = False

    def __await__(self) -> Generator[Any, Any, Any]:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None  # noqa: S101 - handlers run in one

        def interrupt() -> None:
            self._is_due = True
            task.cancel()

        timer = loop.call_later(self._secs, interrupt)
        step, value = self._coroutine.send, None
        try:
            while True:
                try:
                    awaited = step(value)
                except StopIteration as end:
                    return end.value
                try:
                    step, value = self._coroutine.send, (yield awaited)
                except GeneratorExit:
                    self._coroutine.close()
                    raise
                except BaseException as error:
                    step, value = self._coroutine.throw, self._replaced(error, task)
        finally:
            timer.cancel()

    def _replaced(self, error: BaseException, task: asyncio.Task[Any]) -> Any:
        # A cancel of the job goes first: it asks for an end, not for a tidier one.
        if not self._is_due or self._job.is_cancelled or not isinstance(error, asyncio.CancelledError):
            return error
        self._is_due = False
        task.uncancel()
        return SoftTimeout(_soft_text(self._secs))


#: A tuple: `isinstance` with a union takes four times as long, for every job.
_OUTCOMES = (PutBack, Cancel, Retry, Snooze, NoResult)


def encode_outcome(result: Any, encode: Callable[[Any], bytes] | None = encode_value) -> Any:
    """Return a handler's result for the consumer: outcomes unchanged, values as MessagePack if results are stored.

    Never raises: the work is done, and must be neither repeated nor reported as failed.
    """
    if isinstance(result, _OUTCOMES):
        return result
    if encode is None:
        return None
    try:
        return encode(result)
    except Exception as error:
        return NoResult(str(error) if isinstance(error, EncodeError) else f"{type(error).__name__}: {error}")
