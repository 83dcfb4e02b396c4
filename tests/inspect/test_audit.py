"""Changes made through the Python API leave an audit event with the operator's name."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import pytest

from support.queues import QueueView
from support.waiting import until
from tampu import Producer, ProducerConfig, Queue, RepeatPattern, Worker
from tampu.inspect.admin import operator_name

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from servers.process import Server


@pytest.fixture
def seen(server: Server) -> QueueView:
    return QueueView(server, "q")


def audits(seen: QueueView) -> list[tuple[str, ...]]:
    fields = ("action", "operator", "count", "detail")
    return [tuple(event.get(field, "") for field in fields) for event in seen.events() if event["e"] == "audit"]


async def fill(seen: QueueView, queue: Queue) -> None:
    await queue.add("mail", 1, job_id="waiting")
    await queue.add("mail", 1, job_id="delayed", delay_ms=3_600_000)
    await queue.add("mail", 1, repeat=RepeatPattern.every(3_600_000))
    ((_, fields),) = seen.client.xrange(seen.keys.stream)
    for _ in range(2):
        seen.client.xadd(seen.keys.dlq, {**fields, "reason": "retries_exhausted"})


async def key_of_the_schedule(queue: Queue) -> str:
    (schedule,) = await queue.get_repeatable_jobs()
    return schedule.key


CHANGES: dict[str, tuple[Callable[[Queue], Awaitable[Any]], tuple[str, ...]]] = {
    "cancel": (lambda queue: queue.cancel("waiting", reason="obsolete"), ("cancel", "ada", "1", "waiting: obsolete")),
    "cancel_delayed": (lambda queue: queue.cancel_delayed("delayed"), ("cancel", "ada", "1", "delayed")),
    "pause": (lambda queue: queue.pause(reason="upgrade"), ("pause", "ada", "1", "upgrade")),
    "pause a task": (lambda queue: queue.pause(task="mail", reason="why"), ("pause", "ada", "1", "task mail: why")),
    "replay": (lambda queue: queue.replay_dlq(), ("replay", "ada", "2", "")),
    "remove": (lambda queue: queue.remove_dlq(limit=1), ("remove", "ada", "1", "")),
    "purge": (lambda queue: queue.purge(), ("purge", "ada", "2", "")),
}


@pytest.mark.parametrize("name", CHANGES)
async def test_a_change_is_recorded_with_the_operators_name(seen: QueueView, name: str) -> None:
    change, expected = CHANGES[name]
    async with Queue("q", url=seen.server.url, operator="ada") as queue:
        await fill(seen, queue)
        assert await change(queue) is not False
    assert audits(seen) == [expected]


async def test_a_removed_schedule_is_recorded_with_its_key(seen: QueueView) -> None:
    async with Queue("q", url=seen.server.url, operator="ada") as queue:
        await fill(seen, queue)
        key = await key_of_the_schedule(queue)
        assert await queue.remove_repeatable_by_key(key)
    assert audits(seen) == [("delete-schedule", "ada", "1", key)]


async def test_what_changes_nothing_is_not_recorded(seen: QueueView) -> None:
    async with Queue("q", url=seen.server.url) as queue:
        await queue.cancel("nobody")
        await queue.cancel_delayed("nobody")
        await queue.resume()
        await queue.replay_dlq()
        await queue.remove_dlq()
        await queue.purge()
        await queue.drain(timeout=5)
        await queue.remove_repeatable_by_key("none")
        await queue.delete()
    assert seen.all_keys() == {}


async def test_a_drain_is_recorded_once_all_jobs_are_done(seen: QueueView) -> None:
    async with Queue("q", url=seen.server.url) as queue:
        await queue.add("mail", 1)
        with pytest.raises(TimeoutError):
            await queue.drain(timeout=0.01)
        assert audits(seen) == []

        async def handler(job: object) -> None: ...

        async with Worker("q", handler, url=seen.server.url):
            await queue.drain(timeout=20)
    assert audits(seen) == [("drain", operator_name(), "1", "")]


async def test_followers_see_who_deleted_a_queue(seen: QueueView, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tampu.audit")
    async with Queue("q", url=seen.server.url, operator="ada") as queue:
        await queue.add("mail", 1)
        await queue.pause()
        events = queue.events(last_event_id="0")
        followed = aiter(events)
        await anext(followed)
        following = asyncio.ensure_future(anext(followed))
        await until(lambda: seen.client.info("clients")["blocked_clients"], "it waits for the next event")
        await queue.delete(force=True)
        assert (await following).fields["action"] == "delete"
        await events.close()
    assert seen.all_keys() == {}
    assert "queue 'q': delete by ada (count 1)" in caplog.messages


async def test_a_bulk_cancel_is_one_event(seen: QueueView) -> None:
    config = ProducerConfig(queue_name="q", operator="ada")
    async with Producer.connect(seen.server.url, config) as producer:
        ids = [await producer.add_in(3600, number) for number in range(3)]
        assert await producer.cancel_delayed_bulk([*ids, "nobody"]) == [True, True, True, False]
    assert audits(seen) == [("cancel", "ada", "3", "")]


async def test_a_change_succeeds_even_if_its_event_cannot_be_written(
    seen: QueueView, caplog: pytest.LogCaptureFixture
) -> None:
    seen.client.set(seen.keys.events, "not a stream")
    async with Queue("q", url=seen.server.url) as queue:
        await queue.pause()
        assert await queue.is_paused()
    assert "the audit event of pause in queue 'q' was not written: WRONGTYPE" in caplog.text
