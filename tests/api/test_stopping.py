"""Long jobs over deploys: a job sees that its worker stops, and an abandoned one runs elsewhere at once."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from api.workers import working
from support.waiting import until
from tampu import Snooze, current_job

if TYPE_CHECKING:
    from tampu import Queue


async def test_a_job_can_make_room_for_a_deploy(queue: Queue) -> None:
    steps: list[str] = []

    @queue.task
    async def convert() -> str | Snooze:
        steps.append("starts")
        while len(steps) == 1:
            if current_job().stopping:
                return Snooze(0)
            await asyncio.sleep(0.01)
        return "done"

    async with working(queue):
        job = await convert.add()
        await until(lambda: steps, "it runs")
    async with working(queue):
        assert await job.result(10) == "done"
    assert steps == ["starts", "starts"]


async def test_an_abandoned_job_is_run_by_another_worker_at_once(queue: Queue) -> None:
    starts: list[int] = []

    @queue.task
    async def convert() -> str:
        starts.append(1)
        if len(starts) == 1:
            await asyncio.Event().wait()
        return "done"

    async with working(queue, shutdown_deadline_secs=0, claim_min_idle_ms=600_000):
        job = await convert.add()
        await until(lambda: starts, "it runs")
    async with working(queue, claim_min_idle_ms=600_000):
        assert await job.result(10) == "done"
