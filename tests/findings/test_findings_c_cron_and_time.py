"""Faults of ChasquiMQ about cron and clocks, findings 21 to 25: tampu does not have them."""

from __future__ import annotations

import time
from datetime import datetime
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

import pytest

from support.parts import consuming, running
from support.producers import open_producer
from support.queues import QueueView
from support.repeating import next_fire, register, repeat_keys, write_spec
from support.waiting import until
from tampu import (
    AddOptions,
    BackoffKind,
    BackoffSpec,
    ConfigError,
    Job,
    JobRetryOverride,
    MissedFiresPolicy,
    RepeatableSpec,
    RepeatPattern,
    Scheduler,
    SchedulerConfig,
)
from tampu.wire.repeat import StoredSpec
from tampu.wire.ulid import decode_ulid_time

if TYPE_CHECKING:
    from servers.cluster import Cluster
    from servers.process import Server

NEW_YORK = ZoneInfo("America/New_York")


async def fires_of(server: Server | Cluster, expression: str, due: datetime, count: int) -> list[datetime]:
    """Return the first fires that the scheduler catches up on, of a spec that was due in the past."""
    view = QueueView(server, "q")
    pattern = RepeatPattern.cron(expression, tz="America/New_York")
    policy = MissedFiresPolicy.fire_all(count)
    spec = StoredSpec(key="k", job_name="n", pattern=pattern, payload_slot=b"\xc0", missed_fires=policy)
    write_spec(view, spec, due.timestamp() * 1000)
    async with running(Scheduler(server.url, SchedulerConfig(queue_name="q"))):
        await until(lambda: view.length() == count, "they are fired")
        assert (next_fire(view, "k") or 0) > view.now_ms()
    return [datetime.fromtimestamp(decode_ulid_time(job_id) / 1000, NEW_YORK) for job_id in view.ids()]


@pytest.mark.servers
async def test_finding_21_cron_fires_at_whole_seconds(server: Server | Cluster) -> None:
    view = QueueView(server, "q")
    key = await register(view, RepeatPattern.cron("* * * * * *"))
    assert (next_fire(view, key) or 0) % 1000 == 0
    async with running(Scheduler(server.url, SchedulerConfig(queue_name="q"))):
        await until(view.length, "it fires")
    [job_id] = view.ids()[:1]
    assert decode_ulid_time(job_id) % 1000 == 0
    assert (next_fire(view, key) or 0) % 1000 == 0


@pytest.mark.servers("valkey", "redis86")
async def test_finding_22_a_daily_job_before_a_dst_gap_fires_once(server: Server) -> None:
    # On 10 March 2024 clocks went from 02:00 to 03:00.
    fires = await fires_of(server, "30 1 * * *", datetime(2024, 3, 9, 1, 30, tzinfo=NEW_YORK), 4)
    assert [f"{fire:%m-%d %H:%M}" for fire in fires] == ["03-09 01:30", "03-10 01:30", "03-11 01:30", "03-12 01:30"]


@pytest.mark.servers("valkey", "redis86")
async def test_finding_23_both_hours_of_a_dst_overlap_fire(server: Server) -> None:
    # On 3 November 2024 clocks went from 02:00 back to 01:00.
    midnight = datetime(2024, 11, 3, 0, 0, tzinfo=NEW_YORK)
    fires = await fires_of(server, "*/30 * * * *", midnight, 8)
    assert [fire.timestamp() - midnight.timestamp() for fire in fires] == [1800.0 * number for number in range(8)]
    assert [f"{fire:%H:%M %Z}" for fire in fires[2:6]] == ["01:00 EDT", "01:30 EDT", "01:00 EST", "01:30 EST"]
    # Starting within the repeated hour.
    pattern = RepeatPattern.cron("*/30 * * * *", tz="America/New_York")
    for fire in fires:
        assert pattern.next_fire_ms(int(fire.timestamp() * 1000)) == int((fire.timestamp() + 1800) * 1000)


@pytest.mark.servers
async def test_finding_24_delays_retries_and_fires_use_the_servers_clock(
    server: Server | Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = QueueView(server, "q")
    now = time.time
    # This machine's clock is two hours fast.
    monkeypatch.setattr(time, "time", lambda: now() + 7200)
    monkeypatch.setattr(time, "time_ns", lambda: int((now() + 7200) * 1e9))

    async def fail(job: Job[Any]) -> None:
        raise ValueError("on purpose")

    retry = JobRetryOverride(2, BackoffSpec(BackoffKind.FIXED, 60_000, max_delay_ms=60_000, jitter_ms=0))
    async with open_producer(server.url) as producer:
        delayed = await producer.add_in(60, 1)
        await producer.upsert_repeatable(RepeatableSpec("n", RepeatPattern.every(60_000), 1, key="k"))
        retried = await producer.add_with_options(2, AddOptions(retry=retry))
        async with consuming(server.url, fail, queue_name="q"):
            await until(lambda: len(view.delayed()) == 2, "it waits for its retry")
    due = dict(zip(view.delayed_ids(), (score for _, score in view.delayed()), strict=True))
    due["k"] = next_fire(view, "k") or 0
    assert due.keys() == {delayed, retried, "k"}
    for due_ms in due.values():
        assert 0 < due_ms - view.now_ms() <= 60_000


@pytest.mark.servers("valkey", "redis86")
async def test_finding_25_repeatables_with_bad_names_or_zones_are_refused(server: Server) -> None:
    view = QueueView(server, "q")
    with pytest.raises(ConfigError, match=r"job_name must be at most 256 bytes of UTF-8 \(it has 257\)"):
        await register(view, RepeatPattern.every(1000), "é" * 128 + "x")
    with pytest.raises(ConfigError, match=r"did you mean 'America/Lima'\?"):
        await register(view, RepeatPattern.cron("0 9 * * *", tz="america/lima"))
    with pytest.raises(ConfigError, match=r"minutes from 00 to 59"):
        await register(view, RepeatPattern.cron("0 9 * * *", tz="+05:99"))
    assert repeat_keys(view) == set()
    key = await register(view, RepeatPattern.cron("0 9 * * *", tz="+05:30"), "é" * 128)
    shown = datetime.fromtimestamp((next_fire(view, key) or 0) / 1000, ZoneInfo("Asia/Kolkata"))
    assert (shown.hour, shown.minute) == (9, 0)
