"""Scenarios that add jobs."""

from __future__ import annotations

import asyncio
import time

from bench.program.payloads import PAYLOAD, payload_of
from bench.program.stopwatch import Stopwatch
from tampu import Producer, ProducerConfig

QUEUE = "bench"
CONFIG = ProducerConfig(queue_name=QUEUE, max_stream_len=100_000_000)
#: Number of adds and of PINGs in one slice; slices alternate, so that a slow moment affects both.
SLICE = 100
#: Far enough in the future that nothing is promoted.
AN_HOUR_SECS = 3600.0


async def queue_add(url: str, total: int) -> dict[str, float]:
    """Add one job after the other."""
    async with Producer.connect(url, CONFIG) as producer:
        await producer.add(PAYLOAD)
        watch = Stopwatch()
        for _ in range(total):
            await producer.add(PAYLOAD)
        return watch.stop(total)


async def queue_add_bulk(url: str, total: int, size: int, payload_bytes: int = 0) -> dict[str, float]:
    """Add lists of `size` jobs, one after the other."""
    async with Producer.connect(url, CONFIG) as producer:
        payloads = [payload_of(payload_bytes) if payload_bytes else PAYLOAD] * size
        await producer.add_bulk(payloads)
        watch = Stopwatch()
        for _ in range(total // size):
            await producer.add_bulk(payloads)
        return watch.stop(total)


async def queue_add_iterator(url: str, total: int) -> dict[str, float]:
    """Add one bulk from an iterator: windows are encoded while the server processes earlier ones."""
    async with Producer.connect(url, CONFIG) as producer:
        await producer.add(PAYLOAD)
        watch = Stopwatch()
        await producer.add_bulk(PAYLOAD for _ in range(total))
        return watch.stop(total)


async def queue_add_concurrent(url: str, total: int) -> dict[str, float]:
    """Add all jobs in one gather."""
    async with Producer.connect(url, CONFIG) as producer:
        await producer.add(PAYLOAD)
        watch = Stopwatch()
        await asyncio.gather(*(producer.add(PAYLOAD) for _ in range(total)))
        return watch.stop(total)


async def queue_add_delayed(url: str, total: int) -> dict[str, float]:
    """Add one delayed job after the other."""
    async with Producer.connect(url, CONFIG) as producer:
        await producer.add_in(AN_HOUR_SECS, PAYLOAD)
        watch = Stopwatch()
        for _ in range(total):
            await producer.add_in(AN_HOUR_SECS, PAYLOAD)
        return watch.stop(total)


async def queue_add_delayed_concurrent(url: str, total: int) -> dict[str, float]:
    """Add all delayed jobs in one gather."""
    async with Producer.connect(url, CONFIG) as producer:
        await producer.add_in(AN_HOUR_SECS, PAYLOAD)
        watch = Stopwatch()
        await asyncio.gather(*(producer.add_in(AN_HOUR_SECS, PAYLOAD) for _ in range(total)))
        return watch.stop(total)


async def one_add_beside_one_ping(url: str, total: int) -> dict[str, float]:
    """Return the microseconds of one add and of one PING over the same connection, in alternating slices."""
    spent = {"add_us": 0.0, "ping_us": 0.0}
    async with Producer.connect(url, CONFIG) as producer:
        await producer.add(PAYLOAD)
        for _ in range(total // SLICE):
            for name in spent:
                start = time.perf_counter()
                for _ in range(SLICE):
                    await (producer.client.call("PING") if name == "ping_us" else producer.add(PAYLOAD))
                spent[name] += time.perf_counter() - start
    return {name: seconds / (total // SLICE * SLICE) * 1e6 for name, seconds in spent.items()}
