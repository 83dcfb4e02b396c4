"""The promoter: moves due jobs from the delayed set into the stream."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from tampu.base.checks import MAX_CALL_BYTES, MAX_CALL_ENTRIES
from tampu.config import PromoterConfig
from tampu.maintain.leader import Duty, Standalone
from tampu.metrics import DlqRouted, LockOutcome, PromoterTick, tell
from tampu.redis import calls
from tampu.redis.calls import PROMOTER_SCRIPTS, Promoted
from tampu.wire.dlq import DlqReason
from tampu.wire.keys import QueueKeys

if TYPE_CHECKING:
    from tampu.redis.client import Client

logger = logging.getLogger("tampu.promoter")

#: Calls that are sent together while many jobs are due.
CALLS_AHEAD = 2
#: Maximum time between two rounds, in seconds: each round reports the number of delayed jobs.
ROUND_SECS = 20.0


class PromoterDuty(Duty[PromoterConfig]):
    """Promotes due jobs of one queue, with a client that the caller owns."""

    role = "promoter"
    scripts = PROMOTER_SCRIPTS

    def __init__(self, client: Client, config: PromoterConfig) -> None:
        keys, poll_ms = QueueKeys(config.queue_name), config.poll_interval_ms
        names = {"lock": keys.promoter_lock, "watched": keys.delayed, "wake": keys.wake, "peers": keys.peers}
        super().__init__(client, config, poll_ms=poll_ms, **names)
        self._metrics = config.metrics.for_queue(config.queue_name)
        self._last_failure = ""
        #: True if the last round left jobs that are due.
        self._is_behind = False

    def nothing_to_do(self) -> None:
        """Report that no job is delayed."""
        tell(self._metrics.promoter_tick, PromoterTick(0, 0, 0))

    async def one_round(self) -> float:
        """Promote due jobs. Return the seconds until the next round, 0 for at once."""
        # If more is due than one call moves, the next call is sent along: the server does not wait for this process.
        moves = await asyncio.gather(*(self._promote() for _ in range(CALLS_AHEAD if self._is_behind else 1)))
        self._report(moves)
        left = moves[-1]
        self.earliest = left.earliest_ms
        self._is_behind = False
        if not left.lag_ms:
            return min(max(left.earliest_ms - left.now_ms, 1.0) / 1000, max(self.poll_secs, ROUND_SECS))
        if any(move.is_full for move in moves) or not any(move.promoted or move.buried for move in moves):
            return self.poll_secs
        self._is_behind = True
        return 0.0

    async def _promote(self) -> Promoted:
        config, keys = self.config, self.keys
        return await calls.promote(
            self.client,
            *(keys.delayed, keys.stream, keys.dlq, keys.events, keys.due),
            max_members=min(config.promote_batch, MAX_CALL_ENTRIES),
            max_bytes=MAX_CALL_BYTES,
            max_stream_len=config.max_stream_len,
            keep_events=config.events_max_stream_len if config.events_enabled else 0,
            keep_letters=config.dlq_max_stream_len,
            index_prefix=keys.delayed_index(""),
        )

    def _report(self, moves: list[Promoted]) -> None:
        """Emit metrics and log unreadable members."""
        for move in moves:
            tell(self._metrics.promoter_tick, PromoterTick(move.promoted, move.depth, int(move.lag_ms)))
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

    def on_change(self, is_ours: bool) -> None:
        """Report that the lock was won or lost."""
        outcome = LockOutcome.ACQUIRED if is_ours else LockOutcome.HELD
        tell(self._metrics.promoter_lock_outcome, outcome)


class Promoter(Standalone[PromoterConfig]):
    """A promoter outside of a worker. Several may run: one is the leader, the others stand by."""

    _make_duty, _make_config = PromoterDuty, PromoterConfig
