"""The promoter: moves due jobs from the delayed set into the stream."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from tampu.base.limits import MAX_CALL_BYTES, MAX_CALL_ENTRIES
from tampu.config import PromoterConfig
from tampu.errors import DecodeError
from tampu.maintain.leader import Leader, run_standalone
from tampu.metrics import DlqRouted, LockOutcome, PromoterTick, tell
from tampu.redis import calls
from tampu.redis.calls import PROMOTER_SCRIPTS, Promoted
from tampu.redis.settings import parse_url
from tampu.wire.dlq import DlqReason
from tampu.wire.entry import decode_delayed_member, quick_job_id
from tampu.wire.envelope import decode_id_and_time
from tampu.wire.keys import QueueKeys

if TYPE_CHECKING:
    from tampu.redis.calls import Due
    from tampu.redis.client import Client
    from tampu.redis.settings import CredentialCallback

logger = logging.getLogger("tampu.promoter")

#: Batches that are read ahead and promoted at a time. With more, reads and promotions alternate instead of overlapping.
BATCHES_AHEAD = 2
#: Maximum time between two rounds, in seconds: each round reports the number of delayed jobs.
ROUND_SECS = 20.0


class PromoterDuty:
    """Promotes due jobs of one queue, with a client that the caller owns."""

    def __init__(self, client: Client, config: PromoterConfig) -> None:
        self._client = client
        self._config = config
        self._metrics = config.metrics.for_queue(config.queue_name)
        self._keys = keys = QueueKeys(config.queue_name)
        self.role = f'promoter of queue "{config.queue_name}"'
        self.leader = Leader(client, keys.promoter_lock, config.holder_id, config.lock_ttl_secs, self._on_lock_change)
        self.watched = keys.delayed
        self.wake: str | None = keys.wake
        self.poll_secs = config.poll_interval_ms / 1000
        self.earliest: float | None = None
        self._last_failure = ""
        #: The due jobs that were read along with the last promotion.
        self._found: Due | None = None

    def nothing_to_do(self) -> None:
        """Report that no job is delayed."""
        tell(self._metrics.promoter_tick, PromoterTick(0, 0, 0))

    async def one_round(self) -> float:
        """Promote a few batches of due jobs. Return the seconds until the next round, 0 for at once."""
        due = self._found or await self._look()
        self._found = None
        moves = [Promoted()]
        if due.members:
            # All batches and the next read are sent together, so that the server does not wait for this process.
            size = min(self._config.promote_batch, MAX_CALL_ENTRIES)
            batches = [due.members[start : start + size] for start in range(0, len(due.members), size)]
            moving = asyncio.gather(*map(self._promote, batches))
            due, moves = await asyncio.gather(self._look(), moving)
        self._report(moves, due)
        self.earliest = due.earliest_ms
        if not due.lag_ms:
            return min(max(due.earliest_ms - due.now_ms, 1.0) / 1000, max(self.poll_secs, ROUND_SECS))
        if any(move.is_full for move in moves) or not any(move.promoted or move.buried for move in moves):
            return self.poll_secs
        self._found = due
        return 0.0

    async def _look(self) -> Due:
        most = self._config.promote_batch * BATCHES_AHEAD
        return await calls.due(self._client, self._keys.delayed, max_members=most, max_bytes=MAX_CALL_BYTES)

    def _report(self, moves: list[Promoted], left: Due) -> None:
        """Emit metrics and log unreadable members."""
        depth = left.depth + sum(move.promoted + move.buried for move in moves)
        for move in moves:
            depth -= move.promoted + move.buried
            tell(self._metrics.promoter_tick, PromoterTick(move.promoted, depth, int(left.lag_ms)))
            for _ in range(move.buried):
                tell(self._metrics.dlq_routed, DlqRouted(DlqReason.MALFORMED, 0, ""))
        buried = sum(move.buried for move in moves)
        if buried:
            logger.warning("dead-lettered %d unreadable members of the delayed set", buried)
        failure = next((move.failure for move in moves if move.failure), "")
        if failure != self._last_failure:
            if failure:
                logger.error("cannot dead-letter unreadable members of the delayed set: %s", failure)
            self._last_failure = failure

    async def _promote(self, members: list[bytes]) -> Promoted:
        config, keys = self._config, self._keys
        index_keys: list[bytes] = []
        index_prefix = keys.delayed_index("").encode()
        readable: list[bytes] = []
        facts: list[tuple[str, int]] = []
        unreadable: list[tuple[bytes, str]] = []
        for member in members:
            # Events include the job's creation time, for which the envelope must be decoded.
            if not config.events_enabled and (quick_id := quick_job_id(member)) is not None:
                index_keys.append(index_prefix + quick_id)
                readable.append(member)
                continue
            try:
                _, envelope = decode_delayed_member(member)
            except DecodeError as error:
                unreadable.append((member, str(error)))
                continue
            try:
                job_id, created_at_ms = decode_id_and_time(envelope)
            except DecodeError:
                # Promote it: the worker dead-letters it with the reason and its bytes.
                job_id, created_at_ms = "", 0
            index_keys.append(index_prefix + job_id.encode())
            readable.append(member)
            if config.events_enabled:
                facts.append((job_id, created_at_ms))
        return await calls.promote(
            self._client,
            *(keys.delayed, keys.stream, keys.dlq, keys.events, index_keys),
            max_stream_len=config.max_stream_len,
            keep_events=config.events_max_stream_len if config.events_enabled else 0,
            keep_letters=config.dlq_max_stream_len,
            members=readable,
            facts=facts,
            unreadable=unreadable,
        )

    def _on_lock_change(self, is_ours: bool) -> None:
        outcome = LockOutcome.ACQUIRED if is_ours else LockOutcome.HELD
        tell(self._metrics.promoter_lock_outcome, outcome)


class Promoter:
    """A promoter outside of a worker. Several may run: one is the leader, the others stand by."""

    def __init__(
        self, url: str, config: PromoterConfig | None = None, *, credential_provider: CredentialCallback | None = None
    ) -> None:
        self._settings = parse_url(url, credential_provider=credential_provider)
        self._config = config or PromoterConfig()

    async def run(self, shutdown: asyncio.Event) -> None:
        """Promote due jobs until `shutdown` is set. Raises `RedisError` if it cannot connect at the start."""
        await run_standalone(
            self._settings,
            self._config.queue_name,
            PROMOTER_SCRIPTS,
            lambda client: PromoterDuty(client, self._config),
            shutdown,
        )
