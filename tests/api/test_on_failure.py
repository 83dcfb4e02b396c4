"""`on_failure`: a function or a task that learns of every dead letter of a task."""

from __future__ import annotations

import asyncio
import logging
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from api.workers import working
from support.waiting import until
from tampu import ConfigError, FailedJob, JobFailed, Queue

if TYPE_CHECKING:
    from servers.process import Server


async def test_a_function_is_called_once_the_attempts_are_used_up(queue: Queue) -> None:
    seen: list[FailedJob] = []
    letters: list[int] = []

    async def alert(failed: FailedJob) -> None:
        letters.append(len(await queue.peek_dlq()))
        seen.append(failed)

    @queue.task(attempts=2, backoff=timedelta(milliseconds=1), on_failure=alert)
    async def charge(amount: int) -> None:
        raise ConnectionError("the bank does not answer")

    async with working(queue):
        job = await charge.add(5)
        with pytest.raises(JobFailed):
            await job.result(20)
    assert seen == [
        FailedJob(
            id=job.id,
            queue="q",
            name="charge",
            arguments={"amount": 5},
            reason="retries_exhausted",
            error_type="ConnectionError",
            error="the bank does not answer",
            attempts=2,
        )
    ]
    assert letters == [1]  # the dead letter was there already


async def test_a_task_gets_a_job(queue: Queue) -> None:
    seen: list[FailedJob] = []

    @queue.task
    async def alert(failed: FailedJob) -> None:
        seen.append(failed)

    @queue.task(attempts=1, on_failure=alert)
    async def charge(amount: int) -> None:
        raise ConnectionError

    @queue.task(attempts=1, on_failure=alert.using(delay=3600))
    async def ship() -> None:
        raise ConnectionError

    async with working(queue):
        job = await charge.add(5)
        await ship.add()
        await until(lambda: seen, "the task runs")
    assert [(one.id, one.arguments) for one in seen] == [(job.id, {"amount": 5})]
    assert [one.name for one in await queue.jobs("delayed")] == ["alert"]


async def test_a_task_registered_after_the_worker_started_has_it_too(queue: Queue) -> None:
    seen: list[FailedJob] = []

    @queue.task
    async def first() -> int:
        return 1

    async with working(queue):
        await (await first.add()).result(20)  # the worker has started

        @queue.task(attempts=1, on_failure=seen.append)
        async def charge(amount: int) -> None:
            raise ConnectionError

        with pytest.raises(JobFailed):
            await (await charge.add(5)).result(20)
        await until(lambda: seen, "on_failure is called")
    assert [one.arguments for one in seen] == [{"amount": 5}]


async def test_jobs_that_never_ran_are_reported_too(queue: Queue, server: Server) -> None:
    seen: list[FailedJob] = []
    queue.task(name="charge", on_failure=seen.append)(lambda amount: None)
    async with Queue("q", url=server.url) as other:
        await other.add("charge", ["not", "arguments"], attempts=1)
        await other.add("unknown task", 1)
    await queue.tasks["charge"].using(expires=0.001).add(1)
    await asyncio.sleep(0.01)  # it expires
    async with working(queue):
        await until(lambda: len(seen) == 2, "both are reported")
    found = {one.reason: one for one in seen}
    assert found.keys() == {"decode_failed", "expired"}
    assert found["decode_failed"].arguments is None
    assert (found["expired"].attempts, found["expired"].error_type) == (0, "")


async def test_an_error_in_it_is_logged_and_changes_nothing(queue: Queue, caplog: pytest.LogCaptureFixture) -> None:
    def alert(failed: FailedJob) -> None:
        raise ZeroDivisionError("in the alert")

    @queue.task(attempts=1, on_failure=alert)
    async def charge() -> None:
        raise ConnectionError

    with caplog.at_level(logging.ERROR, "tampu.worker"):
        async with working(queue):
            with pytest.raises(JobFailed):
                await (await charge.add()).result(20)
    [record] = [one for one in caplog.records if one.name == "tampu.worker"]
    assert record.getMessage().startswith("on_failure of charge raised an exception; the dead letter of job")
    assert record.exc_info is not None
    assert len(await queue.peek_dlq()) == 1


async def test_a_shutdown_waits_for_it(queue: Queue) -> None:
    done: list[str] = []

    async def alert(failed: FailedJob) -> None:
        await asyncio.sleep(0.2)
        done.append(failed.id)

    @queue.task(attempts=1, on_failure=alert)
    async def charge() -> None:
        raise ConnectionError

    async with working(queue):
        job = await charge.add()
        with pytest.raises(JobFailed):
            await job.result(20)
    assert done == [job.id]


def test_it_must_be_callable() -> None:
    wrong: Any = "alert"
    with pytest.raises(ConfigError, match="on_failure must be a task or a function that takes a FailedJob"):
        Queue("q").task(on_failure=wrong)(print)
