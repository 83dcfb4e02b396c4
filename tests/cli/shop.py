"""A queue with jobs in every state: done, dead, waiting, delayed, and a schedule."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import timedelta

from support.waiting import until
from tampu import Queue, UnrecoverableError, Worker

QUEUE = "shop"


@dataclass
class Filled:
    """IDs of the jobs, by state."""

    done: str
    dead: str
    hopeless: str
    waiting: str
    delayed: str


def fill(url: str) -> Filled:
    """Fill the queue `shop`: one job is done, one is dead after two attempts, one is dead at once, two have not run."""
    return asyncio.run(_fill(url))


async def _fill(url: str) -> Filled:
    async with Queue(QUEUE, url=url) as queue:

        @queue.task(attempts=2, backoff=timedelta(milliseconds=1))
        async def pack(order: int) -> dict[str, int]:
            return {"packed": order}

        @queue.task(attempts=2, backoff=timedelta(milliseconds=1))
        async def pay(order: int, card: str = "") -> None:
            if card == "none":
                raise UnrecoverableError("no card")
            raise RuntimeError("503 Service Unavailable")

        done = await pack.add(1)
        dead = await pay.add(2)
        hopeless = await pay.add(3, card="none")
        worker = Worker(queue, delayed_poll_interval_ms=5, read_block_ms=100, run_scheduler=False)
        running = asyncio.create_task(worker.run())
        assert await done.result(20) == {"packed": 1}

        async def letters() -> bool:
            return len(await queue.peek_dlq()) == 2

        await until(letters, "two dead letters")
        await worker.close()
        await running
        waiting = await pack.add(4)
        delayed = await pack.add_in(3600, 5)
        await pack.cron("0 9 * * *", {"order": 6}, tz="America/Lima", key="daily")
        return Filled(done.id, dead.id, hopeless.id, waiting.id, delayed.id)
