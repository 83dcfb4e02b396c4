"""A queue's end, and what an operator sees on the way: drained, deleted, paused for a reason, letters by cause."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from api.workers import working
from support.queues import QueueView
from support.waiting import until
from tampu import ConfigError, Queue

if TYPE_CHECKING:
    from servers.cluster import Cluster
    from servers.process import Server


@pytest.fixture
def seen(server: Server | Cluster) -> QueueView:
    return QueueView(server, "q")


@pytest.mark.servers
async def test_a_queue_is_deleted_with_everything_in_it(seen: QueueView) -> None:
    async with Queue("q", url=seen.server.url) as queue:

        @queue.task(attempts=1)
        async def mail(fails: bool) -> int:
            if fails:
                raise ValueError("no")
            return 1

        async with working(queue):
            await (await mail.add_unique("a", False)).result(timeout=10)
            with pytest.raises(ConfigError, match="has live workers"):
                await queue.delete()
            await mail.add(True)
            await until(seen.dead_letters, "one is dead")
        await mail.add_in(3600, False)
        with pytest.raises(ConfigError, match=r"jobs \(1 delayed, 1 dead\): drain or purge it, or pass force=True"):
            await queue.delete()
        assert await queue.delete(force=True) > 3
        assert seen.all_keys() == {}
        assert await queue.delete() == 0


@pytest.mark.parametrize("name", ["a*b", "a?", "[ab]", "back\\slash"])
async def test_a_name_with_wildcards_deletes_only_its_own_queue(server: Server, name: str) -> None:
    async with Queue(name, url=server.url) as queue, Queue("axb", url=server.url) as other:
        await queue.add("mail", 1)
        await other.add("mail", 1)
        assert await queue.delete(force=True) >= 1
        left = {key.decode().partition("}")[0] for key in server.client().scan_iter()}
        assert left == {"{chasqui:axb"}


async def test_drain_waits_for_running_and_waiting_jobs(queue: Queue) -> None:
    release = asyncio.Event()

    @queue.task
    async def mail() -> None:
        await release.wait()

    await mail.add()
    await mail.add_in(3600)
    with pytest.raises(TimeoutError):
        await queue.drain(timeout=0.05)
    async with working(queue):
        draining = asyncio.create_task(queue.drain(timeout=20))
        await asyncio.sleep(0)
        release.set()
        await draining
    assert [job.state for job in await queue.jobs("delayed")] == ["delayed"]


async def test_a_pause_has_a_reason_and_an_end(queue: Queue, seen: QueueView) -> None:
    assert await queue.pause_reason() is None
    await queue.pause()
    assert (await queue.pause_reason(), await queue.is_paused()) == ("", True)
    await queue.pause(reason="bank is down", until=timedelta(minutes=5))
    assert await queue.pause_reason() == "bank is down"
    assert 290_000 < seen.client.pttl(seen.keys.paused) <= 300_000
    await queue.pause(until=datetime.now(UTC) + timedelta(minutes=5))
    assert 290_000 < seen.client.pttl(seen.keys.paused) <= 300_000
    await queue.pause(until=0.02)

    async def is_over() -> bool:
        return not await queue.is_paused()

    await until(is_over, "it resumes by itself")


async def test_letters_are_grouped_by_cause(queue: Queue) -> None:
    @queue.task(attempts=1)
    async def charge(amount: int) -> None:
        if amount > 50:
            raise ValueError(f"limit of card '{amount}' exceeded by {amount - 50}")
        raise KeyError("currency")

    async with working(queue):
        for amount in (60, 70, 80, 1):
            await charge.add(amount)
        await queue.drain(timeout=20)
    most, other = await queue.dlq_summary()
    assert (most.letters, most.name, most.error_type) == (3, "charge", "ValueError")
    assert most.fingerprint == "limit of card <text> exceeded by <n>"
    assert most.first_seen_ms <= most.last_seen_ms
    assert most.sample.error == "limit of card '80' exceeded by 30"
    assert (other.letters, other.error_type) == (1, "KeyError")
    assert most.cluster != other.cluster
