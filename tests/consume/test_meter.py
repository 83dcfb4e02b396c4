"""What workers count: exact numbers, times within a bucket, and series that do not grow."""

from __future__ import annotations

import asyncio
import itertools
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import msgpack
import pytest

from support.waiting import until
from tampu import Queue, Snooze, UnrecoverableError, Worker
from tampu.consume.meter import Meter, fold
from tampu.inspect.meters import last_minute, meter_key, read_series
from tampu.inspect.registry import REGISTRY
from tampu.redis.client import Client
from tampu.redis.settings import parse_url
from tampu.wire.keys import QueueKeys
from tampu.wire.meter import (
    LAST_BUCKET,
    MAX_NAMES,
    OTHER,
    Counts,
    Minute,
    bounds,
    bucket,
    decode_cell,
    decode_line,
    encode_cell,
    encode_line,
    merge,
    percentile,
    sum_of,
)

if TYPE_CHECKING:
    from servers.process import Server

KEYS = QueueKeys("q")


def counts(*kinds: int, runs: dict[int, int] | None = None) -> Counts:
    one = Counts()
    one.kinds = [*kinds, *[0] * (4 - len(kinds))]
    one.runs = runs or {}
    return one


@pytest.mark.parametrize("value", [0, 1, 2, 3, 4, 7, 8, 100, 1000, 123_456, 2**40, 2**60])
def test_a_value_is_inside_its_bucket(value: int) -> None:
    low, high = bounds(bucket(value))
    assert low <= value <= high or bucket(value) == LAST_BUCKET
    assert high <= 1.5 * low or value < 3  # two buckets for each power of two


def test_buckets_follow_each_other_without_gaps() -> None:
    used = sorted({bucket(value) for value in range(5000)})
    for left, right in itertools.pairwise(used[1:]):
        assert bounds(left)[1] == bounds(right)[0] or left == 1


def test_percentiles_are_interpolated() -> None:
    found = {bucket(value): 0 for value in range(1, 1001)}
    for value in range(1, 1001):
        found[bucket(value)] += 1
    for share in (0.5, 0.95, 0.99):
        assert percentile(found, share) == pytest.approx(share * 1000, rel=0.05)
    assert percentile({}, 0.5) is None


def test_cells_survive_the_wire_and_bad_ones_are_ignored() -> None:
    cell = {"a": counts(5, 1, 2, 3, runs={3: 4}), "b": counts(1)}
    again = decode_cell(encode_cell(cell))
    assert (again["a"].kinds, again["a"].runs, again["b"].total) == ([5, 1, 2, 3], {3: 4}, 1)
    odd = ({"a": 1}, {"a": [[-1], [], []]}, {"a": [[1], [1], []]}, [1], {1: [[1], [], []]})
    for bad in (None, b"", b"\xc1", b"odd", *map(msgpack.packb, odd)):
        assert decode_cell(bad) == {}
    line = [Minute(7, 1, 2, 3, 4, 5, None, 7, 8)]
    assert decode_line(encode_line(line)) == {7: line[0]}
    for bad in (None, b"\xc1", msgpack.packb([[1, "x"]]), msgpack.packb([[1, 2, 3, 4, 5, -1]]), msgpack.packb(3)):
        assert decode_line(bad) == {}


def test_further_names_are_counted_together() -> None:
    total = merge([{f"task {number}": counts(1)} for number in range(MAX_NAMES + 5)])
    assert len(total) == MAX_NAMES + 1
    assert total[OTHER].ok == 5
    assert sum_of(total).ok == MAX_NAMES + 5


async def settled(queue: Queue, minute_cells: int, server: Server) -> dict[str, Counts]:
    """Return what the worker has written, once it has counted this many runs."""
    client: Any = server.client()

    def written() -> dict[str, Counts] | None:
        cells = [client.hgetall(key).values() for key in client.keys("{chasqui:q}:meter:2*")]
        total = merge(decode_cell(packed) for values in cells for packed in values)
        return total if sum_of(total).total + sum_of(total).kinds[3] >= minute_cells else None

    return await until(written, f"{minute_cells} counted runs")


