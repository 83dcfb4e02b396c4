"""Leader election with locks on the server, and the loop in which a process does what it leads.

A *duty* is work that one process at a time does for a queue: promoting due jobs, or firing repeatable jobs.
`LeaderLoop` runs all duties of a process on one server: it takes and renews their locks, and checks all their sorted
sets in one request. It sleeps until the next job is due, or a wake-up (`wake_ups.py`) announces an earlier one.
`run_standalone` runs one duty outside a worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from typing import TYPE_CHECKING, Protocol

from tampu.base.clock import secs_until_round
from tampu.maintain.supervise import Failures, supervise
from tampu.maintain.wake_ups import WakeUps
from tampu.redis import calls
from tampu.redis.client import Client
from tampu.redis.connection import pack_command
from tampu.redis.faults import ServerError
from tampu.wire.keys import QueueKeys

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from tampu.redis.connection import Connection
    from tampu.redis.nodes import WatchingConnections
    from tampu.redis.scripts import Script
    from tampu.redis.settings import ConnectionSettings

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


class Leader:
    """One candidate for one lock. `on_change(is_ours)` is called when the lock is won or lost."""

    def __init__(
        self, client: Client, lock_key: str, holder_id: str, ttl_secs: int, on_change: Callable[[bool], None]
    ) -> None:
        self._client = client
        self.lock_key = lock_key
        # Two processes with the same configured id must not both believe they are the leader.
        self._holder_id = f"{holder_id}:{uuid.uuid4().hex}"
        self._ttl_secs = ttl_secs
        self._on_change = on_change
        #: True while the lock is ours; None before the first answer.
        self.is_ours: bool | None = None
        #: When to ask again, by the monotonic clock: to renew the lock, or because another one's expires.
        self.ask_at = 0.0
        #: When the lock was last seen in the hands of another, by the monotonic clock.
        self.others_led_at = 0.0

    async def lead(self) -> bool:
        """Take the lock, or renew it. Return True if it is ours."""
        asked_at = time.monotonic()
        others_for_ms = await calls.lead(self._client, self.lock_key, holder=self._holder_id, ttl_secs=self._ttl_secs)
        is_ours = others_for_ms == 0
        if is_ours:
            renew_at = time.monotonic() + self._ttl_secs * RENEW_SHARE
            # A little later, together with others.
            self.ask_at = renew_at + secs_until_round(self._ttl_secs * RENEW_SHARE / 12, renew_at)
        else:
            self.others_led_at = asked_at
            self.ask_at = float("inf") if others_for_ms < 0 else time.monotonic() + (others_for_ms + 1) / 1000
        if is_ours != self.is_ours:
            self.is_ours = is_ours
            self._on_change(is_ours)
        return is_ours

    async def resign(self) -> None:
        """Release the lock if it is ours, so that a standby takes over at once and not after the TTL."""
        if self.is_ours is False:
            return
        self.ask_at = 0.0
        self.is_ours = None
        await calls.resign(self._client, self.lock_key, holder=self._holder_id, patience_secs=1)


class Duty(Protocol):
    """The work of one lock's leader on a sorted set of times."""

    #: For logs, such as `promoter of queue "emails"`.
    role: str
    leader: Leader
    #: The key of the sorted set.
    watched: str
    #: The stream that announces an earlier member of the set; None if there is none.
    wake: str | None
    #: The key that marks, for the next leader, a set to which peers add unannounced members; None if `wake` is None.
    peers: str | None
    #: How often the set is checked, in seconds, if earlier members are not announced.
    poll_secs: float
    #: The lowest score at the end of the last round; infinity if the set was empty, None before the first round.
    earliest: float | None

    async def one_round(self) -> float:
        """Do the work that is due. Return the seconds until the next round, 0 if more is due now."""

    def nothing_to_do(self) -> None:
        """Note that the set has no members."""


