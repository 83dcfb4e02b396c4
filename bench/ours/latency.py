"""Pickup latency at a fixed rate: from the moment a job should have been added to the start of its handler.

An open loop: the plan says when each job is due, and a job that the adding side is late with counts from its due time,
not from when it was sent. Otherwise every stall would hide the jobs that should have come during it (coordinated
omission). Producer and consumer share one process and one clock.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from bench.ours.adding import CONFIG, QUEUE
from bench.program.latency import percentiles, send_on_time
from bench.program.stopwatch import Stopwatch
from tampu import Consumer, ConsumerConfig, Producer

#: The consumer is up and waiting before the first job is due.
SETTLING_SECS = 0.3


async def pickup_latency(url: str, rate: int, seconds: float = 3.0, events: bool = False) -> dict[str, float]:
    """Milliseconds at the percentiles."""
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
