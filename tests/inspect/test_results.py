"""Waiting for results: woken by events, without polling, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
import re
import time
from typing import TYPE_CHECKING, Any

import pytest

from api.workers import working
from support.proxy import Proxy
from support.waiting import until
from tampu import (
    Consumer,
    ConsumerConfig,
    Job,
    JobFailed,
    Queue,
    RetryConfig,
    ShutdownError,
    UnrecoverableError,
    events,
)

if TYPE_CHECKING:
    from servers.process import Server


@pytest.fixture
def no_polling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable polling: only events wake callers."""
    monkeypatch.setattr(events, "SAFETY_NET_SECS", 3600.0)


@pytest.fixture
def quick_polling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Poll every 20 ms instead of every second."""
    monkeypatch.setattr(events, "SAFETY_NET_SECS", 0.02)


async def handler(job: Job[Any]) -> Any:
    if job.name == "fail":
        raise UnrecoverableError("no way")
    return job.data


@pytest.fixture
def no_idle_time(monkeypatch: pytest.MonkeyPatch, quick_polling: None) -> None:
    """Stop the reader at the first poll without callers."""
    monkeypatch.setattr(events, "IDLE_SECS", 0.0)


async def waiting(server: Server, job: Job[Any], timeout: float = 20) -> asyncio.Task[Any]:  # noqa: ASYNC109
    """Start to wait for a job's result; return once the first lookup has found none and the reader reads events."""
    lookups = calls(server, "mget")
    task = asyncio.create_task(job.result(timeout))
    await until(lambda: calls(server, "mget") > lookups and readers(server) == 1, "the call waits")
    return task


def readers(server: Server) -> int:
    """Return the number of connections that read events: their last command is XREAD, until they are closed."""
    return sum(one["cmd"].startswith("xread") for one in server.client().client_list())


def calls(server: Server, *commands: str) -> int:
    """Return how often these commands were called since the statistics were reset."""
    found: Any = server.client().info("commandstats")
    return sum(found.get(f"cmdstat_{command}", {"calls": 0})["calls"] for command in commands)


async def test_an_event_wakes_a_waiting_caller(queue: Queue, server: Server, no_polling: None) -> None:
    job = await queue.add("", {"x": 1})
    task = await waiting(server, job)
    async with working("q", handler, url=server.url, store_results=True):
        assert await task == {"x": 1}


async def test_no_event_is_missed_between_the_lookup_and_the_wait(server: Server, no_polling: None) -> None:
    async with working("q", handler, url=server.url, store_results=True):
        for number in range(1, 51):
            async with Queue("q", url=server.url) as queue:  # a new reader each time
                assert await (await queue.add("", number)).result(20) == number


@pytest.mark.slow
async def test_a_long_wait_does_not_poll(queue: Queue, server: Server) -> None:
    job = await queue.add("", 1)
    server.client().config_resetstat()
    with pytest.raises(TimeoutError):
        await job.result(2.5)
    # The first lookup, then one poll per second for all callers; a poll every 0.1 s would be 25.
    assert 2 <= calls(server, "mget") <= 4  # one at the start, then one per second
    assert calls(server, "xread") <= 2


async def test_many_callers_share_one_reader_and_one_poll(queue: Queue, server: Server, no_polling: None) -> None:
    jobs = await queue.add_bulk([{"name": "", "data": number} for number in range(1, 101)])
    tasks = [asyncio.create_task(job.result(20)) for job in jobs for _ in range(5)]
    await until(lambda: calls(server, "mget") >= 500, "all calls have looked up their result")
    await until(lambda: readers(server) == 1, "one reader waits for all of them")
    server.client().config_resetstat()
    async with working("q", handler, url=server.url, store_results=True):
        assert await asyncio.gather(*tasks) == [job.data for job in jobs for _ in range(5)]
    assert calls(server, "mget") < 200  # the worker's scripts read their locks; one per caller would be 500


