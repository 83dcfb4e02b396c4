"""Progress events: sent to watchers at a limited rate; the latest always gets through."""

from __future__ import annotations

import asyncio
import math
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from api.workers import working
from support.waiting import until
from tampu import Job, Queue, current_job
from tampu.consume import context
from tampu.consume.context import ProgressReporter
from tampu.redis.client import Client
from tampu.redis.settings import parse_url

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from servers.process import Server


def told(server: Server, queue: Queue) -> list[tuple[str, str]]:
    events: Any = server.client().xrange(queue.keys.events)
    return [
        (fields[b"progress"].decode(), fields[b"note"].decode()) for _, fields in events if fields[b"e"] == b"progress"
    ]


@pytest.fixture
def clock() -> list[float]:
    """Return a clock that a test can set: `clock[0] = 5.0`."""
    return [0.0]


@pytest.fixture
async def reporter(queue: Queue, server: Server, clock: list[float]) -> AsyncIterator[ProgressReporter]:
    client = Client(parse_url(server.url), queue.keys.tag.encode())
    reporter = ProgressReporter(client, queue.keys, worker="w", events_kept=1000, now=lambda: clock[0])
    yield reporter
    await reporter.close()
    await client.close()


def running_job(reporter: ProgressReporter, job_id: str = "j", attempt: int = 0) -> Job[Any]:
    job: Job[Any] = Job(job_id, "resize", None, attempt)
    job._context = reporter
    return job


async def test_watchers_see_progress_with_its_note(queue: Queue, server: Server) -> None:
    @queue.task
    async def resize() -> None:
        current_job().progress(0.4, "resizing")
        await until(lambda: told(server, queue), "it is sent")
        current_job().progress(1)

    async with queue.events() as events, working(queue):
        await events.pin()
        job = await resize.add()
        seen = [event async for event in _until_completed(events)]
    about = [event for event in seen if event.name == "progress"]
    assert [(event.fields["progress"], event.fields["note"]) for event in about] == [("0.4", "resizing"), ("1", "")]
    assert {(event.job_id, event.job_name) for event in about} == {(job.id, "resize")}
    assert {event.fields["worker"] for event in about} == {event.fields["worker"] for event in seen}


async def _until_completed(events: Any) -> AsyncIterator[Any]:
    """Yield events until both the completion and the last progress were seen: they come over two connections."""
    names: list[str] = []
    async for event in events:
        yield event
        names.append(event.name)
        if "completed" in names and names.count("progress") == 2:
            return


