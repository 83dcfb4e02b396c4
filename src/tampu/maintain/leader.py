"""A lock that one of several processes holds: taken, renewed while it lives, released when it stops.

`run_standalone` runs such a process outside a worker: a `Promoter` or a `Scheduler`.
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

#: The lock is renewed when this share of its TTL has passed.
RENEW_SHARE = 0.3
#: How often a spare looks whether the lock was released, in seconds. It also looks the moment the lock runs out.
STANDBY_SECS = 0.25
#: How long a round under way may take when it is time to stop, in seconds.
LAST_ROUND_SECS = 1.0


class Leader:
    """One candidate for one lock. `on_change(is_ours)` is told of changes only."""

    def __init__(
        self, client: Client, lock_key: str, holder_id: str, ttl_secs: int, on_change: Callable[[bool], None]
    ) -> None:
        self._client = client
        self._lock_key = lock_key
        # Two that were given the same id, or the same settings, must not both believe they lead.
        self._holder_id = f"{holder_id}:{uuid.uuid4().hex}"
        self._ttl_secs = ttl_secs
        self._on_change = on_change
        self._was_ours: bool | None = None
        self._renew_at = 0.0
        #: When the lock was last seen in the hands of another, by the monotonic clock.
        self.others_led_at = 0.0

    async def work(self, role: str, one_round: Callable[[], Awaitable[float]], shutdown: asyncio.Event) -> None:
        """Do rounds while the lock is ours, stand by while it is not; release it at shutdown.

        `one_round` answers how long to wait for the next, in seconds; 0 for at once.
        """

        async def next_round() -> None:
            wait_secs = await self.lead() or min(await one_round(), self._renew_at - time.monotonic())
            if wait_secs > 0:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(shutdown.wait(), wait_secs)

        rounds = asyncio.ensure_future(supervise(role, next_round, shutdown.is_set))
        try:
            await shutdown.wait()
            # One that waits for a server that is away is not waited for.
            await asyncio.wait([rounds], timeout=LAST_ROUND_SECS)
        finally:
            rounds.cancel()
            await asyncio.gather(rounds, return_exceptions=True)
            with contextlib.suppress(Exception):  # then the lock runs out by itself
                await self.resign()

    async def lead(self) -> float:
        """Take the lock, or renew it when it is time. 0: it is ours; otherwise ask again after so many seconds."""
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
        """Release the lock if it is ours, so that a spare takes over at once and not after the TTL."""
        self._renew_at = 0.0
        self._was_ours = None
        await calls.resign(self._client, self._lock_key, holder=self._holder_id, patience_secs=1)


async def run_standalone(
    settings: ConnectionSettings,
    queue_name: str,
    scripts: Sequence[Script],
    work: Callable[[Client], Awaitable[None]],
) -> None:
    """Run `work` with a dedicated client. Raises at the start if there is no server at all."""
    client = Client(settings, QueueKeys(queue_name).tag.encode(), scripts)
    try:
        await client.up()
        await work(client)
    finally:
        await client.close()
