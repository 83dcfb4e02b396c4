"""BullMQ's Python port."""

import asyncio
import os
import sys

from bullmq import Queue, Worker

from bench.program.counter import first_job_of
from bench.program.driver import serve
from bench.program.payloads import PAYLOAD
from bench.program.stopwatch import Stopwatch

REMOVED = {"removeOnComplete": True, "removeOnFail": True}


def queue_at(url):
    return Queue("bench", {"connection": url})


async def queue_add(url, total):
    queue = queue_at(url)
    await queue.add("nothing", PAYLOAD, REMOVED)
    watch = Stopwatch()
    for _ in range(total):
        await queue.add("nothing", PAYLOAD, REMOVED)
    figures = watch.stop(total)
    await queue.close()
    return figures


async def queue_add_bulk(url, total, size):
    queue = queue_at(url)
    jobs = [{"name": "nothing", "data": PAYLOAD, "opts": REMOVED}] * size
    await queue.addBulk(jobs)
    watch = Stopwatch()
    for _ in range(total // size):
        await queue.addBulk(jobs)
    figures = watch.stop(total)
    await queue.close()
    return figures


async def queue_add_concurrent(url, total):
    queue = queue_at(url)
    await queue.add("nothing", PAYLOAD, REMOVED)
    watch = Stopwatch()
    await asyncio.gather(*(queue.add("nothing", PAYLOAD, REMOVED) for _ in range(total)))
    figures = watch.stop(total)
    await queue.close()
    return figures


async def queue_add_delayed(url, total):
    queue = queue_at(url)
    options = {**REMOVED, "delay": 3_600_000}
    await queue.add("nothing", PAYLOAD, options)
    watch = Stopwatch()
    for _ in range(total):
        await queue.add("nothing", PAYLOAD, options)
    figures = watch.stop(total)
    await queue.close()
    return figures


async def drained(url, total, concurrency=100, fails_once=False, **options):
    queue = queue_at(url)
    jobs = [{"name": "nothing", "data": PAYLOAD, "opts": {**REMOVED, **options}}] * min(total, 500)
    for _ in range(total // len(jobs)):
        await queue.addBulk(jobs)
    total = total // len(jobs) * len(jobs)
    done = 0
    finished = asyncio.Event()

    async def process(job, token):
        nonlocal done
        if fails_once and job.attemptsMade == 0:
            raise ValueError("first run")
        done += 1
        if done == total:
            finished.set()

    watch = Stopwatch()
    worker = Worker("bench", process, {"connection": url, "concurrency": concurrency})
    await finished.wait()
    figures = watch.stop(total)
    await worker.close(force=True)
    await queue.close()
    return figures


async def _add_one(url):
    queue = queue_at(url)
    await queue.add("nothing", PAYLOAD, REMOVED)
    await queue.close()


def cold_start(url, total=1):
    asyncio.run(_add_one(url))
    os.environ["BENCH_URL"] = url
    return first_job_of([sys.executable, "-m", "bench.peers.bullmq_app"])


async def worker(url, total, concurrency=100):
    return await drained(url, total, concurrency)


async def worker_delayed(url, total):
    return await drained(url, total, delay=1)


async def worker_retry(url, total):
    return await drained(url, total, fails_once=True, attempts=3, backoff=1)


if __name__ == "__main__":
    serve(
        "bullmq",
        {
            "queue-add": queue_add,
            "queue-add-bulk": queue_add_bulk,
            "queue-add-concurrent": queue_add_concurrent,
            "queue-add-delayed": queue_add_delayed,
            "cold-start": cold_start,
            "worker": worker,
            "worker-delayed": worker_delayed,
            "worker-retry": worker_retry,
        },
        packages=("bullmq",),
        settings={
            "adding": "add, addBulk; removeOnComplete, removeOnFail; uvloop",
            "working": "concurrency=100, removeOnComplete, uvloop, one process",
        },
    )
