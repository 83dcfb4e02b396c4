"""Typed use of the API: code that a type checker must accept and, on the lines marked `# E`, must report.

Never run; test_typing.py checks it with mypy --strict and with pyright in strict mode.
"""

# ruff: noqa: B018 - expressions that show a type
from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, assert_type

import tampu
from tampu import (
    BackoffSpec,
    Cancel,
    ConsumerConfig,
    Depends,
    FailedJob,
    Job,
    JobEnd,
    JobId,
    JobState,
    Middleware,
    MissedFiresPolicy,
    PendingAdd,
    Producer,
    ProducerConfig,
    Queue,
    QueueEvent,
    QueueEvents,
    RepeatableMeta,
    RepeatPattern,
    Retry,
    RetryConfig,
    Snooze,
    Task,
    Worker,
    current_job,
)
from tampu.middleware import NextAdd, NextRun  # noqa: TC001
from tampu.rsmq import PooledRsmq, QueueAttributes, Rsmq, RsmqConnection, RsmqConnectionSync, RsmqMessage, RsmqSync
from tampu.sync import SyncJob
from tampu.task import CoroutineTask, FunctionTask, TaskJob
from tampu.testing import run_until_empty

queue = Queue("emails")

tampu.Quue  # E
tampu.Queue("lazily loaded names are typed too", max_delay_secs="1")  # E


@dataclass
class Receipt:
    id: str
    sent_at: datetime


# --- tasks are typed like their functions


@queue.task
async def welcome(to: str, subject: str = "hi") -> Receipt:
    return Receipt(to, datetime.now(UTC))


@queue.task(attempts=5, backoff=BackoffSpec.exponential(200), timeout=30)
async def remind(to: str, *, days: int) -> None:
    current_job().progress(0.5, "half way")


@queue.task
def resize(width: int) -> tuple[int, int]:
    return width, width


@queue.task(name="squeeze", process=True)
def compress(data: bytes) -> bytes:
    return data


@queue.task
async def flaky() -> str | Retry:
    return Retry(after=timedelta(seconds=5))


@queue.task
def postponed(name: str) -> int | Snooze | Cancel | None:
    return Snooze(5) if name else 1


@queue.task
async def never_done() -> Retry:
    return Retry(after=1)


async def outcomes_are_no_results() -> None:
    assert_type(await (await flaky.add()).result(), str)
    assert_type(postponed.sync.add("x").result(), int | None)
    assert_type(await flaky.using(delay=5).add(), TaskJob[str])


async def calls() -> None:
    assert_type(await welcome("ada"), Receipt)
    assert_type(resize(5), tuple[int, int])
    assert_type(compress(b""), bytes)
    assert_type(await remind("ada", days=5), None)
    welcome(5)  # E
    resize("wide")  # E
    await resize(5)  # E
    welcome("ada").id  # E


async def adds() -> None:
    job = await welcome.add("ada@example.com")
    assert_type(job, TaskJob[Receipt])
    assert_type(await job.result(), Receipt)
    assert_type(await (await resize.add(640)).result(timeout=5), tuple[int, int])
    assert_type(await (await compress.add(b"")).result(), bytes)
    assert_type((await welcome.add("ada", "yo")).id, JobId)
    await welcome.add(to="ada", subject="yo")
    await remind.add("ada", days=5)
    await welcome.add_in(timedelta(minutes=5), "grace@example.com")
    await welcome.add_in(300, to="grace@example.com")
    await welcome.add_at(datetime.now(UTC), "grace@example.com")
    await welcome.add_unique("mail-7", "grace@example.com")
    assert_type(await welcome.add_bulk(["a", ("b", "yo"), {"to": "c"}]), list[TaskJob[Receipt]])
    assert_type(await welcome.cron("0 9 * * *", {"to": "ada"}, tz="America/Lima"), str)
    await remind.every(timedelta(hours=1), {"to": "ada", "days": 1}, limit=3, missed_fires=MissedFiresPolicy.skip())
    await remind.schedule(RepeatPattern.every(5000), {"to": "ada", "days": 1}, key="mine")

    configured = welcome.using(delay=timedelta(minutes=5), unique="mail-7", headers={"tenant": "acme"})
    assert_type(await configured.add("ada"), TaskJob[Receipt])
    assert_type(await configured.using(attempts=2).add_bulk(["ada"]), list[TaskJob[Receipt]])
    assert_type(await (await configured.add("ada")).result(), Receipt)
    assert_type(await welcome.job("mail-7").result(), Receipt)
    assert_type(await welcome.job("mail-7").state(), JobState)
    assert_type((await job.state()).progress, float | None)
    await configured.add(5)  # E
    await configured.add()  # E
    welcome.using(dealy=5)  # E
    welcome.using(delay="5")  # E
    welcome.using(backoff=500)  # E
    welcome.using(headers={"tenant": 5})  # E

    await welcome.add(5)  # E
    await welcome.add()  # E
    await welcome.add("ada", "yo", "more")  # E
    await welcome.add("ada", bogus=1)  # E
    await remind.add("ada", 5)  # E
    await remind.add("ada", days="5")  # E
    await welcome.add_in("5", "ada")  # E
    await welcome.add_in(5, 5)  # E
    await welcome.add_at(datetime.now(UTC), 5)  # E
    await welcome.add_unique(7, "ada")  # E
    await remind.cron("0 9 * * *", bogus=1)  # E
    welcome.add("ada").result()  # E
    (await (await welcome.add("ada")).result()).bogus  # E


