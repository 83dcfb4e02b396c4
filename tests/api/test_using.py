"""`task.using(...)`, retry rules, snoozes, expiry and headers, from the add to the handler."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from api.workers import working
from support.queues import QueueView
from support.waiting import until
from tampu import BackoffSpec, ConfigError, Job, JobFailed, Queue, Snooze, current_job
from tampu.consume.admission import is_expired
from tampu.wire.extras import JobExtras, encode_extras

if TYPE_CHECKING:
    from servers.process import Server


@pytest.fixture
def seen(server: Server) -> QueueView:
    return QueueView(server, "q")


async def test_options_compose_and_can_be_kept(queue: Queue, seen: QueueView) -> None:
    @queue.task(attempts=7, backoff=BackoffSpec.fixed(1000))
    async def mail(to: str) -> None: ...

    later = mail.using(delay=timedelta(hours=1), headers={"tenant": "acme"})
    job = await later.using(unique="order-7", attempts=2).add("ada")
    assert job.id == "order-7"
    assert not (await later.using(unique="order-7").add("ada")).id.is_new
    await later.add("bob")
    stored = {one.id: one for one in seen.delayed_jobs()}
    assert len(stored) == 2
    kept = stored.pop("order-7")
    (plain,) = stored.values()
    assert kept.retry is not None
    assert (kept.retry.max_attempts, kept.retry.backoff) == (2, BackoffSpec.fixed(1000))
    assert plain.retry is not None
    assert plain.retry.max_attempts == 7
    assert kept.headers == plain.headers == {"tenant": "acme"}


async def test_the_call_replaces_the_time_and_the_id_of_using(queue: Queue, seen: QueueView) -> None:
    @queue.task
    async def mail() -> None: ...

    configured = mail.using(delay=3600, unique="a", headers={"tenant": "acme"})
    assert (await configured.add_in(60)).id == "a"
    ((_, score),) = seen.delayed()
    assert score < seen.now_ms() + 61_000
    assert (await configured.add_at(0.0)).id.is_new is False
    assert (await configured.using(delay=None).add_unique("b")).id == "b"
    assert [job.headers for job in seen.jobs()] == [{"tenant": "acme"}]


async def test_a_later_time_replaces_an_earlier_one(queue: Queue, seen: QueueView) -> None:
    @queue.task
    async def mail() -> None: ...

    at = datetime.now(UTC) + timedelta(hours=2)
    await mail.using(delay=60).using(at=at).add()
    ((_, score),) = seen.delayed()
    assert abs(score - at.timestamp() * 1000) <= 1
    sooner = mail.using(at=at).using(delay=60)
    assert sooner._using is not None
    assert (sooner._using.at, sooner._using.delay) == (None, 60)
    await sooner.add()
    assert min(score for _, score in seen.delayed()) < at.timestamp() * 1000 - 3_600_000


async def test_a_bulk_shares_the_options(queue: Queue, seen: QueueView) -> None:
    @queue.task
    async def mail(number: int) -> None: ...

    jobs = await mail.using(headers={"a": "b"}, delay=60).add_bulk([1, 2, 3])
    assert sorted(seen.delayed_ids()) == sorted(job.id for job in jobs)
    assert [job.headers for job in seen.delayed_jobs()] == [{"a": "b"}] * 3
    with pytest.raises(ConfigError, match="unique is the ID of a single job"):
        await mail.using(unique="a").add_bulk([1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"delay": 1, "at": 2}, "either delay or at"),
        ({"delay": -1}, "delay must be"),
        ({"backoff": 500}, "backoff must be a timedelta or a BackoffSpec"),
        ({"timeout": 0}, "timeout must be a timedelta or seconds above 0; got 0"),
        ({"expires": timedelta(0)}, "expires must be"),
        ({"headers": {"a": 1}}, "headers must be"),
        ({"unique": " "}, "unique must be"),
    ],
)
async def test_bad_options_are_refused_before_anything_is_sent(
    queue: Queue, options: dict[str, Any], message: str
) -> None:
    @queue.task
    async def mail() -> None: ...

    with pytest.raises(ConfigError, match=message):
        mail.using(**options)
    with pytest.raises(TypeError, match="using\\(\\) has no option 'dealy'; it has delay, at, unique"):
        mail.using(dealy=1)  # type: ignore[call-arg]


def test_synchronous_code_composes_options_too(server: Server, seen: QueueView) -> None:
    queue = Queue("q", url=server.url)

    @queue.task
    def mail(number: int) -> None: ...

    try:
        assert mail.using(unique="a", delay=60).sync.add(1).id == "a"
        assert len(mail.using(delay=60).sync.add_bulk([1, 2])) == 2
        assert len(seen.delayed()) == 3
        later = mail.sync.using(delay=60)
        again = [later.using(unique="b").add(number) for number in (1, 2)]
        assert [job.id.is_new for job in again] == [True, False]
        assert len(seen.delayed()) == 4
    finally:
        queue.sync.close()


async def test_a_jobs_own_timeout_overrides_its_tasks(queue: Queue) -> None:
    @queue.task(attempts=1, timeout=3600)
    async def hang() -> None:
        await asyncio.sleep(3600)

    job = await hang.using(timeout=0.05).add()
    async with working(queue):
        with pytest.raises(JobFailed, match="cancelled at its timeout"):
            await job.result(timeout=10)


async def test_a_job_that_did_not_start_in_time_is_dead(queue: Queue, seen: QueueView) -> None:
    ran: list[int] = []

    @queue.task
    async def mail(number: int) -> None:
        ran.append(number)

    late = await mail.using(expires=datetime.now(UTC) - timedelta(seconds=1)).add(1)
    in_time = await mail.using(expires=3600).add(2)
    async with working(queue):
        await in_time.result(timeout=10)
        with pytest.raises(JobFailed, match="expired"):
            await late.result(timeout=10)
    assert ran == [2]
    (letter,) = seen.dead_letters()
    assert (letter.reason, letter.attempts) == ("expired", 0)
    assert await queue.replay_dlq() == 1
    async with working(queue):
        await until(lambda: ran == [2, 1], "the replayed job runs, although its time is over")


async def test_a_late_cancel_does_not_cancel_the_replay(queue: Queue, seen: QueueView) -> None:
    ran: list[int] = []

    @queue.task(attempts=1)
    async def mail(number: int) -> None:
        ran.append(number)
        raise ValueError("no")

    job = await mail.add(1)
    async with working(queue):
        await until(seen.dead_letters, "it is dead")
    # As if the cancel had been requested just before it failed.
    seen.client.set(queue.keys.cancel_mark(job.id), "r")
    seen.client.zadd(queue.keys.cancel_marks, {job.id: 1})
    assert await queue.replay_dlq() == 1
    async with working(queue):
        await until(lambda: ran == [1, 1], "the replayed job runs")


async def test_headers_survive_retries_delays_and_replays(queue: Queue, seen: QueueView) -> None:
    headers: list[dict[str, str]] = []

    @queue.task(attempts=2)
    async def mail() -> str:
        headers.append(current_job().headers)
        if len(headers) < 3:
            raise ValueError("not yet")
        return "sent"

    job = await mail.using(headers={"tenant": "acme"}, delay=0.01).add()
    async with working(queue):
        await until(seen.dead_letters, "both attempts have failed")
        assert await queue.replay_dlq() == 1
        assert await queue.wait_for_result(job.id, 10) == "sent"
    assert headers == [{"tenant": "acme"}] * 3


async def test_a_snooze_uses_no_attempt_and_is_not_a_failure(queue: Queue, seen: QueueView) -> None:
    attempts: list[int] = []

    @queue.task(attempts=1)
    async def poll() -> str | Snooze:
        attempts.append(current_job().attempt)
        return "done" if len(attempts) == 3 else Snooze(timedelta(milliseconds=5))

    job = await poll.add()
    async with working(queue):
        assert await job.result(timeout=10) == "done"
    assert attempts == [0, 0, 0]
    assert "failed" not in seen.event_names(job.id)
    assert seen.event_names(job.id).count("retry-scheduled") == 2


async def test_errors_that_are_not_retried_are_dead_at_once(queue: Queue, seen: QueueView) -> None:
    runs: list[str] = []

    @queue.task(attempts=3, no_retry_on=ValueError)
    async def picky(kind: str) -> None:
        runs.append(kind)
        raise ValueError("bad input") if kind == "value" else KeyError("gone")

    @queue.task(attempts=3, retry_on=(ConnectionError, TimeoutError))
    def only(kind: str) -> None:
        runs.append(kind)
        raise ConnectionError("away") if kind == "connection" else OSError("broken")

    async with working(queue):
        for task, kind in ((picky, "value"), (only, "os"), (picky, "key"), (only, "connection")):
            with pytest.raises(JobFailed):
                await (await task.add(kind)).result(timeout=10)
    assert runs == ["value", "os", *["key"] * 3, *["connection"] * 3]
    letters = [(letter.error_type, letter.reason, letter.attempts) for letter in seen.dead_letters()]
    assert letters == [
        ("ValueError", "unrecoverable", 1),
        ("OSError", "unrecoverable", 1),
        ("KeyError", "retries_exhausted", 3),
        ("ConnectionError", "retries_exhausted", 3),
    ]
    assert seen.dead_letters()[0].traceback is not None


async def test_a_function_decides_about_retries(queue: Queue, seen: QueueView) -> None:
    asked: list[tuple[str, int]] = []

    def decide(error: BaseException, attempt: int) -> bool | timedelta | float:
        asked.append((str(error), attempt))
        decisions: dict[int, bool | timedelta | float] = {1: True, 2: 0.01, 3: timedelta(milliseconds=10)}
        return decisions.get(attempt, False)

    @queue.task(attempts=10, retry=decide)
    async def mail() -> None:
        raise ValueError("no")

    job = await mail.add()
    async with working(queue):
        with pytest.raises(JobFailed, match="unrecoverable"):
            await job.result(timeout=10)
    assert asked == [("no", number) for number in (1, 2, 3, 4)]
    backoffs = [event["backoff_ms"] for event in seen.events(job.id) if event["e"] == "retry-scheduled"]
    assert backoffs[1:] == ["10", "10"]


def test_rules_that_contradict_each_other_are_refused() -> None:
    queue = Queue("q")
    with pytest.raises(ConfigError, match="either retry, or retry_on"):
        queue.task(retry=lambda error, attempt: True, retry_on=ValueError)(lambda: None)
    with pytest.raises(ConfigError, match="retry_on must be an exception class or a tuple of them"):
        queue.task(retry_on=("ValueError",))(lambda: None)  # type: ignore[arg-type]


def test_only_a_job_that_never_ran_expires() -> None:
    for expires_at_ms, attempt, is_over in ((999, 0, True), (1000, 0, False), (999, 1, False), (None, 0, False)):
        job: Job[None] = Job("job-1", attempt=attempt)
        job._tail = encode_extras(JobExtras({"a": "b"}, None, expires_at_ms))
        assert is_expired(job, 1000) is is_over
