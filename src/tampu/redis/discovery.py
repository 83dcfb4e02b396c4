"""Find the address to connect to: the given one, the embedded server, the sentinels' master, or a slot's Cluster node.

Sentinels and Clusters are queried with redis-py. It is imported only then, because that takes longer than importing all
of tampu.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

from tampu.embedded.server import EmbeddedLease
from tampu.redis.faults import ServerError, Unreachable, without_secrets
from tampu.redis.settings import Address, ConnectionSettings, resolve_credentials

if TYPE_CHECKING:
    from collections.abc import Callable

    from redis.credentials import CredentialProvider

    #: Returns the node of a key's slot.
    NodeOf = Callable[[bytes], Address]

#: How long a Cluster query may still run after it was cancelled, in seconds.
LAST_ANSWER_SECS = 1.0
#: How long the answer to a Cluster query is used for other queues, in seconds. If a slot moves meanwhile, the node
#: redirects its clients.
REUSE_SECS = 0.25
#: The nodes of a Cluster at its last query, by the addresses of its URL: those may all be down by now.
_learned_nodes: dict[tuple[Address, ...], list[Address]] = {}
#: The queries of each event loop, by the identity of their settings.
_queries: dict[asyncio.AbstractEventLoop, dict[object, _Query]] = {}


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
    from redis.asyncio.retry import Retry
    from redis.asyncio.sentinel import Sentinel
    from redis.backoff import NoBackoff
    from redis.exceptions import RedisError as RedisPyError

    sentinel = Sentinel(  # type: ignore[no-untyped-call]  # redis-py types it only in part
        [(address.host, address.port) for address in settings.addresses],
        sentinel_kwargs={
            "username": settings.sentinel_username,
            "password": settings.sentinel_password,
            "retry": Retry(NoBackoff(), 0),  # do not wait for a sentinel that is down: ask the next
            **_common_options(settings),
        },
    )
    try:
        host, port = await sentinel.discover_master(settings.master_name)
    except (RedisPyError, OSError) as error:
        asked = ", ".join(map(str, settings.addresses))
        said = without_secrets(error, settings.sentinel_password)
        raise Unreachable(f"no sentinel at {asked} knows a master named {settings.master_name!r}: {said}") from None
    finally:
        for client in sentinel.sentinels:
            await client.aclose()
    return Address(host, port)


async def ask_cluster(settings: ConnectionSettings, routing_key: bytes) -> Address:
    """Return the node of a key's slot. Callers that ask at about the same time share one query.

    If the last of them is cancelled, let the query finish first: redis-py would leak sockets.
    """
    for loop in list(_queries):  # a copy: other threads have their own loops
        if loop.is_closed():
            _queries.pop(loop, None)
    queries = _queries.setdefault(asyncio.get_running_loop(), {})
    query = queries.get(settings.identity)
    if query is None:
        query = queries[settings.identity] = _Query(asyncio.ensure_future(_ask_for_slots(settings)))
        query.asking.add_done_callback(partial(_forget_later, queries, settings.identity, query))
    query.callers += 1
    try:
        node_of = await asyncio.shield(query.asking)
    except asyncio.CancelledError:
        if query.callers == 1:
            _forget(queries, settings.identity, query)  # it may be cancelled below: no new caller may join it
            await asyncio.wait([query.asking], timeout=LAST_ANSWER_SECS)
            query.asking.cancel()
            await asyncio.gather(query.asking, return_exceptions=True)
        raise
    finally:
        query.callers -= 1
    return node_of(routing_key)


class _Query:
    """A query for the slots of a Cluster."""

    def __init__(self, asking: asyncio.Future[NodeOf]) -> None:
        self.asking = asking
        self.callers = 0


def _forget_later(
    queries: dict[object, _Query], identity: object, query: _Query, asking: asyncio.Future[NodeOf]
) -> None:
    if asking.cancelled() or asking.exception() is not None:
        _forget(queries, identity, query)
    else:
        asyncio.get_running_loop().call_later(REUSE_SECS, _forget, queries, identity, query)


def _forget(queries: dict[object, _Query], identity: object, query: _Query) -> None:
    if queries.get(identity) is query:
        del queries[identity]


async def _ask_for_slots(settings: ConnectionSettings) -> NodeOf:
    """Return a function that returns the node of a key's slot."""
    from redis.asyncio.cluster import ClusterNode, RedisCluster
    from redis.exceptions import AuthenticationError, RedisClusterException
    from redis.exceptions import RedisError as RedisPyError

    learned = _learned_nodes.get(settings.addresses, ())
    cluster: RedisCluster = RedisCluster(
        startup_nodes=[ClusterNode(address.host, address.port) for address in (*settings.addresses, *learned)],
        **_common_options(settings),
        **_login_options(settings),
    )
    try:
        await cluster.initialize()
        _learned_nodes[settings.addresses] = [Address(str(each.host), int(each.port)) for each in cluster.get_nodes()]
    except (RedisPyError, RedisClusterException, OSError) as error:  # the second is not a subclass of the first
        refusal = error.__cause__
        if isinstance(refusal, AuthenticationError):  # redis-py removes the first word
            kind = "NOAUTH" if "required" in str(refusal) else "WRONGPASS"
            raise ServerError(f"{kind} the server refused the login") from None
        asked = ", ".join(map(str, settings.addresses))
        said = without_secrets(error, settings.password)
        raise Unreachable(f"no Cluster node at {asked} returned the slots: {said}") from None
    finally:
        await cluster.aclose()

    def node_of(routing_key: bytes) -> Address:
        try:
            node = cluster.get_node_from_key(routing_key.decode(errors="surrogateescape"))
        except (RedisPyError, RedisClusterException):
            node = None
        if node is None:
            raise Unreachable("the Cluster does not currently serve the queue's slot")
        return Address(str(node.host), int(node.port))

    return node_of


def _common_options(settings: ConnectionSettings) -> dict[str, Any]:
    options: dict[str, Any] = {
        "socket_connect_timeout": settings.connect_timeout_secs,
        "socket_timeout": settings.connect_timeout_secs,
        "protocol": 2,
    }
    if settings.tls:
        options |= {
            "ssl": True,
            "ssl_ca_certs": settings.ca_certs,
            "ssl_certfile": settings.certfile,
            "ssl_keyfile": settings.keyfile,
            "ssl_check_hostname": settings.check_hostname,
        }
    return options


def _login_options(settings: ConnectionSettings) -> dict[str, Any]:
    provider = settings.credential_provider
    if provider is not None:
        return {"credential_provider": _as_provider(provider)}
    return {"username": settings.username, "password": settings.password}


def _as_provider(source: Any) -> CredentialProvider:
    """Return a redis-py provider for the user's provider or callback."""
    from redis.credentials import CredentialProvider

    if isinstance(source, CredentialProvider):
        return source

    class FromCallback(CredentialProvider):
        def get_credentials(self) -> tuple[str]:
            raise NotImplementedError("only the asynchronous form is used")

        async def get_credentials_async(self) -> Any:
            username, password = await resolve_credentials(source, None)
            return (password,) if username is None else (username, password)

    return FromCallback()
