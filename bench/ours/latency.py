"""Pickup latency at a fixed rate: from the time a job is due to be added until its handler starts.

The loop is open: each job has a due time, and a job that is added late counts from its due time, not from when it was
sent. Otherwise a stall would hide the jobs that were due during it (coordinated omission). Producer and consumer share
one process and one clock.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from bench.ours.adding import CONFIG, QUEUE
from bench.program.latency import percentiles, send_on_time
from bench.program.stopwatch import Stopwatch
from tampu import Consumer, ConsumerConfig, Producer

#: Time for the consumer to start before the first job is due, in seconds.
SETTLING_SECS = 0.3


async def pickup_latency(url: str, rate: int, seconds: float = 3.0, events: bool = False) -> dict[str, float]:
    """Return percentiles of the latency in milliseconds."""
    total = int(rate * seconds)
    latencies: list[float] = []
    shutdown = asyncio.Event()

    async def handler(job: Any) -> None:
        latencies.append(time.perf_counter() - job.payload)
        if len(latencies) == total:
            shutdown.set()

    config = ConsumerConfig(queue_name=QUEUE, events_enabled=events)
    async with Producer.connect(url, CONFIG) as producer:
        consumer = asyncio.create_task(Consumer(url, config).run(handler, shutdown))
        await asyncio.sleep(SETTLING_SECS)
        watch = Stopwatch()
        await send_on_time(producer.add, rate, total)
        async with asyncio.timeout(30):
            await shutdown.wait()
        figures = watch.stop(total)
        await consumer
    return {**percentiles(latencies), "client_us": figures["client_us"], "server_us": figures["server_us"]}
