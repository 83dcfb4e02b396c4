"""A handler that blocks the event loop is named, with its place, while it blocks."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from api.workers import working
from support.waiting import until
from tampu import Queue, Worker
from tampu.config import ConsumerConfig
from tampu.consume import heartbeat, leases
from tampu.consume.heartbeat import Blocked, LoopWatch
from tampu.consume.leases import LeaseThread

if TYPE_CHECKING:
    from servers.process import Server


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "BEAT_SECS", 0.01)
    monkeypatch.setattr(heartbeat, "BLOCKED_SECS", 0.3)
    monkeypatch.setattr(heartbeat, "LOG_SECS", 0.5)


@pytest.mark.slow
async def test_the_blocking_handler_is_named_and_logged_once(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[Blocked | None] = []
    async with Queue("q", url=server.url) as queue:

        @queue.task
        async def waits() -> None:
            await asyncio.sleep(0.01)

        @queue.task
        async def blocks() -> None:
            is_over = threading.Event()
            threading.Thread(target=look, args=(is_over,)).start()
            is_over.wait()  # blocks the event loop until the other thread has seen it

        def look(is_over: threading.Event) -> None:
            deadline = threading.Event()
            while not deadline.wait(0.01):
                blocked = worker.blocked
                if blocked is not None and blocked.secs >= 0.7:
                    seen.append(blocked)
                    break
            is_over.set()

        with caplog.at_level(logging.WARNING, "tampu.worker"):
            async with working(queue) as worker:
                await waits.add()
                job = await blocks.add()
                await job.result(20)
                await until(lambda: worker.blocked is None, "it is over")
    [blocked] = seen
    assert blocked is not None
    assert blocked.job == f"blocks {job.id}"
    assert blocked.place.startswith("test_loop_watch.py:")
    assert blocked.place.endswith(" in blocks")
    lines = [record.getMessage() for record in caplog.records if "blocked the event loop" in record.getMessage()]
    assert len(lines) == 1
    assert lines[0].startswith(f"job blocks {job.id} has blocked the event loop for 0.")
    assert lines[0].endswith("use def instead of async def, or process=True")


def test_code_outside_of_handlers_is_reported_too() -> None:
    assert str(Blocked(2.0, "", "")) == "code outside of a handler has blocked the event loop for 2.0 s"


async def test_a_gap_of_the_watching_thread_itself_is_not_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a suspension both the event loop and the thread are late: nothing has blocked the loop."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    looks: list[float] = []
    watch = LoopWatch(list)
    monkeypatch.setattr(watch, "check", looks.append)
    thread = LeaseThread(ConsumerConfig(), watch)
    steps = iter([0.01, 60.0, 0.01])

    async def sleep(secs: float) -> None:
        now[0] += next(steps)

    monkeypatch.setattr(leases, "asyncio", SimpleNamespace(sleep=sleep))
    with pytest.raises(RuntimeError, match="StopIteration"):
        await thread._watch_loop()
    assert [round(secs, 2) for secs in looks] == [0.01, 60.02]


def test_a_worker_that_does_not_run_is_not_blocked() -> None:
    worker = Worker("q", print)
    assert worker.blocked is None
    assert worker.running_jobs() == []
