"""Leader election with a lock on the server: one of several processes holds it and renews it while alive.

`run_standalone` runs a `Promoter` or a `Scheduler` outside of a worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from typing import TYPE_CHECKING

from tampu.maintain.supervise import supervise
from tampu.redis import calls
from tampu.redis.client import Client
from tampu.wire.keys import QueueKeys

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from tampu.redis.scripts import Script
    from tampu.redis.settings import ConnectionSettings

#: The lock is renewed after this share of its TTL.
RENEW_SHARE = 0.3
#: How often a standby checks whether the lock was released, in seconds. It also checks when the lock expires.
STANDBY_SECS = 0.25
#: How long the current round may take at shutdown, in seconds.
LAST_ROUND_SECS = 1.0


class Leader:
    """One candidate for one lock. `on_change(is_ours)` is called when the lock is won or lost."""

    def __init__(
        self, client: Client, lock_key: str, holder_id: str, ttl_secs: int, on_change: Callable[[bool], None]
    ) -> None:
        self._client = client
        self._lock_key = lock_key
        # Two processes with the same configured id must not both believe they are the leader.
        self._holder_id = f"{holder_id}:{uuid.uuid4().hex}"
        self._ttl_secs = ttl_secs
        self._on_change = on_change
        self._was_ours: bool | None = None
        self._renew_at = 0.0
        #: When the lock was last seen in the hands of another, by the monotonic clock.
        self.others_led_at = 0.0

    async def work(self, role: str, one_round: Callable[[], Awaitable[float]], shutdown: asyncio.Event) -> None:
        """Run rounds while the lock is ours, stand by while it is not, and release it at shutdown.

        `one_round` returns the seconds until the next round; 0 for at once.
        """

        async def next_round() -> None:
            wait_secs = await self.lead() or min(await one_round(), self._renew_at - time.monotonic())
            if wait_secs > 0:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(shutdown.wait(), wait_secs)

        rounds = asyncio.ensure_future(supervise(role, next_round, shutdown.is_set))
        try:
            await shutdown.wait()
            # Do not wait longer for a round that waits for an unreachable server.
            await asyncio.wait([rounds], timeout=LAST_ROUND_SECS)
        finally:
            rounds.cancel()
            await asyncio.gather(rounds, return_exceptions=True)
            with contextlib.suppress(Exception):  # then the lock expires
                await self.resign()

    async def lead(self) -> float:
        """Take the lock, or renew it when due. Return 0 if it is ours, otherwise the seconds until the next check."""
        if time.monotonic() < self._renew_at:
            return 0.0
        asked_at = time.monotonic()
        others_for_ms = await calls.lead(self._client, self._lock_key, holder=self._holder_id, ttl_secs=self._ttl_secs)
        is_ours = others_for_ms == 0
        if is_ours:
            self._renew_at = time.monotonic() + self._ttl_secs * RENEW_SHARE
        else:
            self.others_led_at = asked_at
        if is_ours != self._was_ours:
            self._was_ours = is_ours
            self._on_change(is_ours)
        if is_ours:
            return 0.0
        return STANDBY_SECS if others_for_ms < 0 else min((others_for_ms + 1) / 1000, STANDBY_SECS)

    async def resign(self) -> None:
        """Release the lock if it is ours, so that a standby takes over at once and not after the TTL."""
        self._renew_at = 0.0
        self._was_ours = None
        await calls.resign(self._client, self._lock_key, holder=self._holder_id, patience_secs=1)


async def run_standalone(
    settings: ConnectionSettings,
    queue_name: str,
    scripts: Sequence[Script],
    work: Callable[[Client], Awaitable[None]],
) -> None:
    """Run `work` with a dedicated client. Raises `RedisError` if the server cannot be reached at the start."""
    client = Client(settings, QueueKeys(queue_name).tag.encode(), scripts)
    try:
        await client.up()
        await work(client)
    finally:
        await client.close()
