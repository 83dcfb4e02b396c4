"""Faults of ChasquiMQ that run jobs more often than they should, findings 13 to 20: tampu does not have them."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from support.clients import open_client
from support.delayed import delay, member_of
from support.parts import consuming, running
from support.producers import open_producer
from support.proxy import Proxy
from support.queues import QueueView
from support.repeating import fired, make_due, next_fire, repeat_keys, write_spec
from support.waiting import until
from tampu import InMemorySink, Job, Promoter, PromoterConfig, RepeatPattern, Scheduler, SchedulerConfig
from tampu.redis.calls import FIRE, START_MARK
from tampu.redis.client import Client
from tampu.wire.envelope import decode_job
from tampu.wire.repeat import StoredSpec

if TYPE_CHECKING:
    from servers.cluster import Cluster
    from servers.process import Server

HOUR_MS = 3_600_000
HOURLY = StoredSpec(key="k", job_name="n", pattern=RepeatPattern.every(HOUR_MS), payload_slot=b"\xc4\x01\x07", limit=2)


@pytest.mark.slow
@pytest.mark.servers
async def test_finding_13_a_handler_longer_than_the_claim_time_runs_once(server: Server | Cluster) -> None:
    view = QueueView(server, "q")
    starts: list[int] = []

    async def slow(job: Job[Any]) -> None:
        starts.append(job.attempt)
        await asyncio.sleep(2)  # four times the claim time

    two = [consuming(server.url, slow, queue_name="q", claim_min_idle_ms=500, shutdown_deadline_secs=5) for _ in "ab"]
    async with open_producer(server.url) as producer, two[0], two[1]:
        job_id = await producer.add(1)
        await until(lambda: view.length() == 0, "it is done")
    assert starts == [0]
    assert [event["id"] for event in view.events() if event["e"] == "completed"] == [job_id]
    assert view.dead_letters() == []


@pytest.mark.slow
@pytest.mark.servers
async def test_finding_14_jobs_that_wait_in_a_worker_run_once(server: Server | Cluster) -> None:
    view = QueueView(server, "q")
    runs: Counter[int] = Counter()

    async def slow(job: Job[int]) -> None:
        runs[job.payload] += 1
        await asyncio.sleep(0.6)  # jobs read along with it wait for longer than the claim time

    settings: dict[str, Any] = {"queue_name": "q", "concurrency": 1, "batch": 64, "claim_min_idle_ms": 500}
    async with open_producer(server.url) as producer:
        await producer.add_bulk([*range(6)])
        async with consuming(server.url, slow, **settings), consuming(server.url, slow, **settings):
            await until(lambda: view.length() == 0, "all are done")
    assert runs == dict.fromkeys(range(6), 1)


@pytest.mark.servers
async def test_finding_15_worker_deaths_are_counted_and_poison_jobs_end(server: Server | Cluster) -> None:
    view = QueueView(server, "q")
    stream = view.keys.stream
    ran: list[tuple[str, int]] = []

    async def fail(job: Job[str]) -> None:
        ran.append((job.payload, job.attempt))
        raise ValueError("on purpose")

    async with open_producer(server.url) as producer:
        await producer.add_bulk(["died twice", "died six times", "had begun its last attempt"])
        view.client.xgroup_create(stream, "default", "0")
        [[_, entries]] = view.client.xreadgroup("default", "died", {stream: ">"})
        for deliveries, (entry_id, _) in zip((2, 6, START_MARK + 3), entries, strict=True):
            view.client.xclaim(stream, "default", "died", 0, [entry_id], retrycount=deliveries)
        async with consuming(server.url, fail, queue_name="q", max_attempts=3, claim_min_idle_ms=100):
            await until(lambda: len(view.dead_letters()) == 3, "all are dead letters")
        attempts = {decode_job(letter.payload).payload: letter.attempts for letter in await producer.peek_dlq()}
    assert ran == [("died twice", 0), ("died twice", 1), ("died twice", 2)]
    assert attempts == {"died twice": 3, "died six times": 6, "had begun its last attempt": 1}


@pytest.mark.servers
async def test_finding_16_an_id_is_deduplicated_across_producers(server: Server | Cluster) -> None:
    view = QueueView(server, "q")
    async with open_producer(server.url) as first, open_producer(server.url) as second:
        assert (await first.add_with_id("mine", 1)).is_new
        await first.add_bulk([*range(150)])
        assert not (await first.add_with_id("mine", 2)).is_new
        assert not (await second.add_with_id("mine", 3)).is_new
        assert not (await second.add_in_with_id("mine", 60, 4)).is_new
    assert view.ids().count("mine") == 1
    assert view.delayed() == []


@pytest.mark.servers
async def test_finding_17_a_fire_by_a_suspended_leader_is_refused(server: Server | Cluster) -> None:
    view = QueueView(server, "q")
    due = view.now_ms() - 1
    write_spec(view, HOURLY, due)
    async with open_client(server.url, scripts=(FIRE,)) as client:
        keys = (view.keys.stream, view.keys.delayed, view.keys.repeat, view.keys.repeat_spec("k"))
        packed = view.client.hget(view.keys.repeat_spec("k"), "spec")
        arguments = (due, due + HOUR_MS, 1000, "k", 2, packed, "n", due, b"envelope")
        assert await client.run(FIRE, keys, arguments) == [1, 0, b""]
        assert await client.run(FIRE, keys, arguments) == [-1, 0, b""]
    assert view.length() == 1
    assert (next_fire(view, "k"), fired(view, "k")) == (due + HOUR_MS, 1)


@pytest.mark.servers
async def test_finding_18_a_repeatable_removed_during_a_round_stays_removed(server: Server | Cluster) -> None:
    view = QueueView(server, "q")
    due = view.now_ms() - 1
    write_spec(view, HOURLY, due)
    packed = view.client.hget(view.keys.repeat_spec("k"), "spec")
    async with open_producer(server.url) as producer, open_client(server.url, scripts=(FIRE,)) as client:
        assert await producer.remove_repeatable("k")
        keys = (view.keys.stream, view.keys.delayed, view.keys.repeat, view.keys.repeat_spec("k"))
        arguments = (due, due + HOUR_MS, 1000, "k", 2, packed, "n", due, b"envelope")
        assert await client.run(FIRE, keys, arguments) == [-1, 0, b""]
        assert repeat_keys(view) == set()
        # Half of it does not fire either: a spec without a next fire, or a next fire without its spec.
        view.client.hset(view.keys.repeat_spec("k"), "spec", packed)
        assert await client.run(FIRE, keys, arguments) == [-1, 0, b""]
        view.client.delete(view.keys.repeat_spec("k"))
        make_due(view, "k", due)
        assert await client.run(FIRE, keys, arguments) == [-1, 0, b""]
    assert view.length() == 0


@pytest.mark.servers("valkey", "redis62", "redis70", "redis86")
async def test_finding_19_an_add_whose_reply_was_lost_is_applied_once(server: Server) -> None:
    view = QueueView(server, "q")
    async with Proxy(server.address) as proxy, open_producer(proxy.url) as producer:
        await producer.add_in(1000, "opens the chain")
        proxy.hold_replies()
        add = asyncio.create_task(producer.add(1))
        await until(view.length, "the server has done it")
        proxy.cut()
        assert [await add] == view.ids()


@pytest.mark.servers("valkey", "redis62", "redis70", "redis86")
@pytest.mark.parametrize("act", ["promote", "fire", "replay"])
async def test_finding_19_a_call_whose_reply_was_lost_is_applied_once(
    server: Server, act: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = QueueView(server, "q")
    calls: list[str] = []
    send = Client.run

    async def hold_first_reply(client: Client, script: Any, *arguments: Any, **options: Any) -> Any:
        if script.name == act:
            if not calls:
                proxy.hold_replies()
            calls.append(script.name)
        return await send(client, script, *arguments, **options)

    monkeypatch.setattr(Client, "run", hold_first_reply)
    prepare(view, "first")
    async with Proxy(server.address) as proxy:
        part: Promoter | Scheduler | Replayer = Replayer(proxy.url)
        if act == "promote":
            part = Promoter(proxy.url, PromoterConfig(queue_name="q", poll_interval_ms=20))
        elif act == "fire":
            part = Scheduler(proxy.url, SchedulerConfig(queue_name="q", tick_interval_ms=20))
        async with running(part):
            await until(view.length, "the server has done it")
            proxy.cut()
            prepare(view, "second")
            await until(lambda: view.length() >= 2, "it continues")
    ids = view.ids()
    assert len(ids) == len(set(ids)) == 2


def prepare(view: QueueView, name: str) -> None:
    """Write one job to promote, one to fire and one to replay."""
    delay(view, member_of(name))
    write_spec(view, replace(HOURLY, key=name), view.now_ms() - 1)
    view.client.xadd(view.keys.dlq, {"d": member_of(name)[4:], "reason": "unrecoverable", "source_id": "1-1"})


class Replayer:
    """Replays dead letters in a loop."""

    def __init__(self, url: str) -> None:
        self.url = url

    async def run(self, shutdown: asyncio.Event) -> None:
        async with open_producer(self.url) as producer:
            while not shutdown.is_set():
                await producer.replay_dlq()
                await asyncio.sleep(0.01)


@pytest.mark.servers("valkey", "redis86")
async def test_finding_20_two_workers_of_one_name_do_not_both_promote(server: Server) -> None:
    async def ignore(job: Job[Any]) -> None:
        pass

    sinks = [InMemorySink(), InMemorySink()]
    same: dict[str, Any] = {"queue_name": "q", "consumer_id": "c-1"}
    async with (
        consuming(server.url, ignore, metrics=sinks[0], **same),
        consuming(server.url, ignore, metrics=sinks[1], **same),
    ):
        await until(lambda: all(sink.lock_outcomes for sink in sinks), "both have asked for the lock")
        # While both run: once one stops, the other may acquire the lock.
        assert sorted(outcome for sink in sinks for outcome in sink.lock_outcomes) == ["acquired", "held"]
