"""The runtime of a worker: its slots, its lease thread and its links to servers, shared by all its queues."""

from __future__ import annotations

import asyncio
import logging
import uuid
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tampu.config import PromoterConfig
from tampu.consume.admission import Admission, Cancels, StartMarks
from tampu.consume.execute import Runner
from tampu.consume.heartbeat import Heartbeats, LoopWatch
from tampu.consume.inflight import InFlight
from tampu.consume.job_log import JobLog, JobMetrics
from tampu.consume.leases import Leases, LeaseThread
from tampu.consume.link import ClusterNodes, ServerLink
from tampu.consume.meter import Meter
from tampu.consume.outcomes import DeadLetter, Observers
from tampu.consume.pool import Pool, Share
from tampu.consume.processes import refuse_inside_starting_child
from tampu.consume.reader import by_queue
from tampu.consume.settle import Settler
from tampu.consume.takeover import Quarantine, Takeover
from tampu.inspect.snapshot import read_depth
from tampu.maintain.promoter import PromoterDuty
from tampu.maintain.scheduler import SchedulerDuty
from tampu.maintain.supervise import Failures
from tampu.metrics import MetricsSink, tell
from tampu.wire.keys import QueueKeys
from tampu.wire.typed import TypedPayload

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from tampu.config import ConsumerConfig
    from tampu.consume.gate import Gate
    from tampu.consume.handlers import FailureCalls
    from tampu.consume.inflight import Delivery
    from tampu.redis.client import Client
    from tampu.redis.scripts import Capabilities
    from tampu.redis.settings import ConnectionSettings
    from tampu.wire.codec import PayloadCodec
    from tampu.wire.job import Job

logger = logging.getLogger("tampu.worker")

#: How long a shutdown may keep settling and cleaning up after its deadline, and how long each cleanup step may take, in
#: seconds.
CLEANUP_SECS = 1.0


class ServedQueue:
    """One queue of a worker, and the parts that a worker has once per queue."""

    #: Its server. Set when it is added there.
    link: ServerLink

    def __init__(
        self,
        runtime: Runtime,
        client: Client,
        config: ConsumerConfig,
        share: Share,
        handler: Callable[[Job[Any]], Awaitable[Any]],
    ) -> None:
        self.name = config.queue_name
        self.config = config = replace(config, metrics=config.metrics.for_queue(config.queue_name))
        self.keys = keys = QueueKeys(config.queue_name)
        #: The stream whose entries wake its reader, and the gate through which its jobs come while it has limits.
        self.waits_on = keys.stream
        self.gate: Gate | None = None
        #: True if the server lets scripts write above maxmemory.
        self.has_script_flags = False
        self.share = share
        self._client = client
        self.settler = Settler(client, keys, config)
        self.observers = Observers()
        if config.events_enabled:
            self.observers.started.append(self.settler.started)
        self.log = JobLog(self.name, config.max_attempts)
        self.log.observe_with(self.observers)
        JobMetrics(config.metrics).observe_with(self.observers)
        self.inflight = InFlight(client, keys, config, self.settler.add, runtime.decode_payload, self.observers, self)
        self.settler.on_settled = self.inflight.settled
        self.settler.on_all_succeeded = self.inflight.all_succeeded
        self.meter = Meter()
        self.settler.on_written = self.meter.count
        self._promoter: PromoterDuty | None = None
        #: True if the metrics sink wants to know the length of the queue.
        self.measures = type(config.metrics).queue_depth is not MetricsSink.queue_depth
        #: Wait for the calls of `on_failure` and `on_end` that were started, for up to so many seconds.
        self.finishers: list[Callable[[float], Awaitable[None]]] = []
        self.heartbeats = Heartbeats(self, runtime.pool, runtime.watch)
        self.leases = Leases(client, keys, config, self.inflight)
        self.cancels = Cancels(client, keys, config, self.inflight)
        starts = StartMarks(client, keys, config, self.leases)
        self.admission = Admission(self.name, self.leases, self.cancels, starts)
        #: Runs one of its jobs.
        self.run = Runner(handler, config, self.settler, self.admission, self.observers, self.log).run
        self.takeover = Takeover(client, self, runtime.pool, runtime.quarantine)
        #: Failures of its reads and of other checks, and until when it is not read after one.
        self.read_failures = Failures(f'reader of queue "{self.name}"')
        self.watch_failures = Failures(f'check for pauses and cancels of queue "{self.name}"')
        self.measure_failures = Failures(f'measurement of queue "{self.name}"')
        self.retry_at = 0.0
        self.is_failing = False
        #: False if its group must be created.
        self.has_group = False
        #: When it last delivered entries, until it is reported as drained.
        self.delivered_at: float | None = None

    async def measure(self) -> None:
        """Report the length of the queue to the metrics sink."""
        running = len(self.inflight.running_deliveries())
        depth = await read_depth(self._client, self.keys, running=running, concurrency=self.config.concurrency)
        tell(self.config.metrics.queue_depth, depth)

    def call_on_failure(self, calls: FailureCalls) -> None:
        """Run the `on_failure` calls of jobs that are dead-lettered."""
        self.finishers.append(calls.finish)
        self.observers.settled.append(lambda outcome: calls(outcome) if isinstance(outcome, DeadLetter) else None)

    @property
    def is_paused(self) -> bool | None:
        """Return True while the queue is paused; None before the first check."""
        return self.takeover.is_paused

    @property
    def is_ready(self) -> bool:
        """Return True if it can be read: its group exists, reads do not fail, and it is not paused."""
        return self.has_group and not self.is_failing and self.takeover.is_paused is False

    @property
    def is_led(self) -> bool:
        """Return True if this process is the leader of the queue, or no worker is."""
        return self._promoter is None or bool(self._promoter.is_ours)

    def duties(self, client: Client) -> list[PromoterDuty | SchedulerDuty]:
        """Return what the leader of the queue does, over this client."""
        config = self.config
        duties: list[PromoterDuty | SchedulerDuty] = []
        if config.delayed_enabled:
            promoter = PromoterConfig(
                queue_name=config.queue_name,
                poll_interval_ms=config.delayed_poll_interval_ms,
                promote_batch=config.delayed_promote_batch,
                max_stream_len=config.delayed_max_stream_len,
                lock_ttl_secs=config.delayed_lock_ttl_secs,
                holder_id=config.consumer_id,
                events_enabled=config.events_enabled,
                events_max_stream_len=config.events_max_stream_len,
                dlq_max_stream_len=config.dlq_max_stream_len,
                metrics=config.metrics,
            )
            self._promoter = PromoterDuty(client, promoter)
            duties.append(self._promoter)
        if config.run_scheduler:
            named = replace(config.scheduler, queue_name=config.queue_name, holder_id=config.consumer_id)
            duties.append(SchedulerDuty(client, named))
        return duties

    def use(self, server: Capabilities) -> None:
        """Set the server's capabilities."""
        self.settler.use(xackdel=server.xackdel, script_flags=server.script_flags)
        self.inflight.has_xackdel = server.xackdel
        self.has_script_flags = server.script_flags

    def end(self) -> None:
        """Stop settling and confirming."""
        self.settler.close()
        self.leases.stop()
        if self.gate is not None:
            self.gate.close()


