"""Adds that join each other: debounce and throttle."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import pytest

from api.workers import working
from support.waiting import until
from tampu.errors import ConfigError

if TYPE_CHECKING:
    from tampu import Queue


class Runs(list[tuple[int, float]]):
    """The number of each run, and when it began."""

    @property
    def numbers(self) -> list[int]:
        return [number for number, _ in self]


@pytest.fixture
def runs() -> Runs:
    return Runs()


def index_task(queue: Queue, runs: Runs, secs: float = 0.0) -> Any:
    @queue.task
    async def index(number: int) -> int:
        runs.append((number, time.monotonic()))
        await asyncio.sleep(secs)
        return number

    return index


@pytest.mark.servers
async def test_debounce_runs_the_last_add_once_after_the_quiet_time(queue: Queue, runs: Runs) -> None:
    index = index_task(queue, runs)
    soon = index.using(debounce="doc-9", quiet=0.3)
    async with working(queue):
        jobs = [await soon.add(number) for number in range(5)]
        last_at = time.monotonic()
        assert [job.id.is_new for job in jobs] == [True, False, False, False, False]
        assert {job.id for job in jobs} == {"doc-9"}
        assert [await job.result() for job in jobs] == [4] * 5
    assert runs.numbers == [4]
    assert runs[0][1] - last_at > 0.25


async def test_a_debounced_job_waits_no_longer_than_at_most(queue: Queue, runs: Runs) -> None:
    soon = index_task(queue, runs).using(debounce="doc-9", quiet=0.3, at_most=0.4)
    async with working(queue):
        began = time.monotonic()
        number = 0
        while not runs:
            await soon.add(number)
            number += 1
            await asyncio.sleep(0.01)
        assert 0.3 < runs[0][1] - began < 5
        assert number > 5
        await until(lambda: runs.numbers[-1] == number - 1, "the last add has run")


@pytest.mark.servers
async def test_an_add_while_the_last_job_runs_is_not_lost(queue: Queue, runs: Runs) -> None:
    soon = index_task(queue, runs, secs=0.2).using(debounce="doc-9", quiet=0.02)
    async with working(queue):
        await soon.add(1)
        await until(lambda: runs, "it runs")
        await soon.add(2)
        await until(lambda: runs.numbers == [1, 2], "the second has run")
        await queue.drain(20)
        job = await soon.add(3)
        assert await job.result() == 3


@pytest.mark.servers
async def test_throttle_runs_at_once_and_then_once_in_every_interval(queue: Queue, runs: Runs) -> None:
    call = index_task(queue, runs).using(throttle="host-3", every=0.5)
    async with working(queue):
        first_at = time.monotonic()
        await call.add(0)
        await until(lambda: runs, "the first runs at once")
        assert runs[0][1] - first_at < 0.45
        for number in range(1, 5):
            await call.add(number)
        await until(lambda: len(runs) == 2, "the last add runs")
        await asyncio.to_thread(call.sync.add, 5)
        await until(lambda: len(runs) == 3, "another add runs")
    assert runs.numbers == [0, 4, 5]
    assert runs[1][1] - first_at > 0.45
    assert runs[2][1] - first_at > 0.95


async def test_a_debounced_job_can_be_cancelled_and_added_again(queue: Queue, runs: Runs) -> None:
    soon = index_task(queue, runs).using(debounce="doc-9", quiet=30)
    await soon.add(1)
    assert await queue.cancel("doc-9") == "cancelled"
    job = await soon.using(quiet=0.01).add(2)
    async with working(queue):
        assert await job.result() == 2
    assert runs.numbers == [2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"debounce": "a"}, "needs both debounce= and quiet="),
        ({"quiet": 5}, "needs both debounce= and quiet="),
        ({"throttle": "a"}, "needs both throttle= and every="),
        ({"debounce": "a", "quiet": 0}, "quiet must be"),
        ({"debounce": " ", "quiet": 5}, "debounce must be"),
        ({"debounce": "a", "quiet": 5, "at_most": 1}, "must not be shorter than quiet"),
        ({"throttle": "a", "every": 5, "at_most": 9}, "at_most needs debounce="),
        ({"debounce": "a", "quiet": 5, "throttle": "b", "every": 5}, "only one of debounce, throttle"),
        ({"debounce": "a", "quiet": 5, "unique": "b"}, "only one of debounce, throttle"),
        ({"throttle": "a", "every": 5, "delay": 5}, "only one of debounce, throttle"),
    ],
)
async def test_options_that_make_no_sense_are_refused(
    queue: Queue, runs: Runs, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        index_task(queue, runs).using(**options)


async def test_a_bulk_cannot_be_debounced(queue: Queue, runs: Runs) -> None:
    with pytest.raises(ConfigError, match="add_bulk does not accept debounce"):
        await index_task(queue, runs).using(debounce="a", quiet=5).add_bulk([1, 2])
