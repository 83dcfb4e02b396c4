"""Leader election with locks on the server, and the loop in which a process does what it leads.

A `Duty` is work that one process at a time does for a queue: promoting due jobs, or firing repeatable jobs.
`LeaderLoop` runs all duties of a process on one server: it takes and renews their locks, and checks all their sorted
sets in one request. It sleeps until the next job is due, or a wake-up (`wake_ups.py`) announces an earlier one.
`Standalone` runs one duty outside a worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tampu.base.clock import secs_until_round
from tampu.config import PromoterConfig, SchedulerConfig
from tampu.maintain.supervise import Failures, supervise
from tampu.maintain.wake_ups import WakeUps
from tampu.redis import calls
from tampu.redis.client import Client
from tampu.redis.connection import pack_command
from tampu.redis.faults import ServerError
from tampu.redis.settings import parse_url
from tampu.wire.keys import QueueKeys

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from tampu.redis.connection import Connection
    from tampu.redis.nodes import WatchingConnections
    from tampu.redis.scripts import Script
    from tampu.redis.settings import ConnectionSettings, CredentialCallback

C = TypeVar("C", PromoterConfig, SchedulerConfig)

#: The lock is renewed after this share of its TTL.
RENEW_SHARE = 0.6
#: How often a standby checks whether the lock was released, in seconds. It also checks when the lock expires.
STANDBY_SECS = 0.25
#: How long the current round may take at shutdown, in seconds.
LAST_ROUND_SECS = 1.0
#: Factor by which a set is polled less often if its new earliest members are announced, and the maximum interval that
#: results, in seconds.
CALM_FACTOR = 10
CALM_SECS = 1.0
#: How long a set is polled at the full rate after an unannounced member was found, in seconds.
PEER_SECS = 3600.0
#: How long an announcement may take, in seconds: the poll that finds the member may be faster.
ANNOUNCE_SECS = 0.1
_NEVER = float("inf")


class Duty(Generic[C]):
    """The work of one leader on a sorted set of times, and where the loop is with it. All times are monotonic."""

    #: What does it, for logs.
    role = ""
    #: The scripts that it calls.
    scripts: Sequence[Script] = ()

    def __init__(
        self,
        client: Client,
        config: C,
        *,
        lock: str,
        watched: str,
        poll_ms: int,
        wake: str | None = None,
        peers: str | None = None,
    ) -> None:
        self.client = client
        self.config: C = config
        self.keys = QueueKeys(config.queue_name)
        #: The key of the lock; of the sorted set; and of the stream that announces an earlier member of the set.
        self.lock = lock
        self.watched = watched
        self.wake = wake
        #: The key that marks, for the next leader, a set to which peers add unannounced members.
        self.peers = peers
        #: How often the set is checked, in seconds, if earlier members are not announced.
        self.poll_secs = poll_ms / 1000
        # Two processes with the same configured id must not both believe they are the leader.
        self._holder_id = f"{config.holder_id}:{uuid.uuid4().hex}"
        #: True while the lock is ours; None before the first answer.
        self.is_ours: bool | None = None
        #: When to ask for the lock again: to renew it, or because another one's expires.
        self.ask_at = 0.0
        #: When the lock was last seen in the hands of another.
        self.others_led_at = 0.0
        #: The lowest score at the end of the last round; infinity if the set was empty, None before the first round.
        self.earliest: float | None = None
        self.failures = Failures(f'{self.role} of queue "{config.queue_name}"')
        #: When to check the sorted set again, and not before when to try again after an error.
        self.check_at = 0.0
        self.retry_at = 0.0
        #: When the next round is due, if the set does not change.
        self.due_at = 0.0
        #: True from a wake-up until the next round.
        self.is_woken = False
        #: When it was last woken, when its earliest member was last read, and until when peers add unannounced ones.
        self.woken_at = 0.0
        self.read_at = 0.0
        self.peers_until = 0.0
        self.working: asyncio.Task[None] | None = None

    async def one_round(self) -> float:
        """Do the work that is due. Return the seconds until the next round, 0 if more is due now."""
        raise NotImplementedError

    def nothing_to_do(self) -> None:
        """Record that the set has no members."""

    def on_change(self, is_ours: bool) -> None:
        """Record that the lock was won or lost."""

    async def lead(self) -> bool:
        """Take the lock, or renew it. Return True if it is ours."""
        asked_at, ttl_secs = time.monotonic(), self.config.lock_ttl_secs
        others_for_ms = await calls.lead(self.client, self.lock, holder=self._holder_id, ttl_secs=ttl_secs)
        is_ours = others_for_ms == 0
        if is_ours:
            renew_at = time.monotonic() + ttl_secs * RENEW_SHARE
            # A little later, together with others.
            self.ask_at = renew_at + secs_until_round(ttl_secs * RENEW_SHARE / 12, renew_at)
        else:
            self.others_led_at = asked_at
            self.ask_at = _NEVER if others_for_ms < 0 else time.monotonic() + (others_for_ms + 1) / 1000
        if is_ours != self.is_ours:
            self.is_ours = is_ours
            self.on_change(is_ours)
            if is_ours:
                self.earliest = None  # other processes may have changed the set
                self.check_at = 0.0
                if self.peers is not None:
                    with contextlib.suppress(ServerError):  # an ACL may forbid it
                        left_ms = await self.client.call("PTTL", self.peers)
                        self.peers_until = max(self.peers_until, time.monotonic() + left_ms / 1000)
        return is_ours

    async def resign(self) -> None:
        """Release the lock if it is ours, so that a standby takes over at once and not after the TTL."""
        if self.is_ours is False:
            return
        self.ask_at = 0.0
        self.is_ours = None
        await calls.resign(self.client, self.lock, holder=self._holder_id, patience_secs=1)

    def next_at(self, now: float, check_standby_at: float) -> float:
        """Return when to do something about it."""
        if self.retry_at > now:
            return self.retry_at
        if not self.is_ours:
            return min(self.ask_at, check_standby_at)
        return self.ask_at if self.working is not None else min(self.ask_at, self.check_at)

    def record_earlier(self) -> None:
        """Record that the set has an earlier member than before. If no wake-up announces it, poll at the full rate."""
        since = self.read_at

        def judge() -> None:
            if self.woken_at >= since:
                return
            now, connection = time.monotonic(), self.client.connection
            if connection is not None and self.peers is not None and self.peers_until < now + PEER_SECS / 2:
                mark = ("SET", self.peers, "1", "PX", int(PEER_SECS * 1000))
                connection.request(pack_command(mark), lambda reply: None)  # without it, the next leader finds out
            self.peers_until = now + PEER_SECS

        asyncio.get_running_loop().call_later(ANNOUNCE_SECS, judge)


class LeaderLoop:
    """Runs the duties of one process on one server."""

    def __init__(
        self,
        client: Client,
        settings: ConnectionSettings,
        routing_key: bytes,
        watching: WatchingConnections | None = None,
    ) -> None:
        self._client = client
        self._wake_ups = WakeUps(settings, routing_key, self._wake, watching)
        self._duties: list[Duty[Any]] = []
        self._by_wake: dict[str, Duty[Any]] = {}
        self._check_standby_at = 0.0
        self._woken = asyncio.Event()

    def add(self, duty: Duty[Any]) -> None:
        """Add a duty. It may be added while the loop runs."""
        self._duties.append(duty)
        if duty.wake is not None:
            self._by_wake[duty.wake] = duty
        self._woken.set()

    @property
    def sockets(self) -> set[Connection]:
        """The open connections, except those of its client."""
        return self._wake_ups.sockets

    async def run(self, shutdown: asyncio.Event) -> None:
        """Do what this process leads until shutdown, then release its locks."""
        rounds = asyncio.ensure_future(supervise("promoters and schedulers", self._one_round, shutdown.is_set))
        listening = asyncio.ensure_future(supervise("wake-ups for delayed jobs", self._listen_once, shutdown.is_set))
        try:
            await shutdown.wait()
            self._woken.set()
            # Do not wait longer for a round that waits for an unreachable server.
            await asyncio.wait([rounds, *self._working()], timeout=LAST_ROUND_SECS)
        finally:
            ending = [rounds, listening, *self._working()]
            for task in ending:
                task.cancel()
            await asyncio.gather(*ending, return_exceptions=True)
            await self._wake_ups.close()
            # A lock that cannot be released expires.
            await asyncio.gather(*(duty.resign() for duty in self._duties), return_exceptions=True)

    async def _listen_once(self) -> None:
        """Listen to the wake streams of the sets that this process leads."""
        await self._wake_ups.listen_once([key for key, duty in self._by_wake.items() if duty.is_ours])

    def _wake(self, key: str) -> None:
        duty = self._by_wake[key]
        duty.is_woken = True
        duty.woken_at = time.monotonic()
        duty.check_at = 0.0
        self._woken.set()

    def _working(self) -> list[asyncio.Task[None]]:
        return [duty.working for duty in self._duties if duty.working is not None]

    async def _one_round(self) -> None:
        """Take or renew locks, check the sets of the duties that this process leads, and wait."""
        self._woken.clear()
        await self._ask_for_locks(time.monotonic())
        await self._check_sets(time.monotonic())
        now = time.monotonic()
        wait_secs = min((duty.next_at(now, self._check_standby_at) for duty in self._duties), default=_NEVER) - now
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(max(wait_secs, 0.0), STANDBY_SECS * 4)):
                await self._woken.wait()

    async def _ask_for_locks(self, now: float) -> None:
        duties = [duty for duty in self._duties if duty.retry_at <= now]
        asking = [duty for duty in duties if duty.ask_at <= now]
        if now >= self._check_standby_at:
            self._check_standby_at = now + secs_until_round(STANDBY_SECS, now)
            standing_by = [duty for duty in duties if duty.is_ours is False and duty.ask_at > now]
            held = await calls.existing(self._client, [duty.lock for duty in standing_by])
            asking += [duty for duty, is_held in zip(standing_by, held, strict=True) if is_held is not True]
        await asyncio.gather(*(self._supervised(duty, Duty.lead) for duty in asking))

    async def _check_sets(self, now: float) -> None:
        """Check all sets whose time has come, in one request. Those that were empty cost one command together."""
        duties = [
            duty
            for duty in self._duties
            if duty.is_ours and duty.working is None and max(duty.check_at, duty.retry_at) <= now
        ]
        asleep = [duty for duty in duties if not duty.is_woken]
        empty = [duty for duty in asleep if duty.earliest == _NEVER]
        ahead = [duty for duty in asleep if duty.due_at > now and duty.earliest not in (None, _NEVER)]
        found, firsts, server_ms = await asyncio.gather(
            calls.existing(self._client, [duty.watched for duty in empty]),
            self._client.call_each([("ZRANGE", duty.watched, 0, 0, "WITHSCORES") for duty in ahead]),
            self._client.server_time_ms() if ahead else asyncio.sleep(0, 0),
        )
        unchanged: set[Duty[Any]] = set()
        for duty, has_members in zip(empty, found, strict=True):
            if has_members is False:
                duty.nothing_to_do()
                unchanged.add(duty)
            elif has_members is True:
                duty.record_earlier()
        for duty, first in zip(ahead, firsts, strict=True):
            score = float(first[1]) if isinstance(first, list) and len(first) == 2 else None
            # The server's clock may have been set since the last round.
            if score is not None and score == duty.earliest and score > server_ms:
                unchanged.add(duty)
            elif score is not None and score < (duty.earliest or 0.0):
                duty.record_earlier()
        for duty in duties:
            if duty in unchanged and not duty.is_woken:  # it may have been woken since the request was sent
                duty.failures.clear()
                duty.read_at = now
                duty.check_at = self._next_check_at(duty, now)
            else:
                duty.working = asyncio.create_task(self._supervised(duty, self._work), name="tampu-leader")

    def _next_check_at(self, duty: Duty[Any], now: float) -> float:
        """Return when to check a set again: when more is due, or on a common grid, so that one request checks all.

        A set whose new earliest members are announced is checked less often.
        """
        poll_secs = duty.poll_secs
        if duty.wake in self._wake_ups.heard and now >= duty.peers_until:
            poll_secs = max(poll_secs, min(poll_secs * CALM_FACTOR, CALM_SECS))
        on_grid = now + secs_until_round(poll_secs, now)
        return on_grid if duty.earliest == _NEVER else min(on_grid, duty.due_at)

    async def _work(self, duty: Duty[Any]) -> None:
        wait_secs, began = 0.0, time.monotonic()
        while (wait_secs <= 0 or duty.is_woken) and duty.is_ours:
            duty.is_woken = False
            before, began = duty.earliest, time.monotonic()
            wait_secs = await duty.one_round()
            if before is not None and (duty.earliest or before) < before:
                duty.record_earlier()
            duty.read_at = began
        now = time.monotonic()
        # The server read its clock between `began` and `now`, which are milliseconds apart on a busy machine.
        duty.due_at = (began + now) / 2 + wait_secs
        duty.check_at = self._next_check_at(duty, now)
        duty.failures.clear()

    async def _supervised(self, duty: Duty[Any], work: Callable[[Duty[Any]], Awaitable[object]]) -> None:
        """Await work for one duty. Its errors do not stop the others."""
        try:
            await work(duty)
        except Exception as error:
            duty.retry_at = time.monotonic() + duty.failures.record(error)
        finally:
            if duty.working is asyncio.current_task():
                duty.working = None
                self._woken.set()


class Standalone(Generic[C]):
    """A duty of one queue outside of a worker. Several may run: one is the leader, the others stand by."""

    _make_duty: type[Duty[C]]
    _make_config: type[C]

    def __init__(
        self, url: str, config: C | None = None, *, credential_provider: CredentialCallback | None = None
    ) -> None:
        self._settings = parse_url(url, credential_provider=credential_provider)
        self._config: C = config or self._make_config()

    async def run(self, shutdown: asyncio.Event) -> None:
        """Do the work until `shutdown` is set. Raises `RedisError` if it cannot connect at the start."""
        routing_key = QueueKeys(self._config.queue_name).tag.encode()
        client = Client(self._settings, routing_key, self._make_duty.scripts)
        try:
            await client.up()
            loop = LeaderLoop(client, self._settings, routing_key)
            loop.add(self._make_duty(client, self._config))  # type: ignore[call-arg]  # of the subclass
            await loop.run(shutdown)
        finally:
            await client.close()
