"""`soft_timeout` raises `SoftTimeout` inside the task, on the event loop, in a thread and in a process."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest

from api.workers import working
from support.waiting import until
from tampu import ConfigError, Job, JobCancelled, JobFailed, Queue, SoftTimeout, current_job
from tampu.consume.execute import Target, _Interruptible
from tampu.wire.job import Cancellation

if TYPE_CHECKING:
    from servers.process import Server


async def test_a_coroutine_can_tidy_up_and_return(queue: Queue) -> None:
    seen: list[str] = []

    @queue.task(soft_timeout=0.05, timeout=30)
    async def export() -> str:
        try:
            await asyncio.sleep(3600)
        except Exception:
            seen.append("swallowed")
        except SoftTimeout as reached:
            seen.append(str(reached))
            await asyncio.sleep(0.001)  # it may await again
            return "partial"
        return "all"

    async with working(queue, concurrency=1):
        for _ in range(2):  # the second runs in the same asyncio task, which must not stay cancelled
            assert await (await export.add()).result(20) == "partial"
    assert seen == ["the handler reached its soft timeout of 0.05 s"] * 2


async def test_a_task_group_is_ended_by_it(queue: Queue) -> None:
    ended: list[str] = []

    async def child() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append("child")

    @queue.task(soft_timeout=0.05)
    async def export() -> str:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(child())
                group.create_task(child())
        except SoftTimeout:
            return "partial"
        return "all"

    async with working(queue):
        assert await (await export.add()).result(20) == "partial"
    assert ended == ["child", "child"]


async def test_a_soft_timeout_that_is_not_caught_fails_the_run(queue: Queue) -> None:
    @queue.task(soft_timeout=0.05, attempts=1)
    async def export() -> None:
        await asyncio.sleep(3600)

    async with working(queue):
        with pytest.raises(JobFailed, match=r"TimeoutError: the handler reached its soft timeout of 0\.05 s"):
            await (await export.add()).result(20)


async def test_a_task_that_ends_in_time_is_not_interrupted(queue: Queue) -> None:
    @queue.task(soft_timeout=60)
    async def quick() -> str:
        return "done"

    @queue.task(soft_timeout=60)
    async def fails() -> None:
        raise ValueError("its own error")

    async with working(queue, max_attempts=1):
        assert await (await quick.add()).result(20) == "done"
        with pytest.raises(JobFailed, match="ValueError: its own error"):
            await (await fails.add()).result(20)


@pytest.mark.slow
async def test_a_cancelled_job_is_cancelled_and_not_timed_out(queue: Queue) -> None:
    started = asyncio.Event()

    @queue.task(soft_timeout=60)
    async def export() -> None:
        started.set()
        await asyncio.sleep(3600)

    async with working(queue):
        job = await export.add()
        await started.wait()
        await queue.cancel(job.id, reason="by the user")
        with pytest.raises(JobCancelled, match="by the user"):
            await job.result(20)


async def test_the_hard_timeout_still_ends_a_task_that_goes_on(queue: Queue) -> None:
    @queue.task(soft_timeout=0.02, timeout=0.1, attempts=1)
    async def stubborn() -> None:
        while True:
            try:
                await asyncio.sleep(3600)
            except SoftTimeout:
                continue

    async with working(queue):
        with pytest.raises(JobFailed, match=r"cancelled at its timeout of 0\.1 s"):
            await (await stubborn.add()).result(20)


async def test_a_thread_is_told_at_its_next_check(queue: Queue) -> None:
    @queue.task(soft_timeout=0.05)
    def export(catches: bool) -> str:
        try:
            while True:
                current_job().check_cancelled()
                time.sleep(0.005)
        except SoftTimeout:
            if not catches:
                raise
            current_job().check_cancelled()  # only once
            return "partial"

    async with working(queue, max_attempts=1):
        assert await (await export.add(catches=True)).result(20) == "partial"
        with pytest.raises(JobFailed, match=r"TimeoutError: the handler reached its soft timeout of 0\.05 s"):
            await (await export.add(catches=False)).result(20)


@pytest.mark.slow
async def test_a_process_is_interrupted_wherever_it_is(server: Server, process_tasks: Any) -> None:
    async with process_tasks.queue as queue, working(queue, concurrency=1):
        for _ in range(2):  # the second time in the same process, whose timer must be off in between
            assert await (await process_tasks.tidies_up.add()).result(60) == "tidy"
        assert await (await process_tasks.tidies_up_on_a_loop.add(catches=True)).result(60) == "tidy"
        with pytest.raises(JobFailed, match=r"TimeoutError.*soft timeout of 0\.2 s"):
            await (await process_tasks.tidies_up_on_a_loop.add(catches=False)).result(60)
        slow = process_tasks.tidies_up.using(soft_timeout=3600, timeout=0.3, attempts=1)
        with pytest.raises(JobFailed, match=r"killed at its timeout of 0\.3 s"):
            await (await slow.add()).result(60)


async def test_a_soft_timeout_cuts_no_log_record_in_half(server: Server, process_tasks: Any) -> None:
    logging.getLogger("endless").setLevel(logging.ERROR)  # they are sent here, and dropped
    async with process_tasks.queue as queue, working(queue, concurrency=1):
        for _ in range(5):
            assert await (await process_tasks.logs_without_end.add()).result(60) == "tidy"


@pytest.mark.slow
async def test_the_timer_of_a_process_ends_with_its_job(server: Server, process_tasks: Any) -> None:
    async with process_tasks.queue as queue, working(queue, concurrency=1):
        pid = await (await process_tasks.quick_pid.add()).result(60)
        assert await (await process_tasks.slow_pid.add()).result(60) == pid  # not interrupted by the first job's timer


async def test_the_timer_of_a_coroutine_ends_with_its_job(queue: Queue) -> None:
    @queue.task(soft_timeout=0.1)
    async def quick() -> str:
        return "done"

    @queue.task(attempts=1)
    async def slow() -> str:
        await asyncio.sleep(0.3)
        return "not interrupted"

    async with working(queue, concurrency=1):  # both run in the same asyncio task
        assert await (await quick.add()).result(20) == "done"
        assert await (await slow.add()).result(20) == "not interrupted"


async def test_a_cancel_at_the_same_moment_wins(queue: Queue) -> None:
    job: Job[None] = Job("job-1")
    task = asyncio.current_task()
    assert task is not None
    interruptible = _Interruptible(asyncio.sleep(0), 1.0, job)
    interruptible._is_due = True
    cancelled = asyncio.CancelledError()
    job._cancellation = Cancellation("by the user")
    assert interruptible._replaced(cancelled, task) is cancelled
    job._cancellation = None
    assert isinstance(interruptible._replaced(cancelled, task), SoftTimeout)
    assert interruptible._replaced(cancelled, task) is cancelled  # only once
    await interruptible._coroutine


async def test_a_job_can_have_its_own(queue: Queue) -> None:
    @queue.task(soft_timeout=3600)
    async def export() -> str:
        try:
            await asyncio.sleep(3600)
        except SoftTimeout as reached:
            return str(reached)
        return "all"

    async with working(queue):
        job = await export.using(soft_timeout=0.05).add()
        assert await job.result(20) == "the handler reached its soft timeout of 0.05 s"


def test_it_must_be_shorter_than_the_timeout() -> None:
    queue = Queue("q")
    with pytest.raises(ConfigError, match=r"soft_timeout must be less than timeout \(5 s\); got 5"):
        queue.task(soft_timeout=5, timeout=5)(until)
    with pytest.raises(ConfigError, match="soft_timeout must be a number of seconds above 0; got 0"):
        queue.task(soft_timeout=0)(until)
    with pytest.raises(ConfigError, match="soft_timeout must be a timedelta or seconds above 0; got 0"):
        queue.task(name="x")(lambda: None).using(soft_timeout=0)


def test_a_function_in_a_process_is_interrupted_at_any_line() -> None:
    job: Job[None] = Job("1")
    before = signal.getsignal(signal.SIGALRM)

    def spins(_: Job[Any]) -> str:
        try:
            while True:
                pass
        except SoftTimeout as reached:
            return str(reached)

    def ignores(_: Job[Any]) -> None:
        while True:
            pass

    assert Target(spins, soft_secs=0.05).call_in_process(job) == "the handler reached its soft timeout of 0.05 s"
    with pytest.raises(TimeoutError, match="reached its soft timeout"):
        Target(ignores, soft_secs=0.05).call_in_process(job)
    for soft_secs in (0.05, None):
        assert Target(lambda _: "at once", soft_secs=soft_secs).call_in_process(job) == "at once"
    # No alarm is left behind for the next job of the process.
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) == before
