"""The scheduler: fires repeatable jobs when they are due, once each, whoever leads."""

from __future__ import annotations

import hashlib
import logging
from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tampu.engine.config import SchedulerConfig
from tampu.engine.leader import LEAD, RESIGN, Leader
from tampu.engine.standalone import run_standalone
from tampu.errors import DecodeError, RedisError
from tampu.redis.faults import ConnectionLost, ServerError, Unreachable
from tampu.redis.scripts import load_script
from tampu.redis.settings import parse_url
from tampu.wire.envelope import encode_envelope
from tampu.wire.keys import QueueKeys
from tampu.wire.stored_spec import decode_spec
from tampu.wire.ulid import ulid_from_bits

if TYPE_CHECKING:
    import asyncio

    from tampu.redis.connection import Part
    from tampu.redis.pipe import Pipe
    from tampu.redis.settings import CredentialCallback
    from tampu.wire.repeat import RepeatPattern, StoredSpec

logger = logging.getLogger("tampu.scheduler")

FIRE = load_script("fire")
SET_ASIDE = load_script("set_aside")

#: What a scheduler's pipe has to have loaded.
SCHEDULER_SCRIPTS = (LEAD, RESIGN, FIRE, SET_ASIDE)
#: With the policy Skip a fire up to this late is still worth firing.
SKIP_GRACE_MS = 10_000
#: Most missed fires that FireAll makes up for in one go, whatever its `max_catchup`, as in other implementations.
MAX_CATCHUP = 10_000
#: Most fires of one spec written in one call, and about how many bytes of them; more follow at once.
MAX_FIRES_PER_CALL = 200
MAX_BYTES_PER_CALL = 256 * 1024


@dataclass(frozen=True, slots=True)
class Firing:
    """What one round does with one spec."""

    #: The fires to write, in ms, oldest first.
    fires: tuple[int, ...]
    #: The fire after them; None when there is none any more.
    next_ms: int | None


def plan(spec: StoredSpec, due_ms: int, now_ms: int) -> Firing:
    """Which fires of a spec that was due at `due_ms` are written now, by its policy."""
    last_ms = now_ms if spec.end_before_ms is None else min(now_ms, spec.end_before_ms)
    if due_ms > last_ms:
        return Firing((), None)
    pattern, policy = spec.pattern, spec.missed_fires
    newest = _newest_fire(pattern, due_ms, last_ms)
    following = pattern.next_fire_ms(newest)
    fires: tuple[int, ...] = (newest,)
    if policy.kind == "fire-all" and newest != due_ms:
        fires = _fires_from(pattern, due_ms, newest, min(policy.max_catchup or 0, MAX_CATCHUP))
    elif policy.kind == "skip" and following is not None:
        is_stale = now_ms - newest >= max(following - newest, SKIP_GRACE_MS)
        fires = () if is_stale else fires
    if spec.end_before_ms is not None and following is not None and following > spec.end_before_ms:
        following = None
    return Firing(fires, following)


def _newest_fire(pattern: RepeatPattern, due_ms: int, last_ms: int) -> int:
    """The last fire up to `last_ms`, of those that begin with `due_ms`, however many lie between."""
    if pattern.kind == "every" and pattern.interval_ms:
        return last_ms - (last_ms - due_ms) % pattern.interval_ms

    def is_newest_or_later(at_ms: int) -> bool:
        following = pattern.next_fire_ms(at_ms)
        return following is None or following > last_ms

    return due_ms + bisect_left(range(due_ms, last_ms), True, key=is_newest_or_later)


