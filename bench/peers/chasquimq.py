"""chasquimq 1.3.0: the Rust original behind its Python API."""

import asyncio
import os
import sys
import time

from chasquimq import BackoffSpec, Queue, Worker

from bench.program.counter import first_job_of
from bench.program.driver import serve
from bench.program.latency import percentiles, send_on_time
from bench.program.payloads import PAYLOAD, payload_of
from bench.program.round_trips import time_round_trips
from bench.program.server_memory import used_memory
from bench.program.stopwatch import Stopwatch

AN_HOUR_MS = 3_600_000


async def queue_add(url, total):
    async with Queue("bench", redis_url=url) as queue:
        await queue.add("", PAYLOAD)
        watch = Stopwatch()
        for _ in range(total):
            await queue.add("", PAYLOAD)
        return watch.stop(total)


async def queue_add_bulk(url, total, size, payload_bytes=0):
    payload = payload_of(payload_bytes) if payload_bytes else PAYLOAD
    jobs = [{"name": "", "data": payload}] * size
    async with Queue("bench", redis_url=url) as queue:
        await queue.add_bulk(jobs)
        watch = Stopwatch()
        for _ in range(total // size):
            await queue.add_bulk(jobs)
        return watch.stop(total)


async def queue_add_concurrent(url, total):
    async with Queue("bench", redis_url=url) as queue:
        await queue.add("", PAYLOAD)
        watch = Stopwatch()
        await asyncio.gather(*(queue.add("", PAYLOAD) for _ in range(total)))
        return watch.stop(total)


async def queue_add_delayed(url, total):
    async with Queue("bench", redis_url=url) as queue:
        await queue.add("", PAYLOAD, delay_ms=AN_HOUR_MS)
        watch = Stopwatch()
        for _ in range(total):
            await queue.add("", PAYLOAD, delay_ms=AN_HOUR_MS)
        return watch.stop(total)


async def queue_add_delayed_concurrent(url, total):
    async with Queue("bench", redis_url=url) as queue:
        await queue.add("", PAYLOAD, delay_ms=AN_HOUR_MS)
        watch = Stopwatch()
        await asyncio.gather(*(queue.add("", PAYLOAD, delay_ms=AN_HOUR_MS) for _ in range(total)))
        return watch.stop(total)


async def work(url, total, *, fails_once=False, **options):
    """Run all waiting jobs with a worker; measured from its start to the last handler."""
    done = 0
    finished = asyncio.Event()

    async def handler(job):
        nonlocal done
        if fails_once and job.attempt == 0:
            raise ValueError("first run")
        done += 1
        if done == total:
            finished.set()
        return {"sent": True}

    made = Worker("bench", handler, redis_url=url, read_block_ms=100, **options)
    watch = Stopwatch()
    running = asyncio.ensure_future(made.run())
    await finished.wait()
    figures = watch.stop(total)
    await made.close()
    await running
    return figures


async def worker(url, total, concurrency=100, events=False, results=False, payload_bytes=0):
    payload = payload_of(payload_bytes) if payload_bytes else PAYLOAD
    async with Queue("bench", redis_url=url) as queue:
        for start in range(0, total, 1000):
            await queue.add_bulk([{"name": "", "data": payload}] * min(1000, total - start))
    return await work(url, total, concurrency=concurrency, events_enabled=events, store_results=results)


async def worker_default(url, total):
    """Run jobs with the features that tampu has on by default: events and results."""
    return await worker(url, total, events=True, results=True)


async def _add_one(url):
    async with Queue("bench", redis_url=url) as queue:
        await queue.add("", PAYLOAD)


def cold_start(url, total=1):
    asyncio.run(_add_one(url))
    os.environ["BENCH_URL"] = url
    return first_job_of([sys.executable, "-m", "bench.peers.chasquimq_app"])


async def round_trip(url, total, callers=1):
    async def handler(job):
        return {"sent": True}

    made = Worker("bench", handler, redis_url=url, concurrency=100, store_results=True)
    async with Queue("bench", redis_url=url) as queue:
        running = asyncio.ensure_future(made.run())

        async def once():
            job = await queue.add("", PAYLOAD)
            await job.wait_for_result(poll_interval=0.001)

        await once()
        figures = await time_round_trips(once, total, callers)
        await made.close()
        await running
    return figures


async def worker_delayed(url, total):
    """Run jobs that are due at the same time, added with the peer's own call, until the last has run."""
    async with Queue("bench", redis_url=url) as queue:
        await asyncio.gather(*(queue.add("", PAYLOAD, delay_ms=1) for _ in range(total)))
    return await work(url, total, concurrency=100, events_enabled=False)


async def worker_retry(url, total):
    """Run jobs that fail once and are retried immediately; measured until all have succeeded."""
    backoff = BackoffSpec.fixed(1, jitter_ms=0)
    async with Queue("bench", redis_url=url) as queue:
        await asyncio.gather(*(queue.add("", PAYLOAD, attempts=3, backoff=backoff) for _ in range(total)))
    return await work(url, total, fails_once=True, concurrency=100, events_enabled=False)


async def server_memory(url, total, payload_bytes=0):
    payload = payload_of(payload_bytes) if payload_bytes else PAYLOAD
    async with Queue("bench", redis_url=url) as queue:
        await queue.add("", payload, delay_ms=AN_HOUR_MS)
        await queue.add("", payload)
        await work(url, 1, concurrency=100, events_enabled=False, store_results=True)
        empty = used_memory(url)
        for start in range(0, total, 1000):
            await queue.add_bulk([{"name": "", "data": payload}] * min(1000, total - start))
        waiting = used_memory(url)
        await work(url, total, concurrency=100, events_enabled=False, store_results=True)
        finished = used_memory(url)
        for start in range(0, total, 1000):
            adds = (queue.add("", payload, delay_ms=AN_HOUR_MS) for _ in range(min(1000, total - start)))
            await asyncio.gather(*adds)
        delayed = used_memory(url)
    return {
        "waiting_bytes": (waiting - empty) / total,
        "finished_bytes": (finished - empty) / total,
        "delayed_bytes": (delayed - finished) / total,
    }


async def pickup_latency(url, rate, seconds=3.0):
    total = int(rate * seconds)
    latencies = []
    finished = asyncio.Event()

    async def handler(job):
        latencies.append(time.perf_counter() - job.data)
        if len(latencies) == total:
            finished.set()

    made = Worker("bench", handler, redis_url=url, events_enabled=False)
    async with Queue("bench", redis_url=url) as queue:
        running = asyncio.ensure_future(made.run())
        await asyncio.sleep(0.3)
        watch = Stopwatch()
        await send_on_time(lambda due: queue.add("", due), rate, total)
        async with asyncio.timeout(30):
            await finished.wait()
        figures = watch.stop(total)
        await made.close()
        await running
    return {**percentiles(latencies), "client_us": figures["client_us"], "server_us": figures["server_us"]}


if __name__ == "__main__":
    serve(
        "chasquimq",
        {
            "queue-add": queue_add,
            "queue-add-bulk": queue_add_bulk,
            "queue-add-concurrent": queue_add_concurrent,
            "queue-add-delayed": queue_add_delayed,
            "queue-add-delayed-concurrent": queue_add_delayed_concurrent,
            "worker-default": worker_default,
            "cold-start": cold_start,
            "round-trip": round_trip,
            "worker": worker,
            "worker-delayed": worker_delayed,
            "worker-retry": worker_retry,
            "pickup-latency": pickup_latency,
            "server-memory": server_memory,
        },
        packages=("chasquimq",),
        settings={
            "adding": "Queue.add, add_bulk; uvloop",
            "working": "Worker, concurrency=100 (its default and fastest setting), uvloop, one process; "
            "`worker-default`: events and results on; `round-trip`: wait_for_result(poll_interval=1 ms)",
        },
    )
