"""Following the events of a queue as an async iterator."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from api.workers import working
from support.waiting import until
from tampu import Job, Queue, QueueEvent, QueueEvents, RedisError

if TYPE_CHECKING:
    from servers.process import Server


async def handler(job: Job[Any]) -> None:
    if job.name == "fail":
        raise ValueError("broken")


async def collect(events: QueueEvents, last: str) -> list[QueueEvent]:
    """Return the events up to the first one with that name."""
    seen = []
    async for event in events:
        seen.append(event)
        if event.name == last:
            break
    return seen


async def test_events_show_the_life_of_a_job(queue: Queue, server: Server) -> None:
    async with QueueEvents("q", redis_url=server.url) as events:
        await events.pin()
        async with working("q", handler, url=server.url, max_attempts=2, consumer_id="w"):
            job = await queue.add("fail", 1)
            seen = [event for event in await collect(events, "dlq") if event.job_id == job.id]
    assert [(event.name, event.fields.get("attempt")) for event in seen if event.name != "waiting"] == [
        ("active", 1),
        ("failed", 1),
        ("retry-scheduled", 2),
        ("active", 2),
        ("failed", 2),
        ("dlq", 2),
    ]
    failed = next(event for event in seen if event.name == "failed")
    assert failed.job_name == "fail"
    assert failed.fields["reason"] == "ValueError: broken"
    assert isinstance(failed.fields["duration_us"], int)
    assert failed.fields["worker"].startswith("w:")


async def test_it_starts_now_or_after_a_given_event(queue: Queue, server: Server) -> None:
    client = server.client()
    ids = [client.xadd(queue.keys.events, {"e": f"e{number}", "id": "", "ts": number}) for number in range(3)]
    everything = QueueEvents("q", redis_url=server.url, last_event_id="0")
    assert [event.name for event in await collect(everything, "e2")] == ["e0", "e1", "e2"]
    assert everything.last_event_id == ids[2].decode()
    assert everything.name == "q"
    some = QueueEvents("q", url=server.url, last_event_id=ids[0].decode(), count=1, block_ms=50)
    assert [event.name for event in await collect(some, "e2")] == ["e1", "e2"]
    fresh = QueueEvents("q", url=server.url)
    await fresh.pin()
    client.xadd(queue.keys.events, {"e": "new", "id": "j", "n": "mail", "ts": 5, "attempt": "x"})
    [event] = await collect(fresh, "new")
    assert event == QueueEvent("new", "j", "mail", {"ts": 5, "attempt": "x"})
    for one in (everything, some, fresh):
        await one.close()


@pytest.mark.parametrize("block_ms", [50, 60_000])
async def test_close_ends_the_iteration(server: Server, block_ms: int) -> None:
    events = QueueEvents("q", url=server.url, block_ms=block_ms)
    task = asyncio.create_task(collect(events, "never"))
    await until(lambda: events._client is not None and events._client.connection is not None, "it reads")
    await events.close()
    assert await asyncio.wait_for(task, 20) == []
    assert await collect(events, "never") == []


async def test_no_event_is_missed_when_the_connection_is_lost(queue: Queue, server: Server) -> None:
    client = server.client()
    events = QueueEvents("q", url=server.url)
    await events.pin()
    task = asyncio.create_task(collect(events, "last"))
    for number in range(5):
        client.xadd(queue.keys.events, {"e": str(number), "id": ""})
        client.client_kill_filter(_type="normal", skipme=True)
    client.xadd(queue.keys.events, {"e": "last", "id": ""})
    assert [event.name for event in await asyncio.wait_for(task, 20)] == ["0", "1", "2", "3", "4", "last"]
    await events.close()


async def test_a_wrong_password_is_an_error(fresh_server: Any) -> None:
    server = fresh_server(requirepass="right")
    events = QueueEvents("q", url=server.url.replace("right", "wrong"))
    with pytest.raises(RedisError, match="password"):
        await asyncio.wait_for(collect(events, "never"), 20)
    await events.close()


@pytest.mark.parametrize("options", [{"block_ms": 0}, {"count": 0}, {"block_ms": "x"}, {"redis_url": "nonsense"}])
def test_invalid_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        QueueEvents("q", **options)


async def test_entries_that_are_not_events_are_passed_on(queue: Queue, server: Server) -> None:
    server.client().xadd(queue.keys.events, {b"\xff": b"\xfe", "e": "odd"})
    async with queue.events(last_event_id="0") as events:
        [event] = await collect(events, "odd")
    assert (event.job_id, event.job_name, event.fields) == (None, "", {"�": "�"})
