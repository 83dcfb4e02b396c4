"""The limit of bytes in flight: callers wait in FIFO order, and a cancelled caller does not block the next."""

from __future__ import annotations

import asyncio

import pytest

from tampu.redis.connection import ByteBudget


async def in_line(budget: ByteBudget, *sizes: int) -> list[asyncio.Task[None]]:
    waiting = [asyncio.ensure_future(budget.take(size)) for size in sizes]
    await asyncio.sleep(0)
    return waiting


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_free_budget_goes_to_the_next_waiters() -> None:
    budget = ByteBudget(10)
    await budget.take(10)
    first, second, third, fourth = await in_line(budget, 3, 3, 3, 3)
    await turns()
    assert not first.done()
    budget.give_back(10)
    await turns()
    assert first.done()
    assert second.done()
    assert third.done()
    assert not fourth.done()
    budget.give_back(3)
    await turns()
    assert fourth.done()


async def test_a_waiter_cancelled_at_its_turn_passes_it_on() -> None:
    budget = ByteBudget(10)
    await budget.take(10)
    first, second = await in_line(budget, 10, 10)
    budget.give_back(10)
    first.cancel()  # in the iteration in which its turn came
    await turns()
    assert first.cancelled()
    assert second.done()


async def test_a_request_larger_than_the_budget_goes_alone() -> None:
    budget = ByteBudget(10)
    await asyncio.wait_for(budget.take(100), 1)
    (small,) = await in_line(budget, 1)
    await turns()
    assert not small.done()
    budget.give_back(100)
    await small


async def test_a_reset_forgets_all_waiters() -> None:
    budget = ByteBudget(10)
    await budget.take(10)
    (waiting,) = await in_line(budget, 10)
    budget.reset()
    await asyncio.wait_for(budget.take(10), 1)
    assert not waiting.done()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
