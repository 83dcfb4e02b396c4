"""Faults of the server and its keys: the promoter recovers and repeats no job."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
import redis

from support.delayed import delay, member_of
from support.parts import running
from support.queues import QueueView
from support.users import acl_user
from support.waiting import until
from tampu import MetricsSink, Promoter, PromoterConfig, PromoterTick
from tampu.redis.client import Client
from tampu.redis.faults import Unreachable

if TYPE_CHECKING:
    from collections.abc import Callable

    from servers.cluster import Cluster
    from servers.process import Server
    from support.troubles import Troubles


def promoter(url: str, **config: Any) -> Promoter:
    return Promoter(url, PromoterConfig(**{"queue_name": "q"} | config))


@pytest.mark.servers
async def test_a_promoter_survives_a_script_flush(server: Server | Cluster) -> None:
    view = QueueView(server, "q")
    async with running(promoter(server.url)):
        delay(view, member_of("before"))
        await until(lambda: view.length() == 1, "it works")
        view.client.script_flush()
        delay(view, member_of("after"))
        await until(lambda: view.length() == 2, "it works again")


@pytest.mark.servers("valkey", "redis62", "redis70", "redis86")
async def test_jobs_are_promoted_although_the_server_is_without_memory(server: Server) -> None:
    view = QueueView(server, "q")
    async with running(promoter(server.url, lock_ttl_secs=1)):
        delay(view, member_of("before"))
        await until(lambda: view.length() == 1, "it works")
        delay(view, member_of("during"), view.now_ms() + 400)
        server.config_set(maxmemory=1, maxmemory_policy="noeviction")
        with pytest.raises(redis.RedisError, match=r"OOM|maxmemory"):
            delay(view, member_of("refused"))
        # The lock is renewed, and each promotion frees the memory that it needs.
        await until(lambda: view.ids() == ["before", "during"], "it keeps promoting")
        assert view.delayed() == []


@pytest.mark.servers("valkey", "redis62", "redis70", "redis86")
async def test_a_promoter_starts_on_a_server_without_memory(
    server: Server, troubles: Troubles, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[int] = []
    monkeypatch.setattr("tampu.maintain.supervise.backoff_secs", lambda number: tries.append(number) or 0.01)
    view = QueueView(server, "q")
    delay(view, member_of("due"))
    server.config_set(maxmemory=1, maxmemory_policy="noeviction")
    async with running(promoter(server.url)):
        await until(lambda: len(tries) >= 5, "it was refused again and again")
        assert view.delayed_ids() == ["due"]
        server.config_set(maxmemory=0)
        await until(view.length, "it works")
    assert len(troubles.about("OOM")) == 1  # logged once, not at every attempt


@pytest.mark.servers("valkey", "redis62", "redis70", "redis86")
async def test_a_promoter_survives_a_server_that_is_a_replica_for_a_while(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = QueueView(server, "q")
    refusals: list[str] = []
    monkeypatch.setattr(Client, "_record_move", lambda pipe, error: refusals.append(str(error)))
    async with running(promoter(server.url)):
        delay(view, member_of("before"))
        await until(lambda: view.length() == 1, "it works")
        delay(view, member_of("during"), view.now_ms() + 200)
        view.client.replicaof("127.0.0.1", 1)
        try:
            await until(lambda: any("READONLY" in text for text in refusals), "it was refused")
        finally:
            view.client.replicaof("NO", "ONE")
        await until(lambda: view.length() == 2, "it works again")
    assert view.ids() == ["before", "during"]


@pytest.mark.servers("valkey", "redis62", "redis70", "redis86")
async def test_a_promoter_survives_a_server_that_is_killed_and_comes_back(
    server_kind: str, fresh_server: Callable[..., Server]
) -> None:
    server = fresh_server(server_kind, appendonly="yes", appendfsync="always")
    view = QueueView(server, "q")
    async with running(promoter(server.url)):
        delay(view, member_of("before"))
        await until(lambda: view.length() == 1, "it works")
        delay(view, member_of("after"), view.now_ms() + 300)
        server.kill()
        server.start()
        view = QueueView(server, "q")
        await until(lambda: view.length() == 2, "it works again")
    assert view.ids() == ["before", "after"]


@pytest.mark.servers
@pytest.mark.parametrize("key", ["delayed", "stream", "promoter_lock"])
async def test_a_promoter_recovers_from_a_key_of_the_wrong_type(
    server: Server | Cluster, key: str, troubles: Troubles
) -> None:
    view = QueueView(server, "q")
    view.client.hset(getattr(view.keys, key), "of a", "wrong type")
    if key != "delayed":
        delay(view, member_of("due"))
    async with running(promoter(server.url)):
        await until(lambda: troubles.about("WRONGTYPE"), "it has met it")
        view.client.delete(getattr(view.keys, key))
        delay(view, member_of("due"))
        await until(lambda: view.client.exists(view.keys.stream) and view.ids() == ["due"], "it works")
    assert len(troubles) == 1


async def test_an_events_key_of_the_wrong_type_only_loses_the_events(server: Server, troubles: Troubles) -> None:
    view = QueueView(server, "q")
    view.client.set(view.keys.events, "of a wrong type")
    for job_id in "abc":
        delay(view, member_of(job_id))
    delay(view, b"ab")
    async with running(promoter(server.url)):
        await until(lambda: not view.delayed(), "all are moved")
    assert view.ids() == ["a", "b", "c"]
    assert view.client.xlen(view.keys.dlq) == 1
    assert troubles.about("failed; retrying") == []


@pytest.mark.servers("valkey", "redis62", "redis86")
@pytest.mark.parametrize("forbidden", ["zrem", "xadd"])
async def test_an_acl_that_forbids_half_of_a_promotion_repeats_no_job(
    server: Server, forbidden: str, troubles: Troubles
) -> None:
    view = QueueView(server, "q")
    member = delay(view, member_of("due"))
    with acl_user(server, "half", "pw", "~*", "+@all", f"-{forbidden}"):
        url = server.url.replace("redis://", "redis://half:pw@")
        async with running(promoter(url)):
            await until(lambda: troubles, "it was refused")
            assert view.length() == 0
            assert [found for found, _ in view.delayed()] == [member]
            view.client.execute_command("ACL", "SETUSER", "half", f"+{forbidden}")
            await until(view.length, "it is moved once allowed")
    assert view.ids() == ["due"]
    assert view.delayed() == []


async def test_a_metrics_sink_that_raises_does_not_stop_promotion(server: Server, troubles: Troubles) -> None:
    class Raising(MetricsSink):
        def promoter_tick(self, tick: PromoterTick) -> None:
            raise RuntimeError("no more disk")

        def promoter_lock_outcome(self, outcome: Any) -> None:
            raise RuntimeError("no more disk")

        def dlq_routed(self, dlq: Any) -> None:
            raise RuntimeError("no more disk")

    view = QueueView(server, "q")
    delay(view, b"ab")
    async with running(promoter(server.url, metrics=Raising(), poll_interval_ms=5)):
        for number in range(5):
            delay(view, member_of(str(number)))
            await until(lambda number=number: view.length() == number + 1, "it is moved")
    assert troubles.about("the metrics sink raised an exception")
    assert troubles.about("failed; retrying") == []  # a failed round would be followed by a pause


async def test_a_promoter_without_a_server_raises_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tampu.redis.client.Client.up.__defaults__", (0.2, None))
    with pytest.raises(Unreachable, match=r"127\.0\.0\.1:1\b"):
        await promoter("redis://127.0.0.1:1").run(asyncio.Event())


def move_slot(cluster: Cluster, view: QueueView) -> None:
    """Move the queue to another node in one step."""
    home = cluster.node_of(view.keys.stream)
    target = cluster.masters[(cluster.masters.index(home) + 1) % 3]
    slot = home.client().execute_command("CLUSTER KEYSLOT", view.keys.stream)
    target_id = target.client().execute_command("CLUSTER MYID")
    home_id = home.client().execute_command("CLUSTER MYID")
    target.client().execute_command("CLUSTER SETSLOT", slot, "IMPORTING", home_id)
    home.client().execute_command("CLUSTER SETSLOT", slot, "MIGRATING", target_id)
    while keys := home.client().execute_command("CLUSTER GETKEYSINSLOT", slot, 100):
        home.client().execute_command("MIGRATE", *target.address, "", 0, 5000, "KEYS", *keys)
    for node in (target, home, *cluster.masters):
        node.client().execute_command("CLUSTER SETSLOT", slot, "NODE", target_id)


async def test_a_promoter_follows_its_queue_when_its_slot_moves(fresh_server: Callable[..., Cluster]) -> None:
    server = fresh_server("cluster86")
    view = QueueView(server, "q")
    async with running(promoter(server.url)):
        delay(view, member_of("before"))
        await until(lambda: view.length() == 1, "it works")
        move_slot(server, view)
        view = QueueView(server, "q")
        delay(view, member_of("after"))
        await until(lambda: view.length() == 2, "it works at the other node")
    assert view.ids() == ["before", "after"]
    assert [event["id"] for event in view.events()] == ["before", "after"]
