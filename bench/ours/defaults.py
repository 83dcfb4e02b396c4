"""Scenarios with default settings: `@queue.task` and `Worker(queue)`, which write events and store results."""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from typing import Any

from bench.ours.adding import QUEUE, SLICE
from bench.program.payloads import PAYLOAD, payload_of
from bench.program.round_trips import time_round_trips
from bench.program.stopwatch import Stopwatch
from tampu import EncryptedCodec, Queue, SignedCodec, Worker

#: Calls that are added at once before a worker starts.
BULK = 10_000
#: The codecs that are measured, and their key.
CODECS = {"signed": SignedCodec, "encrypted": EncryptedCodec}
KEYS = {"bench": bytes(32)}
#: PINGs whose median is the unit of a round trip.
PINGS = 200


async def worker_default(
    url: str, total: int, kind: str = "async", codec: str = "", payload_bytes: int = 0
) -> dict[str, float]:
    """Run calls of a task that wait in the queue, from the worker's start to the end of the last call."""
    finished = asyncio.Event()
    payload = payload_of(payload_bytes) if payload_bytes else PAYLOAD
    async with Queue(QUEUE, url=url, codec=CODECS[codec](KEYS) if codec else None) as queue:
        task = _counted_task(queue, total, finished, kind)
        for start in range(0, total, BULK):
            await task.add_bulk([payload] * min(BULK, total - start))
        watch = Stopwatch()
        async with Worker(queue):
            await finished.wait()
            return watch.stop(total)


def _counted_task(queue: Queue, total: int, finished: asyncio.Event, kind: str) -> Any:
    done = 0
    loop = asyncio.get_running_loop()
    lock = threading.Lock()

    async def send(to: str, subject: str, body: str) -> dict[str, bool]:
        nonlocal done
        done += 1
        if done == total:
            finished.set()
        return {"sent": True}

    def send_in_thread(to: str, subject: str, body: str) -> dict[str, bool]:
        nonlocal done
        with lock:
            done += 1
            is_last = done == total
        if is_last:
            loop.call_soon_threadsafe(finished.set)
        return {"sent": True}

    return queue.task(send if kind == "async" else send_in_thread)


async def round_trip(url: str, total: int, callers: int = 1) -> dict[str, float]:
    """Add calls and await their results. `ping_ms` is the median time of a PING over the same connection."""
    async with Queue(QUEUE, url=url) as queue:

        @queue.task
        async def send(to: str, subject: str, body: str) -> dict[str, bool]:
            return {"sent": True}

        async def once() -> None:
            await (await send.add(**PAYLOAD)).result()

        async with Worker(queue):
            await once()
            figures = await time_round_trips(once, total, callers)
            return {**figures, "ping_ms": await _ping_ms(queue)}


async def _ping_ms(queue: Queue) -> float:
    took = []
    for _ in range(PINGS):
        began = time.perf_counter()
        await queue.producer.client.call("PING")
        took.append(time.perf_counter() - began)
    return statistics.median(took) * 1e3


async def one_task_add_beside_one_ping(url: str, total: int) -> dict[str, float]:
    """Return the microseconds of one `task.add` and of one PING over the same connection, in alternating slices."""
    spent = {"add_us": 0.0, "ping_us": 0.0}
    async with Queue(QUEUE, url=url) as queue:

        @queue.task
        async def send(to: str, subject: str, body: str) -> None: ...

        await send.add(**PAYLOAD)
        client = queue.producer.client
        for _ in range(total // SLICE):
            for name in spent:
                began = time.perf_counter()
                for _ in range(SLICE):
                    await (client.call("PING") if name == "ping_us" else send.add(**PAYLOAD))
                spent[name] += time.perf_counter() - began
    return {name: seconds / (total // SLICE * SLICE) * 1e6 for name, seconds in spent.items()}
