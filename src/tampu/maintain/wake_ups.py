"""Wake-ups: the scripts that delay jobs announce the earliest one, so that the promoter does not have to poll for it.

Each queue has a wake stream of one entry. A script that adds the earliest job of the delayed set appends an entry, and
one blocked read waits for the wake streams of all queues that this process leads. On a Cluster, where a read cannot
wait for several slots, a shared connection watches them instead. A lost wake-up delays a job but never loses it: the
leader loop also polls, only less often.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from tampu.base.clock import secs_until_round
from tampu.errors import RedisError
from tampu.redis.client import Client
from tampu.redis.nodes import WatchingConnection

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tampu.redis.connection import Connection
    from tampu.redis.nodes import WatchingConnections
    from tampu.redis.settings import ConnectionSettings

#: How long one read waits for wake-ups, in seconds. Queues that it begins to lead meanwhile join the next read.
BLOCK_SECS = 5.0
#: How long a read may take beyond that before the connection counts as lost, in seconds.
MARGIN_SECS = 5.0
#: Minimum time between two reads, in seconds: a flood of delayed jobs must not become a flood of reads.
PAUSE_SECS = 0.005
#: How long to wait while there is nothing to listen to, in seconds.
IDLE_SECS = 0.25


class WakeUps:
    """Listens to wake streams over a dedicated connection. Calls `on_wake` with the key of each with a new entry.

    `watching` replaces the dedicated connection with shared ones.
    """

    def __init__(
        self,
        settings: ConnectionSettings,
        routing_key: bytes,
        on_wake: Callable[[str], None],
        watching: WatchingConnections | None = None,
    ) -> None:
        self._client = Client(settings, routing_key, response_timeout_secs=BLOCK_SECS + MARGIN_SECS, shared=watching)
        self._client.on_loss(self._record_loss)
        self._on_wake = on_wake
        #: Set when a watched stream changes, or the connection is lost.
        self._changed = asyncio.Event()
        #: The keys whose wake-ups arrive: all others must be polled.
        self.heard: frozenset[str] = frozenset()
        #: ID of the last entry seen in each stream; none at first. Reads continue from it, so they miss no wake-up.
        self._last_ids: dict[str, bytes] = {}

    @property
    def sockets(self) -> set[Connection]:
        """The open connections."""
        return self._client.sockets

    def _record_loss(self) -> None:
        self.heard = frozenset()
        self._changed.set()

    async def listen_once(self, keys: Sequence[str]) -> None:
        """Wait up to `BLOCK_SECS` for wake-ups in these streams."""
        if not keys:
            self.heard = frozenset()
            await asyncio.sleep(IDLE_SECS)
            return
        connection = await self._client.up()
        self.heard = frozenset(keys)
        try:
            if isinstance(connection, WatchingConnection):
                await self._watch(connection, keys)
            else:
                self._update(await self._client.call(*self._command(keys, "BLOCK", int(BLOCK_SECS * 1000))))
        except RedisError:  # such as a stream that an ACL denies: until it can be read, the sets are polled
            self.heard = frozenset()
            raise
        await asyncio.sleep(PAUSE_SECS)

    async def _watch(self, connection: WatchingConnection, keys: Sequence[str]) -> None:
        """Read the streams, which makes the server report their next change. If nothing is new, wait for it."""
        for key in keys:
            connection.watch(key, self._changed.set)
        self._changed.clear()
        reply = await self._client.call(*self._command(keys))
        self._update(reply)
        if not reply and connection is self._client.connection:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(secs_until_round(BLOCK_SECS)):
                    await self._changed.wait()

    def _command(self, keys: Sequence[str], *options: str | int) -> tuple[str | int | bytes, ...]:
        return ("XREAD", *options, "STREAMS", *keys, *(self._last_ids.get(key, b"0-0") for key in keys))

    def _update(self, reply: list[tuple[bytes, list[tuple[bytes, object]]]] | None) -> None:
        for key, entries in reply or ():
            name = key.decode()
            self._last_ids[name] = entries[-1][0]
            self._on_wake(name)

    async def close(self) -> None:
        """Stop listening."""
        self.heard = frozenset()
        await self._client.close()
