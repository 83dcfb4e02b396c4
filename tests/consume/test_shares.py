"""Turns: how the slots of a worker are divided among its queues."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tampu.consume.pool import MAX_READS, Share, Shares, Turns


class _Queue:
    def __init__(self, share: Share | None = None) -> None:
        self.share = share or Share()


Queue: Any = _Queue


def ready(*queues: Any) -> Turns:
    """Return the turns of these queues, all of which have jobs waiting."""
    slots = Shares()
    for queue in queues:
        slots.add(queue.share)
    turns = Turns(slots)
    for queue in queues:
        turns.begin(queue)
    return turns


@pytest.mark.parametrize("room", [1, 3, 100])
@pytest.mark.parametrize("jobs_per_sec", [0.0, 100.0, 20_000.0])
def test_queues_get_jobs_in_proportion_to_their_weights(room: int, jobs_per_sec: float) -> None:
    queues = [Queue(Share(weight=weight)) for weight in (16, 4, 1)]
    turns = ready(*queues)
    got: Counter[Any] = Counter()
    while got.total() < 100_000:
        for queue, count in turns.plan(room, 256, jobs_per_sec):
            got[queue] += count
    assert [round(got[queue] / got.total() * 21, 1) for queue in queues] == pytest.approx([16, 4, 1], rel=0.1)


def test_a_plan_never_exceeds_the_room() -> None:
    turns = ready(*(Queue() for _ in range(20)))
    for room in range(1, 50):
        plan = turns.plan(room, 8, 1000.0)
        assert 0 < sum(count for _, count in plan) <= room
        assert len(plan) <= MAX_READS


def test_turns_are_long_at_high_throughput_and_short_at_low() -> None:
    assert [count for _, count in ready(Queue(), Queue(Share(weight=2))).plan(1000, 256, 20_000.0)] == [64, 128]
    assert [count for _, count in ready(Queue(), Queue(Share(weight=2))).plan(1000, 256, 4.0)] == [1, 2]


def test_a_queue_that_is_empty_leaves_its_turn_to_the_others() -> None:
    first, second = Queue(), Queue()
    turns = ready(first, second)
    turns.end(first)
    assert {queue for queue, _ in turns.plan(10, 256, 1000.0)} == {second}
    turns.end(second)
    assert turns.plan(10, 256, 1000.0) == []


def test_reserved_places_are_left_free_for_their_queue() -> None:
    critical, bulk = Queue(Share(reserve=2)), Queue()
    turns = ready(critical, bulk)
    turns.end(critical)
    assert turns.plan(10, 256, 1000.0) == [(bulk, 8)]
    assert turns.plan(2, 256, 1000.0) == []
    critical.share.occupied = 2
    assert turns.plan(2, 256, 1000.0) == [(bulk, 2)]


def test_a_queue_gets_no_more_places_than_its_limit() -> None:
    bulk, other = Queue(Share(limit=4)), Queue()
    bulk.share.occupied = 3
    turns = ready(bulk, other)
    counts = dict(turns.plan(100, 256, 100_000.0))
    assert counts == {bulk: 1, other: 64}
    bulk.share.occupied = 4
    assert bulk not in dict(turns.plan(100, 256, 100_000.0))
