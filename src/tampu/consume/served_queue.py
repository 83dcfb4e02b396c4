"""Connects the parts that a worker has once per queue: entries in flight, runner, settler, takeover, leases."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tampu.config import PromoterConfig
from tampu.consume.cancels import Cancels
from tampu.consume.heartbeat import Heartbeats
from tampu.consume.inflight import InFlight
from tampu.consume.job_log import JobLog
from tampu.consume.leases import Leases
from tampu.consume.runner import Runner
from tampu.consume.settle import Settler
from tampu.consume.starts import StartMarks
from tampu.consume.takeover import Takeover
from tampu.inspect.snapshot import read_depth
from tampu.maintain.promoter import PromoterDuty
from tampu.maintain.scheduler import SchedulerDuty
from tampu.maintain.supervise import Failures
from tampu.metrics import MetricsSink, tell
from tampu.wire.keys import QueueKeys

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from contextlib import AbstractAsyncContextManager

    from tampu.config import ConsumerConfig
    from tampu.consume.on_failure import FailureCalls
    from tampu.consume.pool import Pool
    from tampu.consume.shares import Share, Shares
    from tampu.consume.takeover import Quarantine
    from tampu.redis.client import Client
    from tampu.wire.job import Job


class ServedQueue:
    """One queue of a worker."""

    def __init__(
        self,
        client: Client,
        config: ConsumerConfig,
        pool: Pool,
        shares: Shares,
        share: Share,
        quarantine: Quarantine,
        handler: Callable[[Job[Any]], Awaitable[Any]],
        decode_payload: Callable[[bytes], Any] | None,
    ) -> None:
        self.name = config.queue_name
        self.config = config = replace(config, metrics=config.metrics.for_queue(config.queue_name))
        self.keys = keys = QueueKeys(config.queue_name)
        self.share = share
        self._client = client
        self.log = JobLog(config.queue_name)
        self.settler = Settler(client, keys, config)
        self.inflight = InFlight(client, keys, config, self.settler.add, decode_payload, self.log, share)
        self.settler.on_settled = self.inflight.settled
        self.settler.on_all_succeeded = self.inflight.all_succeeded
        #: True if the metrics sink wants to know the length of the queue.
        self.measures = type(config.metrics).queue_depth is not MetricsSink.queue_depth
        #: The calls of `on_failure`; None if the queue has a handler instead of tasks.
        self.failure_calls: FailureCalls | None = None
        self.heartbeats = Heartbeats(keys, config, self.inflight, pool, shares, share, lambda: self.is_failing)
        self.leases = Leases(client, keys, config, self.inflight)
        self.cancels = Cancels(client, keys, config, self.inflight)
        starts = StartMarks(client, keys, config, self.inflight)
        self.runner = Runner(handler, config, self.settler, self.leases, starts, self.cancels, self.log)
        share.run = self.runner.run
        share.settle_soon = self.settler.flush_soon
        self.takeover = Takeover(
            *(client, keys, config, pool, quarantine, lambda room: shares.room_of(share, room)),
            *(self.settler, self.inflight),
        )
        #: Failures of its reads and of other checks, and until when it is not read after one.
        self.read_failures = Failures(f'reader of queue "{self.name}"')
        self.watch_failures = Failures(f'check for pauses and cancels of queue "{self.name}"')
        self.measure_failures = Failures(f'measurement of queue "{self.name}"')
        self.retry_at = 0.0
        self.is_failing = False
        #: Since when its group is known to exist; None if it must be created.
        self.group_since: float | None = None
        #: When it last delivered entries, until it is reported as drained.
        self.delivered_at: float | None = None

    async def measure(self) -> None:
        """Report the length of the queue to the metrics sink."""
        running = len(self.inflight.running_deliveries())
        depth = await read_depth(self._client, self.keys, running=running, concurrency=self.config.concurrency)
        tell(self.config.metrics.queue_depth, depth)

    def reserve_with(self, reserve: Callable[[Job[Any]], AbstractAsyncContextManager[None] | None]) -> None:
        """Start each job inside the context that `reserve` returns for it, unless that is None."""
        self.runner.reserve = reserve
        self.share.run = self.runner.run_reserved

    def call_on_failure(self, calls: FailureCalls) -> None:
        """Run the `on_failure` calls of jobs that are dead-lettered."""
        self.failure_calls = calls
        self.inflight.on_dead_letter = calls

    @property
    def is_paused(self) -> bool | None:
        """Return True while the queue is paused; None before the first check."""
        return self.takeover.is_paused

    @property
    def is_ready(self) -> bool:
        """Return True if it can be read: its group exists, reads do not fail, and it is not paused."""
        return self.group_since is not None and not self.is_failing and self.takeover.is_paused is False

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
            duties.append(PromoterDuty(client, promoter))
        if config.run_scheduler:
            named = replace(config.scheduler, queue_name=config.queue_name, holder_id=config.consumer_id)
            duties.append(SchedulerDuty(client, named))
        return duties

    def use(self, *, xackdel: bool, script_flags: bool) -> None:
        """Set the server's capabilities."""
        self.settler.use(xackdel=xackdel, script_flags=script_flags)
        self.inflight.has_xackdel = xackdel

    def end(self) -> None:
        """Stop settling and confirming."""
        self.settler.close()
        self.leases.stop()
