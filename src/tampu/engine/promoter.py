"""The promoter: moves jobs whose time has come from the delayed set into the stream."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

from tampu.engine.config import DEFAULT_DLQ_MAX_STREAM_LEN, PromoterConfig
from tampu.engine.leader import LEAD, RESIGN, Leader
from tampu.engine.metrics import LockOutcome, PromoterTick
from tampu.engine.standalone import run_standalone
from tampu.engine.supervise import supervise
from tampu.errors import DecodeError
from tampu.redis.scripts import load_script
from tampu.redis.settings import parse_url
from tampu.wire.delayed import decode_delayed_member
from tampu.wire.envelope import decode_job
from tampu.wire.keys import QueueKeys

if TYPE_CHECKING:
    from tampu.redis.connection import Part
    from tampu.redis.pipe import Pipe
    from tampu.redis.settings import CredentialCallback

DUE = load_script("due")
PROMOTE = load_script("promote")

#: What a promoter's pipe has to have loaded.
PROMOTER_SCRIPTS = (LEAD, RESIGN, DUE, PROMOTE)
#: The lock is renewed when this share of its TTL has passed.
RENEW_SHARE = 0.3


class PromoterLoop:
    """The promoter's work over a pipe that somebody else owns."""

    def __init__(self, pipe: Pipe, config: PromoterConfig) -> None:
        self._pipe = pipe
        self._config = config
        self._keys = keys = QueueKeys(config.queue_name)
        self._leader = Leader(pipe, keys.promoter_lock, config.holder_id, config.lock_ttl_secs, self._on_lock_change)
        self._leads_until = 0.0

    async def run(self, shutdown: asyncio.Event) -> None:
        """Promote until shutdown, then release the lock."""
        self._shutdown = shutdown
        await supervise(f"promoter of {self._config.queue_name}", self._one_round, shutdown.is_set)
        with contextlib.suppress(Exception):  # the lock runs out by itself
            await self._leader.resign()

    async def _one_round(self) -> None:
        if time.monotonic() >= self._leads_until:
            if not await self._leader.lead():
                await self._pause(self._config.lock_ttl_secs * RENEW_SHARE)
                return
            self._leads_until = time.monotonic() + self._config.lock_ttl_secs * RENEW_SHARE
        while not self._shutdown.is_set():
            wait_secs = await self._promote_due()
            if wait_secs > 0:
                await self._pause(min(wait_secs, self._config.poll_interval_ms / 1000))
                return
            if time.monotonic() >= self._leads_until:
                return

    async def _pause(self, secs: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._shutdown.wait(), secs)

    async def _promote_due(self) -> float:
        """Move one batch; how long until there is more to do, 0 for at once."""
        config = self._config
        now_text, depth, earliest, members = await self._pipe.run(DUE, (self._keys.delayed,), (config.promote_batch,))
        now_ms = int(now_text)
        promoted, is_full = await self._promote(members) if members else (0, False)
        overdue_ms = 0
        if earliest and (is_full or len(members) == config.promote_batch):
            overdue_ms = max(now_ms - int(float(earliest)), 0)
        config.metrics.promoter_tick(PromoterTick(promoted, depth - promoted, overdue_ms))
        if is_full:
            return config.poll_interval_ms / 1000
        if members:
            return 0.0
        return max((float(earliest) - now_ms) / 1000, 0.001) if earliest else 3600.0

    async def _promote(self, members: list[bytes]) -> tuple[int, bool]:
        keys = self._keys
        index_keys: list[str] = []
        jobs: list[Part] = []
        poison: list[Part] = []
        for member in members:
            try:
                name, envelope = decode_delayed_member(member)
            except DecodeError as error:
                poison += (member, str(error))
                continue
            try:
                job = decode_job(envelope)
                job_id, created_at_ms = job.id, job.created_at_ms
            except DecodeError:
                # The stream's reader says what is wrong with it, and keeps its bytes.
                job_id, created_at_ms = "", 0
            index_keys.append(keys.delayed_index(job_id))
            jobs += (member, job_id, name, envelope, created_at_ms)
        config = self._config
        events = config.events_max_stream_len if config.events_enabled else 0
        promoted, is_full = await self._pipe.run(
            PROMOTE,
            (keys.delayed, keys.stream, keys.dlq, keys.events, *index_keys),
            (config.max_stream_len, events, DEFAULT_DLQ_MAX_STREAM_LEN, len(index_keys), *jobs, *poison),
        )
        return promoted, bool(is_full)

    def _on_lock_change(self, is_ours: bool) -> None:
        self._config.metrics.promoter_lock_outcome(LockOutcome.ACQUIRED if is_ours else LockOutcome.HELD)


class Promoter:
    """A promoter in a process of its own, or beside others: of several, one works and the others stand by."""

    def __init__(
        self, url: str, config: PromoterConfig | None = None, *, credential_provider: CredentialCallback | None = None
    ) -> None:
        self._settings = parse_url(url, credential_provider=credential_provider)
        self._config = config or PromoterConfig()

    async def run(self, shutdown: asyncio.Event) -> None:
        """Promote until `shutdown` is set."""
        await run_standalone(
            self._settings,
            self._config.queue_name,
            PROMOTER_SCRIPTS,
            lambda pipe: PromoterLoop(pipe, self._config).run(shutdown),
        )
