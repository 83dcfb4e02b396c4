"""Which jobs the scheduler fires, how often, and when a spec is removed."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

import pytest

from support.parts import consuming, running
from support.producers import open_producer
from support.proxy import Proxy
from support.queues import QueueView
from support.repeating import fired, make_due, next_fire, register, repeat_keys, write_spec
from support.waiting import until
from tampu import (
    ConfigError,
    Job,
    MissedFiresPolicy,
    Promoter,
    PromoterConfig,
    RepeatableSpec,
    RepeatPattern,
    Scheduler,
    SchedulerConfig,
)
from tampu.maintain.scheduler import fire_id
from tampu.wire.repeat import StoredSpec, encode_spec

if TYPE_CHECKING:
    from servers.cluster import Cluster
    from servers.process import Server

#: Too long to poll within a test: jobs fire only because the scheduler knew when they were due.
NEVER_MS = 3_600_000
HOUR_MS = 3_600_000


def scheduler(server: Server | Cluster, **config: Any) -> Scheduler:
    return Scheduler(server.url, SchedulerConfig(**{"queue_name": "q", "tick_interval_ms": 20} | config))


def hourly(**spec: Any) -> StoredSpec:
    pattern = RepeatPattern.every(HOUR_MS)
    return StoredSpec(**{"key": "k", "job_name": "tick", "pattern": pattern, "payload_slot": b"\xc4\x01\x07"} | spec)


@pytest.mark.servers
async def test_a_due_repeatable_fires_one_job_of_its_name_and_payload(server: Server | Cluster) -> None:
    view = QueueView(server, "q")
    key = await register(view, RepeatPattern.every(HOUR_MS), "mail")
    due = view.now_ms() - 50
    make_due(view, key, due)
    async with running(scheduler(server)):
        await until(view.length, "it has fired")
        await until(lambda: next_fire(view, key) == due + HOUR_MS, "its next fire keeps the interval")
    [job] = view.jobs()
    assert (job.id, job.name, job.payload, job.attempt, job.retry) == (fire_id(key, due), "mail", {"k": 1}, 0, None)
    assert abs(job.created_at_ms - view.now_ms()) < 60_000
    assert fired(view, key) == 1


@pytest.mark.servers
async def test_missed_fires_follow_the_policy(server: Server | Cluster) -> None:
    view = QueueView(server, "q")
    policies = {
        "skip": (MissedFiresPolicy.skip(), [10]),
        "once": (MissedFiresPolicy.fire_once(), [10]),
        "three": (MissedFiresPolicy.fire_all(3), [0, 1, 2]),
        "all": (MissedFiresPolicy.fire_all(50), [*range(11)]),
    }
    due = view.now_ms() - 10 * HOUR_MS - 1000
    for name, (policy, _) in policies.items():
        write_spec(view, hourly(key=name, job_name=name, missed_fires=policy), due)
    async with running(scheduler(server)):
        await until(
            lambda: all((next_fire(view, name) or 0) > view.now_ms() for name in policies), "all are up to date"
        )
    for name, (_, expected) in policies.items():
        ids = [job.id for job in view.jobs() if job.name == name]
        assert ids == [fire_id(name, due + hours * HOUR_MS) for hours in expected]
        assert next_fire(view, name) == due + 11 * HOUR_MS
        assert fired(view, name) == len(expected)


async def test_fire_all_catches_up_in_several_calls(server: Server) -> None:
    view = QueueView(server, "q")
    due = view.now_ms() - 10_000 * 1000
    pattern = RepeatPattern.every(1000)
    policy = MissedFiresPolicy.fire_all(950)
    write_spec(
        view, hourly(pattern=pattern, missed_fires=policy, payload_slot=b"\xc6\x00\x00\x04\x00" + b"x" * 1024), due
    )
    async with running(scheduler(server)):
        await until(lambda: (next_fire(view, "k") or 0) > view.now_ms() - 1000, "it is up to date")
    assert [job.id for job in view.jobs()][:950] == [fire_id("k", due + 1000 * number) for number in range(950)]
    assert view.length() < 960  # one per second since then
    assert fired(view, "k") == view.length()


@pytest.mark.servers
async def test_a_repeatable_is_removed_after_its_limit(server: Server | Cluster) -> None:
    view = QueueView(server, "q")
    await register(view, RepeatPattern.every(20), limit=3)
    async with running(scheduler(server)):
        await until(lambda: not repeat_keys(view), "it is gone")
    assert view.length() == 3


async def test_a_limit_holds_while_catching_up(server: Server) -> None:
    view = QueueView(server, "q")
    policy = MissedFiresPolicy.fire_all(500)
    write_spec(view, hourly(missed_fires=policy, limit=4), view.now_ms() - 500 * HOUR_MS)
    async with running(scheduler(server)):
        await until(lambda: not repeat_keys(view), "it is gone")
    assert view.length() == 4


async def test_a_limit_of_zero_means_no_limit(server: Server) -> None:
    view = QueueView(server, "q")
    write_spec(view, hourly(limit=0), view.now_ms() - 1)
    async with running(scheduler(server)):
        await until(view.length, "it fires")
    assert next_fire(view, "k") is not None


@pytest.mark.servers
async def test_the_first_fire_comes_after_start_after(server: Server | Cluster) -> None:
    view = QueueView(server, "q")
    start = view.now_ms() + 1500
    policy = MissedFiresPolicy.fire_all(100)  # on a busy machine the first may be late
    key = await register(view, RepeatPattern.every(100), start_after_ms=start, missed_fires=policy)
    assert next_fire(view, key) == start + 100
    async with running(scheduler(server, tick_interval_ms=NEVER_MS)):
        await until(view.length, "it fires", within_secs=5)
    assert view.ids()[0] == fire_id(key, start + 100)
    assert int(view.entries()[0][0].split(b"-")[0]) >= start + 100


@pytest.mark.servers
async def test_a_fire_at_exactly_end_before_is_allowed_and_none_after_it(server: Server | Cluster) -> None:
    view = QueueView(server, "q")
    due = view.now_ms() - 10_000
    policy = MissedFiresPolicy.fire_all(50)
    pattern = RepeatPattern.every(1000)
    write_spec(view, hourly(key="exact", pattern=pattern, missed_fires=policy, end_before_ms=due + 3000), due)
    write_spec(view, hourly(key="short", pattern=pattern, missed_fires=policy, end_before_ms=due + 2999), due)
    async with running(scheduler(server)):
        await until(lambda: not repeat_keys(view), "both are over")
    expected = [fire_id(key, due + 1000 * n) for key, last in (("exact", 3), ("short", 2)) for n in range(last + 1)]
    assert sorted(view.ids()) == sorted(expected)


async def test_an_end_before_the_first_fire_is_refused(server: Server) -> None:
    view = QueueView(server, "q")
    now = view.now_ms()
    with pytest.raises(ConfigError, match=rf"end_before_ms must not be before the first fire \(\d+\); got {now}"):
        await register(view, RepeatPattern.every(1000), end_before_ms=now)
    assert repeat_keys(view) == set()


@pytest.mark.servers
async def test_the_last_fire_of_a_cron_with_a_year_removes_the_spec(server: Server | Cluster) -> None:
    view = QueueView(server, "q")
    soon = datetime.fromtimestamp(view.now_ms() // 1000 + 2, UTC)
    await register(view, RepeatPattern.cron(soon.strftime("%S %M %H %d %m * %Y")))
    async with running(scheduler(server, tick_interval_ms=NEVER_MS, lock_ttl_secs=600)):
        await until(view.length, "it fires", within_secs=10)
        await until(lambda: not repeat_keys(view), "the spec is gone")
    [job] = view.jobs()
    assert job.id == fire_id(f"tick::cron:{soon:%S %M %H %d %m} * {soon:%Y}:UTC", int(soon.timestamp()) * 1000)


@pytest.mark.parametrize("zone", ["America/Lima", "Asia/Kolkata", "Australia/Lord_Howe", "Europe/London"])
async def test_a_cron_fires_in_its_time_zone(server: Server, zone: str) -> None:
    view = QueueView(server, "q")
    key = await register(view, RepeatPattern.cron("30 9 * * *", tz=zone))
    first = next_fire(view, key) or 0
    shown = datetime.fromtimestamp(first / 1000, ZoneInfo(zone))
    assert (shown.hour, shown.minute, shown.second, shown.microsecond) == (9, 30, 0, 0)
    assert timedelta(0) < shown - datetime.fromtimestamp(view.now_ms() / 1000, UTC) <= timedelta(days=1, hours=1)
    yesterday = datetime(shown.year, shown.month, shown.day, 9, 30, tzinfo=ZoneInfo(zone)) - timedelta(days=1)
    make_due(view, key, yesterday.timestamp() * 1000)
    async with running(scheduler(server)):
        await until(lambda: next_fire(view, key) == first, "it has fired")
    assert view.ids() == [fire_id(key, int(yesterday.timestamp() * 1000))]


@pytest.mark.servers
async def test_an_interval_shorter_than_the_tick_fires_every_time(server: Server | Cluster) -> None:
    view = QueueView(server, "q")
    key = await register(view, RepeatPattern.every(100))
    first = next_fire(view, key) or 0
    async with running(scheduler(server, tick_interval_ms=NEVER_MS, lock_ttl_secs=600)):
        await until(lambda: view.length() >= 5, "it fires repeatedly", within_secs=10)
    times = {fire_id(key, first + 100 * number): number for number in range(1000)}
    numbers = [times[job_id] for job_id in view.ids()]
    assert numbers == sorted(set(numbers))  # a busy machine may skip one, but none is repeated or off the interval


@pytest.mark.servers
async def test_registering_again_starts_a_new_count_and_a_new_rhythm(server: Server | Cluster) -> None:
    view = QueueView(server, "q")
    key = await register(view, RepeatPattern.every(HOUR_MS), limit=10)
    for count in range(1, 5):
        make_due(view, key, view.now_ms() - 1)
        async with running(scheduler(server)):
            await until(lambda count=count: fired(view, key) == count, "it has fired")
    before = next_fire(view, key) or 0
    await register(view, RepeatPattern.every(HOUR_MS), limit=2)
    assert fired(view, key) == 0
    assert (next_fire(view, key) or 0) >= before
    for _ in range(2):
        make_due(view, key, view.now_ms() - 1)
        length = view.length()
        async with running(scheduler(server)):
            await until(lambda length=length: view.length() == length + 1, "it fires")
    await until(lambda: not repeat_keys(view), "it is gone after two")
    assert view.length() == 6


@pytest.mark.servers
async def test_ensuring_an_identical_spec_changes_nothing(server: Server | Cluster) -> None:
    view = QueueView(server, "q")
    spec = RepeatableSpec("tick", RepeatPattern.every(HOUR_MS), {"k": 1}, limit=10)
    async with open_producer(server.url) as producer:
        key = await producer.ensure_repeatable(spec)
        make_due(view, key, view.now_ms() - 1)
        async with running(scheduler(server)):
            await until(lambda: fired(view, key) == 1, "it has fired")
        before = next_fire(view, key)
        assert await producer.ensure_repeatable(spec) == key
        assert (next_fire(view, key), fired(view, key)) == (before, 1)
        await producer.ensure_repeatable(spec.with_limit(5))
        assert fired(view, key) == 0
        view.client.zrem(view.keys.repeat, key)  # set aside by an implementation that could not read it
        await producer.ensure_repeatable(spec.with_limit(5))
        assert next_fire(view, key) is not None
        assert await producer.remove_repeatable(key)
        await producer.ensure_repeatable(spec)
        assert next_fire(view, key) is not None


@pytest.mark.servers
async def test_fires_wait_in_the_delayed_set_while_the_stream_is_full(server: Server | Cluster) -> None:
    view = QueueView(server, "q")
    policy = MissedFiresPolicy.fire_all(10)
    due = view.now_ms() - 4 * HOUR_MS - 1
    write_spec(view, hourly(missed_fires=policy), due)
    async with running(scheduler(server, max_stream_len=2)):
        await until(lambda: next_fire(view, "k") == due + 5 * HOUR_MS, "it has fired")
    ids = [fire_id("k", due + HOUR_MS * number) for number in range(5)]
    assert view.ids() == ids[:2]
    assert view.delayed_ids() == ids[2:]
    assert all(score <= view.now_ms() for _, score in view.delayed())
    async with running(Promoter(server.url, PromoterConfig(queue_name="q"))):
        await until(lambda: view.length() == 5, "the promoter moves them into the stream")
    assert view.ids() == ids
    assert {job.name for job in view.jobs()} == {"tick"}


async def test_fires_use_the_servers_clock(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    view = QueueView(server, "q")
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 7200)
    monkeypatch.setattr(time, "time_ns", lambda: int((now() + 7200) * 1e9))
    key = await register(view, RepeatPattern.every(HOUR_MS))
    assert abs((next_fire(view, key) or 0) - view.now_ms() - HOUR_MS) < 60_000
    make_due(view, key, view.now_ms() + 300)
    async with running(scheduler(server, tick_interval_ms=NEVER_MS)):
        await until(view.length, "it fires", within_secs=5)
    [job] = view.jobs()
    assert abs(job.created_at_ms - view.now_ms()) < 60_000
    assert int(view.entries()[0][0].split(b"-")[0]) >= (next_fire(view, key) or 0) - HOUR_MS


async def test_a_scheduler_keeps_going_until_nothing_is_due(server: Server) -> None:
    view = QueueView(server, "q")
    due = view.now_ms() - 1
    for number in range(300):
        write_spec(view, hourly(key=f"k{number}"), due)
    async with running(scheduler(server, batch=16, tick_interval_ms=NEVER_MS, lock_ttl_secs=600)):
        await until(lambda: view.length() == 300, "all have fired", within_secs=10)
    assert len(set(view.ids())) == 300


@pytest.mark.servers
async def test_a_worker_fires_by_default(server: Server | Cluster) -> None:
    view = QueueView(server, "q")
    write_spec(view, hourly(), view.now_ms() - 1)
    ran: list[Any] = []

    async def handler(job: Job[Any]) -> None:
        ran.append((job.name, job.payload))

    async with consuming(server.url, handler, queue_name="q"):
        await until(lambda: ran, "it ran")
        assert view.client.exists(view.keys.scheduler_lock)
    assert ran == [("tick", 7)]
    assert not view.client.exists(view.keys.scheduler_lock)


async def test_a_worker_with_run_scheduler_off_fires_nothing(server: Server) -> None:
    view = QueueView(server, "q")
    write_spec(view, hourly(), view.now_ms() - 1)
    ran: list[str] = []

    async def handler(job: Job[Any]) -> None:
        ran.append(job.id)

    async with consuming(server.url, handler, queue_name="q", run_scheduler=False):
        async with open_producer(server.url) as producer:
            job_id = await producer.add(1)
        await until(lambda: ran, "the worker works")
    assert ran == [job_id]
    assert fired(view, "k") == 0


@pytest.mark.servers
async def test_one_process_may_fire_for_several_queues(server: Server | Cluster) -> None:
    views = [QueueView(server, name) for name in ("one", "two", "three")]
    for view in views:
        write_spec(view, hourly(job_name=view.name), view.now_ms() - 1)
    async with running(*(scheduler(server, queue_name=view.name) for view in views)):
        for view in views:
            await until(view.length, f"{view.name} has its job")
    assert [[job.name for job in view.jobs()] for view in views] == [["one"], ["two"], ["three"]]


# --- many schedules, slow connection


@pytest.mark.timeout(120)
async def test_many_schedules_at_10_ms_round_trip_skip_no_fire(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """800 schedules are due three times each, 2 s apart: a scheduler that fired one by one would fall behind."""
    view = QueueView(server, "q")
    specs = [hourly(key=f"k{number}", pattern=RepeatPattern.every(2000)) for number in range(800)]
    first = view.now_ms() + 1000
    for number, spec in enumerate(specs):
        write_spec(view, spec, first + number)
    async with Proxy(server.address, delay_secs=0.005) as proxy:
        config = SchedulerConfig(queue_name="q")
        async with running(Scheduler(proxy.url, config)):
            await until(lambda: view.length() >= 2400, "all have fired three times", within_secs=30)
    assert not [record for record in caplog.records if "skipped" in record.message]


async def test_skipped_fires_are_logged(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    view = QueueView(server, "q")
    write_spec(view, hourly(pattern=RepeatPattern.every(1000)), view.now_ms() - 5500)
    async with running(scheduler(server)):
        await until(view.length, "it has fired")
        await until(lambda: "5 fires in total, schedules affected: 1" in caplog.text, "the skipped fires are logged")


@pytest.mark.timeout(120)
async def test_five_thousand_crons_due_at_once_fire_in_batches(server: Server) -> None:
    view = QueueView(server, "q")
    pattern = RepeatPattern.cron("0 0 * * *", tz="Europe/Berlin")
    due = view.now_ms() - 1
    pipeline = view.client.pipeline(transaction=False)
    for number in range(5000):
        spec = hourly(key=f"k{number}", pattern=pattern)
        pipeline.hset(view.keys.repeat_spec(spec.key), "spec", encode_spec(spec))
        pipeline.zadd(view.keys.repeat, {spec.key: due})
    pipeline.execute()
    async with Proxy(server.address, delay_secs=0.005) as proxy:
        started = time.monotonic()
        async with running(Scheduler(proxy.url, SchedulerConfig(queue_name="q"))):
            await until(lambda: view.length() == 5000, "all have fired", within_secs=30)
        took = time.monotonic() - started
    assert took < 20, "one by one they would take 100 s; in batches, on an idle machine, 3 s"
