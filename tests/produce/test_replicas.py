"""`min_replicas`, with real replicas: an add is confirmed only when that many replicas have the job."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from servers.process import eventually
from support.producers import open_producer
from support.proxy import Proxy
from support.queues import QueueView
from support.waiting import until
from tampu.errors import OutcomeUnknownError, QueueFullError

if TYPE_CHECKING:
    from collections.abc import Callable

    from servers.process import Server

OK_REPLY = b"$0\r\n\r\n"


@pytest.fixture
def pair(fresh_server: Callable[..., Server]) -> tuple[Server, Server]:
    """Return a master and its replica, in sync."""
    master = fresh_server()
    replica = fresh_server(replicaof=master)
    client = master.client()
    client.set("in", "step")
    eventually(lambda: client.execute_command("WAIT", 1, 1000) == 1, "the replica is in sync")
    client.delete("in")
    return master, replica


async def test_a_confirmed_job_is_on_the_replica(pair: tuple[Server, Server]) -> None:
    master, replica = pair
    async with open_producer(master.url, min_replicas=1, min_replicas_timeout_ms=5000) as producer:
        ids = [await producer.add(number) for number in range(10)]
        assert QueueView(replica, "q").ids() == ids  # right away, without waiting for the replica
        ids += await producer.add_bulk(range(2000))
        assert QueueView(replica, "q").ids() == ids
        ids += await asyncio.gather(*(producer.add(number) for number in range(300)))
        assert sorted(QueueView(replica, "q").ids()) == sorted(ids)


async def test_jobs_that_too_few_replicas_have_are_named(pair: tuple[Server, Server]) -> None:
    master, replica = pair
    async with open_producer(master.url, min_replicas=1, min_replicas_timeout_ms=100) as producer:
        await producer.add("before")
        replica.pause()
        with pytest.raises(OutcomeUnknownError, match="only 0 of 1 replicas confirmed it in time") as caught:
            await producer.add("lonely")
        assert caught.value.code == "CMQ-007"
        with pytest.raises(OutcomeUnknownError) as bulk:
            await producer.add_bulk(range(600))
        view = QueueView(master, "q")
        assert view.ids()[1:] == [*caught.value.ids, *bulk.value.ids]
        replica.resume()
        after = await until(lambda: _added(producer), "the replica confirms again")
        assert QueueView(replica, "q").ids()[-1] == after


async def _added(producer: object) -> str | None:
    try:
        return await producer.add("after")  # type: ignore[attr-defined]
    except OutcomeUnknownError:
        return None


async def test_a_reply_that_is_fetched_again_waits_for_the_replicas_too(pair: tuple[Server, Server]) -> None:
    master, replica = pair
    async with (
        Proxy(master.address) as proxy,
        open_producer(proxy.url, min_replicas=1, min_replicas_timeout_ms=300) as producer,
    ):
        await producer.add("before")
        replica.pause()
        # The window's own reply arrives, then the connection is lost before the reply to WAIT.
        proxy.cut_replies_after(len(OK_REPLY))
        with pytest.raises(OutcomeUnknownError, match="only 0 of 1 replicas"):
            await producer.add("lonely")
        assert QueueView(master, "q").payloads() == ["before", "lonely"]
        assert producer.client.connections_made == 2
        replica.resume()


async def test_refused_jobs_are_not_reported_as_unknown(pair: tuple[Server, Server]) -> None:
    master, replica = pair
    async with open_producer(
        master.url, min_replicas=1, min_replicas_timeout_ms=50, max_stream_len=2, retry_for_secs=1
    ) as producer:
        await producer.add_with_id("there", 0)
        replica.pause()
        outcomes = await asyncio.gather(
            producer.add_with_id("there", 0),
            producer.add_with_id("new", 1),
            producer.add_with_id("full", 2),
            return_exceptions=True,
        )
        duplicate, unknown, full = outcomes
        assert duplicate == "there"
        assert not duplicate.is_new  # type: ignore[union-attr]
        assert isinstance(unknown, OutcomeUnknownError)
        assert unknown.ids == ["new"]
        assert isinstance(full, QueueFullError)
        assert full.refused == ["full"]
        replica.resume()


async def test_waiting_for_replicas_does_not_count_as_a_silent_server(
    pair: tuple[Server, Server],
) -> None:
    master, replica = pair
    settings = {"response_timeout_secs": 0.2}
    async with open_producer(master.url, settings=settings, min_replicas=1, min_replicas_timeout_ms=600) as producer:
        replica.pause()
        with pytest.raises(OutcomeUnknownError, match="only 0 of 1 replicas"):
            await producer.add("lonely")
        assert producer.client.connections_made == 1
        replica.resume()


async def test_without_replicas_no_job_is_confirmed(server: Server) -> None:
    async with open_producer(server.url, min_replicas=2, min_replicas_timeout_ms=20) as producer:
        with pytest.raises(OutcomeUnknownError, match="only 0 of 2 replicas"):
            await producer.add(1)
