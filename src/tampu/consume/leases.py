"""Renews the leases of entries in flight while this process is alive, however long a handler takes.

A dedicated thread with its own connection renews the leases of all queues, so a handler that blocks the event loop
keeps its lease, up to `max_block_ms`. C code that holds the GIL stops this thread too: run such handlers in a process.

Each renewal, even of no entry, is a heartbeat of the consumer group. When no heartbeat arrived for a while (the server
was stopped, paused, busy or refused writes), the scripts grant a grace period in which no entry is taken over. The
thread also publishes the worker's own heartbeats (`heartbeat.py`): a blocked event loop is not a dead worker.

A lease may have expired while this process was suspended or the server was unreachable: `confirm` checks before a job
starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from tampu.base.clock import boot_clock_ns, secs_until_round
from tampu.consume import heartbeat
from tampu.errors import RedisError
from tampu.maintain.supervise import Failures, supervise
from tampu.redis import calls
from tampu.redis.client import LAST_BACKOFF_SECS, Client, backoff_secs
from tampu.redis.faults import PASSING, ConnectionLost, Remedy, ServerError, Unreachable
from tampu.redis.nodes import SharedConnections
from tampu.wire.entry import entry_order

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tampu.config import ConsumerConfig
    from tampu.consume.inflight import InFlight
    from tampu.consume.runtime import ServedQueue
    from tampu.redis.settings import ConnectionSettings
    from tampu.wire.keys import QueueKeys

logger = logging.getLogger("tampu.worker")

#: Part of the grace period on top of one renewal interval and the longest reconnect backoff, in milliseconds.
GRACE_MARGIN_MS = 500
#: Longest time between two renewals, in seconds.
MAX_INTERVAL_SECS = 5.0
#: How long to wait for a connection before logging the failure, in seconds.
RECONNECT_PATIENCE_SECS = 60.0
#: Entries renewed in one call.
MAX_IDS = 500
#: How long the thread may take to end, in seconds.
STOP_PATIENCE_SECS = 2.0


def renewal_secs(config: ConsumerConfig) -> float:
    """Return the time between two renewals, in seconds."""
    return min(config.claim_min_idle_ms / 3000, MAX_INTERVAL_SECS)


def membership(keys: QueueKeys, config: ConsumerConfig) -> calls.Membership:
    """Return the consumer's place in its group, with the times for noticing a stall.

    Two and a half intervals without a heartbeat are a stall. After one interval a heartbeat may just be late; after
    three, leases may have expired.
    """
    interval_ms = renewal_secs(config) * 1000
    return calls.Membership(
        stream=keys.stream,
        alive=keys.alive(config.group),
        grace=keys.grace(config.group),
        takeovers=keys.takeovers(config.group),
        leases=keys.leases(config.group),
        group=config.group,
        consumer=config.consumer_id,
        lease_ms=config.claim_min_idle_ms,
        stall_ms=int(2.5 * interval_ms),
        grace_ms=int(interval_ms + LAST_BACKOFF_SECS * 1000 + GRACE_MARGIN_MS),
    )


class Leases:
    """The leases of one queue's entries in flight."""

    def __init__(self, client: Client, keys: QueueKeys, config: ConsumerConfig, inflight: InFlight) -> None:
        self._client = client
        self._config = config
        self.inflight = inflight
        self._loop = asyncio.get_running_loop()
        self._member = membership(keys, config)
        self._interval = renewal_secs(config)
        #: Calls of `confirm` that wait for the next round trip, which task will do it, and all tasks that do one.
        self._unconfirmed: list[bytes | None] = []
        self._next: asyncio.Task[None] | None = None
        self._confirming: set[asyncio.Task[None]] = set()
        #: Until this `boot_clock_ns()` every entry held here and not marked as lost is ours.
        self.valid_until_ns = 0
        #: When the thread last renewed them, by the monotonic clock.
        self.renewed_at: float | None = None
        self.failures = Failures(f'lease renewal of queue "{config.queue_name}"')

    @property
    def is_healthy(self) -> bool:
        """Return False while leases are not renewed, although the server is reachable."""
        if self.renewed_at is None or self._client.connection is None:
            return True
        return time.monotonic() - self.renewed_at <= self._config.claim_min_idle_ms / 1000

    def start(self) -> None:
        """Record that the thread renews them from now on."""
        self._extend(boot_clock_ns())
        self.renewed_at = time.monotonic()

    def stop(self) -> None:
        """Cancel `confirm` if it is running."""
        for task in self._confirming:
            task.cancel()

    async def confirm(self, entry_id: bytes | None = None) -> None:
        """Renew the lease of one entry, or all leases, and wait until those that this worker lost are marked as lost.

        Calls in one turn of the event loop share a round trip.
        """
        self._unconfirmed.append(entry_id)
        if self._next is None:
            self._next = self._loop.create_task(self._confirm(), name="tampu-confirm-leases")
            self._confirming.add(self._next)
            self._next.add_done_callback(self._confirming.discard)
        await asyncio.shield(self._next)

    async def _confirm(self) -> None:
        await asyncio.sleep(0)  # collect the other calls of this turn
        asked, self._unconfirmed, self._next = self._unconfirmed, [], None
        ids = [entry_id for entry_id in asked if entry_id is not None]
        is_all = len(ids) < len(asked)
        attempt = 0
        while True:
            try:
                lost, began_ns = await self.renew(self._client, None if is_all else ids)
            except RedisError as error:
                if isinstance(error, ServerError) and error.remedy is Remedy.NONE and error.kind not in PASSING:
                    return  # it will never answer: running the jobs is better than waiting forever
                attempt += 1
                await asyncio.sleep(backoff_secs(attempt))
            else:
                self.inflight.lost(lost)
                if is_all:
                    self._extend(began_ns)
                return

    async def renew(self, client: Client, ids: Iterable[bytes] | None = None) -> tuple[list[bytes], int]:
        """Renew these entries, or all held. Return the IDs that this worker no longer owns, and when this began."""
        began = boot_clock_ns()
        ids = sorted(self.inflight if ids is None else ids, key=entry_order)
        lost: list[bytes] = []
        for start in range(0, max(len(ids), 1), MAX_IDS):
            try:
                lost += await self._call(client, ids[start : start + MAX_IDS])
            except ServerError as error:
                if error.kind != "NOGROUP":
                    raise
                lost = ids  # a flush deleted the stream, and every entry held here with it
                break
        return lost, began

    def update(self, lost: list[bytes], began_ns: int) -> None:
        """Mark lost entries, then let the others start for as long as their leases last; called on the event loop.

        In the other order, an entry could start in between that another worker has taken over.
        """
        self.inflight.lost(lost)
        self._extend(began_ns)

    async def renew_everything(self, client: Client) -> None:
        """Renew all entries that the server holds for this consumer, received or not."""
        await self._call(client, [], everything=True)

    async def _call(self, client: Client, ids: list[bytes], *, everything: bool = False) -> list[bytes]:
        return await calls.renew_leases(
            client, self._member, ids=ids, everything=everything, patience_secs=self._interval
        )

    def _extend(self, began_ns: int) -> None:
        self.valid_until_ns = max(self.valid_until_ns, began_ns + self._config.claim_min_idle_ms * 1_000_000)


