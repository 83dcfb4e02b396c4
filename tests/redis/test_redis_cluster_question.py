"""Cluster queries with redis-py are not cancelled: redis-py would leak their sockets."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from support.clients import open_client
from support.waiting import until
from tampu.errors import RedisError
from tampu.redis import discovery
from tampu.redis.client import Client
from tampu.redis.settings import Address, parse_url

if TYPE_CHECKING:
    from collections.abc import Callable


async def close_while_asking(monkeypatch: pytest.MonkeyPatch, answer_after_secs: float) -> str:
    """Close a client during a Cluster query and return how the query ended."""
    ends: list[str] = []
    began = asyncio.Event()

    async def slow_question(*_: object) -> Callable[[bytes], Address]:
        began.set()
        try:
            await asyncio.sleep(answer_after_secs)
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise
        ends.append("answered")
        return lambda routing_key: Address("127.0.0.1", 1)

    monkeypatch.setattr(discovery, "_ask_for_slots", slow_question)
    async with open_client("redis+cluster://127.0.0.1:1") as client:
        connecting = asyncio.create_task(client.up())
        await began.wait()
    connecting.cancel()
    await asyncio.gather(connecting, return_exceptions=True)
    await until(lambda: ends, "the query has ended")
    return ends[0]


async def test_closing_a_client_lets_a_cluster_query_finish(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await close_while_asking(monkeypatch, 0.05) == "answered"


async def test_closing_a_client_does_not_wait_long_for_a_cluster_query(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "LAST_ANSWER_SECS", 0.05)
    assert await close_while_asking(monkeypatch, 3600) == "cancelled"


async def test_a_query_that_is_about_to_be_cancelled_is_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    async def silence(*_: object) -> Callable[[bytes], Address]:
        asked.append(1)
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(discovery, "_ask_for_slots", silence)
    monkeypatch.setattr(discovery, "LAST_ANSWER_SECS", 0.05)
    settings = parse_url("redis+cluster://127.0.0.1:1")
    closed, other = Client(settings, b"closed"), Client(settings, b"other")
    closed.connect_in_background()
    await until(lambda: asked, "the query has begun")
    closing = asyncio.create_task(closed.close())
    await asyncio.sleep(0)  # it waits for the query now
    try:
        with pytest.raises(RedisError, match="no connection"):  # not CancelledError
            await other.up(patience_secs=0.5)
        assert len(asked) == 2
    finally:
        await closing
        await other.close()


def test_the_queries_of_closed_event_loops_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(*_: object) -> Callable[[bytes], Address]:
        return lambda routing_key: Address("127.0.0.1", 1)

    monkeypatch.setattr(discovery, "_ask_for_slots", answer)
    settings = parse_url("redis+cluster://127.0.0.1:1")
    for _ in range(3):
        asyncio.run(discovery.ask_cluster(settings, b"q"))
    assert sum(loop.is_closed() for loop in discovery._queries) == 1  # the last one
