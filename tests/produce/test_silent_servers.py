"""Servers that stop answering while the connection stays open: adds fail or are sent again in `retry_for_secs`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from support.producers import open_producer
from support.proxy import Proxy
from support.queues import QueueView
from tampu.errors import Error, OutcomeUnknownError

if TYPE_CHECKING:
    from collections.abc import Callable

    from servers.process import Server


async def test_an_add_to_a_silent_server_fails_within_retry_for_secs(fresh_server: Callable[..., Server]) -> None:
    server = fresh_server()
    async with open_producer(server.url, retry_for_secs=4) as producer:
        await producer.add("before")
        server.pause()
        loop = asyncio.get_running_loop()
        began = loop.time()
        with pytest.raises(OutcomeUnknownError) as caught:
            await producer.add("lost")
        assert 3.5 < loop.time() - began < 6
        host, port = server.address
        assert f"{host}:{port}" in str(caught.value)
        assert any(f"{word} 4" in str(caught.value) for word in ("within", "after", "for"))
        server.resume()
        job_id = await producer.add("works again")
        assert QueueView(server, "q").ids()[-1] == job_id


async def test_the_next_add_to_a_silent_server_waits_no_longer(fresh_server: Callable[..., Server]) -> None:
    server = fresh_server()
    async with open_producer(server.url, retry_for_secs=2) as producer:
        await producer.add("before")
        server.pause()
        with pytest.raises(OutcomeUnknownError):
            await producer.add("lost")
        loop = asyncio.get_running_loop()
        began = loop.time()
        with pytest.raises(Error, match=r"no connection to .* within 2(\.\d+)? s"):
            await producer.add("not sent")
        assert loop.time() - began < 4
        server.resume()


async def test_an_add_survives_a_connection_that_went_silent(server: Server) -> None:
    async with Proxy(server.address) as proxy, open_producer(proxy.url, retry_for_secs=6) as producer:
        await producer.add("before")
        proxy.hold_requests()
        async with asyncio.timeout(6):
            await producer.add("sent again")
        assert QueueView(server, "q").payloads() == ["before", "sent again"]
