"""The effect of each setting of `ConsumerConfig`. (Other files test those about results and payloads.)"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import re
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from consume.views import WorkerView
from consume.workers import consuming, quick_config, settling_link
from support.proxy import Proxy
from support.waiting import until
from tampu.config import ConsumerConfig, ProducerConfig, SchedulerConfig
from tampu.consume.consumer import Consumer
from tampu.errors import ConfigError
from tampu.metrics import InMemorySink, LockOutcome
from tampu.produce.producer import Producer
from tampu.wire.dlq import DlqReason
from tampu.wire.repeat import RepeatableSpec, RepeatPattern

if TYPE_CHECKING:
    from servers.process import Server
    from support.proxy import Link
    from tampu.wire.job import Job


async def noop(job: Job[Any]) -> None:
    return None


async def fail(job: Job[Any]) -> None:
    raise ValueError("no")


async def die(job: Job[Any]) -> None:
    from tampu.consume.handlers import UnrecoverableError

    raise UnrecoverableError("never")


async def test_queue_name_group_and_consumer_id_are_on_the_server(server: Server) -> None:
    view = WorkerView(server, "invoices")
    runs, release = asyncio.Event(), asyncio.Event()

    async def handler(job: Job[Any]) -> None:
        runs.set()
        await release.wait()

    view.add()
    names = {"queue_name": "invoices", "group": "night-shift", "consumer_id": "ada"}
    async with consuming(server.url, handler, **names):
        await until(runs.is_set, "it runs")
        (pending,) = view.pending("night-shift")
        assert re.fullmatch(rb"ada:[0-9a-f]{6}", pending["consumer"])
        assert view.groups() == ["night-shift"]
        release.set()
    assert view.length() == 0


async def test_batch_is_the_maximum_number_of_entries_per_read(view: WorkerView) -> None:
    sink = InMemorySink()
    view.add_many([None] * 100)
    async with consuming(view.server.url, noop, batch=7, concurrency=50, metrics=sink):
        await until(view.is_settled, "all are done")
    sizes = [batch.size for batch in sink.reader_batches]
    assert max(sizes) == 7
    assert sum(sizes) == 100


async def test_block_ms_is_how_long_a_read_waits(view: WorkerView) -> None:
    async with consuming(view.server.url, noop, block_ms=30) as worker:
        await until(lambda: worker.consumer.last_read_at, "the first read came back empty")
        first = worker.consumer.last_read_at
        assert first is not None
        await until(lambda: (worker.consumer.last_read_at or 0) > first + 0.1, "and more do")


@pytest.mark.servers("valkey", "redis86")
async def test_ack_batch_is_the_maximum_number_of_outcomes_per_window(view: WorkerView) -> None:
    ids = view.add_many([None] * 25)
    settings = {"ack_batch": 10, "ack_idle_ms": 60_000, "delayed_enabled": False}
    async with Proxy(view.server.address) as proxy, consuming(proxy.url, noop, **settings):
        await until(view.is_settled, "all are settled, though the last window is not full")
        settling = await settling_link(proxy)
        assert max(outcomes_per_call(settling, ids)) == 10
        assert sum(outcomes_per_call(settling, ids)) == 25


async def test_ack_idle_ms_is_how_long_an_event_waits_for_others(view: WorkerView) -> None:
    started_at: list[float] = []
    release = asyncio.Event()

    async def handler(job: Job[Any]) -> None:
        started_at.append(time.monotonic())
        await release.wait()

    async with consuming(view.server.url, handler, ack_idle_ms=300):
        job_id = view.add()
        await until(lambda: view.event_names(job_id) == ["active"], "its event is written")
        assert 0.25 <= time.monotonic() - started_at[0] < 5
        release.set()


async def test_an_outcome_is_settled_at_once_if_no_job_waits_to_start(view: WorkerView) -> None:
    async with consuming(view.server.url, noop, ack_idle_ms=60_000):
        job_id = view.add()
        await until(lambda: "completed" in view.event_names(job_id), "it is settled", 10)


@pytest.mark.servers("valkey", "redis86")
async def test_outcomes_share_the_window_behind_the_one_in_flight(view: WorkerView) -> None:
    ran: list[str] = []

    async def handler(job: Job[Any]) -> None:
        ran.append(job.id)

    settings = {"ack_idle_ms": 60_000, "delayed_enabled": False}
    async with Proxy(view.server.address) as proxy, consuming(proxy.url, handler, **settings) as worker:
        earlier = view.add()
        await until(lambda: ran == [earlier] and worker.held == 0, "it has started")
        settling = await settling_link(proxy)
        settling.replies_held = True
        first = view.add()
        await until(lambda: "completed" in view.event_names(first), "the first window is written")
        others = [view.add() for _ in range(3)]
        await until(lambda: ran == [earlier, first, *others], "they ran")
        assert view.length() == 3, "they wait for the reply"
        settling.resume()
        await until(lambda: worker.held == 0, "they are settled")
        assert outcomes_per_call(settling, others) == [3]


def outcomes_per_call(settling: Link, ids: list[str]) -> list[int]:
    """Return how many of these jobs each settle window has."""
    found = [{*ids} & {*re.findall(r"job-\d+", call.decode(errors="replace"))} for call in settling.calls]
    return [len(some) for some in found if some]


async def test_dlq_max_stream_len_is_the_approximate_number_of_dead_letters(view: WorkerView) -> None:
    async with consuming(view.server.url, die, dlq_max_stream_len=100):
        view.add_many([None] * 1000)
        await until(view.is_settled, "all are settled")
    assert 100 <= view.client.xlen(view.keys.dlq) <= 300


async def test_events_max_stream_len_is_the_approximate_number_of_events(view: WorkerView) -> None:
    async with consuming(view.server.url, noop, events_max_stream_len=100):
        view.add_many([None] * 1000)
        await until(view.is_settled, "all are settled")
    assert 100 <= view.client.xlen(view.keys.events) <= 300


async def test_events_enabled_off_writes_none_at_all(view: WorkerView) -> None:
    async with consuming(view.server.url, fail, events_enabled=False, max_attempts=2):
        view.add()
        view.add_fields("x", "malformed")
        await until(lambda: len(view.dead_letters()) == 2, "both are dead-lettered")
    assert not view.client.exists(view.keys.events)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "setting"), [("retries", "retry_inflight"), ("letters", "dlq_inflight")])
async def test_failures_that_cannot_be_written_hold_no_slot(view: WorkerView, kind: str, setting: str) -> None:
    """With a key of the wrong type one kind of outcome cannot be written; the other kinds are."""
    key = view.keys.delayed if kind == "retries" else view.keys.dlq
    view.client.set(key, "wrong type")
    runs: list[str] = []

    async def handler(job: Job[Any]) -> None:
        runs.append(job.payload)
        if job.payload == "fails":
            await (fail(job) if kind == "retries" else die(job))
        if job.payload == "other":
            await (die(job) if kind == "retries" else fail(job))

    settings = {"concurrency": 4, "batch": 4, "delayed_enabled": False, setting: 3}
    async with consuming(view.server.url, handler, **settings) as worker:
        view.add_many(["fails"] * 20)
        await until(lambda: len(runs) == 20 and worker.running == 0, "all have run, and none waits")
        view.add_many(["succeeds"] * 20)
        view.add("other")
        await until(lambda: runs.count("succeeds") == 20 and "other" in runs, "other jobs run")
        assert len(view.pending()) >= 20, "what could not be written stays pending"
        view.client.delete(key)
        await until(lambda: not view.pending() and view.length() == 0, "all outcomes are written once possible")
    failed = len(view.delayed()) if kind == "retries" else len(view.dead_letters())
    assert failed == 20
    assert len(runs) == 41


@pytest.mark.slow
async def test_shutdown_deadline_secs_is_the_time_that_handlers_get(view: WorkerView) -> None:
    started_jobs: list[str] = []
    ended: list[str] = []

    async def handler(job: Job[Any]) -> None:
        started_jobs.append(job.id)
        try:
            await asyncio.sleep(job.payload)
            ended.append("finished")
        except asyncio.CancelledError:
            ended.append("abandoned")
            raise

    view.add(0.4)
    view.add(60)
    async with consuming(view.server.url, handler, shutdown_deadline_secs=1) as worker:
        await until(lambda: len(started_jobs) == 2, "both run")
        started = time.monotonic()
        await worker.stop()
        took = time.monotonic() - started
    assert ended == ["finished", "abandoned"]
    assert 0.9 <= took < 2


async def test_delayed_enabled_off_leaves_the_delayed_set_alone(view: WorkerView) -> None:
    async with consuming(view.server.url, fail, delayed_enabled=False) as worker:
        view.add()
        await until(view.delayed, "it waits for its retry")
        view.add()
        await until(lambda: len(view.delayed()) == 2, "so does the next")
        assert not view.client.exists(view.keys.promoter_lock)
        assert not worker.task.done()
    assert len(view.delayed()) == 2


async def test_the_embedded_promoter_gets_its_settings(view: WorkerView) -> None:
    sink = InMemorySink()
    now = view.now_ms()
    from tampu.wire.entry import encode_delayed_member
    from tampu.wire.envelope import encode_envelope

    for number in range(10):
        member = encode_delayed_member("", encode_envelope(f"d-{number}", b"\xc4\x01\xc0", 0))
        view.client.zadd(view.keys.delayed, {member: now - 1000 + number})
    release = asyncio.Event()

    async def handler(job: Job[Any]) -> None:
        await release.wait()

    settings = {
        "delayed_promote_batch": 3,
        "delayed_max_stream_len": 7,
        "delayed_lock_ttl_secs": 9,
        "delayed_poll_interval_ms": 10,
    }
    async with consuming(view.server.url, handler, metrics=sink, **settings):
        await until(lambda: view.length() == 7, "the stream is filled to its cap")
        ticks = len(sink.promoter_ticks)
        await until(lambda: len(sink.promoter_ticks) > ticks + 3, "it polls every 10 ms")
        assert view.length() == 7
        assert 8 <= view.client.ttl(view.keys.promoter_lock) <= 9
        release.set()
        await until(view.is_settled, "all are done")
    assert max(tick.promoted for tick in sink.promoter_ticks) == 3
    assert sink.lock_outcomes == [LockOutcome.ACQUIRED]
    assert not view.client.exists(view.keys.promoter_lock), "released at the end"


async def test_run_scheduler_fires_repeatables_with_its_settings(view: WorkerView) -> None:
    async with Producer.connect(view.server.url, ProducerConfig(queue_name=view.name)) as producer:
        await producer.upsert_repeatable(RepeatableSpec("tick", RepeatPattern.every(interval_ms=30), None))
    seen: list[str] = []

    async def handler(job: Job[Any]) -> None:
        seen.append(job.name)

    scheduler = SchedulerConfig(queue_name="ignored", lock_ttl_secs=9, tick_interval_ms=10)
    async with consuming(view.server.url, handler, run_scheduler=True, scheduler=scheduler):
        await until(lambda: len(seen) >= 3, "it fires")
        assert 8 <= view.client.ttl(view.keys.scheduler_lock) <= 9
    assert set(seen) == {"tick"}
    fired = len(seen)
    async with consuming(view.server.url, handler, run_scheduler=False):
        job_id = view.add()
        await until(lambda: "completed" in view.event_names(job_id), "another job is done meanwhile")
        assert not view.client.exists(view.keys.scheduler_lock)
    assert seen.count("tick") == fired


async def test_max_block_ms_exceeded_turns_health_red_and_names_the_job(
    view: WorkerView, caplog: pytest.LogCaptureFixture
) -> None:
    """A second worker takes over the job, and the first one logs which job blocks."""
    caplog.set_level(logging.INFO, "tampu.worker")
    blocked = threading.Event()
    release = threading.Event()
    elsewhere: list[str] = []
    red: list[bool] = []

    async def blocks(job: Job[Any]) -> None:
        blocked.set()
        release.wait(20)

    async def takes_over(job: Job[Any]) -> None:
        elsewhere.append(job.id)

    consumer = Consumer(view.server.url, quick_config(claim_min_idle_ms=300, max_block_ms=200))
    shutdown: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def run_blocked() -> None:
        stop = asyncio.Event()
        shutdown.append((asyncio.get_running_loop(), stop))
        await consumer.run(blocks, stop)

    thread = threading.Thread(target=lambda: asyncio.run(run_blocked()))
    thread.start()
    try:
        job_id = view.add(name="stuck")
        await until(blocked.is_set, "its handler blocks the loop")
        assert consumer.is_healthy
        await until(lambda: not consumer.is_healthy, "health is red")
        red.append(True)
        async with consuming(view.server.url, takes_over, claim_min_idle_ms=300):
            await until(lambda: elsewhere, "the other worker runs it")
        release.set()
        await until(lambda: consumer.is_healthy, "health is green again")
    finally:
        release.set()
        loop, stop = shutdown[0]
        loop.call_soon_threadsafe(stop.set)
        await asyncio.to_thread(thread.join, 20)
    assert elsewhere == [job_id]
    (said,) = [record.message for record in caplog.records if "has blocked the event loop" in record.message]
    assert f"stuck {job_id}" in said


def test_every_field_is_checked_and_the_error_names_it() -> None:
    wrong: dict[str, Any] = {
        field.name: object() for field in dataclasses.fields(ConsumerConfig) if field.name != "payload_type"
    }
    for name, value in wrong.items():
        with pytest.raises(ConfigError, match=name):
            ConsumerConfig(**{name: value})


async def test_metrics_get_every_event(view: WorkerView) -> None:
    sink = InMemorySink()

    async def handler(job: Job[Any]) -> None:
        if job.payload == "twice" and job.attempt == 0:
            raise ValueError
        if job.payload == "dies":
            await die(job)

    async with consuming(view.server.url, handler, metrics=sink):
        view.add("fine", name="a")
        view.add("twice", name="b")
        view.add("dies", name="c")
        view.add_fields("x", "y")
        await until(lambda: len(view.dead_letters()) == 2 and view.is_settled(), "all are settled")
        await until(lambda: sink.promoter_ticks, "the promoter has polled")
    runs = sorted((str(outcome.kind), outcome.attempt, outcome.name) for outcome in sink.job_outcomes)
    assert runs == [("err", 1, "b"), ("err", 1, "c"), ("ok", 1, "a"), ("ok", 2, "b")]
    assert all(0 <= outcome.handler_duration_us < 5_000_000 for outcome in sink.job_outcomes)
    assert [(retry.attempt, retry.backoff_ms, retry.name) for retry in sink.retries] == [(2, 1, "b")]
    routed = {(letter.reason, letter.attempt, letter.name) for letter in sink.dead_letters}
    assert routed == {(DlqReason.UNRECOVERABLE, 1, "c"), (DlqReason.MALFORMED, 0, "")}
    assert sum(batch.size for batch in sink.reader_batches) == 5
    assert {batch.reclaimed for batch in sink.reader_batches} == {0}
    assert sink.lock_outcomes == [LockOutcome.ACQUIRED]


async def test_a_metrics_sink_that_raises_affects_no_job(view: WorkerView, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(InMemorySink):
        def __getattribute__(self, name: str) -> Any:
            if name in ("promoter_tick", "promoter_lock_outcome", "reader_batch", "job_outcome"):
                return self.fail
            if name in ("retry_scheduled", "dlq_routed"):
                return self.fail
            return super().__getattribute__(name)

        def fail(self, observation: object) -> None:
            raise RuntimeError("the sink is broken")

    async def handler(job: Job[Any]) -> None:
        if job.attempt == 0 or job.payload == "dies":
            raise ValueError

    async with consuming(view.server.url, handler, metrics=Broken(), max_attempts=2):
        ids = [view.add() for _ in range(5)]
        view.add("dies")
        await until(view.dead_letters, "one is dead-lettered")
        await until(view.is_settled, "the others are done")
    completed = [event["id"] for event in view.events() if event["e"] == "completed"]
    assert sorted(completed) == sorted(ids)
    assert "the sink is broken" in caplog.text
