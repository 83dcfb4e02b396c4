"""Worker conveniences: a block that runs jobs, middleware, context variables, bounded processes, jobs by ID."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from contextvars import ContextVar
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from api.process_tasks import own_pid
from api.process_tasks import queue as process_queue
from api.workers import QUICK, working
from support.queues import QueueView
from support.waiting import until
from tampu import ConfigError, Job, JobFailed, Queue, RedisError, RetryConfig, Worker, current_job
from tampu.testing import job_context
from tampu.wire.retry import backoff_ms

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from servers.process import Server


def wait_for_file(path: str) -> None:
    while not Path(path).exists():
        time.sleep(0.01)


def double_number(number: int) -> int:
    return 2 * number


tenant: ContextVar[str] = ContextVar("tenant", default="none")


async def test_a_block_runs_jobs_and_drains_at_its_end(queue: Queue) -> None:
    started, release, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    @queue.task
    async def slow() -> str:
        started.set()
        await release.wait()
        ended.set()
        return "done"

    async with Worker(queue, **QUICK) as worker:
        job = await slow.add()
        await started.wait()
        asyncio.get_running_loop().call_soon(release.set)
    assert ended.is_set(), "the block waits for the running job"
    assert not worker.is_running
    assert await job.result(timeout=5) == "done"


async def test_a_block_whose_worker_cannot_start_raises() -> None:
    queue = Queue("q", url="redis://user:wrong@127.0.0.1:1")

    @queue.task
    async def mail() -> None: ...

    async def fail() -> None:
        await asyncio.sleep(0)
        raise RuntimeError("no database")

    has_begun = False
    with pytest.raises(RuntimeError, match="no database"):
        async with Worker(queue, on_startup=fail):
            has_begun = True
    assert not has_begun, "it could wait for results that never come"


async def test_a_block_around_a_running_worker_begins_at_once(queue: Queue) -> None:
    @queue.task
    async def mail() -> None: ...

    async with Worker(queue, **QUICK) as worker, asyncio.timeout(20), worker:
        assert worker.is_running


async def test_a_block_cancelled_while_it_begins_ends_its_worker(queue: Queue) -> None:
    starting, stopped = asyncio.Event(), asyncio.Event()

    @queue.task
    async def mail() -> None: ...

    async def hang() -> None:
        starting.set()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    async def block() -> None:
        async with Worker(queue, on_startup=hang):
            pass

    running = asyncio.create_task(block())
    await starting.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await asyncio.wait_for(stopped.wait(), 20)


async def test_run_inside_a_block_waits_for_the_same_worker(queue: Queue) -> None:
    """The drop-in form: `async with Worker(...) as worker: await worker.run()`."""

    async def handler(job: Job[Any]) -> None:
        await worker.close()

    async with Worker("q", handler, url=queue.url, **QUICK) as worker:
        await queue.add("mail", 1)
        await asyncio.wait_for(worker.run(), 20)


async def test_the_locks_of_a_worker_have_its_name(queue: Queue, server: Server) -> None:
    @queue.task
    async def mail() -> None: ...

    client = server.client()
    async with working(queue, consumer_id="web-1:17:ab12cd"):
        for lock in (queue.keys.promoter_lock, queue.keys.scheduler_lock):
            holder = await until(partial(client.get, lock), "it leads")
            assert holder.startswith(b"web-1:17:ab12cd:")


async def test_every_run_is_inside_all_middleware(queue: Queue) -> None:
    steps: list[str] = []

    def tracing(name: str) -> Any:
        @contextlib.asynccontextmanager
        async def around(job: Job[Any]) -> AsyncIterator[None]:
            steps.append(f"{name} enters {job.name}")
            try:
                yield
            except ValueError as error:
                steps.append(f"{name} sees {error}")
                raise
            finally:
                steps.append(f"{name} leaves")

        return around

    @queue.task(attempts=1)
    async def mail(fails: bool) -> None:
        steps.append("runs")
        if fails:
            raise ValueError("no")

    async with working(queue, middleware=[tracing("outer"), tracing("inner")]):
        await (await mail.add(False)).result(timeout=10)
        with pytest.raises(JobFailed):
            await (await mail.add(True)).result(timeout=10)
    entering = ["outer enters mail", "inner enters mail", "runs"]
    assert steps == [
        *(*entering, "inner leaves", "outer leaves"),
        *(*entering, "inner sees no", "inner leaves", "outer sees no", "outer leaves"),
    ]


@pytest.mark.parametrize("way", ["hook", "middleware"])
async def test_context_variables_reach_functions_in_threads(queue: Queue, way: str) -> None:
    @queue.task
    def read() -> str:
        return f"{tenant.get()} {current_job().name}"

    @contextlib.asynccontextmanager
    async def around(job: Job[Any]) -> AsyncIterator[None]:
        tenant.set(job.headers["tenant"])
        yield

    def before(job: Job[Any]) -> None:
        tenant.set(job.headers["tenant"])

    options: dict[str, Any] = {"before_job": before} if way == "hook" else {"middleware": [around]}
    async with working(queue, **options):
        for name in ("acme", "zeta"):
            job = await read.using(headers={"tenant": name}).add()
            assert await job.result(timeout=10) == f"{name} read"


async def test_processes_are_bounded_and_replaced(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAMPU_URL", server.url)
    queue = Queue(process_queue.name, url=server.url)
    queue.tasks = process_queue.tasks
    async with queue:
        async with working(queue, processes=1):
            jobs = [await queue.add(own_pid.name, {}) for _ in range(4)]
            pids = [await job.result(timeout=30) for job in jobs]
        assert len(set(pids)) == 1
        assert os.getpid() not in pids
        async with working(queue, processes=1, jobs_per_process=2):
            jobs = [await queue.add(own_pid.name, {}) for _ in range(4)]
            pids = [await job.result(timeout=30) for job in jobs]
        assert sorted(pids.count(pid) for pid in set(pids)) == [2, 2]


@pytest.mark.slow
async def test_a_job_that_is_not_to_run_does_not_wait_for_a_process(
    queue: Queue, server: Server, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    wait, double = queue.task(process=True)(wait_for_file), queue.task(process=True)(double_number)
    caplog.set_level(logging.INFO, "tampu.worker")
    async with working(queue, processes=1) as worker:
        first = await wait.add(str(tmp_path / "gate"))
        await until(worker.running_jobs, "it has the only process", 60)
        expired = await wait.using(expires=timedelta(milliseconds=1), delay=timedelta(milliseconds=50)).add("")
        with pytest.raises(JobFailed, match="expired"):
            await expired.result(timeout=20)
        await queue.pause(task=double.name)
        await until(lambda: f"task {double.name} paused" in caplog.text, "the worker knows of the pause")
        paused = await double.add(1)
        view = QueueView(server, queue.name)
        await until(lambda: view.delayed_ids() == [paused.id], "it is put back")
        (tmp_path / "gate").touch()
        await first.result(timeout=30)


async def test_a_process_task_that_is_registered_while_the_worker_runs(queue: Queue, tmp_path: Path) -> None:
    @queue.task
    async def other() -> None: ...

    async with working(queue, processes=1) as worker:
        await (await other.add()).result(timeout=10)
        wait = queue.task(process=True)(wait_for_file)
        first = await wait.add(str(tmp_path / "gate"))
        await until(worker.running_jobs, "it has the only process", 60)
        second = await wait.add(str(tmp_path / "gate"))
        await (await other.add()).result(timeout=20)  # jobs are taken in their order: the second waits for the process
        assert [job.id for job in worker.running_jobs()] == [first.id]
        (tmp_path / "gate").touch()
        for job in (first, second):
            await job.result(timeout=30)


@pytest.mark.parametrize(("concurrency", "held"), [(2, 1), (3, 2)])
async def test_jobs_that_wait_for_a_process_leave_slots_to_other_queues(
    server: Server, tmp_path: Path, concurrency: int, held: int
) -> None:
    async with Queue("slow", url=server.url) as slow, Queue("quick", url=server.url) as quick:
        wait = slow.task(process=True)(wait_for_file)

        @quick.task
        async def ping() -> str:
            return "pong"

        jobs = [await wait.add(str(tmp_path / "gate")) for _ in range(5)]
        async with working([slow, quick], processes=1, concurrency=concurrency) as worker:
            await until(worker.running_jobs, "one has the only process", 60)
            for _ in range(3):
                assert await (await ping.add()).result(timeout=20) == "pong"
            assert worker.slots_used["slow"] == held
            (tmp_path / "gate").touch()
            for job in jobs:
                await job.result(timeout=30)


@pytest.mark.parametrize("setting", ["processes", "jobs_per_process"])
def test_bad_process_limits_are_refused(setting: str) -> None:
    queue = Queue("q")
    queue.task(lambda: None)
    with pytest.raises(ConfigError, match=f"{setting} must be"):
        Worker(queue, **{setting: 0})  # type: ignore[arg-type]


async def test_a_job_is_found_by_its_id_with_a_typed_result(queue: Queue) -> None:
    @queue.task
    async def add(first: int, second: int) -> tuple[int, int]:
        return first, second

    added = await add.add(1, 2)
    async with working(queue):
        assert await add.job(added.id).result(timeout=10) == (1, 2)
    with pytest.raises(ConfigError, match="id"):
        add.job("")


async def test_a_task_called_in_a_test_has_a_current_job(queue: Queue) -> None:
    @queue.task
    async def mail() -> str:
        job = current_job()
        job.progress(0.5, "half")
        job.check_cancelled()
        return f"{job.id} {job.attempt} {job.headers['tenant']}"

    with job_context(attempt=2, headers={"tenant": "acme"}, job_id="a") as job:
        assert await mail() == "a 2 acme"
    assert job.reported == [(0.5, "half")]
    with pytest.raises(RuntimeError):
        current_job()


@pytest.mark.slow
async def test_a_worker_without_a_server_keeps_trying_inside_a_block() -> None:
    queue = Queue("q", url="redis://127.0.0.1:1")

    @queue.task
    async def mail() -> None: ...

    async with Worker(queue, **QUICK):
        with pytest.raises(RedisError):
            await asyncio.wait_for(Queue("q", url="redis://127.0.0.1:1", retry_for_secs=1).add("mail", 1), 10)


def test_jobs_of_tasks_get_7_attempts_and_those_of_a_handler_25() -> None:
    queue = Queue("q")
    queue.task(name="work")(lambda: None)
    assert Worker(queue).config.max_attempts == 7
    assert Worker("q", print).config.max_attempts == 25
    assert Worker(queue, max_attempts=25).config.max_attempts == 25


def test_tasks_are_retried_for_minutes_and_handlers_as_in_chasquimq() -> None:
    queue = Queue("q")
    queue.task(name="work")(lambda: None)
    config = Worker(queue).config
    for random_below, secs in ((lambda below: 0, 364), (lambda below: below - 1, 455)):
        waits = [backoff_ms(number, None, config.retry, random_below) for number in range(1, config.max_attempts)]
        assert round(sum(waits) / 1000) == secs
    assert waits[0] < 1250
    assert Worker("q", print).config.retry == RetryConfig()
    assert Worker(queue, retry=RetryConfig()).config.retry == RetryConfig()


async def test_middleware_does_not_see_jobs_that_are_put_back(queue: Queue, server: Server) -> None:
    entered: list[str] = []

    @contextlib.asynccontextmanager
    async def note(job: Job[Any]) -> AsyncIterator[None]:
        entered.append(job.name)
        yield

    @queue.task
    async def work() -> str:
        return "done"

    async with Queue("q", url=server.url) as other:
        unknown = await other.add("unknown here", 1)
    async with working(queue, middleware=[note]):
        assert await (await work.add()).result(20) == "done"

        async def is_put_back() -> bool:
            return (await queue.get_job(unknown.id)).state == "delayed"

        await until(is_put_back, "the other job is put back")
    assert entered == ["work"]
