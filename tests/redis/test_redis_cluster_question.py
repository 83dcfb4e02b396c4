"""Cluster queries with redis-py are not cancelled: redis-py would leak their sockets."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from support.clients import open_client
from support.waiting import until
from tampu.redis import discovery
from tampu.redis.settings import Address

if TYPE_CHECKING:
    import pytest


async def close_while_asking(monkeypatch: pytest.MonkeyPatch, answer_after_secs: float) -> str:
    """Close a client during a Cluster query and return how the query ended."""
    ends: list[str] = []
    began = asyncio.Event()

    async def slow_question(*_: object) -> Address:
        began.set()
        try:
            await asyncio.sleep(answer_after_secs)
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise
        ends.append("answered")
        return Address("127.0.0.1", 1)

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
