"""The synchronous API, used from a script, from threads and from a forked child."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from servers.process import eventually
from support.queues import QueueView
from tampu import ConfigError, JobFailed, Queue, RepeatPattern, UnrecoverableError, Worker

if TYPE_CHECKING:
    from collections.abc import Iterator

    from servers.process import Server


@pytest.fixture
def queue(server: Server) -> Iterator[Queue]:
    queue = Queue("q", url=server.url)

    @queue.task(attempts=1)
    async def double(number: int) -> int:
        if number < 0:
            raise UnrecoverableError("negative")
        return 2 * number

    yield queue
    queue.sync.close()


@pytest.fixture
def view(server: Server) -> QueueView:
    return QueueView(server, "q")


@contextlib.contextmanager
def working(queue: Queue) -> Iterator[None]:
    """Run a worker in a separate thread with its own event loop."""
    worker = Worker(queue, shutdown_deadline_secs=5, delayed_poll_interval_ms=20)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_until_complete, args=(worker.run(),))
    thread.start()
    try:
        yield
    finally:
        asyncio.run_coroutine_threadsafe(worker.close(), loop).result(20)
        thread.join(20)
        loop.close()


def test_a_script_adds_jobs_and_waits_for_results(queue: Queue, view: QueueView) -> None:
    double: Any = queue.tasks["double"]
    with working(queue):
        job = double.sync.add(4)
        assert job.result(timeout=20) == 8
        assert job.wait_for_result(timeout=20) == 8
        by_name = queue.sync.add("double", {"number": 5})
        assert by_name.result(20) == 10
        assert [job.result(20) for job in double.sync.add_bulk([1, 2])] == [2, 4]
        assert [job.result(20) for job in queue.sync.add_bulk([{"name": "double", "data": {"number": 3}}])] == [6]
        assert queue.sync.wait_for_result(by_name.id) == 10
        assert queue.sync.get_job_result(job.id) == 8
        assert queue.sync.get_job_result_bulk([job.id, by_name.id]) == [8, 10]
        found = double.sync.job(job.id)
        assert (found.result(20), found.state().state, job.state().result) == (8, "done", 8)
        with pytest.raises(JobFailed, match="negative"):
            double.sync.add(-1).result(20)
        with pytest.raises(ConfigError, match="timeout"):
            job.result(0)
        with pytest.raises(ConfigError, match="poll_interval"):
            job.wait_for_result(poll_interval=0)


def test_every_method_of_a_queue_exists(queue: Queue, view: QueueView) -> None:
    sync, double = queue.sync, queue.tasks["double"]
    assert (sync.name, sync.tasks, sync.is_closed) == ("q", queue.tasks, False)
    double.sync.add_in(timedelta(hours=1), 1)
    once = double.sync.add_unique("once", 3)
    again = sync.add_unique("double", {"number": 3}, job_id="once")
    assert [once.id.is_new, again.id.is_new] == [True, False]
    delayed = sync.add("double", {"number": 1}, delay_ms=60_000)
    assert sync.cancel_delayed(delayed.id) is True
    assert sync.get_job("once").state == "waiting"
    key = double.sync.cron("0 9 * * *", {"number": 1})
    assert double.sync.every(60, {"number": 1}) == "double::every:60000"
    assert double.sync.schedule(RepeatPattern.every(90_000), {"number": 1}, key="mine") == "mine"
    assert sync.upsert_repeatable_job("tick", 1, repeat=RepeatPattern.every(5000)).id == "tick::every:5000"
    assert {meta.key for meta in sync.get_repeatable_jobs()} == {key, "double::every:60000", "mine", "tick::every:5000"}
    assert sync.remove_repeatable_by_key(key) is True
    view.client.xadd(queue.keys.dlq, {"d": b"x", "reason": "malformed"})
    assert [letter["reason"] for letter in sync.peek_dlq()] == ["malformed"]
    assert sync.replay_dlq() == 0
    assert sync.remove_dlq() == 1
    sync.pause()
    assert sync.is_paused() is True
    assert sync.resume() is True
    assert sync.purge(waiting=False) == 1
    assert sync.purge() == 1


def test_a_job_can_be_added_for_a_point_in_time(queue: Queue, view: QueueView) -> None:
    queue.tasks["double"].sync.add_at(view.now_ms() / 1000 + 3600, 2)
    assert len(view.delayed()) == 1


def test_many_threads_share_one_connection(queue: Queue, view: QueueView) -> None:
    double = queue.tasks["double"]
    with ThreadPoolExecutor(16) as threads:
        jobs = [*threads.map(double.sync.add, range(500))]
    assert sorted(view.ids()) == sorted(job.id for job in jobs)
    assert sorted(payload["number"] for payload in view.payloads()) == [*range(500)]
    # The server may still list a connection that the test before this one has closed.
    eventually(lambda: len(view.connections()) == 1, "all threads share one connection")


def test_threads_that_ask_at_the_same_time_get_the_same_object(server: Server) -> None:
    for _ in range(20):
        queue = Queue("q", url=server.url)
        barrier = threading.Barrier(8)

        def ask(queue: Queue = queue, barrier: threading.Barrier = barrier) -> int:
            barrier.wait()
            return id(queue.sync)

        with ThreadPoolExecutor(8) as threads:
            assert len({*threads.map(lambda _, ask=ask: ask(), range(8))}) == 1


def test_an_event_loop_can_use_the_queue_at_the_same_time(queue: Queue, view: QueueView) -> None:
    double: Any = queue.tasks["double"]

    async def both() -> None:
        for number in range(20):
            await double.add(number)
            await asyncio.to_thread(double.sync.add, number)
        await queue.close()

    asyncio.run(both())
    assert view.length() == 40
    assert queue.sync.is_closed


def test_threads_can_wait_for_jobs_of_synchronous_code(queue: Queue) -> None:
    double = queue.tasks["double"]
    with working(queue), ThreadPoolExecutor(8) as threads:
        jobs = [double.sync.add(number) for number in range(40)]
        assert [*threads.map(lambda job: job.result(20), jobs)] == [2 * number for number in range(40)]


def in_child(work: Any) -> int:
    """Run `work` in a forked child and return its exit code, 0 if it raised nothing."""
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            work()
            os._exit(0)
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_continues_with_its_own_connections(queue: Queue, view: QueueView) -> None:
    double: Any = queue.tasks["double"]
    before = double.sync.add(1)

    def work() -> None:
        added = double.sync.add(2)
        assert added.id.is_new
        queue.sync.add("double", {"number": 3})

    assert in_child(work) == 0
    after = double.sync.add(4)
    assert [payload["number"] for payload in view.payloads()] == [1, 2, 3, 4]
    assert view.ids()[0] == before.id
    assert view.ids()[-1] == after.id


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_waits_for_results_with_its_own_events(
    queue: Queue, view: QueueView, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tampu.events.SAFETY_NET_SECS", 3600.0)
    double: Any = queue.tasks["double"]
    with pytest.raises(TimeoutError):
        double.sync.add(0).result(0.05)  # now the parent reads events
    queue.sync.purge()

    def work() -> None:
        # The first lookup finds nothing: the worker starts only when this child reads events.
        assert double.sync.add(5).result(30) == 10

    child = threading.Thread(target=lambda: codes.append(in_child(work)))
    codes: list[int] = []
    child.start()
    eventually(lambda: _readers(view) == 2, "the child reads events too")
    with working(queue):
        child.join(60)
    assert codes == [0]


def _readers(view: QueueView) -> int:
    return sum(one["cmd"].startswith("xread") for one in view.connections())


def test_a_context_manager_closes_the_queue(server: Server) -> None:
    with Queue("other", url=server.url).sync as sync:
        sync.add("", 1)
    assert (sync.is_closed, sync.name) == (True, "other")
    sync.close()
    with sync:  # opens it again
        sync.add("", 1)
        assert (sync.is_closed, sync.name) == (False, "other")
