"""Reading: consumer groups, existing jobs, read-ahead and pickup latency."""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import TYPE_CHECKING, Any

import pytest

from consume.workers import Stuck, consuming
from support.waiting import until

if TYPE_CHECKING:
    from consume.views import WorkerView
    from tampu.wire.job import Job


async def noop(job: Job[Any]) -> None:
    return None


@pytest.mark.servers
async def test_the_group_and_the_stream_are_made_when_the_worker_starts(view: WorkerView) -> None:
    async with consuming(view.server.url, noop):
        await until(lambda: view.client.exists(view.keys.stream), "the stream is there")
        assert view.groups() == ["default"]
        assert view.length() == 0


@pytest.mark.servers
async def test_jobs_added_before_the_first_worker_are_delivered_in_order(view: WorkerView) -> None:
    seen: list[int] = []

    async def handler(job: Job[Any]) -> None:
        seen.append(job.payload)

    view.add_many(list(range(200)))
    async with consuming(view.server.url, handler, concurrency=1):
        await until(view.is_settled, "all are done")
    assert seen == list(range(200))


async def test_a_second_worker_joins_the_group_and_shares_the_work(view: WorkerView) -> None:
    async with consuming(view.server.url, noop), consuming(view.server.url, noop):
        ids = view.add_many([None] * 20)
        await until(view.is_settled, "all are done")
    completed = [event["id"] for event in view.events() if event["e"] == "completed"]
    assert sorted(completed) == sorted(ids)


@pytest.mark.servers("valkey", "redis86")
@pytest.mark.parametrize("pause", [0.0, 0.001], ids=["quick", "slow"])
async def test_a_worker_holds_only_a_few_of_twenty_thousand_waiting_jobs(view: WorkerView, pause: float) -> None:
    most = ran = 0
    enough = 20_000 if not pause else 2_000

    async def handler(job: Job[Any]) -> None:
        nonlocal most, ran
        ran += 1
        most = max(most, worker.occupied)
        if pause:
            await asyncio.sleep(pause)

    view.add_many([None] * 20_000)
    async with consuming(view.server.url, handler, concurrency=10, batch=64, events_enabled=False) as worker:
        await until(lambda: ran >= enough, "some have run", 60)
    assert most <= 10 + 2 * 64


async def test_a_slow_worker_does_not_read_ahead(view: WorkerView) -> None:
    """Jobs that finished long ago must not count towards the current throughput."""
    stuck = Stuck(only="slow")
    async with consuming(view.server.url, stuck, concurrency=2, batch=64, block_ms=150) as worker:
        view.add_many(["quick"] * 100)
        await until(view.is_settled, "the quick ones are done")
        last = worker.consumer.last_read_at
        assert last is not None
        await until(lambda: (worker.consumer.last_read_at or 0) > last + 0.1, "an empty read has returned")
        view.add_many(["slow"] * 20)
        await until(lambda: len(stuck.started) == 102, "two run")
        await asyncio.sleep(0.1)
        assert len(view.pending()) == 2
        stuck.release.set()
        await until(view.is_settled, "all are done")


async def test_jobs_read_ahead_are_handed_back_when_handlers_get_slow(view: WorkerView) -> None:
    stuck = Stuck(only="slow")
    elsewhere: list[Any] = []

    async def handler(job: Job[Any]) -> None:
        elsewhere.append(job.payload)

    view.add_many(["quick"] * 2000 + ["slow"] * 2 + ["behind"] * 100)
    async with consuming(view.server.url, stuck, concurrency=2, events_enabled=False) as worker:
        await until(lambda: len(stuck.started) == 2002, "it is stuck")
        held = worker.held
        async with consuming(view.server.url, handler, concurrency=2, claim_min_idle_ms=60_000):
            await until(lambda: len(elsewhere) == 100, "an idle worker has run those behind", 5)
        assert worker.held == 2
        stuck.release.set()
        await until(view.is_settled, "all are done")
    assert held > 2, "the test needs jobs that were read ahead"


@pytest.mark.slow
async def test_a_paused_queue_is_neither_read_nor_taken_over(view: WorkerView) -> None:
    view.client.set(view.keys.paused, "1")
    view.client.xgroup_create(view.keys.stream, "default", "0", mkstream=True)
    view.add()
    view.client.xreadgroup("default", "dead", {view.keys.stream: ">"})
    view.add()
    ran: list[str] = []

    async def handler(job: Job[Any]) -> None:
        ran.append(job.id)

    async with consuming(view.server.url, handler, claim_min_idle_ms=50):
        await until(lambda: view.pending()[0]["time_since_delivered"] > 500, "it had time")
        assert ran == []
        view.client.delete(view.keys.paused)
        await until(lambda: len(ran) == 2, "both run when it is resumed")


@pytest.mark.servers
async def test_a_job_added_to_an_idle_queue_starts_at_once(view: WorkerView) -> None:
    started: dict[str, float] = {}

    async def handler(job: Job[Any]) -> None:
        started[job.id] = time.perf_counter()

    waits: list[float] = []
    async with consuming(view.server.url, handler):
        await until(view.waiting_reads, "it reads")
        for _ in range(30):
            added_at = time.perf_counter()
            job_id = view.add()
            await until(lambda job_id=job_id: job_id in started, "it starts")
            waits.append(started[job_id] - added_at)
    print(f"pickup: median {statistics.median(waits) * 1000:.2f} ms, worst {max(waits) * 1000:.2f} ms")
    assert statistics.median(waits) < 0.25
