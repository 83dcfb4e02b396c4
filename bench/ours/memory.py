"""What memory a long queue takes, at the server and in a worker."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from bench.ours.adding import CONFIG, QUEUE
from bench.program.payloads import PAYLOAD
from bench.program.stopwatch import resident_mb
from tampu import Consumer, ConsumerConfig, Producer

#: How many jobs the worker runs before its memory is looked at, while the rest still waits.
LOOKED_AT_AFTER = 200_000


async def memory_with_waiting(url: str, total: int, batch: int = 256) -> dict[str, float]:
    """The server's bytes per waiting job, and a worker's resident memory while it works on the queue."""
    async with Producer.connect(url, CONFIG) as producer:
        empty = await _used_memory(producer)
        before_mb = resident_mb([os.getpid()])
        await producer.add_bulk(PAYLOAD for _ in range(total))
        filled_mb = resident_mb([os.getpid()])
        bytes_per_job = (await _used_memory(producer) - empty) / total
    done, most_mb = 0, 0.0
    shutdown = asyncio.Event()

    async def handler(job: Any) -> None:
        nonlocal done, most_mb
        done += 1
        if done % 10_000 == 0:
            most_mb = max(most_mb, resident_mb([os.getpid()]))
        if done == min(LOOKED_AT_AFTER, total):
            shutdown.set()

    config = ConsumerConfig(queue_name=QUEUE, block_ms=100, events_enabled=False, batch=batch)
    await Consumer(url, config).run(handler, shutdown)
    return {
        "server_bytes_per_job": bytes_per_job,
        "bulk_added_mb": filled_mb - before_mb,
        "worker_mb": most_mb,
    }


async def _used_memory(producer: Any) -> int:
    text = (await producer.pipe.call("INFO", "memory")).decode()
    return next(int(line.split(":")[1]) for line in text.splitlines() if line.startswith("used_memory:"))
