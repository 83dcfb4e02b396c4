"""arq."""

import asyncio
import contextlib
import os

from arq import create_pool, func
from arq.connections import RedisSettings
from arq.worker import Retry, Worker

from bench.program.counter import first_job_of, script_of
from bench.program.driver import serve
from bench.program.payloads import PAYLOAD
from bench.program.round_trips import time_round_trips
from bench.program.stopwatch import Stopwatch


async def pool_at(url):
    return await create_pool(RedisSettings.from_dsn(url))


async def queue_add(url, total):
    pool = await pool_at(url)
    await pool.enqueue_job("nothing", PAYLOAD)
    watch = Stopwatch()
    for _ in range(total):
        await pool.enqueue_job("nothing", PAYLOAD)
    figures = watch.stop(total)
    await pool.aclose()
    return figures


async def queue_add_concurrent(url, total):
    pool = await pool_at(url)
    # Without a limit, the pool would open one connection per call.
    turns = asyncio.Semaphore(50)

    async def add():
        async with turns:
            await pool.enqueue_job("nothing", PAYLOAD)

    await add()
    watch = Stopwatch()
    await asyncio.gather(*(add() for _ in range(total)))
    figures = watch.stop(total)
    await pool.aclose()
    return figures


async def queue_add_delayed(url, total):
    pool = await pool_at(url)
    await pool.enqueue_job("nothing", PAYLOAD, _defer_by=3600)
    watch = Stopwatch()
    for _ in range(total):
        await pool.enqueue_job("nothing", PAYLOAD, _defer_by=3600)
    figures = watch.stop(total)
    await pool.aclose()
    return figures


async def drained(url, total, name, concurrency=100, **add_options):
    pool = await pool_at(url)
    for start in range(0, total, 50):
        await asyncio.gather(*(pool.enqueue_job(name, PAYLOAD, **add_options) for _ in range(min(50, total - start))))
    done = 0
    finished = asyncio.Event()

    async def nothing(ctx, payload):
        nonlocal done
        done += 1
        if done == total:
            finished.set()

    async def fails_once(ctx, payload):
        if ctx["job_try"] == 1:
            raise Retry(defer=0)
        await nothing(ctx, payload)

    worker = Worker(
        [func(nothing, name="nothing"), func(fails_once, name="fails_once")],
        redis_settings=RedisSettings.from_dsn(url),
        max_jobs=concurrency,
        queue_read_limit=max(concurrency, 500) if concurrency > 1 else None,
        poll_delay=0.001,
        keep_result=0,
        handle_signals=False,
    )
    watch = Stopwatch()
    running = asyncio.ensure_future(worker.async_run())
    await finished.wait()
    figures = watch.stop(total)
    # Let jobs that are being marked as done finish; the rest is cancelled.
    await asyncio.sleep(0.05)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    with contextlib.suppress(asyncio.CancelledError):
        await worker.close()
    await pool.aclose()
    return figures


async def _add_one(url):
    pool = await pool_at(url)
    await pool.enqueue_job("nothing", PAYLOAD)
    await pool.aclose()


def cold_start(url, total=1):
    asyncio.run(_add_one(url))
    os.environ["BENCH_URL"] = url
    return first_job_of([script_of("arq"), "bench.peers.arq_app.WorkerSettings"])


async def round_trip(url, total, callers=1):
    async def send(ctx, payload):
        return {"sent": True}

    pool = await pool_at(url)
    settings = {"redis_settings": RedisSettings.from_dsn(url), "poll_delay": 0.001, "handle_signals": False}
    worker = Worker([func(send, name="send")], max_jobs=100, **settings)
    running = asyncio.ensure_future(worker.async_run())

    async def once():
        job = await pool.enqueue_job("send", PAYLOAD)
        await job.result(timeout=30, poll_delay=0.001)

    await once()
    figures = await time_round_trips(once, total, callers)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    with contextlib.suppress(asyncio.CancelledError):
        await worker.close()
    await pool.aclose()
    return figures


async def worker(url, total, concurrency=100):
    return await drained(url, total, "nothing", concurrency)


async def worker_delayed(url, total):
    return await drained(url, total, "nothing", _defer_by=0.001)


async def worker_retry(url, total):
    return await drained(url, total, "fails_once")


if __name__ == "__main__":
    serve(
        "arq",
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
        packages=("arq",),
        settings={
            "adding": "enqueue_job; concurrent: 50 at once, each over a pooled connection; uvloop, hiredis",
            "working": "max_jobs=100, queue_read_limit=500, poll_delay=1 ms, keep_result=0, uvloop, one process; "
            "`round-trip`: results kept, result(poll_delay=1 ms)",
        },
    )
