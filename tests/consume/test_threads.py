"""The threads that `def` handlers run in."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import pytest

from consume.workers import consuming
from support.waiting import until
from tampu.consume.pool import DaemonThreads

if TYPE_CHECKING:
    from consume.views import WorkerView
    from tampu.wire.job import Job


async def test_a_burst_of_quick_calls_stays_in_one_thread() -> None:
    threads = DaemonThreads(50, "quick")
    found = await asyncio.gather(*(threads.call(threading.get_ident) for _ in range(30)))
    assert len({*found}) == 1
    assert threading.get_ident() not in found
    threads.shutdown()


async def test_a_call_that_blocks_holds_up_no_other() -> None:
    threads = DaemonThreads(2, "blocked")
    release = threading.Event()
    blocked = threads.call(release.wait, 30)
    assert await asyncio.wait_for(threads.call(len, "abc"), 10) == 3
    release.set()
    assert await blocked
    threads.shutdown()


async def test_calls_that_wait_for_each_other_all_get_a_thread() -> None:
    threads = DaemonThreads(40, "barrier")
    barrier = threading.Barrier(40)
    await asyncio.gather(*(threads.call(barrier.wait, 30) for _ in range(40)))
    threads.shutdown()


async def test_there_are_never_more_threads_than_allowed() -> None:
    threads = DaemonThreads(3, "three")
    running, most = 0, 0
    lock = threading.Lock()

    def work() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.005)
        with lock:
            running -= 1

    await asyncio.gather(*(threads.call(work) for _ in range(30)))
    assert most == 3
    threads.shutdown()


async def test_the_error_of_a_call_is_raised_to_its_caller() -> None:
    threads = DaemonThreads(1, "failing")
    with pytest.raises(ZeroDivisionError):
        await threads.call(divmod, 1, 0)
    assert await threads.call(divmod, 7, 2) == (3, 1)
    threads.shutdown()


async def test_a_call_that_was_cancelled_before_its_turn_does_not_run() -> None:
    threads = DaemonThreads(1, "cancelled")
    release, ran = threading.Event(), threading.Event()
    blocked = threads.call(release.wait, 30)
    waiting = threads.call(ran.set)
    waiting.cancel()
    release.set()
    await blocked
    assert await threads.call(len, "later") == 5
    assert not ran.is_set()
    threads.shutdown()


async def test_a_thread_that_cannot_be_started_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain, refusals = threading.Thread.start, 3

    def start(thread: threading.Thread) -> None:
        nonlocal refusals
        refusals -= 1
        if refusals >= 0:
            raise RuntimeError("can't start new thread")
        plain(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    threads = DaemonThreads(2, "refused")
    assert await asyncio.wait_for(threads.call(len, "abc"), 10) == 3
    threads.shutdown()
    [record] = caplog.records
    assert record.message == "cannot start a thread for handlers; 0 run: can't start new thread"


async def test_threads_end_and_refuse_calls_after_shutdown() -> None:
    threads = DaemonThreads(4, "ending")
    barrier = threading.Barrier(4)
    await asyncio.gather(*(threads.call(barrier.wait, 30) for _ in range(4)))
    threads.shutdown()
    await until(lambda: not any(each.name.startswith("ending-") for each in threading.enumerate()), "they have ended")
    with pytest.raises(RuntimeError, match="after shutdown"):
        threads.call(len, "abc")


async def test_an_idle_thread_does_not_keep_its_last_call_in_memory() -> None:
    class Payload:
        pass

    threads = DaemonThreads(1, "forgetful")
    payload = Payload()
    ref = weakref.ref(payload)
    await threads.call(id, payload)
    del payload

    def is_gone() -> bool:
        gc.collect()
        return ref() is None

    await until(is_gone, "it is released")
    threads.shutdown()


@pytest.mark.servers("valkey", "redis86")
async def test_slow_plain_handlers_run_at_the_workers_concurrency(view: WorkerView) -> None:
    barrier = threading.Barrier(20)

    def handler(job: Job[Any]) -> None:
        barrier.wait(30)

    view.add_many([None] * 40)
    async with consuming(view.server.url, handler, concurrency=20, batch=20):
        await until(view.is_settled, "two rounds of twenty have met")
