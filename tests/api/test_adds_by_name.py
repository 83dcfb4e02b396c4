"""Adds by name: of a task that the queue knows they are checked like the task; others are allowed, with a warning."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from api.workers import working
from support.queues import QueueView
from tampu import BackoffSpec, ConfigError, EncodeError, JobRetryOverride, Queue, RepeatPattern

if TYPE_CHECKING:
    from servers.process import Server


@dataclass
class Receipt:
    sent_at: datetime


@pytest.fixture
def seen(server: Server) -> QueueView:
    return QueueView(server, "q")


@pytest.fixture
def mails(queue: Queue) -> Queue:
    @queue.task(attempts=7, backoff=BackoffSpec.fixed(1000))
    async def welcome(to: str, at: datetime | None = None) -> Receipt:
        return Receipt(at or datetime(2030, 1, 1, tzinfo=UTC))

    return queue


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ({"too": "ada"}, TypeError, "task 'welcome': missing a required argument: 'to'; nothing was sent"),
        ({"to": "ada", "cc": 1}, TypeError, "task 'welcome': got an unexpected keyword argument 'cc'"),
        ({"to": 5}, EncodeError, "task 'welcome': Expected `str`, got `int`"),
        ("ada", TypeError, "task 'welcome': the payload must be a dict of the task's arguments, got 'ada'"),
    ],
)
async def test_arguments_are_bound_to_the_tasks_signature(
    mails: Queue, seen: QueueView, data: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        await mails.add("welcome", data)
    with pytest.raises(error, match=message):
        await mails.add_bulk([{"name": "welcome", "data": {"to": "ada"}}, {"name": "welcome", "data": data}])
    with pytest.raises(error, match=message):
        await mails.upsert_repeatable_job("welcome", data, repeat=RepeatPattern.every(1000))
    with pytest.raises(error, match=message):
        await mails.add("welcome", data, repeat=RepeatPattern.every(1000))
    assert (seen.length(), await mails.get_repeatable_jobs()) == (0, [])


async def test_jobs_get_the_options_of_the_task(mails: Queue, seen: QueueView) -> None:
    await mails.add("welcome", {"to": "ada"}, delay_ms=60_000, job_id="plain")
    await mails.add("welcome", {"to": "ada"}, delay_ms=60_000, attempts=2, job_id="own")
    await mails.add_bulk([{"name": "welcome", "data": {"to": "ada"}, "delay_ms": 60_000, "job_id": "bulk"}])
    stored = {job.id: job.retry for job in seen.delayed_jobs()}
    assert stored == {
        "plain": JobRetryOverride(7, BackoffSpec.fixed(1000)),
        "bulk": JobRetryOverride(7, BackoffSpec.fixed(1000)),
        "own": JobRetryOverride(2, BackoffSpec.fixed(1000)),
    }


async def test_the_result_has_the_type_of_the_task(mails: Queue) -> None:
    async with working(mails):
        job = await mails.add("welcome", {"to": "ada", "at": "2031-05-06T00:00:00Z"})
        assert job.data == {"to": "ada", "at": "2031-05-06T00:00:00Z"}
        assert await job.result(20) == Receipt(datetime(2031, 5, 6, tzinfo=UTC))


async def test_a_misspelt_name_is_logged_once_and_added(
    mails: Queue, seen: QueueView, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "tampu.queue"):
        await mails.add("welcom", {"to": "ada"})
        await mails.add("welcom", {"to": "bob"})
        await mails.add("resize", {})
    assert [record.getMessage() for record in caplog.records] == [
        "queue 'q' has no task named 'welcom' in this program; did you mean 'welcome'?",
        "queue 'q' has no task named 'resize' in this program; its tasks are welcome",
    ]
    assert seen.length() == 3


async def test_a_strict_queue_refuses_names_without_a_task(server: Server, seen: QueueView) -> None:
    async with Queue("q", url=server.url, strict=True) as queue:
        await queue.add("before any task is registered", 1)
        queue.task(name="welcome")(lambda: None)
        for _ in range(2):
            with pytest.raises(ConfigError, match="no task named 'welcom' in this program; did you mean 'welcome'"):
                await queue.add("welcom", {})
        with pytest.raises(ConfigError, match="no task named 'welcom'"):
            await queue.add_bulk([{"name": "welcom", "data": {}}])
        assert seen.length() == 1
    with pytest.raises(ConfigError, match="strict must be True or False"):
        Queue("q", strict="yes")  # type: ignore[arg-type]


def test_synchronous_adds_are_checked_too(server: Server) -> None:
    queue = Queue("q", url=server.url, strict=True)
    queue.task(name="welcome")(lambda to: to)
    with pytest.raises(TypeError, match="missing a required argument: 'to'"):
        queue.sync.add("welcome", {})
    with pytest.raises(ConfigError, match="no task named 'welcom'"):
        queue.sync.add("welcom", {})
    queue.sync.close()


async def test_a_queue_without_tasks_takes_every_name(
    queue: Queue, seen: QueueView, caplog: pytest.LogCaptureFixture
) -> None:
    await queue.add("anything", "goes")
    await queue.add_bulk([{"name": "anything", "data": 1}])
    assert caplog.records == []
    assert seen.length() == 2
