"""The runtime of a worker: its slots, its lease thread and its links to servers, shared by all its queues."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tampu.consume.leases import LeaseThread
from tampu.consume.link import ClusterNodes, LinkConnections, ServerLink
from tampu.consume.pool import Pool
from tampu.consume.processes import refuse_inside_starting_child
from tampu.consume.served_queue import ServedQueue
from tampu.consume.shares import Share, Shares
from tampu.consume.takeover import Quarantine
from tampu.wire.keys import QueueKeys
from tampu.wire.typed import TypedPayload

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from tampu.config import ConsumerConfig
    from tampu.consume.inflight import Delivery
    from tampu.redis.settings import ConnectionSettings
    from tampu.wire.codec import PayloadCodec
    from tampu.wire.job import Job

logger = logging.getLogger("tampu.worker")

#: How long a shutdown may keep settling and cleaning up after its deadline, and how long each cleanup step may take, in
#: seconds.
CLEANUP_SECS = 1.0


class Runtime:
    """Runs the jobs of one or more queues until it is asked to stop."""

    def __init__(self, config: ConsumerConfig) -> None:
        refuse_inside_starting_child()
        self._config = config
        typed = config.payload_type
        self._decode_payload = None if typed is None else TypedPayload(typed).decode_slot
        self.pool = Pool(config.concurrency)
        self._shares = Shares()
        self._quarantine = Quarantine(config.concurrency)
        self._lease_thread = LeaseThread(config)
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
            shared = LinkConnections() if nodes is None else nodes.for_link()
            self._links[key] = ServerLink(settings, tag, self._config, self.pool, self._shares, shared)
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
        self._shares.add(share)
        config = replace(self._config, queue_name=queue_name, codec=self._config.codec if codec is None else codec)
        shared = (self.pool, self._shares, share, self._quarantine)
        queue = ServedQueue(link.client, config, *shared, handler, self._decode_payload)
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
                self._lease_thread.add(link.settings, link.routing_key, link.leases)

        task.add_done_callback(started)

    async def _stop(self) -> None:
        """Stop reading, hand back unstarted jobs, finish or abandon running ones, settle, remove the consumer names."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._config.shutdown_deadline_secs
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
            queue.runner.is_stopping = True
            for job in queue.inflight.running():
                queue.log.abandoned(job)
        self.abandoned = await self.pool.end()
        await self._hand_back([delivery for queue in self.queues for delivery in queue.runner.unstarted])
        if self.abandoned:
            logger.warning(
                "abandoned %d job%s that did not end in time (shutdown_deadline_secs is %g); another worker will retry "
                "after %g s",
                *(self.abandoned, "" if self.abandoned == 1 else "s"),
                *(self._config.shutdown_deadline_secs, self._config.claim_min_idle_ms / 1000),
            )
        secs_left = self._secs_left()
        drained = await asyncio.gather(*(queue.settler.drain(secs_left) for queue in self.queues))
        if not all(drained):
            logger.error("not all outcomes were settled in time; another worker will run those jobs again")
        failure_calls = [queue.failure_calls for queue in self.queues if queue.failure_calls is not None]
        await asyncio.gather(*(calls.finish(self._secs_left()) for calls in failure_calls))
        for queue in self.queues:
            queue.end()
        await self._lease_thread.stop()
        await asyncio.gather(*(link.close(self._secs_left) for link in self.links))

    async def _end_reading(self, link: ServerLink) -> None:
        await link.read_client.close()
        await link.best_effort(link.reader.hand_back_missed, self._step_secs())

    async def _hand_back(self, deliveries: Iterable[Delivery]) -> None:
        """Hand back unstarted jobs to their queues."""
        by_share: dict[Share, list[Delivery]] = defaultdict(list)
        for delivery in deliveries:
            by_share[delivery.share].append(delivery)

        async def hand_back(link: ServerLink) -> None:
            held = [(queue.inflight, by_share[queue.share]) for queue in link.queues if queue.share in by_share]
            await asyncio.gather(*(inflight.hand_back(deliveries) for inflight, deliveries in held))

        await asyncio.gather(
            *(link.best_effort(partial(hand_back, link), self._step_secs()) for link in self.links if by_share)
        )

    def _secs_left(self) -> float:
        return max(self._cleanup_ends_at - asyncio.get_running_loop().time(), 0.05)

    def _step_secs(self) -> float:
        return min(self._secs_left(), CLEANUP_SECS)
