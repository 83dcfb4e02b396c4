"""Times round trips: add a job and wait for its result, from one caller or from many."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from typing import TYPE_CHECKING, Any

from bench.program.latency import percentiles
from bench.program.stopwatch import Stopwatch

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


async def time_round_trips(once: Callable[[], Awaitable[Any]], total: int, callers: int) -> dict[str, float]:
    """Await `once` from all callers, one call after the other in each. Return rate, CPU and percentiles.

    The CPU time is that of this process and its children, among them the worker of a peer that needs one.
    """
    latencies: list[float] = []

    async def caller() -> None:
        for _ in range(total // callers):
            began = time.perf_counter()
            await once()
            latencies.append(time.perf_counter() - began)

    watch = Stopwatch([os.getpid()])
    await asyncio.gather(*(caller() for _ in range(callers)))
    return {**watch.stop(len(latencies)), **percentiles(latencies)}


def time_round_trips_in_threads(once: Callable[[], Any], total: int, callers: int) -> dict[str, float]:
    """Do the same for clients without asyncio, with one thread per caller."""
    latencies: list[float] = []

    def caller() -> None:
        for _ in range(total // callers):
            began = time.perf_counter()
            once()
            latencies.append(time.perf_counter() - began)

    threads = [threading.Thread(target=caller) for _ in range(callers)]
    watch = Stopwatch([os.getpid()])
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {**watch.stop(len(latencies)), **percentiles(latencies)}
