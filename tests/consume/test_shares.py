"""Turns: how the slots of a worker are divided among its queues."""

from __future__ import annotations

from collections import Counter

import pytest

from tampu.consume.shares import MAX_READS, Share, Shares, Turns


def ready(*shares: Share) -> Turns:
    """Return the turns of these queues, all of which have jobs waiting."""
    slots = Shares()
    for share in shares:
        slots.add(share)
    turns = Turns(slots)
    for share in shares:
        turns.begin(share)
    return turns


@pytest.mark.parametrize("room", [1, 3, 100])
@pytest.mark.parametrize("jobs_per_sec", [0.0, 100.0, 20_000.0])
def test_queues_get_jobs_in_proportion_to_their_weights(room: int, jobs_per_sec: float) -> None:
    shares = [Share(weight=16), Share(weight=4), Share(weight=1)]
    turns = ready(*shares)
    got: Counter[Share] = Counter()
    while got.total() < 100_000:
        for share, count in turns.plan(room, 256, jobs_per_sec):
            got[share] += count
    assert [round(got[share] / got.total() * 21, 1) for share in shares] == pytest.approx([16, 4, 1], rel=0.1)


def test_a_plan_never_exceeds_the_room() -> None:
    turns = ready(*(Share() for _ in range(20)))
    for room in range(1, 50):
        plan = turns.plan(room, 8, 1000.0)
        assert 0 < sum(count for _, count in plan) <= room
        assert len(plan) <= MAX_READS


def test_turns_are_long_at_high_throughput_and_short_at_low() -> None:
    assert [count for _, count in ready(Share(), Share(weight=2)).plan(1000, 256, 20_000.0)] == [64, 128]
    assert [count for _, count in ready(Share(), Share(weight=2)).plan(1000, 256, 4.0)] == [1, 2]


def test_a_queue_that_is_empty_leaves_its_turn_to_the_others() -> None:
    first, second = Share(), Share()
    turns = ready(first, second)
    turns.end(first)
    assert {share for share, _ in turns.plan(10, 256, 1000.0)} == {second}
    turns.end(second)
    assert turns.plan(10, 256, 1000.0) == []


def test_reserved_places_are_left_free_for_their_queue() -> None:
    critical, bulk = Share(reserve=2), Share()
    turns = ready(critical, bulk)
    turns.end(critical)
    assert turns.plan(10, 256, 1000.0) == [(bulk, 8)]
    assert turns.plan(2, 256, 1000.0) == []
    critical.occupied = 2
    assert turns.plan(2, 256, 1000.0) == [(bulk, 2)]


def test_a_queue_gets_no_more_places_than_its_limit() -> None:
    bulk, other = Share(limit=4), Share()
    bulk.occupied = 3
    turns = ready(bulk, other)
    counts = dict(turns.plan(100, 256, 100_000.0))
    assert counts == {bulk: 1, other: 64}
    bulk.occupied = 4
    assert bulk not in dict(turns.plan(100, 256, 100_000.0))