def _fires_from(pattern: RepeatPattern, due_ms: int, newest: int, most: int) -> tuple[int, ...]:
    """The fires from `due_ms` to `newest`, oldest first."""
    fires: list[int] = []
    fire_ms: int | None = due_ms
    while fire_ms is not None and fire_ms <= newest and len(fires) < most:
        fires.append(fire_ms)
        fire_ms = pattern.next_fire_ms(fire_ms)
    return tuple(fires)


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
        #: What was said about specs that are in trouble, so that it is said once.
        self._complaints: dict[bytes, str] = {}

    async def run(self, shutdown: asyncio.Event) -> None:
        """Fire until shutdown, then release the lock."""
        await self._leader.work(f"scheduler of {self._config.queue_name}", self._fire_due, shutdown)

    async def _fire_due(self) -> float:
        """Fire what is due; how long until something is, 0 for at once."""
        config = self._config
        now_ms = await self._server_now_ms()
        repeat = self._keys.repeat
        due = await self._pipe.call("ZRANGEBYSCORE", repeat, "-inf", now_ms, "WITHSCORES", "LIMIT", 0, config.batch)
        trouble: Exception | None = None
        failures = 0
        for spec_key, score in zip(due[::2], due[1::2], strict=True):
            try:
                await self._fire(spec_key, score, now_ms)
                self._complaints.pop(spec_key, None)
            except (ConnectionLost, Unreachable):
                raise
            except Exception as error:  # one spec's trouble is not the others'
                trouble = error
                failures += 1
                self._complain(spec_key, error)
        if trouble is not None and failures == len(due) // 2:
            raise trouble
        if len(due) // 2 >= config.batch and not failures:
            return 0.0
        # Asked after the fires: one of those may be the soonest again.
        soonest = await self._pipe.call("ZRANGEBYSCORE", repeat, f"({now_ms}", "+inf", "WITHSCORES", "LIMIT", 0, 1)
        tick_secs = config.tick_interval_ms / 1000
        return min(max(float(soonest[1]) - now_ms, 1.0) / 1000, tick_secs) if soonest else tick_secs

    def _complain(self, spec_key: bytes, error: Exception) -> None:
        text = f"{type(error).__name__}: {error}"
        if self._complaints.get(spec_key) != text:
            self._complaints[spec_key] = text
            unexpected = None if isinstance(error, RedisError) else error
            logger.error("the repeatable %r could not be fired: %s", spec_key, text, exc_info=unexpected)

    async def _server_now_ms(self) -> int:
        seconds, microseconds = await self._pipe.call("TIME")
        return int(seconds) * 1000 + int(microseconds) // 1000

    async def _fire(self, spec_key: bytes, score: bytes, now_ms: int) -> None:
        """Fire one spec that is due, as often as its policy says."""
        keys = self._keys
        hash_key = keys.repeat_spec("").encode() + spec_key
        packed = await self._pipe.call("HGET", hash_key, "spec")
        try:
            spec = decode_spec(packed or b"")
        except DecodeError as error:
            # It cannot fire. It stays, for whoever understands it, but must not be looked at every round.
            if await self._pipe.run(SET_ASIDE, (keys.repeat, hash_key), (spec_key, score, packed or b"")):
                logger.error("the repeatable %r cannot be read and is set aside: %s", spec_key, error)
            return
        # A score may be anything a double can be; before 1970 there was nothing to fire.
        firing = plan(spec, int(max(float(score), 0.0)), now_ms)
        key_text = spec_key.decode(errors="surrogateescape")
        slot, fires = spec.payload_slot, firing.fires
        at_once = max(min(MAX_FIRES_PER_CALL, MAX_BYTES_PER_CALL // (len(slot) + 64)), 1)
        expected: Part = score
        while True:
            batch, fires = fires[:at_once], fires[at_once:]
            next_ms = fires[0] if fires else firing.next_ms
            arguments: list[Part] = [expected, "" if next_ms is None else next_ms, self._config.max_stream_len]
            arguments += (spec_key, spec.limit or 0, packed, spec.job_name)
            for fire_ms in batch:
                arguments += (fire_ms, encode_envelope(fire_id(key_text, fire_ms), slot, now_ms))
            fired, _, failure = await self._pipe.run(
                FIRE, (keys.stream, keys.delayed, keys.repeat, hash_key), arguments
            )
            if failure:
                raise ServerError(failure.decode(errors="replace"))
            # Fewer when the limit is reached, or somebody else changed it: the rest is not ours to fire.
            if next_ms is None or not fires or fired < len(batch):
                return
            expected = next_ms


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
