"""Takeover: runs the entries of dead workers, and isolates those that may have killed their worker.

A worker that dies leaves all entries it held. Usually at most one of them killed it, so they run again as suspects:

| worker deaths with the entry | runs |
|---|---|
| 1 | in parallel, in every free slot of one worker |
| 2 | in groups of a tenth of the worker's slots |
| more | alone: no other suspect runs in this worker |

Worker deaths use up no attempts. An entry becomes a dead letter after as many deaths as attempts are left plus three,
and after six at the latest; see `InFlight.receive`. New jobs run alongside suspects. A minute after its takeover, an
entry that still runs is no longer a suspect.

All of this applies to a worker with all its queues: a suspect of one queue can kill those of the others.
"""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial
from typing import TYPE_CHECKING

from tampu.consume.leases import membership
from tampu.maintain.supervise import Failures
from tampu.redis import calls
from tampu.redis.faults import ServerError

if TYPE_CHECKING:
    from tampu.consume.inflight import Delivery
    from tampu.consume.pool import Pool
    from tampu.consume.runtime import ServedQueue
    from tampu.redis.client import Client
    from tampu.redis.connection import Connection

logger = logging.getLogger("tampu.worker")

#: How long to wait for a free slot in the pool before checking again, in seconds.
SLOT_WATCH_SECS = 0.05
#: How long after it was sent a takeover may be executed, in milliseconds.
LATE_MS = 1000
#: How long the entries of a dead consumer are reserved for one worker, in milliseconds.
EXCLUSIVE_MS = 10_000
#: Time after its takeover until an entry is no longer suspected of killing its worker, in seconds.
QUARANTINE_SECS = 60.0
#: The class of entries that run alone.
LONE = 3


def suspect_class(deaths: int) -> int:
    """Return the class of an entry: 1 runs in parallel, 2 in small groups, 3 alone."""
    return min(deaths, LONE)


