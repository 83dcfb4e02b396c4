"""Stopping: unstarted jobs are handed back, the deadline holds whatever handlers do, and the name is removed."""

from __future__ import annotations

import asyncio
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest

from consume.views import WorkerView
from consume.workers import QUEUE, Stuck, consuming, reading_link
from support.clients import open_client
from support.proxy import Proxy
from support.waiting import until
from tampu import Queue
from tampu.consume import link as link_module
from tampu.consume.handlers import UnrecoverableError
from tampu.inspect import snapshot as snapshot_module
from tampu.redis import calls
from tampu.wire.envelope import decode_job

if TYPE_CHECKING:
    from collections.abc import Callable

    from consume.workers import Fleet
    from servers.process import Server
    from tampu.wire.job import Job


async def noop(job: Job[Any]) -> None:
    return None


@pytest.mark.servers
async def test_unstarted_jobs_of_a_drained_worker_start_elsewhere_at_once(view: WorkerView) -> None:
    """They start within 0.1 s, and the running job finishes. On a busy machine, one of three tries may be enough."""
    for _ in range(3):
        if (took_secs := await handed_over(view)) < 0.1:
            break
    assert took_secs < 0.1


async def handed_over(view: WorkerView) -> float:
    """Drain a worker that runs one job and holds five; return the seconds until another one has started all five."""
    stuck = Stuck()
    elsewhere: dict[str, tuple[float, int]] = {}

    async def takes(job: Job[Any]) -> None:
        elsewhere[job.id] = (time.monotonic(), job.attempt)

    async with consuming(view.server.url, stuck, concurrency=1, claim_min_idle_ms=60_000) as drained:
        running = view.add(name="runs")
        await stuck.runs()
        waiting = [view.add(number, name="waits") for number in range(5)]
        drained.take_in(view, 5)
        async with consuming(view.server.url, takes, claim_min_idle_ms=60_000):
            await until(lambda: view.waiting_reads() == 1, "the other one reads")
            drained.shutdown.set()
            stopped_at = time.monotonic()
            await until(lambda: len(elsewhere) == 5, "the other worker starts all five")
            stuck.release.set()
            await drained.task
            await until(view.is_settled, "all are done")
    assert stuck.started == [running]
    assert sorted(elsewhere) == waiting
    assert {attempt for _, attempt in elsewhere.values()} == {0}, "a job that never started has no run"
    return max(at for at, _ in elsewhere.values()) - stopped_at


@pytest.mark.servers("valkey", "redis86")
async def test_a_suspect_that_is_handed_back_keeps_its_attempts_and_deaths(view: WorkerView) -> None:
    """Otherwise a job could kill any number of workers, if others are stopped in between."""
    stuck = Stuck()
    attempts: list[int] = []

    async def takes(job: Job[Any]) -> None:
        attempts.append(job.attempt)

    async with consuming(view.server.url, stuck, concurrency=1, claim_min_idle_ms=60_000) as drained:
        view.add()
        await stuck.runs()
        view.add({"k": 1}, name="suspect", attempt=1)
        (suspect,) = drained.take_in(view, 1, earlier_deliveries=2)
        view.client.xclaim(
            view.keys.stream, "default", drained.config.consumer_id, 0, [suspect], retrycount=3, justid=True
        )
        drained.shutdown.set()
        await until(lambda: max(one["time_since_delivered"] for one in view.pending()) >= 60_000, "it is handed back")
        stuck.release.set()
    (pending,) = view.pending()
    assert (pending["message_id"], pending["times_delivered"]) == (suspect, 2)
    async with consuming(view.server.url, takes, max_attempts=9, claim_min_idle_ms=60_000):
        await until(lambda: attempts, "the other worker takes it over, although the lease is long")
    assert attempts == [1]