class _Post:
    """A duty in the loop."""

    def __init__(self, duty: Duty) -> None:
        self.duty = duty
        self.leader = duty.leader
        self.failures = Failures(duty.role)
        #: When to check the sorted set again, and not before when to try again after an error: monotonic times.
        self.look_at = 0.0
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
        self._posts: list[_Post] = []
        self._by_wake: dict[str, _Post] = {}
        self._check_standby_at = 0.0
        self._woken = asyncio.Event()

    def add(self, duty: Duty) -> None:
        """Add a duty. It may be added while the loop runs."""
        self._posts.append(post := _Post(duty))
        if duty.wake is not None:
            self._by_wake[duty.wake] = post
        self._woken.set()

    @property
    def sockets(self) -> set[Connection]:
        """The open connections, except those of its client."""
        return self._wake_ups.sockets

    async def run(self, shutdown: asyncio.Event) -> None:
        """Do what this process leads until shutdown, then release its locks."""
        rounds = asyncio.ensure_future(supervise("promoters and schedulers", self._one_round, shutdown.is_set))
        listening = asyncio.ensure_future(self._listen(shutdown))
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
            await asyncio.gather(*(post.leader.resign() for post in self._posts), return_exceptions=True)

    async def _listen(self, shutdown: asyncio.Event) -> None:
        """Listen to the wake streams of the sets that this process leads."""

        async def listen_once() -> None:
            await self._wake_ups.listen_once([key for key, post in self._by_wake.items() if post.leader.is_ours])

        await supervise("wake-ups for delayed jobs", listen_once, shutdown.is_set)

    def _wake(self, key: str) -> None:
        post = self._by_wake[key]
        post.is_woken = True
        post.woken_at = time.monotonic()
        post.look_at = 0.0
        self._woken.set()

    def _working(self) -> list[asyncio.Task[None]]:
        return [post.working for post in self._posts if post.working is not None]

    async def _one_round(self) -> None:
        """Take or renew locks, check the sets of the duties that this process leads, and wait."""
        self._woken.clear()
        await self._ask_for_locks(time.monotonic())
        await self._look(time.monotonic())
        now = time.monotonic()
        wait_secs = min((self._next_at(post, now) for post in self._posts), default=float("inf")) - now
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(max(wait_secs, 0.0), STANDBY_SECS * 4)):
                await self._woken.wait()

    def _next_at(self, post: _Post, now: float) -> float:
        """Return when to do something about a duty, by the monotonic clock."""
        if post.retry_at > now:
            return post.retry_at
        if not post.leader.is_ours:
            return min(post.leader.ask_at, self._check_standby_at)
        return post.leader.ask_at if post.working is not None else min(post.leader.ask_at, post.look_at)

    async def _ask_for_locks(self, now: float) -> None:
        posts = [post for post in self._posts if post.retry_at <= now]
        asking = [post for post in posts if post.leader.ask_at <= now]
        if now >= self._check_standby_at:
            self._check_standby_at = now + secs_until_round(STANDBY_SECS, now)
            standing_by = [post for post in posts if post.leader.is_ours is False and post.leader.ask_at > now]
            held = await calls.existing(self._client, [post.leader.lock_key for post in standing_by])
            asking += [post for post, is_held in zip(standing_by, held, strict=True) if is_held is not True]
        await asyncio.gather(*(self._supervised(post, self._ask) for post in asking))

    async def _ask(self, post: _Post) -> None:
        was_ours = post.leader.is_ours
        if await post.leader.lead() and not was_ours:
            post.duty.earliest = None  # other processes may have changed the set
            post.look_at = 0.0
            await self._learn_of_peers(post)

    async def _look(self, now: float) -> None:
        """Check all sets whose time has come, in one request. Those that were empty cost one command together."""
        looking = [
            post
            for post in self._posts
            if post.leader.is_ours and post.working is None and max(post.look_at, post.retry_at) <= now
        ]
        asleep = [post for post in looking if not post.is_woken]
        empty = [post for post in asleep if post.duty.earliest == _NEVER]
        ahead = [post for post in asleep if post.due_at > now and post.duty.earliest not in (None, _NEVER)]
        found, firsts, server_ms = await asyncio.gather(
            calls.existing(self._client, [post.duty.watched for post in empty]),
            self._client.call_each([("ZRANGE", post.duty.watched, 0, 0, "WITHSCORES") for post in ahead]),
            self._client.server_time_ms() if ahead else _nothing(),
        )
        unchanged: set[_Post] = set()
        for post, has_members in zip(empty, found, strict=True):
            if has_members is False:
                post.duty.nothing_to_do()
                unchanged.add(post)
            elif has_members is True:
                self._note_earlier(post)
        for post, first in zip(ahead, firsts, strict=True):
            score = float(first[1]) if isinstance(first, list) and len(first) == 2 else None
            # The server's clock may have been set since the last round.
            if score is not None and score == post.duty.earliest and score > (server_ms or 0):
                unchanged.add(post)
            elif score is not None and score < (post.duty.earliest or 0.0):
                self._note_earlier(post)
        for post in looking:
            if post in unchanged and not post.is_woken:  # it may have been woken since the request was sent
                post.failures.clear()
                post.read_at = now
                post.look_at = self._next_look_at(post, now)
            else:
                post.working = asyncio.create_task(self._supervised(post, self._work), name="tampu-leader")

    def _next_look_at(self, post: _Post, now: float) -> float:
        """Return when to check a set again: when more is due, or on a common grid, so that one request checks all."""
        on_grid = now + secs_until_round(self._poll_secs(post, now), now)
        return on_grid if post.duty.earliest == _NEVER else min(on_grid, post.due_at)

    def _poll_secs(self, post: _Post, now: float) -> float:
        """Return the seconds between two checks of a set: more if new earliest members are announced."""
        poll_secs, wake = post.duty.poll_secs, post.duty.wake
        if wake is None or wake not in self._wake_ups.heard or now < post.peers_until:
            return poll_secs
        return max(poll_secs, min(poll_secs * CALM_FACTOR, CALM_SECS))

    def _note_earlier(self, post: _Post) -> None:
        """Note that a set has an earlier member than before. If no wake-up announced it, poll at the full rate."""
        since = post.read_at

        def judge() -> None:
            if post.woken_at < since:
                self._note_peer(post)

        asyncio.get_running_loop().call_later(ANNOUNCE_SECS, judge)

    def _note_peer(self, post: _Post) -> None:
        """Poll at the full rate for a while, and let the next leader do so, too."""
        now = time.monotonic()
        connection = self._client.connection
        if connection is not None and post.duty.peers is not None and post.peers_until < now + PEER_SECS / 2:
            mark = ("SET", post.duty.peers, "1", "PX", int(PEER_SECS * 1000))
            connection.request(pack_command(mark), lambda reply: None)  # without it, the next leader finds out itself
        post.peers_until = now + PEER_SECS

    async def _learn_of_peers(self, post: _Post) -> None:
        """Poll at the full rate for as long as an earlier leader would have."""
        if post.duty.peers is not None:
            with contextlib.suppress(ServerError):  # an ACL may forbid it
                left_ms = await self._client.call("PTTL", post.duty.peers)
                post.peers_until = max(post.peers_until, time.monotonic() + left_ms / 1000)

    async def _work(self, post: _Post) -> None:
        wait_secs, began = 0.0, time.monotonic()
        while (wait_secs <= 0 or post.is_woken) and post.leader.is_ours:
            post.is_woken = False
            before, began = post.duty.earliest, time.monotonic()
            wait_secs = await post.duty.one_round()
            if before is not None and (post.duty.earliest or before) < before:
                self._note_earlier(post)
            post.read_at = began
        now = time.monotonic()
        # The server read its clock between `began` and `now`, which are milliseconds apart on a busy machine.
        post.due_at = (began + now) / 2 + wait_secs
        post.look_at = self._next_look_at(post, now)
        post.failures.clear()

    async def _supervised(self, post: _Post, work: Callable[[_Post], Awaitable[None]]) -> None:
        """Await work for one duty. Its errors do not stop the others."""
        try:
            await work(post)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            post.retry_at = time.monotonic() + post.failures.note(error)
        finally:
            if post.working is asyncio.current_task():
                post.working = None
                self._woken.set()


async def _nothing() -> None:
    """Return None, in place of a request that is not needed."""


async def run_standalone(
    settings: ConnectionSettings,
    queue_name: str,
    scripts: Sequence[Script],
    duty_of: Callable[[Client], Duty],
    shutdown: asyncio.Event,
) -> None:
    """Run one duty with a dedicated client. Raises `RedisError` if the server cannot be reached at the start."""
    routing_key = QueueKeys(queue_name).tag.encode()
    client = Client(settings, routing_key, scripts)
    try:
        await client.up()
        loop = LeaderLoop(client, settings, routing_key)
        loop.add(duty_of(client))
        await loop.run(shutdown)
    finally:
        await client.close()
