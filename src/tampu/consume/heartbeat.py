"""Heartbeats: every worker publishes where it runs and which jobs it is running, for tools that list them."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

from tampu.base.clock import boot_clock_ns, wall_clock_ms
from tampu.wire.heartbeat import ALIVE_MS, KEPT_MS, MAX_LISTED, Heartbeat, QueueShare, RunningJob

if TYPE_CHECKING:
    from collections.abc import Callable

    from tampu.config import ConsumerConfig
    from tampu.consume.inflight import InFlight
    from tampu.consume.pool import Pool
    from tampu.consume.shares import Share, Shares
    from tampu.wire.keys import QueueKeys

#: How often a worker publishes its heartbeat, in seconds.
INTERVAL_SECS = 2.0


class Heartbeats:
    """The heartbeats of this worker for one queue."""

    def __init__(
        self,
        keys: QueueKeys,
        config: ConsumerConfig,
        inflight: InFlight,
        pool: Pool,
        shares: Shares,
        share: Share,
        is_failing: Callable[[], bool],
    ) -> None:
        from tampu import version  # here: the package's own module imports this one

        self._config = config
        self._inflight = inflight
        self._pool = pool
        self._shares = shares
        self._share = share
        self._is_failing = is_failing
        self._key = keys.heartbeat(config.group, config.consumer_id)
        self._version = version()
        self._host = socket.gethostname()
        self._started_at_ms = wall_clock_ms()

    @property
    def command(self) -> tuple[str | bytes | int, ...]:
        """The command that publishes the current state."""
        return ("SET", self._key, self._heartbeat().encode(), "PX", KEPT_MS)

    @property
    def last_command(self) -> tuple[str | int, ...]:
        """The command that ends it with the worker: removes it, or makes it too old for a live worker.

        A worker that abandons jobs stays in the group. Without a heartbeat it would count as a live worker of a version
        that publishes none.
        """
        if len(self._inflight):
            return ("PEXPIRE", self._key, KEPT_MS - ALIVE_MS - 1)
        return ("DEL", self._key)

    def _heartbeat(self) -> Heartbeat:
        now_ns = boot_clock_ns()
        running = self._inflight.running_deliveries()
        # The longest first: a handler that hangs is listed, however many others run.
        running.sort(key=lambda delivery: delivery.started_ns)
        return Heartbeat(
            host=self._host,
            pid=os.getpid(),
            version=self._version,
            concurrency=self._config.concurrency,
            started_at_ms=self._started_at_ms,
            held=len(self._inflight),
            running_count=len(running),
            running=[
                RunningJob(one.job.id, one.job.name, (now_ns - one.started_ns) // 1_000_000, one.job.attempt + 1)
                for one in running[:MAX_LISTED]
            ],
            share=QueueShare(
                queues=self._shares.queues,
                used_by_all=self._pool.occupied,
                used=self._share.occupied,
                weight=self._share.weight,
                reserve=self._share.reserve,
                limit=self._share.limit or 0,
                is_failing=int(self._is_failing()),
            ),
        )
