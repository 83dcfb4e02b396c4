"""The reader: passes new entries from the stream to the pool, in batches that fit.

`takeover.py` reads the entries of workers that died.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from tampu.base.clock import wall_clock_ms
from tampu.consume.leases import renewal_secs
from tampu.consume.read_budget import ReadBudget
from tampu.consume.takeover import Takeover
from tampu.errors import RedisError
from tampu.metrics import ReaderBatch, tell
from tampu.redis.connection import pack_command
from tampu.redis.faults import ConnectionLost, ServerError

if TYPE_CHECKING:
    from tampu.config import ConsumerConfig
    from tampu.consume.inflight import InFlight
    from tampu.consume.leases import Leases
    from tampu.consume.pool import Pool
    from tampu.consume.settle import Settler
    from tampu.redis.client import Client
    from tampu.redis.connection import Connection, Reply
    from tampu.wire.keys import QueueKeys

logger = logging.getLogger("tampu.worker")

#: How often a worker checks whether the queue is paused, in seconds.
PAUSE_WATCH_SECS = 1.0
#: The pool's throughput is measured over this time, in seconds.
PACE_WINDOW_SECS = 0.02
#: How long to wait for a free slot in the pool before checking again, in seconds.
SLOT_WATCH_SECS = 0.05
#: How long the reader may take to stop, and how often it unblocks a blocked read meanwhile, in seconds.
STOP_PATIENCE_SECS = 1.0
UNBLOCK_SECS = 0.2
#: How long a read that follows an ASK redirect may block, in ms: CLIENT UNBLOCK does not reach its connection.
ASK_BLOCK_MS = 100


class Reader:
    """Reads new entries for one consumer."""

    def __init__(
        self,
        read_client: Client,
        client: Client,
        keys: QueueKeys,
        config: ConsumerConfig,
        pool: Pool,
        settler: Settler,
        inflight: InFlight,
        leases: Leases,
    ) -> None:
        self._read_client = read_client
        self._client = client
        self._keys = keys
        self._config = config
        self._pool = pool
        self._settler = settler
        self._inflight = inflight
        self._leases = leases
        self._stopping = asyncio.Event()
        self._had_entries = False
        self._budget = ReadBudget(config.max_read_bytes)
        self._pace: deque[tuple[float, int]] = deque()
        self._client_id: int | None = None
        #: The ID and address of the read connection, as the server sees them.
        self._identity: tuple[str, str] | None = None
        #: When the first read without a reply was sent: entries may have been delivered to it.
        self._missed_since: float | None = None
        #: The ID and address of that read's connection: the server may still execute the read.
        self._missed_on: tuple[str, str] | None = None
        #: When the first read was sent, and the read that is in flight or whose entries are not taken in yet.
        self._first_read_at: float | None = None
        self._reading_since: float | None = None
        #: When the server last answered a read, by the monotonic clock; health checks use it.
        self.last_read_at: float | None = None
        self._is_paused = False
        self.takeover = Takeover(client, keys, config, pool, settler, inflight, lambda: self._is_paused)
        read_client.on_up(self._learn_client_id)

    def _learn_client_id(self, connection: Connection) -> None:
        """Ask the server for the read connection's ID and address. An ACL may refuse either question."""
        self._client_id = self._identity = None

        def learn_id(reply: Reply) -> None:
            self._client_id = reply if isinstance(reply, int) else None

        def learn_identity(reply: Reply) -> None:
            self._identity = identity_of(reply) if isinstance(reply, bytes) else None

        connection.request(pack_command(("CLIENT", "ID")), learn_id)
        connection.request(pack_command(("CLIENT", "INFO")), learn_identity)

    async def make_group(self) -> None:
        """Create the consumer group, and the stream if need be. Jobs added before are delivered too."""
        try:
            await self._client.call("XGROUP", "CREATE", self._keys.stream, self._config.group, "0", "MKSTREAM")
        except ServerError as error:
            # Out of memory, a group cannot be created, but an existing one can be drained, which frees memory.
            if error.kind != "BUSYGROUP" and (error.kind != "OOM" or not await self._group_exists()):
                raise
        self.last_read_at = time.monotonic()  # healthy from now on: on an empty queue the first reply takes a while

    async def _group_exists(self) -> bool:
        command = ("XPENDING", self._keys.stream, self._config.group)
        try:
            await self._client.call(*command)
        except ServerError as error:
            if error.kind == "NOGROUP":
                return False
            raise
        return True

    # --- new entries

    async def read_once(self) -> None:
        """Wait for room in the pool, read one batch and pass it on."""
        room = self._room()
        if self._is_paused:
            await self._pool.progress(PAUSE_WATCH_SECS)
            return
        if room <= 0 or self._settler.is_behind:
            # Settle finished jobs before reading new ones, above all after a reconnect.
            await self._pool.progress(SLOT_WATCH_SECS)
            return
        try:
            await self.hand_back_missed()
            sent_at = self._reading_since = time.monotonic()
            self._first_read_at = self._first_read_at or sent_at
            entries = await self._read(self._budget.count(min(room, self._config.batch)))
        except ServerError as error:
            if error.kind == "NOGROUP":
                logger.warning("consumer group %r is gone (a flush?); creating it again", self._config.group)
                await self.make_group()
                return
            if error.kind == "UNBLOCKED":
                return
            raise
        self.last_read_at = time.monotonic()
        if not entries:
            was_unblocked = self._stopping.is_set() or self._is_paused
            if self._had_entries and not was_unblocked:
                self._had_entries = False
                self._settler.drained(wall_clock_ms())
            return
        self._had_entries = True
        tell(self._config.metrics.reader_batch, ReaderBatch(len(entries), 0))
        receive = self._inflight.receive
        deliveries = [
            delivery for entry_id, fields in entries if (delivery := receive(entry_id, fields, 0)) is not None
        ]
        self._reading_since = None
        if time.monotonic() - sent_at > self._config.claim_min_idle_ms / 1000:
            # While this process was suspended, the entries may have been in the socket until their leases expired.
            await self._leases.confirm()
        self._pool.put(deliveries)

    async def _read(self, count: int) -> list[Any]:
        config = self._config
        connection = await self._read_client.up(patience_secs=3600)
        if self._stopping.is_set():
            return []
        sent_at = time.monotonic()
        received = connection.bytes_received
        command = ("XREADGROUP", "GROUP", config.group, config.consumer_id, "COUNT", count, "BLOCK")
        streams = ("STREAMS", self._keys.stream, ">")
        try:
            try:
                reply = await connection.ask(*command, config.block_ms, *streams)
            except ServerError as error:
                if error.kind != "ASK":
                    raise
                asking = await self._read_client.asking(error)
                reply = await asking.ask(*command, min(config.block_ms, ASK_BLOCK_MS), *streams)
        except (ConnectionLost, asyncio.CancelledError):
            self._missed_since = self._missed_since or sent_at
            self._missed_on = self._identity
            raise
        except ServerError as error:
            # Such as MOVED: this connection cannot read any more.
            await self._read_client.apply_remedy(error, 0, float("inf"), connection)
            raise
        entries = reply[0][1] if reply else []
        self._budget.note(len(entries), connection.bytes_received - received)
        return entries

    def _room(self) -> int:
        """Return the free slots, plus the jobs that will finish until the entries arrive, at the recent rate."""
        pool = self._pool
        now = time.monotonic()
        pace = self._pace
        pace.append((now, pool.finished))
        while pace[0][0] < now - PACE_WINDOW_SECS:
            pace.popleft()
        if self.takeover.wants_slot:
            return self._config.concurrency - 1 - pool.occupied
        lately = pool.finished - pace[0][1]
        return self._config.concurrency + min(lately, self._config.batch * 2) - pool.occupied

    async def note_pause(self, is_paused: bool) -> None:
        """Stop or resume reading. A blocked read is ended when the queue is paused: it would deliver one more batch."""
        if is_paused or self._pool.occupied >= self._config.concurrency:
            # Nothing is read on purpose and the server answers: the health check must stay green.
            self.last_read_at = time.monotonic()
        if is_paused != self._is_paused:
            logger.info('queue "%s" %s', self._config.queue_name, "paused" if is_paused else "resumed")
            self._is_paused = is_paused
        if is_paused:  # each time: the first UNBLOCK may have arrived before the read
            await self._end_blocked_read()

    # --- stopping

    async def stop(self, *loops: asyncio.Task[None]) -> None:
        """Stop reading and taking over, and wait until these loops have ended.

        A read that blocks at the server is unblocked there, so that no more entries are delivered to it.
        """
        self._stopping.set()
        self.takeover.stop()
        give_up_at = time.monotonic() + STOP_PATIENCE_SECS
        while time.monotonic() < give_up_at:
            await self._end_blocked_read()  # repeatedly: it may arrive before the read
            _, late = await asyncio.wait(loops, timeout=UNBLOCK_SECS)
            if not late:
                return
        for loop in loops:
            loop.cancel()
        await asyncio.gather(*loops, return_exceptions=True)

    async def _end_blocked_read(self) -> None:
        if self._read_client.connection is None or self._client_id is None:
            return
        with contextlib.suppress(RedisError, TimeoutError):  # then the read ends with its BLOCK time or its connection
            await asyncio.wait_for(self._client.call("CLIENT", "UNBLOCK", self._client_id), UNBLOCK_SECS)

    async def hand_back_missed(self) -> None:
        """Hand back entries delivered over a broken connection, once the server cannot deliver more over it."""
        if self._missed_since is None:
            return
        if self._missed_on is not None:
            # A restarted server assigns its IDs again: the ID alone could name another client's connection.
            client_id, address = self._missed_on
            with contextlib.suppress(ServerError):  # gone already, or forbidden by an ACL: see `watch_unheld`
                await self._client.call("CLIENT", "KILL", "ID", client_id, "ADDR", address)
            self._missed_on = None
        await self._inflight.hand_back_undelivered(self._missed_since)
        self._missed_since = None

    async def watch_unheld(self) -> None:
        """Wait one interval, then hand back entries of reads that the server executed after their connection broke."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), renewal_secs(self._config))
            return
        if self._first_read_at is not None and self._missed_since is None:
            before = self._reading_since or time.monotonic()
            try:
                await self._inflight.hand_back_undelivered(self._first_read_at, before)
            except ServerError as error:
                if error.kind != "NOGROUP":  # the reader creates it again
                    raise


def identity_of(info: bytes) -> tuple[str, str] | None:
    """Return the ID and address in a reply to CLIENT INFO.

    None over a unix socket: all its clients have the same address, which does not tell them apart.
    """
    fields = dict(field.partition("=")[::2] for field in info.decode(errors="replace").split())
    client_id, address = fields.get("id"), fields.get("addr")
    return None if not client_id or not address or address.startswith("/") else (client_id, address)
