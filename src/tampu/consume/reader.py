"""The reader: passes new entries from the streams of all queues on one server to the pool, in batches that fit.

| queues that may be read | read |
|---|---|
| one | one blocking read |
| several, all of them empty | one blocking read of all streams, one entry of each |
| several, some with more entries | full batches of a few of them, in turns (`Turns`), and a check of the others |

A queue with limits is waited for at its bell, and its jobs are taken through its gate (`gate.py`).

On a Cluster each queue has its own reader. Most of them do not block: a shared connection watches their streams.

`takeover.py` reads the entries of workers that died.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import defaultdict, deque
from typing import TYPE_CHECKING, Any

from tampu.base.clock import secs_until_round, wall_clock_ms
from tampu.consume.gate import BELL_SECS, Gate
from tampu.consume.leases import renewal_secs
from tampu.consume.pool import PACE_WINDOW_SECS, Turns
from tampu.errors import RedisError
from tampu.redis import calls
from tampu.redis.connection import pack_command
from tampu.redis.faults import ConnectionLost, Remedy, ServerError, Unreachable
from tampu.redis.nodes import WatchingConnection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tampu.config import ConsumerConfig
    from tampu.consume.inflight import Delivery
    from tampu.consume.pool import Pool
    from tampu.consume.runtime import ServedQueue
    from tampu.redis.client import Client
    from tampu.redis.connection import Connection, Reply

logger = logging.getLogger("tampu.worker")

#: How long to wait for a free slot in the pool, or for a queue that may be read, before checking again, in seconds.
SLOT_WATCH_SECS = 0.05
IDLE_WATCH_SECS = 1.0
#: After this many waits for a slot without a finished job, jobs that were read ahead are handed back. Not a time: after
#: this process was suspended, jobs finish at once.
WAITS_UNTIL_SLOW = 5
#: While some queues are read in turns, how often the reader checks the others, in seconds: at least, and per queue.
SWEEP_SECS = 0.01
SWEEP_SECS_PER_QUEUE = 0.000_2
#: Queues that were found empty no longer ago than this are waited for without looking again, in seconds.
EMPTY_FOR_SECS = 0.02
#: How long the reader may take to stop, and how often it unblocks a blocked read meanwhile, in seconds.
STOP_PATIENCE_SECS = 1.0
UNBLOCK_SECS = 0.2
#: How often the reader looks for queues that are drained, in seconds.
REPORT_SECS = 0.05
#: How much earlier than its BLOCK time a read may return by the local clock, in seconds.
CLOCK_MARGIN_SECS = 0.005
#: How long a read that follows an ASK redirect may block, in ms: CLIENT UNBLOCK does not reach its connection.
ASK_BLOCK_MS = 100
#: Maximum time between two reads of a watched stream, in seconds: a lost report delays a job by no more than this.
WATCHED_SECS = 1.0
#: Number of reads in a row that may find a watched stream empty before reads of it are at least `WATCHED_PAUSE_SECS`
#: apart: the server also reports changes that other workers make, and settling a job changes the stream, too.
MAX_VAIN_READS = 2
WATCHED_PAUSE_SECS = 0.005


class Reader:
    """Reads new entries of the queues on one server."""

    def __init__(
        self,
        read_client: Client,
        client: Client,
        config: ConsumerConfig,
        pool: Pool,
        queues: Sequence[ServedQueue],
    ) -> None:
        self._read_client = read_client
        self._client = client
        self._config = config
        self._pool = pool
        #: All queues on the server; it may grow.
        self._queues = queues
        self._turns = Turns(pool.shares)
        self._stopping = asyncio.Event()
        self._budget = ReadBudget(config.max_read_bytes)
        #: Entries and bytes of the replies to the current read.
        self._entries_read = self._bytes_read = 0
        self._pace: deque[tuple[float, int]] = deque()
        #: How often in a row no job finished while the reader waited for room.
        self._waits = 0
        #: When all queues that take no turns were last found empty, and when to check them next.
        self._empty_at = 0.0
        self._sweep_at = 0.0
        #: When to look next for queues that are drained.
        self._report_at = 0.0
        self._sweep_from = 0
        #: The ID of the read connection; None if an ACL forbids the question.
        self._client_id: int | None = None
        #: True if a read got no reply: entries may have been delivered to it.
        self._has_missed = False
        #: When the read was sent that is in flight or whose entries are not taken in yet.
        self._reading_since: float | None = None
        #: The queues of the read that blocks now.
        self._blocked_on: set[ServedQueue] = set()
        #: When the server last answered a read, by the monotonic clock; health checks use it.
        self.last_read_at: float | None = None
        #: Set when the watched stream changes, its connection is lost, or the wait must end.
        self._changed = asyncio.Event()
        #: True if its connection watches the stream: reads must not block it.
        self._is_watching = read_client.is_shared
        #: Reads of a watched stream in a row that found it empty.
        self._vain_reads = 0
        read_client.on_up(self._ask_client_id)
        read_client.on_loss(self._changed.set)

    def _ask_client_id(self, connection: Connection) -> None:
        """Ask the server for the read connection's ID."""
        self._client_id = None
        self._is_watching = isinstance(connection, WatchingConnection)
        if isinstance(connection, WatchingConnection):
            for queue in self._queues:
                connection.watch(queue.keys.stream, self._changed.set)
                connection.watch(queue.keys.bell, self._changed.set)

        def set_id(reply: Reply) -> None:
            self._client_id = reply if isinstance(reply, int) else None

        connection.request(pack_command(("CLIENT", "ID")), set_id)

    # --- new entries

    async def read_once(self) -> None:
        """Wait for room in the pool, read once and pass the entries on."""
        room = self._budget.count(self._pool.room(self._config.batch * 2, self._pace))
        if room <= 0:
            await self._wait_for_room()
            return
        self._waits = 0
        await self.hand_back_missed()
        now = time.monotonic()
        if self._turns.ring and now < self._sweep_at:
            await self._read_in_turns(room)
        else:
            await self._recover(now)
            await self._read_or_wait(room, now)
        self._reading_since = None
        self._budget.update(self._entries_read, self._bytes_read)
        self._entries_read = self._bytes_read = 0

    async def _wait_for_room(self) -> None:
        """Wait until a job finishes. If none does for a while, hand back those that were read ahead.

        They would wait here while another worker may be idle.
        """
        finished = self._pool.finished
        await self._pool.progress(SLOT_WATCH_SECS)
        self._waits = self._waits + 1 if self._pool.finished == finished else 0
        if self._waits >= WAITS_UNTIL_SLOW and not self._stopping.is_set():
            self._waits = 0
            for queue, deliveries in by_queue(self._pool.take_from(set(self._queues))).items():
                await queue.inflight.hand_back(deliveries)

    async def _read_or_wait(self, room: int, now: float) -> None:
        ready = [queue for queue in self._queues if queue.is_ready]
        # Finished jobs are settled first, above all after a reconnect.
        queues = [queue for queue in ready if not queue.settler.is_behind]
        if not self._pool.shares.may_read_ahead:
            queues = [queue for queue in queues if self._pool.shares.room_of(queue.share, room) > 0]
        watch_secs = IDLE_WATCH_SECS if len(queues) == len(ready) else SLOT_WATCH_SECS
        if not queues:
            await self._pool.progress(min(watch_secs, self._retry_secs()))
        elif len(queues) == 1 and (queues[0].gate is None or not queues[0].share.has_more):
            await self._wait_for(queues, room, len(queues) < len(ready))
        elif self._turns.ring or now - self._empty_at > EMPTY_FOR_SECS:
            self._sweep_at = now + max(SWEEP_SECS, SWEEP_SECS_PER_QUEUE * len(queues))
            await self._sweep([queue for queue in queues if not queue.share.has_more], room)
        else:
            await self._wait_for(queues, 1, len(queues) < len(ready))

    async def _wait_for(self, queues: Sequence[ServedQueue], room: int, is_short: bool) -> None:
        """Wait for entries of any of these queues; read at most `room` of each.

        `is_short` if another queue may soon be read, too.
        """
        count = min(room, self._config.batch)
        # Without a free slot it reads ahead, because jobs finish quickly; only for a short time, as they may get slow.
        is_short = is_short or self._pool.is_full
        gated = [queue for queue in queues if queue.gate is not None]
        block_ms = SLOT_WATCH_SECS * 1000 if is_short else self._config.block_ms
        if gated:
            block_ms = min(block_ms, BELL_SECS * 1000)
        block_ms = max(int(min(block_ms, self._retry_secs() * 1000)), 1)
        self._blocked_on = set(queues)
        try:
            if self._is_watching:
                reply = await self._read_watched(queues[0], count, block_ms / 1000)
            else:
                (reply,) = await self._read(
                    [self._command(queues, count, block_ms)],
                    lambda _: self._command(queues, count, min(block_ms, ASK_BLOCK_MS)),
                )
        finally:
            self._blocked_on = set()
        if isinstance(reply, ServerError):
            if reply.kind == "UNBLOCKED":
                return
            if len(queues) == 1:
                self._record_refusal(queues[0], reply)
            else:  # it may not say which of them it is about: the next read is a sweep, which finds out
                await self._pool.progress(SLOT_WATCH_SECS)
            return
        self._empty_at = self.last_read_at = now = time.monotonic()
        self._sweep_at = now + SWEEP_SECS
        for queue in gated:  # also if its bell was not heard: a ring may be lost
            self._turns.begin(queue)
        if not reply:
            self._report_drained()
        elif len(queues) == 1 and not gated:
            await self._take_in(queues[0], reply[0][1])
        else:
            by_stream = {queue.waits_on.encode(): queue for queue in queues}
            for stream, entries in reply:
                queue = by_stream[stream]
                if queue.gate is None:
                    await self._take_in(queue, entries, count)
                else:
                    queue.gate.bell = entries[-1][0]

    async def _read_watched(self, queue: ServedQueue, count: int, wait_secs: float) -> Reply:
        """Read a watched queue. If it is empty, wait until it may have entries, and return an empty reply."""
        self._changed.clear()
        wait_secs = min(wait_secs, secs_until_round(WATCHED_SECS))
        read = self._command([queue], count, None)

        def when_asked(request: bytes) -> bytes:
            nonlocal wait_secs
            wait_secs = min(wait_secs, ASK_BLOCK_MS / 1000)  # the other node does not report changes
            return request

        # The first command makes the server report the next change: an entry added before the second is read by it.
        _, reply = await self._read([pack_command(("EXISTS", queue.waits_on)), read], when_asked)
        if isinstance(reply, ServerError):
            return reply
        if reply:
            # Not the bytes that the connection received: other queues share it.
            self._bytes_read = sum(len(part) for _, fields in reply[0][1] for part in fields)
            self._vain_reads = 0
            return reply
        self._reading_since = None
        if not self._is_watching:  # it was refused: the next read blocks
            return reply
        self._vain_reads += 1
        read_at = time.monotonic()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_secs):
                await self._changed.wait()
        if self._vain_reads > MAX_VAIN_READS and not self._stopping.is_set():
            await asyncio.sleep(WATCHED_PAUSE_SECS - (time.monotonic() - read_at))
        return reply

    async def _read_in_turns(self, room: int) -> None:
        """Read full batches of a few of the queues that have more entries."""
        jobs_per_sec = (self._pool.finished - self._pace[0][1]) / PACE_WINDOW_SECS
        reads: list[tuple[ServedQueue, int]] = []
        for queue, count in self._turns.plan(room, self._config.batch, jobs_per_sec):
            if queue.is_ready and not queue.settler.is_behind:
                reads.append((queue, count))
            else:
                self._turns.end(queue)
        if reads:
            await self._read_each(reads)
        elif self._turns.ring:
            await self._pool.progress(SLOT_WATCH_SECS)

    async def _read_each(self, plan: Sequence[tuple[ServedQueue, int]]) -> None:
        """Read these queues in one request, without waiting. An error of one does not affect the others."""
        for queue, count in plan:
            if queue.gate is not None:
                await self._take(queue, queue.gate, count)
        plan = [(queue, count) for queue, count in plan if queue.gate is None]
        if not plan:
            return
        replies = await self._read([self._command([queue], count, None) for queue, count in plan])
        for (queue, count), reply in zip(plan, replies, strict=True):
            if isinstance(reply, ServerError):
                self._record_refusal(queue, reply)
                continue
            self.last_read_at = time.monotonic()
            if queue.is_failing:
                queue.is_failing = False
                queue.read_failures.clear()
            await self._take_in(queue, reply[0][1] if reply else [], count)

    async def _take(self, queue: ServedQueue, gate: Gate, count: int) -> None:
        """Take jobs of a limited queue that may run now."""
        self._reading_since = time.monotonic()
        try:
            taken = await gate.take(count)
        except ServerError as error:
            if error.remedy not in _ABOUT_QUEUES:
                raise
            self._record_refusal(queue, error)
            return
        except (ConnectionLost, asyncio.CancelledError):
            self._has_missed = True
            raise
        self.last_read_at = time.monotonic()
        if queue.is_failing:
            queue.is_failing = False
            queue.read_failures.clear()
        if taken is None:
            self.record_limits(queue, False)
            return
        self._bytes_read += sum(len(part) for _, fields in taken.entries for part in fields)
        await self._take_in(queue, taken.entries)
        if taken.has_more or taken.is_behind:
            self._turns.begin(queue)
        else:
            self._turns.end(queue)

    def record_limits(self, queue: ServedQueue, is_limited: bool) -> None:
        """Take the jobs of a queue through a gate from now on, or read them again. Ends a blocked read."""
        if is_limited == (queue.gate is not None):
            return
        if queue.gate is not None:
            queue.gate.close()
            queue.gate, queue.waits_on = None, queue.keys.stream
        else:
            queue.gate, queue.waits_on = Gate(queue, self._client), queue.keys.bell
            queue.has_group = False  # the group of the bell may be missing
        self._turns.end(queue)
        logger.info('queue "%s" %s', queue.name, "is limited" if is_limited else "has no limits any more")

    async def _sweep(self, queues: Sequence[ServedQueue], room: int) -> None:
        """Look at queues that were empty, and read what has arrived, in one call and at most `room` in total."""
        if gated := [queue for queue in queues if queue.gate is not None]:
            await self._read_each([(queue, self._config.batch) for queue in gated])
            queues = [queue for queue in queues if queue.gate is None]
        if not queues:
            return
        self._sweep_from = (self._sweep_from + 1) % len(queues)  # another one first each time
        queues = [*queues[self._sweep_from :], *queues[: self._sweep_from]]
        room_of = self._pool.shares.room_of
        limits = [max(min(room_of(queue.share, room), self._config.batch), 0) for queue in queues]
        sent_at = time.monotonic()
        config = self._config
        packed = calls.packed_sweep(
            [queue.keys.stream for queue in queues],
            group=config.group,
            consumer=config.consumer_id,
            room=room,
            most=limits,
        )
        (found,) = await self._read([packed])
        if isinstance(found, ServerError):
            if found.kind == "NOSCRIPT":
                await self._read_client.load_scripts()
            else:  # such as an ACL that forbids one of the keys
                await self._read_each([(queue, 1) for queue in queues])
            return
        self.last_read_at = time.monotonic()
        taken = 0
        for number, entries in found:
            queue = queues[number]
            if isinstance(entries, bytes):
                self._record_refusal(queue, ServerError(entries.decode(errors="replace")))
            else:
                taken += len(entries)
                await self._take_in(queue, entries, 1)
        if taken < room:
            self._empty_at = sent_at
        self._report_drained()

    async def _take_in(self, queue: ServedQueue, entries: Sequence[Any], count: int | None = None) -> None:
        """Pass entries on to the pool. If there are `count`, as many as were asked for, the queue may have more."""
        if count is not None:
            if len(entries) >= count:
                self._turns.begin(queue)
            else:
                self._turns.end(queue)
        if not entries:
            return
        self._entries_read += len(entries)
        queue.delivered_at = time.monotonic()
        for observe in queue.observers.received:
            observe(len(entries), 0)
        receive = queue.inflight.receive
        deliveries = [
            delivery for entry_id, fields in entries if (delivery := receive(entry_id, fields, 0)) is not None
        ]
        sent_at = self._reading_since
        if sent_at is not None and time.monotonic() - sent_at > self._config.claim_min_idle_ms / 1000:
            # While this process was suspended, the entries may have been in the socket until their leases expired.
            await queue.leases.confirm()
        self._pool.put(queue, deliveries)

    def _report_drained(self) -> None:
        """Report queues that had entries and then none for the time of a blocking read."""
        now = time.monotonic()
        if self._stopping.is_set() or now < self._report_at:
            return
        self._report_at = now + REPORT_SECS
        before = now - self._config.block_ms / 1000 + CLOCK_MARGIN_SECS
        for queue in self._queues:
            if queue.delivered_at is not None and queue.delivered_at <= before and not queue.is_paused:
                queue.delivered_at = None
                queue.settler.drained(wall_clock_ms())

    def _command(self, queues: Sequence[ServedQueue], count: int, block_ms: int | None) -> bytes:
        config = self._config
        block = () if block_ms is None else ("BLOCK", block_ms)
        streams = [queue.waits_on for queue in queues]
        ids = [">"] * len(queues)
        return pack_command(
            ("XREADGROUP", "GROUP", config.group, config.consumer_id, "COUNT", count, *block, "STREAMS", *streams, *ids)
        )

    async def _read(self, requests: Sequence[bytes], when_asked: Callable[[bytes], bytes] | None = None) -> list[Reply]:
        """Send reads in one request and return their replies, refusals as values.

        `when_asked` returns what to send instead of a request after an ASK redirect. Raises errors that are not about
        the queues.
        """
        connection = await self._read_client.up(patience_secs=3600)
        if self._stopping.is_set():
            return [None] * len(requests)
        self._reading_since = time.monotonic()
        received = connection.bytes_received
        try:
            futures = [_sent(connection, packed) for packed in requests]
            replies = [await future for future in futures]
            for number, reply in enumerate(replies):
                if isinstance(reply, ServerError) and reply.kind == "ASK":
                    asking, request = await self._read_client.asking(reply), requests[number]
                    replies[number] = await _sent(asking, when_asked(request) if when_asked else request)
                if isinstance(replies[number], ConnectionLost):
                    raise replies[number]
        except (ConnectionLost, asyncio.CancelledError):
            self._has_missed = True
            raise
        self._bytes_read += connection.bytes_received - received
        for reply in replies:
            if isinstance(reply, ServerError) and reply.remedy not in _ABOUT_QUEUES and reply.kind != "UNBLOCKED":
                # Such as MOVED: this connection cannot read any more.
                await self._read_client.apply_remedy(reply, 0, float("inf"), connection)
                raise reply
        return replies

    async def record_pause(self, queue: ServedQueue, is_paused: bool) -> None:
        """Stop or resume reading a queue. A blocked read is ended: it would deliver one more batch, or not see it."""
        if is_paused or self._pool.occupied >= self._pool.concurrency:
            # Nothing is read on purpose and the server answers: the health check must stay green.
            self.last_read_at = time.monotonic()
        if is_paused != queue.is_paused:
            if is_paused or queue.is_paused is not None:
                logger.info('queue "%s" %s', queue.name, "paused" if is_paused else "resumed")
            queue.takeover.is_paused = is_paused
        # Each time: the first UNBLOCK may have arrived before the read.
        if self._blocked_on and is_paused == (queue in self._blocked_on) and not queue.is_failing:
            await self.end_blocked_read()

    # --- stopping

    async def stop(self, reading: asyncio.Task[None]) -> None:
        """Stop reading, and wait until this loop has ended.

        A read that blocks at the server is unblocked there, so that no more entries are delivered to it.
        """
        self._stopping.set()
        give_up_at = time.monotonic() + STOP_PATIENCE_SECS
        while time.monotonic() < give_up_at:
            await self.end_blocked_read()  # repeatedly: it may arrive before the read
            _, late = await asyncio.wait([reading], timeout=UNBLOCK_SECS)
            if not late:
                return
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)

    async def end_blocked_read(self) -> None:
        """End a read that blocks at the server, if there is one, and the wait for a watched queue."""
        self._changed.set()
        if self._read_client.connection is None or self._is_watching or self._client_id is None:
            return
        with contextlib.suppress(RedisError, TimeoutError):  # then the read ends with its BLOCK time or its connection
            await asyncio.wait_for(self._client.call("CLIENT", "UNBLOCK", self._client_id), UNBLOCK_SECS)

    async def hand_back_missed(self) -> None:
        """Hand back entries delivered over a broken connection. The server may deliver more: see `watch_unheld`."""
        if self._has_missed:
            await self._hand_back_undelivered()
            self._has_missed = False

    async def watch_unheld(self) -> None:
        """Wait one interval, then hand back entries of reads that the server executed after their connection broke."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), renewal_secs(self._config))
            return
        if not self._has_missed:
            await self._hand_back_undelivered(self._reading_since or time.monotonic())

    async def _hand_back_undelivered(self, before: float | None = None) -> None:
        """Hand back what each queue delivered, until `before`, and did not arrive here."""
        queues = [queue for queue in self._queues if queue.has_group]
        handing_back = (queue.inflight.hand_back_undelivered(before) for queue in queues)
        results = await asyncio.gather(*handing_back, return_exceptions=True)
        for result in results:
            if isinstance(result, ServerError) and result.remedy in _ABOUT_QUEUES:
                continue  # its reads fail, too
            if isinstance(result, BaseException):
                raise result

    # --- groups, and queues that cannot be read: their key has the wrong type, or an ACL denies it

    async def make_groups(self) -> None:
        """Create missing consumer groups, and their streams. They also deliver jobs that were added earlier."""
        now, group, consumer = time.monotonic(), self._config.group, self._config.consumer_id
        queues = [queue for queue in self._queues if not queue.has_group and queue.retry_at <= now]
        replies = await self._client.call_each(
            [("XGROUP", "CREATE", queue.keys.stream, group, "0", "MKSTREAM") for queue in queues]
        )
        made: list[ServedQueue] = []
        for queue, reply in zip(queues, replies, strict=True):
            error: RedisError | None = reply if isinstance(reply, RedisError) else None
            if isinstance(error, ServerError) and error.kind == "OOM":
                # Without free memory no group can be created, but existing ones can be drained, which frees memory.
                (info,) = await self._client.call_each([("XPENDING", queue.keys.stream, group)])
                if not isinstance(info, ServerError) or info.kind != "NOGROUP":
                    error = info if isinstance(info, ServerError) else None
            if isinstance(error, ConnectionLost | Unreachable):
                raise error
            if isinstance(error, ServerError) and error.kind != "BUSYGROUP":
                self._record_failure(queue, error)
                continue
            queue.has_group = True
            queue.is_failing = False
            made.append(queue)
        # Servers before Redis 7.2 create a consumer with its first job, and an idle worker would not be listed.
        await self._client.call_each(
            [("XGROUP", "CREATE", queue.waits_on, group, "0", "MKSTREAM") for queue in made if queue.gate]
            + [
                ("XGROUP", "CREATECONSUMER", stream, group, consumer)
                for queue in made
                for stream in {queue.keys.stream, queue.waits_on}
            ]
        )
        for queue in made:
            if queue.gate is not None:
                self._turns.begin(queue)  # the first take closes the group
        if made:
            self.last_read_at = time.monotonic()  # healthy from now on: on an empty queue the first reply takes a while

    async def _recover(self, now: float) -> None:
        """Create groups that are missing, and try queues again whose reads failed."""
        if any(not queue.has_group for queue in self._queues):
            await self.make_groups()
        failing = [queue for queue in self._queues if queue.is_failing and queue.has_group and queue.retry_at <= now]
        if failing:
            await self._read_each([(queue, 1) for queue in failing])

    def _retry_secs(self) -> float:
        """Return the seconds until a queue that cannot be read is tried again."""
        soonest = min((queue.retry_at for queue in self._queues if queue.is_failing), default=float("inf"))
        return max(soonest - time.monotonic(), 0.001)

    def _record_refusal(self, queue: ServedQueue, error: ServerError) -> None:
        """Record that a queue could not be read: it is left out until its group exists again, or for a while."""
        if error.kind == "NOGROUP":
            logger.warning(
                'consumer group %r of queue "%s" is gone (was the server flushed?); recreating it',
                *(self._config.group, queue.name),
            )
            queue.has_group = False
            self._turns.end(queue)
        else:
            self._record_failure(queue, error)

    def _record_failure(self, queue: ServedQueue, error: RedisError) -> None:
        queue.is_failing = True
        queue.retry_at = time.monotonic() + queue.read_failures.record(error)
        self._turns.end(queue)


#: Remedies of errors that concern a queue, not the connection.
_ABOUT_QUEUES = (Remedy.NONE, Remedy.MAKE_GROUP, Remedy.LOAD_SCRIPTS)


def by_queue(deliveries: Iterable[Delivery]) -> dict[ServedQueue, list[Delivery]]:
    """Group deliveries by their queues."""
    groups: dict[ServedQueue, list[Delivery]] = defaultdict(list)
    for delivery in deliveries:
        groups[delivery.queue].append(delivery)
    return groups


def _sent(connection: Connection, packed: bytes) -> asyncio.Future[Reply]:
    """Send one packed command and return a future of its reply, errors as values."""
    future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
    connection.request(packed, lambda reply: None if future.done() else future.set_result(reply))
    return future


#: Entries of the first read, before their size is known.
FIRST_COUNT = 8


class ReadBudget:
    """Limits the bytes of a read, by the mean size of the entries seen last: XREADGROUP only takes a number of entries.

    A read asks for at most twice as many entries as the one before. If entries grow from one read to the next, it
    exceeds the budget: by up to `batch` entries, whose fields are limited only by the server's `proto-max-bulk-len`.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._limit = FIRST_COUNT

    def count(self, room: int) -> int:
        """Return how many entries to ask for, at most `room`."""
        return min(room, self._limit)

    def update(self, entries: int, size: int) -> None:
        """Record the reply to a read: the number of its entries and its size in bytes."""
        if entries:
            self._limit = max(1, min(self._max_bytes * entries // max(size, 1), max(2 * self._limit, FIRST_COUNT)))
