"""The reader: brings entries from the stream to the pool, new ones in batches, re-delivered ones one at a time.

A re-delivered entry is a suspect: it may be the one that killed the last worker. So it is claimed only when the last
suspect is settled, and never in advance: a job that kills its process does not take its neighbours' attempts with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from tampu.errors import RedisError
from tampu.redis.connection import pack_command
from tampu.redis.faults import ConnectionLost, ServerError
from tampu.redis.pipe import LAST_BACKOFF_SECS
from tampu.redis.scripts import load_script

if TYPE_CHECKING:
    from collections.abc import Callable

    from tampu.engine.config import ConsumerConfig
    from tampu.engine.delivery import Delivery
    from tampu.engine.hand_back import HandBack
    from tampu.engine.leases import Leases
    from tampu.engine.pool import Pool
    from tampu.engine.settle import Settler
    from tampu.redis.connection import Connection, Part, Reply
    from tampu.redis.pipe import Pipe
    from tampu.wire.keys import QueueKeys

logger = logging.getLogger("tampu.worker")

RECLAIM = load_script("reclaim")

#: How often a worker looks whether the queue is paused, in seconds.
PAUSE_WATCH_SECS = 1.0
#: The pool's pace is measured over this long, in seconds.
PACE_WINDOW_SECS = 0.02
#: How long to wait for a place in the pool before looking again, in seconds.
PLACE_WATCH_SECS = 0.05
#: How long the reader may take to stop, and how often a blocked read is asked to end meanwhile, in seconds.
STOP_PATIENCE_SECS = 1.0
UNBLOCK_SECS = 0.2


class Reader:
    """Reads for one consumer. `receive` decodes an entry, or sends it to the dead letters and gives None."""

    def __init__(
        self,
        read_pipe: Pipe,
        pipe: Pipe,
        keys: QueueKeys,
        config: ConsumerConfig,
        pool: Pool,
        settler: Settler,
        leases: Leases,
        hand_back: HandBack,
        held: dict[bytes, Delivery],
        receive: Callable[[bytes, list[bytes], int], Delivery | None],
        on_batch: Callable[[int, int], None],
        on_drained: Callable[[], None],
    ) -> None:
        self._read_pipe = read_pipe
        self._pipe = pipe
        self._keys = keys
        self._config = config
        self._pool = pool
        self._settler = settler
        self._leases = leases
        self._hand_back = hand_back
        self._held = held
        self._receive = receive
        self._on_batch = on_batch
        self._on_drained = on_drained
        self._stopping = asyncio.Event()
        self._had_entries = False
        self._pace: deque[tuple[float, int]] = deque()
        self._suspect_done = asyncio.Event()
        self._wants_suspect = False
        self._interval = min(config.claim_min_idle_ms / 3000, 5.0)
        self._reclaims_from = 0.0
        self._client_id: int | None = None
        #: When the first read was sent whose reply never came: it may have brought entries.
        self._missed_since: float | None = None
        #: When the server last answered a read, by the monotonic clock: what a health check looks at.
        self.last_read_at: float | None = None
        self._is_paused = False
        read_pipe.on_up(self._learn_client_id)
        pipe.on_up(self._let_others_renew)

    def _let_others_renew(self, connection: Connection) -> None:
        """After an outage every lease looks old: whoever lives renews his before the entries of the dead are taken."""
        if self._pipe.connections_made > 1:
            wait_secs = min(self._config.claim_min_idle_ms / 1000, self._interval + LAST_BACKOFF_SECS)
            self._reclaims_from = time.monotonic() + wait_secs

    def _learn_client_id(self, connection: Connection) -> None:
        """By its id a blocked read can be ended; an ACL may forbid to ask."""

        def learn(reply: Reply) -> None:
            self._client_id = reply if isinstance(reply, int) else None

        connection.request(pack_command(("CLIENT", "ID")), learn)

    async def make_group(self) -> None:
        """Make the group, and the stream with it; jobs added before the first worker came are delivered too."""
        try:
            await self._pipe.call("XGROUP", "CREATE", self._keys.stream, self._config.group, "0", "MKSTREAM")
        except ServerError as error:
            # Without memory no group is made, but one that is there can be worked for, which frees some.
            if error.kind != "BUSYGROUP" and (error.kind != "OOM" or not await self._group_exists()):
                raise
        self.last_read_at = time.monotonic()  # it may read; in an empty queue the first answer takes a while

    async def _group_exists(self) -> bool:
        command = ("XPENDING", self._keys.stream, self._config.group)
        try:
            await self._pipe.call(*command)
        except ServerError as error:
            if error.kind == "NOGROUP":
                return False
            raise
        return True

    # --- new entries

    async def read_once(self) -> None:
        """One read: wait for room, then for entries, and pass them on."""
        room = self._room()
        if self._is_paused:
            await self._pool.progress(PAUSE_WATCH_SECS)
            return
        if room <= 0 or self._settler.is_behind:
            # What was done goes before what is new, above all after a reconnect.
            await self._pool.progress(PLACE_WATCH_SECS)
            return
        try:
            await self.hand_back_missed()
            sent_at = time.monotonic()
            entries = await self._read(min(room, self._config.batch))
        except ServerError as error:
            if error.kind == "NOGROUP":
                logger.warning("the group %r is gone (a flush?): making it again", self._config.group)
                await self.make_group()
                return
            if error.kind == "UNBLOCKED":
                return
            raise
        self.last_read_at = time.monotonic()
        if not entries:
            was_told_to_end = self._stopping.is_set() or self._is_paused
            if self._had_entries and not was_told_to_end:
                self._had_entries = False
                self._on_drained()
            return
        self._had_entries = True
        self._on_batch(len(entries), 0)
        receive = self._receive
        deliveries = [
            delivery for entry_id, fields in entries if (delivery := receive(entry_id, fields, 0)) is not None
        ]
        if time.monotonic() - sent_at > self._config.claim_min_idle_ms / 1000:
            # They may have waited in the socket, while this process stood still, for longer than their leases last.
            await self._leases.confirm()
        self._pool.put(deliveries)

    async def _read(self, count: int) -> list[Any]:
        config = self._config
        connection = await self._read_pipe.up(patience_secs=3600)
        if self._stopping.is_set():
            return []
        sent_at = time.monotonic()
        try:
            reply = await connection.ask(
                *("XREADGROUP", "GROUP", config.group, config.consumer_id, "COUNT", count, "BLOCK", config.block_ms),
                *("STREAMS", self._keys.stream, ">"),
            )
        except (ConnectionLost, asyncio.CancelledError):
            self._missed_since = self._missed_since or sent_at
            raise
        except ServerError as error:
            # Such as MOVED: this connection will never read again.
            await self._read_pipe.cure(error, 0, float("inf"), connection)
            raise
        return reply[0][1] if reply else []

    def _room(self) -> int:
        """Free places, plus what the pool is going to finish until the entries are here, by its pace of late."""
        pool = self._pool
        now = time.monotonic()
        pace = self._pace
        pace.append((now, pool.finished))
        while pace[0][0] < now - PACE_WINDOW_SECS:
            pace.popleft()
        if self._wants_suspect:
            return self._config.concurrency - 1 - pool.occupied
        lately = pool.finished - pace[0][1]
        return self._config.concurrency + min(lately, self._config.batch * 2) - pool.occupied

    async def watch_pause(self) -> None:
        """Look for the key that pauses the queue, again and again."""
        await self.look_for_pause()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), PAUSE_WATCH_SECS)

    async def look_for_pause(self) -> None:
        """Look once; a read that waits is ended, or it would bring one batch more."""
        is_paused = bool(await self._pipe.call("EXISTS", self._keys.paused))
        if is_paused or self._pool.occupied >= self._config.concurrency:
            # Nothing is read on purpose, and the server is there: no reason to turn a health check red.
            self.last_read_at = time.monotonic()
        if is_paused != self._is_paused:
            logger.info("queue %s is %s", self._config.queue_name, "paused" if is_paused else "resumed")
            self._is_paused = is_paused
        if is_paused:  # each time: the first may have come before the read did
            await self._end_blocked_read()

    # --- entries of the dead

    async def reclaim_round(self) -> None:
        """All idle entries, one after the other; then a pause."""
        while await self._has_place_for_suspect():
            taken = await self._reclaim_entries()
            if taken is None:
                break
            for suspect in taken:
                self._suspect_done.clear()
                suspect.when_done = self._suspect_done.set
                self._pool.put_first(suspect)
                if not self._stopping.is_set():
                    await self._suspect_done.wait()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), self._interval)

    async def _has_place_for_suspect(self) -> bool:
        """Wait for a free place, which the reader leaves; False at shutdown.

        Taken over before there is one, an entry would be held here, alive by our lease, while others could run it.
        """
        try:
            while not self._stopping.is_set():
                is_time = time.monotonic() >= self._reclaims_from
                self._wants_suspect = is_time and not self._is_paused and not self._settler.is_behind
                if self._wants_suspect and self._pool.occupied < self._config.concurrency:
                    return True
                await self._pool.progress(PLACE_WATCH_SECS)
        finally:
            self._wants_suspect = False
        return False

    async def _reclaim_entries(self) -> list[Delivery] | None:
        """At most one idle entry as a delivery; [] when it was dealt with already, None when there is none."""
        config = self._config
        arguments: list[Part] = [config.group, config.consumer_id, config.claim_min_idle_ms, 1, *self._held]
        try:
            entries, swept = await self._pipe.run(RECLAIM, (self._keys.stream,), arguments)
        except ServerError as error:
            if error.kind == "NOGROUP":
                return None  # the reader makes it again
            raise
        if swept:
            logger.warning("%d pending entries were deleted under us (trimmed or flushed) and are swept", swept)
        if not entries:
            return [] if swept else None
        self._on_batch(len(entries), len(entries))
        received = (self._receive(entry_id, fields, earlier) for entry_id, fields, earlier in entries)
        return [delivery for delivery in received if delivery is not None]

    # --- stopping

    async def stop(self, *loops: asyncio.Task[None]) -> None:
        """Stop reading and taking over, and wait until these loops of ours have ended.

        A read that waits at the server is ended there, so that no entry is delivered to nobody.
        """
        self._stopping.set()
        self._suspect_done.set()
        give_up_at = time.monotonic() + STOP_PATIENCE_SECS
        while time.monotonic() < give_up_at:
            await self._end_blocked_read()  # again and again: it may come before the read does
            _, late = await asyncio.wait(loops, timeout=UNBLOCK_SECS)
            if not late:
                return
        for loop in loops:
            loop.cancel()
        await asyncio.gather(*loops, return_exceptions=True)

    async def _end_blocked_read(self) -> None:
        if self._read_pipe.connection is None or self._client_id is None:
            return
        with contextlib.suppress(RedisError, TimeoutError):  # then it ends with its BLOCK or its connection
            await asyncio.wait_for(self._pipe.call("CLIENT", "UNBLOCK", self._client_id), UNBLOCK_SECS)

    async def hand_back_missed(self) -> None:
        """Give back what came over a connection that is no more, and nobody took."""
        if self._missed_since is not None:
            await self._hand_back.undelivered(self._missed_since)
            self._missed_since = None
