"""`tampu bench`: measures how fast this server adds and delivers jobs, in a temporary queue that is removed afterwards.

Scenarios have the names used in the project's benchmarks (docs/benchmarks.md), which also compare other queues.
"""

import asyncio
import contextlib
import statistics
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from typer import Option

from tampu.base.event_loop import new_event_loop
from tampu.base.units import plural
from tampu.cli.output import cell, progress_bar, say, show, write_json
from tampu.cli.session import CommonOptions, Session, parse_info, product_version, run
from tampu.cli.tables import table
from tampu.config import ConsumerConfig, ProducerConfig
from tampu.consume.consumer import Consumer
from tampu.inspect.admin import delete_keys
from tampu.produce.producer import Producer
from tampu.redis.settings import resolve_url

#: About 100 bytes.
PAYLOAD = {"to": "ada@example.com", "subject": "Welcome aboard", "body": "x" * 60}
#: Adding one by one costs a round trip per job, so these scenarios use 1/20 of the jobs.
ONE_BY_ONE_SHARE = 20
AN_HOUR_SECS = 3600.0
#: Rate of the open-loop latency scenario in jobs per second, and its duration.
LATENCY_RATE = 200
LATENCY_SECS = 2.0


@dataclass(frozen=True, slots=True)
class Bench:
    """The scenarios, on one queue; each returns one figure."""

    url: str
    queue_name: str
    jobs: int

    def producer(self) -> Any:
        """Return a connected producer."""
        # High enough that the queue is never full, which would raise an error.
        config = ProducerConfig(queue_name=self.queue_name, max_stream_len=self.jobs * 10 + 1_000_000)
        return Producer.connect(self.url, config)

    async def ping(self) -> float:
        """Return the round-trip time in microseconds."""
        return 1e6 / await self._rate(self.jobs // ONE_BY_ONE_SHARE, 1, lambda producer: producer.client.call("PING"))

    async def add_one_by_one(self) -> float:
        return await self._rate(self.jobs // ONE_BY_ONE_SHARE, 1, lambda producer: producer.add(PAYLOAD))

    async def add_delayed(self) -> float:
        times = self.jobs // ONE_BY_ONE_SHARE
        return await self._rate(times, 1, lambda producer: producer.add_in(AN_HOUR_SECS, PAYLOAD))

    async def add_bulk(self, size: int) -> float:
        payloads = [PAYLOAD] * size
        return await self._rate(self.jobs // size, size, lambda producer: producer.add_bulk(payloads))

    async def add_from_iterator(self) -> float:
        return await self._rate(1, self.jobs, lambda producer: producer.add_bulk(PAYLOAD for _ in range(self.jobs)))

    async def add_concurrently(self) -> float:
        async def add_all(producer: Any) -> None:
            await asyncio.gather(*(producer.add(PAYLOAD) for _ in range(self.jobs)))

        return await self._rate(1, self.jobs, add_all)

    async def _rate(self, times: int, size: int, call: Callable[[Any], Awaitable[Any]]) -> float:
        """Run `call(producer)`, which handles `size` jobs, a number of times; return the jobs per second."""
        times = max(times, 1)
        async with self.producer() as producer:
            await producer.add(PAYLOAD)  # connects and loads the scripts
            began = time.perf_counter()
            for _ in range(times):
                await call(producer)
            return times * size / (time.perf_counter() - began)

    async def work(self, *, events: bool = False, concurrency: int = 100) -> float:
        async with self.producer() as producer:
            await producer.add_bulk(PAYLOAD for _ in range(self.jobs))
        done = 0
        shutdown = asyncio.Event()

        async def handler(_: Any) -> None:
            nonlocal done
            done += 1
            if done == self.jobs:
                shutdown.set()

        consumer = self._consumer(events_enabled=events, concurrency=concurrency)
        began = time.perf_counter()
        running = asyncio.create_task(consumer.run(handler, shutdown))
        await _first(shutdown.wait(), running)
        rate = self.jobs / (time.perf_counter() - began)
        await running
        return rate

    async def pickup_p99(self) -> float:
        """Return the p99 from a job's scheduled add to its handler, in milliseconds, at a fixed rate (open loop)."""
        total = int(LATENCY_RATE * LATENCY_SECS)
        latencies: list[float] = []
        shutdown = asyncio.Event()

        async def handler(job: Any) -> None:
            latencies.append(time.perf_counter() - job.payload)
            if len(latencies) == total:
                shutdown.set()

        async with self.producer() as producer, asyncio.TaskGroup() as adding:
            running = asyncio.create_task(self._consumer(events_enabled=False).run(handler, shutdown))
            await producer.client.call("PING")
            began = time.perf_counter() + 0.2
            for number in range(total):
                # Jobs are added on schedule and measured from their scheduled time, so a stall is not hidden.
                due = began + number / LATENCY_RATE
                await asyncio.sleep(max(due - time.perf_counter(), 0))
                adding.create_task(producer.add(due))
            await _first(shutdown.wait(), running)
            await running
        return statistics.quantiles(latencies, n=100)[98] * 1e3

    def _consumer(self, **settings: Any) -> Consumer:
        config = ConsumerConfig(queue_name=self.queue_name, block_ms=100, run_scheduler=False, **settings)
        return Consumer(self.url, config)

    def scenarios(self) -> dict[str, tuple[str, Callable[[], Awaitable[float]]]]:
        """Return the unit and the coroutine function of each scenario by name."""
        return {
            "ping": ("µs", self.ping),
            "queue-add": ("jobs/s", self.add_one_by_one),
            "queue-add-bulk-50": ("jobs/s", lambda: self.add_bulk(50)),
            "queue-add-bulk-1000": ("jobs/s", lambda: self.add_bulk(1000)),
            "queue-add-iterator": ("jobs/s", self.add_from_iterator),
            "queue-add-concurrent": ("jobs/s", self.add_concurrently),
            "queue-add-delayed": ("jobs/s", self.add_delayed),
            "worker-generic": ("jobs/s", lambda: self.work(concurrency=1)),
            "worker-concurrent": ("jobs/s", self.work),
            "worker-concurrent-events": ("jobs/s", lambda: self.work(events=True)),
            "pickup-p99": ("ms", self.pickup_p99),
        }


async def _first(waiting: Coroutine[Any, Any, Any], running: asyncio.Task[Any]) -> None:
    """Wait for `waiting`; if `running` ends before it, raise its error."""
    task = asyncio.create_task(waiting)
    try:
        await asyncio.wait((task, running), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            running.result()
    finally:
        task.cancel()


async def measure(common: CommonOptions, jobs: int, rounds: int, only: str | None) -> dict[str, Any]:
    """Run all scenarios in turn, `rounds` times."""
    queue_name = f"tampu-bench-{uuid.uuid4().hex[:12]}"
    bench = Bench(resolve_url(common.url), queue_name, jobs)
    scenarios = bench.scenarios()
    if only:
        chosen = [name.strip() for name in only.split(",")]
        if unknown := [name for name in chosen if name not in scenarios]:
            raise typer.BadParameter(f"no such scenario: {', '.join(unknown)}; choose from {', '.join(scenarios)}")
        scenarios = {name: scenarios[name] for name in chosen}
    samples: dict[str, list[float]] = {name: [] for name in scenarios}
    async with Session(common.url, common.timeout) as session:
        admin = await session.new_admin(queue_name)
        client, keys = admin.client, admin.keys
        version = product_version(parse_info(await client.call("INFO", "server")))
        try:
            with progress_bar("measuring", rounds * len(scenarios)) as progress:
                for number in range(rounds):
                    for position, (name, (_, run_one)) in enumerate(scenarios.items()):
                        samples[name].append(await run_one())
                        await delete_keys(client, keys)
                        progress(number * len(scenarios) + position + 1)
        finally:
            # Also after Ctrl-C: leave nothing behind.
            with contextlib.suppress(OSError):
                await asyncio.shield(delete_keys(client, keys))
        return {
            "server": session.place,
            "version": version,
            "queue": queue_name,
            "jobs": jobs,
            "rounds": rounds,
            "scenarios": {
                name: {"unit": scenarios[name][0], "median": statistics.median(values), "samples": values}
                for name, values in samples.items()
            },
        }


def bench(
    common: CommonOptions,
    jobs: Annotated[int, Option(min=100, max=1_000_000, help="Jobs per scenario.")] = 20_000,
    rounds: Annotated[int, Option(min=1, max=100, help="Number of rounds; the median is shown.")] = 3,
    only: Annotated[str | None, Option(metavar="NAMES", help="Run only these scenarios, separated by commas.")] = None,
) -> None:
    """Benchmark this server with tampu, in a temporary queue."""
    found = run(measure(common, jobs, rounds, only), new_event_loop)
    if common.as_json:
        write_json(found)
        return
    rows = table("scenario", "median", "lowest", "highest", "", numbers=("median", "lowest", "highest"))
    for name, figures in found["scenarios"].items():
        samples = figures["samples"]
        numbers = (figures["median"], min(samples), max(samples))
        rows.add_row(cell(name), *(cell(_number(value)) for value in numbers), cell(figures["unit"], "dim"))
    show(rows)
    say(
        f"{found['version']} at {found['server']}, {found['jobs']:,} jobs per scenario, "
        f"{plural(found['rounds'], 'round')}; the temporary queue was removed"
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"
