"""A lock that one of several processes holds: taken, renewed while it lives, released when it stops."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from tampu.redis.scripts import load_script

if TYPE_CHECKING:
    from collections.abc import Callable

    from tampu.redis.pipe import Pipe

logger = logging.getLogger("tampu.worker")

LEAD = load_script("lead")
RESIGN = load_script("resign")


class Leader:
    """One candidate for one lock. `on_change(is_ours)` is told of changes only."""

    def __init__(
        self, pipe: Pipe, lock_key: str, holder_id: str, ttl_secs: int, on_change: Callable[[bool], None]
    ) -> None:
        self._pipe = pipe
        self._lock_key = lock_key
        self._holder_id = holder_id
        self._ttl_secs = ttl_secs
        self._on_change = on_change
        self._was_ours: bool | None = None

    async def lead(self) -> bool:
        """Take or renew the lock; whether it is ours."""
        reply = await self._pipe.run(
            LEAD, (self._lock_key,), (self._holder_id, self._ttl_secs), patience_secs=self._ttl_secs
        )
        is_ours = bool(reply)
        if is_ours != self._was_ours:
            self._was_ours = is_ours
            self._on_change(is_ours)
        return is_ours

    async def resign(self) -> None:
        """Release the lock if it is ours, so that a spare takes over at once and not after the TTL."""
        if self._was_ours:
            await self._pipe.run(RESIGN, (self._lock_key,), (self._holder_id,), patience_secs=1)
            self._was_ours = None
