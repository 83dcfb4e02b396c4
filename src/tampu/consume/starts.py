"""Start marks: record a job's last attempt on the server right before its handler runs.

A worker that dies leaves the entries that were delivered to it. Those with attempts left run again. For an entry on its
last attempt it matters whether the handler had begun. If so, it becomes a dead letter. If not, it only waited next to
the job that killed the worker, and runs.

So the mark and the handler's first line belong together: a mark that waited for its reply, or was sent together with
others, would also cover jobs that had not begun when the first of them killed the process. Starts are serialized on the
event loop: the mark leaves this process, the handler runs up to its first `await`, then the next job may start. If the
kernel takes the mark at once, nothing else runs in between: neither another handler nor its `os._exit`.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from tampu.base.clock import boot_clock_ns
from tampu.errors import RedisError
from tampu.redis import calls
from tampu.redis.client import backoff_secs
from tampu.redis.faults import PASSING, Remedy, ServerError

if TYPE_CHECKING:
    from tampu.config import ConsumerConfig
    from tampu.consume.inflight import Delivery, InFlight
    from tampu.redis.client import Client
    from tampu.redis.connection import Reply
    from tampu.wire.keys import QueueKeys

logger = logging.getLogger("tampu.worker")

#: How many turns of the event loop a mark waits until the connection has nothing else to send.
TURNS_TO_WAIT = 10


class StartMarks:
    """Records the starts of last attempts for one consumer."""

    def __init__(self, client: Client, keys: QueueKeys, config: ConsumerConfig, inflight: InFlight) -> None:
        self._client = client
        self._stream = keys.stream
        self._config = config
        self._inflight = inflight
        self._loop = asyncio.get_running_loop()
        self._unconfirmed: list[bytes] = []
        self._confirming: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()
        #: How old the answer may be that an entry is ours, in nanoseconds.
        self._fresh_ns = config.claim_min_idle_ms * 500_000
        self._last_refusal = ""

    async def begin(self, delivery: Delivery) -> bool:
        """Record a start; the caller then runs the handler at once. Return False if another worker owns the entry."""
        while True:
            asked_at = boot_clock_ns()
            await self._confirm(delivery)
            if delivery.is_lost:
                return False
            await self._turn.acquire()
            try:
                # If the process was suspended while this waited for its turn, ask again: the lease may have expired.
                if boot_clock_ns() - asked_at < self._fresh_ns and await self._mark(delivery):
                    return True
            finally:
                # Runs when the handler first waits or has ended.
                self._loop.call_soon(self._turn.release)

    async def _mark(self, delivery: Delivery) -> bool:
        """Write the mark to the socket; the caller then runs the handler at once. Return False if not connected."""
        config = self._config
        packed = calls.packed_start_mark(
            self._stream, group=config.group, consumer=config.consumer_id, entry_id=delivery.entry_id
        )
        for _ in range(TURNS_TO_WAIT):
            if self._client.connection is None:
                return False
            if self._client.connection.request_now(packed, self._on_marked):
                return True
            await asyncio.sleep(0)  # until earlier requests have left
        if self._client.connection is None:
            return False
        self._client.connection.request(packed, self._on_marked)
        # One turn for the connection to write it, one more for event loops that write at the end of a turn.
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return True

    def _on_marked(self, reply: Reply) -> None:
        if isinstance(reply, ServerError) and str(reply) != self._last_refusal:
            self._last_refusal = str(reply)
            logger.error("cannot record the start of a job's last attempt: %s", reply)

    async def _confirm(self, delivery: Delivery) -> None:
        """Ask the server whether the entry is still ours; calls in one turn of the event loop share a round trip.

        The reply also shows that the connection works: a dead one would drop the mark unnoticed.
        """
        self._unconfirmed.append(delivery.entry_id)
        if self._confirming is None:
            self._confirming = self._loop.create_task(self._confirm_all(), name="tampu-confirm-starts")
        await asyncio.shield(self._confirming)

    async def _confirm_all(self) -> None:
        await asyncio.sleep(0)  # collect the other calls of this turn
        ids, self._unconfirmed, self._confirming = self._unconfirmed, [], None
        config, attempt = self._config, 0
        while True:
            try:
                lost = await calls.find_lost(
                    self._client, self._stream, group=config.group, consumer=config.consumer_id, ids=ids
                )
            except RedisError as error:
                kind = error.kind if isinstance(error, ServerError) else ""
                if kind == "NOGROUP":
                    lost = ids  # a flush deleted the entries
                elif isinstance(error, ServerError) and error.remedy is Remedy.NONE and kind not in PASSING:
                    return  # it will never answer: running the jobs is better than waiting forever
                else:
                    attempt += 1
                    await asyncio.sleep(backoff_secs(attempt))
                    continue
            self._inflight.lost(lost)
            return
