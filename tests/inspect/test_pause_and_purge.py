"""Pausing and resuming a queue for all workers, and purging it without its running jobs."""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from api.workers import working
from support.queues import QueueView
from support.waiting import until
from tampu import Queue, RepeatPattern, current_job
from tampu.consume import admission, link
from tampu.inspect import admin
from tampu.redis.calls import PURGE

if TYPE_CHECKING:
    from servers.process import Server


@pytest.fixture(autouse=True)
def quick_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let workers check every 20 ms whether the queue is paused, not every second."""
    monkeypatch.setattr(link, "POLL_SECS", 0.02)


@pytest.mark.slow
async def test_pause_and_resume_apply_to_all_workers(
    queue: Queue, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tampu.worker")

    @queue.task
    async def work(number: int) -> int:
        return number

    assert await queue.is_paused() is False
    async with working(queue), working(queue):
        assert await (await work.add(1)).result(20) == 1
        await queue.pause()
        assert await queue.is_paused() is True
        await until(lambda: _are_paused(server, caplog, 2), "both workers have paused")
        job = await work.add(2)
        async with working(queue):  # a worker that starts later
            await until(lambda: _are_paused(server, caplog, 3), "the third worker has paused")
            assert (await queue.get_job(job.id)).state == "waiting"
            assert server.client().xpending(queue.keys.stream, "default")["pending"] == 0
        assert await queue.resume() is True
        assert await job.result(20) == 2
    assert await queue.resume() is False


def _are_paused(server: Server, caplog: pytest.LogCaptureFixture, workers: int) -> bool:
    """Return True if this many workers have logged the pause and no read of a worker waits at the server."""
    reading = [one for one in server.client().client_list() if one["cmd"] == "xreadgroup" and "b" in one["flags"]]
    return caplog.messages.count('queue "q" paused') == workers and not reading


@pytest.mark.slow
async def test_running_jobs_finish_when_the_queue_is_paused(
    queue: Queue, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tampu.worker")
    started, go_on = asyncio.Event(), asyncio.Event()

    @queue.task
    async def work() -> str:
        started.set()
        await go_on.wait()
        return "done"

    async with working(queue):
        job = await work.add()
        await started.wait()
        await queue.pause()
        await until(lambda: _are_paused(server, caplog, 1), "the worker has paused")
        go_on.set()
        assert await job.result(20) == "done"


async def test_jobs_of_a_paused_task_wait_while_others_run(
    queue: Queue, server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tampu.worker")
    monkeypatch.setattr(admission, "FIRST_DELAY_MS", 40)
    attempts: list[int] = []

    @queue.task
    async def charge() -> str:
        attempts.append(current_job().attempt)
        return "charged"

    @queue.task
    async def mail() -> str:
        return "sent"

    await queue.pause(task="charge", reason="bank is down")
    assert await queue.paused_tasks() == {"charge": "bank is down"}
    assert (await queue.pause_reason(task="charge"), await queue.pause_reason(task="mail")) == ("bank is down", None)
    assert not await queue.is_paused()
    view = QueueView(server, "q")
    async with working(queue):
        job = await charge.add()
        assert await (await mail.add()).result(20) == "sent"
        await until(lambda: view.events(job.id)[-1:] and len(view.events(job.id)) >= 4, "it is put back twice")
        assert {event["e"] for event in view.events(job.id)} == {"retry-scheduled", "waiting"}
        assert await queue.resume(task="charge") is True
        assert await job.result(20) == "charged"
    assert await queue.resume(task="charge") is False
    assert attempts == [0]
    assert 'queue "q": task charge paused: bank is down' in caplog.messages
    assert 'queue "q": task charge resumed' in caplog.messages


async def test_the_pause_of_a_task_ends_by_itself(
    queue: Queue, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "FIRST_DELAY_MS", 40)

    @queue.task
    async def charge() -> str:
        return "charged"

    await queue.pause(task="charge", until=timedelta(milliseconds=200))
    await queue.pause(task="old", until=datetime(2020, 1, 1, tzinfo=UTC))
    assert await queue.pause_reason(task="charge") == ""
    async with working(queue):
        assert await (await charge.add()).result(20) == "charged"
    assert await queue.paused_tasks() == {}
    await queue.pause(task="mail", until=3600)
    assert list(server.client().hgetall(queue.keys.paused_tasks)) == [b"mail"]  # pauses that are over are removed


def test_jobs_of_a_long_pause_are_put_back_for_longer() -> None:
    paused = admission.PausedTasks("q", random_below=lambda below: 0)

    def delay_ms(paused_for_ms: int) -> int:
        paused.update([b"charge", b"1000 0 why"], 1000 + paused_for_ms)
        return paused.delay_ms("charge")

    assert [delay_ms(ms) for ms in (0, 3000, 20_000, 3_600_000)] == [1000, 1000, 5000, 60_000]
    spread = admission.PausedTasks("q", random_below=lambda below: below - 1)
    spread.update([b"charge", b"1000 0 why"], 21_000)
    assert spread.delay_ms("charge") == 5000 - 1249
    paused.update([b"charge", b"1000 5000 why", b"bad", b"?", b"worse", b"1 \xff x"], 5000)
    assert paused.pauses == {}


async def test_purge_deletes_waiting_jobs_and_keeps_running_ones(queue: Queue, server: Server) -> None:
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


async def test_purge_may_be_limited_to_waiting_or_delayed_jobs(queue: Queue, server: Server) -> None:
    view = QueueView(server, "q")
    jobs: list[dict[str, Any]] = [{"name": "", "data": 1}, {"name": "", "data": 2, "delay_ms": 3_600_000}]
    await queue.add_bulk(jobs)
    assert await queue.purge(waiting=False, delayed=False) == 0
    assert await queue.purge(waiting=False) == 1
    assert (view.length(), len(view.delayed())) == (1, 0)
    await queue.add_bulk(jobs)
    assert await queue.purge(delayed=False) == 2
    assert (view.length(), len(view.delayed())) == (0, 1)


@pytest.mark.servers
async def test_purge_leaves_no_marker_behind(queue: Queue, server: Server) -> None:
    """The id of a purged job may be used again at once."""
    long_id, odd_id = "x" * 300, "ä" * 20
    for job_id in ("now", long_id):
        await queue.add("work", 1, job_id=job_id)
    for job_id in ("later", odd_id):
        await queue.add("work", 1, job_id=job_id, delay_ms=3_600_000)
    await queue.add("work", 1, delay_ms=3_600_000)
    assert await queue.purge() == 5
    left = {key.decode() for key in server.client().keys("*")}
    assert {key for key in left if ":dlid:" in key or ":didx:" in key or key.endswith(":due")} == set()
    assert (await queue.add("work", 1, job_id="now")).id.is_new
    assert (await queue.add("work", 1, job_id="later", delay_ms=3_600_000)).id.is_new


async def test_purge_keeps_the_markers_of_jobs_it_keeps(queue: Queue) -> None:
    await queue.add("work", 1, job_id="now")
    await queue.add("work", 1, job_id="later", delay_ms=3_600_000)
    assert await queue.purge(delayed=False) == 1
    assert not (await queue.add("work", 1, job_id="later", delay_ms=3_600_000)).id.is_new
    assert await queue.cancel_delayed("later")


async def test_purge_deletes_entries_that_are_not_jobs_too(queue: Queue, server: Server) -> None:
    client = server.client()
    for d in (b"", b"\x92", b"\x92\xd9", b"\x92\xda\x00", b"\xc1", b"\xdc\x00"):
        client.xadd(queue.keys.stream, {"d": d})
        client.zadd(queue.keys.delayed, {b"\x00\x00\x00\x00" + d: 2e12, b"\xff\xff\xff\xff" + d: 2e12, d: 2e12})
    client.xadd(queue.keys.stream, {"other": b"field"})
    assert await queue.purge() == 7 + 18
    assert (client.xlen(queue.keys.stream), client.exists(queue.keys.delayed)) == (0, 0)


async def test_purge_keeps_jobs_added_while_it_runs(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy producer must not keep it running forever."""
    monkeypatch.setattr(admin, "PURGE_BATCH", 2)
    jobs: list[dict[str, Any]] = [{"name": "", "data": n} for n in range(5)]
    await queue.add_bulk(jobs + [job | {"delay_ms": 3_600_000} for job in jobs])
    pipe = queue.producer.ready_client()
    run = pipe.run

    async def run_while_others_add(*args: Any, **options: Any) -> Any:
        reply = await run(*args, **options)
        if args[0] is PURGE:
            await queue.add_bulk([{"name": "", "data": 0}, {"name": "", "data": 0, "delay_ms": 7_200_000}])
        return reply

    monkeypatch.setattr(pipe, "run", run_while_others_add)
    assert await queue.purge() == 10
    assert (await pipe.call("XLEN", queue.keys.stream), await pipe.call("ZCARD", queue.keys.delayed)) == (3, 3)
