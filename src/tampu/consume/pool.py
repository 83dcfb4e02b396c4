"""The slots of a worker: how its queues share them, and the coroutines and threads in which jobs run."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from tampu.base.event_loop import is_in_a_task

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence

    from tampu.consume.inflight import Delivery
    from tampu.consume.runtime import ServedQueue

    _Call = tuple[asyncio.Future[Any], Callable[..., Any], tuple[Any, ...], dict[str, Any]]

#: How long a round of all queues should take, in seconds, and the most jobs that a queue of weight 1 gets in it. At
#: high throughput, turns are long enough for large reads.
ROUND_SECS = 0.1
MAX_QUANTUM = 64.0
#: Queues that are read in one request.
MAX_READS = 8
#: The pool's throughput is measured over this time, in seconds.
PACE_WINDOW_SECS = 0.02


class Share:
    """One queue's part of the slots. `reserve` keeps slots free for it, `limit` is the maximum it may use."""

    __slots__ = ("deficit", "has_more", "limit", "occupied", "reserve", "weight")

    def __init__(self, *, weight: int = 1, reserve: int = 0, limit: int | None = None) -> None:
        self.weight = weight
        self.reserve = reserve
        self.limit = limit
        #: Its jobs that run or wait in this worker.
        self.occupied = 0
        #: How many more of its jobs may be read in its turn.
        self.deficit = 0.0
        #: True while more of its jobs are known to wait at the server.
        self.has_more = False


class Shares:
    """The slots of one worker."""

    def __init__(self) -> None:
        self._reserving: list[Share] = []
        #: Number of queues.
        self.queues = 0
        #: False if a queue has a limit or a reserve. Then jobs may only be read into free slots: one that waits could
        #: take a slot kept for another queue.
        self.may_read_ahead = True

    def add(self, share: Share) -> None:
        """Add a queue."""
        self.queues += 1
        if share.reserve:
            self._reserving.append(share)
        self.may_read_ahead = self.may_read_ahead and not share.reserve and share.limit is None

    def room_of(self, share: Share, room: int) -> int:
        """Return how many of `room` slots a queue may get: less those kept for others, and no more than its limit."""
        kept = sum(max(other.reserve - other.occupied, 0) for other in self._reserving if other is not share)
        return room - kept if share.limit is None else min(room - kept, share.limit - share.occupied)


class Turns:
    """The turns of queues on one server with waiting jobs.

    Each queue gets slots in proportion to its `weight`, by deficit round robin: in its turn a queue gets
    `quantum * weight` jobs, in as many reads as that takes, and then the next queue has its turn. (Dividing the free
    slots of each single read would give a queue of low weight nothing as long as one slot at a time is free.)
    """

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        #: The queues that take part; the first one has its turn.
        self.ring: deque[ServedQueue] = deque()
        self._weight = 0

    def begin(self, queue: ServedQueue) -> None:
        """Let a queue take part: more of its jobs wait."""
        share = queue.share
        if not share.has_more:
            share.has_more = True
            self.ring.append(queue)
            self._weight += share.weight

    def end(self, queue: ServedQueue) -> None:
        """Let a queue no longer take part: it is empty, paused or cannot be read."""
        share = queue.share
        if share.has_more:
            share.has_more = False
            share.deficit = 0.0
            self.ring.remove(queue)
            self._weight -= share.weight

    def plan(self, room: int, batch: int, jobs_per_sec: float) -> list[tuple[ServedQueue, int]]:
        """Return the queues to read now and how many jobs of each, at most `room` in total."""
        plan: list[tuple[ServedQueue, int]] = []
        quantum = min(max(jobs_per_sec * ROUND_SECS / max(self._weight, 1), 1.0), MAX_QUANTUM)
        for _ in range(len(self.ring)):
            queue = self.ring[0]
            share = queue.share
            if share.deficit < 1:
                share.deficit += quantum * share.weight
            count = min(int(share.deficit), batch, self._shares.room_of(share, room))
            if count > 0:
                plan.append((queue, count))
                share.deficit -= count
                room -= count
                if share.deficit >= 1 and (room <= 0 or count == batch):
                    break  # its turn is not over
            self.ring.rotate(-1)
            if room <= 0 or len(plan) >= MAX_READS:
                break
        return plan