class Runtime:
    """Runs the jobs of one or more queues until it is asked to stop."""

    def __init__(self, config: ConsumerConfig) -> None:
        refuse_inside_starting_child()
        # A name that is in use, as by the process that this one replaces, would make the jobs of both look alike.
        unique_name = f"{config.consumer_id}:{uuid.uuid4().hex[:6]}"
        self.config = config = replace(config, consumer_id=unique_name)
        self.watch = LoopWatch(self.running_deliveries)
        typed = config.payload_type
        self.decode_payload = None if typed is None else TypedPayload(typed).decode_slot
        self.pool = Pool(config.concurrency)
        self.quarantine = Quarantine(config.concurrency)
        self._lease_thread = LeaseThread(config, self.watch)
        self._links: dict[Any, ServerLink] = {}
        #: The connections to the nodes of each Cluster.
        self._nodes: dict[object, ClusterNodes] = {}
        self._starting: dict[ServerLink, asyncio.Task[None]] = {}
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._is_running = False
        self._cleanup_ends_at = 0.0
        #: Handlers that were still running at the deadline of the shutdown.
        self.abandoned = 0

    @property
    def links(self) -> list[ServerLink]:
        """The links to servers."""
        return list(self._links.values())

    @property
    def queues(self) -> list[ServedQueue]:
        """The queues it serves."""
        return [queue for link in self._links.values() for queue in link.queues]

    def running_deliveries(self) -> list[Delivery]:
        """Return the entries whose handlers are running."""
        return [delivery for queue in self.queues for delivery in queue.inflight.running_deliveries()]

    @property
    def last_read_at(self) -> float | None:
        """Return when every server had last answered a read, by the monotonic clock; None before the first answer."""
        times = [link.reader.last_read_at for link in self._links.values()]
        return None if not times or None in times else min(at for at in times if at is not None)

    @property
    def is_healthy(self) -> bool:
        """Return False while a handler blocks the event loop for over `max_block_ms`, or leases cannot be renewed."""
        return self._lease_thread.is_healthy

    @property
    def connections(self) -> int:
        """Return the number of open connections to servers."""
        sockets = set[object]().union(*(link.sockets for link in self._links.values()))
        return len(sockets) + self._lease_thread.connections

    def link(self, settings: ConnectionSettings, queue_name: str) -> ServerLink:
        """Return the link to the server that holds a queue.

        Queues on a Cluster each have their own, because their slots move independently; they share connections.
        """
        tag = QueueKeys(queue_name).tag
        is_cluster = settings.kind == "cluster"
        key = (settings.identity, tag if is_cluster else "")
        if key not in self._links:
            nodes = self._nodes.setdefault(settings.identity, ClusterNodes()) if is_cluster else None
            self._links[key] = ServerLink(settings, tag, self.config, self.pool, nodes)
        return self._links[key]

    def add(
        self,
        link: ServerLink,
        queue_name: str,
        handler: Callable[[Job[Any]], Awaitable[Any]],
        share: Share | None = None,
        codec: PayloadCodec | None = None,
    ) -> ServedQueue:
        """Serve one more queue. It may be added while the runtime runs. `codec` replaces that of the settings."""
        share = share or Share()
        self.pool.shares.add(share)
        config = replace(self.config, queue_name=queue_name, codec=self.config.codec if codec is None else codec)
        queue = ServedQueue(self, link.client, config, share, handler)
        link.add(queue)
        if self._is_running and link not in self._starting:
            self._start(link)
        return queue

    # --- running and stopping

    async def run(self, shutdown: asyncio.Event) -> None:
        """Run jobs until `shutdown` is set, then drain within `shutdown_deadline_secs`."""
        self._is_running = True
        stopping = asyncio.ensure_future(shutdown.wait())
        try:
            for link in self.links:
                self._start(link)
            await asyncio.wait((stopping, self._failed), return_when=asyncio.FIRST_COMPLETED)
            if self._failed.done():
                self._failed.result()
        finally:
            self._is_running = False
            stopping.cancel()
            if not self._failed.done():
                self._failed.cancel()
            await self._stop()

    def _start(self, link: ServerLink) -> None:
        self._starting[link] = task = asyncio.create_task(link.start(), name="tampu-start")

        def started(task: asyncio.Task[None]) -> None:
            error = None if task.cancelled() else task.exception()
            if error is not None and not self._failed.done():
                self._failed.set_exception(error)
            elif not task.cancelled() and error is None:
                self._lease_thread.add(link.settings, link.routing_key, link.queues)

        task.add_done_callback(started)

    async def _stop(self) -> None:
        """Stop reading, hand back unstarted jobs, finish or abandon running ones, settle, remove the consumer names."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.config.shutdown_deadline_secs
        self._cleanup_ends_at = deadline + CLEANUP_SECS
        for task in self._starting.values():
            task.cancel()
        await asyncio.gather(*self._starting.values(), return_exceptions=True)
        await self._hand_back(self.pool.take_back())
        await asyncio.gather(*(link.stop_reading() for link in self.links))
        await self._hand_back(self.pool.take_back())  # delivered meanwhile
        await asyncio.gather(*(self._end_reading(link) for link in self.links))
        await self.pool.finish(deadline - loop.time())
        for queue in self.queues:
            queue.admission.is_stopping = True
            for delivery in queue.inflight.running_deliveries():
                queue.log.abandoned(delivery.job)
        self.abandoned = await self.pool.end()
        await self._hand_back([delivery for queue in self.queues for delivery in queue.admission.unstarted])
        if self.abandoned:
            logger.warning(
                "abandoned %d job%s that did not end in time (shutdown_deadline_secs is %g); another worker runs them "
                "again: at once, or after %g s if their threads still run",
                *(self.abandoned, "" if self.abandoned == 1 else "s"),
                *(self.config.shutdown_deadline_secs, self.config.claim_min_idle_ms / 1000),
            )
        secs_left = self._secs_left()
        drained = await asyncio.gather(*(queue.settler.drain(secs_left) for queue in self.queues))
        if not all(drained):
            logger.error("not all outcomes were settled in time; another worker will run those jobs again")
        await asyncio.gather(*(finish(self._secs_left()) for queue in self.queues for finish in queue.finishers))
        for queue in self.queues:
            queue.end()
        await self._lease_thread.stop()
        await asyncio.gather(*(link.close(self._secs_left) for link in self.links))

    async def _end_reading(self, link: ServerLink) -> None:
        await link.read_client.close()
        await link.best_effort(link.reader.hand_back_missed, self._step_secs())

    async def _hand_back(self, deliveries: Iterable[Delivery]) -> None:
        """Hand back unstarted jobs to their queues."""
        await asyncio.gather(
            *(
                queue.link.best_effort(partial(queue.inflight.hand_back, unstarted), self._step_secs())
                for queue, unstarted in by_queue(deliveries).items()
            )
        )

    def _secs_left(self) -> float:
        return max(self._cleanup_ends_at - asyncio.get_running_loop().time(), 0.05)

    def _step_secs(self) -> float:
        return min(self._secs_left(), CLEANUP_SECS)
