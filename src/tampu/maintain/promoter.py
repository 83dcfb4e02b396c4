"""The promoter: moves jobs whose time has come from the delayed set into the stream."""

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

#: Batches that are looked for, and moved, at a time; with more, reads and moves take turns instead of sharing time.
BATCHES_AHEAD = 2


class PromoterLoop:
    """The promoter's work over a client that somebody else owns."""

    def __init__(self, client: Client, config: PromoterConfig) -> None:
        self._client = client
        self._config = config
        self._metrics = config.metrics.for_queue(config.queue_name)
        self._keys = keys = QueueKeys(config.queue_name)
        self._leader = Leader(client, keys.promoter_lock, config.holder_id, config.lock_ttl_secs, self._on_lock_change)
        self._last_failure = ""
        #: What was found due together with the last move.
        self._found: Due | None = None

    async def run(self, shutdown: asyncio.Event) -> None:
        """Promote until shutdown, then release the lock."""
        await self._leader.work(f"promoter of {self._config.queue_name}", self._promote_due, shutdown)

    async def _promote_due(self) -> float:
        """Move what is due, a few batches of it; how long until there is more to do, 0 for at once."""
        due = self._found or await self._look()
        self._found = None
        moves = [Promoted()]
        if due.members:
            # Batches leave one behind the other, and with them the question what is due next: the server need not
            # wait for this side, which is busy with other things.
            size = min(self._config.promote_batch, MAX_CALL_ENTRIES)
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

    async def _look(self) -> Due:
        most = self._config.promote_batch * BATCHES_AHEAD
        return await calls.due(self._client, self._keys.delayed, max_members=most, max_bytes=MAX_CALL_BYTES)

    def _tell(self, moves: list[Promoted], left: Due) -> None:
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

    async def _promote(self, members: list[bytes]) -> Promoted:
        config, keys = self._config, self._keys
        index_keys: list[bytes] = []
        index_prefix = keys.delayed_index("").encode()
        readable: list[bytes] = []
        facts: list[tuple[str, int]] = []
        unreadable: list[tuple[bytes, str]] = []
        for member in members:
            # Events tell when a job was made, too: then its envelope is decoded.
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
                # The stream's reader says what is wrong with it, and keeps its bytes.
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
            lambda client: PromoterLoop(client, self._config).run(shutdown),
        )
