"""Connections to the nodes of a Cluster that the clients of many queues share.

The `Client` of a queue attaches to the connection of the node that serves its slot. If the slot moves, it detaches and
attaches to that of another node; the other queues keep theirs.

| class | a connection per node |
|---|---|
| `SharedConnections` | for requests that do not block |
| `WatchingConnections` | that also reports changes of keys, because a read cannot block on keys in different slots |
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from tampu.errors import RedisError
from tampu.redis.connection import Connection, pack_command
from tampu.redis.faults import ConnectionLost, ServerError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tampu.redis.connection import Reply
    from tampu.redis.settings import Address

logger = logging.getLogger("tampu.redis")

#: The channel on which a server reports changed keys to clients that speak RESP2.
CHANGES_CHANNEL = "__redis__:invalidate"
#: How often the connection that receives changes is checked, in seconds: it is silent while nothing changes.
PING_SECS = 5.0
_PING = pack_command(("PING",))

AnyConnection = TypeVar("AnyConnection", bound=Connection)


class OpenConnection(Protocol):
    """Opens a connection to a node and logs in."""

    async def __call__(self, address: Address, kind: type[AnyConnection]) -> AnyConnection: ...


class WatchRefused(RedisError):  # noqa: N818 - what happened, not a kind of error
    """The server does not report changes of keys to this user."""


class _Node:
    """The connection to one node."""

    def __init__(self, opening: asyncio.Task[Connection]) -> None:
        self.opening = opening
        #: Clients that use the connection or wait for it.
        self.users = 0

    @property
    def connection(self) -> Connection | None:
        """The connection; None if it is not open yet, or could not be opened."""
        opening = self.opening
        return None if not opening.done() or opening.cancelled() or opening.exception() else opening.result()

    @property
    def is_over(self) -> bool:
        """Return True if the connection could not be opened, or is lost."""
        connection = self.connection
        return self.opening.done() and (connection is None or not connection.is_up)


class SharedConnections:
    """One connection per node, open while a client uses it."""

    def __init__(self) -> None:
        self._nodes: dict[Address, _Node] = {}

    async def attach(self, address: Address, open_one: OpenConnection) -> Connection:
        """Return the connection to this node. The first client opens it, for all."""
        node = self._nodes.get(address)
        if node is None or node.is_over:
            opening = asyncio.get_running_loop().create_task(self._open(address, open_one), name="tampu-connect")
            opening.add_done_callback(lambda task: task.cancelled() or task.exception())  # if no client waits any more
            # Also forget nodes that are gone: in a container each new one has a new address.
            self._nodes = {other: node for other, node in self._nodes.items() if not node.is_over}
            node = self._nodes[address] = _Node(opening)
        node.users += 1
        try:
            return await asyncio.shield(node.opening)
        except BaseException:
            self._leave(node)
            raise

    def detach(self, connection: Connection) -> None:
        """Note that a client no longer uses this connection. The last one closes it."""
        for node in self._nodes.values():
            if node.connection is connection:
                self._leave(node)
                return

    def _leave(self, node: _Node) -> None:
        node.users -= 1
        if node.users:
            return
        node.opening.cancel()
        if (connection := node.connection) is not None:
            connection.close()
        self._nodes = {address: other for address, other in self._nodes.items() if other is not node}

    async def _open(self, address: Address, open_one: OpenConnection) -> Connection:
        return await open_one(address, Connection)


class WatchingConnection(Connection):
    """A connection whose server reports changes of the keys that were read on it.

    A change is reported once; to hear of the next, read the key again.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        #: Called when the key changes.
        self._watchers: dict[bytes, Callable[[], None]] = {}
        #: The connection on which the server reports changes.
        self.reports: Connection | None = None
        self._pinging: asyncio.TimerHandle | None = None

    def watch(self, key: str, on_change: Callable[[], None]) -> None:
        """Call `on_change` when this key changes after it was read."""
        self._watchers[key.encode()] = on_change

    async def receive_on(self, reports: Connection) -> None:
        """Receive reports of changed keys on another connection to the same node."""
        reports.on_push = self._on_report
        client_id = await reports.ask("CLIENT", "ID")
        await reports.ask("SUBSCRIBE", CHANGES_CHANNEL)
        # NOLOOP: do not report keys that this connection changes itself.
        await self.ask("CLIENT", "TRACKING", "ON", "REDIRECT", client_id, "NOLOOP")
        self.reports = reports
        # The server does not report the loss of either connection to the other one: if one is lost, close the other.
        reports.on_loss(self.close)
        self.on_loss(self._stop)
        if not reports.is_up:
            self.close()
        self._ping()

    def _ping(self) -> None:
        if self.is_up and self.reports is not None:
            self.reports.request(_PING, self._on_report)  # a report may come before its reply
            self._pinging = asyncio.get_running_loop().call_later(PING_SECS, self._ping)

    def _stop(self) -> None:
        if self._pinging is not None:
            self._pinging.cancel()
        if self.reports is not None:
            self.reports.close()

    def _on_report(self, reply: Reply) -> None:
        if not isinstance(reply, list) or reply[0] != b"message":
            return  # the reply to a ping
        keys = self._watchers if reply[2] is None else reply[2]  # None: all keys were deleted
        for key in list(keys):
            if (on_change := self._watchers.get(key)) is not None:
                on_change()


class WatchingConnections(SharedConnections):
    """One watching connection per node."""

    def __init__(self) -> None:
        super().__init__()
        self._has_warned = False

    async def _open(self, address: Address, open_one: OpenConnection) -> Connection:
        """Return a watching connection. Raises `WatchRefused` if the server does not let this user watch keys."""
        connection = await open_one(address, WatchingConnection)
        reports: Connection | None = None
        try:
            reports = await open_one(address, Connection)
            await connection.receive_on(reports)
        except BaseException as error:
            connection.close()
            if reports is None:
                raise  # the login failed, or the server has no room for one more connection
            reports.close()
            if isinstance(error, ServerError) and "ID you want redirect to does not exist" in str(error):
                raise ConnectionLost(f"the connection for reports was lost: {error}") from error
            if isinstance(error, ServerError) and error.kind in ("NOPERM", "ERR"):
                self._warn(error)
                raise WatchRefused(str(error)) from error
            raise
        return connection

    def _warn(self, error: ServerError) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "this user may not watch keys, so each queue on the Cluster has two dedicated connections; see `tampu "
                "acl --role worker`: %s",
                error,
            )
