"""A producer and a view of its queue, on every kind of server. Only keys of the wire format may lack a TTL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from support.producers import open_producer
from support.queues import QueueView

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from servers.cluster import Cluster
    from servers.process import Server
    from tampu.produce.producer import Producer

#: Keys without a TTL, which live as long as their contents.
LASTING = (":stream", ":delayed", ":dlq", ":events", ":repeat", ":repeat:spec:")


@pytest.fixture
async def producer(server: Server | Cluster) -> AsyncIterator[Producer[Any]]:
    """Return a producer of the queue `q` with default settings."""
    async with open_producer(server.url) as producer:
        yield producer


@pytest.fixture
def view(server: Server | Cluster) -> QueueView:
    """Return a view of the queue `q`."""
    return QueueView(server, "q")


@pytest.fixture(autouse=True)
def _every_other_key_expires(request: pytest.FixtureRequest) -> Iterator[None]:
    view = request.getfixturevalue("view") if "server" in request.fixturenames else None
    yield
    if view is not None:
        lasting = [key for key, ttl in view.all_keys().items() if ttl == -1]
        assert [key for key in lasting if key not in LASTING and not key.startswith(":repeat:spec:")] == []