async def test_at_most_four_a_second_are_sent_and_the_latest_follows(
    reporter: ProgressReporter, clock: list[float], queue: Queue, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = running_job(reporter)
    job.progress(0.1, "first")
    await until(lambda: told(server, queue) == [("0.1", "first")], "the first is sent at once")
    clock[0] = 0.05
    scheduled: list[Any] = []
    monkeypatch.setattr(reporter, "_schedule", lambda told, wait_secs: scheduled.append((told, wait_secs)))
    for percent in range(11, 50):
        job.progress(percent / 100, str(percent))
    await until(lambda: scheduled, "the next is scheduled")
    [(next_one, wait_secs)] = scheduled
    assert wait_secs == pytest.approx(0.2)
    monkeypatch.undo()
    clock[0] = 0.25
    reporter._send(next_one)
    await until(lambda: told(server, queue)[1:] == [("0.49", "49")], "after the interval, only the latest is sent")
    clock[0] = 5.0
    job.progress(0.5)
    await until(lambda: told(server, queue)[2:] == [("0.5", "")], "later it is sent at once again")


async def test_the_end_is_sent_without_waiting_for_the_interval(
    reporter: ProgressReporter, queue: Queue, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "INTERVAL_SECS", 3600.0)
    job = running_job(reporter)
    job.progress(0.1)
    await until(lambda: told(server, queue) == [("0.1", "")], "the first is sent at once")
    job.progress(0.5)
    job.progress(1.0)
    await until(lambda: told(server, queue)[1:] == [("1", "")], "the end is sent at once")


async def test_the_end_is_sent_once(reporter: ProgressReporter, queue: Queue, server: Server) -> None:
    job = running_job(reporter)
    job.progress(0.9)
    job.progress(1.0, "done")
    for _ in range(5):
        job.progress(1.0, "again")
    job.progress(0.5, "back")
    other = running_job(reporter, "other")
    other.progress(1.0, "other")
    await until(lambda: ("1", "other") in told(server, queue), "the other is sent")
    assert [one for one in told(server, queue) if one[0] == "1"] == [("1", "done"), ("1", "other")]


async def test_a_retry_starts_from_the_beginning(reporter: ProgressReporter, queue: Queue, server: Server) -> None:
    running_job(reporter).progress(1.0, "first run")
    running_job(reporter, attempt=1).progress(0.2, "second run")
    await until(lambda: told(server, queue) == [("1", "first run"), ("0.2", "second run")], "both are sent")


async def test_progress_not_sent_when_the_run_ends_is_dropped(
    reporter: ProgressReporter, clock: list[float], queue: Queue, server: Server
) -> None:
    job = running_job(reporter)
    job.progress(0.1)
    await until(lambda: len(told(server, queue)) == 1, "the first is sent")
    job.progress(0.2)
    reporter.forget(job)
    assert reporter.reports == {}
    other = running_job(reporter, "other")
    other.progress(0.3)
    await until(lambda: ("0.3", "") in told(server, queue), "the other is sent")
    await asyncio.sleep(context.INTERVAL_SECS * 1.2)  # by now it would have been sent
    assert told(server, queue) == [("0.1", ""), ("0.3", "")]


async def test_threads_can_report_at_any_rate(reporter: ProgressReporter, queue: Queue, server: Server) -> None:
    jobs = [running_job(reporter, f"j{number}") for number in range(8)]
    errors: list[BaseException] = []

    def tell(job: Job[Any]) -> None:
        try:
            for step in range(2000):
                job.progress(step / 2000)
            job.progress(1.0)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=tell, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    await until(lambda: not any(thread.is_alive() for thread in threads), "the threads have ended")
    await until(lambda: [one for one, _ in told(server, queue)].count("1") == 8, "each end is sent")
    assert errors == []
    assert len(told(server, queue)) < 100


async def test_progress_of_a_thread_that_outlives_its_worker_is_dropped(queue: Queue, server: Server) -> None:
    reporter = await asyncio.to_thread(_reporter_of_a_loop_that_ended, server, queue)
    running_job(reporter).progress(0.5)


def _reporter_of_a_loop_that_ended(server: Server, queue: Queue) -> ProgressReporter:
    async def make() -> ProgressReporter:
        client = Client(parse_url(server.url), queue.keys.tag.encode())
        return ProgressReporter(client, queue.keys, worker="w", events_kept=10)

    return asyncio.run(make())


async def test_without_events_progress_is_ignored(queue: Queue, server: Server) -> None:
    @queue.task
    async def resize() -> str:
        current_job().progress(1.0)
        return "done"

    async with working(queue, events_enabled=False):
        assert await (await resize.add()).result(20) == "done"
    assert server.client().exists(queue.keys.events) == 0


@pytest.mark.parametrize(
    ("fraction", "note", "sent"),
    [
        (-0.1, "", ("0", "")),
        (1.0003, "", ("1", "")),
        (math.nan, "", ("0", "")),
        (math.inf, "", ("1", "")),
        (None, "", ("0", "")),
        (0.5, None, ("0.5", "")),
        (0.5, 7, ("0.5", "7")),
        (0.5, "\x00a\ud800", ("0.5", "a?")),
    ],
)
async def test_invalid_progress_is_corrected_and_logged_once(
    reporter: ProgressReporter,
    queue: Queue,
    server: Server,
    caplog: pytest.LogCaptureFixture,
    fraction: Any,
    note: Any,
    sent: tuple[str, str],
) -> None:
    for job_id in ("first", "second"):
        running_job(reporter, job_id).progress(fraction, note)
    await until(lambda: told(server, queue) == [sent, sent], "both are sent")
    (line,) = (text for text in caplog.messages if "progress()" in text)
    assert line.startswith("resize first: progress() takes a number from 0 to 1 and a text; got ")


async def test_a_long_note_is_cut(reporter: ProgressReporter, queue: Queue, server: Server) -> None:
    running_job(reporter).progress(0.5, "é" * 1000)
    await until(lambda: told(server, queue) == [("0.5", "é" * 200)], "it is sent, cut")


async def test_only_a_running_job_can_report_progress(queue: Queue) -> None:
    @queue.task
    async def resize() -> None: ...

    here = r"this job is not running here; call progress\(\) on the job that the handler received"
    for job in (await queue.add("", 1), await resize.add(), Job("id")):
        with pytest.raises(RuntimeError, match=here):
            job.progress(0.5)


async def test_invalid_progress_of_a_handler_does_not_fail_its_job(queue: Queue, server: Server) -> None:
    def handler(job: Job[Any]) -> str:
        job.progress(job.data, "from a thread")
        return "done"

    async with working("q", handler, url=server.url, store_results=True, max_attempts=1):
        assert await (await queue.add("", 0.5)).result(20) == "done"
        await until(lambda: told(server, queue) == [("0.5", "from a thread")], "it is sent")
        assert await (await queue.add("", 5)).result(20) == "done"


@pytest.mark.slow
async def test_the_state_of_a_running_job_shows_its_progress(queue: Queue) -> None:
    ends = asyncio.Event()

    @queue.task(attempts=2, backoff=timedelta(milliseconds=1))
    async def resize(fraction: float) -> None:
        job = current_job()
        if job.attempt == 0:
            job.progress(fraction, "step 2 of 5")
            await ends.wait()
            ends.clear()
            raise ValueError
        await ends.wait()

    async def progress_of(job: Job[Any]) -> tuple[str, float | None, str | None]:
        state = await queue.get_job(job.id)
        return state.state, state.progress, state.progress_note

    async def is_shown() -> bool:
        return await progress_of(job) == ("running", 0.4, "step 2 of 5")

    async def is_retried() -> bool:
        # The progress of the first attempt is not that of the second.
        return await progress_of(job) == ("running", None, None) and (await queue.get_job(job.id)).attempt == 1

    for settings in ({}, {"events_enabled": False}):
        async with working(queue, **settings):
            job = await resize.add(0.4)
            await until(is_shown, "the progress is shown")
            ends.set()
            await until(is_retried, "the second attempt runs")
            ends.set()
            await job.result(20)
            ends.clear()


@pytest.mark.parametrize("stored", ["", "0", "0 much note", "1 0.5 of another attempt", b"\xff\xff"])
async def test_a_progress_that_cannot_be_read_is_none(queue: Queue, server: Server, stored: Any) -> None:
    ends = asyncio.Event()

    @queue.task
    async def resize() -> None:
        await ends.wait()

    async with working(queue):
        job = await resize.add()
        server.client().set(queue.keys.progress(job.id), stored)

        async def is_running() -> bool:
            return (await queue.get_job(job.id)).state == "running"

        await until(is_running, "it runs")
        assert (await queue.get_job(job.id)).progress is None
        ends.set()


async def test_the_key_of_a_progress_expires(reporter: ProgressReporter, queue: Queue, server: Server) -> None:
    running_job(reporter).progress(1.0, "done")
    await until(lambda: server.client().ttl(queue.keys.progress("j")) > 3500, "the key expires in an hour")