logger = logging.getLogger("tampu.worker")

#: Jobs that one coroutine runs before it yields to the event loop, if their handlers never wait.
JOBS_PER_TURN = 32
#: How long a cancelled handler may take to clean up, in seconds.
CANCEL_PATIENCE_SECS = 1.0


class Pool:
    """Runs deliveries of all queues of a worker, at most `concurrency` at once.

    A fixed number of coroutines take deliveries from one deque: there is no asyncio task per job.
    """

    def __init__(self, concurrency: int) -> None:
        self.concurrency = concurrency
        self.shares = Shares()
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[Delivery] = deque()
        self._sleepers: list[asyncio.Future[None]] = []
        #: Coroutines that were woken and have not run since.
        self._waking = 0
        self._is_closed = False
        self._is_ending = False
        self._tasks = [
            self._loop.create_task(self._work(), name=f"tampu-pool-{number}") for number in range(concurrency)
        ]
        self.running = 0
        #: True if no slot was free when `room` was last called.
        self.is_full = False
        #: Jobs finished since the pool began.
        self.finished = 0
        #: Takeovers that wait for a free slot: while there are some, readers leave one.
        self.takeovers_waiting = 0
        self._progress = asyncio.Event()
        #: Number of callers that wait for `_progress`: it is set only if there are any.
        self._watchers = 0

    @property
    def occupied(self) -> int:
        """Return the number of jobs running or waiting."""
        return self.running + len(self._waiting)

    def room(self, max_ahead: int, pace: deque[tuple[float, int]]) -> int:
        """Return the free slots, plus the jobs that will finish until entries arrive that are read now.

        Jobs finish at the recent rate, of which `pace` has the samples. If fewer finished in the last 20 ms than are
        running, those may be slow: then nothing is read ahead.
        """
        now = time.monotonic()
        pace.append((now, self.finished))
        while pace[0][0] < now - PACE_WINDOW_SECS:
            pace.popleft()
        occupied = self.running + len(self._waiting)
        self.is_full = occupied >= self.concurrency
        if self.takeovers_waiting:
            return self.concurrency - 1 - occupied
        lately = self.finished - pace[0][1]
        if lately <= self.running or not self.shares.may_read_ahead:
            lately = 0
        return self.concurrency + min(lately, max_ahead) - occupied

    def put(self, queue: ServedQueue, deliveries: Sequence[Delivery]) -> None:
        """Add deliveries of one queue behind those that wait."""
        queue.share.occupied += len(deliveries)
        self._waiting.extend(deliveries)
        self._wake()

    def put_first(self, delivery: Delivery) -> None:
        """Add a delivery in front of those that wait."""
        delivery.queue.share.occupied += 1
        self._waiting.appendleft(delivery)
        self._wake()

    async def progress(self, timeout_secs: float) -> None:
        """Wait until a job finishes, for up to `timeout_secs`."""
        self._progress.clear()
        self._watchers += 1
        try:
            async with asyncio.timeout(timeout_secs):
                await self._progress.wait()
        except TimeoutError:
            pass
        finally:
            self._watchers -= 1

    def take_back(self) -> list[Delivery]:
        """Start no more jobs, and return those not started. A second call returns those added since the first."""
        self._is_closed = True
        unstarted = list(self._waiting)
        self._waiting.clear()
        for delivery in unstarted:
            delivery.queue.share.occupied -= 1
        return unstarted

    def take_from(self, queues: Container[ServedQueue]) -> list[Delivery]:
        """Remove the waiting jobs of these queues and return them. Suspects stay: they are counted."""
        taken = [delivery for delivery in self._waiting if delivery.queue in queues and not delivery.is_suspect]
        for delivery in taken:
            self._waiting.remove(delivery)
            delivery.queue.share.occupied -= 1
        return taken

    async def finish(self, timeout_secs: float) -> None:
        """Wait for the running handlers, for up to `timeout_secs`."""
        deadline = self._loop.time() + timeout_secs
        while self.running and self._loop.time() < deadline:
            await self.progress(deadline - self._loop.time())

    async def end(self) -> int:
        """Cancel running handlers and end the coroutines. Return how many handlers were abandoned."""
        abandoned = self.running
        self._is_ending = True
        for task in self._tasks:
            task.cancel()
        # A handler may ignore its cancellation: do not wait for it any longer.
        await asyncio.wait(self._tasks, timeout=CANCEL_PATIENCE_SECS)
        return abandoned

    def _wake(self) -> None:
        """Wake coroutines for the jobs that wait: one, or as many as wait inside their handlers.

        One that is awake takes the next job, so a batch of quick jobs wakes few. A batch of slow ones wakes twice as
        many in each turn of the event loop.
        """
        needed = min(max(self.running, 1), len(self._waiting))
        while self._sleepers and self._waking < needed:
            sleeper = self._sleepers.pop()
            if not sleeper.done():
                self._waking += 1
                sleeper.set_result(None)

    async def _work(self) -> None:
        while not self._is_ending:
            try:
                await self._take_and_run()
            except asyncio.CancelledError:
                if self._is_ending:
                    raise
                # The handler's asyncio task was cancelled: that ends the handler, never this coroutine.
                _uncancel(asyncio.current_task())
            except GeneratorExit:
                # A handler awaited a future that holds a GeneratorExit, and Python closed the coroutines in between.
                if not is_in_a_task():
                    raise
            except Exception:
                logger.exception("internal error (please report it); the job stays pending until this worker stops")

    async def _take_and_run(self) -> None:
        waiting = self._waiting
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - it always runs in one
        in_a_row = 0
        last: ServedQueue | None = None
        ran: set[ServedQueue] = set()
        while not self._is_ending:
            while self._is_closed or not waiting:
                for queue in ran:
                    queue.settler.flush_soon()
                ran.clear()
                last = None
                sleeper: asyncio.Future[None] = self._loop.create_future()
                self._sleepers.append(sleeper)
                try:
                    await sleeper
                finally:
                    if not sleeper.cancelled():
                        self._waking -= 1
                in_a_row = 0
            delivery = waiting.popleft()
            # If this handler waits, another coroutine must take the next job. The condition saves quick jobs a call if
            # one is already awake.
            if waiting and (not self._waking or self._waking < self.running):
                self._wake()
            self.running += 1
            delivery.task = task
            queue = delivery.queue
            if queue is not last:
                ran.add(queue)
                last = queue
            try:
                await queue.run(delivery)
            finally:
                queue.share.occupied -= 1
                self.running -= 1
                self.finished += 1
                if self._watchers:
                    self._progress.set()
            if task.cancelling():
                # The handler cancelled its own asyncio task: the next handler must not be cancelled by that.
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(0)
                _uncancel(task)
            in_a_row += 1
            if in_a_row >= JOBS_PER_TURN:
                in_a_row = 0
                await asyncio.sleep(0)


