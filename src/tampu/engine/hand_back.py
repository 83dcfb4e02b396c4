"""Gives entries back that were delivered to us and not started, so that they start elsewhere at once."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tampu.redis.scripts import load_script
from tampu.wire.envelope import encode_job

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tampu.engine.config import ConsumerConfig
    from tampu.engine.delivery import Delivery
    from tampu.redis.connection import Part
    from tampu.redis.pipe import Pipe
    from tampu.wire.keys import QueueKeys

HAND_BACK = load_script("hand_back")

#: Entries handed back in one call.
BATCH = 100
#: Entries in our name that are looked through, beside those we know of.
MAX_UNDELIVERED = 1000
#: How much a server's count of idle time may differ from ours, in milliseconds.
CLOCK_MARGIN_MS = 50


class HandBack:
    """Hands back entries of one consumer. `held` is what it knows to be delivered."""

    def __init__(self, pipe: Pipe, keys: QueueKeys, config: ConsumerConfig, held: dict[bytes, Delivery]) -> None:
        self._pipe = pipe
        self._keys = keys
        self._config = config
        self._held = held
        #: Whether the server knows XACKDEL.
        self.native = False

    async def unstarted(self, deliveries: Sequence[Delivery]) -> None:
        """Give back what we hold and have not started."""
        for start in range(0, len(deliveries), BATCH):
            batch = deliveries[start : start + BATCH]
            arguments: list[Part] = []
            for delivery in batch:
                # A suspect's earlier runs are known to the pending list only, which it now leaves.
                envelope = encode_job(delivery.job) if delivery.is_suspect else b""
                arguments += (delivery.entry_id, envelope)
            await self._call(arguments)
            for delivery in batch:
                self._held.pop(delivery.entry_id, None)

    async def undelivered(self, asked_at: float) -> None:
        """Give back what the server sent us in a reply that never came: ours by its books, and nobody runs it.

        Left to the lease it would come back as delivered once more, which counts as a run it never had. `asked_at`, by
        the monotonic clock, tells it from what a worker of the same name had before us, and may have died of.
        """
        oldest_ms = (time.monotonic() - asked_at) * 1000 + CLOCK_MARGIN_MS
        most = len(self._held) + max(self._config.batch, MAX_UNDELIVERED)
        pending = await self._pipe.call(
            "XPENDING", self._keys.stream, self._config.group, "-", "+", most, self._config.consumer_id
        )
        # Of one that was delivered before, and taken over in such a reply, nobody can say what became of it.
        lost = [
            entry_id
            for entry_id, _, idle_ms, deliveries in pending
            if deliveries == 1 and idle_ms <= oldest_ms and entry_id not in self._held
        ]
        for start in range(0, len(lost), BATCH):
            arguments: list[Part] = []
            for entry_id in lost[start : start + BATCH]:
                arguments += (entry_id, b"")
            await self._call(arguments)

    async def _call(self, entries: list[Part]) -> None:
        head = (self._config.group, self._config.consumer_id, "1" if self.native else "0")
        # Not sent again when the reply is lost: by then it was done, or the lease will see to it.
        await self._pipe.run(HAND_BACK, (self._keys.stream,), (*head, *entries), resend=False)
