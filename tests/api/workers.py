"""Workers for tests: `async with working(queue):` runs one until the block ends."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from support.waiting import until
from tampu import Worker
from tampu.wire.retry import RetryConfig

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

#: Short intervals, so that tests are fast; everything else is the default.
QUICK: dict[str, Any] = {
    "concurrency": 8,
    "delayed_poll_interval_ms": 20,
    "scheduler_tick_ms": 50,
    "retry": RetryConfig(initial_backoff_ms=1, max_backoff_ms=20, jitter_ms=0),
    "shutdown_deadline_secs": 5,
}


@contextlib.asynccontextmanager
async def working(*served: Any, **settings: Any) -> AsyncIterator[Worker]:
    """Run a worker until the block ends; the block starts when it reads."""
    worker = Worker(*served, **(QUICK | settings))
    task = asyncio.create_task(worker.run())
    try:
        await until(lambda: task.done() or worker.seconds_since_last_read() is not None, "the worker reads")
        yield worker
    finally:
        await worker.close()
        await asyncio.wait_for(task, 30)