@pytest.mark.servers("valkey", "redis86")
async def test_handing_back_removes_the_mark_of_a_start(view: WorkerView) -> None:
    view.add_many([0, 0])
    view.client.xgroup_create(view.keys.stream, "default", "0")
    [[_, entries]] = view.client.xreadgroup("default", "w", {view.keys.stream: ">"})
    fresh, suspect = (entry_id for entry_id, _ in entries)
    for entry_id, deliveries in ((fresh, 1), (suspect, 3)):
        view.client.xclaim(
            view.keys.stream, "default", "w", 0, [entry_id], retrycount=calls.START_MARK + deliveries, justid=True
        )
    async with open_client(view.server.url, scripts=(calls.HAND_BACK,)) as client:
        await calls.hand_back(
            client,
            view.keys.stream,
            group="default",
            consumer="w",
            has_xackdel=False,
            most_deliveries=0,
            min_idle_ms=1000,
            entry_ids=[fresh, suspect],
        )
    (pending,) = view.pending()
    assert (pending["message_id"], pending["times_delivered"]) == (suspect, 2)
    assert view.length() == 2, "the other one is a new entry"


@pytest.mark.servers("valkey", "redis86")
async def test_an_entry_taken_over_by_another_worker_is_not_handed_back(view: WorkerView) -> None:
    """Otherwise it would be in the queue twice."""
    stuck = Stuck()
    async with consuming(view.server.url, stuck, concurrency=1, claim_min_idle_ms=60_000) as drained:
        view.add()
        await stuck.runs()
        view.add()
        (taken,) = drained.take_in(view, 1)
        view.client.xclaim(view.keys.stream, "default", "another", 0, [taken])
        connections = len(view.connections())
        drained.shutdown.set()
        await until(
            lambda: len(view.connections()) < connections,
            "it has handed back its jobs and closed its reading connection",
        )
        stuck.release.set()
        await drained.task
    (pending,) = view.pending()
    assert (pending["message_id"], pending["consumer"]) == (taken, b"another")
    assert view.length() == 1


async def test_an_idle_worker_stops_within_milliseconds(view: WorkerView) -> None:
    """A read that blocks at the server is unblocked."""
    async with consuming(view.server.url, noop, block_ms=60_000) as worker:
        await until(view.waiting_reads, "it reads")
        job_id = view.add()
        await until(lambda: "completed" in view.event_names(job_id), "it works")
        started = time.monotonic()
        await worker.stop()
    assert time.monotonic() - started < 2, "the read alone would block for 60 s"
    await until(lambda: view.connections() == [], "it leaves no connection")


async def test_stopping_does_not_emit_a_false_drained_event(view: WorkerView) -> None:
    async with consuming(view.server.url, noop, block_ms=60_000) as worker:
        job_id = view.add()
        await until(lambda: "completed" in view.event_names(job_id), "it works")
        await worker.stop()
    assert [event["e"] for event in view.events()] == ["active", "completed"]


@pytest.mark.servers
async def test_drained_is_emitted_once_when_an_empty_read_follows_a_full_one(view: WorkerView) -> None:
    async with consuming(view.server.url, noop, block_ms=20) as worker:
        view.add()
        await until(lambda: "drained" in [event["e"] for event in view.events()], "the queue is drained")
        last = worker.consumer.last_read_at
        assert last is not None
        await until(lambda: (worker.consumer.last_read_at or 0) > last + 0.1, "more empty reads")
    (drained,) = [fields for fields in view.flat(view.keys.events) if fields[1] == "drained"]
    assert drained[:4] == ["e", "drained", "id", ""]
    assert drained[4] == "ts"
    assert len(drained) == 6


# --- the deadline


@pytest.mark.parametrize("handler", ["sleeping", "in_a_thread", "stubborn"])
async def test_shutdown_meets_its_deadline_although_handlers_never_end(
    view: WorkerView, fleet: Fleet, handler: str
) -> None:
    """Neither threads that never end nor handlers that ignore their cancellation keep the process alive."""
    view.add_many([600.0] * 3)
    worker = fleet.start(view.server.url, handler, shutdown_deadline_secs=1, concurrency=2)
    await until(lambda: len(fleet.journal.of("started")) == 2, "both slots are taken")
    worker.process.send_signal(signal.SIGTERM)
    started = time.monotonic()
    await until(lambda: not worker.is_alive or "ended" in fleet.journal.of("run"), "run() has returned")
    assert 0.9 < time.monotonic() - started < 1 + 1.5
    if handler != "stubborn":  # asyncio.run itself waits for a task that ignores its cancellation
        await until(lambda: not worker.is_alive, "the process has ended")
        assert worker.process.returncode == 0
    # A coroutine that was cancelled has ended: its job is handed back. The others stay pending, as their work goes on.
    assert len(view.pending()) == (0 if handler == "sleeping" else 2)
    assert view.length() == 3, "unstarted jobs are back in the stream"


