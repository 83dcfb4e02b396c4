"""The promoter: moves jobs whose time has come from the delayed set into the stream."""

from __future__ import annotations

import asyncio
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
from tampu.wire.delayed import decode_delayed_member, quick_job_id
from tampu.wire.dlq import DlqReason
from tampu.wire.envelope import decode_id_and_time
from tampu.wire.keys import QueueKeys

if TYPE_CHECKING:
    from tampu.redis.connection import Part
    from tampu.redis.pipe import Pipe
    from tampu.redis.settings import CredentialCallback

logger = logging.getLogger("tampu.promoter")

DUE = load_script("due")
PROMOTE = load_script("promote")

#: What a promoter's pipe has to have loaded.
PROMOTER_SCRIPTS = (LEAD, RESIGN, DUE, PROMOTE)
#: Batches that are looked for, and moved, at a time; with more, reads and moves take turns instead of sharing time.
BATCHES_AHEAD = 2
#: Most jobs one script call carries, and about how many bytes of them.
MAX_BATCH_JOBS = 256
MAX_BATCH_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class _Due:
    """What there is to do."""

    now_ms: int
    depth: int
    earliest_ms: float
    members: list[bytes]

    @property
    def lag_ms(self) -> float:
        """For how long the earliest has been due."""
        return max(self.now_ms - self.earliest_ms, 0.0)


@dataclass(frozen=True, slots=True)
class _Moved:
    """What one call of the script did."""

    promoted: int = 0
    buried: int = 0
    is_full: bool = False
    failure: str = ""


class PromoterLoop:
    """The promoter's work over a pipe that somebody else owns."""

    def __init__(self, pipe: Pipe, config: PromoterConfig) -> None:
        self._pipe = pipe
        self._config = config
        self._metrics = config.metrics.for_queue(config.queue_name)
        self._keys = keys = QueueKeys(config.queue_name)
        self._leader = Leader(pipe, keys.promoter_lock, config.holder_id, config.lock_ttl_secs, self._on_lock_change)
        self._last_failure = ""
        #: What was found due together with the last move.
        self._found: _Due | None = None

    async def run(self, shutdown: asyncio.Event) -> None:
        """Promote until shutdown, then release the lock."""
        await self._leader.work(f"promoter of {self._config.queue_name}", self._promote_due, shutdown)

    async def _promote_due(self) -> float:
        """Move what is due, a few batches of it; how long until there is more to do, 0 for at once."""
        due = self._found or await self._look()
        self._found = None
        moves = [_Moved()]
        if due.members:
            # Batches leave one behind the other, and with them the question what is due next: the server need not
            # wait for this side, which is busy with other things.
            size = min(self._config.promote_batch, MAX_BATCH_JOBS)
            batches = [due.members[start : start + size] for start in range(0, len(due.members), size)]
            moving = asyncio.gather(*map(self._promote, batches))
            due, moves = await asyncio.gather(self._look(), moving)
        self._tell(moves, due)
        poll_secs = self._config.poll_interval_ms / 1000
        if not due.lag_ms:
            return min(max(due.earliest_ms - due.now_ms, 1.0) / 1000, poll_secs)
        if any(move.is_full for move in moves) or not any(move.promoted or move.buried for move in moves):
            return poll_secs
        self._found = due
        return 0.0

    async def _look(self) -> _Due:
        arguments = (self._config.promote_batch * BATCHES_AHEAD, MAX_BATCH_BYTES)
        now, depth, earliest, members = await self._pipe.run(DUE, (self._keys.delayed,), arguments)
        # A score may be anything a double can be.
        return _Due(int(now), depth, max(float(earliest), 0.0) if earliest else float("inf"), members)

    def _tell(self, moves: list[_Moved], left: _Due) -> None:
        depth = left.depth + sum(move.promoted + move.buried for move in moves)
        for move in moves:
            depth -= move.promoted + move.buried
            tell(self._metrics.promoter_tick, PromoterTick(move.promoted, depth, int(left.lag_ms)))
            for _ in range(move.buried):
                tell(self._metrics.dlq_routed, DlqRouted(DlqReason.MALFORMED, 0, ""))
        buried = sum(move.buried for move in moves)
        if buried:
            logger.warning("%d unreadable members of the delayed set became dead letters", buried)
        failure = next((move.failure for move in moves if move.failure), "")
        if failure != self._last_failure:
            if failure:
                logger.error("unreadable members of the delayed set cannot be dead-lettered: %s", failure)
            self._last_failure = failure

    async def _promote(self, members: list[bytes]) -> _Moved:
        config, keys = self._config, self._keys
        index_keys: list[bytes] = []
        index_prefix = keys.delayed_index("").encode()
        readable: list[Part] = []
        facts: list[Part] = []
        poison: list[Part] = []
        for member in members:
            # Events tell when a job was made, too: then its envelope is decoded.
            if not config.events_enabled and (quick_id := quick_job_id(member)) is not None:
                index_keys.append(index_prefix + quick_id)
                readable.append(member)
                continue
            try:
                _, envelope = decode_delayed_member(member)
            except DecodeError as error:
                poison += (member, str(error))
                continue
            try:
                job_id, created_at_ms = decode_id_and_time(envelope)
            except DecodeError:
                # The stream's reader says what is wrong with it, and keeps its bytes.
                job_id, created_at_ms = "", 0
            index_keys.append(index_prefix + job_id.encode())
            readable.append(member)
            if config.events_enabled:
                facts += (job_id, created_at_ms)
        events = config.events_max_stream_len if config.events_enabled else 0
        promoted, buried, is_full, failure = await self._pipe.run(
            PROMOTE,
            (keys.delayed, keys.stream, keys.dlq, keys.events, *index_keys),
            (config.max_stream_len, events, config.dlq_max_stream_len, len(readable), *readable, *facts, *poison),
        )
        return _Moved(promoted, buried, bool(is_full), failure.decode(errors="replace"))

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
