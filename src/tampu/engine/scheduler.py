"""The scheduler: fires repeatable jobs when they are due, once each, whoever leads."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tampu.engine.config import SchedulerConfig
from tampu.engine.leader import LEAD, RESIGN, Leader
from tampu.engine.standalone import run_standalone
from tampu.engine.supervise import supervise
from tampu.errors import DecodeError
from tampu.redis.scripts import load_script
from tampu.redis.settings import parse_url
from tampu.wire.envelope import encode_envelope
from tampu.wire.keys import QueueKeys
from tampu.wire.stored_spec import decode_spec
from tampu.wire.ulid import ulid_from_bits

if TYPE_CHECKING:
    from tampu.redis.connection import Part
    from tampu.redis.pipe import Pipe
    from tampu.redis.settings import CredentialCallback
    from tampu.wire.repeat import StoredSpec

logger = logging.getLogger("tampu.scheduler")

FIRE = load_script("fire")

#: What a scheduler's pipe has to have loaded.
SCHEDULER_SCRIPTS = (LEAD, RESIGN, FIRE)
#: With the policy Skip a fire up to this late is still worth firing.
SKIP_GRACE_MS = 10_000
#: Most fires of one spec written in one call; more follow at once.
MAX_FIRES_PER_CALL = 200
#: Most steps from fire to fire in one round; a spec further behind than that starts anew from now.
MAX_STEPS = 100_000
#: The lock is renewed when this share of its TTL has passed.
RENEW_SHARE = 0.3


@dataclass(frozen=True, slots=True)
class Firing:
    """What one round does with one spec."""

    #: The fires to write, in ms, oldest first.
    fires: tuple[int, ...]
    #: The fire after them; None when there is none any more.
    next_ms: int | None


def plan(spec: StoredSpec, due_ms: int, now_ms: int) -> Firing:
    """Which fires of a spec that was due at `due_ms` are written now, by its policy."""
    missed, following = _due_times(spec, due_ms, now_ms)
    policy = spec.missed_fires
    if policy.kind == "fire-all":
        wanted = missed[: policy.max_catchup]
    elif policy.kind == "fire-once":
        wanted = missed[-1:]
    else:
        newest = missed[-1]
        interval_ms = (following - newest) if following is not None else SKIP_GRACE_MS
        is_fresh = now_ms - newest < max(interval_ms, SKIP_GRACE_MS)
        wanted = [newest] if is_fresh else []
    if spec.end_before_ms is not None and following is not None and following > spec.end_before_ms:
        following = None
    return Firing(tuple(wanted), following)


def _due_times(spec: StoredSpec, due_ms: int, now_ms: int) -> tuple[list[int], int | None]:
    """(the times from `due_ms` up to now, the first one after now)."""
    pattern = spec.pattern
    if pattern.kind == "every" and pattern.interval_ms and (now_ms - due_ms) // pattern.interval_ms > MAX_STEPS:
        # So far behind that only the newest matter: keep the rhythm, drop the rest.
        due_ms += ((now_ms - due_ms) // pattern.interval_ms - MAX_STEPS) * pattern.interval_ms
    times = [due_ms]
    for _ in range(MAX_STEPS + 1):
        following = pattern.next_fire_ms(times[-1])
        if following is None or following > now_ms:
            return times, following
        if spec.end_before_ms is not None and following > spec.end_before_ms:
            return times, None
        times.append(following)
    return times, pattern.next_fire_ms(now_ms)


def fire_id(spec_key: str, fire_ms: int) -> str:
    """The id of a fire: the same wherever it is computed."""
    digest = hashlib.sha256(spec_key.encode(errors="surrogateescape")).digest()
    return ulid_from_bits(fire_ms, int.from_bytes(digest[:10], "big"))


class SchedulerLoop:
    """The scheduler's work over a pipe that somebody else owns."""

    def __init__(self, pipe: Pipe, config: SchedulerConfig) -> None:
        self._pipe = pipe
        self._config = config
        self._keys = keys = QueueKeys(config.queue_name)
        self._leader = Leader(pipe, keys.scheduler_lock, config.holder_id, config.lock_ttl_secs, lambda is_ours: None)
        self._leads_until = 0.0
        self._complained: set[bytes] = set()

    async def run(self, shutdown: asyncio.Event) -> None:
        """Fire until shutdown, then release the lock."""
        self._shutdown = shutdown
        await supervise(f"scheduler of {self._config.queue_name}", self._one_round, shutdown.is_set)
        with contextlib.suppress(Exception):  # the lock runs out by itself
            await self._leader.resign()

    async def _one_round(self) -> None:
        ttl_secs = self._config.lock_ttl_secs
        if time.monotonic() >= self._leads_until:
            if not await self._leader.lead():
                await self._pause(ttl_secs * RENEW_SHARE)
                return
            self._leads_until = time.monotonic() + ttl_secs * RENEW_SHARE
        wait_secs = await self._fire_due()
        if wait_secs > 0:
            until_renewal = self._leads_until - time.monotonic()
            await self._pause(max(min(wait_secs, self._config.tick_interval_ms / 1000, until_renewal), 0.001))

    async def _pause(self, secs: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._shutdown.wait(), secs)

    async def _fire_due(self) -> float:
        """Fire what is due; how long until something is, 0 for at once."""
        config = self._config
        now_ms = await self._server_now_ms()
        due, soonest = await self._pipe.call_many(
            [
                ("ZRANGEBYSCORE", self._keys.repeat, "-inf", now_ms, "WITHSCORES", "LIMIT", 0, config.batch),
                ("ZRANGEBYSCORE", self._keys.repeat, f"({now_ms}", "+inf", "WITHSCORES", "LIMIT", 0, 1),
            ]
        )
        behind = False
        for spec_key, score in zip(due[::2], due[1::2], strict=True):
            behind |= await self._fire(spec_key, score, now_ms)
        if behind or len(due) // 2 >= config.batch:
            return 0.0
        return max((float(soonest[1]) - now_ms) / 1000, 0.001) if soonest else 3600.0

    async def _server_now_ms(self) -> int:
        seconds, microseconds = await self._pipe.call("TIME")
        return int(seconds) * 1000 + int(microseconds) // 1000

    async def _fire(self, spec_key: bytes, score: bytes, now_ms: int) -> bool:
        """Fire one spec; whether it has more to fire at once."""
        keys = self._keys
        hash_key = keys.repeat_spec("").encode() + spec_key
        packed = await self._pipe.call("HGET", hash_key, "spec")
        try:
            spec = decode_spec(packed or b"")
        except DecodeError as error:
            # It cannot fire. It stays, for whoever understands it, but must not be looked at every round.
            if spec_key not in self._complained:
                self._complained.add(spec_key)
                logger.error("the repeatable %r cannot be read and is set aside: %s", spec_key, error)
            await self._pipe.call("ZREM", keys.repeat, spec_key)
            return False
        firing = plan(spec, int(float(score)), now_ms)
        fires, next_ms = firing.fires, firing.next_ms
        has_more = len(fires) > MAX_FIRES_PER_CALL
        if has_more:
            fires, next_ms = fires[:MAX_FIRES_PER_CALL], fires[MAX_FIRES_PER_CALL]
        arguments: list[Part] = [score, "" if next_ms is None else next_ms, self._config.max_stream_len, spec_key]
        arguments += (spec.limit or 0, packed, len(fires))
        key_text = spec_key.decode(errors="surrogateescape")
        for fire_ms in fires:
            arguments += (
                spec.job_name,
                encode_envelope(fire_id(key_text, fire_ms), spec.payload_slot, now_ms),
            )
        await self._pipe.run(FIRE, (keys.stream, keys.delayed, keys.repeat, hash_key), arguments)
        return has_more


class Scheduler:
    """A scheduler in a process of its own, or beside others: of several, one works and the others stand by."""

    def __init__(
        self, url: str, config: SchedulerConfig | None = None, *, credential_provider: CredentialCallback | None = None
    ) -> None:
        self._settings = parse_url(url, credential_provider=credential_provider)
        self._config = config or SchedulerConfig()

    async def run(self, shutdown: asyncio.Event) -> None:
        """Fire until `shutdown` is set."""
        await run_standalone(
            self._settings,
            self._config.queue_name,
            SCHEDULER_SCRIPTS,
            lambda pipe: SchedulerLoop(pipe, self._config).run(shutdown),
        )
