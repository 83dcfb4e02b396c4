"""Tasks on a worker: how they are added, run, retried and scheduled."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import threading
import uuid
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest

from api.workers import working
from support.queues import QueueView
from support.waiting import until
from tampu import (
    BackoffKind,
    BackoffSpec,
    ConfigError,
    EncodeError,
    Job,
    JobFailed,
    MissedFiresPolicy,
    Queue,
    RepeatPattern,
    ResultNotStored,
    Retry,
    Worker,
    current_job,
)

if TYPE_CHECKING:
    from servers.process import Server


@dataclasses.dataclass
class Invoice:
    number: int
    total: Decimal


@pytest.fixture
def view(server: Server) -> QueueView:
    return QueueView(server, "q")


# --- adding


async def test_a_task_is_added_by_name_with_its_arguments(queue: Queue, view: QueueView) -> None:
    @queue.task(attempts=5, backoff=BackoffSpec.fixed(200))
    async def welcome(to: str, subject: str = "hi") -> None: ...

    job = await welcome.add("ada@example.com")
    assert (job.name, job.data) == ("welcome", {"to": "ada@example.com", "subject": "hi"})
    [sent] = view.jobs()
    assert (sent.id, sent.name, sent.payload) == (job.id, "welcome", {"to": "ada@example.com", "subject": "hi"})
    assert sent.retry is not None
    assert (sent.retry.max_attempts, sent.retry.backoff) == (5, BackoffSpec(BackoffKind.FIXED, 200))


async def test_a_wrong_argument_is_refused_before_anything_is_sent(queue: Queue, view: QueueView) -> None:
    @queue.task
    async def welcome(to: str) -> None: ...

    wrong: Any = welcome
    for error, add in [
        (EncodeError, wrong.add(5)),
        (TypeError, wrong.add()),
        (TypeError, wrong.add("a", bogus=1)),
        (EncodeError, wrong.add_in(5, 5)),
        (EncodeError, wrong.add_at(5, 5)),
        (EncodeError, wrong.add_unique("id", 5)),
        (EncodeError, wrong.add_bulk(["a", 5])),
        (TypeError, wrong.add_bulk([("a", "b")])),
        (EncodeError, wrong.cron("0 9 * * *", {"to": 5})),
        (TypeError, wrong.cron("0 9 * * *", "ada@example.com")),
        (TypeError, wrong.every(5, {"bogus": 5})),
        (TypeError, wrong.schedule(RepeatPattern.every(5))),
    ]:
        with pytest.raises(error, match="task 'welcome'"):
            await add
    for error, add in [
        (EncodeError, lambda: wrong.sync.add(5)),
        (TypeError, lambda: wrong.sync.add_bulk([("a", "b")])),
        (TypeError, lambda: wrong.sync.every(5, ["ada@example.com"])),
    ]:
        with pytest.raises(error, match="task 'welcome'"):
            add()
    assert view.all_keys() == {}


async def test_a_task_can_be_added_for_later(queue: Queue, view: QueueView) -> None:
    @queue.task
    async def welcome(to: str) -> None: ...

    instant = datetime.now(UTC).replace(microsecond=0) + timedelta(hours=1)
    before = view.now_ms()
    jobs = [
        await welcome.add_in(timedelta(minutes=5), "a"),
        await welcome.add_in(600, to="b"),
        await welcome.add_at(instant, "c"),
        await welcome.add_at(instant.timestamp(), "d"),
    ]
    due = {job.payload["to"]: at for job, (_, at) in zip(view.delayed_jobs(), view.delayed(), strict=True)}
    assert view.delayed_ids()[:2] == [jobs[0].id, jobs[1].id]
    assert 0 <= due["a"] - before - 300_000 < 10_000
    assert 0 <= due["b"] - before - 600_000 < 10_000
    assert due["c"] == due["d"] == int(instant.timestamp() * 1000)


async def test_a_task_can_be_added_once(queue: Queue, view: QueueView) -> None:
    @queue.task
    async def welcome(to: str) -> None: ...

    first = await welcome.add_unique("mail-1", "ada")
    again = await welcome.add_unique("mail-1", "grace")
    assert [job.id.is_new for job in (first, again)] == [True, False]  # type: ignore[attr-defined]
    assert view.payloads() == [{"to": "ada"}]
    with pytest.raises(ConfigError, match="job_id"):
        await welcome.add_unique(" ", "ada")


async def test_a_bulk_can_have_tuples_dicts_or_single_arguments(queue: Queue, view: QueueView) -> None:
    @queue.task(attempts=4)
    async def welcome(to: str, subject: str = "hi") -> None: ...

    jobs = await welcome.add_bulk(item for item in ["a", ("b", "yo"), {"to": "c"}])
    assert view.ids() == [job.id for job in jobs]
    assert [job.data for job in jobs] == view.payloads()
    assert view.payloads() == [
        {"to": "a", "subject": "hi"},
        {"to": "b", "subject": "yo"},
        {"to": "c", "subject": "hi"},
    ]
    assert {job.retry and job.retry.max_attempts for job in view.jobs()} == {4}
    assert await welcome.add_bulk([]) == []


async def test_creating_a_schedule_again_does_not_change_it(queue: Queue) -> None:
    @queue.task
    async def report(region: str = "eu") -> None: ...

    def due(found: list[Any]) -> dict[str, int]:
        return {meta.key: meta.next_fire_ms for meta in found}

    keys = {
        await report.cron("0 9 * * *", tz="America/Lima"),
        await report.every(timedelta(hours=1), {"region": "us"}),
        await report.schedule(
            RepeatPattern.every(90_000), key="mine", limit=3, missed_fires=MissedFiresPolicy.fire_once()
        ),
        await report.every(7200, key="other", end_before_ms=2**50, missed_fires={"kind": "fire-all", "max_catchup": 2}),
    }
    assert keys == {"report::cron:0 9 * * *:America/Lima", "report::every:3600000", "mine", "other"}
    found = await queue.get_repeatable_jobs()
    before = due(found)
    mine = next(meta for meta in found if meta.key == "mine")
    assert (mine.limit, mine.missed_fires.kind, mine.job_name) == (3, "fire-once", "report")
    await report.every(timedelta(hours=1), {"region": "us"})
    assert due(await queue.get_repeatable_jobs()) == before


async def test_a_scheduled_task_gets_its_arguments(queue: Queue) -> None:
    seen: list[str] = []

    @queue.task
    async def report(region: str = "eu") -> None:
        seen.append(region)

    await report.every(0.02, {"region": "us"}, limit=1)
    await report.cron("* * * * * *", limit=1)
    async with working(queue):
        await until(lambda: len(seen) == 2, "both have fired")
    assert sorted(seen) == ["eu", "us"]


# --- running


async def test_arguments_and_results_have_their_types(queue: Queue) -> None:
    @queue.task
    async def pay(invoice: Invoice, id: uuid.UUID, when: datetime) -> Invoice:  # noqa: A002
        assert isinstance(invoice, Invoice)
        assert isinstance(id, uuid.UUID)
        assert isinstance(when, datetime)
        return Invoice(invoice.number + 1, invoice.total * 2)

    async with working(queue):
        job = await pay.add(Invoice(1, Decimal("9.99")), uuid.uuid4(), datetime.now(UTC))
        result = await job.result(20)
        assert result == Invoice(2, Decimal("19.98"))
        assert await queue.get_job_result(job.id) == {"number": 2, "total": "19.98"}


async def test_a_def_runs_in_a_thread_and_an_async_def_on_the_loop(queue: Queue) -> None:
    @queue.task
    def blocking() -> str:
        return threading.current_thread().name

    @queue.task
    async def cooperative() -> str:
        return threading.current_thread().name

    async with working(queue):
        assert (await (await blocking.add()).result(20)).startswith("tampu-task")
        assert await (await cooperative.add()).result(20) == threading.current_thread().name


async def test_a_task_can_get_its_job(queue: Queue) -> None:
    @queue.task
    def blocking() -> str:
        return current_job().id

    @queue.task
    async def cooperative() -> list[Any]:
        await asyncio.sleep(0)
        job = await asyncio.create_task(_current())
        return [job.id, job.name, job.attempt]

    async def _current() -> Job[Any]:
        return current_job()

    async with working(queue, concurrency=3):
        jobs = await blocking.add_bulk([()] * 20)
        assert [await job.result(20) for job in jobs] == [job.id for job in jobs]
        others = await cooperative.add_bulk([()] * 20)
        assert [await job.result(20) for job in others] == [[job.id, "cooperative", 0] for job in others]
    with pytest.raises(RuntimeError, match="inside a task"):
        current_job()


async def test_a_payload_that_does_not_match_is_dead_lettered_at_once(queue: Queue) -> None:
    seen: list[Any] = []

    @queue.task
    async def welcome(to: str) -> None:
        seen.append(to)

    async with working(queue), Queue("q", url=queue.url) as other:  # which does not know the task
        for data in ({"to": 5}, {}, "ada", None):
            job = await other.add("welcome", data)
            with pytest.raises(JobFailed, match=r"decode_failed.*call of welcome"):
                await job.result(20)
        await (await other.add("welcome", {"to": "ada", "since": "long ago"})).result(20)
    assert seen == ["ada"]


async def test_a_timeout_is_a_failure_with_a_clear_message(queue: Queue) -> None:
    @queue.task(timeout=0.05, attempts=1)
    async def slow() -> None:
        await asyncio.sleep(60)

    @queue.task(timeout=30, attempts=1)
    async def its_own() -> None:
        raise TimeoutError("of its own")

    async with working(queue):
        for task, says in [(slow, "0.05 s"), (its_own, "of its own")]:
            with pytest.raises(JobFailed, match=f"retries_exhausted.*TimeoutError.*{says}"):
                await (await task.add()).result(20)


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (set[uuid.UUID], {uuid.uuid4() for _ in range(2500)}),
        (dict[int, str], {number * 7919: "x" for number in range(6000)}),
        (list[dict[str, int]], [{"a": 1}] * 90_000),
        (Any, [{"a": 1}] * 90_000),
    ],
    ids=["UUIDs", "integer keys", "small dicts", "small dicts without a type"],
)
async def test_large_collections_are_arguments_and_results(annotation: Any, value: Any) -> None:
    async def echo(value: Any) -> Any:
        assert type(value) is type(expected)
        return value

    expected = value
    echo.__annotations__ |= {"value": annotation, "return": annotation}
    async with Queue("q", url="embedded://") as queue:
        task = queue.task(echo)
        async with working(queue):
            assert await (await task.add(value)).result(20) == value


async def test_a_tasks_own_attempts_and_backoff_apply(queue: Queue) -> None:
    attempts: list[int] = []

    @queue.task(attempts=3, backoff=timedelta(milliseconds=1))
    async def flaky() -> str | Retry:
        attempts.append(current_job().attempt)
        if len(attempts) == 1:
            raise ValueError
        return Retry(after=0.001) if len(attempts) == 2 else "done"

    async with working(queue, max_attempts=1):
        assert await (await flaky.add()).result(20) == "done"
    assert attempts == [0, 1, 2]


# --- processes


@pytest.mark.slow
async def test_tasks_run_in_processes(server: Server, process_tasks: Any) -> None:
    tasks = process_tasks
    number = uuid.uuid4()
    async with tasks.queue as queue, working(queue, concurrency=2), Queue(queue.name, url=queue.url) as other:
        found = await (await tasks.pid_of.add(7, number)).result(60)
        assert found["pid"] != os.getpid()
        assert (found["number"], found["id"]) == (7, number.hex)
        assert tasks.pid_of(3)["pid"] == os.getpid()
        assert await (await tasks.later.add(1)).result(60) == 2
        assert await (await tasks.doubled.add(4)).result(60) == 8
        for job, says in [
            (await tasks.hangs.add(), "TimeoutError.*killed at its timeout of 0.5 s"),
            (await tasks.dies.add(), "exit code 3"),
            (await tasks.refuses.add("raise"), "unrecoverable.*not here"),
            (await tasks.refuses.add("return"), "unrecoverable.*not wanted"),
            (await other.add("pid_of", {"number": "x"}), "decode_failed"),
        ]:
            with pytest.raises(JobFailed, match=says):
                await job.result(60)


@pytest.mark.parametrize("how", ["pickled", "unpickled"])
async def test_a_result_that_cannot_leave_its_process_fails_only_its_reader(process_tasks: Any, how: str) -> None:
    async with process_tasks.queue as queue, working(queue):
        job = await process_tasks.unsendable.add(how)
        with pytest.raises(ResultNotStored, match=f"it cannot be {how}"):
            await job.result(60)


async def test_tasks_share_their_processes(process_tasks: Any) -> None:
    async with process_tasks.queue as queue, working(queue, concurrency=1):
        first = await (await process_tasks.pid_of.add(1)).result(60)
        assert await (await process_tasks.own_pid.add()).result(60) == first["pid"]


async def test_a_task_in_a_process_reports_progress(server: Server, process_tasks: Any) -> None:
    async with process_tasks.queue as queue, working(queue):
        job = await process_tasks.tells.add()
        assert await job.result(60) == job.id
        await until(lambda: _progress(server.client(), queue)[-1:] == [("1", "there")], "it is sent")


def _progress(client: Any, queue: Queue) -> list[tuple[str, str]]:
    found = client.xrange(queue.keys.events)
    return [
        (fields[b"progress"].decode(), fields[b"note"].decode()) for _, fields in found if fields[b"e"] == b"progress"
    ]


# --- several queues


async def test_one_worker_serves_several_queues(server: Server) -> None:
    async with Queue("mails", url=server.url) as mails, Queue("images", url=server.url) as images:

        @mails.task
        async def send(to: str) -> str:
            return f"sent to {to}"

        @images.task
        def resize(width: int) -> int:
            return width // 2

        async with working([mails, images], concurrency=2) as worker:
            assert worker.name == "mails,images"
            jobs = await resize.add_bulk([10, 20, 30, 40])
            assert await (await send.add("ada")).result(20) == "sent to ada"
            assert [await job.result(20) for job in jobs] == [5, 10, 15, 20]
            assert worker.seconds_since_last_read() is None or worker.seconds_since_last_read() >= 0  # type: ignore[operator]
            assert worker.is_healthy


async def test_a_worker_refuses_queues_it_cannot_serve(server: Server) -> None:
    queue, empty = Queue("a", url=server.url), Queue("b", url=server.url)

    @queue.task
    async def anything() -> None: ...

    for bad, says in [
        (empty, "queue 'b' has no tasks to run"),
        ([queue, empty], "queue 'b' has no tasks to run"),
        ([queue, queue], "given twice"),
        ([queue, Queue("a", url=server.url)], "given twice"),
        ([queue, "b"], "queue must be"),
        (7, "queue must be"),
    ]:
        with pytest.raises(ConfigError, match=says):
            Worker(bad)  # type: ignore[arg-type]
    for options in ({"url": server.url}, {"redis_url": server.url}, {"tls": True}):
        with pytest.raises(ConfigError, match="a Queue has its own"):
            Worker(queue, **options)  # type: ignore[arg-type]
    assert Worker(queue).config.store_results is True
    assert Worker(queue, store_results=False).config.store_results is False


def test_an_unknown_option_of_a_task_is_named() -> None:
    wrong: Any = {"tmeout": 5}
    with pytest.raises(TypeError, match="a task has no option 'tmeout'; it has name, attempts, backoff, timeout"):
        Queue("q").task(**wrong)(lambda: None)


def test_a_backoff_without_a_unit_is_deprecated() -> None:
    queue = Queue("q", url="redis://127.0.0.1:1")
    with pytest.warns(
        DeprecationWarning, match=r"backoff=50 means 50 milliseconds; pass timedelta\(milliseconds=50\)"
    ) as caught:

        @queue.task(backoff=50)
        async def by_number() -> None: ...

    assert caught[0].filename == __file__, "the warning points at the task"

    @queue.task(backoff=timedelta(milliseconds=50))
    async def by_timedelta() -> None: ...

    assert by_number.add_options.retry == by_timedelta.add_options.retry


def test_backoff_specs_accept_timedeltas() -> None:
    given = BackoffSpec.exponential(timedelta(seconds=1), max_ms=timedelta(minutes=5), jitter_ms=timedelta(0))
    assert given == BackoffSpec.exponential(1000, max_ms=300_000, jitter_ms=0)
    assert BackoffSpec.fixed(timedelta(seconds=2)) == BackoffSpec.fixed(2000)
