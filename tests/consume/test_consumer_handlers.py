"""Handlers on the event loop, in threads and in processes, and the ways they can fail."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from consume import slow_to_import
from consume.workers import consuming, quick_config
from servers.liveness import is_alive
from support.waiting import until
from tampu.consume.consumer import Consumer
from tampu.consume.handlers import Cancel, HandlerError, Retry, UnrecoverableError
from tampu.errors import ConfigError
from tampu.metrics import InMemorySink, JobOutcomeKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from consume.views import WorkerView
    from consume.workers import Fleet
    from tampu.wire.job import Job


# --- on the loop


async def test_no_more_handlers_run_at_once_than_concurrency_allows(view: WorkerView) -> None:
    running = most = 0
    release = asyncio.Event()

    async def handler(job: Job[Any]) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await release.wait()
        running -= 1

    view.add_many([None] * 20)
    async with consuming(view.server.url, handler, concurrency=3):
        await until(lambda: running == 3, "three run")
        release.set()
        await until(view.is_settled, "all are done")
    assert most == 3


async def test_a_slow_handler_does_not_hold_up_the_others(view: WorkerView) -> None:
    done: list[Any] = []
    release = asyncio.Event()

    async def handler(job: Job[Any]) -> None:
        if job.payload == "slow":
            await release.wait()
        done.append(job.payload)

    view.add("slow")
    view.add_many(list(range(100)))
    async with consuming(view.server.url, handler, concurrency=2):
        await until(lambda: len(done) == 100, "the quick ones are done")
        release.set()
        await until(view.is_settled, "all are done")
    assert done[-1] == "slow"


async def test_an_object_with_an_async_call_is_a_coroutine_handler(view: WorkerView) -> None:
    threads: list[threading.Thread] = []

    class Handler:
        async def __call__(self, job: Job[Any]) -> None:
            threads.append(threading.current_thread())

    async with consuming(view.server.url, Handler()):
        view.add()
        await until(lambda: threads, "it ran")
    assert threads == [threading.main_thread()]


def raise_system_exit(job: Job[Any]) -> None:
    sys.exit("bye")


async def raise_system_exit_async(job: Job[Any]) -> None:
    sys.exit("bye")


def raise_stop_iteration(job: Job[Any]) -> None:
    next(iter(()))


async def raise_cancelled(job: Job[Any]) -> None:
    raise asyncio.CancelledError("on my own")


async def await_something_cancelled(job: Job[Any]) -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.cancel()
    await future


async def cancel_its_own_task(job: Job[Any]) -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)


async def raise_a_group(job: Job[Any]) -> None:
    async def fail() -> None:
        raise ValueError("inner")

    async with asyncio.TaskGroup() as group:
        group.create_task(fail())


@pytest.mark.parametrize(
    ("handler", "error_type", "kind"),
    [
        (raise_system_exit_async, "SystemExit", JobOutcomeKind.PANIC),
        (raise_system_exit, "SystemExit", JobOutcomeKind.PANIC),
        (raise_stop_iteration, "RuntimeError", JobOutcomeKind.ERR),
        (raise_cancelled, "CancelledError", JobOutcomeKind.PANIC),
        (await_something_cancelled, "CancelledError", JobOutcomeKind.PANIC),
        (cancel_its_own_task, "CancelledError", JobOutcomeKind.PANIC),
        (raise_a_group, "ExceptionGroup", JobOutcomeKind.ERR),
    ],
)
async def test_whatever_a_handler_raises_only_fails_its_job(
    view: WorkerView, handler: Callable[..., Any], error_type: str, kind: JobOutcomeKind
) -> None:
    sink = InMemorySink()
    async with consuming(view.server.url, handler, concurrency=1, max_attempts=2, metrics=sink) as worker:
        for _ in range(3):  # more jobs than coroutines in the pool: each must survive
            view.add()
        letters = await until(lambda: len(found := view.dead_letters()) == 3 and found, "all are dead-lettered")
        await until(view.is_settled, "nothing is left")
        assert not worker.task.done()
    assert {(letter.reason, letter.error_type, letter.attempts) for letter in letters} == {
        ("retries_exhausted", error_type, 2)
    }
    assert [outcome.kind for outcome in sink.job_outcomes] == [kind] * 6


async def test_a_handler_that_cancels_its_task_and_returns_has_succeeded(view: WorkerView) -> None:
    """The cancellation is raised at the next wait, which must not be another job's."""

    async def handler(job: Job[Any]) -> None:
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        if job.payload == "cancels":
            task.cancel()
        else:
            await asyncio.sleep(0)

    view.add_many(["cancels", "waits", "cancels", "cancels", "waits"])
    async with consuming(view.server.url, handler, concurrency=1, max_attempts=1):
        await until(view.is_settled, "all are done")
    assert not view.dead_letters()


