"""Scenarios that run jobs. Handlers do nothing; measured from the consumer's start to the end of the last handler."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

from bench.ours.adding import CONFIG, QUEUE
from bench.program.payloads import PAYLOAD, payload_of
from bench.program.stopwatch import Stopwatch
from tampu import AddOptions, BackoffSpec, Consumer, ConsumerConfig, JobRetryOverride, Producer, Queue, Worker

#: Return value of a handler whose results are stored, already encoded: `{"sent": true}`.
RESULT = b"\x81\xa4sent\xc3"


async def fill(url: str, total: int, payload: Any = PAYLOAD) -> None:
    async with Producer.connect(url, CONFIG) as producer:
        await producer.add_bulk(payload for _ in range(total))


async def work(url: str, total: int, *, kind: str = "async", result: Any = None, **settings: Any) -> dict[str, float]:
    """Run all waiting jobs with one consumer."""
    done = 0
    loop = asyncio.get_running_loop()
    shutdown = asyncio.Event()
    lock = threading.Lock()

    async def succeeds(job: Any) -> Any:
        nonlocal done
        done += 1
        if done == total:
            shutdown.set()
        return result

    async def fails_once(job: Any) -> None:
        if job.attempt == 0:
            raise ValueError("first run")
        await succeeds(job)

    def in_a_thread(job: Any) -> None:
        nonlocal done
        with lock:
            done += 1
            is_last = done == total
        if is_last:
            loop.call_soon_threadsafe(shutdown.set)

    handler: Any = {"async": succeeds, "retry": fails_once, "sync": in_a_thread}[kind]
    config = ConsumerConfig(queue_name=QUEUE, block_ms=100, **settings)
    watch = Stopwatch()
    running_consumer = asyncio.create_task(Consumer(url, config).run(handler, shutdown))
    await shutdown.wait()
    figures = watch.stop(total)
    await running_consumer
    return figures


async def worker(
    url: str,
    total: int,
    *,
    concurrency: int = 100,
    events: bool = False,
    results: bool = False,
    batch: int = 64,
    kind: str = "async",
    payload_bytes: int = 0,
) -> dict[str, float]:
    """Run `worker-generic` (concurrency 1), `worker-concurrent` (concurrency 100) and their variants."""
    await fill(url, total, payload_of(payload_bytes) if payload_bytes else PAYLOAD)
    stored: dict[str, Any] = {"store_results": True, "result": RESULT} if results else {}
    return await work(url, total, kind=kind, concurrency=concurrency, events_enabled=events, batch=batch, **stored)


async def worker_many(url: str, total: int, queues: int = 100) -> dict[str, float]:
    """Run jobs that are spread over many queues, with one worker."""
    names = [f"{QUEUE}-{number}" for number in range(queues)]
    for name in names:
        async with Producer.connect(url, replace(CONFIG, queue_name=name)) as producer:
            await producer.add_bulk(PAYLOAD for _ in range(total // queues))
    left = total // queues * queues
    shutdown = asyncio.Event()

    async def handler(job: Any) -> None:
        nonlocal left
        left -= 1
        if not left:
            shutdown.set()

    worker = Worker([Queue(name, url=url) for name in names], handler, events_enabled=False, read_block_ms=100)
    watch = Stopwatch()
    running = asyncio.create_task(worker.run())
    await shutdown.wait()
    figures = watch.stop(total // queues * queues)
    await worker.close()
    await running
    return figures


async def worker_delayed(url: str, total: int, batch: int = 64) -> dict[str, float]:
    """Run jobs that are due at the same time, until the last has run."""
    async with Producer.connect(url, CONFIG) as producer:
        await producer.add_in_bulk(0.001, [PAYLOAD] * total)
    return await work(url, total, events_enabled=False, batch=batch)


async def worker_retry(url: str, total: int, batch: int = 64) -> dict[str, float]:
    """Run jobs that fail once and are retried immediately, until all have succeeded."""
    retry = JobRetryOverride(3, BackoffSpec.fixed(1, jitter_ms=0))
    async with Producer.connect(url, CONFIG) as producer:
        await producer.add_bulk_with_options([PAYLOAD] * total, AddOptions(retry=retry))
    return await work(url, total, kind="retry", events_enabled=False, batch=batch)