async def test_shutdown_meets_its_deadline_although_the_server_hangs(fresh_server: Callable[..., Server]) -> None:
    server = fresh_server()
    view = WorkerView(server, QUEUE)
    stuck = Stuck()
    async with consuming(server.url, stuck, shutdown_deadline_secs=1) as worker:
        view.add()
        await stuck.runs()
        server.pause()
        started = time.monotonic()
        worker.shutdown.set()
        await asyncio.wait({worker.task}, timeout=20)
        took = time.monotonic() - started
        server.resume()
    assert took < 1 + 2


async def test_shutdown_meets_its_deadline_although_the_server_is_gone(
    fresh_server: Callable[..., Server],
) -> None:
    server = fresh_server()
    view = WorkerView(server, QUEUE)
    stuck = Stuck()
    async with consuming(server.url, stuck, shutdown_deadline_secs=1, concurrency=1) as worker:
        view.add()
        await stuck.runs()  # and it has no free slot
        server.kill()
        await until(lambda: not worker.is_connected, "the connection is lost")
        stuck.release.set()
        started = time.monotonic()
        await worker.stop()
    assert time.monotonic() - started < 1 + 2


async def test_jobs_finished_during_an_outage_are_settled_before_the_end(
    fresh_server: Callable[..., Server],
) -> None:
    server = fresh_server(appendonly="yes", appendfsync="always")
    view = WorkerView(server, QUEUE)
    stuck = Stuck(only="waits")
    async with consuming(server.url, stuck, shutdown_deadline_secs=20, ack_batch=1) as worker:
        first = view.add()
        await until(lambda: "completed" in view.event_names(first), "it works")
        view.add("waits")
        await until(lambda: len(stuck.started) == 2, "one waits")
        server.kill()
        await until(lambda: not worker.is_connected, "the connection is lost")
        stuck.release.set()
        await until(lambda: worker.running == 0, "the handler has ended")
        worker.shutdown.set()
        await asyncio.sleep(0.2)
        assert not worker.task.done()
        server.start()
        await asyncio.wait({worker.task})
    view = WorkerView(server, QUEUE)
    assert view.is_settled()
    assert len(stuck.started) == 2


async def test_a_flush_during_a_shutdown_does_not_delay_it(view: WorkerView) -> None:
    """The group is not created again then, and nothing is left to settle."""
    stuck = Stuck()
    async with consuming(view.server.url, stuck, shutdown_deadline_secs=20) as worker:
        view.add()
        await stuck.runs()
        connections = len(view.connections())
        worker.shutdown.set()
        await until(lambda: len(view.connections()) < connections, "it has stopped reading")
        view.client.flushall()
        stuck.release.set()
        started = time.monotonic()
        await asyncio.wait({worker.task})
    assert time.monotonic() - started < 5


async def test_the_outcome_of_a_cancelled_handler_is_settled(view: WorkerView) -> None:
    """It may still return or fail: either outcome is settled before the worker ends."""
    started: list[str] = []

    async def handler(job: Job[Any]) -> None:
        started.append(job.payload)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            if job.payload == "dies":
                raise UnrecoverableError("interrupted") from None

    async with consuming(view.server.url, handler, shutdown_deadline_secs=0) as worker:
        done = view.add("finishes")
        view.add("dies", job_id="dies")
        await until(lambda: len(started) == 2, "both run")
        await worker.stop()
    assert "completed" in view.event_names(done)
    assert [decode_job(letter.payload).id for letter in view.dead_letters()] == ["dies"]
    assert not view.pending()


async def test_cancelling_run_drains_as_a_shutdown_does(view: WorkerView) -> None:
    stuck = Stuck()
    async with consuming(view.server.url, stuck) as worker:
        view.add()
        await stuck.runs()
        connections = len(view.connections())
        worker.task.cancel()
        await until(
            lambda: len(view.connections()) < connections, "it is stopping and has closed its reading connection"
        )
        stuck.release.set()
        await asyncio.wait({worker.task})
        assert worker.task.cancelled()
    assert view.is_settled()
    assert view.consumers() == []