def adds_without_a_loop() -> None:
    job = welcome.sync.add("ada")
    assert_type(job, SyncJob[Receipt])
    assert_type(job.result(timeout=10), Receipt)
    assert_type(resize.sync.add_bulk([1, 2]), list[SyncJob[tuple[int, int]]])
    welcome.sync.add_in(5, "ada")
    welcome.sync.add_unique("mail-7", "ada")
    assert_type(welcome.sync.add_unique("mail-7", "ada").id.is_new, bool)
    assert_type(welcome.sync.using(delay=5).using(unique="a").add("ada"), SyncJob[Receipt])
    assert_type(welcome.sync.job("mail-7").result(), Receipt)
    assert_type(welcome.sync.job("mail-7").state(), JobState)
    welcome.sync.using(delay=5).add(5)  # E
    welcome.sync.using(dealy=5)  # E
    welcome.sync.add(5)  # E
    welcome.sync.add_in(5)  # E
    plain = queue.sync.add("mail", {"to": "ada"}, delay_ms=5)
    assert_type(plain, SyncJob[Any])


def any_kind(task: Task[..., Receipt]) -> None:
    assert_type(task("x"), Receipt | Coroutine[Any, Any, Receipt])


def kinds() -> None:
    any_kind(welcome)
    by_name: dict[str, Task[Any, Any]] = queue.tasks
    coroutine: CoroutineTask[..., Receipt] = welcome
    function: FunctionTask[..., tuple[int, int]] = resize
    wrong: FunctionTask[..., Receipt] = welcome  # E
    print(by_name, coroutine, function, wrong)


# --- failures


@queue.task
async def alert(failed: FailedJob) -> None:
    assert_type(failed.error, str)


def log_failure(failed: FailedJob) -> None: ...


@queue.task(on_failure=alert, soft_timeout=5)
async def with_a_task() -> None: ...
@queue.task(on_failure=log_failure)
async def with_a_function() -> None: ...
@queue.task(on_failure=welcome)  # E
async def with_a_wrong_task() -> None: ...


# --- the chasquimq-compatible API


async def by_name() -> None:
    job = await queue.add("mail", {"to": "ada"}, delay=timedelta(minutes=5), attempts=3, backoff=250)
    assert_type(job, Job[Any])
    await queue.add_unique("mail", {}, job_id="mail-7", delay_ms=datetime.now(UTC))
    await queue.add_bulk([{"name": "mail", "data": 1}])
    assert_type(await queue.get_job(job.id), JobState)
    assert_type(await queue.get_repeatable_jobs(), list[RepeatableMeta])
    assert_type(await queue.cancel_delayed(job.id), bool)
    await queue.add("mail")  # E
    await queue.add("mail", {}, delay="5")  # E
    await queue.add("mail", {}, attempts="3")  # E
    await queue.add_unique("mail", {})  # E


async def handler(job: Job[Any]) -> str:
    assert_type(job.attempts_made, int)
    job.progress(0.4, "resizing")
    job.progress("0.4")  # E
    return job.name


async def before(job: Job[Any]) -> None: ...
def after(job: Job[Any], error: BaseException | None) -> None: ...
async def shutdown() -> None: ...


@contextlib.asynccontextmanager
async def wrapped(job: Job[Any]) -> AsyncGenerator[None, None]:
    yield


class Tenant(Middleware):
    async def on_add(self, call_next: NextAdd, add: PendingAdd) -> list[JobId]:
        assert_type(add.headers, dict[str, str])
        return await call_next(add)

    async def on_run(self, call_next: NextRun, job: Job[Any]) -> Any:
        return await call_next(job)

    async def on_end(self, end: JobEnd) -> None:
        assert_type(end.retry_in, float | None)


