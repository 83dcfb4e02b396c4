"""SAQ."""

import asyncio
import os
import time

from saq import Queue, Worker

from bench.program.counter import first_job_of, script_of
from bench.program.driver import serve
from bench.program.payloads import PAYLOAD
from bench.program.round_trips import time_round_trips
from bench.program.stopwatch import Stopwatch


async def queue_at(url, **options):
    queue = Queue.from_url(url, **options)
    await queue.connect()
    return queue


async def queue_add(url, total):
    queue = await queue_at(url)
    await queue.enqueue("nothing", payload=PAYLOAD, ttl=-1)
    watch = Stopwatch()
    for _ in range(total):
        await queue.enqueue("nothing", payload=PAYLOAD, ttl=-1)
    figures = watch.stop(total)
    await queue.disconnect()
    return figures


async def queue_add_concurrent(url, total):
    queue = await queue_at(url)
    await queue.enqueue("nothing", payload=PAYLOAD, ttl=-1)
    watch = Stopwatch()
    await asyncio.gather(*(queue.enqueue("nothing", payload=PAYLOAD, ttl=-1) for _ in range(total)))
    figures = watch.stop(total)
    await queue.disconnect()
    return figures


async def queue_add_delayed(url, total):
    queue = await queue_at(url)
    later = time.time() + 3600
    await queue.enqueue("nothing", payload=PAYLOAD, scheduled=later)
    watch = Stopwatch()
    for _ in range(total):
        await queue.enqueue("nothing", payload=PAYLOAD, scheduled=later)
    figures = watch.stop(total)
    await queue.disconnect()
    return figures


async def drained(url, total, name, concurrency=100, **options):
    queue = await queue_at(url)
    await asyncio.gather(*(queue.enqueue(name, payload=PAYLOAD, ttl=-1, **options) for _ in range(total)))
    done = 0
    finished = asyncio.Event()

    async def nothing(ctx, *, payload):
        nonlocal done
        done += 1
        if done == total:
            finished.set()

    async def fails_once(ctx, *, payload):
        if ctx["job"].attempts == 1:
            raise ValueError("first run")
        await nothing(ctx, payload=payload)

    worker = Worker(queue, [("nothing", nothing), ("fails_once", fails_once)], concurrency=concurrency)
    watch = Stopwatch()
    running = asyncio.ensure_future(worker.start())
    await finished.wait()
    figures = watch.stop(total)
    await worker.stop()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await queue.disconnect()
    return figures


async def _add_one(url):
    queue = await queue_at(url)
    await queue.enqueue("nothing", payload=PAYLOAD)
    await queue.disconnect()


def cold_start(url, total=1):
    asyncio.run(_add_one(url))
    os.environ["BENCH_URL"] = url
    return first_job_of([script_of("saq"), "bench.peers.saq_app.settings"])


async def round_trip(url, total, callers=1):
    async def send(ctx, *, payload):
        return {"sent": True}

    queue = await queue_at(url)
    worker = Worker(queue, [("send", send)], concurrency=100)
    running = asyncio.ensure_future(worker.start())

    # Its sweep at the start may abort a job that is added meanwhile.
    await asyncio.sleep(0.5)

    async def once():
        await queue.apply("send", timeout=30, payload=PAYLOAD)

    await once()
    figures = await time_round_trips(once, total, callers)
    await worker.stop()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await queue.disconnect()
    return figures


async def worker(url, total, concurrency=100):
    return await drained(url, total, "nothing", concurrency)


async def worker_delayed(url, total):
    return await drained(url, total, "nothing", scheduled=time.time() + 0.001)


async def worker_retry(url, total):
    return await drained(url, total, "fails_once", retries=3, retry_delay=0.0)


if __name__ == "__main__":
    serve(
        "saq",
        {
            "queue-add": queue_add,
            "queue-add-concurrent": queue_add_concurrent,
            "queue-add-delayed": queue_add_delayed,
            "cold-start": cold_start,
            "round-trip": round_trip,
            "worker": worker,
            "worker-delayed": worker_delayed,
            "worker-retry": worker_retry,
        },
        packages=("saq",),
        settings={
            "adding": "enqueue, ttl=-1 (nothing kept); 20 at once (its default); uvloop, hiredis",
            "working": "concurrency=100, uvloop, one process; `round-trip`: apply, results kept",
        },
    )
