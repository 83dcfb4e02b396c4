"""taskiq-redis with the streams broker."""

import asyncio
import os
import sys

os.environ["BENCH_URL"] = sys.argv[1] if len(sys.argv) > 1 else ""

from taskiq_redis import RedisStreamBroker

from bench.peers.taskiq_app import fails_once, nothing, replying, send
from bench.program.counter import counting, drained_by, first_job_of, running, script_of
from bench.program.driver import serve
from bench.program.payloads import PAYLOAD
from bench.program.round_trips import time_round_trips
from bench.program.stopwatch import Stopwatch


async def started():
    """Start a broker on this event loop."""
    broker = RedisStreamBroker(os.environ["BENCH_URL"], queue_name="bench", consumer_id="0")
    await broker.startup()
    return broker


def drained(total, processes=2, concurrency=100):
    command = [script_of("taskiq"), "worker", "bench.peers.taskiq_app:broker", "--workers", str(processes)]
    options = ["--max-async-tasks", str(concurrency), "--log-level", "CRITICAL", "--no-parse"]
    return drained_by([*command, *options], total)


async def queue_add(url, total):
    broker = await started()
    await nothing.kicker().with_broker(broker).kiq(PAYLOAD)
    watch = Stopwatch()
    for _ in range(total):
        await nothing.kicker().with_broker(broker).kiq(PAYLOAD)
    figures = watch.stop(total)
    await broker.shutdown()
    return figures


async def queue_add_concurrent(url, total):
    broker = await started()
    turns = asyncio.Semaphore(50)

    async def add():
        async with turns:
            await nothing.kicker().with_broker(broker).kiq(PAYLOAD)

    await add()
    watch = Stopwatch()
    await asyncio.gather(*(add() for _ in range(total)))
    figures = watch.stop(total)
    await broker.shutdown()
    return figures


async def _fill(task, total):
    broker = await started()
    for start in range(0, total, 50):
        await asyncio.gather(*(task.kicker().with_broker(broker).kiq(PAYLOAD) for _ in range(min(50, total - start))))
    await broker.shutdown()


def cold_start(url, total=1):
    asyncio.run(_fill(nothing, 1))
    return first_job_of([script_of("taskiq"), "worker", "bench.peers.taskiq_app:broker", "--workers", "1"])


async def round_trip(url, total, callers=1):
    command = [script_of("taskiq"), "worker", "bench.peers.taskiq_app:replying", "--workers", "1"]
    with counting(), running([*command, "--max-async-tasks", "100", "--log-level", "CRITICAL", "--no-parse"]):
        await replying.startup()

        async def once():
            task = await send.kiq(PAYLOAD)
            await task.wait_result(check_interval=0.001, timeout=30)

        await once()
        figures = await time_round_trips(once, total, callers)
        await replying.shutdown()
    return figures


def worker(url, total, concurrency=100):
    asyncio.run(_fill(nothing, total))
    return drained(total, 1, 1) if concurrency == 1 else drained(total)


def worker_retry(url, total):
    asyncio.run(_fill(fails_once, total))
    return drained(total)


if __name__ == "__main__":
    serve(
        "taskiq",
        {
            "queue-add": queue_add,
            "queue-add-concurrent": queue_add_concurrent,
            "cold-start": cold_start,
            "round-trip": round_trip,
            "worker": worker,
            "worker-retry": worker_retry,
        },
        packages=("taskiq-redis", "taskiq"),
        settings={
            "adding": "kiq on RedisStreamBroker; concurrent: 50 at once; uvloop, hiredis",
            "working": "RedisStreamBroker, 2 worker processes (its default) of 100 tasks, xread_count=256, no parsing, "
            "no result backend; `round-trip`: RedisAsyncResultBackend, one process, wait_result(check_interval=1 ms)",
        },
    )
