"""What a server can do is tried out, and the answer is right on every kind of server."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.clients import TAG, open_client
from support.users import acl_user
from tampu.redis.capabilities import Capabilities, probe_capabilities
from tampu.redis.faults import ConnectionLost, ServerError

if TYPE_CHECKING:
    from collections.abc import Callable

    from servers.cluster import Cluster
    from servers.process import Server

ALL = Capabilities(xackdel=True, read_claim=True, xadd_idmp=True, script_flags=True)
EXPECTED = {
    "valkey": Capabilities(xackdel=False, read_claim=False, xadd_idmp=False, script_flags=True),
    "redis62": Capabilities(xackdel=False, read_claim=False, xadd_idmp=False, script_flags=False),
    "redis70": Capabilities(xackdel=False, read_claim=False, xadd_idmp=False, script_flags=True),
    "redis86": ALL,
    "cluster86": ALL,
}


@pytest.mark.servers
async def test_the_probe_tells_what_each_server_can_do(server: Server | Cluster, server_kind: str) -> None:
    async with open_client(server.url) as pipe:
        assert await probe_capabilities(await pipe.up(), TAG) == EXPECTED[server_kind]


@pytest.mark.servers
async def test_the_probe_leaves_nothing_behind(server: Server | Cluster) -> None:
    async with open_client(server.url) as pipe:
        await probe_capabilities(await pipe.up(), TAG)
    nodes = server.nodes if hasattr(server, "nodes") else [server]
    assert [node.client().dbsize() for node in nodes] == [0] * len(nodes)


@pytest.mark.servers("redis86")
async def test_a_server_that_cannot_answer_now_is_not_taken_for_one_that_cannot(server: Server) -> None:
    async with open_client(server.url) as pipe:
        connection = await pipe.up()
        server.config_set(maxmemory=1)
        with pytest.raises(ServerError, match="OOM"):
            await probe_capabilities(connection, TAG)
        server.config_set(maxmemory=0)
        assert await probe_capabilities(connection, TAG) == ALL


async def test_a_replica_is_not_taken_for_a_server_that_cannot(fresh_server: Callable[..., Server]) -> None:
    replica = fresh_server("redis86", replicaof=fresh_server("redis86"))
    async with open_client(replica.url) as pipe:
        with pytest.raises(ServerError, match="READONLY"):
            await probe_capabilities(await pipe.up(), TAG)


@pytest.mark.servers("redis86")
async def test_what_the_user_may_not_use_is_not_there(server: Server) -> None:
    with acl_user(server, "ada", "pw", "~*", "+@all", "-xackdel"):
        async with open_client(server.url.replace("redis://", "redis://ada:pw@")) as pipe:
            found = await probe_capabilities(await pipe.up(), TAG)
    assert found == Capabilities(xackdel=False, read_claim=True, xadd_idmp=True, script_flags=True)


async def test_a_connection_lost_while_probing_is_no_answer(server: Server) -> None:
    async with open_client(server.url) as pipe:
        connection = await pipe.up()
        connection.close()
        with pytest.raises(ConnectionLost):
            await probe_capabilities(connection, TAG)
