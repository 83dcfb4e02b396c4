"""Fixtures of these tests: a queue on the shared server, closed after the test."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest_asyncio

from tampu import Queue

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from servers.process import Server


@pytest_asyncio.fixture
async def queue(server: Server) -> AsyncIterator[Queue]:
    """Create a queue on an empty server."""
    async with Queue("q", url=server.url) as queue:
        yield queue
