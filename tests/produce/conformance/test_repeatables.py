"""Registering, listing and removing repeatable jobs. (tests/maintain tests when they fire.)"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgpack
import pytest

from support.producers import open_producer
from tampu.errors import ConfigError
from tampu.wire.repeat import MissedFiresPolicy, RepeatableMeta, RepeatableSpec, RepeatPattern, decode_spec

if TYPE_CHECKING:
    from servers.cluster import Cluster
    from servers.process import Server
    from support.queues import QueueView
    from tampu.produce.producer import Producer

EVERY = RepeatPattern.every(60_000)
CRON = RepeatPattern.cron("0 9 * * 1-5", tz="America/Lima")


def spec(pattern: RepeatPattern = EVERY, **changes: Any) -> RepeatableSpec[Any]:
    return RepeatableSpec("report", pattern, {"k": 1}, **changes)


def stored(view: QueueView, key: str) -> dict[bytes, bytes]:
    return view.client.hgetall(view.keys.repeat_spec(key))


def fires(view: QueueView) -> dict[str, int]:
    return {key.decode(): int(score) for key, score in view.client.zrange(view.keys.repeat, 0, -1, withscores=True)}


@pytest.mark.servers
async def test_a_spec_is_stored_as_the_wire_says(producer: Producer[Any], view: QueueView) -> None:
    before = view.now_ms()
    key = await producer.upsert_repeatable(spec())
    after = view.now_ms()
    assert key == "report::every:60000"
    assert before + 60_000 <= fires(view)[key] <= after + 60_000
    inner = msgpack.packb(msgpack.packb({"k": 1}), use_bin_type=True)
    expected = msgpack.packb([key, "report", {"Every": [60_000]}, inner, None, None, None, 0], use_bin_type=True)
    assert stored(view, key) == {b"spec": expected}


@pytest.mark.servers
async def test_the_key_is_given_or_made_of_name_and_pattern(producer: Producer[Any], view: QueueView) -> None:
    assert await producer.upsert_repeatable(spec(CRON)) == "report::cron:0 9 * * 1-5:America/Lima"
    assert await producer.upsert_repeatable(spec(CRON).with_key("mine")) == "mine"
    assert set(fires(view)) == {"report::cron:0 9 * * 1-5:America/Lima", "mine"}


@pytest.mark.servers
async def test_findings_5_and_6_an_upsert_restarts_and_an_ensure_does_not(
    producer: Producer[Any], view: QueueView
) -> None:
    key = await producer.upsert_repeatable(spec().with_limit(10))
    view.client.hset(view.keys.repeat_spec(key), "fired", 4)
    view.client.zadd(view.keys.repeat, {key: 5})
    # An identical spec that is ensured keeps its next fire and its count.
    assert await producer.ensure_repeatable(spec().with_limit(10)) == key
    assert fires(view) == {key: 5}
    assert stored(view, key)[b"fired"] == b"4"
    # Upserted, it loses both.
    assert await producer.upsert_repeatable(spec().with_limit(10)) == key
    assert fires(view)[key] > 5
    assert b"fired" not in stored(view, key)


@pytest.mark.servers
@pytest.mark.parametrize(
    "changed",
    [
        spec().with_limit(11),
        RepeatableSpec("report", EVERY, {"k": 2}).with_limit(10),
        spec().with_limit(10).with_missed_fires(MissedFiresPolicy.fire_once()),
    ],
)
async def test_ensuring_a_changed_spec_writes_it(
    producer: Producer[Any], view: QueueView, changed: RepeatableSpec[Any]
) -> None:
    key = await producer.ensure_repeatable(spec().with_limit(10))
    view.client.hset(view.keys.repeat_spec(key), "fired", 4)
    view.client.zadd(view.keys.repeat, {key: 5})
    assert await producer.ensure_repeatable(changed) == key
    assert fires(view)[key] > 5
    found = decode_spec(stored(view, key)[b"spec"])
    assert (found.limit, found.missed_fires) == (changed.limit, changed.missed_fires)
    assert b"fired" not in stored(view, key)


@pytest.mark.servers
async def test_ensuring_a_spec_whose_next_fire_was_lost_registers_it_again(
    producer: Producer[Any], view: QueueView
) -> None:
    key = await producer.ensure_repeatable(spec())
    view.client.delete(view.keys.repeat)
    await producer.ensure_repeatable(spec())
    assert set(fires(view)) == {key}


@pytest.mark.servers
async def test_specs_are_listed_without_payloads_the_next_to_fire_first(
    producer: Producer[Any], view: QueueView
) -> None:
    far = view.now_ms() + 10**9
    full = (
        spec(CRON)
        .with_key("full")
        .with_limit(3)
        .with_start_after_ms(far)
        .with_end_before_ms(far + 10**10)
        .with_missed_fires(MissedFiresPolicy.fire_all(5))
    )
    await producer.upsert_repeatable(full)
    key = await producer.upsert_repeatable(spec())
    first, second = await producer.list_repeatable()
    assert first == RepeatableMeta(
        key=key,
        job_name="report",
        pattern=EVERY,
        next_fire_ms=fires(view)[key],
        limit=None,
        start_after_ms=None,
        end_before_ms=None,
        missed_fires=MissedFiresPolicy.skip(),
    )
    assert (second.key, second.pattern, second.limit) == ("full", CRON, 3)
    assert (second.start_after_ms, second.end_before_ms) == (far, far + 10**10)
    assert second.missed_fires == MissedFiresPolicy.fire_all(5)
    assert second.next_fire_ms == CRON.next_fire_ms(far)
    assert [meta.key for meta in await producer.list_repeatable(1)] == [key]
    assert await producer.list_repeatable(0) == []


@pytest.mark.servers
async def test_unreadable_specs_are_left_out_of_the_list(producer: Producer[Any], view: QueueView) -> None:
    key = await producer.upsert_repeatable(spec())
    view.client.zadd(view.keys.repeat, {"dangling": 1, b"not \xff utf-8": 2, "garbage": 3})
    view.client.hset(view.keys.repeat_spec("garbage"), "spec", b"\xc1")
    assert [meta.key for meta in await producer.list_repeatable()] == [key]


@pytest.mark.servers
async def test_a_removal_returns_whether_the_spec_existed(producer: Producer[Any], view: QueueView) -> None:
    key = await producer.upsert_repeatable(spec())
    view.client.hset(view.keys.repeat_spec(key), "fired", 4)
    assert await producer.remove_repeatable(key) is True
    assert await producer.remove_repeatable(key) is False
    assert fires(view) == {}
    assert stored(view, key) == {}
    # The remains of one that another implementation left are removed too.
    view.client.hset(view.keys.repeat_spec("left"), "fired", 4)
    assert await producer.remove_repeatable("left") is False
    assert stored(view, "left") == {}


@pytest.mark.servers
async def test_many_specs_are_listed_in_one_call(producer: Producer[Any]) -> None:
    for number in range(50):
        await producer.upsert_repeatable(RepeatableSpec(f"job {number}", RepeatPattern.every(1000 + number), None))
    metas = await producer.list_repeatable()
    assert sorted(meta.job_name for meta in metas) == sorted(f"job {number}" for number in range(50))
    assert [meta.next_fire_ms for meta in metas] == sorted(meta.next_fire_ms for meta in metas)


@pytest.mark.servers
async def test_the_payload_is_written_in_the_producers_format(server: Server | Cluster, view: QueueView) -> None:
    async with open_producer(server.url, payload_format="inline") as producer:
        key = await producer.upsert_repeatable(spec())
    found = decode_spec(stored(view, key)[b"spec"])
    assert found.payload_slot == msgpack.packb({"k": 1})


async def test_specs_that_never_fire_are_refused_and_nothing_is_written(server: Server, view: QueueView) -> None:
    now = view.now_ms()
    async with open_producer(server.url) as producer:
        with pytest.raises(ConfigError, match="must not be before the first fire"):
            await producer.upsert_repeatable(spec().with_end_before_ms(now + 30_000))
        with pytest.raises(ConfigError, match="never fires again"):
            await producer.upsert_repeatable(spec(RepeatPattern.cron("0 0 0 1 1 * 2001")))
        with pytest.raises(ConfigError, match="spec must be a RepeatableSpec"):
            await producer.upsert_repeatable("0 9 * * *")  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="spec_key must be"):
            await producer.remove_repeatable("")
        with pytest.raises(ConfigError, match="limit must be"):
            await producer.list_repeatable(-1)
        # A fire exactly at the end is allowed.
        await producer.upsert_repeatable(spec().with_end_before_ms(now + 70_000))
    assert list(fires(view)) == ["report::every:60000"]


async def test_the_servers_clock_decides_the_first_fire(
    server: Server, view: QueueView, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tampu.base.clock.wall_clock_ms", lambda: 1)
    async with open_producer(server.url) as producer:
        key = await producer.upsert_repeatable(spec())
    assert abs(fires(view)[key] - view.now_ms() - 60_000) < 5_000
