"""The pool: a fixed number of coroutines that take deliveries from one deque and run the handler. No task per job."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from tampu.engine.delivery import Delivery

#: Jobs one coroutine may run without giving way to the event loop, when their handlers never wait.
JOBS_PER_TURN = 32


class Pool:
    """Runs `run_one(delivery)` for each delivery, at most `concurrency` at once."""

    def __init__(self, concurrency: int, run_one: Callable[[Delivery], Awaitable[None]]) -> None:
        self._concurrency = concurrency
        self._run_one = run_one
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[Delivery] = deque()
        self._sleepers: list[asyncio.Future[None]] = []
        self._waking = False
        self._tasks = [
            self._loop.create_task(self._work(), name=f"tampu-pool-{number}") for number in range(concurrency)
        ]
        self.running = 0
        #: Jobs finished since the pool began; the reader reads ahead as fast as this grows.
        self.finished = 0
        self._progress = asyncio.Event()

    @property
    def occupied(self) -> int:
        """Jobs running or waiting."""
        return self.running + len(self._waiting)

    def put(self, deliveries: Iterable[Delivery]) -> None:
        """Take these in."""
        self._waiting.extend(deliveries)
        self._wake_one()

    async def progress(self, timeout_secs: float) -> None:
        """Wait until a job has finished since the last call, or the time is over."""
        self._progress.clear()
        try:
            async with asyncio.timeout(timeout_secs):
                await self._progress.wait()
        except TimeoutError:
            pass

    def take_back(self) -> list[Delivery]:
        """All that has not been started."""
        unstarted = list(self._waiting)
        self._waiting.clear()
        return unstarted

    async def finish(self, timeout_secs: float) -> int:
        """Wait for the running handlers, then end the coroutines; how many handlers had to be abandoned."""
        deadline = self._loop.time() + timeout_secs
        while self.running and self._loop.time() < deadline:
            await self.progress(deadline - self._loop.time())
        abandoned = self.running
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        return abandoned

    def _wake_one(self) -> None:
        """One at a time: a worker that is awake takes the next job, so a batch of quick jobs wakes few."""
        if self._sleepers and not self._waking:
            sleeper = self._sleepers.pop()
            if not sleeper.done():
                self._waking = True
                sleeper.set_result(None)

    async def _work(self) -> None:
        waiting = self._waiting
        run_one = self._run_one
        in_a_row = 0
        while True:
            while not waiting:
                sleeper: asyncio.Future[None] = self._loop.create_future()
                self._sleepers.append(sleeper)
                await sleeper
                self._waking = False
                in_a_row = 0
            delivery = waiting.popleft()
            if waiting:
                # Should this handler wait for something, somebody else must take the next job.
                self._wake_one()
            self.running += 1
            try:
                await run_one(delivery)
            finally:
                self.running -= 1
                self.finished += 1
                self._progress.set()
            in_a_row += 1
            if in_a_row >= JOBS_PER_TURN:
                in_a_row = 0
                await asyncio.sleep(0)
