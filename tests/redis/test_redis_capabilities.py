"""The probe of what a server supports, on every kind of server."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.clients import TAG, open_client
from support.users import acl_user
from tampu.redis.faults import ConnectionLost, ServerError
from tampu.redis.scripts import Capabilities, probe_capabilities

if TYPE_CHECKING:
    from collections.abc import Callable

    from servers.cluster import Cluster
    from servers.process import Server

ALL = Capabilities(xackdel=True, read_claim=True, script_flags=True)
EXPECTED = {
    "valkey": Capabilities(xackdel=False, read_claim=False, script_flags=True),
    "redis62": Capabilities(xackdel=False, read_claim=False, script_flags=False),
    "redis70": Capabilities(xackdel=False, read_claim=False, script_flags=True),
    "redis86": ALL,
    "cluster86": ALL,
}


@pytest.mark.servers
async def test_the_probe_detects_what_each_server_supports(server: Server | Cluster, server_kind: str) -> None:
    async with open_client(server.url) as client:
        assert await probe_capabilities(await client.up(), TAG) == EXPECTED[server_kind]


@pytest.mark.servers
async def test_the_probe_leaves_nothing_behind(server: Server | Cluster) -> None:
    async with open_client(server.url) as client:
        await probe_capabilities(await client.up(), TAG)
    nodes = server.nodes if hasattr(server, "nodes") else [server]
    assert [node.client().dbsize() for node in nodes] == [0] * len(nodes)


async def test_a_replica_is_not_taken_for_a_server_without_support(fresh_server: Callable[..., Server]) -> None:
    replica = fresh_server("redis86", replicaof=fresh_server("redis86"))
    async with open_client(replica.url) as client:
        with pytest.raises(ServerError, match="READONLY"):
            await probe_capabilities(await client.up(), TAG)


@pytest.mark.servers("redis86")
async def test_a_forbidden_command_counts_as_not_supported(server: Server) -> None:
    with acl_user(server, "ada", "pw", "~*", "+@all", "-xackdel"):
        async with open_client(server.url.replace("redis://", "redis://ada:pw@")) as client:
            found = await probe_capabilities(await client.up(), TAG)
    assert found == Capabilities(False, read_claim=True, script_flags=True, denied=frozenset({"xackdel"}))


async def test_a_connection_lost_while_probing_raises(server: Server) -> None:
    async with open_client(server.url) as client:
        connection = await client.up()
        connection.close()
        with pytest.raises(ConnectionLost):
            await probe_capabilities(connection, TAG)
