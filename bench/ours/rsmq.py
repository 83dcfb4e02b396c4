"""RSMQ scenarios: one by one, with many callers on one connection, and in batches."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from bench.program.payloads import MESSAGE
from bench.program.stopwatch import Stopwatch
from tampu.rsmq import QueueExists, Rsmq

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

QUEUE = "bench"
CALLERS = 100
BATCH = 100


class Messages:
    """Ways to send and receive messages."""

    def __init__(self, rsmq: Rsmq) -> None:
        self._rsmq = rsmq

    async def send(self, times: int) -> None:
        for _ in range(times):
            await self._rsmq.send_message(QUEUE, MESSAGE)

    async def receive(self, times: int) -> None:
        for _ in range(times):
            message = await self._rsmq.receive_message(QUEUE)
            assert message is not None
            await self._rsmq.delete_message(QUEUE, message.id)

    async def send_batches(self, times: int) -> None:
        for _ in range(times // BATCH):
            await self._rsmq.send_messages(QUEUE, [MESSAGE] * BATCH)

    async def receive_batches(self, times: int) -> None:
        for _ in range(times // BATCH):
            messages = await self._rsmq.receive_messages(QUEUE, max=BATCH)
            assert len(messages) == BATCH
            await self._rsmq.delete_messages(QUEUE, [message.id for message in messages])


async def send(url: str, total: int, how: str = "one by one") -> dict[str, float]:
    async with Rsmq(url) as rsmq:
        with contextlib.suppress(QueueExists):
            await rsmq.create_queue(QUEUE)
        messages = Messages(rsmq)
        await messages.send(1)
        await messages.send_batches(BATCH)
        return await _timed(messages.send_batches if how == "batches" else messages.send, total, how)


async def receive_delete(url: str, total: int, how: str = "one by one") -> dict[str, float]:
    async with Rsmq(url) as rsmq:
        with contextlib.suppress(QueueExists):
            await rsmq.create_queue(QUEUE)
        messages = Messages(rsmq)
        await messages.send_batches(total + 2 * BATCH)
        # The first call loads the scripts, which is not measured.
        await messages.receive(1)
        await messages.receive_batches(BATCH)
        return await _timed(messages.receive_batches if how == "batches" else messages.receive, total, how)


async def _timed(work: Callable[[int], Awaitable[None]], total: int, how: str) -> dict[str, float]:
    watch = Stopwatch()
    if how == "100 callers":
        await asyncio.gather(*(work(total // CALLERS) for _ in range(CALLERS)))
    else:
        await work(total)
    return watch.stop(total)
