"""Clients of several queues on a Cluster share one connection per node, and leave it alone when their slot moves."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import TYPE_CHECKING, Any

import pytest

from support.waiting import until
from tampu.redis import discovery
from tampu.redis.client import Client
from tampu.redis.faults import ServerError
from tampu.redis.nodes import SharedConnections, WatchingConnection, WatchingConnections, WatchRefused
from tampu.redis.settings import Address, parse_url
from tampu.wire.keys import QueueKeys

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from servers.cluster import Cluster
    from servers.process import Server
    from tampu.redis.connection import Connection


@contextlib.asynccontextmanager
async def clients_of(cluster: Cluster, shared: SharedConnections, *names: str) -> AsyncIterator[list[Client]]:
    """Open a client for each of these queues."""
    clients = [Client(parse_url(cluster.url), QueueKeys(name).tag.encode(), shared=shared) for name in names]
    try:
        yield clients
    finally:
        for client in clients:
            await client.close()


def names_at(cluster: Cluster, node: Server, count: int) -> list[str]:
    """Return names of queues whose slots are at this node."""
    client = cluster.client()
    names = (f"q{number}" for number in itertools.count())
    found = (name for name in names if client.get_node_from_key(QueueKeys(name).tag).port == node.port)
    return list(itertools.islice(found, count))


def connections_to(node: Server) -> list[dict[str, str]]:
    return [one for one in node.client().client_list() if one["name"] == "tampu" and int(one["id"]) > node.reset_id]


@pytest.mark.servers("cluster86")
async def test_clients_of_one_node_share_a_connection_until_the_last_leaves(server: Cluster) -> None:
    node = server.masters[0]
    async with clients_of(server, SharedConnections(), *names_at(server, node, 3)) as clients:
        connections = await asyncio.gather(*(client.up() for client in clients))
        assert len(set(connections)) == len(connections_to(node)) == 1
        for client in clients[:2]:
            await client.close()
        assert await clients[2].call("PING") == b"PONG"
    await until(lambda: not connections_to(node), "it is closed")


@pytest.mark.servers("cluster86")
async def test_a_lost_connection_is_replaced_by_one_for_all(server: Cluster) -> None:
    node = server.masters[0]
    async with clients_of(server, SharedConnections(), *names_at(server, node, 3)) as clients:
        first, *_ = [await client.up() for client in clients]
        node.client().client_kill_filter(_id=connections_to(node)[0]["id"])
        await until(lambda: not first.is_up, "it is lost")
        assert await asyncio.gather(*(client.call("PING") for client in clients)) == [b"PONG"] * 3
        assert len({client.connection for client in clients}) == len(connections_to(node)) == 1


async def test_a_client_whose_slot_moves_leaves_the_others_connected(fresh_server: Callable[..., Cluster]) -> None:
    cluster = fresh_server("cluster86")
    source, target = cluster.masters[:2]
    moved, stays = names_at(cluster, source, 2)
    lost: list[str] = []
    async with clients_of(cluster, SharedConnections(), moved, stays) as (moving, staying):
        moving.on_loss(lambda: lost.append(moved))
        staying.on_loss(lambda: lost.append(stays))
        connection = await staying.up()
        await moving.call("SET", QueueKeys(moved).paused, "1")
        await asyncio.to_thread(cluster.move_slot, QueueKeys(moved).tag, target)
        # Sent together on one connection: one reply is a redirection.
        replies = await asyncio.gather(
            moving.call("GET", QueueKeys(moved).paused), staying.call("GET", QueueKeys(stays).paused)
        )
        assert list(replies) == [b"1", None]
        assert staying.connection is connection
        assert moving.connection not in (None, connection)
        assert len(connections_to(target)) == 1
        assert lost == [moved]
    assert lost == [moved, moved, stays]  # each connection once, at the end


@pytest.mark.servers("cluster86")
async def test_many_clients_ask_for_the_slots_once(server: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    questions = []
    ask = discovery._ask_for_slots

    async def count(*args: Any) -> Any:
        questions.append(args)
        return await ask(*args)

    monkeypatch.setattr(discovery, "_ask_for_slots", count)
    names = [f"q{number}" for number in range(50)]
    async with clients_of(server, SharedConnections(), *names) as clients:
        await asyncio.gather(*(client.up() for client in clients))
        assert len(questions) == 1
        addresses = {name: str(client.connection._peer) for name, client in zip(names, clients, strict=True)}  # type: ignore[union-attr]
    client = server.client()
    assert addresses == {name: f"127.0.0.1:{client.get_node_from_key(QueueKeys(name).tag).port}" for name in names}


@pytest.mark.servers("cluster86")
@pytest.mark.parametrize("flag", ["t", "P"])
async def test_watched_keys_are_reported_until_either_connection_is_lost(server: Cluster, flag: str) -> None:
    node = server.masters[0]
    [name] = names_at(server, node, 1)
    key = QueueKeys(name).stream
    changed, lost = asyncio.Event(), asyncio.Event()
    async with clients_of(server, WatchingConnections(), name) as [client]:
        client.on_loss(lost.set)
        for _ in range(2):
            connection = await client.up()
            assert isinstance(connection, WatchingConnection)
            assert len(connections_to(node)) == 2
            connection.watch(key, changed.set)
            for change in (lambda: node.client().xadd(key, {"d": "1"}), lambda: node.client().flushall()):
                changed.clear()
                await client.call("EXISTS", key)
                change()
                await asyncio.wait_for(changed.wait(), 20)
            lost.clear()
            [found] = [one for one in connections_to(node) if flag in one["flags"]]
            node.client().client_kill_filter(_id=found["id"])
            await asyncio.wait_for(lost.wait(), 20)
    await until(lambda: not connections_to(node), "both are closed")


async def test_a_refused_login_does_not_mean_that_keys_cannot_be_watched() -> None:
    opened: list[Connection] = []

    async def open_one(address: Address, kind: type[Any]) -> Any:
        if opened:
            raise ServerError("ERR max number of clients reached")
        opened.append(kind(asyncio.get_running_loop(), 1.0))
        return opened[0]

    with pytest.raises(ServerError, match="max number of clients") as raised:  # `WatchRefused` would be for good
        await WatchingConnections().attach(Address("127.0.0.1", 1), open_one)
    assert not isinstance(raised.value, WatchRefused)
    assert opened[0].loss is not None


async def test_nodes_that_are_gone_are_forgotten() -> None:
    shared = SharedConnections()

    async def open_one(address: Address, kind: type[Any]) -> Any:
        connection = kind(asyncio.get_running_loop(), 1.0)
        connection.is_up = True
        return connection

    for port in range(1, 4):  # each node is replaced by one with another address
        connection = await shared.attach(Address("127.0.0.1", port), open_one)
        assert list(shared._nodes) == [Address("127.0.0.1", port)]
        connection.close()
