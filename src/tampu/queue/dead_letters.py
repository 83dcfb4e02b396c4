"""A queue's dead letters: look at them, put them back, throw them away."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tampu.queue.base import QueueBase

if TYPE_CHECKING:
    from tampu.engine.dead_letters import ReplayCount


class DeadLetters(QueueBase):
    """Jobs that nobody will try again by himself."""

    async def peek_dlq(self, limit: int = 20, **wanted: Any) -> list[dict[str, Any]]:
        """Up to `limit` dead letters as dicts, oldest first; filters are `ids`, `reason`, `name`, `older_than`."""
        return [asdict(entry) for entry in await self._producer.peek_dlq(limit, **wanted)]

    async def replay_dlq(self, limit: int = 100, **wanted: Any) -> ReplayCount:
        """Move up to `limit` dead letters back into the queue; how many were moved."""
        return await self._producer.replay_dlq(limit, **wanted)

    async def remove_dlq(self, limit: int = 100, **wanted: Any) -> int:
        """Throw away up to `limit` dead letters; how many there were."""
        return await self._producer.remove_dlq(limit, **wanted)
