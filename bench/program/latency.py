"""An open loop that sends on schedule, and percentiles."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

PERCENTILES = (50, 90, 99, 99.9)


async def send_on_time(send: Callable[[float], Awaitable[Any]], rate: int, total: int) -> None:
    """Call `send` with each message's due time, `rate` per second, without waiting for earlier calls to return."""
    began = time.perf_counter()
    under_way: set[asyncio.Task[Any]] = set()
    number = 0
    while number < total:
        now = time.perf_counter()
        while number < total and began + number / rate <= now:
            task = asyncio.ensure_future(send(began + number / rate))
            under_way.add(task)
            task.add_done_callback(under_way.discard)
            number += 1
        # Timers of an event loop have a resolution of about a millisecond; lateness counts towards the latency.
        await asyncio.sleep(max(began + number / rate - time.perf_counter(), 0))
    if under_way:
        await asyncio.gather(*under_way)


def percentiles(seconds: list[float]) -> dict[str, float]:
    """Return percentiles in milliseconds."""
    ordered = sorted(seconds)
    found = {f"p{p:g}_ms": ordered[min(int(len(ordered) * p / 100), len(ordered) - 1)] * 1e3 for p in PERCENTILES}
    return {**found, "max_ms": ordered[-1] * 1e3}
