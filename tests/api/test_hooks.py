"""Hooks around jobs and around the run of a worker, including hooks that raise."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import pytest

from api.workers import QUICK, working
from support.waiting import until
from tampu import Job, JobFailed, Queue, Worker
from tampu.metrics import InMemorySink

if TYPE_CHECKING:
    from servers.process import Server


async def test_hooks_are_called_around_everything(queue: Queue) -> None:
    said: list[str] = []

    @queue.task(attempts=1)
    async def work(fails: bool) -> None:
        said.append("work")
        if fails:
            raise ValueError("broken")

    async def startup() -> None:
        said.append("startup")

    def after(job: Job[Any], error: BaseException | None) -> None:
        said.append(f"after {job.name} {error!r}")

    hooks: dict[str, Any] = {
        "on_startup": startup,
        "on_shutdown": lambda: said.append("shutdown"),
        "before_job": lambda job: said.append(f"before {job.name}"),
        "after_job": after,
    }
    async with working(queue, concurrency=1, **hooks):
        await (await work.add(False)).result(20)
        with pytest.raises(JobFailed):
            await (await work.add(True)).result(20)
    assert said == [
        "startup",
        *("before work", "work", "after work None"),
        *("before work", "work", "after work ValueError('broken')"),
        "shutdown",
    ]


async def test_a_hook_that_raises_before_a_job_fails_the_run(queue: Queue) -> None:
    ran: list[str] = []
    after: list[BaseException | None] = []

    @queue.task(attempts=1)
    async def work() -> None:
        ran.append("work")

    async def before(job: Job[Any]) -> None:
        raise PermissionError("not today")

    async with working(queue, before_job=before, after_job=lambda job, error: after.append(error)):
        with pytest.raises(JobFailed, match="PermissionError: not today"):
            await (await work.add()).result(20)
    assert ran == []
    assert [type(error) for error in after] == [PermissionError]


async def test_hooks_and_metrics_get_the_error_that_the_task_raised(queue: Queue) -> None:
    """The rules of the task decide about it, and do not replace it."""
    errors: list[BaseException | None] = []
    sink = InMemorySink()

    @queue.task(no_retry_on=ValueError)
    async def work() -> None:
        raise ValueError("its own")

    async with working(queue, after_job=lambda job, error: errors.append(error), metrics=sink):
        with pytest.raises(JobFailed, match=r"unrecoverable.*its own"):
            await (await work.add()).result(20)
    assert [repr(error) for error in errors] == ["ValueError('its own')"]
    assert [outcome.kind for outcome in sink.job_outcomes] == ["err"]


async def test_a_hook_that_raises_after_a_job_changes_nothing(queue: Queue, caplog: pytest.LogCaptureFixture) -> None:
    runs: list[bool] = []

    @queue.task(attempts=1)
    async def work(fails: bool) -> str:
        runs.append(fails)
        if fails:
            raise ValueError("its own")
        return "done"

    async def after(job: Job[Any], error: BaseException | None) -> None:
        raise RuntimeError("of the hook")

    with caplog.at_level(logging.ERROR, "tampu.worker"):
        async with working(queue, after_job=after):
            assert await (await work.add(False)).result(20) == "done"
            with pytest.raises(JobFailed, match="its own"):
                await (await work.add(True)).result(20)
    assert runs == [False, True]
    assert caplog.text.count("hook after_job raised an exception for job") == 2


async def test_a_worker_whose_startup_hook_fails_does_not_run(queue: Queue, server: Server) -> None:
    said: list[str] = []

    @queue.task
    async def work() -> None:
        said.append("work")

    async def startup() -> None:
        raise OSError("no database")

    worker = Worker(queue, on_startup=startup, **QUICK)
    await work.add()
    with pytest.raises(OSError, match="no database"):
        await asyncio.wait_for(worker.run(), 20)
    assert (said, worker.is_running) == ([], False)
    assert server.client().xlen(queue.keys.stream) == 1


async def test_hooks_are_not_called_for_jobs_without_a_task(queue: Queue, server: Server) -> None:
    said: list[str] = []

    @queue.task
    async def work() -> None: ...

    async with working(queue, before_job=lambda job: said.append(job.name), after_job=lambda job, error: None):
        await queue.add("somebody else's", 1)
        await until(lambda: server.client().zcard(queue.keys.delayed) == 1, "it is put back")
        await (await work.add()).result(20)
    assert said == ["work"]
