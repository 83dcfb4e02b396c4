"""Memory that a long queue takes on the server and in a worker."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

from bench.ours.adding import AN_HOUR_SECS, CONFIG, QUEUE
from bench.ours.working import RESULT, fill, work
from bench.program.payloads import PAYLOAD, payload_of
from bench.program.server_memory import used_memory
from bench.program.stopwatch import resident_mb
from tampu import Consumer, ConsumerConfig, Producer

#: Number of jobs that the worker runs before its memory is measured, while the rest is still waiting.
LOOKED_AT_AFTER = 200_000


async def memory_with_waiting(url: str, total: int, batch: int = 256) -> dict[str, float]:
    """Return the server's bytes per waiting job, and the resident memory of the producer and of a worker."""
    async with Producer.connect(url, CONFIG) as producer:
        empty = await _used_memory(producer)
        producer_mb = await _peak_of_a_bulk(url, total)
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
        "producer_mb": producer_mb,
        "worker_mb": most_mb,
    }


async def server_memory(url: str, total: int, payload_bytes: int = 0) -> dict[str, float]:
    """Return the server's bytes per waiting job, per finished job with a result, and per delayed job."""
    payload = payload_of(payload_bytes) if payload_bytes else PAYLOAD
    # A first job of each kind: scripts and buffers that stay do not count.
    async with Producer.connect(url, CONFIG) as producer:
        await producer.add_in(AN_HOUR_SECS, payload)
    await fill(url, 1, payload)
    await work(url, 1, result=RESULT, store_results=True, events_enabled=False)
    empty = used_memory(url)
    await fill(url, total, payload)
    waiting = used_memory(url)
    await work(url, total, result=RESULT, store_results=True, events_enabled=False)
    finished = used_memory(url)
    async with Producer.connect(url, CONFIG) as producer:
        await producer.add_in_bulk(AN_HOUR_SECS, [payload] * total)
    delayed = used_memory(url)  # without the buffers of the connection, as for waiting and finished jobs
    return {
        "waiting_bytes": (waiting - empty) / total,
        "finished_bytes": (finished - empty) / total,
        "delayed_bytes": (delayed - finished) / total,
    }


async def _peak_of_a_bulk(url: str, total: int) -> float:
    command = (sys.executable, "-m", "bench.ours.bulk", url, str(total))
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    told, _ = await process.communicate()
    return float(told)


async def _used_memory(producer: Any) -> int:
    text = (await producer.client.call("INFO", "memory")).decode()
    return next(int(line.split(":")[1]) for line in text.splitlines() if line.startswith("used_memory:"))
