"""Batch the calls that many tasks make at once, so that they share round trips to the server.

The first calls are sent at once, alone. Calls that arrive while `MAX_IN_FLIGHT` are in flight wait until all of these
have returned, and are then sent together as one batch: a few callers never wait for each other, and a hundred need only
a few script calls. Many calls are sent as two batches: the server works on one while this process handles the replies
to the other. While batches have more than one call, a new call first waits for the others of the same event loop
iteration.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

from tampu.base.limits import MAX_CALL_BYTES, MAX_CALL_ENTRIES

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

Item = TypeVar("Item")
Result = TypeVar("Result")

#: Maximum round trips in flight per batcher.
MAX_IN_FLIGHT = 4
#: Minimum number of waiting calls for which a batch is sent while another one is in flight.
WORTH_A_BATCH = 32


class Batcher(Generic[Item, Result]):
    """Batches calls of one kind. `send_batch` takes items and returns a result, or an error, for each, in order."""

    def __init__(
        self,
        send_batch: Callable[[Sequence[Item]], Awaitable[Sequence[Result | Exception]]],
        size_of: Callable[[Item], int] = lambda item: 0,
    ) -> None:
        self._send_batch = send_batch
        self._size_of = size_of
        self._waiting: deque[tuple[Item, asyncio.Future[Result]]] = deque()
        self._in_flight = 0
        self._calls_in_flight = 0
        self._is_crowded = False
        self._flush_scheduled = False
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_idle(self) -> bool:
        """True if no call is in flight or waiting."""
        return not self._in_flight and not self._waiting

    def start_alone(self) -> bool:
        """Return whether the caller may send its item alone, now. It must then call `finish` afterwards."""
        if self._waiting or self._is_crowded or self._in_flight >= MAX_IN_FLIGHT:  # first come, first served
            return False
        self._in_flight += 1
        self._calls_in_flight += 1
        return True

    def finish(self, calls: int = 1) -> None:
        """Note the end of a round trip."""
        self._in_flight -= 1
        self._calls_in_flight -= calls
        self._flush_soon()

    async def join(self, item: Item) -> Result:
        """Send the item with the next batch and return its result."""
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        self._flush_soon()
        return await future

    def _may_flush(self) -> bool:
        # Few calls wait until all others have returned: the larger a batch, the less each call costs.
        least = 1 if not self._in_flight else WORTH_A_BATCH if self._in_flight == 1 else MAX_CALL_ENTRIES
        return len(self._waiting) >= least

    def _flush_soon(self) -> None:
        """Flush at the end of this event loop iteration: callers that just got a result may call again in it."""
        if not self._flush_scheduled and self._may_flush():
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = self._is_crowded = False
        while self._may_flush() and self._in_flight < MAX_IN_FLIGHT:
            batch = self._next_batch()
            if batch:
                self._is_crowded |= len(batch) > 1
                self._in_flight += 1
                self._calls_in_flight += len(batch)
                task = asyncio.get_running_loop().create_task(self._run(batch))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    def _next_batch(self) -> list[tuple[Item, asyncio.Future[Result]]]:
        batch: list[tuple[Item, asyncio.Future[Result]]] = []
        size = 0
        calls = len(self._waiting) + self._calls_in_flight
        most = min(calls if calls < 2 * WORTH_A_BATCH else (calls + 1) // 2, MAX_CALL_ENTRIES)
        while self._waiting and len(batch) < most:
            item, future = self._waiting[0]
            size += self._size_of(item)
            if batch and size > MAX_CALL_BYTES:
                break
            self._waiting.popleft()
            if not future.done():  # a caller that was cancelled needs no result
                batch.append((item, future))
        return batch

    async def _run(self, batch: list[tuple[Item, asyncio.Future[Result]]]) -> None:
        try:
            results: Sequence[Result | Exception] = await self._send_batch([item for item, _ in batch])
        except Exception as error:  # every caller gets it, or it would wait forever
            results = [error] * len(batch)
        except BaseException:
            for _, future in batch:
                future.cancel()
            self.finish(len(batch))
            raise
        for (_, future), result in zip(batch, results, strict=True):
            if future.done():
                continue
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)
        self.finish(len(batch))  # last, so that callers that got a result can join the next batch