# --- names


@pytest.mark.servers
async def test_consumer_names_do_not_leak(view: WorkerView) -> None:
    """Finding 32."""
    for _ in range(3):
        async with consuming(view.server.url, noop):
            job_id = view.add()
            await until(lambda job_id=job_id: "completed" in view.event_names(job_id), "it is done")
    assert view.consumers() == []
    assert view.groups() == ["default"]


@pytest.mark.servers
async def test_names_of_dead_consumers_are_removed_once_they_hold_nothing(
    view: WorkerView, monkeypatch: pytest.MonkeyPatch
) -> None:
    """XGROUP DELCONSUMER would delete the pending entries too."""
    monkeypatch.setattr(link_module, "SWEEP_INTERVAL_SECS", 0.05)
    monkeypatch.setattr(link_module, "SILENT_CONSUMER_MS", 300)
    monkeypatch.setattr(snapshot_module, "SILENT_MS", 300)
    view.client.xgroup_create(view.keys.stream, "default", "0", mkstream=True)
    view.add_many([None] * 2)
    view.client.xreadgroup("default", "died-holding", {view.keys.stream: ">"}, count=2)
    view.client.xreadgroup("default", "died-idle", {view.keys.stream: ">"}, count=1, block=1)
    view.client.xgroup_createconsumer(view.keys.stream, "default", "died-idle")
    assert sorted(view.consumers()) == ["died-holding", "died-idle"]
    async with consuming(view.server.url, noop, claim_min_idle_ms=60_000, block_ms=50) as worker:
        await until(lambda: len(view.consumers()) == 3, "it has started")
        alive = worker.config.consumer_id
        await until(lambda: set(view.consumers()) == {alive, "died-holding"}, "the idle name is gone")
        assert "died-holding" in view.consumers()
        assert len(view.pending()) == 2
        first, second = (entry["message_id"] for entry in view.pending())
        view.client.xack(view.keys.stream, "default", first)
        assert len(view.pending()) == 1
        view.client.xack(view.keys.stream, "default", second)
        await until(lambda: set(view.consumers()) == {alive}, "the other name is removed once it holds nothing")


async def test_a_consumer_name_with_pending_entries_is_kept_at_the_end(view: WorkerView) -> None:
    started: list[str] = []

    async def handler(job: Job[Any]) -> None:
        started.append(job.id)
        await asyncio.sleep(60)

    async with consuming(view.server.url, handler, shutdown_deadline_secs=0, max_attempts=1) as worker:
        view.add()  # its last attempt, which is not handed back
        await until(lambda: started, "it runs")
        name = worker.config.consumer_id
        await worker.stop()
    assert view.consumers() == [name]
    assert len(view.pending()) == 1
    async with Queue(QUEUE, url=view.server.url) as queue:
        assert await queue.workers() == []


@pytest.mark.servers("valkey", "redis86")
@pytest.mark.parametrize("arrives", [True, False], ids=["late", "never"])
async def test_a_batch_in_flight_at_shutdown_is_handed_back(view: WorkerView, arrives: bool) -> None:
    ran: list[str] = []

    async def handler(job: Job[Any]) -> None:
        ran.append(job.id)

    settings = {"delayed_enabled": False, "claim_min_idle_ms": 60_000, "block_ms": 60_000}
    async with Proxy(view.server.address) as proxy, consuming(proxy.url, handler, **settings) as worker:
        reading = await reading_link(proxy)
        reading.replies_held = True
        view.add_many([None] * 3, at_once=True)
        await until(lambda: len(view.pending()) == 3, "the server has delivered")
        unblocked = view.times_run("client|unblock")
        worker.shutdown.set()
        await until(lambda: view.times_run("client|unblock") > unblocked, "it is stopping and unblocks its read")
        if arrives:
            reading.resume()
        await asyncio.wait({worker.task}, timeout=10)
        assert worker.task.done()
    assert ran == []
    assert view.length() == 3
    assert not view.pending(), "they are back in the queue as never delivered"
    assert view.consumers() == []