class Quarantine:
    """The suspects of a worker, from all its queues."""

    def __init__(self, concurrency: int) -> None:
        self._group_size = max(concurrency // 10, 1)
        #: The entries taken over that run or wait here, and when they were taken over.
        self._suspects: dict[Delivery, float] = {}
        #: Held while counting the free room and adding entries: two queues must not use the same room.
        self.lock = asyncio.Lock()

    def add(self, suspect: Delivery) -> None:
        """Count an entry as a suspect until it is settled or lost."""
        self._suspects[suspect] = time.monotonic()
        suspect.when_done = partial(self._suspects.pop, suspect, None)

    def _classes(self) -> list[int]:
        """Return the class of each suspect taken over within `QUARANTINE_SECS`; all are of the same class."""
        since = time.monotonic() - QUARANTINE_SECS
        return [
            suspect_class(suspect.earlier_deliveries)
            for suspect, taken_at in self._suspects.items()
            if taken_at > since
        ]

    def could_take_more(self) -> bool:
        """Return True if only the free slots limit how many entries may be taken over."""
        classes = self._classes()
        return not classes or classes[0] == 1 or (classes[0] == 2 and len(classes) < self._group_size)

    def room(self, free: int) -> tuple[int, tuple[int, int, int]]:
        """Return the class that may be taken over now, 0 for any, and how many entries of each fit into free slots."""
        classes = self._classes()
        if not classes:
            return 0, (free, min(free, self._group_size), min(free, 1))
        # Only one class runs at a time, so that a worker death can be attributed to it.
        return classes[0], (free, min(free, self._group_size - len(classes)), 0)


class Takeover:
    """Takes over entries of dead workers for one queue."""

    def __init__(self, client: Client, queue: ServedQueue, pool: Pool, quarantine: Quarantine) -> None:
        self._client = client
        self._config = config = queue.config
        self._pool = pool
        self._queue = queue
        self._quarantine = quarantine
        self._member = membership(queue.keys, config)
        self._from = 0.0
        #: How far the server's clock is ahead of the local monotonic clock, as of the last check.
        self._server_ahead_ms: float | None = None
        self._failures = Failures(f'takeover of jobs of queue "{config.queue_name}"')
        self._retry_at = 0.0
        self._working: asyncio.Task[None] | None = None
        self._is_stopping = False
        #: True while the queue is paused; None before the first check.
        self.is_paused: bool | None = None
        client.on_up(self._let_others_renew)

    @property
    def poll(self) -> tuple[str | int, ...]:
        """The command that finds an expired lease, cheaper than the takeover itself."""
        stream, group = self._member.stream, self._member.group
        return ("XPENDING", stream, group, "IDLE", self._config.claim_min_idle_ms, "-", "+", 1)

    @property
    def can_poll(self) -> bool:
        """Return True if entries may be taken over now."""
        return (
            self._working is None
            and not self._is_stopping
            and time.monotonic() >= max(self._from, self._retry_at)
            and self.is_paused is False
            and not self._queue.settler.is_behind
        )

    def start(self) -> None:
        """Take over all entries that may run now, in the background."""
        self._working = asyncio.create_task(self._supervised(), name="tampu-takeover")

    async def stop(self, patience_secs: float) -> None:
        """Stop taking over entries. A call in flight may end: its reply has entries to run or to hand back."""
        self._is_stopping = True
        if self._working is not None:
            working = self._working
            await asyncio.wait([working], timeout=patience_secs)
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)

    def _let_others_renew(self, connection: Connection) -> None:
        """After a reconnect, let live workers renew their leases before taking over entries.

        The scripts grant the whole group such a grace period, but only after outages that last for a while.
        """
        if self._client.connections_made > 1:
            self._from = time.monotonic() + self._member.grace_ms / 1000

    async def _supervised(self) -> None:
        self._server_ahead_ms = None  # measured again: either clock may have been set
        try:
            # While this server is unreachable, do not make the queues of other servers wait for the lock.
            while await self._has_slot() and self._client.connection is not None:
                async with self._quarantine.lock:
                    if not await self._take_over():
                        break
        except Exception as error:
            self._retry_at = time.monotonic() + self._failures.record(error)
        else:
            self._failures.clear()
        finally:
            self._working = None

    async def _has_slot(self) -> bool:
        """Wait for a free slot in the pool. Return False if entries may no longer be taken over.

        An entry taken over without one would wait here under a renewed lease while another worker could run it.
        """
        self._pool.takeovers_waiting += 1
        try:
            while not self._is_stopping and not self.is_paused and not self._queue.settler.is_behind:
                if time.monotonic() < self._from or not self._quarantine.could_take_more():
                    break
                if max(self._quarantine.room(self._free())[1]) > 0:
                    return True
                await self._pool.progress(SLOT_WATCH_SECS)
        finally:
            self._pool.takeovers_waiting -= 1
        return False

    def _free(self) -> int:
        """Return how many free slots of the pool the queue may use."""
        return self._pool.shares.room_of(self._queue.share, self._pool.concurrency - self._pool.occupied)

    async def _take_over(self) -> bool:
        """Take over the entries that fit. Return False if there were none."""
        config = self._config
        wanted_class, room = self._quarantine.room(self._free())
        if max(room) <= 0:
            return True  # another queue has used the room in the meantime
        try:
            now_ms, entries, swept = await calls.reclaim(
                self._client,
                self._member,
                not_after_ms=await self._soon_ms(),
                exclusive_ms=EXCLUSIVE_MS,
                wanted_class=wanted_class,
                room=room,
                except_ids=self._queue.inflight,
            )
        except ServerError as error:
            if error.kind == "NOGROUP":
                return False  # the reader creates it again
            raise
        self._server_ahead_ms = now_ms - time.monotonic() * 1000
        if swept:
            logger.warning("removed %d pending entries whose jobs were deleted (stream trimmed or flushed)", swept)
        if not entries:
            return bool(swept)
        for observe in self._queue.observers.received:
            observe(len(entries), len(entries))
        logger.warning(
            "%s: took over %d %s from workers that died or stalled",
            config.queue_name,
            len(entries),
            "job" if len(entries) == 1 else "jobs",
            extra={"fields": {"event": "taken-over", "queue": config.queue_name, "jobs": len(entries)}},
        )
        for entry_id, fields, deliveries in entries:
            suspect = self._queue.inflight.receive(entry_id, fields, deliveries)
            if suspect is not None:
                self._quarantine.add(suspect)
                self._pool.put_first(suspect)
        return True

    async def _soon_ms(self) -> int:
        """Return the server time until which a takeover that is sent now may be executed.

        One that waited in a socket through an outage would find the leases of live workers expired.
        """
        asked_at_ms = time.monotonic() * 1000
        if self._server_ahead_ms is None:
            self._server_ahead_ms = await self._client.server_time_ms() - time.monotonic() * 1000
        return int(asked_at_ms + self._server_ahead_ms + LATE_MS)
