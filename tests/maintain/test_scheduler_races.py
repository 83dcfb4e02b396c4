"""Each fire is written once: whichever process leads, whatever changes meanwhile, whatever the server refuses."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from support.clients import open_client
from support.parts import PartProcess, consuming, running
from support.queues import QueueView
from support.repeating import fired, make_due, next_fire, register, repeat_keys, write_spec
from support.users import acl_user
from support.waiting import until
from tampu import Job, MissedFiresPolicy, RepeatPattern, Scheduler, SchedulerConfig
from tampu.maintain.leader import Duty
from tampu.maintain.scheduler import SchedulerDuty, fire_id
from tampu.redis.calls import FIRE, SET_ASIDE
from tampu.redis.client import Client
from tampu.wire.repeat import StoredSpec

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from servers.cluster import Cluster
    from servers.process import Server
    from support.troubles import Troubles

HOUR_MS = 3_600_000


def scheduler(url: str, **config: Any) -> Scheduler:
    return Scheduler(url, SchedulerConfig(**{"queue_name": "q", "tick_interval_ms": 20} | config))


def hourly(**spec: Any) -> StoredSpec:
    pattern = RepeatPattern.every(HOUR_MS)
    return StoredSpec(**{"key": "k", "job_name": "tick", "pattern": pattern, "payload_slot": b"\xc4\x01\x07"} | spec)


# --- leadership


@pytest.mark.servers
async def test_a_scheduler_paused_beyond_the_ttl_fires_nothing_twice(server: Server | Cluster) -> None:
    view = QueueView(server, "q")
    due = view.now_ms() - 1
    write_spec(view, hourly(), due)
    paused = PartProcess("scheduler", server.url, pause_before="fire", queue_name="q", lock_ttl_secs=1, holder_id="old")
    with paused:
        paused.until_paused()  # it has read the spec and its score and is about to fire
        async with running(scheduler(server.url, holder_id="standby", lock_ttl_secs=600)):
            await until(view.length, "the standby has taken over and fired")
            paused.resume()
            make_due(view, "k", next_fire(view, "k") or 0)
            write_spec(view, hourly(key="later"), due)
            await until(lambda: view.length() == 2, "later fires are written")
            assert view.client.get(view.keys.scheduler_lock).startswith(b"standby")
            assert paused.terminate() == 0
    assert sorted(view.ids()) == sorted([fire_id("k", due), fire_id("later", due)])
    assert fired(view, "k") == 1


@pytest.mark.servers
async def test_a_standby_takes_over_at_once_when_the_leader_stops(server: Server | Cluster) -> None:
    view = QueueView(server, "q")
    async with running(scheduler(server.url, lock_ttl_secs=600, holder_id="first")) as stop_leader:
        await until(lambda: view.client.exists(view.keys.scheduler_lock), "it leads")
        async with running(scheduler(server.url, lock_ttl_secs=600, holder_id="second")):
            stop_leader.set()
            await until(lambda: (view.client.get(view.keys.scheduler_lock) or b"").startswith(b"second"), "it leads", 2)
            write_spec(view, hourly(), view.now_ms() - 1)
            await until(view.length, "and fires")
    assert not view.client.exists(view.keys.scheduler_lock)


async def test_a_killed_leader_is_replaced_within_the_ttl(server: Server) -> None:
    view = QueueView(server, "q")
    with PartProcess("scheduler", server.url, queue_name="q", lock_ttl_secs=1) as leader:
        await until(lambda: view.client.exists(view.keys.scheduler_lock), "it leads")
        async with running(scheduler(server.url)):
            leader.kill()
            write_spec(view, hourly(), view.now_ms() - 1)
            await until(view.length, "the standby fires", within_secs=1.5)


async def test_killing_the_leader_loses_no_fire_of_a_short_interval(server: Server) -> None:
    view = QueueView(server, "q")
    spec = StoredSpec(key="k", job_name="tick", pattern=RepeatPattern.every(100), payload_slot=b"\xc4\x01\x07")
    with PartProcess("scheduler", server.url, queue_name="q", lock_ttl_secs=2) as leader:
        await until(lambda: view.client.exists(view.keys.scheduler_lock), "it leads")
        async with running(scheduler(server.url, holder_id="standby", lock_ttl_secs=2)):
            due = view.now_ms() + 1500  # more than one tick ahead, so that the leader sees it in time
            write_spec(view, spec, due)
            await until(lambda: view.length() >= 3, "it fires")
            leader.kill()
            last_of_leader = view.length()
            await until(lambda: view.length() > last_of_leader + 5, "the standby fires")
    ids = view.ids()
    assert sorted(ids) == sorted(fire_id("k", due + 100 * number) for number in range(len(ids)))


async def test_a_late_standby_makes_up_for_all_fires(server: Server) -> None:
    """On a busy machine a standby may check long after the lock has expired."""
    view = QueueView(server, "q")
    spec = StoredSpec(key="k", job_name="tick", pattern=RepeatPattern.every(100), payload_slot=b"\xc4\x01\x07")
    settings: dict[str, Any] = {"queue_name": "q", "lock_ttl_secs": 1, "tick_interval_ms": 100}
    with PartProcess("scheduler", server.url, **settings) as leader:
        await until(lambda: view.client.exists(view.keys.scheduler_lock), "it leads")
        first_leader = view.client.get(view.keys.scheduler_lock)
        known = {one["id"] for one in view.client.client_list()}
        with PartProcess("scheduler", server.url, **settings) as standby:

            def has_looked() -> bool:
                clients = view.client.client_list()
                return any(one["id"] not in known and one["cmd"] == "evalsha" for one in clients)

            await until(has_looked, "the standby has found the lock taken")
            due = view.now_ms() + 500
            write_spec(view, spec, due)
            await until(lambda: view.length() >= 3, "it fires")
            standby.pause()
            leader.kill()
            # Long after the lock has run out, and longer than its TTL and a tick.
            dead_at = view.now_ms()
            await until(lambda: view.now_ms() > dead_at + 3000, "the standby is late")
            standby.resume()
            await until(lambda: view.client.get(view.keys.scheduler_lock) not in (None, first_leader), "it leads")
            fired = view.length()
            await until(lambda: view.length() > fired + 3, "it fires")
    ids = view.ids()
    assert sorted(ids) == sorted(fire_id("k", due + 100 * number) for number in range(len(ids)))


async def test_a_first_leader_applies_the_missed_fires_policy(server: Server) -> None:
    view = QueueView(server, "q")
    now = view.now_ms()
    spec = StoredSpec(key="k", job_name="tick", pattern=RepeatPattern.every(1000), payload_slot=b"\xc4\x01\x07")
    write_spec(view, spec, now - 4500)
    async with running(scheduler(server.url, lock_ttl_secs=600)):
        await until(view.length, "it fires")
        assert view.length() == 1


async def test_workers_with_the_same_settings_do_not_both_lead(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: dict[Duty[Any], bool] = {}
    lead = Duty.lead

    async def lead_and_record(duty: Duty[Any]) -> bool:
        answers[duty] = await lead(duty)
        return answers[duty]

    async def handler(job: Job[Any]) -> None:
        pass

    monkeypatch.setattr(Duty, "lead", lead_and_record)
    shared: dict[str, Any] = {
        "queue_name": "q",
        "delayed_enabled": False,
        "scheduler": SchedulerConfig(holder_id="s-1"),
    }
    async with consuming(server.url, handler, **shared), consuming(server.url, handler, **shared):
        await until(lambda: len(answers) == 2, "both have asked")
        assert sorted(answers.values()) == [False, True]


# --- changes during a round


@pytest.fixture
async def at_the_last_moment(server: Server, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., Any]]:
    """Return a function that runs one round of the scheduler and calls `change` just before it fires."""
    changes: list[Callable[[], Any]] = []
    replies: list[Any] = []
    run = Client.run

    async def change_and_run(pipe: Client, script: Any, *arguments: Any, **options: Any) -> Any:
        if script in (FIRE, SET_ASIDE) and changes:
            result = changes.pop()()
            if asyncio.iscoroutine(result):
                await result
            replies.append(await run(pipe, script, *arguments, **options))
            return replies[-1]
        return await run(pipe, script, *arguments, **options)

    monkeypatch.setattr(Client, "run", change_and_run)
    async with open_client(server.url, scripts=(FIRE, SET_ASIDE)) as pipe:

        async def one_round(change: Callable[[], Any]) -> Any:
            changes.append(change)
            await SchedulerDuty(pipe, SchedulerConfig(queue_name="q")).one_round()
            return replies[-1]

        yield one_round


@pytest.mark.servers("valkey", "redis62", "redis70", "redis86")
async def test_a_spec_removed_during_a_round_stays_removed(
    server: Server, at_the_last_moment: Callable[..., Any]
) -> None:
    view = QueueView(server, "q")
    write_spec(view, hourly(limit=2), view.now_ms() - 1)
    reply = await at_the_last_moment(lambda: view.client.delete(view.keys.repeat, view.keys.repeat_spec("k")))
    assert reply == [-1, 0, b""]
    assert view.all_keys() == {}


@pytest.mark.servers("valkey", "redis62", "redis70", "redis86")
async def test_a_spec_changed_during_a_round_does_not_fire_the_old_one(
    server: Server, at_the_last_moment: Callable[..., Any]
) -> None:
    view = QueueView(server, "q")
    due = view.now_ms() - 1
    write_spec(view, hourly(), due)
    # The same key and even the same due time, but another payload.
    reply = await at_the_last_moment(lambda: write_spec(view, hourly(payload_slot=b"\xc4\x01\x08"), due))
    assert reply == [-1, 0, b""]
    assert view.length() == 0
    async with running(scheduler(server.url)):
        await until(view.length, "the new one fires")
    assert view.payloads() == [8]


async def test_a_spec_registered_again_during_a_round_does_not_fire(
    server: Server, at_the_last_moment: Callable[..., Any]
) -> None:
    view = QueueView(server, "q")
    key = await register(view, RepeatPattern.every(HOUR_MS))
    make_due(view, key, view.now_ms() - 1)
    reply = await at_the_last_moment(lambda: register(view, RepeatPattern.every(HOUR_MS)))
    assert reply == [-1, 0, b""]
    assert view.length() == 0
    assert (next_fire(view, key) or 0) > view.now_ms()


async def test_an_unreadable_spec_replaced_during_a_round_is_kept_active(
    server: Server, at_the_last_moment: Callable[..., Any]
) -> None:
    view = QueueView(server, "q")
    due = view.now_ms() - 1
    view.client.hset(view.keys.repeat_spec("k"), "spec", b"\xc1")
    make_due(view, "k", due)
    assert await at_the_last_moment(lambda: write_spec(view, hourly(), due)) == 0
    assert next_fire(view, "k") == due


# --- the script alone


@pytest.mark.servers
async def test_the_same_call_twice_fires_once(server: Server | Cluster) -> None:
    view = QueueView(server, "q")
    due = view.now_ms() - 1
    write_spec(view, hourly(), due)
    packed = view.client.hget(view.keys.repeat_spec("k"), "spec")
    keys = (view.keys.stream, view.keys.delayed, view.keys.repeat, view.keys.repeat_spec("k"))
    arguments = (due, due + HOUR_MS, 1000, "k", 0, packed, "tick", due, b"envelope")
    async with open_client(server.url, scripts=(FIRE,)) as pipe:
        assert await pipe.run(FIRE, keys, arguments) == [1, 0, b""]
        assert await pipe.run(FIRE, keys, arguments) == [-1, 0, b""]
    assert [fields for _, fields in view.entries()] == [[b"d", b"envelope", b"n", b"tick"]]
    assert (next_fire(view, "k"), fired(view, "k")) == (due + HOUR_MS, 1)


# --- bad specs and keys


@pytest.mark.servers
async def test_unreadable_specs_are_set_aside_and_the_others_fire(server: Server | Cluster, troubles: Troubles) -> None:
    view = QueueView(server, "q")
    due = view.now_ms() - 1
    view.client.hset(view.keys.repeat_spec("garbage"), "spec", b"\xc1\x00")
    make_due(view, "garbage", due - 2)
    make_due(view, "dangling", due - 1)
    make_due(view, b"\xff not text", due - 1)
    write_spec(view, hourly(), due)
    async with running(scheduler(server.url)):
        await until(view.length, "the good one fires")
    assert view.client.zrange(view.keys.repeat, 0, -1) == [b"k"]
    # Unreadable specs are kept: another version may be able to read them.
    assert repeat_keys(view) == {":repeat", ":repeat:spec:k", ":repeat:spec:garbage"}
    assert len(troubles) == 3
    assert all("it will not fire" in text for text in troubles)


async def test_a_key_of_the_wrong_type_affects_one_spec_only(server: Server, troubles: Troubles) -> None:
    view = QueueView(server, "q")
    due = view.now_ms() - 1
    view.client.set(view.keys.repeat_spec("odd"), "of a wrong type")
    make_due(view, "odd", due - 1)
    write_spec(view, hourly(), due)
    async with running(scheduler(server.url)):
        for number in range(1, 6):
            await until(lambda number=number: fired(view, "k") == number, "the good one fires", within_secs=2)
            make_due(view, "k", view.now_ms() - 1)
        view.client.delete(view.keys.repeat_spec("odd"))
        write_spec(view, hourly(key="odd"), due)
        await until(lambda: fired(view, "odd"), "the other one fires once its key is repaired")
    assert len(troubles.about("WRONGTYPE")) == 1


@pytest.mark.parametrize("broken", [1, 250])
async def test_specs_that_cannot_be_fired_do_not_delay_the_others(
    server: Server, broken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tampu.maintain.scheduler.RETRY_SECS", 600)
    view = QueueView(server, "q")
    before = view.errors_given()["WRONGTYPE"]
    due = view.now_ms() - 1
    for number in range(broken):
        view.client.set(view.keys.repeat_spec(f"odd-{number}"), "of a wrong type")
        make_due(view, f"odd-{number}", due - 1)
    for number in range(300):
        write_spec(view, hourly(key=f"good-{number}"), due)
    async with running(scheduler(server.url, batch=100, tick_interval_ms=60_000)):
        await until(lambda: view.length() == 300, "all others fire", within_secs=20)
    assert view.errors_given()["WRONGTYPE"] - before == broken, "each is tried once, and then set aside"


@pytest.mark.parametrize("score", [float("-inf"), -5, 0, 0.25])
async def test_a_score_that_is_not_a_time_is_due(server: Server, score: float) -> None:
    view = QueueView(server, "q")
    write_spec(view, hourly(), score)
    write_spec(view, hourly(key="good"), view.now_ms() - 1)
    async with running(scheduler(server.url)):
        await until(lambda: view.length() == 2, "both fire")
    assert (next_fire(view, "k") or 0) > view.now_ms()


async def test_a_counter_that_is_not_a_number_counts_from_zero(server: Server) -> None:
    view = QueueView(server, "q")
    write_spec(view, hourly(limit=2), view.now_ms() - 1)
    view.client.hset(view.keys.repeat_spec("k"), "fired", "many")
    async with running(scheduler(server.url)):
        await until(view.length, "it fires")
    assert fired(view, "k") == 1


@pytest.mark.servers
async def test_a_delayed_set_of_the_wrong_type_repeats_no_fire(server: Server | Cluster, troubles: Troubles) -> None:
    view = QueueView(server, "q")
    view.client.set(view.keys.delayed, "of a wrong type")
    due = view.now_ms() - 4 * HOUR_MS - 1
    write_spec(view, hourly(missed_fires=MissedFiresPolicy.fire_all(10)), due)
    async with running(scheduler(server.url, max_stream_len=2)):
        await until(lambda: troubles, "it was refused")
        assert view.length() == 2
        assert (next_fire(view, "k"), fired(view, "k")) == (due + 2 * HOUR_MS, 2)
        view.client.delete(view.keys.delayed)
        await until(lambda: next_fire(view, "k") == due + 5 * HOUR_MS, "it fires once possible")
    assert view.ids() + view.delayed_ids() == [fire_id("k", due + HOUR_MS * number) for number in range(5)]
    assert fired(view, "k") == 5


@pytest.mark.servers("valkey", "redis62", "redis86")
@pytest.mark.parametrize("forbidden", ["xadd", "zadd", "hset"])
async def test_an_acl_that_forbids_half_of_a_fire_repeats_no_fire(
    server: Server, forbidden: str, troubles: Troubles
) -> None:
    view = QueueView(server, "q")
    due = view.now_ms() - 1
    write_spec(view, hourly(), due)
    with acl_user(server, "half", "pw", "~*", "+@all", f"-{forbidden}"):
        url = server.url.replace("redis://", "redis://half:pw@")
        async with running(scheduler(url)):
            await until(lambda: troubles, "it was refused")
            assert (view.length(), next_fire(view, "k"), fired(view, "k")) == (0, due, 0)
            view.client.execute_command("ACL", "SETUSER", "half", f"+{forbidden}")
            await until(lambda: fired(view, "k"), "it fires once allowed")
    assert view.ids() == [fire_id("k", due)]


@pytest.mark.servers("valkey", "redis62", "redis70", "redis86")
async def test_a_server_without_memory_loses_no_fire(server: Server, troubles: Troubles) -> None:
    view = QueueView(server, "q")
    due = view.now_ms() + 300
    write_spec(view, hourly(), due)
    write_spec(view, hourly(key="last", limit=1), due)
    async with running(scheduler(server.url)):
        await until(lambda: view.client.exists(view.keys.scheduler_lock), "it leads")
        server.config_set(maxmemory=1, maxmemory_policy="noeviction")
        await until(lambda: troubles.about("OOM"), "it was refused")
        assert view.length() == 0
        server.config_set(maxmemory=0)
        await until(lambda: view.length() == 2, "both fire")
    assert sorted(view.ids()) == sorted([fire_id("k", due), fire_id("last", due)])
    assert next_fire(view, "last") is None


@pytest.mark.servers
async def test_a_scheduler_survives_a_script_flush(server: Server | Cluster) -> None:
    view = QueueView(server, "q")
    async with running(scheduler(server.url)):
        await until(lambda: view.client.exists(view.keys.scheduler_lock), "it leads")
        view.client.script_flush()
        write_spec(view, hourly(), view.now_ms() - 1)
        await until(view.length, "it fires")


async def test_a_scheduler_survives_a_server_that_is_killed_and_comes_back(
    fresh_server: Callable[..., Server],
) -> None:
    server = fresh_server(appendonly="yes", appendfsync="always")
    view = QueueView(server, "q")
    due = view.now_ms() + 300
    write_spec(view, hourly(), due)
    async with running(scheduler(server.url)):
        await until(lambda: view.client.exists(view.keys.scheduler_lock), "it leads")
        server.kill()
        server.start()
        view = QueueView(server, "q")
        await until(view.length, "it fires")
    assert view.ids() == [fire_id("k", due)]


@pytest.mark.servers("valkey", "redis62", "redis86")
@pytest.mark.parametrize("key", ["repeat", "stream", "scheduler_lock"])
async def test_a_scheduler_recovers_from_a_key_of_the_wrong_type(server: Server, key: str, troubles: Troubles) -> None:
    view = QueueView(server, "q")
    view.client.set(getattr(view.keys, key), "wrong") if key != "scheduler_lock" else view.client.sadd(
        view.keys.scheduler_lock, "wrong"
    )
    due = view.now_ms() - 1
    if key != "repeat":
        write_spec(view, hourly(), due)
    async with running(scheduler(server.url)):
        await until(lambda: troubles.about("WRONGTYPE"), "it has met it")
        view.client.delete(getattr(view.keys, key))
        if key == "repeat":
            write_spec(view, hourly(), due)
        await until(lambda: fired(view, "k"), "it works")
    assert view.ids() == [fire_id("k", due)]
