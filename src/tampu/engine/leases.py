"""Leases: what we run or hold is renewed while this process lives, however long a handler takes.

A thread of its own with a connection of its own does it, so a handler that blocks the event loop keeps its lease, up to
`max_block_ms`. C code that holds the GIL stops this thread too: run such handlers in a process.
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
from tampu.redis.pipe import Pipe
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


class Leases:
    """Renews the leases of `held`, a dict of entry id to delivery that the event loop's thread keeps."""

    def __init__(
        self,
        settings: ConnectionSettings,
        keys: QueueKeys,
        config: ConsumerConfig,
        held: dict[bytes, Delivery],
        on_lost: Callable[[list[bytes]], None],
    ) -> None:
        self._settings = settings
        self._keys = keys
        self._config = config
        self._held = held
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._interval = min(config.claim_min_idle_ms / 3000, MAX_INTERVAL_SECS)
        self._max_block = (config.max_block_ms or 10 * config.claim_min_idle_ms) / 1000
        self._last_beat = time.monotonic()
        self._stop = threading.Event()
        self._beater: asyncio.TimerHandle | None = None
        self._own_loop: asyncio.AbstractEventLoop | None = None
        self._wake: asyncio.Event | None = None
        #: False while a handler has blocked the event loop for longer than `max_block_ms`.
        self.is_healthy = True
        self._thread = threading.Thread(target=self._run, name="tampu-leases", daemon=True)

    def start(self) -> None:
        """Start renewing."""
        self._beat()
        self._thread.start()

    async def stop(self) -> None:
        """Stop renewing and end the thread."""
        if self._beater is not None:
            self._beater.cancel()
        self._stop.set()
        if not self._thread.is_alive():
            return
        if self._own_loop is not None and self._wake is not None:
            with contextlib.suppress(RuntimeError):  # the thread's loop has ended by itself
                self._own_loop.call_soon_threadsafe(self._wake.set)
        await asyncio.to_thread(self._thread.join, 10)

    def _beat(self) -> None:
        """Called on the event loop: as long as this runs, no handler blocks it."""
        self._last_beat = time.monotonic()
        self._beater = self._loop.call_later(min(self._interval, self._max_block / 4), self._beat)

    # --- in the thread

    def _run(self) -> None:
        asyncio.run(self._renew_until_stopped())

    async def _renew_until_stopped(self) -> None:
        self._own_loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        pipe = Pipe(self._settings, self._keys.tag.encode(), (RENEW,), response_timeout_secs=max(self._interval, 1.0))
        try:
            await supervise("renewing leases", lambda: self._one_round(pipe), self._stop.is_set)
        finally:
            await pipe.close()

    async def _one_round(self, pipe: Pipe) -> None:
        assert self._wake is not None  # noqa: S101 - set before the first round
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), self._interval)
        if self._stop.is_set() or not self._may_renew():
            return
        ids: list[Part] = [*sorted(self._held.copy(), key=entry_order)]
        lost: list[bytes] = []
        for start in range(0, len(ids), MAX_IDS):
            arguments: list[Part] = [self._config.group, self._config.consumer_id, *ids[start : start + MAX_IDS]]
            lost += await pipe.run(RENEW, (self._keys.stream,), arguments, patience_secs=self._interval)
        if lost:
            self._loop.call_soon_threadsafe(self._on_lost, lost)

    def _may_renew(self) -> bool:
        blocked_for = time.monotonic() - self._last_beat
        if blocked_for <= self._max_block:
            if not self.is_healthy:
                logger.warning("the event loop runs again; leases are renewed again")
            self.is_healthy = True
            return True
        if self.is_healthy:
            running = [delivery.job for delivery in tuple(self._held.values()) if delivery.is_running]
            logger.error(
                "a handler has blocked the event loop for %.1f s (max_block_ms): leases are no longer renewed and the "
                "jobs may be run elsewhere; running are %s",
                blocked_for,
                ", ".join(f"{job.name or 'job'} {job.id}" for job in running[:10]) or "none",
            )
            self.is_healthy = False
        return False
