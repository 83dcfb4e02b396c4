"""The promoter: moves jobs whose time has come from the delayed set into the stream."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tampu.engine.config import PromoterConfig
from tampu.engine.leader import LEAD, RESIGN, Leader
from tampu.engine.metrics import DlqRouted, LockOutcome, PromoterTick, tell
from tampu.engine.standalone import run_standalone
from tampu.errors import DecodeError
from tampu.redis.scripts import load_script
from tampu.redis.settings import parse_url
from tampu.wire.delayed import decode_delayed_member
from tampu.wire.dlq import DlqReason
from tampu.wire.envelope import decode_job
from tampu.wire.keys import QueueKeys

if TYPE_CHECKING:
    import asyncio

    from tampu.redis.connection import Part
    from tampu.redis.pipe import Pipe
    from tampu.redis.settings import CredentialCallback

logger = logging.getLogger("tampu.promoter")

DUE = load_script("due")
PROMOTE = load_script("promote")

#: What a promoter's pipe has to have loaded.
PROMOTER_SCRIPTS = (LEAD, RESIGN, DUE, PROMOTE)
#: About how many bytes of members one script call carries.
MAX_BATCH_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class _Moved:
    """What one call of the script did, and what it left."""

    promoted: int
    buried: int
    is_full: bool
    depth: int
    earliest: bytes
    failure: str


class PromoterLoop:
    """The promoter's work over a pipe that somebody else owns."""

    def __init__(self, pipe: Pipe, config: PromoterConfig) -> None:
        self._pipe = pipe
        self._config = config
        self._metrics = config.metrics.for_queue(config.queue_name)
        self._keys = keys = QueueKeys(config.queue_name)
        self._leader = Leader(pipe, keys.promoter_lock, config.holder_id, config.lock_ttl_secs, self._on_lock_change)
        self._last_failure = ""

    async def run(self, shutdown: asyncio.Event) -> None:
        """Promote until shutdown, then release the lock."""
        await self._leader.work(f"promoter of {self._config.queue_name}", self._promote_due, shutdown)

    async def _promote_due(self) -> float:
        """Move one batch; how long until there is more to do, 0 for at once."""
        config = self._config
        arguments = (config.promote_batch, MAX_BATCH_BYTES)
        now_text, depth, earliest, members = await self._pipe.run(DUE, (self._keys.delayed,), arguments)
        moved = await self._promote(members) if members else _Moved(0, 0, False, depth, earliest, "")
        # A score may be anything a double can be.
        earliest_ms = max(float(moved.earliest), 0.0) if moved.earliest else float("inf")
        lag_ms = max(int(now_text) - earliest_ms, 0.0)
        tell(self._metrics.promoter_tick, PromoterTick(moved.promoted, moved.depth, int(lag_ms)))
        for _ in range(moved.buried):
            tell(self._metrics.dlq_routed, DlqRouted(DlqReason.MALFORMED, 0, ""))
        self._report(moved)
        poll_secs = config.poll_interval_ms / 1000
        if lag_ms:
            is_stuck = moved.is_full or not (moved.promoted or moved.buried)
            return poll_secs if is_stuck else 0.0
        return min(max(earliest_ms - int(now_text), 1.0) / 1000, poll_secs)

    def _report(self, moved: _Moved) -> None:
        if moved.buried:
            logger.warning("%d unreadable members of the delayed set became dead letters", moved.buried)
        if moved.failure != self._last_failure:
            if moved.failure:
                logger.error("unreadable members of the delayed set cannot be dead-lettered: %s", moved.failure)
            self._last_failure = moved.failure

    async def _promote(self, members: list[bytes]) -> _Moved:
        keys = self._keys
        index_keys: list[str] = []
        jobs: list[Part] = []
        poison: list[Part] = []
        for member in members:
            try:
                _, envelope = decode_delayed_member(member)
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
            jobs += (member, job_id, created_at_ms)
        config = self._config
        events = config.events_max_stream_len if config.events_enabled else 0
        promoted, buried, is_full, depth, earliest, failure = await self._pipe.run(
            PROMOTE,
            (keys.delayed, keys.stream, keys.dlq, keys.events, *index_keys),
            (config.max_stream_len, events, config.dlq_max_stream_len, len(index_keys), *jobs, *poison),
        )
        return _Moved(promoted, buried, bool(is_full), depth, earliest, failure.decode(errors="replace"))

    def _on_lock_change(self, is_ours: bool) -> None:
        outcome = LockOutcome.ACQUIRED if is_ours else LockOutcome.HELD
        tell(self._metrics.promoter_lock_outcome, outcome)


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
