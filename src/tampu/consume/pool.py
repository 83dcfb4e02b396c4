"""The pool: a fixed number of coroutines that take deliveries from one deque and run them. No asyncio task per job."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from typing import TYPE_CHECKING

from tampu.base.event_loop import is_in_a_task

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from tampu.consume.inflight import Delivery
    from tampu.consume.shares import Share

logger = logging.getLogger("tampu.worker")

#: Jobs that one coroutine runs before it yields to the event loop, if their handlers never wait.
JOBS_PER_TURN = 32
#: How long a cancelled handler may take to clean up, in seconds.
CANCEL_PATIENCE_SECS = 1.0


class Pool:
    """Runs deliveries of all queues of a worker, at most `concurrency` at once."""

    def __init__(self, concurrency: int) -> None:
        self.concurrency = concurrency
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
        #: Jobs finished since the pool began; the reader reads ahead as fast as this grows.
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

    def put(self, share: Share, deliveries: Sequence[Delivery]) -> None:
        """Add deliveries of one queue behind those that wait."""
        share.occupied += len(deliveries)
        self._waiting.extend(deliveries)
        self._wake()

    def put_first(self, delivery: Delivery) -> None:
        """Add a delivery in front of those that wait."""
        delivery.share.occupied += 1
        self._waiting.appendleft(delivery)
        self._wake()

    @property
    def waiting(self) -> int:
        """Return the number of jobs that wait to be started."""
        return len(self._waiting)

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
            delivery.share.occupied -= 1
        return unstarted

    def take_from(self, shares: Container[Share]) -> list[Delivery]:
        """Remove the waiting jobs of these queues and return them. Suspects stay: they are counted."""
        taken: list[Delivery] = []
        kept: list[Delivery] = []
        for delivery in self._waiting:
            (taken if delivery.share in shares and not delivery.is_suspect else kept).append(delivery)
        self._waiting.clear()
        self._waiting.extend(kept)
        for delivery in taken:
            delivery.share.occupied -= 1
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
        wanted = min(max(self.running, 1), len(self._waiting))
        while self._sleepers and self._waking < wanted:
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
        last: Share | None = None
        ran: set[Share] = set()
        while not self._is_ending:
            while self._is_closed or not waiting:
                for share in ran:
                    share.settle_soon()
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
            share = delivery.share
            if share is not last:
                ran.add(share)
                last = share
            try:
                await share.run(delivery)
            finally:
                share.occupied -= 1
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
