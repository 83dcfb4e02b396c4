"""A Cluster is asked for its slots by redis-py, which leaves sockets open when it is cancelled: so it is not."""

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
    """How the question ends when the pipe is closed in the middle of it."""
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
    async with open_client("redis+cluster://127.0.0.1:1") as pipe:
        connecting = asyncio.create_task(pipe.up())
        await began.wait()
    connecting.cancel()
    await asyncio.gather(connecting, return_exceptions=True)
    await until(lambda: ends, "the question has ended")
    return ends[0]


async def test_a_pipe_closed_while_it_asks_lets_the_question_end(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await close_while_asking(monkeypatch, 0.05) == "answered"


async def test_a_pipe_closed_while_nobody_answers_does_not_wait_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "LAST_ANSWER_SECS", 0.05)
    assert await close_while_asking(monkeypatch, 3600) == "cancelled"