async def test_counts_are_exact_and_written_when_the_worker_stops(server: Server) -> None:
    async with Queue("q", url=server.url) as queue:

        @queue.task(attempts=2, backoff=timedelta(milliseconds=1))
        async def flaky(n: int) -> None:
            if n % 10 == 0:
                raise ValueError("odd")
            if n % 10 == 1:
                raise UnrecoverableError("even")

        snoozed = []

        @queue.task
        async def sleepy() -> Any:
            snoozed.append(1)
            return Snooze(timedelta(milliseconds=1)) if len(snoozed) == 1 else None

        await flaky.add_bulk([{"n": number} for number in range(500)])
        await sleepy.add()
        worker = Worker(queue, delayed_poll_interval_ms=5)
        running = asyncio.create_task(worker.run())

        async def is_over() -> bool:
            return len(snoozed) == 2 and len(await queue.peek_dlq(limit=200)) == 100

        await until(is_over, "all runs")
        await until(lambda: server.client().xlen(KEYS.stream) == 0, "all settled")
        await worker.close()
        await running
        total = await settled(queue, 551, server)
        assert total["flaky"].kinds == [400, 50, 100, 0]  # 50 failed twice, 50 at once
        assert total["sleepy"].kinds == [1, 0, 0, 0]  # a snooze is not a run that ended
        assert sum(total["flaky"].runs.values()) == pytest.approx(550, rel=0.3)
        assert server.client().hexists(REGISTRY, "q")


async def test_a_fold_counts_a_minute_once_and_makes_up_for_missed_ones(server: Server) -> None:
    client = Client(parse_url(server.url), b"q")
    redis: Any = server.client()
    minute = 29_000_003
    for at in (minute - 3, minute - 2, minute):
        for worker in ("a", "b"):
            redis.hset(meter_key(KEYS, at), worker, encode_cell({"t": counts(10, 1, runs={20: 11})}))
    await fold(client, KEYS, minute)
    await fold(client, KEYS, minute)  # such as after a lost reply
    line = decode_line(redis.hget(meter_key(KEYS), "line"))
    assert {at: (one.ok, one.failed) for at, one in line.items() if one.ok} == {
        minute - 3: (20, 2), minute - 2: (20, 2), minute: (20, 2),
    }  # fmt: skip
    assert line[minute].waiting == 0
    assert line[minute - 1].waiting is None
    ten = decode_cell(redis.hget(meter_key(KEYS), f"t{minute // 10}"))
    assert (ten["t"].ok, ten["t"].runs) == (60, {20: 66})
    now_ms = (minute + 1) * 60_000 + 30_000
    assert last_minute(now_ms) == minute
    series = await read_series(client, KEYS, now_ms)
    assert (len(series.cells), series.tasks["t"].ok, len(series.line)) == (60, 60, 60)
    day = await read_series(client, KEYS, now_ms, 24 * 3600)
    assert (day.step, len(day.cells), day.tasks["t"].ok) == (10, 144, 60)
    await client.close()


async def test_a_series_stays_small_whatever_the_number_of_workers(server: Server) -> None:
    client = Client(parse_url(server.url), b"q")
    redis: Any = server.client()
    runs = {index: 1000 + index for index in range(20, 36)}
    names = ("charge", "refund", "receipt", "report", "remind")
    cell = encode_cell({name: counts(50_000, 200, 3, runs=runs) for name in names})
    first = 29_000_000
    for minute in range(first, first + 200):
        for worker in range(20):
            redis.hset(meter_key(KEYS, minute), f"host:{worker}", cell)
        await fold(client, KEYS, minute)
        redis.delete(meter_key(KEYS, minute))
    fields = redis.hkeys(meter_key(KEYS))
    assert len([name for name in fields if name.startswith(b"m")]) == 60
    assert redis.memory_usage(meter_key(KEYS), samples=0) < 100_000
    # Nobody folded for two hours: nothing that old is left behind.
    await fold(client, KEYS, first + 320)
    assert [name for name in redis.hkeys(meter_key(KEYS)) if name.startswith(b"m")] == []
    await client.close()


def test_a_cell_that_could_not_be_written_is_kept_for_its_minute() -> None:
    meter = Meter()
    meter._counts, meter._is_changed = {"t": counts(3)}, True
    meter.pack(60_000 * 5)
    assert set(meter.unsent) == {5}
    meter._counts["t"].kinds[0] += 1
    meter._is_changed = True
    meter.pack(60_000 * 6)
    assert decode_cell(meter.unsent[5])["t"].ok == 4
    assert meter._counts == {}
    meter.pack(60_000 * 30)
    assert meter.unsent == {}
