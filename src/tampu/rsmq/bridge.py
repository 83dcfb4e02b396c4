"""Move the messages of an RSMQ queue into another system, so that old producers keep working during a migration.

The bridge adds each message to an `Inlet`, at least once: it deletes a message only after the inlet has accepted it. If
the bridge dies in between, the message is received again after its vt; the inlet must ignore IDs that it has seen.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Protocol

from tampu.errors import OutcomeUnknownError, QueueFullError, RedisError
from tampu.redis.client import backoff_secs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tampu.rsmq.client import RsmqConnection
    from tampu.rsmq.message import RsmqMessage

logger = logging.getLogger("tampu.rsmq")

#: Messages moved at a time.
DEFAULT_BATCH = 100
#: How long a message is hidden while it is moved, in seconds. Must be longer than the inlet needs.
DEFAULT_VT_SECS = 60

#: Transient errors: the message stays in the queue and is received again.
_TRANSIENT = (RedisError, QueueFullError, OutcomeUnknownError)


class Inlet(Protocol):
    """The destination of messages."""

    async def add(self, message_id: str, body: bytes) -> None:
        """Store a message, or raise. Ignore a message whose ID was added before."""


class Bridge:
    """Moves messages from one RSMQ queue into one inlet. Several bridges on one queue share the work."""

    def __init__(
        self,
        rsmq: RsmqConnection,
        qname: str,
        inlet: Inlet,
        *,
        batch: int = DEFAULT_BATCH,
        vt_secs: int = DEFAULT_VT_SECS,
    ) -> None:
        self._rsmq = rsmq
        self._qname = qname
        self._inlet = inlet
        self._batch = batch
        self._vt_secs = vt_secs
        self._failures = 0
        #: Messages added to the inlet and deleted.
        self.moved = 0

    async def run(self) -> None:
        """Move messages as they arrive, until cancelled or the client is closed."""
        batches = self._rsmq.listen_batches(self._qname, self._batch, self._vt_secs, decoder=bytes)
        async with contextlib.aclosing(batches):
            async for batch in batches:
                await self._move(batch)

    async def drain(self) -> int:
        """Move the messages that can be received now and return their number."""
        before = self.moved
        while batch := await self._rsmq.receive_messages(self._qname, self._batch, self._vt_secs, decoder=bytes):
            await self._move(batch)
        return self.moved - before

    async def _move(self, batch: Sequence[RsmqMessage[bytes]]) -> None:
        outcomes = await asyncio.gather(
            *(self._inlet.add(message.id, message.body) for message in batch), return_exceptions=True
        )
        taken = [message.id for message, outcome in zip(batch, outcomes, strict=True) if outcome is None]
        # Only after the inlet has them: a crash before this line means that they are added again, never lost.
        if taken:
            await self._rsmq.delete_messages(self._qname, taken)
            self.moved += len(taken)
        errors = [outcome for outcome in outcomes if outcome is not None]
        for error in errors:
            if not isinstance(error, _TRANSIENT):
                raise error
        if not errors:
            self._failures = 0
            return
        if not self._failures:
            logger.warning(
                "%d message(s) of RSMQ queue %s could not be moved; retrying after %d s: %s",
                len(errors),
                self._qname,
                self._vt_secs,
                errors[0],
            )
        self._failures += 1
        await asyncio.sleep(backoff_secs(self._failures))
