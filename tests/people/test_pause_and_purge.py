"""The whole queue: paused and resumed for all workers, and purged without what runs."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from people.workers import working
from support.queues import QueueView
from support.waiting import until
from tampu import Queue, RepeatPattern
from tampu.engine import reader

if TYPE_CHECKING:
    from servers.process import Server
    from tampu import Worker


@pytest.fixture(autouse=True)
def quick_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers look every 20 ms whether the queue is paused, not every second."""
    monkeypatch.setattr(reader, "PAUSE_WATCH_SECS", 0.02)


async def test_pause_and_resume_hold_for_all_workers(queue: Queue, server: Server) -> None:
    @queue.task
    async def work(number: int) -> int:
        return number

    assert await queue.is_paused() is False
    async with working(queue) as first, working(queue) as second:
        assert await (await work.add(1)).result(20) == 1
        await queue.pause()
        assert await queue.is_paused() is True
        await until(lambda: _are_paused(server, first, second), "both have heard of it")
        job = await work.add(2)
        async with working(queue) as third:  # and one that comes later
            await until(lambda: _are_paused(server, third), "it has heard of it")
            assert (await queue.get_job(job.id)).state == "waiting"
            assert server.client().xpending(queue.keys.stream, "default")["pending"] == 0
        assert await queue.resume() is True
        assert await job.result(20) == 2
    assert await queue.resume() is False


def _are_paused(server: Server, *workers: Worker) -> bool:
    """They have heard of it, and no read of theirs waits at the server any more."""
    consumers = [consumer._running for worker in workers for consumer in worker._consumers]
    heard = all(running is not None and running._reader._is_paused for running in consumers)
    reading = [one for one in server.client().client_list() if one["cmd"] == "xreadgroup" and "b" in one["flags"]]
    return heard and not reading


async def test_what_runs_when_the_queue_is_paused_goes_on(queue: Queue, server: Server) -> None:
    started, go_on = asyncio.Event(), asyncio.Event()

    @queue.task
    async def work() -> str:
        started.set()
        await go_on.wait()
        return "done"

    async with working(queue) as worker:
        job = await work.add()
        await started.wait()
        await queue.pause()
        await until(lambda: _are_paused(server, worker), "it has heard of it")
        go_on.set()
        assert await job.result(20) == "done"


async def test_purge_takes_what_waits_and_leaves_what_runs(queue: Queue, server: Server) -> None:
    view = QueueView(server, "q")
    started, go_on = asyncio.Event(), asyncio.Event()

    @queue.task
    async def work(number: int) -> int:
        started.set()
        await go_on.wait()
        return number

    await queue.upsert_repeatable_job("tick", 1, repeat=RepeatPattern.every(3_600_000))
    server.client().xadd(queue.keys.dlq, {"d": b"", "reason": "malformed", "source_id": "1-1"})
    async with working(queue, concurrency=1):
        running = await work.add(0)
        await started.wait()
        await work.add_bulk(range(1, 2501))
        await work.add_in(3600, 1)
        assert await queue.purge() == 2501
        assert (view.length(), view.delayed()) == (1, [])
        go_on.set()
        assert await running.result(20) == 0
    assert len(await queue.peek_dlq()) == 1
    assert len(await queue.get_repeatable_jobs()) == 1
    assert await queue.purge() == 0


async def test_purge_may_take_one_kind_only(queue: Queue, server: Server) -> None:
    view = QueueView(server, "q")
    jobs: list[dict[str, Any]] = [{"name": "", "data": 1}, {"name": "", "data": 2, "delay_ms": 3_600_000}]
    await queue.add_bulk(jobs)
    assert await queue.purge(waiting=False, delayed=False) == 0
    assert await queue.purge(waiting=False) == 1
    assert (view.length(), len(view.delayed())) == (1, 0)
    await queue.add_bulk(jobs)
    assert await queue.purge(delayed=False) == 2
    assert (view.length(), len(view.delayed())) == (0, 1)
