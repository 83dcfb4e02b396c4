"""Decides whether a delivered job may start now. Every reason not to start a job is a gate of `Admission`.

| gate | closed | then |
|---|---|---|
| process | all processes of its task are busy | it waits |
| lease | another worker has taken it over | dropped |
| expiry | it expired before its first run | dead letter |
| pause | its task is paused | put back |
| cancel | it is cancelled | dropped, and recorded as cancelled |
| name | no task has its name | put back; after an hour a dead letter |
| last attempt | another worker has taken it over; otherwise the start is recorded | dropped |
"""

from __future__ import annotations

import asyncio
import logging
import random
import signal
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tampu.base.checks import MAX_ID_BYTES
from tampu.base.clock import boot_clock_ns, wall_clock_ms
from tampu.base.event_loop import is_in_a_task
from tampu.consume.handlers import Cancel, PutBack
from tampu.inspect.snapshot import decode_pauses
from tampu.redis import calls
from tampu.redis.faults import ServerError
from tampu.wire.dlq import DlqReason

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence
    from contextlib import AbstractAsyncContextManager, AsyncExitStack

    from tampu.config import ConsumerConfig
    from tampu.consume.inflight import Delivery, InFlight
    from tampu.consume.leases import Leases
    from tampu.inspect.snapshot import TaskPause
    from tampu.redis.client import Client
    from tampu.redis.connection import Reply
    from tampu.wire.job import Job
    from tampu.wire.keys import QueueKeys

logger = logging.getLogger("tampu.worker")

#: A job of a paused task is put back for a quarter of the time since the pause began, within these bounds. Each time
#: writes two events, so a long pause must not put all its jobs back once a second.
FIRST_DELAY_MS = 1000
LONGEST_DELAY_MS = 60_000
#: A job with an unknown name is put back for a worker that knows it: after this delay at first, after a quarter of the
#: time it has been unknown later (up to the longest delay), and no longer than the patience. Each put-back writes four
#: events; once a second for an hour, they would push all others out of the events stream.
UNKNOWN_DELAY_MS = 1000
UNKNOWN_LONGEST_DELAY_MS = 30_000
UNKNOWN_PATIENCE_SECS = 3600.0
#: An unknown job that was not seen for this long was with another worker meanwhile: its patience starts again.
UNKNOWN_ABSENCE_SECS = 600.0
#: Unknown jobs remembered. Beyond that the oldest are forgotten, and their patience starts again.
MAX_REMEMBERED = 10_000
#: Shortest time between two log lines about one unknown name, in seconds.
COMPLAINT_SECS = 60.0


@dataclass(frozen=True, slots=True)
class Drop:
    """Do not run the job here. Without a `reason` the entry belongs to another worker; with one it is cancelled."""

    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Bury:
    """Make the job a dead letter without running it."""

    reason: DlqReason
    detail: str


#: What a gate answers for a job that must not start now.
Verdict = Drop | Bury | PutBack | Cancel


