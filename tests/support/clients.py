"""Clients for tests: closed in the end, with settings changed where a test cannot wait for the defaults."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tampu.redis.client import Client
from tampu.redis.settings import parse_url

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from tampu.redis.scripts import Script

TAG = "{chasqui:q}"


@contextlib.asynccontextmanager
async def open_client(
    url: str, *, scripts: Sequence[Script] = (), credential_provider: Any = None, **settings: Any
) -> AsyncIterator[Client]:
    """`async with open_client(server.url, response_timeout_secs=0.1) as client:`"""
    client = Client(replace(parse_url(url, credential_provider=credential_provider), **settings), TAG.encode(), scripts)
    try:
        yield client
    finally:
        await client.close()


class StandInClient:
    """Stands in for a client and its connection: keeps requests until the test answers them, in whatever order.

    For races that no server can be made to run: `answers` holds the function that takes the reply to each request.
    """

    def __init__(self) -> None:
        self.connection = self
        self.answers: list[Callable[[Any], None]] = []

    def request(self, packed: bytes, on_reply: Callable[[Any], None]) -> None:
        self.answers.append(on_reply)
