"""tampu beside chasquimq 1.3.0 and beside the limit, in interleaved rounds: `make bench-producer`, `make bench-worker`.

Scenarios carry the original's names. Every handler is a coroutine that does nothing; payloads are about 100 bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hiredis
import uvloop
from harness import ROOT, Bar, Peer, Table, fresh_server, interleave, peers_python

from tampu import AddOptions, BackoffSpec, Consumer, ConsumerConfig, JobRetryOverride, Producer, ProducerConfig

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

PAYLOAD = {"to": "ada@example.com", "subject": "Welcome aboard", "body": "x" * 60}
CONFIG = ProducerConfig(queue_name="bench", max_stream_len=100_000_000)
STREAM = "{chasqui:bench}:stream"
#: An envelope as our producer writes it, for the tools that measure the limit.
ENVELOPE = b"\x94\xba" + b"0" * 26 + b"\xc4\x6c" + b"x" * 108 + b"\xcf" + b"\0" * 8 + b"\0"


def on_empty_server(server: Any, scenario: Callable[[str], Awaitable[float]]) -> Callable[[], float]:
    """Runs a scenario of ours in this process, on an emptied server."""

    def run() -> float:
        server.client().flushall()
        rate = uvloop.run(scenario(server.url))
        server.client().flushall()
        return rate

    return run


# --- adding


def add_bulk(size: int, total: int) -> Callable[[str], Awaitable[float]]:
    async def scenario(url: str) -> float:
        async with Producer.connect(url, CONFIG) as producer:
            payloads = [PAYLOAD] * size
            await producer.add_bulk(payloads)
            start = time.perf_counter()
            for _ in range(total // size):
                await producer.add_bulk(payloads)
            return total / (time.perf_counter() - start)

    return scenario


ONE_ADD = "one add, us  tampu"
ONE_PING = "one PING, us  tampu"


def add_iterator(total: int) -> Callable[[str], Awaitable[float]]:
    async def scenario(url: str) -> float:
        async with Producer.connect(url, CONFIG) as producer:
            await producer.add(PAYLOAD)
            start = time.perf_counter()
            await producer.add_bulk(PAYLOAD for _ in range(total))
            return total / (time.perf_counter() - start)

    return scenario


def add_concurrent(total: int) -> Callable[[str], Awaitable[float]]:
    async def scenario(url: str) -> float:
        async with Producer.connect(url, CONFIG) as producer:
            await producer.add(PAYLOAD)
            start = time.perf_counter()
            await asyncio.gather(*(producer.add(PAYLOAD) for _ in range(total)))
            return total / (time.perf_counter() - start)

    return scenario


def one_by_one(total: int) -> Callable[[str], Awaitable[dict[str, float]]]:
    """Microseconds of one add, and of one PING over the same pipe, a hundred of each in turn."""

    async def scenario(url: str) -> dict[str, float]:
        spent = {ONE_ADD: 0.0, ONE_PING: 0.0}
        async with Producer.connect(url, CONFIG) as producer:
            await producer.add(PAYLOAD)
            for _ in range(total // 100):
                for name in spent:
                    start = time.perf_counter()
                    for _ in range(100):
                        await (producer.pipe.call("PING") if name == ONE_PING else producer.add(PAYLOAD))
                    spent[name] += time.perf_counter() - start
        return {name: seconds / total * 1e6 for name, seconds in spent.items()}

    return scenario


def redis_benchmark(server: Any, depth: int, total: int) -> Callable[[], float]:
    """The same XADD from C, `depth` at a time."""

    def run() -> float:
        server.client().flushall()
        tool = Path(server.binary).with_name("redis-benchmark")
        command = [
            tool,
            "-p",
            server.port,
            "-c",
            1,
            "-P",
            depth,
            "-n",
            total,
            "-q",
            "XADD",
            STREAM,
            "*",
            "d",
            "x" * 148,
        ]
        output = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True).stdout
        server.client().flushall()
        return float(re.findall(r"([\d.]+) requests per second", output)[-1])

    return run


# --- working


async def fill(url: str, total: int) -> None:
    async with Producer.connect(url, CONFIG) as producer:
        await producer.add_bulk(PAYLOAD for _ in range(total))


async def work(url: str, total: int, *, fails_once: bool = False, **settings: Any) -> float:
    """A consumer drains what is there; timed from its start to the last handler."""
    done = 0
    shutdown = asyncio.Event()

    async def handler(job: Any) -> None:
        nonlocal done
        if fails_once and job.attempt == 0:
            raise ValueError("first run")
        done += 1
        if done == total:
            shutdown.set()

    config = ConsumerConfig(queue_name="bench", block_ms=100, **settings)
    start = time.perf_counter()
    running = asyncio.create_task(Consumer(url, config).run(handler, shutdown))
    await shutdown.wait()
    rate = total / (time.perf_counter() - start)
    await running
    return rate


def worker_concurrent(total: int, *, events: bool, batch: int = 64) -> Callable[[str], Awaitable[float]]:
    async def scenario(url: str) -> float:
        await fill(url, total)
        return await work(url, total, events_enabled=events, batch=batch)

    return scenario


def worker_delayed(total: int) -> Callable[[str], Awaitable[float]]:
    async def scenario(url: str) -> float:
        async with Producer.connect(url, CONFIG) as producer:
            await producer.add_in_bulk(0.001, [PAYLOAD] * total)
        return await work(url, total, events_enabled=False)

    return scenario


def worker_retry(total: int) -> Callable[[str], Awaitable[float]]:
    async def scenario(url: str) -> float:
        retry = JobRetryOverride(3, BackoffSpec.fixed(1, jitter_ms=0))
        async with Producer.connect(url, CONFIG) as producer:
            await producer.add_bulk_with_options([PAYLOAD] * total, AddOptions(retry=retry))
        return await work(url, total, fails_once=True, events_enabled=False)

    return scenario


def bare_loop(server: Any, total: int, count: int) -> Callable[[], float]:
    """The same XREADGROUP and XACKDEL from a blocking socket and hiredis, nothing else: the limit for Python."""
    import socket

    def run() -> float:
        server.client().flushall()
        uvloop.run(fill(server.url, total))
        server.client().xgroup_create(STREAM, "default", "0")
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            reader = hiredis.Reader()

            def call(*parts: Any) -> Any:
                connection.sendall(hiredis.pack_command(parts))
                while (reply := reader.gets()) is False:
                    reader.feed(connection.recv(1 << 20))
                return reply

            left = total
            start = time.perf_counter()
            while left:
                entries = call("XREADGROUP", "GROUP", "default", "c", "COUNT", count, "STREAMS", STREAM, ">")[0][1]
                call("XACKDEL", STREAM, "default", "IDS", len(entries), *[entry[0] for entry in entries])
                left -= len(entries)
            rate = total / (time.perf_counter() - start)
        server.client().flushall()
        return rate

    return run


def producer_suite(server: Any, peer: Peer, rounds: int, table: Table) -> list[Bar]:
    interleave(
        rounds,
        {
            "add_bulk(50)  tampu": on_empty_server(server, add_bulk(50, 20_000)),
            "add_bulk(50)  chasquimq": lambda: peer.run("add_bulk", size=50, total=10_000),
            "add_bulk(50)  redis-benchmark -P 50": redis_benchmark(server, 50, 100_000),
            "add_bulk(1000)  tampu": on_empty_server(server, add_bulk(1000, 50_000)),
            "add_bulk(1000)  chasquimq": lambda: peer.run("add_bulk", size=1000, total=20_000),
            "add_bulk(1000)  redis-benchmark -P 1000": redis_benchmark(server, 1000, 200_000),
            "add_bulk(iterator)  tampu": on_empty_server(server, add_iterator(200_000)),
            "10,000 adds in a gather  tampu": on_empty_server(server, add_concurrent(10_000)),
            "10,000 adds in a gather  chasquimq": lambda: peer.run("add_concurrent", total=10_000),
            "one by one": on_empty_server(server, one_by_one(3000)),
        },
        table,
    )
    limit_50, limit_1000 = "add_bulk(50)  redis-benchmark -P 50", "add_bulk(1000)  redis-benchmark -P 1000"
    return [
        Bar("add-bulk-50", 2.2, "add_bulk(50)  tampu", "add_bulk(50)  chasquimq"),
        Bar("add-bulk-1000", 2.6, "add_bulk(1000)  tampu", "add_bulk(1000)  chasquimq"),
        Bar("add-bulk-iterator", 4, "add_bulk(iterator)  tampu", "add_bulk(1000)  chasquimq"),
        Bar("add-bulk-50-of-limit", 0.28, "add_bulk(50)  tampu", limit_50),
        Bar("add-bulk-1000-of-limit", 0.45, "add_bulk(1000)  tampu", limit_1000),
        Bar("add-bulk-iterator-of-limit", 0.70, "add_bulk(iterator)  tampu", limit_1000),
        Bar("add-concurrent", 4.5, "10,000 adds in a gather  tampu", "10,000 adds in a gather  chasquimq"),
        Bar("add-one-over-ping", 1.3, ONE_ADD, ONE_PING, is_at_most=True),
    ]


def worker_suite(server: Any, peer: Peer, rounds: int, table: Table) -> list[Bar]:
    # The original's best concurrency, by its own documents and as measured, is its default of 100.
    peer_args: dict[str, Any] = {"total": 20_000, "concurrency": 100}
    interleave(
        rounds,
        {
            "worker, events off  tampu": on_empty_server(server, worker_concurrent(100_000, events=False, batch=256)),
            "worker, events off, batch 64  tampu": on_empty_server(server, worker_concurrent(100_000, events=False)),
            "worker, events off  chasquimq": lambda: peer.run("worker_concurrent", events=False, **peer_args),
            "worker, events off  bare loop": bare_loop(server, 100_000, 256),
            "worker, events on  tampu": on_empty_server(server, worker_concurrent(50_000, events=True, batch=256)),
            "worker, events on  chasquimq": lambda: peer.run("worker_concurrent", events=True, **peer_args),
            "worker, delayed  tampu": on_empty_server(server, worker_delayed(20_000)),
            "worker, delayed  chasquimq": lambda: peer.run("worker_delayed", total=5_000, concurrency=100),
            "worker, retry  tampu": on_empty_server(server, worker_retry(20_000)),
            "worker, retry  chasquimq": lambda: peer.run("worker_retry", total=5_000, concurrency=100),
        },
        table,
    )
    return [
        Bar("worker-concurrent", 7, "worker, events off  tampu", "worker, events off  chasquimq"),
        Bar("worker-concurrent-events", 5, "worker, events on  tampu", "worker, events on  chasquimq"),
        Bar("worker-concurrent-of-limit", 0.6, "worker, events off  tampu", "worker, events off  bare loop"),
        Bar("worker-delayed-end-to-end", 4, "worker, delayed  tampu", "worker, delayed  chasquimq"),
        Bar("worker-retry-throughput", 4, "worker, retry  tampu", "worker, retry  chasquimq"),
    ]


SUITES = {"producer": producer_suite, "worker": worker_suite}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suite", choices=[*SUITES])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="where to write all samples as JSON")
    arguments = parser.parse_args()
    with fresh_server() as server:
        peer = Peer(peers_python(), ROOT / "bench" / "peers" / "chasquimq_peer.py", server.url)
        table = Table()
        try:
            bars = SUITES[arguments.suite](server, peer, arguments.rounds, table)
        finally:
            peer.close()
    all_hold = table.report(bars)
    if arguments.out:
        table.save(arguments.out)
    return 0 if all_hold else 1


if __name__ == "__main__":
    sys.exit(main())
