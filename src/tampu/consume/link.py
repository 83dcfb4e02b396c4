"""Links a worker to one server: connections and background loops, shared by all its queues there.

```
reader ──► pool of handlers ──► settlers ──► acked and deleted, or a retry, or a dead letter
   ▲              │
   └── takeover   └── leases (a thread): renewed for every entry in flight
```
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING, Any

from tampu.base.clock import secs_until_round
from tampu.consume.gate import GateKeeper
from tampu.consume.leases import renewal_secs
from tampu.consume.meter import WRITE_SECS, MeterLoop
from tampu.consume.reader import STOP_PATIENCE_SECS, Reader
from tampu.consume.settle import ACK, SETTLE, SETTLE_UNDER_OOM
from tampu.consume.takeover import LATE_MS
from tampu.errors import RedisError
from tampu.inspect.snapshot import list_workers
from tampu.maintain.leader import LeaderLoop
from tampu.maintain.supervise import supervise
from tampu.redis import calls
from tampu.redis.client import Client
from tampu.redis.faults import PASSING, ServerError, Unreachable
from tampu.redis.gate import MEND, TAKE, TAKE_UNDER_OOM
from tampu.redis.nodes import SharedConnections, WatchingConnections
from tampu.redis.scripts import Capabilities, probe_capabilities

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tampu.config import ConsumerConfig
    from tampu.consume.pool import Pool
    from tampu.consume.runtime import ServedQueue
    from tampu.redis.connection import Connection
    from tampu.redis.settings import ConnectionSettings

logger = logging.getLogger("tampu.worker")

#: A consumer with nothing pending that has been idle this long belongs to a dead worker, in milliseconds.
SILENT_CONSUMER_MS = 10 * 60 * 1000
#: How often the names of dead consumers are removed, in seconds.
SWEEP_INTERVAL_SECS = 60.0
#: Maximum number of queues on a Cluster that are read with blocking reads, each on a dedicated connection. The others
#: share connections that watch their streams.
MAX_BLOCKING = 4
#: How long a read may take beyond its BLOCK time before the connection counts as lost, in seconds.
READ_MARGIN_SECS = 5.0
#: How often a worker checks which queues are paused and which jobs are to be cancelled, in seconds.
POLL_SECS = 1.0
#: How often the length of queues is measured for metrics, in seconds.
MEASURE_SECS = 5.0
#: After how long a worker that cannot connect logs the reason, in seconds.
CONNECT_WARNING_SECS = 5.0
#: Longest time between two checks for entries to take over, in seconds.
TAKEOVER_SECS = 1.0


class ClusterNodes:
    """The connections of a worker to the nodes of a Cluster, shared by its links there."""

    def __init__(self) -> None:
        self.commands = SharedConnections()
        self.leader = SharedConnections()
        #: For wake-ups, and for reads of links beyond `MAX_BLOCKING`.
        self.watching = WatchingConnections()
        self.links = 0


class ServerLink:
    """The connections and loops of one worker to one server, or for one queue on a Cluster."""

    def __init__(
        self,
        settings: ConnectionSettings,
        tag: str,
        config: ConsumerConfig,
        pool: Pool,
        nodes: ClusterNodes | None = None,
    ) -> None:
        self.settings = settings
        self.routing_key = tag.encode()
        self._tag = tag
        self._config = config
        commands, leading, wake_ups, reads = None, None, None, None
        if nodes is not None:
            nodes.links += 1
            commands, leading, wake_ups = nodes.commands, nodes.leader, nodes.watching
            reads = nodes.watching if nodes.links > MAX_BLOCKING else None
        own_scripts = (SETTLE, ACK, *calls.CONSUMER_SCRIPTS)
        self.client = Client(settings, self.routing_key, own_scripts, shared=commands)
        # A dedicated connection: otherwise outcomes would wait behind promotions of hundreds of jobs.
        leader_scripts = tuple(dict.fromkeys((*calls.PROMOTER_SCRIPTS, *calls.SCHEDULER_SCRIPTS)))
        self._leader_client = Client(settings, self.routing_key, leader_scripts, shared=leading)
        self.read_client = Client(
            settings,
            self.routing_key,
            (calls.SWEEP,) if reads is None else (),
            response_timeout_secs=config.block_ms / 1000 + READ_MARGIN_SECS,
            shared=reads,
        )
        self.client.prepare_with(self._update_capabilities)
        self._capabilities: Capabilities | None = None
        self.queues: list[ServedQueue] = []
        self.reader = Reader(self.read_client, self.client, config, pool, self.queues)
        self._leading = LeaderLoop(self._leader_client, settings, self.routing_key, wake_ups)
        self._meters = MeterLoop(self.client, self.queues, registers=settings.kind != "cluster")
        self._stopping = asyncio.Event()
        self._poll_now = asyncio.Event()
        self._is_prepared = False
        self._loops: dict[str, asyncio.Task[None]] = {}
        #: Made when one of its queues is limited, and the loop that runs it.
        self._keeper: GateKeeper | None = None
        self._keeping: asyncio.Task[None] | None = None

    # --- starting

    def add(self, queue: ServedQueue) -> None:
        """Serve one more queue. It may be added while the loops run."""
        queue.link = self
        if self._capabilities is not None:
            queue.use(self._capabilities)
        queue.leases.start()
        self.queues.append(queue)
        for duty in queue.duties(self._leader_client):
            self._leading.add(duty)
        self._poll_now.set()  # it is read once it is known not to be paused

    async def start(self) -> None:
        """Connect, create the groups and start the loops, however long the server is unreachable."""
        # A wrong password raises at once; an unreachable server is waited for.
        try:
            await self.client.up(CONNECT_WARNING_SECS)
        except Unreachable as error:
            logger.warning("the worker cannot start yet; retrying: %s", error)
            await self.client.up(patience_secs=3600)
        await supervise("startup", self._prepare, lambda: self._is_prepared)
        is_over = self._stopping.is_set
        loops: dict[str, Any] = {
            "tampu-reader": supervise("reader", self.reader.read_once, is_over),
            "tampu-takeover": supervise("takeover of jobs", self._take_over, is_over),
            "tampu-unheld": supervise("hand-back of late entries", self.reader.watch_unheld, is_over),
            "tampu-sweeper": supervise("removal of dead consumers", self._forget_dead_consumers, is_over),
            "tampu-meters": supervise("meters", self._write_meters, is_over),
            "tampu-watch": supervise("check for pauses and cancels", self._watch, is_over),
            "tampu-leader": self._leading.run(self._stopping),
        }
        if any(queue.measures for queue in self.queues):
            loops["tampu-depth"] = supervise("measurement of queues", self._measure, is_over)
        self._loops = {name: asyncio.create_task(loop, name=name) for name, loop in loops.items()}

    async def _prepare(self) -> None:
        await self.reader.make_groups()
        await self._poll()
        self._is_prepared = True

    async def _update_capabilities(self, connection: Connection) -> None:
        """Probe the server's capabilities on each connection: another server may have taken over the address."""
        try:
            found = await probe_capabilities(connection, self._tag)
        except ServerError as error:
            if error.kind not in PASSING:
                raise
            return  # such as out of memory: keep what is known
        if found.script_flags:
            is_limited = any(queue.gate is not None for queue in self.queues)
            for script in (SETTLE_UNDER_OOM, TAKE_UNDER_OOM) if is_limited else (SETTLE_UNDER_OOM,):
                await connection.ask("SCRIPT", "LOAD", script.text)
        self._capabilities = found
        for queue in self.queues:
            queue.use(found)

    @property
    def sockets(self) -> set[Connection]:
        """Its open connections; on a Cluster, most are shared with other links."""
        return self.client.sockets | self.read_client.sockets | self._leader_client.sockets | self._leading.sockets

    # --- loops

    async def _pause(self, secs: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(secs_until_round(secs)):
                await self._stopping.wait()

    async def _take_over(self) -> None:
        """Look for expired leases in all queues, and start the takeover of those that have some."""
        queues = [queue for queue in self.queues if queue.takeover.can_poll]
        asked_at = time.monotonic()
        replies = await self.client.call_each([queue.takeover.poll for queue in queues])
        is_late = time.monotonic() - asked_at > LATE_MS / 1000
        for queue, reply in zip(queues, replies, strict=True):
            if is_late:
                break  # the server was stalled: the leases of live workers look expired until they renew them
            # An error such as NOGROUP: the reader finds it, too.
            if isinstance(reply, list) and reply and not self._stopping.is_set():
                queue.takeover.start()
        await self._pause(min(renewal_secs(self._config), TAKEOVER_SECS))

    def _keep_gates(self) -> None:
        """Start to keep the gates of limited queues that this process leads, unless it does so already."""
        if self._keeper is None and any(queue.gate is not None for queue in self.queues):
            self.client.add_scripts((TAKE, MEND))  # only now: workers without limits do without them
            self._keeper = GateKeeper(self.settings, self.routing_key, self.client, self.queues)
            keeping = supervise("limits", self._keeper.one_round, self._stopping.is_set)
            self._keeping = asyncio.create_task(keeping, name="tampu-gates")

    async def _measure(self) -> None:
        """Report the length of each queue to its metrics sink, then wait."""
        for queue in self.queues.copy():
            if queue.measures:
                try:
                    await queue.measure()
                except ServerError as error:  # such as a key of the wrong type; still measure the others
                    queue.measure_failures.record(error)
                else:
                    queue.measure_failures.clear()
        await self._pause(MEASURE_SECS)

    async def _write_meters(self) -> None:
        await self._meters.run_once()
        await self._pause(WRITE_SECS)

    async def _watch(self) -> None:
        """Poll, then wait for a second."""
        self._poll_now.clear()
        await self._poll()
        for queue in self.queues:
            queue.log.flush()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(secs_until_round(POLL_SECS)):
                await self._poll_now.wait()

    async def _poll(self) -> None:
        """Check once which queues and tasks are paused and which queues have jobs to be cancelled."""
        queues = self.queues.copy()
        limited, paused, tasks_paused, marked = await asyncio.gather(
            calls.existing(self.client, [queue.keys.limits for queue in queues]),
            calls.existing(self.client, [queue.keys.paused for queue in queues]),
            calls.existing(self.client, [queue.keys.paused_tasks for queue in queues]),
            calls.existing(self.client, [queue.keys.cancel_marks for queue in queues]),
        )
        errors: dict[ServedQueue, RedisError] = {}
        answers = zip(queues, limited, paused, tasks_paused, marked, strict=True)
        for queue, is_limited, is_paused, has_paused, has_marks in answers:
            for answer in (is_limited, is_paused, has_paused, has_marks):
                if isinstance(answer, RedisError):
                    errors[queue] = answer
            if isinstance(is_limited, bool) and is_limited != (queue.gate is not None):
                self.reader.record_limits(queue, is_limited)
                await self.reader.end_blocked_read()
                self._keep_gates()
            if isinstance(is_paused, bool):
                await self.reader.record_pause(queue, is_paused)
            if has_paused is False:
                queue.admission.paused.update((), 0)
            if has_marks is False:
                queue.cancels.forget()
        pausing = [queue for queue, has_some in zip(queues, tasks_paused, strict=True) if has_some is True]
        cancelling = [queue for queue, has_marks in zip(queues, marked, strict=True) if has_marks is True]
        now_ms = await self.client.server_time_ms() if pausing else 0
        replies = await self.client.call_each(
            [("HGETALL", queue.keys.paused_tasks) for queue in pausing]
            + [queue.cancels.command for queue in cancelling]
        )
        for number, (queue, reply) in enumerate(zip([*pausing, *cancelling], replies, strict=True)):
            if isinstance(reply, RedisError):
                errors[queue] = reply
            elif number < len(pausing):
                queue.admission.paused.update(reply, now_ms)
            else:
                await queue.cancels.update(reply)
        for queue in queues:
            if queue in errors:
                queue.watch_failures.record(errors[queue])
            else:
                queue.watch_failures.clear()

    async def _forget_dead_consumers(self) -> None:
        await self._pause(SWEEP_INTERVAL_SECS)
        if self._stopping.is_set():
            return
        await asyncio.gather(*map(self._forget_dead_consumers_of, self.queues))  # together: their requests are shared

    async def _forget_dead_consumers_of(self, queue: ServedQueue) -> None:
        with contextlib.suppress(ServerError):
            for worker in await list_workers(self.client, queue.keys, dead=True):
                is_silent = not worker.is_alive and worker.idle_ms >= SILENT_CONSUMER_MS
                if is_silent and worker.group == self._config.group:
                    await self._forget(queue, worker.name)

    # --- stopping

    async def stop_reading(self) -> None:
        """Stop the loops. Entries delivered until then are in the pool."""
        self._stopping.set()  # promoters and schedulers release their locks
        self._poll_now.set()
        if self._keeping is not None:
            self._keeping.cancel()  # it may wait for new jobs for a second; another worker keeps the gates
        if self._loops:
            takeovers = (queue.takeover.stop(STOP_PATIENCE_SECS) for queue in self.queues)
            await asyncio.gather(self.reader.stop(self._loops["tampu-reader"]), *takeovers)

    async def close(self, secs_left: Callable[[], float]) -> None:
        """Wait for the loops, remove the consumer's names and close the connections."""
        if self._loops:
            _, late = await asyncio.wait(self._loops.values(), timeout=secs_left())
            for task in late:
                task.cancel()
            await asyncio.gather(*self._loops.values(), return_exceptions=True)
        await self._leader_client.close()
        await self.best_effort(self._meters.write, secs_left())
        if self._keeper is not None and self._keeping is not None:
            await asyncio.gather(self._keeping, return_exceptions=True)
            await self._keeper.close()
        await self.best_effort(self._forget_names, secs_left())
        await self.client.close()

    async def best_effort(self, work: Callable[[], Awaitable[object]], patience_secs: float) -> None:
        """Run one cleanup step. If the server is unreachable, expiring leases have the same effect a little later."""
        if self.client.connection is None:
            return
        try:
            await asyncio.wait_for(work(), patience_secs)
        except Exception as error:
            logger.info("skipped a cleanup step at shutdown: %s: %s", type(error).__name__, error)

    async def _forget_names(self) -> None:
        for queue in self.queues:
            if queue.gate is not None:
                queue.gate.flush()
        await self.client.call_each([queue.heartbeats.last_command for queue in self.queues])
        await asyncio.gather(*(self._forget(queue, self._config.consumer_id) for queue in self.queues))

    async def _forget(self, queue: ServedQueue, consumer: str) -> None:
        keys, group = queue.keys, self._config.group
        await calls.forget_consumer(self.client, keys.stream, keys.leases(group), group=group, consumer=consumer)
        if queue.gate is not None:
            await self.client.call_each([("XGROUP", "DELCONSUMER", keys.bell, group, consumer)])
