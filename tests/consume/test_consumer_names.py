"""Consumer names: two processes may be given the same one."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import pytest

from consume.workers import Stuck, consuming
from support.waiting import until

if TYPE_CHECKING:
    from consume.views import WorkerView
    from consume.workers import Fleet
    from tampu.wire.job import Job

STABLE: dict[str, Any] = {"consumer_id": "worker-0", "concurrency": 20}


async def _add_small_jobs(view: WorkerView, lease_ms: int, leases: int) -> int:
    """Add a job every 20 ms, until so many leases could have expired. Return how many there were."""
    end = time.monotonic() + lease_ms * leases / 1000
    count = 0
    while time.monotonic() < end:
        view.add("small")
        count += 1
        await asyncio.sleep(0.02)
    return count


@pytest.mark.slow
@pytest.mark.parametrize("drains", [True, False], ids=["the first one drains", "both serve"])
async def test_one_name_in_two_processes_runs_each_job_once(view: WorkerView, drains: bool) -> None:
    """Units of systemd and pods of a StatefulSet keep their names over rolling restarts."""
    stuck = Stuck(only="long")
    second: list[str] = []

    async def handler(job: Job[Any]) -> None:
        second.append(job.id)

    async with consuming(view.server.url, stuck, **STABLE, shutdown_deadline_secs=60) as first:
        long = [view.add("long") for _ in range(6)]
        await until(lambda: len(stuck.started) == 6, "six jobs run")
        if drains:
            first.shutdown.set()
        async with consuming(view.server.url, handler, **STABLE):
            small = await _add_small_jobs(view, 400, leases=10)
            await until(lambda: len(view.pending()) == 6 and view.length() == 6, "the small jobs are done")
            stuck.release.set()
            await until(view.is_settled, "all are done")
    started = stuck.started + second
    assert len(started) == len(set(started)) == 6 + small
    assert set(long) <= set(stuck.started)


@pytest.mark.slow
@pytest.mark.servers("valkey", "redis62")
async def test_a_worker_with_a_shorter_lease_leaves_live_jobs_alone(view: WorkerView) -> None:
    """A rolling deploy may change the lease."""
    stuck = Stuck(only="long")
    second: list[str] = []

    async def handler(job: Job[Any]) -> None:
        second.append(job.id)

    async with consuming(view.server.url, stuck, claim_min_idle_ms=4000):
        view.add_many(["long"] * 6)
        await until(lambda: len(stuck.started) == 6, "six jobs run")
        async with consuming(view.server.url, handler, claim_min_idle_ms=200):
            await _add_small_jobs(view, 200, leases=20)
            await until(lambda: len(view.pending()) == 6 and view.length() == 6, "the small jobs are done")
            stuck.release.set()
            await until(view.is_settled, "all are done")
    started = stuck.started + second
    assert len(started) == len(set(started))


async def test_entries_of_a_dead_worker_wait_for_its_own_lease_only(view: WorkerView, fleet: Fleet) -> None:
    dead = fleet.start(view.server.url, "sleeping", claim_min_idle_ms=600)
    view.add(600)
    await until(view.pending, "it runs")
    dead.kill()
    taken: list[str] = []

    async def handler(job: Job[Any]) -> None:
        taken.append(job.id)

    async with consuming(view.server.url, handler, claim_min_idle_ms=200):
        await until(lambda: taken, "another worker takes the job over")
