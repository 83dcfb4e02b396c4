"""The queues of a server: a hash that workers write, and a scan of all keys, the more rarely the longer it takes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from tampu.base.clock import wall_clock_ms
from tampu.errors import ConfigError
from tampu.inspect.streams import find_queues
from tampu.redis.client import Client
from tampu.redis.faults import ServerError
from tampu.redis.nodes import SharedConnections
from tampu.redis.settings import Address
from tampu.wire.keys import QueueKeys

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tampu.redis.scripts import Script
    from tampu.redis.settings import ConnectionSettings

#: Routing key for commands about the server rather than a queue: on a Cluster they go to the node that owns this key.
ANY_KEY = b"{chasqui:}"
#: The hash of queues: the names, each with the time (ms) at which a worker last said that it serves it.
REGISTRY = "{chasqui:}:queues"
#: How often workers write it, in seconds, and after how long an entry no longer counts, in milliseconds.
REGISTER_SECS = 3600.0
REGISTERED_MS = 24 * 3600 * 1000
#: Shortest time between two scans, in seconds; one that took a second is repeated after ten minutes.
SCAN_SECS = 30.0
SCAN_FACTOR = 600


def register_command(names: Iterable[str], now_ms: int) -> tuple[str | int, ...]:
    """Return the command that registers queues."""
    return ("HSET", REGISTRY, *(part for name in names for part in (name, now_ms)))


class ServerView:
    """The connections of one reader to a server, and the queues there. A server that is away is not waited for."""

    def __init__(
        self, settings: ConnectionSettings, scripts: Sequence[Script] = (), patience_secs: float = 2.0
    ) -> None:
        self.settings = settings
        self.patience_secs = patience_secs
        self.names: set[str] = set()
        self.unusable: set[bytes] = set()
        self._scripts = scripts
        #: On a Cluster, the clients of all queues share a connection for each node.
        self._shared = SharedConnections() if settings.kind == "cluster" else None
        self._clients: dict[str, Client] = {}
        self._masters: list[tuple[str, Client]] = []
        self._scan_at = 0.0
        self._scan: asyncio.Task[None] | None = None

    async def client(self, queue: str = "") -> Client:
        """Return a connected client for a queue, or for the server."""
        name = queue if self._shared is not None else ""
        client = self._clients.get(name)
        if client is None:
            key = QueueKeys(name).tag.encode() if name else ANY_KEY
            client = self._clients[name] = Client(
                self.settings, key, self._scripts, shared=self._shared, may_lack_scripts=True
            )
        if client.connection is None:
            await client.up(self.patience_secs)
        return client

    async def clients(self, queues: Iterable[str]) -> dict[str, Client]:
        """Return the clients of queues, by name."""
        return {name: await self.client(name) for name in queues}

    async def find(self) -> set[str]:
        """Return the names of all queues that are known. The first scan is waited for, later ones are not."""
        if self._scan is None or (self._scan.done() and time.monotonic() >= self._scan_at):
            self._scan = asyncio.create_task(self._rescan(), name="tampu-scan")
            self._scan.add_done_callback(lambda task: task.cancelled() or task.exception())
        if not self.names:
            async with asyncio.timeout(30):
                await asyncio.shield(self._scan)
        client = await self.client()
        with contextlib.suppress(ServerError):  # an ACL for one queue, or a key of the wrong type
            flat = await client.call("HGETALL", REGISTRY, patience_secs=self.patience_secs)
            oldest_ms = wall_clock_ms() - REGISTERED_MS
            for name, stamp in zip(flat[::2], flat[1::2], strict=True):
                if stamp.isdigit() and int(stamp) > oldest_ms:
                    self._note(name)
        return self.names

    def _note(self, name: bytes) -> None:
        try:
            self.names.add(QueueKeys(name.decode()).queue_name)
        except (UnicodeDecodeError, ConfigError):
            self.unusable.add(name)

    async def _rescan(self) -> None:
        started = time.monotonic()
        found = await find_queues([client for _, client in await self.nodes()])
        self.names, self.unusable = set(found.names), set(found.unusable)
        self._scan_at = time.monotonic() + max((time.monotonic() - started) * SCAN_FACTOR, SCAN_SECS)

    async def nodes(self) -> list[tuple[str, Client]]:
        """Return the name of, and a client for, each server with data: a single one, or a Cluster's masters."""
        client = await self.client()
        if self._shared is None:
            return [(", ".join(map(str, self.settings.addresses)) or "the embedded server", client)]
        if not self._masters:
            first = self.settings.addresses[0].host
            slots = await client.call("CLUSTER", "SLOTS")
            for address in sorted({Address(slot[2][0].decode() or first, slot[2][1]) for slot in slots}, key=str):
                single = replace(self.settings, kind="single", addresses=(address,))
                self._masters.append((str(address), Client(single, ANY_KEY)))
        for _, master in self._masters:
            await master.up(self.patience_secs)
        return self._masters

    async def close(self) -> None:
        """Close all connections."""
        if self._scan is not None:
            self._scan.cancel()
            await asyncio.gather(self._scan, return_exceptions=True)
        clients = (*self._clients.values(), *(master for _, master in self._masters))
        await asyncio.gather(*(client.close() for client in clients))
