"""Fixtures of the RSMQ tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tampu.rsmq import Rsmq, RsmqOptions

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from servers.cluster import Cluster
    from servers.process import Server


@pytest.fixture
def ns(server_kind: str) -> str:
    """Return the namespace for this kind of server, with a hash tag on a Cluster."""
    return "{rsmq}" if server_kind == "cluster86" else "rsmq"


@pytest.fixture
def options(server: Server | Cluster, ns: str) -> RsmqOptions:
    return RsmqOptions(url=server.url, ns=ns)


@pytest.fixture
async def rsmq(options: RsmqOptions) -> AsyncIterator[Rsmq]:
    """Provide a client of the server."""
    async with Rsmq(options) as rsmq:
        yield rsmq