async def test_an_existing_result_is_returned_at_once(queue: Queue, server: Server, no_polling: None) -> None:
    async with working("q", handler, url=server.url, store_results=True):
        job = await queue.add("", 1)
        await until(lambda: server.client().exists(queue.keys.result(job.id)), "it is done")
    assert await job.result(20) == 1


async def test_results_arrive_without_events(queue: Queue, server: Server, quick_polling: None) -> None:
    good, bad = await queue.add("", 1), await queue.add("fail", 1)
    tasks = [await waiting(server, good), await waiting(server, bad)]
    async with working("q", handler, url=server.url, store_results=True, events_enabled=False):
        assert await tasks[0] == 1
        with pytest.raises(JobFailed, match="no way"):
            await tasks[1]
    assert server.client().exists(queue.keys.events) == 0


async def test_results_arrive_when_the_events_key_has_another_type(
    queue: Queue, server: Server, quick_polling: None
) -> None:
    server.client().set(queue.keys.events, "text")
    job = await queue.add("", 1)
    task = asyncio.create_task(job.result(20))
    async with working("q", handler, url=server.url, store_results=True):
        assert await task == 1


async def test_results_survive_a_lost_connection(queue: Queue, server: Server) -> None:
    job = await queue.add("", 1)
    task = await waiting(server, job)
    server.client().client_kill_filter(_type="normal", skipme=True)
    async with working("q", handler, url=server.url, store_results=True):
        assert await task == 1


@pytest.mark.parametrize("job_id", [None, "order-7"])
async def test_waiting_for_a_dead_letter_raises(
    queue: Queue, server: Server, no_polling: None, job_id: str | None
) -> None:
    async with working("q", handler, url=server.url, store_results=True):
        job = await queue.add("fail", 1, job_id=job_id)
        await until(lambda: server.client().xlen(queue.keys.dlq) == 1, "it is a dead letter")
    with pytest.raises(JobFailed) as caught:
        await job.result(20)
    failed = caught.value
    assert str(failed) == f"job {job.id} became a dead letter: unrecoverable (UnrecoverableError: no way)"
    assert (failed.job_id, failed.reason, failed.detail) == (job.id, "unrecoverable", "UnrecoverableError: no way")
    assert failed.code == "CMQ-008"


async def test_waiting_for_a_job_that_becomes_a_dead_letter_raises_the_same(
    queue: Queue, server: Server, no_polling: None
) -> None:
    job = await queue.add("fail", 1)
    tasks = [await waiting(server, job) for _ in range(2)]
    async with working("q", handler, url=server.url, store_results=True):
        for task in tasks:
            with pytest.raises(JobFailed) as caught:
                await task
            assert str(caught.value) == f"job {job.id} became a dead letter: unrecoverable (UnrecoverableError: no way)"


async def test_a_dead_job_is_found_when_the_producers_clock_is_20_s_ahead(
    queue: Queue, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    time_ns = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: time_ns() + 20 * 10**9)
    job = await queue.add("fail", 1)
    async with working(queue, handler):
        await until(lambda: server.client().xlen(queue.keys.dlq) == 1, "it is a dead letter")
    with pytest.raises(JobFailed):
        await job.result(5)


async def test_a_dead_letter_that_was_removed_at_once_still_raises(
    queue: Queue, server: Server, no_polling: None
) -> None:
    job = await queue.add("", 1)
    task = await waiting(server, job)
    server.client().xadd(queue.keys.events, {"e": "dlq", "id": job.id, "ts": 1, "reason": "malformed"})
    with pytest.raises(JobFailed, match="malformed"):
        await task


async def test_a_failure_that_will_be_retried_does_not_end_the_wait(
    queue: Queue, server: Server, no_polling: None
) -> None:
    async def flaky(job: Job[Any]) -> str:
        if job.attempt < 2:
            raise ValueError
        return "third time"

    async with working("q", flaky, url=server.url, store_results=True):
        assert await (await queue.add("", 1)).result(20) == "third time"


