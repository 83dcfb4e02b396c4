"""streaQ."""

import asyncio

from streaq import StreaqRetry, Worker

from bench.program.driver import serve
from bench.program.payloads import PAYLOAD
from bench.program.stopwatch import Stopwatch


def made(url, concurrency=100, on_job=None):
    worker = Worker(redis_url=url, concurrency=concurrency, prefetch=256, handle_signals=False)

    @worker.task(name="nothing", ttl=0, silent=True)
    async def nothing(payload: dict) -> None:
        if on_job:
            on_job()

    @worker.task(name="fails_once", ttl=0, silent=True, max_tries=3)
    async def fails_once(payload: dict) -> None:
        if fails_once.context.tries == 1:
            raise StreaqRetry("first run", delay=0)
        if on_job:
            on_job()

    return worker, nothing, fails_once


async def queue_add(url, total):
    worker, nothing, _ = made(url)
    async with worker:
        await nothing.enqueue(PAYLOAD)
        watch = Stopwatch()
        for _ in range(total):
            await nothing.enqueue(PAYLOAD)
        return watch.stop(total)


async def queue_add_bulk(url, total, size):
    worker, nothing, _ = made(url)
    async with worker:
        await nothing.enqueue(PAYLOAD)
        watch = Stopwatch()
        for _ in range(total // size):
            await worker.enqueue_many([nothing.enqueue(PAYLOAD) for _ in range(size)])
        return watch.stop(total)


async def queue_add_delayed(url, total):
    worker, nothing, _ = made(url)
    async with worker:
        await nothing.enqueue(PAYLOAD).start(delay=3600)
        watch = Stopwatch()
        for _ in range(total):
            await nothing.enqueue(PAYLOAD).start(delay=3600)
        return watch.stop(total)


async def drained(url, total, which, concurrency=100, delay=None):
    done = 0
    finished = asyncio.Event()

    def on_job():
        nonlocal done
        done += 1
        if done == total:
            finished.set()

    worker, *tasks = made(url, concurrency, on_job)
    async with worker:
        for start in range(0, total, 500):
            adds = [tasks[which].enqueue(PAYLOAD) for _ in range(min(500, total - start))]
            if delay is not None:
                adds = [add.start(delay=delay) for add in adds]
            await worker.enqueue_many(adds)
    worker, *tasks = made(url, concurrency, on_job)
    watch = Stopwatch()
    running = asyncio.ensure_future(worker.run_async())
    await finished.wait()
    figures = watch.stop(total)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    return figures


async def worker(url, total, concurrency=100):
    return await drained(url, total, 0, concurrency)


async def worker_delayed(url, total):
    return await drained(url, total, 0, delay=0.001)


async def worker_retry(url, total):
    return await drained(url, total, 1)


if __name__ == "__main__":
    serve(
        "streaq",
        {
            "queue-add": queue_add,
            "queue-add-bulk": queue_add_bulk,
            "queue-add-delayed": queue_add_delayed,
            "worker": worker,
            "worker-delayed": worker_delayed,
            "worker-retry": worker_retry,
        },
        packages=("streaq", "coredis"),
        settings={
            "adding": "enqueue, enqueue_many; uvloop",
            "working": "concurrency=100, prefetch=256, ttl=0 (no results kept), silent tasks, uvloop, one process",
        },
    )
