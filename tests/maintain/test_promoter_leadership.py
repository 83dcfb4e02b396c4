"""Leader election among promoters: one wins the lock, renews it, loses it and hands it over."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import pytest

from support.delayed import LONG_AGO_MS, delay, member_of
from support.parts import PartProcess, consuming, running
from support.queues import QueueView
from support.waiting import until
from tampu import InMemorySink, Job, LockOutcome, Promoter, PromoterConfig
from tampu.redis.client import Client

if TYPE_CHECKING:
    from collections.abc import Callable

    from servers.cluster import Cluster
    from servers.process import Server

#: A TTL that does not expire within a test.
LONG_SECS = 600


def promoter(server: Server | Cluster, **config: Any) -> Promoter:
    return Promoter(server.url, PromoterConfig(**{"queue_name": "q", "lock_ttl_secs": LONG_SECS} | config))


@pytest.mark.servers
async def test_one_of_two_leads_and_both_report_it_once(server: Server | Cluster) -> None:
    view = QueueView(server, "q")
    first, second = InMemorySink(), InMemorySink()
    async with running(promoter(server, metrics=first, holder_id="first", poll_interval_ms=5)):
        await until(lambda: first.lock_outcomes, "the first leads")
        assert view.client.get(view.keys.promoter_lock).startswith(b"first")
        assert LONG_SECS - 60 < view.client.ttl(view.keys.promoter_lock) <= LONG_SECS
        async with running(promoter(server, metrics=second, holder_id="second")):
            await until(lambda: second.lock_outcomes, "the second stands by")
            rounds = len(first.promoter_ticks)
            await until(lambda: len(first.promoter_ticks) > rounds + 20, "the first still leads")
            assert second.promoter_ticks == []
    assert first.lock_outcomes == [LockOutcome.ACQUIRED]
    assert second.lock_outcomes == [LockOutcome.HELD]


@pytest.mark.servers
async def test_a_standby_takes_over_at_once_when_the_leader_stops(server: Server | Cluster) -> None:
    view = QueueView(server, "q")
    standby = InMemorySink()
    async with running(promoter(server)) as stop_leader:
        await until(lambda: view.client.exists(view.keys.promoter_lock), "the first leads")
        async with running(promoter(server, metrics=standby)):
            await until(lambda: standby.lock_outcomes == [LockOutcome.HELD], "the second promoter stands by")
            stop_leader.set()
            await until(lambda: standby.lock_outcomes == [LockOutcome.HELD, LockOutcome.ACQUIRED], "it leads", 2)
            delay(view, member_of("due"))
            await until(view.length, "and works")


@pytest.mark.slow
@pytest.mark.servers
async def test_a_standby_takes_over_within_the_ttl_of_a_killed_leader(server: Server | Cluster) -> None:
    view = QueueView(server, "q")
    standby = InMemorySink()
    with PartProcess("promoter", server.url, queue_name="q", lock_ttl_secs=1, holder_id="leader") as leader:
        await until(lambda: view.client.exists(view.keys.promoter_lock), "it leads")
        async with running(promoter(server, metrics=standby, holder_id="standby")):
            await until(lambda: standby.lock_outcomes, "the second promoter stands by")
            leader.kill()
            killed_at = time.monotonic()
            await until(lambda: len(standby.lock_outcomes) == 2, "it leads")
    # Half a second for a busy machine; what is left of the TTL at the kill is up to a second.
    assert time.monotonic() - killed_at < 1.5


async def test_a_standby_checks_the_moment_the_lock_expires(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tampu.maintain.leader.STANDBY_SECS", 3600.0)
    view = QueueView(server, "q")
    view.client.set(view.keys.promoter_lock, "a dead process", px=400)
    metrics = InMemorySink()
    async with running(promoter(server, metrics=metrics)):
        await until(lambda: LockOutcome.ACQUIRED in metrics.lock_outcomes, "it leads", within_secs=5)
    assert metrics.lock_outcomes == [LockOutcome.HELD, LockOutcome.ACQUIRED]


@pytest.mark.slow
@pytest.mark.servers
async def test_a_leader_paused_beyond_the_ttl_promotes_nothing_twice(server: Server | Cluster) -> None:
    view = QueueView(server, "q")
    for number in range(300):
        delay(view, member_of(str(number)), LONG_AGO_MS + number)
    paused = PartProcess(
        "promoter", server.url, pause_before="promote", queue_name="q", lock_ttl_secs=1, holder_id="paused"
    )
    with paused:
        paused.until_paused()  # it has read the due jobs and is about to move them
        async with running(promoter(server, holder_id="standby")):
            await until(lambda: view.length() == 300, "the standby has taken over and moved all")
            paused.resume()
            delay(view, member_of("later"))
            await until(lambda: view.length() == 301, "new jobs are promoted")
            assert view.client.get(view.keys.promoter_lock).startswith(b"standby")
            assert paused.terminate() == 0
    assert sorted(view.ids()) == sorted([*map(str, range(300)), "later"])


async def test_two_promoters_with_the_same_settings_do_not_both_lead(server: Server) -> None:
    metrics = [InMemorySink(), InMemorySink()]
    same = [promoter(server, holder_id="p-1", metrics=sink) for sink in metrics]
    async with running(*same):
        await until(lambda: all(sink.lock_outcomes for sink in metrics), "both have asked")
    assert sorted(outcome for sink in metrics for outcome in sink.lock_outcomes) == ["acquired", "held"]


async def test_two_workers_of_one_name_do_not_both_lead(server: Server) -> None:
    async def handler(job: Job[Any]) -> None:
        pass

    metrics = [InMemorySink(), InMemorySink()]
    async with (
        consuming(server.url, handler, queue_name="q", consumer_id="c-1", metrics=metrics[0]),
        consuming(server.url, handler, queue_name="q", consumer_id="c-1", metrics=metrics[1]),
    ):
        await until(lambda: all(sink.lock_outcomes for sink in metrics), "both have asked")
        view = QueueView(server, "q")
        assert view.client.get(view.keys.promoter_lock).startswith(b"c-1")
    assert sorted(outcome for sink in metrics for outcome in sink.lock_outcomes) == ["acquired", "held"]


def renewals_of(view: QueueView) -> int:
    """Return how often the server has renewed a lock: nothing else calls EXPIRE in these tests."""
    return int(view.client.info("commandstats").get("cmdstat_expire", {"calls": 0})["calls"])


@pytest.mark.slow
async def test_an_idle_leader_renews_its_lock_between_rare_polls(server: Server) -> None:
    view = QueueView(server, "q")
    metrics = InMemorySink()
    async with running(promoter(server, lock_ttl_secs=1, poll_interval_ms=3_600_000, metrics=metrics)):
        await until(lambda: metrics.lock_outcomes, "it leads")
        renewals = renewals_of(view)
        await until(lambda: renewals_of(view) >= renewals + 6, "it renews")
        assert view.client.exists(view.keys.promoter_lock)
    assert metrics.lock_outcomes == [LockOutcome.ACQUIRED]


@pytest.mark.slow
async def test_a_leader_that_lost_its_lock_reports_it_and_may_win_it_back(server: Server) -> None:
    view = QueueView(server, "q")
    metrics = InMemorySink()
    async with running(promoter(server, lock_ttl_secs=1, metrics=metrics)):
        await until(lambda: metrics.lock_outcomes == [LockOutcome.ACQUIRED], "it leads")
        view.client.set(view.keys.promoter_lock, "another process")
        await until(lambda: metrics.lock_outcomes[1:] == [LockOutcome.HELD], "it stands by")
        view.client.delete(view.keys.promoter_lock)
        await until(lambda: metrics.lock_outcomes[2:] == [LockOutcome.ACQUIRED], "it leads again")


async def test_another_holders_lock_is_neither_taken_nor_released(server: Server) -> None:
    view = QueueView(server, "q")
    view.client.set(view.keys.promoter_lock, "p-another")
    delay(view, member_of("due"))
    metrics = InMemorySink()
    async with running(promoter(server, metrics=metrics)):
        await until(lambda: metrics.lock_outcomes, "it has asked")
    assert view.client.get(view.keys.promoter_lock) == b"p-another"
    assert view.delayed_ids() == ["due"]


async def test_a_cancelled_promoter_releases_its_lock_too(server: Server) -> None:
    view = QueueView(server, "q")
    task = asyncio.create_task(promoter(server).run(asyncio.Event()))
    await until(lambda: view.client.exists(view.keys.promoter_lock), "it leads")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not view.client.exists(view.keys.promoter_lock)


async def test_stopping_does_not_wait_for_an_unreachable_server(
    fresh_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = fresh_server()
    metrics = InMemorySink()
    connects: list[Any] = []
    async with running(promoter(server, metrics=metrics)) as shutdown:
        await until(lambda: metrics.promoter_ticks, "it works")
        connect = Client._connect
        monkeypatch.setattr(Client, "_connect", lambda pipe: connects.append(pipe) or connect(pipe))
        server.kill()
        await until(lambda: connects, "a round waits for the server")
        shutdown.set()
        stopped_at = time.monotonic()
    assert time.monotonic() - stopped_at < 5
