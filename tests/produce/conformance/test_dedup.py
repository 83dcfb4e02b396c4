"""Explicit ids are added once: across producers, processes and restarts, immediate and delayed alike."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import pytest

from support.producers import open_producer
from support.queues import QueueView

if TYPE_CHECKING:
    from collections.abc import Callable

    from servers.cluster import Cluster
    from servers.process import Server
    from tampu.produce.producer import Producer


@pytest.mark.servers
async def test_finding_11_a_duplicate_can_be_distinguished_from_a_new_job(
    producer: Producer[Any], view: QueueView
) -> None:
    first = await producer.add_with_id("x", 1)
    again = await producer.add_with_id("x", 2)
    assert (first, first.is_new) == ("x", True)
    assert (again, again.is_new) == ("x", False)
    assert view.payloads() == [1]
    # Even when the job finished long ago.
    view.client.delete(view.keys.stream)
    assert not (await producer.add_with_id("x", 3)).is_new
    assert view.length() == 0


@pytest.mark.servers
async def test_finding_16_ids_are_deduplicated_across_producers(server: Server | Cluster, view: QueueView) -> None:
    async with open_producer(server.url) as one, open_producer(server.url) as other:
        outcomes = await asyncio.gather(
            *(producer.add_with_id(f"id {number}", number) for number in range(200) for producer in (one, other, one))
        )
        assert sum(job_id.is_new for job_id in outcomes) == 200
        # Also after far more than a hundred other ids.
        assert not (await other.add_with_id("id 0", 0)).is_new
    assert sorted(view.payloads()) == list(range(200))


@pytest.mark.servers
async def test_immediate_and_delayed_share_the_marker(producer: Producer[Any], view: QueueView) -> None:
    assert (await producer.add_in_with_id("later first", 60, 1)).is_new
    assert not (await producer.add_with_id("later first", 2)).is_new
    assert (await producer.add_with_id("now first", 3)).is_new
    assert not (await producer.add_in_with_id("now first", 60, 4)).is_new
    assert not (await producer.add_at_with_id("now first", view.now_ms() / 1000 + 60, 4)).is_new
    assert view.payloads() == [3]
    assert [job.payload for job in view.delayed_jobs()] == [1]


@pytest.mark.servers
async def test_a_duplicate_changes_nothing(producer: Producer[Any], view: QueueView) -> None:
    await producer.add_in_with_id("x", 60, 1)
    view.client.expire(view.keys.dedup_marker("x"), 1000)
    before = (view.delayed(), view.client.get(view.keys.delayed_index("x")))
    assert not (await producer.add_in_with_id("x", 5, 2)).is_new
    assert (view.delayed(), view.client.get(view.keys.delayed_index("x"))) == before
    assert view.all_keys()[":dlid:x"] <= 1000


@pytest.mark.servers
async def test_the_same_id_twice_in_one_window(producer: Producer[Any], view: QueueView) -> None:
    first, second, third = await asyncio.gather(
        producer.add_with_id("x", 1), producer.add_with_id("x", 2), producer.add_in_with_id("x", 60, 3)
    )
    assert [first.is_new, second.is_new, third.is_new] == [True, False, False]
    assert view.payloads() == [1]


@pytest.mark.servers
async def test_an_id_may_be_added_again_when_its_marker_has_expired(server: Server | Cluster, view: QueueView) -> None:
    async with open_producer(server.url, dedup_ttl_secs=1) as producer:
        assert (await producer.add_with_id("x", 1)).is_new
        assert not (await producer.add_with_id("x", 2)).is_new
        view.client.delete(view.keys.dedup_marker("x"))  # as when its TTL expires, which other tests check
        assert (await producer.add_with_id("x", 3)).is_new
    assert view.payloads() == [1, 3]


@pytest.mark.servers
async def test_a_marker_of_a_peer_is_respected(producer: Producer[Any], view: QueueView) -> None:
    view.client.set(view.keys.dedup_marker("peer's"), "1", ex=100)
    assert not (await producer.add_in_with_id("peer's", 60, 1)).is_new
    assert not (await producer.add_with_id("peer's", 1)).is_new
    assert view.delayed() == []


async def test_ids_are_deduplicated_across_processes(server: Server, view: QueueView) -> None:
    program = textwrap.dedent("""
        import asyncio, sys
        from tampu.config import ProducerConfig
        from tampu.produce.producer import Producer
        async def main():
            async with Producer.connect(sys.argv[1], ProducerConfig(queue_name="q")) as producer:
                now = await producer.add_with_id("now", 2)
                later = await producer.add_in_with_id("later", 60, 2)
                print(now.is_new, later.is_new)
        asyncio.run(main())
    """)
    async with open_producer(server.url) as producer:
        await producer.add_with_id("now", 1)
        await producer.add_in_with_id("later", 60, 1)
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", program, server.url], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "False False\n", done.stderr
    assert view.payloads() == [1]


async def test_ids_are_deduplicated_across_restarts_of_the_server(fresh_server: Callable[..., Server]) -> None:
    server = fresh_server(appendonly="yes", appendfsync="always")
    async with open_producer(server.url) as producer:
        await producer.add_with_id("x", 1)
        server.kill()
        server.start()
        assert not (await producer.add_with_id("x", 2)).is_new
        assert (await producer.add_with_id("y", 3)).is_new
    assert QueueView(server, "q").payloads() == [1, 3]
