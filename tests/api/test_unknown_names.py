"""Jobs without a matching task, as during a deploy when old workers receive new jobs."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest

from api.workers import working
from support.queues import QueueView
from support.waiting import until
from tampu import Cancel, Job, JobFailed, Queue
from tampu.consume import admission
from tampu.consume.admission import UnknownNames
from tampu.consume.handlers import PutBack

if TYPE_CHECKING:
    from servers.process import Server


@pytest.mark.slow
async def test_an_unknown_job_waits_for_a_worker_with_its_task(queue: Queue, server: Server) -> None:
    view = QueueView(server, "q")

    @queue.task
    async def known() -> None: ...

    job = await queue.add("new", {"x": 1}, attempts=1)
    async with working(queue):
        await until(lambda: view.delayed_ids() == [job.id], "it is put back")
        [put_back] = view.delayed_jobs()
        assert (put_back.attempt, put_back.name, put_back.payload) == (0, "new", {"x": 1})
        assert view.delayed()[0][1] - view.now_ms() <= admission.UNKNOWN_DELAY_MS
    async with Queue("q", url=server.url) as newer:

        @newer.task
        async def new(x: int) -> int:
            return x + 1

        async with working(newer):
            assert await job.result(20) == 2


async def test_an_unknown_job_is_dead_lettered_in_the_end(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "UNKNOWN_DELAY_MS", 1)
    monkeypatch.setattr(admission, "UNKNOWN_PATIENCE_SECS", 0.05)

    @queue.task
    async def known() -> None: ...

    async with working(queue):
        job = await queue.add("nobody's", 1)
        with pytest.raises(JobFailed, match=r"unrecoverable.*no handler named .nobody's."):
            await job.result(20)
        [letter] = await queue.peek_dlq()
        assert letter["name"] == "nobody's"
        assert await (await known.add()).result(20) is None


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def unknown(clock: Clock) -> UnknownNames:
    return UnknownNames(clock)


def job(job_id: str = "j", name: str = "n") -> Job[Any]:
    return Job(job_id, name)


def test_a_job_is_put_back_for_an_hour_and_then_dead_lettered(unknown: UnknownNames, clock: Clock) -> None:
    while clock.now <= 3600:
        outcome = unknown.outcome_of(job())
        assert isinstance(outcome, PutBack)
        assert outcome.why == "no handler named 'n'"
        clock.now += 60
    assert unknown.outcome_of(job()) == Cancel("no handler named 'n'")
    assert unknown._seen == {}
    assert isinstance(unknown.outcome_of(job()), PutBack)  # after a replay the hour starts again


def test_the_delay_grows_the_longer_a_job_is_unknown(unknown: UnknownNames, clock: Clock) -> None:
    """Each round writes four events: one per second for an hour would push other events out of the stream."""
    waits = []
    while isinstance(outcome := unknown.outcome_of(job()), PutBack):
        waits.append(outcome.after_ms)
        clock.now += outcome.after_ms / 1000
    assert waits[:4] == [1000, 1000, 1000, 1000]  # a deploy takes seconds
    assert waits == sorted(waits)
    assert waits[-1] == 30_000
    assert len(waits) < 150


def test_the_hour_starts_again_after_an_absence(unknown: UnknownNames, clock: Clock) -> None:
    """An ID that is used every day must not be dead-lettered on the second day."""
    assert isinstance(unknown.outcome_of(job()), PutBack)
    clock.now = 24 * 3600.0
    assert isinstance(unknown.outcome_of(job()), PutBack)
    clock.now += 3500
    assert isinstance(unknown.outcome_of(job()), PutBack)


def test_the_number_of_remembered_jobs_is_limited(unknown: UnknownNames, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_REMEMBERED", 10)
    for number in range(100):
        unknown.outcome_of(job(str(number), f"name {number}"))
    assert [*unknown._seen] == [str(number) for number in range(90, 100)]
    assert len(unknown._complained_at) <= 10


def test_a_name_is_logged_once_per_minute(
    unknown: UnknownNames, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "tampu.worker"):
        for number in range(100):
            clock.now = number
            unknown.outcome_of(job(str(number)))
        unknown.outcome_of(job("x", "other"))
    assert [record.args[0] for record in caplog.records if record.args] == [  # type: ignore[index]
        "no handler named 'n'",
        "no handler named 'n'",
        "no handler named 'other'",
    ]
