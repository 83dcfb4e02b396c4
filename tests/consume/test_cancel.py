"""Cancel: a delayed job goes at once, a waiting one never starts, a running one is ended; on every server."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest

from api.workers import working
from support.queues import QueueView
from support.waiting import until
from tampu import Job, JobCancelled, Queue, current_job

if TYPE_CHECKING:
    from servers.cluster import Cluster
    from servers.process import Server

pytestmark = pytest.mark.servers


@pytest.fixture
def seen(server: Server | Cluster) -> QueueView:
    return QueueView(server, "q")


async def test_a_delayed_job_is_removed_at_once(seen: QueueView) -> None:
    async with Queue("q", url=seen.server.url) as queue:
        job = await queue.add("mail", 1, delay_ms=60_000)
        assert await queue.cancel(job.id, reason="by the user") == "cancelled"
        assert seen.delayed() == []
        assert (await queue.get_job(job.id)).state == "cancelled"
        with pytest.raises(JobCancelled, match="by the user") as raised:
            await job.result(timeout=5)
        assert (raised.value.job_id, raised.value.reason) == (job.id, "by the user")
        event = seen.events(job.id)[-1]
        assert (event["e"], event["n"], event["reason"]) == ("cancelled", "mail", "by the user")
        assert 0 <= int(event["ts"]) - int(event["created_at_ms"]) < 60_000


async def test_a_waiting_job_never_starts(seen: QueueView) -> None:
    started: list[str] = []
    async with Queue("q", url=seen.server.url) as queue:

        @queue.task
        async def mail(number: int) -> None:
            started.append(current_job().id)

        cancelled, other = await mail.add(1), await mail.add(2)
        assert await queue.cancel(cancelled.id) == "requested"
        async with working(queue):
            await other.result(timeout=10)
            with pytest.raises(JobCancelled):
                await cancelled.result(timeout=10)
    assert started == [other.id]
    assert seen.is_settled()
    assert seen.client.zcard(seen.keys.cancel_marks) == 0, "a mark that was acted on is gone from the index"


async def test_a_running_coroutine_is_cancelled(seen: QueueView) -> None:
    cleaned_up = asyncio.Event()
    async with Queue("q", url=seen.server.url) as queue:

        @queue.task(attempts=5)
        async def hang() -> None:
            try:
                await asyncio.sleep(3600)
            finally:
                cleaned_up.set()

        job = await hang.add()
        async with working(queue):
            await until(lambda: "active" in seen.event_names(job.id), "it runs")
            assert await queue.cancel(job.id, reason="too slow") == "requested"
            with pytest.raises(JobCancelled, match="too slow"):
                await job.result(timeout=10)
            assert cleaned_up.is_set()
            assert await queue.cancel(job.id) == "cancelled"
            assert seen.event_names(job.id)[-1] == "cancelled"
            assert "failed" not in seen.event_names(job.id)


@pytest.mark.slow
async def test_a_function_in_a_thread_is_asked_to_stop(seen: QueueView) -> None:
    async with Queue("q", url=seen.server.url) as queue:

        @queue.task
        def count() -> None:
            pause = threading.Event()
            while True:
                current_job().check_cancelled()
                pause.wait(0.01)

        job = await count.add()
        async with working(queue):
            await until(lambda: "active" in seen.event_names(job.id), "it runs")
            assert await queue.cancel(job.id) == "requested"
            with pytest.raises(JobCancelled):
                await job.result(timeout=10)


@pytest.mark.slow
async def test_a_function_in_a_thread_is_not_over_before_it_stops(seen: QueueView) -> None:
    has_noticed, may_stop = threading.Event(), threading.Event()
    async with Queue("q", url=seen.server.url) as queue:

        @queue.task
        def count() -> None:
            job = current_job()
            while not job.is_cancelled:
                may_stop.wait(0.01)
            has_noticed.set()
            may_stop.wait(20)
            job.check_cancelled()

        job = await count.add()
        async with working(queue) as worker:
            await until(lambda: "active" in seen.event_names(job.id), "it runs")
            assert await queue.cancel(job.id) == "requested"
            await until(has_noticed.is_set, "it has noticed the request")
            assert [one.id for one in worker.running_jobs()] == [job.id]
            assert "cancelled" not in seen.event_names(job.id)
            may_stop.set()
            with pytest.raises(JobCancelled):
                await job.result(timeout=10)


@pytest.mark.slow
async def test_a_failure_after_the_request_is_not_retried(seen: QueueView) -> None:
    runs: list[int] = []
    async with Queue("q", url=seen.server.url) as queue:

        @queue.task(attempts=5)
        def fails_late() -> None:
            runs.append(current_job().attempt)
            pause = threading.Event()
            while not current_job().is_cancelled:
                pause.wait(0.01)
            raise ValueError("interrupted")

        job = await fails_late.add()
        async with working(queue):
            await until(lambda: runs, "it runs")
            await queue.cancel(job.id)
            with pytest.raises(JobCancelled):
                await job.result(timeout=10)
    assert runs == [0]
    assert seen.is_settled()


@pytest.mark.slow
async def test_a_job_that_finishes_first_keeps_its_result(seen: QueueView) -> None:
    async with Queue("q", url=seen.server.url) as queue:

        @queue.task
        async def stubborn() -> str:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                return "finished all the same"
            return ""

        job = await stubborn.add()
        async with working(queue):
            await until(lambda: "active" in seen.event_names(job.id), "it runs")
            await queue.cancel(job.id)
            assert await job.result(timeout=10) == "finished all the same"
            assert await queue.cancel(job.id) == "finished"


async def test_an_id_that_was_cancelled_can_be_added_again(seen: QueueView) -> None:
    ran: list[str] = []
    async with Queue("q", url=seen.server.url) as queue:

        @queue.task
        async def mail(number: int) -> int:
            ran.append(current_job().id)
            return number

        first = await mail.add_unique("order-7", 1)
        assert await queue.cancel(first.id) == "requested"
        async with working(queue):
            with pytest.raises(JobCancelled):
                await first.result(timeout=10)
            again = await mail.add_unique("order-7", 2)
            assert again.id.is_new
            assert await again.result(timeout=10) == 2
    assert ran == ["order-7"]


async def test_a_new_add_takes_the_mark_of_its_id_with_it(seen: QueueView) -> None:
    """Workers that remember the mark ask the server, and find it gone."""
    async with Queue("q", url=seen.server.url) as queue:

        @queue.task
        async def mail(number: int) -> int:
            return number

        seen.client.set(seen.keys.cancel_mark("a"), "r")
        seen.client.zadd(seen.keys.cancel_marks, {"a": 1})
        async with working(queue):
            job = await mail.add_unique("a", 2)
            assert await job.result(timeout=10) == 2
            assert await queue.cancel(job.id) == "finished"


@pytest.mark.slow
@pytest.mark.servers("valkey", "redis62", "redis70", "redis86")
@pytest.mark.parametrize("score", ["+inf", "1e300", str(2**52 + 1)])
async def test_a_mark_with_a_huge_score_does_not_delay_cancels(seen: QueueView, score: str) -> None:
    """A worker reads on from the newest mark that it knows; once an infinite one is gone, all others are older."""

    def looks() -> int:
        return int(seen.client.info("commandstats").get("cmdstat_zrangebyscore", {}).get("calls", 0))

    async with Queue("q", url=seen.server.url) as queue:

        @queue.task
        async def hang() -> None:
            await asyncio.sleep(3600)

        jobs = [await hang.add() for _ in range(2)]
        seen.client.execute_command("ZADD", seen.keys.cancel_marks, score, "poison")
        async with working(queue):
            await until(lambda: all("active" in seen.event_names(job.id) for job in jobs), "both run")
            before = looks()
            await until(lambda: looks() >= before + 2, "the worker has read the marks")
            for job in jobs:
                assert await queue.cancel(job.id) == "requested"
                with pytest.raises(JobCancelled):
                    await job.result(timeout=10)
                seen.client.zrem(seen.keys.cancel_marks, "poison")


async def test_unknown_and_finished_jobs_are_told_apart(seen: QueueView) -> None:
    async with Queue("q", url=seen.server.url) as queue:

        @queue.task(attempts=1)
        async def mail(fails: bool) -> None:
            if fails:
                raise ValueError("no")

        done, dead = await mail.add(False), await mail.add(True)
        async with working(queue):
            await done.result(timeout=10)
            await until(seen.is_settled, "both are over")
        assert await queue.cancel(done.id) == "finished"
        assert await queue.cancel(dead.id) == "finished"
        assert await queue.cancel("never was") == "unknown"


async def test_a_retry_that_waits_is_cancelled_at_once(seen: QueueView) -> None:
    async with Queue("q", url=seen.server.url) as queue:

        async def handler(job: Job[Any]) -> None:
            raise ValueError("no")

        async with working("q", handler, url=seen.server.url):
            job = await queue.add("mail", 1, attempts=5, backoff=600_000)
            await until(seen.delayed, "it waits for its retry")
            assert await queue.cancel(job.id) == "cancelled"
            assert seen.is_settled()