class Admission:
    """The gates of one queue."""

    def __init__(
        self,
        queue_name: str,
        leases: Leases,
        cancels: Cancels,
        starts: StartMarks,
    ) -> None:
        self._leases = leases
        self._cancels = cancels
        self._marked = cancels.marked
        self._starts = starts
        #: The tasks whose jobs are put back instead of run.
        self.paused = PausedTasks(queue_name)
        self._pauses = self.paused.pauses
        #: The names that can be run; None if all can.
        self.names: Container[str] | None = None
        self._unknown = UnknownNames()
        #: Returns a context that waits for what a job's handler needs, such as a process. None if no job needs one.
        self.reserve: Callable[[Job[Any]], AbstractAsyncContextManager[None] | None] | None = None
        #: Set before running handlers are cancelled because the worker stops.
        self.is_stopping = False
        #: Deliveries that did not start, though their start may have been recorded: handed back at shutdown.
        self.unstarted: list[Delivery] = []
        #: In this order. The process comes first, because a job may wait for it for a long time; the record of a start
        #: last, because the handler must run right behind it.
        self._gates = (
            *(self._process, self._lease, self._expiry, self._pause, self._cancel, self._name),
            self._last_attempt,
        )

    def is_open(self, delivery: Delivery, now_ns: int) -> bool:
        """Return True if all gates are open, as for nearly every job. Runs once per job: a hot path."""
        job = delivery.job
        return not (
            now_ns > self._leases.valid_until_ns
            or delivery.is_lost
            or delivery.is_last_attempt
            or (job._tail and is_expired(job, wall_clock_ms()))
            or (self._pauses and job.name in self._pauses)
            or (self._marked and job.id in self._marked)
            or self.reserve is not None
            or (self.names is not None and job.name not in self.names)
        )

    async def verdict(self, delivery: Delivery, held: AsyncExitStack) -> Verdict | None:
        """Ask each gate. Return the first objection; None if the job may start, now. `held` is for the run."""
        for gate in self._gates:
            verdict = await gate(delivery, held)
            if verdict is not None:
                return verdict
        return None

    async def _process(self, delivery: Delivery, held: AsyncExitStack) -> Verdict | None:
        """Wait until the handler can start.

        Until then, the job has not started: another worker may take it over, and it is not recorded as a last attempt.
        """
        job = delivery.job
        if self.reserve is None or job.name in self._pauses or is_expired(job, wall_clock_ms()):
            return None  # a job that will not run must not wait for a free process
        if (reserved := self.reserve(job)) is None:
            return None
        self._cancels.reserving.add(delivery)
        try:
            await held.enter_async_context(reserved)
        except asyncio.CancelledError:
            if self.is_stopping:
                self.unstarted.append(delivery)
                raise
            # Cancelled by a cancel mark, which a later gate looks up.
        except BaseException as error:
            # The process cannot be started: the handler gets the same error, which fails the job.
            if is_for_the_process(error):
                raise
        finally:
            self._cancels.reserving.discard(delivery)
        return None

    async def _lease(self, delivery: Delivery, held: AsyncExitStack) -> Verdict | None:
        if boot_clock_ns() > self._leases.valid_until_ns:
            # This process was suspended or the server unreachable: another worker may have taken over waiting entries.
            await self._leases.confirm()
        return Drop() if delivery.is_lost else None

    async def _expiry(self, delivery: Delivery, held: AsyncExitStack) -> Verdict | None:
        if is_expired(delivery.job, wall_clock_ms()):
            return Bury(DlqReason.EXPIRED, "not started before its expiry")
        return None

    async def _pause(self, delivery: Delivery, held: AsyncExitStack) -> Verdict | None:
        name = delivery.job.name
        return PutBack(self.paused.delay_ms(name), "") if name in self._pauses else None

    async def _cancel(self, delivery: Delivery, held: AsyncExitStack) -> Verdict | None:
        reason = await self._cancels.reason_for(delivery) if delivery.job.id in self._marked else None
        return None if reason is None else Drop(reason)

    async def _name(self, delivery: Delivery, held: AsyncExitStack) -> Verdict | None:
        is_known = self.names is None or delivery.job.name in self.names
        return None if is_known else self._unknown.outcome_of(delivery.job)

    async def _last_attempt(self, delivery: Delivery, held: AsyncExitStack) -> Verdict | None:
        try:
            is_ours = not delivery.is_last_attempt or await self._starts.begin(delivery)
        except asyncio.CancelledError:
            self.unstarted.append(delivery)
            raise
        return None if is_ours else Drop()


def is_expired(job: Job[Any], now_ms: int) -> bool:
    """Return True if a job has expired. One that ran before does not expire."""
    expires_at_ms = job.extras.expires_at_ms if job._tail else None
    return expires_at_ms is not None and job.attempt == 0 and now_ms > expires_at_ms


def is_for_the_process(error: BaseException) -> bool:
    """Return True for Ctrl-C and for the end of this coroutine. A handler's `sys.exit()` only fails its job."""
    if isinstance(error, KeyboardInterrupt):
        # With any other handler of the signal, Ctrl-C raises nothing: the job's handler did.
        is_raised_by_ctrl_c = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        return is_raised_by_ctrl_c and threading.current_thread() is threading.main_thread()
    # A coroutine that is closed because its event loop is gone gets a GeneratorExit outside of any asyncio task.
    return isinstance(error, GeneratorExit) and not is_in_a_task()


