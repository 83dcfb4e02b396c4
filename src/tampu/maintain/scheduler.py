"""The scheduler: fires each repeatable job once per due time, whichever process is the leader."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tampu.base.checks import MAX_CALL_BYTES
from tampu.config import SchedulerConfig
from tampu.errors import DecodeError, RedisError
from tampu.maintain.leader import Duty, Standalone
from tampu.redis import calls
from tampu.redis.calls import SCHEDULER_SCRIPTS
from tampu.redis.faults import PASSING, ConnectionLost, ServerError, Unreachable
from tampu.wire.entry import score_ms
from tampu.wire.envelope import encode_envelope
from tampu.wire.keys import QueueKeys
from tampu.wire.repeat import decode_spec
from tampu.wire.ulid import ulid_from_bits

if TYPE_CHECKING:
    from tampu.redis.client import Client
    from tampu.redis.connection import Part
    from tampu.wire.repeat import RepeatPattern, StoredSpec

logger = logging.getLogger("tampu.scheduler")

#: With the policy Skip a fire that is at most this late is still written, in milliseconds.
SKIP_GRACE_MS = 10_000
#: Maximum number of missed fires that FireAll catches up on at once, whatever its `max_catchup`, as in ChasquiMQ.
MAX_CATCHUP = 10_000
#: Skipped fires of one spec are counted up to this number.
MAX_COUNTED = 1000
#: How often skipped fires are logged, in seconds.
SKIP_LOG_SECS = 10.0
#: After this many seconds a spec that could not be fired is tried again.
RETRY_SECS = 2.0
#: Maximum number of fires of one spec per call; more follow in further calls.
MAX_FIRES_PER_CALL = 200


@dataclass(frozen=True, slots=True)
class Firing:
    """The fires of one spec in one round."""

    #: The fires to write, in epoch milliseconds, oldest first.
    fires: tuple[int, ...]
    #: The fire after them; None if the schedule has ended.
    next_ms: int | None
    #: Fires that the policy drops because they are too late; counted up to `MAX_COUNTED`.
    skipped: int = field(default=0, compare=False)


def plan(spec: StoredSpec, due_ms: int, now_ms: int, all_since_ms: int | None = None) -> Firing:
    """Return the fires to write at `now_ms` for a spec that was due at `due_ms`, by its missed-fires policy.

    Fires since `all_since_ms` do not count as missed and are all written, except with FireOnce.
    """
    last_ms = now_ms if spec.end_before_ms is None else min(now_ms, spec.end_before_ms)
    if due_ms > last_ms:
        return Firing((), None)
    pattern, policy = spec.pattern, spec.missed_fires
    newest = _newest_fire(pattern, due_ms, last_ms)
    following = pattern.next_fire_ms(newest)
    fires: tuple[int, ...] = (newest,)
    max_missed = min(policy.max_catchup or 0, MAX_CATCHUP) if policy.kind == "fire-all" else 0
    if all_since_ms is not None and newest >= all_since_ms and policy.kind != "fire-once":
        first = due_ms
        if due_ms < all_since_ms:
            last_missed = _newest_fire(pattern, due_ms, all_since_ms - 1)
            first = pattern.next_fire_ms(last_missed) or newest
        missed = _fires_from(pattern, due_ms, first - 1, max_missed)
        fires = missed + _fires_from(pattern, first, newest, MAX_CATCHUP)
    elif policy.kind == "fire-all" and newest != due_ms:
        fires = _fires_from(pattern, due_ms, newest, max_missed)
    elif policy.kind == "skip" and following is not None:
        is_stale = now_ms - newest >= max(following - newest, SKIP_GRACE_MS)
        fires = () if is_stale else fires
    if spec.end_before_ms is not None and following is not None and following > spec.end_before_ms:
        following = None
    # FireOnce combines many fires into one on purpose.
    skipped = 0 if policy.kind == "fire-once" else _count_fires(pattern, due_ms, newest) - len(fires)
    return Firing(fires, following, skipped)


def _newest_fire(pattern: RepeatPattern, due_ms: int, last_ms: int) -> int:
    """Return the last fire from `due_ms` to `last_ms`, however many lie between."""
    if pattern.kind == "every" and pattern.interval_ms:
        return last_ms - (last_ms - due_ms) % pattern.interval_ms

    def is_newest_or_later(at_ms: int) -> bool:
        following = pattern.next_fire_ms(at_ms)
        return following is None or following > last_ms

    if is_newest_or_later(due_ms):  # the common case: the scheduler was not down
        return due_ms
    return due_ms + bisect_left(range(due_ms, last_ms), True, key=is_newest_or_later)


def _fires_from(pattern: RepeatPattern, due_ms: int, newest: int, limit: int) -> tuple[int, ...]:
    """Return up to `limit` fires from `due_ms` to `newest`, oldest first."""
    fires: list[int] = []
    fire_ms: int | None = due_ms
    while fire_ms is not None and fire_ms <= newest and len(fires) < limit:
        fires.append(fire_ms)
        fire_ms = pattern.next_fire_ms(fire_ms)
    return tuple(fires)


def _count_fires(pattern: RepeatPattern, due_ms: int, newest: int) -> int:
    """Return the number of fires from `due_ms` to `newest`, up to `MAX_COUNTED`."""
    if pattern.kind == "every" and pattern.interval_ms:
        return min((newest - due_ms) // pattern.interval_ms + 1, MAX_COUNTED)
    return 1 if newest == due_ms else len(_fires_from(pattern, due_ms, newest, MAX_COUNTED))


def fire_id(spec_key: str, fire_ms: int) -> str:
    """Return the job id of a fire, which is the same in every process."""
    digest = hashlib.sha256(spec_key.encode(errors="surrogateescape")).digest()
    return ulid_from_bits(fire_ms, int.from_bytes(digest[:10], "big"))


def _concerns_all(error: BaseException) -> bool:
    """Return True if the server is away or refuses writes, or this process is being stopped."""
    if isinstance(error, ServerError):
        return error.kind in PASSING
    return not isinstance(error, Exception) or isinstance(error, ConnectionLost | Unreachable)


class SchedulerDuty(Duty[SchedulerConfig]):
    """Fires repeatable jobs of one queue, with a client that the caller owns."""

    role = "scheduler"
    scripts = SCHEDULER_SCRIPTS

    def __init__(self, client: Client, config: SchedulerConfig) -> None:
        keys = QueueKeys(config.queue_name)
        super().__init__(client, config, lock=keys.scheduler_lock, watched=keys.repeat, poll_ms=config.tick_interval_ms)
        self._has_stood_by = False
        self._has_taken_over = False
        #: While catching up after a takeover: fires since this server time are all written.
        self._all_since_ms: int | None = None
        #: Specs that could not be fired: their score, when to try again, and the error that was logged.
        self._failed: dict[bytes, tuple[bytes, float, str]] = {}
        #: Skipped fires by spec, since they were last logged.
        self._skipped: dict[bytes, int] = {}
        self._skips_logged_at = float("-inf")

    def nothing_to_do(self) -> None:
        """Record that no repeatable job is registered: there is nothing to catch up on."""
        self._all_since_ms = None
        self._has_taken_over = False

    def on_change(self, is_ours: bool) -> None:
        self._has_taken_over = is_ours and self._has_stood_by
        self._has_stood_by = not is_ours

    def _record_takeover(self, now_ms: int) -> None:
        """After a takeover, set `_all_since_ms` to catch up on fires since the last leader died.

        The leader held the lock at the last check, so it was alive one TTL before that, and had fired everything up to
        one tick before.
        """
        window_ms = self.config.lock_ttl_secs * 1000 + self.config.tick_interval_ms
        if self._has_taken_over:
            self._has_taken_over = False
            looked_ms_ago = int((time.monotonic() - self.others_led_at) * 1000)
            self._all_since_ms = now_ms - window_ms - looked_ms_ago
        elif self._all_since_ms is not None and now_ms - self._all_since_ms > 2 * window_ms:
            self._all_since_ms = None  # the server was unreachable meanwhile: fires of that time count as missed

    async def one_round(self) -> float:
        """Fire all due specs. Return the seconds until the next round, 0 if more are due now.

        All specs of a round are read in one round trip and fired in the next. Those that cannot be fired stay due: they
        are read past for a while, so that they delay no others.
        """
        now_ms = await self.client.server_time_ms()
        self._record_takeover(now_ms)
        repeat = self.keys.repeat
        limit = self.config.batch + len(self._failed)
        read = await self.client.call("ZRANGEBYSCORE", repeat, "-inf", now_ms, "WITHSCORES", "LIMIT", 0, limit)
        due = dict(zip(read[::2], read[1::2], strict=True))
        self._failed = {spec_key: failed for spec_key, failed in self._failed.items() if spec_key in due}
        now = time.monotonic()
        for spec_key, (score, retry_at, _) in self._failed.items():
            if due[spec_key] == score and now < retry_at:
                del due[spec_key]
        firing = (self._fire(spec_key, score, now_ms) for spec_key, score in due.items())
        outcomes = await asyncio.gather(*firing, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and _concerns_all(outcome):
                raise outcome
        self._record_failures(due, outcomes)
        self._log_skipped()
        if len(read) >= 2 * limit:
            return 0.0
        if not self._failed:
            self._all_since_ms = None
        # Read after the fires: one of those may be the next again.
        soonest = await self.client.call("ZRANGEBYSCORE", repeat, f"({now_ms}", "+inf", "WITHSCORES", "LIMIT", 0, 1)
        self.earliest = None if self._failed else float(soonest[1]) if soonest else float("inf")
        return min(max(float(soonest[1]) - now_ms, 1.0) / 1000, self.poll_secs) if soonest else self.poll_secs

    def _record_failures(self, due: dict[bytes, bytes], outcomes: list[BaseException | None]) -> None:
        """Set failed specs aside, and log each error once."""
        retry_at = time.monotonic() + RETRY_SECS
        for (spec_key, score), error in zip(due.items(), outcomes, strict=True):
            before = self._failed.pop(spec_key, None)
            if error is None:
                continue
            text = f"{type(error).__name__}: {error}"
            self._failed[spec_key] = (score, retry_at, text)
            if before is None or before[2] != text:
                unexpected = None if isinstance(error, RedisError) else error
                logger.error("could not fire repeatable job %r: %s", spec_key, text, exc_info=unexpected)

    def _log_skipped(self) -> None:
        now = time.monotonic()
        if not self._skipped or now - self._skips_logged_at < SKIP_LOG_SECS:
            return
        total, example = sum(self._skipped.values()), min(self._skipped)
        logger.warning(
            'queue "%s" skipped late fires, as missed_fires says (no scheduler ran, or it fell behind): %d fires in '
            "total, schedules affected: %d, such as %s",
            *(self.config.queue_name, total, len(self._skipped), example.decode(errors="replace")),
        )
        self._skips_logged_at = now
        self._skipped.clear()

    async def _fire(self, spec_key: bytes, score: bytes, now_ms: int) -> None:
        """Write the fires of one due spec."""
        keys = self.keys
        hash_key = keys.repeat_spec("").encode() + spec_key
        packed = await self.client.call("HGET", hash_key, "spec")
        try:
            spec = decode_spec(packed or b"")
        except DecodeError as error:
            # Keep it, in case a newer version can read it, but do not read it again in every round.
            read = {"spec_key": spec_key, "score": score, "spec": packed or b""}
            if await calls.set_aside(self.client, keys.repeat, hash_key, **read):
                logger.error("cannot read repeatable job %r; it will not fire: %s", spec_key, error)
            return
        # A score can be any double, such as -inf; there are no fires before 1970.
        firing = plan(spec, score_ms(score), now_ms, self._all_since_ms)
        if firing.skipped:
            self._skipped[spec_key] = self._skipped.get(spec_key, 0) + firing.skipped
        key_text = spec_key.decode(errors="surrogateescape")
        slot, fires = spec.payload_slot, firing.fires
        at_once = max(min(MAX_FIRES_PER_CALL, MAX_CALL_BYTES // (len(slot) + 64)), 1)
        expected: Part = score
        while True:
            batch, fires = fires[:at_once], fires[at_once:]
            next_ms = fires[0] if fires else firing.next_ms
            fired, failure = await calls.fire(
                self.client,
                *(keys.stream, keys.delayed, keys.repeat, hash_key, keys.wake),
                score=expected,
                next_ms=next_ms,
                max_stream_len=self.config.max_stream_len,
                spec_key=spec_key,
                limit=spec.limit or 0,
                spec=packed,
                job_name=spec.job_name,
                fires=[(ms, encode_envelope(fire_id(key_text, ms), slot, now_ms)) for ms in batch],
            )
            if failure:
                raise ServerError(failure)
            # Fewer were fired if the limit is reached or the spec was changed meanwhile: then do not fire the rest.
            if next_ms is None or not fires or fired < len(batch):
                return
            expected = next_ms


class Scheduler(Standalone[SchedulerConfig]):
    """A scheduler outside of a worker. Several may run: one is the leader, the others stand by."""

    _make_duty, _make_config = SchedulerDuty, SchedulerConfig
