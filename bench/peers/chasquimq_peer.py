"""Runs scenarios with chasquimq 1.3.0's Python API under uvloop; see `Peer` in harness.py."""

import asyncio
import json
import sys
import time

import redis.asyncio
import uvloop
from chasquimq import Queue, Worker

PAYLOAD = {"to": "ada@example.com", "subject": "Welcome aboard", "body": "x" * 60}


async def add_bulk(url, size, total):
    jobs = [{"name": "", "data": PAYLOAD}] * size
    async with Queue("bench", redis_url=url) as queue:
        await queue.add_bulk(jobs)
        start = time.perf_counter()
        for _ in range(total // size):
            await queue.add_bulk(jobs)
        return total / (time.perf_counter() - start)


async def add_concurrent(url, total):
    async with Queue("bench", redis_url=url) as queue:
        await queue.add("", PAYLOAD)
        start = time.perf_counter()
        await asyncio.gather(*(queue.add("", PAYLOAD) for _ in range(total)))
        return total / (time.perf_counter() - start)


async def add_sequence(url, total):
    async with Queue("bench", redis_url=url) as queue:
        await queue.add("", PAYLOAD)
        start = time.perf_counter()
        for _ in range(total):
            await queue.add("", PAYLOAD)
        return total / (time.perf_counter() - start)


async def work(url, total, concurrency, **options):
    """A worker drains what is there; timed from its start to the last handler."""
    done = 0
    finished = asyncio.Event()

    async def handler(job):
        nonlocal done
        done += 1
        if done == total:
            finished.set()

    worker = Worker("bench", handler, redis_url=url, concurrency=concurrency, read_block_ms=100, **options)
    start = time.perf_counter()
    running = asyncio.ensure_future(worker.run())
    await finished.wait()
    rate = total / (time.perf_counter() - start)
    await worker.close()
    await running
    return rate


async def fill(url, total, size=1000):
    async with Queue("bench", redis_url=url) as queue:
        for _ in range(total // size):
            await queue.add_bulk([{"name": "", "data": PAYLOAD}] * size)


async def worker_concurrent(url, total, concurrency, events):
    await fill(url, total)
    return await work(url, total, concurrency, events_enabled=events)


async def worker_delayed(url, total, concurrency):
    """Jobs due at one instant, added by the peer's own way, until the last has run."""
    async with Queue("bench", redis_url=url) as queue:
        await asyncio.gather(*(queue.add("", PAYLOAD, delay_ms=1) for _ in range(total)))
    return await work(url, total, concurrency, events_enabled=False)


async def worker_retry(url, total, concurrency):
    """Every job fails once and is retried at once; timed until all have succeeded."""
    from chasquimq import BackoffSpec

    backoff = BackoffSpec.fixed(1, jitter_ms=0)
    async with Queue("bench", redis_url=url) as queue:
        await asyncio.gather(*(queue.add("", PAYLOAD, attempts=3, backoff=backoff) for _ in range(total)))
    done = 0
    finished = asyncio.Event()

    async def handler(job):
        nonlocal done
        if job.attempt == 0:
            raise ValueError("first run")
        done += 1
        if done == total:
            finished.set()

    worker = Worker("bench", handler, redis_url=url, concurrency=concurrency, read_block_ms=100, events_enabled=False)
    start = time.perf_counter()
    running = asyncio.ensure_future(worker.run())
    await finished.wait()
    rate = total / (time.perf_counter() - start)
    await worker.close()
    await running
    return rate


SCENARIOS = {
    function.__name__: function
    for function in (add_bulk, add_concurrent, add_sequence, worker_concurrent, worker_delayed, worker_retry)
}


async def main(url):
    loop = asyncio.get_running_loop()
    client = redis.asyncio.from_url(url)
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        request = json.loads(line)
        await client.flushall()
        rate = await SCENARIOS[request.pop("scenario")](url, **request)
        await client.flushall()
        print(json.dumps({"rate": rate}), flush=True)
    await client.aclose()


uvloop.run(main(sys.argv[1]))