async def test_an_async_handler_is_cancelled_at_its_timeout(view: WorkerView) -> None:
    cancelled: list[str] = []

    async def handler(job: Job[Any]) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(job.id)
            raise

    async with consuming(view.server.url, handler, timeout_secs=0.05, max_attempts=1):
        job_id = view.add()
        (letter,) = await until(view.dead_letters, "it is dead-lettered")
    assert cancelled == [job_id]
    assert (letter.error_type, letter.error) == ("TimeoutError", "the handler was cancelled at its timeout of 0.05 s")


async def test_a_handlers_own_timeout_error_is_reported_as_it_is(view: WorkerView) -> None:
    async def handler(job: Job[Any]) -> None:
        raise TimeoutError("the bank did not answer")

    async with consuming(view.server.url, handler, timeout_secs=30, max_attempts=1):
        view.add()
        (letter,) = await until(view.dead_letters, "it is dead-lettered")
    assert letter.error == "the bank did not answer"


# --- in threads


async def test_a_plain_function_runs_in_a_thread_and_leaves_the_loop_free(view: WorkerView) -> None:
    release = threading.Event()
    threads: set[str] = set()

    def handler(job: Job[Any]) -> bytes:
        threads.add(threading.current_thread().name)
        release.wait(20)
        return b"done"

    async with consuming(view.server.url, handler, concurrency=3, store_results=True):
        ids = [view.add() for _ in range(3)]
        await until(lambda: len(threads) == 3, "each has its own thread, and the loop still runs")
        release.set()
        await until(view.is_settled, "all are done")
    assert all(name.startswith("tampu-handler") for name in threads)
    assert [view.result(job_id) for job_id in ids] == [b"done"] * 3


async def test_threads_are_reused(view: WorkerView) -> None:
    threads: set[str] = set()

    def handler(job: Job[Any]) -> None:
        threads.add(threading.current_thread().name)

    async with consuming(view.server.url, handler, concurrency=2):
        view.add_many([None] * 50)
        await until(view.is_settled, "all are done")
    assert len(threads) <= 2


async def test_a_coroutine_returned_by_a_plain_function_is_awaited(view: WorkerView) -> None:
    done: list[str] = []

    async def inner(job: Job[Any]) -> None:
        done.append(job.id)

    def handler(job: Job[Any]) -> Any:
        return inner(job)

    async with consuming(view.server.url, handler):
        job_id = view.add()
        await until(view.is_settled, "it is done")
    assert done == [job_id]


async def test_a_thread_that_succeeds_after_its_timeout_has_succeeded(
    view: WorkerView, caplog: pytest.LogCaptureFixture
) -> None:
    release = threading.Event()
    runs: list[int] = []

    def handler(job: Job[Any]) -> None:
        runs.append(job.attempt)
        release.wait(20)

    async with consuming(view.server.url, handler, timeout_secs=0.1, max_attempts=3, concurrency=1):
        job_id = view.add()
        started = time.monotonic()
        await until(lambda: runs and time.monotonic() - started > 0.3, "it has exceeded its timeout")
        assert not view.dead_letters()
        assert len(view.pending()) == 1
        release.set()
        await until(view.is_settled, "it has succeeded")
    assert not view.dead_letters()
    assert len(runs) == 1
    assert any(
        job_id in line and "its timeout of 0.1 s cannot stop; its success counts" in line for line in caplog.messages
    )


# --- in processes


@dataclass
class Order:
    number: int


class TeapotError(UnrecoverableError):
    pass


def pid_of_child(job: Job[Any]) -> bytes:
    return str(os.getpid()).encode()


async def pid_of_child_async(job: Job[Any]) -> bytes:
    await asyncio.sleep(0)
    return str(os.getpid()).encode()


def misbehave(job: Job[Any]) -> Any:
    match job.payload:
        case "crash":
            os._exit(7)
        case "exit":
            sys.exit(3)
        case "hang":
            time.sleep(600)
        case "raise":
            raise LookupError("in the child")
        case "unrecoverable":
            raise TeapotError("short and stout")
        case "handler error":
            raise HandlerError.unrecoverable("wrapped")
        case "retry":
            return Retry(after=0)
        case "cancel":
            return Cancel("not wanted")
    return None


def sum_of_order(job: Job[Order]) -> bytes:
    return str(job.payload.number + 1).encode()


@pytest.mark.parametrize("handler", [pid_of_child, pid_of_child_async])
async def test_a_handler_runs_in_a_separate_process_that_is_reused(
    view: WorkerView, handler: Callable[..., Any]
) -> None:
    async with consuming(view.server.url, handler, process=True, concurrency=1, store_results=True):
        ids = [view.add() for _ in range(3)]
        await until(view.is_settled, "all are done")
    pids = {view.result(job_id) for job_id in ids}
    assert len(pids) == 1
    (pid,) = pids
    assert pid is not None
    assert int(pid) != os.getpid()
    await until(lambda: not is_alive(int(pid)), "the process is gone with the worker")


