"""Clients for tests: closed afterwards, with shorter timeouts where a test cannot wait for the defaults."""

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
    """Open a client: `async with open_client(server.url, response_timeout_secs=0.1) as client:`."""
    client = Client(replace(parse_url(url, credential_provider=credential_provider), **settings), TAG.encode(), scripts)
    try:
        yield client
    finally:
        await client.close()


class StandInClient:
    """Replaces a client and its connection: stores requests until the test answers them, in any order.

    For races that cannot be provoked on a real server. `answers` holds a function per request that takes its reply.
    """

    def __init__(self) -> None:
        self.connection = self
        self.answers: list[Callable[[Any], None]] = []

    def request(self, packed: bytes, on_reply: Callable[[Any], None]) -> None:
        self.answers.append(on_reply)
