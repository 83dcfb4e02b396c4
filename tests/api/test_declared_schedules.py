"""Schedules that tasks declare: workers store them, replace changed ones and remove those no longer declared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from api.workers import working
from support.waiting import until
from tampu import ConfigError, Queue, RepeatPattern

if TYPE_CHECKING:
    from servers.process import Server


def program(server: Server, **options: Any) -> tuple[Queue, list[int]]:
    """Return the queue of a program whose one task has these options, and its runs."""
    queue = Queue("q", url=server.url)
    runs: list[int] = []
    queue.task(name="clean_up", **options)(lambda: runs.append(1))
    return queue, runs


async def stored(queue: Queue) -> dict[str, str]:
    return {one.key: one.pattern.signature() for one in await queue.schedules()}


async def test_a_worker_keeps_the_schedules_that_its_tasks_declare(server: Server) -> None:
    first, runs = program(server, cron="* * * * * *", tz="America/Lima")
    async with first:
        await first.upsert_repeatable_job("clean_up", {}, repeat=RepeatPattern.every(3_600_000))
        by_hand = await stored(first)
        async with working(first):
            await until(lambda: runs, "it is fired")
        assert await stored(first) == by_hand | {"clean_up::declared": "cron:* * * * * *:America/Lima"}
    changed, _ = program(server, every=3600)
    async with changed, working(changed):

        async def is_replaced() -> bool:
            return await stored(changed) == by_hand | {"clean_up::declared": "every:3600000"}

        await until(is_replaced, "the changed one replaces it")
    without, _ = program(server)
    other = Queue("q", url=server.url)
    other.task(name="other")(lambda: None)
    async with without, other:
        await other.declare_schedules()
        assert len(await stored(other)) == 2, "the schedule of a task that this program does not have"
        async with working(without):

            async def is_removed() -> bool:
                return await stored(without) == by_hand

            await until(is_removed, "the one no longer declared is removed")


async def test_a_start_with_the_same_schedule_does_not_move_its_next_fire(server: Server) -> None:
    queue, _ = program(server, every=3600)
    async with queue:
        await queue.declare_schedules()
        [before] = await queue.schedules()
        again, _ = program(server, every=3600)
        async with again:
            await again.declare_schedules()
        [after] = await queue.schedules()
    assert after == before


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"cron": "* * * * *", "every": 5}, "a schedule is declared with cron="),
        ({"every": 5, "tz": "UTC"}, "a schedule is declared with cron="),
        ({"cron": "no"}, "cron"),
        ({"every": -1}, "every must be"),
    ],
)
def test_a_declaration_that_is_not_allowed_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Queue("q").task(name="work", **options)(lambda: None)


def test_a_declared_task_needs_no_arguments() -> None:
    with pytest.raises(ConfigError, match=r"passes no arguments: .*missing a required argument: 'to'"):

        @Queue("q").task(cron="0 3 * * *")
        def work(to: str) -> None: ...