class Connection:
    pass


def connection() -> Iterator[Connection]:
    yield Connection()


async def connection_later() -> AsyncIterator[Connection]:
    yield Connection()


async def connected() -> Connection:
    return Connection()


@queue.task
async def stored(name: str, *, db: Connection = Depends(connection), other: Connection = Depends(connected)) -> int:
    return 1


@queue.task
def stored_later(name: str, *, db: Connection = Depends(connection_later, per="worker")) -> int:
    return 1


@queue.task
def misprovided(name: str, *, db: str = Depends(connection)) -> None:  # E
    pass


async def provides() -> None:
    assert_type((await stored.add("ada")).id, JobId)
    assert_type(await (await stored_later.add("ada")).result(), int)
    assert_type(stored_later("ada", db=Connection()), int)
    await stored.add()  # E
    await stored.add("ada", db="text")  # E


async def runs() -> None:
    worker = Worker("emails", handler, redis_url="redis://127.0.0.1:6379", concurrency=5)
    await worker.run()
    assert_type(worker.is_running, bool)
    async with Worker(queue) as started:
        assert_type(started, Worker)
    Worker(queue).run_sync()
    Worker([queue, Queue("images")], on_startup=lambda: None)
    Worker(queue, before_job=before, after_job=after, on_shutdown=shutdown, middleware=[wrapped])
    Worker(queue, shutdown_deadline_secs=5, batch=10, retry=RetryConfig(max_backoff_ms=1000))
    Worker(queue, concurrency="5")  # E
    Worker(queue, shutdown_deadline_secs="5")  # E
    Worker(queue, shutdown_deadline=5)  # E
    Worker(queue, before_job=after)  # E
    Worker(queue, after_job=before)  # E
    Worker(queue, middleware=[before])  # E
    Worker(queue, middleware=[Tenant(), wrapped])
    Queue("emails", middleware=[Tenant()], headers={"source": "web"})
    Queue("emails", middleware=[Tenant])  # E
    Queue("emails", headers={"source": 1})  # E
    Queue("emails", overflow="wait", dedup_ttl_secs=60, strict=True)
    Queue("emails", overflow="block")  # E
    Queue("emails", dedup_ttl=60)  # E
    Worker(5)  # E
    assert_type(await run_until_empty(queue), int)


async def events() -> None:
    async for event in QueueEvents("emails"):
        assert_type(event, QueueEvent)
        assert_type(event.job_id, str | None)
    async with queue.events() as following:
        async for entry_id, event in following.entries():
            assert_type((entry_id, event), tuple[str, QueueEvent])


# --- the low-level API


async def producer() -> None:
    async with Producer[Receipt].connect("redis://127.0.0.1", ProducerConfig(payload_type=Receipt)) as typed:
        assert_type(await typed.add(Receipt("x", datetime.now(UTC))), JobId)
        await typed.add("no receipt")  # E
    ConsumerConfig(concurrency="5")  # E


# --- RSMQ: the decoder determines the type of a message


async def rsmq(client: Rsmq, pooled: PooledRsmq) -> None:
    connections: list[RsmqConnection] = [client, pooled]
    assert_type(await connections[0].receive_message("mail"), RsmqMessage[str] | None)
    assert_type(await client.receive_messages("mail", decoder=bytes), list[RsmqMessage[bytes]])
    number: RsmqMessage[int] | None = await client.receive_message("mail")  # E
    await client.send_message("mail", {"to": "ada"})  # E
    print(number)


def rsmq_sync(client: RsmqSync) -> None:
    connection: RsmqConnectionSync = client
    assert_type(connection.pop_message("mail"), RsmqMessage[str] | None)
    assert_type(client.create_queue("mail", vt=5), bool)
    assert_type(client.get_queue_attributes("mail"), QueueAttributes)
    assert_type(client.send_messages("mail", [1, 2], encoder=str), list[str])
    assert_type(client.receive_message("mail", 5), RsmqMessage[str] | None)
    assert_type(client.receive_messages("mail", decoder=bytes), list[RsmqMessage[bytes]])
    for message in client.listen("mail", decoder=int, poll_secs=0.1):
        assert_type(message, RsmqMessage[int])
    with client.receiving("mail", decoder=bytes) as received:
        assert_type(received, RsmqMessage[bytes] | None)
    client.send_message("mail", {"to": "ada"})  # E
    client.create_queue("mail", vt=[])  # E
    number: RsmqMessage[int] | None = client.receive_message("mail")  # E
    print(number)