async def test_a_replayed_job_can_be_waited_for_again(queue: Queue, server: Server, no_polling: None) -> None:
    job = await queue.add("fail", 1)
    async with working("q", handler, url=server.url):
        with pytest.raises(JobFailed):
            await job.result(20)
    await queue.replay_dlq()
    task = await waiting(server, job)
    async with working("q", lambda job: "mended", url=server.url, store_results=True):
        assert await task == "mended"


async def test_a_completed_event_may_arrive_before_the_result(queue: Queue, server: Server, no_polling: None) -> None:
    """ChasquiMQ's workers write them in this order."""
    job = await queue.add("", 1)
    task = await waiting(server, job)
    client = server.client()
    client.config_resetstat()
    client.xadd(queue.keys.events, {"e": "completed", "id": job.id, "ts": 1, "attempt": 1, "duration_us": 1})
    await until(lambda: calls(server, "mget") >= 2, "it has looked it up without success")
    client.set(queue.keys.result(job.id), b"\x2a")
    assert await task == 42


async def test_a_result_that_is_not_messagepack_is_returned_as_bytes(queue: Queue, server: Server) -> None:
    """A `Consumer` stores the bytes that its handler returns."""
    shutdown = asyncio.Event()

    async def raw(job: Job[Any]) -> bytes:
        return b"\xc1"

    consumer = Consumer(server.url, ConsumerConfig(queue_name="q", store_results=True))
    task = asyncio.create_task(consumer.run(raw, shutdown))
    job = await queue.add("", 1)
    assert await job.result(20) == b"\xc1"
    assert (await queue.get_job(job.id)).result == b"\xc1"
    shutdown.set()
    await task


# --- timeouts and errors


async def test_a_timeout_error_says_what_the_job_is_doing(queue: Queue, server: Server, no_idle_time: None) -> None:
    async def said(job: Job[Any]) -> str:
        with pytest.raises(TimeoutError, match=f"no result of job {job.id} within 0.05 s: ") as caught:
            await job.result(0.05)
        return str(caught.value).partition(" s: ")[2]

    job = await queue.add("", 1)
    assert await said(job) == "it is waiting, and no worker serves queue 'q'"
    await queue.pause(reason="bank is down")
    assert await said(job) == "queue 'q' is paused: bank is down"
    await queue.resume()
    assert re.fullmatch(r"it is delayed and is due in \d+\.\d s", await said(await queue.add("", 1, delay_ms=5000)))
    assert "there is no such job" in await said(queue._added("never-added", "", None))

    async def busy(job: Job[Any]) -> None:
        if job.name == "fail":
            raise ValueError
        await ends.wait()

    async def is_retried() -> bool:
        return (await queue.get_job(failing.id)).state == "delayed"

    ends = asyncio.Event()
    slow = RetryConfig(initial_backoff_ms=60_000, max_backoff_ms=60_000)
    async with working("q", busy, url=server.url, concurrency=1, read_count=1, consumer_id="w1", retry=slow):
        await until(lambda: server.client().xpending(queue.keys.stream, "default")["pending"] == 1, "it runs")
        assert re.fullmatch("it is running on worker w1:[0-9a-f]{6}", await said(job))
        failing = await queue.add("fail", 1)
        assert await said(failing) == "it is waiting; jobs in the queue: 2, workers: 1"
        ends.set()
        await until(is_retried, "it failed")
        assert re.fullmatch(r"attempt 1 failed, and the next one is due in \d+\.\d s", await said(failing))
    await until(lambda: readers(server) == 0, "the reader has stopped, as no call is left waiting")


@pytest.mark.slow
async def test_a_timeout_error_says_that_the_worker_stores_no_results(
    queue: Queue, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "POLLS_AFTER_COMPLETED_SECS", (0.0,))
    job = await queue.add("", 1)
    task = asyncio.create_task(job.result(1.5))
    await until(lambda: readers(server) == 1, "it waits")
    async with working("q", handler, url=server.url):
        with pytest.raises(
            TimeoutError, match=r"it completed, but its worker does not store results; use .*store_results=True"
        ):
            await task