@pytest.mark.slow
async def test_a_failure_in_a_process_is_reported_and_fails_one_job(view: WorkerView) -> None:
    sink = InMemorySink()
    expected = {
        "crash": ("retries_exhausted", "ProcessDied", "exit code 7"),
        "exit": ("retries_exhausted", "ProcessDied", "exit code 3"),
        "hang": ("retries_exhausted", "TimeoutError", "killed at its timeout of 3 s"),
        "raise": ("retries_exhausted", "LookupError", "in the child"),
        "unrecoverable": ("unrecoverable", "TeapotError", "short and stout"),
        "handler error": ("unrecoverable", "HandlerError", "wrapped"),
        "retry": ("retries_exhausted", "RetryAsked", "by the handler"),
        "cancel": ("unrecoverable", "UnrecoverableError", "not wanted"),
    }
    options = {"concurrency": 2, "max_attempts": 1, "metrics": sink}
    async with consuming(view.server.url, misbehave, process=True, timeout_secs=3, **options):
        for what in expected:
            view.add(what, name=what)
            view.add("innocent", name="innocent")
        letters = await until(
            lambda: len(found := view.dead_letters()) == len(expected) and found, "all are dead-lettered", 60
        )
        await until(view.is_settled, "the other jobs are done")
    for letter in letters:
        reason, error_type, text = expected[letter.name]
        assert (letter.reason, letter.error_type) == (reason, error_type), letter
        assert text in letter.error, letter
    raised = next(letter for letter in letters if letter.name == "raise")
    assert 'raise LookupError("in the child")' in (raised.traceback or "")
    panics = [outcome.name for outcome in sink.job_outcomes if outcome.kind is JobOutcomeKind.PANIC]
    assert sorted(panics) == ["crash", "exit"]


async def test_the_start_of_a_process_does_not_count_towards_a_timeout(view: WorkerView) -> None:
    settings = {"store_results": True, "max_attempts": 1, "concurrency": 1}
    async with consuming(view.server.url, slow_to_import.handler, process=True, timeout_secs=1, **settings):
        job_id = view.add()
        await until(lambda: view.result(job_id) or view.dead_letters(), "it has run", 60)
    assert view.result(job_id) == b"in time"


async def test_typed_payloads_arrive_typed_in_a_process(view: WorkerView) -> None:
    options = {"payload_type": Order, "store_results": True, "max_attempts": 5, "concurrency": 1}
    async with consuming(view.server.url, sum_of_order, process=True, **options):
        good = view.add({"number": 41})
        view.add({"number": "?"})
        (letter,) = await until(view.dead_letters, "the misfit is dead-lettered")
        await until(view.is_settled, "nothing is left")
    assert view.result(good) == b"42"
    assert (letter.reason, letter.error_type, letter.attempts) == ("decode_failed", "DecodeError", 1)


@pytest.mark.slow
async def test_a_process_that_dies_between_two_jobs_fails_none(view: WorkerView) -> None:
    options = {"store_results": True, "max_attempts": 1, "concurrency": 1}
    async with consuming(view.server.url, pid_of_child, process=True, **options):
        first = view.add()
        pid = int(await until(lambda: view.result(first), "the first is done", 60))
        os.kill(pid, 9)
        await until(lambda: not is_alive(pid), "it is dead")
        second = view.add()
        other = int(await until(lambda: view.result(second), "the second is done", 60))
    assert other != pid
    assert not view.dead_letters()


async def test_a_process_that_dies_before_it_takes_a_job_does_not_fail_it(view: WorkerView) -> None:
    options = {"store_results": True, "max_attempts": 1, "concurrency": 1}
    async with consuming(view.server.url, pid_of_child, process=True, **options):
        first = view.add()
        pid = int(await until(lambda: view.result(first), "the first is done", 60))
        os.kill(pid, signal.SIGSTOP)
        second = view.add()
        await until(lambda: "active" in view.event_names(second), "it is sent to the suspended process")
        os.kill(pid, signal.SIGKILL)
        other = int(await until(lambda: view.result(second), "the second is done", 60))
    assert other != pid
    assert not view.dead_letters()


async def test_a_handler_that_a_process_cannot_import_is_refused_at_start(view: WorkerView) -> None:
    consumer = Consumer(view.server.url, quick_config())
    with pytest.raises(ConfigError, match="top level of a module"):
        await consumer.run(lambda job: None, asyncio.Event(), process=True)


async def test_an_unsupported_payload_type_is_refused_by_the_constructor(view: WorkerView) -> None:
    with pytest.raises(ConfigError, match="payload_type"):
        Consumer(view.server.url, quick_config(payload_type=int | float | Order | TeapotError))


async def test_a_process_ends_when_its_worker_is_killed(view: WorkerView, fleet: Fleet) -> None:
    """It must not continue a job that another worker runs by now."""
    worker = fleet.start(view.server.url, "hanging_child", process=True)
    view.add()
    child = int((await until(lambda: fleet.journal.of("child"), "it runs"))[0])
    assert is_alive(child)
    worker.kill()
    await until(lambda: not is_alive(child), "the child is gone too")
