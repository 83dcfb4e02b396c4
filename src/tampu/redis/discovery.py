"""Find the address to connect to, and open connections.

The address is the given one, the embedded server, the sentinels' master, or the node of a slot of a Cluster.
"""

from __future__ import annotations

import asyncio
import binascii
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tampu.embedded.server import EmbeddedLease
from tampu.errors import ConfigError
from tampu.redis.connection import Connection, Part, Reply
from tampu.redis.faults import ConnectionLost, ServerError, Unreachable, refused_login
from tampu.redis.settings import Address, ConnectionSettings, credentials_for

if TYPE_CHECKING:
    from tampu.redis.nodes import AnyConnection

    #: The slots of a Cluster: first, last and the node that serves them.
    Slots = list[tuple[int, int, Address]]

#: How long the answer to a Cluster query is used for other queues, in seconds. If a slot moves meanwhile, the node
#: redirects its clients.
REUSE_SECS = 0.25
#: The number of slots of a Cluster.
SLOTS = 16384
#: The nodes of a Cluster at its last query, by the addresses of its URL: those may all be down by now.
_learned_nodes: dict[tuple[Address, ...], list[Address]] = {}
#: The queries of each event loop, by the identity of their settings.
_queries: dict[tuple[asyncio.AbstractEventLoop, object], asyncio.Task[Slots]] = {}


async def locate(settings: ConnectionSettings, routing_key: bytes, lease: EmbeddedLease | None = None) -> Address:
    """Return the address that currently serves `routing_key`. Raises `Unreachable`.

    Starts an embedded server, which runs until `lease` is released or, without a lease, until the process ends.
    """
    if settings.kind == "embedded":
        server = await (lease or EmbeddedLease(settings.data_dir)).running()
        return Address(path=server.unix_socket)
    if settings.kind == "sentinel":
        return await ask_sentinels(settings)
    if settings.kind == "cluster":
        return await ask_cluster(settings, routing_key)
    return settings.addresses[0]


async def ask_sentinels(settings: ConnectionSettings) -> Address:
    """Return the address of the master, from the first sentinel that knows it."""
    login = replace(
        settings, username=settings.sentinel_username, password=settings.sentinel_password, credential_provider=None
    )
    answer = "they do not know it"
    for address in settings.addresses:
        try:
            master = await _ask(login, address, "SENTINEL", "MASTER", settings.master_name)
        except (ServerError, ConnectionLost, Unreachable) as error:
            answer = str(error)
            continue
        state = dict(zip(master[::2], master[1::2], strict=True))
        # A sentinel calls a server "down" before the failover: another one may know the new master already.
        flags = state[b"flags"].split(b",")
        if b"master" in flags and b"s_down" not in flags and b"o_down" not in flags:
            return Address(state[b"ip"].decode(), int(state[b"port"]))
        answer = f"{address} reports that it is down"
    asked = ", ".join(map(str, settings.addresses))
    raise Unreachable(f"no sentinel at {asked} knows a master named {settings.master_name!r}: {answer}")


async def ask_cluster(settings: ConnectionSettings, routing_key: bytes) -> Address:
    """Return the node of a key's slot. Callers that ask at about the same time share one query."""
    loop = asyncio.get_running_loop()
    for key in list(_queries):  # a copy: other threads have their own loops
        if key[0].is_closed():
            _queries.pop(key, None)
    key = loop, settings.identity
    query = _queries.get(key)
    if query is None or query.cancelled():
        query = _queries[key] = loop.create_task(_ask_for_slots(settings), name="tampu-cluster-slots")

        def forget(done: asyncio.Task[Slots]) -> None:
            is_useful = not done.cancelled() and done.exception() is None
            loop.call_later(REUSE_SECS if is_useful else 0, _queries.pop, key, None)

        query.add_done_callback(forget)
    slot = slot_of(routing_key)
    for first, last, node in await asyncio.shield(query):
        if first <= slot <= last:
            return node
    raise Unreachable("the Cluster does not currently serve the queue's slot")


def slot_of(key: bytes) -> int:
    """Return the Cluster slot of a key: that of its hash tag, if it has one."""
    _, _, rest = key.partition(b"{")
    tag, closed, _ = rest.partition(b"}")
    return binascii.crc_hqx(tag if tag and closed else key, 0) % SLOTS


async def _ask_for_slots(settings: ConnectionSettings) -> Slots:
    """Return the slots of a Cluster, from the first node that answers."""
    answer: Exception | None = None
    for address in (*settings.addresses, *_learned_nodes.get(settings.addresses, ())):
        try:
            ranges = await _ask(settings, address, "CLUSTER", "SLOTS")
        except (ServerError, ConnectionLost, Unreachable) as error:
            if isinstance(error, ServerError) and error.kind in ("NOAUTH", "WRONGPASS"):
                raise
            answer = error
            continue
        # A node without a name is the one that was asked.
        nodes = [
            [Address(host.decode() if host else address.host, port) for host, port, *_ in nodes]
            for _, _, *nodes in ranges
        ]
        _learned_nodes[settings.addresses] = list(dict.fromkeys(node for known in nodes for node in known))
        return [(first, last, known[0]) for (first, last, *_), known in zip(ranges, nodes, strict=True)]
    asked = ", ".join(map(str, settings.addresses))
    raise Unreachable(f"no Cluster node at {asked} returned the slots: {answer}")


async def _ask(settings: ConnectionSettings, address: Address, *command: Part) -> Reply:
    """Connect, log in, send one command and return its reply."""
    connection = await open_connection(settings, address, settings.connect_timeout_secs, Connection)
    try:
        logins = await log_in(connection, settings, address)
        reply = connection.ask(*command)
        for login in logins:
            try:
                await login
            except ServerError as error:
                raise refused_login(error) from None
        return await reply
    finally:
        connection.close()


async def open_connection(
    settings: ConnectionSettings,
    address: Address,
    response_timeout_secs: float,
    kind: type[AnyConnection],
) -> AnyConnection:
    """Open a connection to this address, without logging in. Raises `Unreachable`."""
    loop = asyncio.get_running_loop()

    def protocol() -> AnyConnection:
        return kind(loop, response_timeout_secs, str(address))

    options: dict[str, Any] = {"ssl": settings.ssl_context}
    try:
        async with asyncio.timeout(settings.connect_timeout_secs):
            if address.path:
                _, connection = await loop.create_unix_connection(protocol, address.path)
            else:
                _, connection = await loop.create_connection(protocol, address.host, address.port, **options)
    except TimeoutError:
        raise Unreachable(f"{address} did not accept a connection in {settings.connect_timeout_secs:g} s") from None
    except OSError as error:
        raise Unreachable(f"cannot connect to {address}: {error}") from error
    return connection


async def log_in(connection: Connection, settings: ConnectionSettings, address: Address) -> list[asyncio.Future[Reply]]:
    """Send the credentials, if there are any, and return the future of the reply."""
    username, password = await credentials_for(settings, address)
    if password is None:
        if username is not None:
            raise ConfigError(f"the URL has user {username!r} but no password; use redis://user:password@host")
        return []
    return [connection.ask("AUTH", username, password) if username else connection.ask("AUTH", password)]
