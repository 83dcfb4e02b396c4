"""Leases: what we run or hold is renewed while this process lives, however long a handler takes.

A thread of its own with a connection of its own does it, so a handler that blocks the event loop keeps its lease, up to
`max_block_ms`. C code that holds the GIL stops this thread too: run such handlers in a process.

Nothing is started on a lease that may have run out, because the process stood still or the server was away: `confirm`
asks first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from typing import TYPE_CHECKING

from tampu.engine.delivery import entry_order
from tampu.engine.supervise import supervise
from tampu.errors import RedisError
from tampu.redis.faults import PASSING, Remedy, ServerError
from tampu.redis.pipe import Pipe, backoff_secs
from tampu.redis.scripts import load_script

if TYPE_CHECKING:
    from collections.abc import Callable

    from tampu.engine.config import ConsumerConfig
    from tampu.engine.delivery import Delivery
    from tampu.redis.connection import Part
    from tampu.redis.settings import ConnectionSettings
    from tampu.wire.keys import QueueKeys

logger = logging.getLogger("tampu.worker")

RENEW = load_script("renew_leases")

#: Longest time between two renewals, in seconds.
MAX_INTERVAL_SECS = 5.0
#: Ids renewed in one call.
MAX_IDS = 500
#: How long the thread may take to end, in seconds.
STOP_PATIENCE_SECS = 2.0


class Leases:
    """Renews the leases of `held`, a dict of entry id to delivery that the event loop's thread keeps."""

    def __init__(
        self,
        settings: ConnectionSettings,
        pipe: Pipe,
        keys: QueueKeys,
        config: ConsumerConfig,
        held: dict[bytes, Delivery],
        on_lost: Callable[[list[bytes]], None],
    ) -> None:
        self._settings = settings
        self._pipe = pipe
        self._keys = keys
        self._config = config
        self._held = held
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._interval = min(config.claim_min_idle_ms / 3000, MAX_INTERVAL_SECS)
        self._max_block = (config.max_block_ms or 10 * config.claim_min_idle_ms) / 1000
        self._last_beat = time.monotonic()
        self._beater: asyncio.TimerHandle | None = None
        self._stopping = threading.Event()
        self._ended = asyncio.Event()
        self._own_loop: asyncio.AbstractEventLoop | None = None
        self._renewing: asyncio.Task[None] | None = None
        self._confirming: asyncio.Task[None] | None = None
        #: Up to this moment of `time.perf_counter_ns()` whatever we hold and have not been told to be lost is ours.
        self.valid_until_ns = 0
        #: False while a handler has blocked the event loop for longer than `max_block_ms`.
        self.is_healthy = True
        self._thread = threading.Thread(target=self._run, name="tampu-leases", daemon=True)

    def start(self) -> None:
        """Start renewing."""
        self._extend(time.perf_counter_ns())
        self._beat()
        self._thread.start()

    async def stop(self) -> None:
        """Stop renewing and end the thread."""
        if self._beater is not None:
            self._beater.cancel()
        if self._confirming is not None:
            self._confirming.cancel()
        self._stopping.set()
        if not self._thread.is_alive():
            return
        if self._own_loop is not None and self._renewing is not None:
            with contextlib.suppress(RuntimeError):  # it has ended by itself
                self._own_loop.call_soon_threadsafe(self._renewing.cancel)
        with contextlib.suppress(TimeoutError):  # a daemon: it does not keep the process alive
            await asyncio.wait_for(self._ended.wait(), STOP_PATIENCE_SECS)

    async def confirm(self) -> None:
        """Wait until it is known which of the leases held now are still ours, and the others are marked as lost."""
        if self._confirming is not None and not self._confirming.done():
            await asyncio.shield(self._confirming)  # it began before this call: what came since is not in it
        if self._confirming is None or self._confirming.done():
            self._confirming = self._loop.create_task(self._confirm(), name="tampu-confirm-leases")
        await asyncio.shield(self._confirming)

    async def _confirm(self) -> None:
        attempt = 0
        while True:
            try:
                self._on_lost(await self._renew(self._pipe))
            except RedisError as error:
                if isinstance(error, ServerError) and error.remedy is Remedy.NONE and error.kind not in PASSING:
                    return  # it will never say: better to run jobs than to wait for ever
            else:
                return
            attempt += 1
            await asyncio.sleep(backoff_secs(attempt))

    def _beat(self) -> None:
        """Called on the event loop: as long as this runs, no handler blocks it."""
        self._last_beat = time.monotonic()
        self._beater = self._loop.call_later(min(self._interval, self._max_block) / 4, self._beat)

    async def _renew(self, pipe: Pipe) -> list[bytes]:
        """Renew everything held; the ids that are no longer ours."""
        began = time.perf_counter_ns()
        ids = sorted(self._held.copy(), key=entry_order)
        lost: list[bytes] = []
        for start in range(0, len(ids), MAX_IDS):
            try:
                lost += await self._call(pipe, ids[start : start + MAX_IDS])
            except ServerError as error:
                if error.kind != "NOGROUP":
                    raise
                lost = ids  # a flush: whatever we held is gone
                break
        self._extend(began)
        return lost

    async def _call(self, pipe: Pipe, ids: list[bytes]) -> list[bytes]:
        arguments: list[Part] = [self._config.group, self._config.consumer_id, *ids]
        lost: list[bytes] = await pipe.run(RENEW, (self._keys.stream,), arguments, patience_secs=self._interval)
        return lost

    def _extend(self, began_ns: int) -> None:
        self.valid_until_ns = max(self.valid_until_ns, began_ns + self._config.claim_min_idle_ms * 1_000_000)

    # --- in the thread

    def _run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(self._renew_until_stopped())
        with contextlib.suppress(RuntimeError):  # the worker's loop was closed without waiting for us
            self._loop.call_soon_threadsafe(self._ended.set)

    async def _renew_until_stopped(self) -> None:
        self._renewing = asyncio.current_task()
        self._own_loop = asyncio.get_running_loop()
        pipe = Pipe(self._settings, self._keys.tag.encode(), (RENEW,), response_timeout_secs=max(self._interval, 1.0))
        try:
            await supervise("renewing leases", lambda: self._one_round(pipe), self._stopping.is_set)
        finally:
            await pipe.close()

    async def _one_round(self, pipe: Pipe) -> None:
        if self._may_renew():
            lost = await self._renew(pipe)
            if lost:
                self._loop.call_soon_threadsafe(self._on_lost, lost)
            if self._blocked_for() > self._interval / 2:
                # The event loop stands still: what was delivered meanwhile waits in its socket, and is ours as well.
                await self._call(pipe, [])
        await asyncio.sleep(self._interval)

    def _blocked_for(self) -> float:
        return time.monotonic() - self._last_beat

    def _may_renew(self) -> bool:
        blocked_for = self._blocked_for()
        if blocked_for <= self._max_block:
            if not self.is_healthy:
                logger.warning("the event loop runs again; leases are renewed again")
            self.is_healthy = True
            return True
        if self.is_healthy:
            held = self._held.copy().values()
            running = [delivery.job for delivery in held if delivery.is_running and not delivery.has_outcome]
            logger.error(
                "a handler has blocked the event loop for %.1f s (max_block_ms): leases are no longer renewed and the "
                "jobs may be run elsewhere; running are %s",
                blocked_for,
                ", ".join(f"{job.name or 'job'} {job.id}" for job in running[:10]) or "none",
            )
            self.is_healthy = False
        return False