@pytest.mark.parametrize("timeout", [0, -1, True])
async def test_a_bad_timeout_is_refused(queue: Queue, timeout: Any) -> None:  # noqa: ASYNC109
    job = await queue.add("", 1)
    with pytest.raises(ValueError, match="timeout"):
        await job.result(timeout)
    with pytest.raises(ValueError, match="timeout"):
        await job.wait_for_result(timeout=timeout)
    with pytest.raises(ValueError, match="poll_interval"):
        await job.wait_for_result(poll_interval=timeout)


async def test_a_job_that_was_never_added_cannot_be_waited_for() -> None:
    with pytest.raises(RuntimeError, match=r"call result\(\) on a job returned by Queue\.add"):
        await Job("id", "n", 1, 0, 0).wait_for_result()


async def test_a_handler_may_wait_for_another_job_but_not_for_its_own(queue: Queue, server: Server) -> None:
    async def nested(job: Job[Any]) -> Any:
        if job.name == "own":
            return await job.result(20)
        if job.name == "inner":
            return "inner done"
        return await (await queue.add("inner", 1)).result(20)

    async with working("q", nested, url=server.url, store_results=True, max_attempts=1):
        assert await (await queue.add("outer", 1)).result(20) == "inner done"
        with pytest.raises(JobFailed, match="a handler cannot wait for its own job"):
            await (await queue.add("own", 1)).result(20)


async def test_closing_the_queue_ends_a_wait_with_an_error(server: Server) -> None:
    queue = Queue("q", url=server.url)
    task = await waiting(server, await queue.add("", 1))
    await queue.close()
    with pytest.raises(ShutdownError, match="closed while this call waited"):
        await task


async def test_closing_the_queue_ends_a_wait_that_is_just_starting(server: Server) -> None:
    async with Proxy(server.address) as proxy:
        queue = Queue("q", url=proxy.url)
        job = await queue.add("", 1)
        proxy.hold_replies()
        server.client().config_resetstat()
        task = asyncio.create_task(job.result(20))
        await until(lambda: calls(server, "xrevrange") == 1, "it waits for its first reply")
        await queue.close()
        with pytest.raises(ShutdownError, match="closed while this call waited"):
            await task


async def test_a_cancelled_wait_leaves_nothing_behind(queue: Queue, server: Server, no_idle_time: None) -> None:
    job = await queue.add("", 1)
    gone, stays = await waiting(server, job), await waiting(server, job)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    async with working("q", handler, url=server.url, store_results=True):
        assert await stays == 1
    await until(lambda: readers(server) == 0, "the reader has stopped, as no call is left waiting")


async def test_the_reader_stops_when_no_caller_waits(queue: Queue, server: Server, no_idle_time: None) -> None:
    job = await queue.add("", 1)
    task = await waiting(server, job)
    async with working("q", handler, url=server.url, store_results=True):
        assert await task == 1
    await until(lambda: readers(server) == 0, "the reader has stopped")
    async with working("q", handler, url=server.url, store_results=True):
        assert await (await queue.add("", 2)).result(20) == 2


async def test_nothing_is_started_after_the_queue_was_closed(queue: Queue, caplog: pytest.LogCaptureFixture) -> None:
    """Ctrl-C in `tampu add --wait` closed the queue while the reader was starting, which then logged its failure."""

    class Feed:
        is_pinning, may_pin, is_closed = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def pin(self) -> None:
            self.is_pinning.set()
            await self.may_pin.wait()

        async def close(self) -> None:
            self.is_closed.set()

        def abandon(self) -> None: ...

    feed: Any = Feed()
    queue._waiters._follow = lambda: feed
    job = await queue.add("", 1)
    waiting = asyncio.create_task(job.result(20))
    await feed.is_pinning.wait()
    closing = asyncio.create_task(queue.close())
    await until(feed.is_closed.is_set, "the feed is closed")
    feed.is_closed.clear()
    feed.may_pin.set()
    with pytest.raises(ShutdownError):
        await waiting
    await closing
    await until(feed.is_closed.is_set, "the feed is closed again, as its start was under way")
    assert queue._waiters._tasks == set()
    assert caplog.records == []
