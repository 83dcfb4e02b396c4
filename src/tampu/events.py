"""Follows the events of a queue as an async iterator.

async for event in QueueEvents("emails"):
    print(event.name, event.job_id, event.fields)
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Self

from tampu.base.checks import check_int
from tampu.errors import RedisError, ShutdownError
from tampu.inspect.streams import newest_id
from tampu.maintain.supervise import logger
from tampu.redis.client import Client, backoff_secs
from tampu.redis.faults import Remedy, ServerError
from tampu.redis.settings import parse_url, resolve_url
from tampu.wire.events import QueueEvent, decode_event_fields
from tampu.wire.keys import QueueKeys

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from types import TracebackType

#: How long a read may exceed its BLOCK time before the connection counts as lost, in seconds.
READ_MARGIN_SECS = 5.0


class QueueEvents:
    """Follows the events of one queue, and reconnects after a lost connection.

        async with QueueEvents("emails") as events:
            async for event in events:
                print(event.name, event.job_id, event.fields)

    Args:
        queue_name: Name of the queue.
        url: Server URL. Defaults to `TAMPU_URL`, then to `redis://127.0.0.1:6379`.
        redis_url: Another name for `url`.
        tls: Connect with TLS.
        last_event_id: Start after this event. `"$"` (default) starts now, `"0-0"` at the oldest event that is kept.
        block_ms: How long one read waits for events, in milliseconds.
        count: Maximum number of events per read.
        credential_provider: Callable or redis-py `CredentialProvider` that returns the credentials.
    """

    def __init__(
        self,
        queue_name: str,
        *,
        url: str | None = None,
        redis_url: str | None = None,
        tls: bool = False,
        last_event_id: str = "$",
        block_ms: int = 5000,
        count: int = 100,
        credential_provider: Any = None,
    ) -> None:
        self._keys = QueueKeys(queue_name)
        self._settings = parse_url(resolve_url(url, redis_url, tls=tls), credential_provider=credential_provider)
        self._last_id = last_event_id
        self._block_ms = check_int("block_ms", block_ms, low=1)
        self._count = check_int("count", count, low=1)
        self._client: Client | None = None
        self._closed = False

    @property
    def name(self) -> str:
        """Name of the queue."""
        return self._keys.queue_name

    @property
    def last_event_id(self) -> str:
        """ID of the last event seen. Pass it to another `QueueEvents` to continue from there."""
        return self._last_id

    async def __aiter__(self) -> AsyncIterator[QueueEvent]:
        async for _, event in self.entries():
            yield event

    async def entries(self) -> AsyncIterator[tuple[str, QueueEvent]]:
        """Yield (ID, event) pairs, for callers that store their position."""
        while not self._is_closed():
            for entry_id, fields in await self._read():
                self._last_id = entry_id.decode()
                yield self._last_id, decode_event_fields(fields)
                if self._is_closed():
                    return

    async def _read(self) -> list[Any]:
        """Return the next entries; reconnect after a lost connection."""
        attempt = 0
        while not self._is_closed():
            try:
                await self.pin()
                reply = await self._opened().call(
                    *("XREAD", "COUNT", self._count, "BLOCK", self._block_ms),
                    *("STREAMS", self._keys.events, self._last_id),
                )
            except (RedisError, ShutdownError) as error:
                if self._is_closed():
                    break
                if isinstance(error, ServerError) and error.remedy is Remedy.NONE:
                    raise  # a wrong password or missing permission: retrying does not help
                if attempt == 0:
                    logger.warning("events of queue %r: waiting for the server: %s", self.name, error)
                attempt += 1
                await asyncio.sleep(backoff_secs(attempt))
                continue
            if reply:
                return list(reply[0][1])
            attempt = 0
        return []

    async def pin(self) -> None:
        """Fix the start position now, so that an iteration that starts later misses no event from here on."""
        if self._last_id == "$":
            # Resolve `$` only once: sent again after a reconnect, it would skip the events in between.
            newest = await newest_id(self._opened(), self._keys.events)
            if self._last_id == "$":
                self._last_id = newest

    def abandon(self) -> None:
        """Drop the connection without closing it: its event loop has ended, or a parent process still uses it."""
        self._closed = True
        if self._client is not None:
            self._client.abandon()

    def _opened(self) -> Client:
        if self._client is None:
            timeout = self._block_ms / 1000 + READ_MARGIN_SECS
            self._client = Client(self._settings, self._keys.tag.encode(), response_timeout_secs=timeout)
        return self._client

    def _is_closed(self) -> bool:
        return self._closed

    async def close(self) -> None:
        """End the iteration and close the connection."""
        self._closed = True
        if self._client is not None:
            await self._client.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