def _uncancel(task: asyncio.Task[None] | None) -> None:
    """Undo all cancellation requests of an asyncio task."""
    while task is not None and task.cancelling():
        task.uncancel()


#: Calls that take longer than this on average, in nanoseconds, each get a thread at once.
SLOW_CALL_NS = 200_000
#: Weight of one call in that average.
PACE_WEIGHT = 0.05
#: How soon more threads are woken if calls still wait, in seconds.
WAKE_AGAIN_SECS = 0.001

P = ParamSpec("P")
T = TypeVar("T")


class DaemonThreads:
    """Runs calls in up to `limit` daemon threads, started on demand, for one event loop.

    The standard library's executor joins its threads at exit: a handler that never ends would keep the process alive.
    It also wakes a thread for each call and the event loop for each result, which takes longer than most calls. Here
    the threads share one deque, and the loop is woken once for all results that are ready by then. Quick calls stay in
    one thread. Others are woken at once if the average call takes long, else while calls wait: twice as many every
    millisecond.
    """

    def __init__(self, limit: int, name: str) -> None:
        self._limit = limit
        self._name = name
        self._loop = asyncio.get_running_loop()
        self._calls: deque[_Call] = deque()
        self._results: deque[tuple[asyncio.Future[Any], Any, BaseException | None]] = deque()
        #: One lock per thread that waits for a call; releasing it wakes the thread.
        self._idle: list[threading.Lock] = []
        self._started = 0
        self._pace_ns = 0.0
        self._is_waking = False
        self._ticker: asyncio.TimerHandle | None = None
        self._is_collecting = False
        self._has_complained = False
        self._closed = False

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """Call `function` in a thread. Raises `RuntimeError` after `shutdown`."""
        if self._closed:
            raise RuntimeError("cannot run a handler in a thread after shutdown")
        future: asyncio.Future[T] = self._loop.create_future()
        self._calls.append((future, function, args, kwargs))
        if not self._is_waking:
            # At the end of this turn of the event loop, when all its calls are there.
            self._is_waking = True
            self._loop.call_soon(self._wake)
        return future

    def shutdown(self) -> None:
        """End each thread after its current call. Never waits: a call may never end."""
        self._closed = True
        while self._idle:
            self._idle.pop().release()

    def _wake(self) -> None:
        """Wake threads for the calls of this turn."""
        self._is_waking = False
        if self._pace_ns > SLOW_CALL_NS:
            self._wake_threads(len(self._calls))
        elif self._started == len(self._idle):
            self._wake_threads(1)
        if self._ticker is None and self._calls:
            self._ticker = self._loop.call_later(WAKE_AGAIN_SECS, self._wake_more)

    def _wake_more(self) -> None:
        self._ticker = None
        if self._calls and not self._closed:
            self._wake_threads(max(self._started - len(self._idle), 1))
            self._ticker = self._loop.call_later(WAKE_AGAIN_SECS, self._wake_more)

    def _wake_threads(self, count: int) -> None:
        for _ in range(min(count, len(self._calls))):
            if self._idle:
                self._idle.pop().release()
            elif self._started < self._limit:
                thread = threading.Thread(target=self._serve, name=f"{self._name}-{self._started}", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # a limit of the system: tried again while calls wait
                    if not self._has_complained:
                        logger.error("cannot start a thread for handlers; %d run: %s", self._started, error)
                        self._has_complained = True
                    return
                self._started += 1

    def _serve(self) -> None:
        calls, clock = self._calls, time.perf_counter_ns
        lock = threading.Lock()
        lock.acquire()
        while True:
            try:
                future, function, args, kwargs = calls.popleft()
            except IndexError:
                self._idle.append(lock)
                if not self._closed:
                    lock.acquire()
                if self._closed:
                    return
                continue
            result = error = None
            started = clock()
            try:
                if not future.cancelled():
                    result = function(*args, **kwargs)
            except BaseException as raised:
                error = raised
            self._pace_ns += (clock() - started - self._pace_ns) * PACE_WEIGHT
            self._results.append((future, result, error))
            # Otherwise the job would stay in memory until the next one arrives.
            del future, function, args, kwargs, result, error
            if not self._is_collecting:
                self._is_collecting = True
                try:
                    self._loop.call_soon_threadsafe(self._collect)
                except RuntimeError:  # the loop is closed: this thread has outlived its worker
                    return

    def _collect(self) -> None:
        self._is_collecting = False  # before the first look: a result that arrives now schedules another
        results = self._results
        while results:
            future, result, error = results.popleft()
            if future.done():
                continue  # its caller was cancelled
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)
