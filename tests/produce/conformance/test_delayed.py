"""Delayed jobs: score, member, index, marker and their TTLs in the wire format."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

import pytest

from support.producers import open_producer
from tampu.errors import ConfigError
from tampu.produce.adder import Minter
from tampu.produce.options import AddOptions
from tampu.wire.entry import encode_delayed_member
from tampu.wire.envelope import encode_job
from tampu.wire.retry import JobRetryOverride

if TYPE_CHECKING:
    from servers.cluster import Cluster
    from servers.process import Server
    from support.queues import QueueView
    from tampu.produce.producer import Producer

INDEX_TTL_SECS = 3600


@pytest.mark.servers
async def test_a_delayed_add_is_a_member_scored_by_the_servers_clock(producer: Producer[Any], view: QueueView) -> None:
    before = view.now_ms()
    job_id = await producer.add_in(90, {"x": 1})
    after = view.now_ms()
    ((member, score),) = view.delayed()
    (job,) = view.delayed_jobs()
    assert before + 90_000 <= score <= after + 90_000
    assert (job.id, job.payload, job.name) == (job_id, {"x": 1}, "")
    assert member == b"\x00\x00\x00\x00" + encode_job(job)
    assert view.length() == 0


@pytest.mark.servers
@pytest.mark.parametrize("delay", [timedelta(minutes=1, milliseconds=500), 60.5])
async def test_a_delay_is_a_timedelta_or_seconds(producer: Producer[Any], view: QueueView, delay: Any) -> None:
    before = view.now_ms()
    await producer.add_in(delay, 1)
    ((_, score),) = view.delayed()
    assert before + 60_500 <= score <= view.now_ms() + 60_500


@pytest.mark.servers
@pytest.mark.parametrize(
    "run_at",
    [
        datetime(2040, 1, 2, 3, 4, 5, 678_000, tzinfo=UTC),
        datetime(2040, 1, 2, 3, 4, 5, 678_000),
        datetime(2040, 1, 2, 8, 4, 5, 678_000, tzinfo=timezone(timedelta(hours=5))),
        datetime(2040, 1, 2, 3, 4, 5, 678_000, tzinfo=UTC).timestamp(),
    ],
)
async def test_an_instant_is_a_datetime_or_epoch_seconds(
    server: Server | Cluster, view: QueueView, run_at: Any
) -> None:
    async with open_producer(server.url, max_delay_secs=0) as producer:
        await producer.add_at(run_at, 1)
    ((_, score),) = view.delayed()
    assert score == 2_209_086_245_678


@pytest.mark.servers
async def test_the_name_is_stored_in_front_of_the_envelope(producer: Producer[Any], view: QueueView) -> None:
    retry = JobRetryOverride(max_attempts=2)
    options = AddOptions(name="Grüße", retry=retry)
    await producer.add_in_with_options(90, 1, options)
    await producer.add_at_with_options(view.now_ms() / 1000 + 100, 2, options)
    for (member, _), job in zip(view.delayed(), view.delayed_jobs(), strict=True):
        assert member == encode_delayed_member("Grüße", encode_job(job))
        assert member[:4] == b"\x07\x00\x00\x00"
        assert (job.name, job.retry) == ("Grüße", retry)


@pytest.mark.servers
@pytest.mark.parametrize("delay", [1.0, 1.5, 90.9, 86_400.0])
async def test_index_and_marker_outlive_the_delay(producer: Producer[Any], view: QueueView, delay: float) -> None:
    await producer.add_in_with_id("mine", delay, 1)
    minted = await producer.add_in(delay, 2)
    expected = max(1, int(delay)) + INDEX_TTL_SECS
    ttls = view.all_keys()
    for key in (":dlid:mine", ":didx:mine", ":due"):
        assert expected - 2 <= ttls[key] <= expected
    assert not {f":dlid:{minted}", f":didx:{minted}"} & set(ttls)
    client, keys = view.client, view.keys
    members = dict(zip(view.delayed_ids(), (member for member, _ in view.delayed()), strict=True))
    assert client.get(keys.dedup_marker("mine")) == b"1"
    assert client.get(keys.delayed_index("mine")) == members["mine"]
    scores = dict(view.delayed())
    due_time = int(scores[members[minted]]).to_bytes(6, "big")
    assert client.hgetall(keys.due) == {minted[-10:].encode(): due_time}, "not a second copy of the job"


@pytest.mark.servers
async def test_the_dedup_ttl_comes_from_the_settings(server: Server | Cluster, view: QueueView) -> None:
    async with open_producer(server.url, dedup_ttl_secs=100) as producer:
        await producer.add_with_id("now", 1)
        await producer.add_in_with_id("later", 50, 1)
        await producer.add_in(50, 1)
    ttls = view.all_keys()
    assert 98 <= ttls[":dlid:now"] <= 100
    assert 148 <= ttls[":dlid:later"] <= 150
    assert 148 <= ttls[":didx:later"] <= 150
    assert 3648 <= ttls[":due"] <= 3650


@pytest.mark.servers
async def test_due_times_are_kept_until_the_last_job_is_due(producer: Producer[Any], view: QueueView) -> None:
    for delay in (100, 5000, 50):
        await producer.add_in(delay, 1)
        assert view.all_keys()[":due"] >= delay + INDEX_TTL_SECS - 2
    assert view.all_keys()[":due"] >= 5000 + INDEX_TTL_SECS - 2, "a shorter delay does not shorten it"


@pytest.mark.servers
async def test_due_times_that_other_promoters_leave_behind_are_dropped(
    producer: Producer[Any], view: QueueView
) -> None:
    overdue_ms = view.now_ms() - 60_000
    long_ago, overdue = (ms.to_bytes(6, "big") for ms in (1_700_000_000_000, overdue_ms))
    view.client.hset(view.keys.due, mapping={f"promoted {number}": long_ago for number in range(200)})
    view.client.hset(view.keys.due, "overdue", overdue)
    added: list[str] = []
    while view.client.hlen(view.keys.due) > len(added) + 1:
        assert len(added) < 5000, "it has not dropped them all in 100 windows"
        added += await producer.add_in_bulk(60, range(50))
    due = view.client.hgetall(view.keys.due)
    assert due[b"overdue"] == overdue, "it may still be in the delayed set"
    assert {job_id[-10:].encode() for job_id in added} <= set(due)


@pytest.mark.servers
async def test_no_delay_and_a_time_in_the_past_mean_now(producer: Producer[Any], view: QueueView) -> None:
    await producer.add_in(0, "a")
    await producer.add_in(timedelta(0), "b")
    await producer.add_in(0.0004, "c")
    await producer.add_at(1, "d")
    await producer.add_at(datetime(2000, 1, 1), "e")
    await producer.add_at(view.now_ms() / 1000, "f")
    await producer.add_at_with_id("g", 1, "g")
    await producer.add_in_bulk(0, ["h", "i"])
    await producer.add_in_bulk_with_ids(0, [("j", "j")])
    assert view.payloads() == ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j"]
    assert view.delayed() == []
    ttls = view.all_keys()
    assert not [key for key in ttls if key.startswith(":didx:") or key == ":due"]
    assert 3590 <= ttls[":dlid:g"] <= 3600


@pytest.mark.servers
async def test_a_delayed_bulk_shares_one_time(producer: Producer[Any], view: QueueView) -> None:
    before = view.now_ms()
    ids = await producer.add_in_bulk(100, (number for number in range(600)))
    assert sorted(view.delayed_ids()) == sorted(ids)
    assert all(before + 100_000 <= score <= view.now_ms() + 100_000 for _, score in view.delayed())
    assert view.client.hlen(view.keys.due) == 600


@pytest.mark.servers
async def test_a_delayed_bulk_with_ids(producer: Producer[Any], view: QueueView) -> None:
    items = [(f"id {number % 400}", number) for number in range(600)]
    ids = await producer.add_in_bulk_with_ids(100, items)
    assert ids == [job_id for job_id, _ in items]
    assert [job_id.is_new for job_id in ids] == [True] * 400 + [False] * 200
    assert sorted(job.payload for job in view.delayed_jobs()) == list(range(400))


@pytest.mark.servers
async def test_exactly_the_maximum_delay_is_accepted(producer: Producer[Any], view: QueueView) -> None:
    month = 30 * 24 * 3600
    await producer.add_in(month, 1)
    await producer.add_in(month + 0.9, 1)  # whole seconds count
    with pytest.raises(ConfigError, match=r"exceeds max_delay_secs \(2592000 s\)"):
        await producer.add_in(month + 1, 1)
    assert len(view.delayed()) == 2


async def test_a_maximum_delay_of_0_means_no_limit(server: Server, view: QueueView) -> None:
    async with open_producer(server.url, max_delay_secs=0) as producer:
        await producer.add_in(timedelta(days=36_500), 1)
        await producer.add_at(datetime(2500, 1, 1), 1)
    assert len(view.delayed()) == 2


async def test_a_shorter_limit_holds_for_instants_too(server: Server, view: QueueView) -> None:
    async with open_producer(server.url, max_delay_secs=10) as producer:
        with pytest.raises(ConfigError, match="exceeds max_delay_secs"):
            await producer.add_at(view.now_ms() / 1000 + 12, 1)
        await producer.add_at(view.now_ms() / 1000 + 9, 1)


async def test_the_clients_clock_does_not_matter_to_a_delay(
    server: Server, view: QueueView, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tampu.produce.producer.Minter", lambda: Minter(now_ms=lambda: 1_000_000_000_000))  # in 2001
    async with open_producer(server.url) as producer:
        before = view.now_ms()
        await producer.add_in_with_id("x", 60, 1)
        ((_, score),) = view.delayed()
        assert before + 60_000 <= score <= view.now_ms() + 60_000
        assert 3650 <= view.all_keys()[":dlid:x"] <= 3660