class LeaseThread:
    """Renews the leases of all queues of a worker and publishes its heartbeats, with one connection per server."""

    def __init__(self, config: ConsumerConfig, watch: heartbeat.LoopWatch) -> None:
        self._loop = asyncio.get_running_loop()
        self._watch = watch
        self._interval = renewal_secs(config)
        self._max_block = (config.max_block_ms or 10 * config.claim_min_idle_ms) / 1000
        #: Per link: how to connect, the routing key, and its queues. The event loop adds to it.
        self._sites: list[tuple[ConnectionSettings, bytes, list[ServedQueue]]] = []
        self._last_beat = time.monotonic()
        self._beater: asyncio.TimerHandle | None = None
        self._stopping = threading.Event()
        self._ended = asyncio.Event()
        self._own_loop: asyncio.AbstractEventLoop | None = None
        self._renewing: asyncio.Task[None] | None = None
        self._clients: set[Client] = set()
        #: The connections to the nodes of each Cluster.
        self._shared: dict[object, SharedConnections] = {}
        self._woken: Callable[[], object] = lambda: None
        self._is_blocked = False
        #: True while the thread has failed and waits to restart.
        self._has_failed = False
        self._thread = threading.Thread(target=self._run, name="tampu-leases", daemon=True)

    @property
    def is_healthy(self) -> bool:
        """Return False while a handler blocks the event loop for over `max_block_ms`, or leases are not renewed.

        A server outage does not count: leases cannot be renewed without it.
        """
        if self._is_blocked or self._has_failed:
            return False
        return all(queue.leases.is_healthy for _, _, queues in self._sites for queue in queues)

    @property
    def connections(self) -> int:
        """Return the number of its open connections."""
        return len(set[object]().union(*(client.sockets for client in self._clients.copy())))

    def add(self, settings: ConnectionSettings, routing_key: bytes, queues: list[ServedQueue]) -> None:
        """Renew the leases of `queues`, which may grow, over a connection to this server."""
        self._sites.append((settings, routing_key, queues))
        if not self._thread.is_alive() and not self._stopping.is_set():
            self._beat()
            self._thread.start()
            return
        with contextlib.suppress(RuntimeError):  # its loop is closed: a restarted thread sees the new server
            if self._own_loop is not None:
                self._own_loop.call_soon_threadsafe(self._woken)

    async def stop(self) -> None:
        """Stop renewing leases and end the thread."""
        if self._beater is not None:
            self._beater.cancel()
        self._stopping.set()
        if not self._thread.is_alive():
            return
        if self._own_loop is not None and self._renewing is not None:
            with contextlib.suppress(RuntimeError):  # its loop is closed already
                self._own_loop.call_soon_threadsafe(self._renewing.cancel)
        with contextlib.suppress(TimeoutError):  # a daemon: it does not keep the process alive
            await asyncio.wait_for(self._ended.wait(), STOP_PATIENCE_SECS)

    def _beat(self) -> None:
        """Record that the event loop runs; called on it at intervals."""
        self._last_beat = time.monotonic()
        secs = min(self._interval / 4, self._max_block / 4, heartbeat.BEAT_SECS)
        self._beater = self._loop.call_later(secs, self._beat)

    # --- in the thread

    def _run(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            try:
                with asyncio.Runner() as runner:
                    runner.run(self._renew_until_stopped())
            except asyncio.CancelledError:
                pass
            except BaseException as error:  # such as no file descriptor left for the event loop
                self._has_failed = True
                failures += 1
                if failures == 1:
                    logger.exception("the lease thread failed; restarting it: %s", error)
                self._stopping.wait(backoff_secs(failures))
        with contextlib.suppress(RuntimeError):  # the worker's loop was closed without waiting for this thread
            self._loop.call_soon_threadsafe(self._ended.set)

    async def _renew_until_stopped(self) -> None:
        self._renewing = asyncio.current_task()
        self._own_loop = asyncio.get_running_loop()
        self._shared = {}  # those of a thread that failed belong to its loop
        woken = asyncio.Event()
        self._woken = woken.set
        if self._has_failed:
            logger.info("the lease thread runs again")
        self._has_failed = False
        served = 0
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch_loop())
            while not self._stopping.is_set():
                woken.clear()
                for site in self._sites[served:]:
                    group.create_task(self._serve(*site))
                    served += 1
                await woken.wait()

    async def _watch_loop(self) -> None:
        checked_at = time.monotonic()
        while True:
            await asyncio.sleep(heartbeat.BEAT_SECS)
            now = time.monotonic()
            # After a long gap this thread was suspended too: the process was suspended, or C code held the GIL.
            if now - checked_at < heartbeat.BLOCKED_SECS:
                self._watch.check(self._blocked_for())
            checked_at = now

    async def _serve(self, settings: ConnectionSettings, routing_key: bytes, queues: list[ServedQueue]) -> None:
        client = Client(
            settings,
            routing_key,
            (calls.RENEW_LEASES,),
            response_timeout_secs=max(self._interval, 1.0),
            shared=self._shared.setdefault(settings.identity, SharedConnections())
            if settings.kind == "cluster"
            else None,
        )
        self._clients.add(client)
        try:
            is_over = self._stopping.is_set
            await asyncio.gather(
                supervise("lease renewal", lambda: self._one_round(client, queues), is_over),
                supervise("heartbeat", lambda: _beat(client, queues), is_over),
            )
        finally:
            self._clients.discard(client)
            await client.close()

    async def _one_round(self, client: Client, queues: list[ServedQueue]) -> None:
        if self._may_renew():
            all_leases = [queue.leases for queue in queues.copy()]
            results = await asyncio.gather(*(leases.renew(client) for leases in all_leases), return_exceptions=True)
            if _is_lost(results):
                # The grace period after an outage is short: renew as soon as the connection is back.
                await client.up(patience_secs=RECONNECT_PATIENCE_SECS)
                return
            for leases, result in zip(all_leases, results, strict=True):
                self._record(leases, result)
            if self._blocked_for() > self._interval / 2:
                # The event loop is blocked: entries delivered meanwhile are in its socket, and need renewal too. An
                # error of one queue does not affect the others; the next round logs it.
                renewals = (leases.renew_everything(client) for leases in all_leases)
                if _is_lost(await asyncio.gather(*renewals, return_exceptions=True)):
                    return
        await asyncio.sleep(secs_until_round(self._interval))

    def _record(self, leases: Leases, result: Any) -> None:
        """Record how the renewal of one queue's leases ended. An error does not affect other queues."""
        if isinstance(result, Exception):
            leases.failures.record(result)
            return
        if isinstance(result, BaseException):
            raise result
        leases.failures.clear()
        leases.renewed_at = time.monotonic()
        self._loop.call_soon_threadsafe(leases.update, *result)

    def _blocked_for(self) -> float:
        return time.monotonic() - self._last_beat

    def _may_renew(self) -> bool:
        blocked_for = self._blocked_for()
        if blocked_for <= self._max_block:
            if self._is_blocked:
                logger.warning("the event loop is no longer blocked; renewing leases again")
            self._is_blocked = False
            return True
        if not self._is_blocked:
            running = [
                delivery.job
                for _, _, queues in self._sites
                for queue in queues
                for delivery in queue.inflight.running_deliveries()
            ]
            logger.error(
                "a handler has blocked the event loop for %.1f s (over max_block_ms): leases are no longer renewed "
                "and other workers may take over the jobs. Running jobs: %s",
                blocked_for,
                ", ".join(f"{job.name or 'job'} {job.id}" for job in running[:10]) or "none",
            )
            self._is_blocked = True
        return False


async def _beat(client: Client, queues: list[ServedQueue]) -> None:
    await client.call_each([queue.heartbeats.command for queue in queues.copy()])
    await asyncio.sleep(secs_until_round(heartbeat.INTERVAL_SECS))


def _is_lost(results: Sequence[object]) -> bool:
    """Return True if the connection broke during one of these renewals."""
    return any(isinstance(result, ConnectionLost | Unreachable) for result in results)