class PausedTasks:
    """The paused tasks of one queue, as of the worker's last check.

    A stream cannot be read selectively: workers receive jobs of paused tasks, and put them back.
    """

    def __init__(self, queue_name: str, random_below: Callable[[int], int] = random.randrange) -> None:
        self._queue = queue_name
        self._random_below = random_below
        #: By name; the same dict all the time, which is empty nearly always.
        self.pauses: dict[str, TaskPause] = {}
        self._checked_at_ms = 0

    def update(self, flat: Sequence[bytes], now_ms: int) -> None:
        """Record which tasks are paused at this time of the server's clock."""
        if not flat and not self.pauses:
            return
        found = {name: pause for name, pause in decode_pauses(flat).items() if not pause.is_over(now_ms)}
        for name in found.keys() - self.pauses.keys():
            reason = f": {found[name].reason}" if found[name].reason else ""
            logger.info('queue "%s": task %s paused%s', self._queue, name, reason)
        for name in self.pauses.keys() - found.keys():
            logger.info('queue "%s": task %s resumed', self._queue, name)
        self.pauses.clear()
        self.pauses.update(found)
        self._checked_at_ms = now_ms

    def delay_ms(self, name: str) -> int:
        """Return for how long to put back a job of a paused task."""
        paused_ms = self._checked_at_ms - self.pauses[name].since_ms
        delay_ms = min(max(paused_ms // 4, FIRST_DELAY_MS), LONGEST_DELAY_MS)
        # Spread out, so that they do not all come back at the same moment.
        return delay_ms - self._random_below(delay_ms // 4)


class UnknownNames:
    """Puts back jobs without a task here: during a deploy old workers receive new jobs."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        #: By job id: when it was first and last seen.
        self._seen: dict[str, tuple[float, float]] = {}
        self._complained_at: dict[str, float] = {}

    def outcome_of(self, job: Job[Any]) -> PutBack | Cancel:
        """Put the job back for a worker that knows its name, or cancel it after `UNKNOWN_PATIENCE_SECS`."""
        now = self._now()
        first, last = self._seen.pop(job.id, (now, now))
        if now - last > UNKNOWN_ABSENCE_SECS:
            first = now
        text = f"no handler named {job.name!r}"
        if now - first > UNKNOWN_PATIENCE_SECS:
            return Cancel(text)
        self._seen[job.id] = first, now
        if len(self._seen) > MAX_REMEMBERED:
            self._seen.pop(next(iter(self._seen)))
        self._complain(job, text, now)
        delay_ms = min(max(UNKNOWN_DELAY_MS, int((now - first) * 250)), UNKNOWN_LONGEST_DELAY_MS)
        return PutBack(delay_ms, text)

    def _complain(self, job: Job[Any], text: str, now: float) -> None:
        if now - self._complained_at.get(job.name, float("-inf")) < COMPLAINT_SECS:
            return
        if len(self._complained_at) >= MAX_REMEMBERED:
            self._complained_at.clear()
        self._complained_at[job.name] = now
        logger.warning("%s on this worker: job %s and others like it are put back for another worker", text, job.id)


#: Marks read in one call.
PAGE = 1000
#: Marks remembered. When there are more, all are read again.
MAX_MARKS = 100_000
#: Highest score of a mark, as in `cancel_job.lua`: scores are epoch milliseconds, and no clock reaches higher ones.
MAX_SCORE = 2**52
#: After this many checks, all marks are read again, and those that no longer exist are dropped.
POLLS_PER_REFRESH = 60


class Cancels:
    """The cancel marks of one queue that this worker knows; new ones are read once a second.

    Marked jobs that wait here are dropped, and those that run are cancelled by `Delivery.cancel`: an `async def`
    handler's task is cancelled, a handler's process killed, and a `def` handler in a thread finds the request with
    `job.check_cancelled()`. Before a job is dropped, its mark is checked on the server: adding the job's ID again
    removes the mark.
    """

    def __init__(self, client: Client, keys: QueueKeys, config: ConsumerConfig, inflight: InFlight) -> None:
        self._client = client
        self._keys = keys
        self._config = config
        self._inflight = inflight
        #: IDs of jobs that may be marked. Empty nearly always: a job is only looked up when it is not.
        self.marked: set[str] = set()
        #: Deliveries whose handlers cannot start yet, for example because no process is free.
        self.reserving: set[Delivery] = set()
        self._cursor = 0.0
        self._polls = 0

    @property
    def command(self) -> tuple[str, ...]:
        """The read of new marks; the reply goes to `update`."""
        self._polls += 1
        if self._polls >= POLLS_PER_REFRESH or len(self.marked) > MAX_MARKS:
            self._polls, self._cursor = 0, 0.0
            self.marked.clear()
        return (
            *("ZRANGEBYSCORE", self._keys.cancel_marks, f"{self._cursor:.0f}", str(MAX_SCORE)),
            *("WITHSCORES", "LIMIT", "0", str(PAGE)),
        )

    def forget(self) -> None:
        """Forget all marks: the queue has none."""
        if self.marked:
            self.marked.clear()
        self._cursor = 0.0

    async def update(self, reply: Sequence[bytes]) -> None:
        """Record new marks, and act on those of jobs that run here."""
        while reply:
            ids = {job_id.decode(errors="replace") for job_id in reply[::2] if len(job_id) <= MAX_ID_BYTES}
            newest = float(reply[-1])
            new = ids - self.marked
            self.marked |= new
            if new:
                await self._cancel_running(new)
            if len(reply) < 2 * PAGE or newest <= self._cursor:
                self._cursor = newest
                return
            self._cursor = newest
            reply = await self._client.call(*self.command)

    async def _cancel_running(self, ids: set[str]) -> None:
        for delivery in self.reserving:
            if delivery.job.id in ids:
                delivery.task.cancel()  # it stops waiting, and checks its mark before it starts
        for delivery in self._inflight.running_deliveries():
            if delivery.job.id in ids:
                reason = await self.reason_for(delivery)
                if reason is not None and not delivery.has_outcome:
                    delivery.cancel(reason)

    async def reason_for(self, delivery: Delivery) -> str | None:
        """Return why a job is to be cancelled; None if its mark is gone."""
        job_id = delivery.job.id
        mark = await self._client.call("GET", self._keys.cancel_mark(job_id))
        if mark is None or not mark.startswith(b"r"):
            self.marked.discard(job_id)
            return None
        return str(mark[1:].decode(errors="replace"))


#: How many turns of the event loop a mark waits until the connection has nothing else to send.
TURNS_TO_WAIT = 10


class StartMarks:
    """Records on the server that a job's last attempt starts, right before its handler runs.

    A worker that dies leaves the entries that were delivered to it. Those with attempts left run again. For an entry on
    its last attempt it matters whether the handler had begun. If so, it becomes a dead letter. If not, it only waited
    next to the job that killed the worker, and runs.

    So the mark and the handler's first line belong together: a mark that waited for its reply, or was sent together
    with others, would also cover jobs that had not begun when the first of them killed the process. Starts are
    serialized on the event loop: the mark leaves this process, the handler runs up to its first `await`, then the next
    job may start. If the kernel takes the mark at once, nothing else runs in between: neither another handler nor its
    `os._exit`.
    """

    def __init__(self, client: Client, keys: QueueKeys, config: ConsumerConfig, leases: Leases) -> None:
        self._client = client
        self._stream = keys.stream
        self._config = config
        self._leases = leases
        self._turn = asyncio.Lock()
        #: How old the answer may be that an entry is ours, in nanoseconds.
        self._fresh_ns = config.claim_min_idle_ms * 500_000
        self._last_refusal = ""

    async def begin(self, delivery: Delivery) -> bool:
        """Record a start; the caller then runs the handler at once. Return False if another worker owns the entry."""
        while True:
            asked_at = boot_clock_ns()
            # The reply also shows that the connection works: a dead one would drop the mark unnoticed.
            await self._leases.confirm(delivery.entry_id)
            if delivery.is_lost:
                return False
            await self._turn.acquire()
            try:
                # If the process was suspended while this waited for its turn, ask again: the lease may have expired.
                if boot_clock_ns() - asked_at < self._fresh_ns and await self._mark(delivery):
                    return True
            finally:
                # Runs when the handler first waits or has ended.
                asyncio.get_running_loop().call_soon(self._turn.release)

    async def _mark(self, delivery: Delivery) -> bool:
        """Write the mark to the socket; the caller then runs the handler at once. Return False if not connected."""
        config = self._config
        packed = calls.packed_start_mark(
            self._stream, group=config.group, consumer=config.consumer_id, entry_id=delivery.entry_id
        )
        for _ in range(TURNS_TO_WAIT):
            if self._client.connection is None:
                return False
            if self._client.connection.request_now(packed, self._on_marked):
                return True
            await asyncio.sleep(0)  # until earlier requests have left
        if self._client.connection is None:
            return False
        self._client.connection.request(packed, self._on_marked)
        # One turn for the connection to write it, one more for event loops that write at the end of a turn.
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return True

    def _on_marked(self, reply: Reply) -> None:
        if isinstance(reply, ServerError) and str(reply) != self._last_refusal:
            self._last_refusal = str(reply)
            logger.error("cannot record the start of a job's last attempt: %s", reply)
