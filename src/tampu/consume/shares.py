"""Divides the slots of a worker among its queues.

Each queue with waiting jobs gets slots in proportion to its `weight`. `reserve` keeps slots free for a queue, `limit`
is the maximum it may use. Shares are kept across reads by deficit round robin: in its turn a queue gets
`quantum * weight` jobs, in as many reads as that takes, and then the next queue has its turn. (Dividing the free slots
of each single read would give a queue of low weight nothing as long as one slot at a time is free.)
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tampu.consume.inflight import Delivery

#: How long a round of all queues should take, in seconds, and the most jobs that a queue of weight 1 gets in it. At
#: high throughput, turns are long enough for large reads.
ROUND_SECS = 0.25
MAX_QUANTUM = 64.0
#: Queues that are read in one request.
MAX_READS = 8


class Share:
    """One queue's part of the slots."""

    __slots__ = ("deficit", "has_more", "limit", "occupied", "reserve", "run", "settle_soon", "weight")

    #: Runs one of its jobs.
    run: Callable[[Delivery], Awaitable[None]]
    #: Called when some of its jobs have finished and no job of any queue waits to be started.
    settle_soon: Callable[[], None]

    def __init__(self, *, weight: int = 1, reserve: int = 0, limit: int | None = None) -> None:
        self.weight = weight
        self.reserve = reserve
        self.limit = limit
        #: Its jobs that run or wait in this worker.
        self.occupied = 0
        #: How many more of its jobs may be read in its turn.
        self.deficit = 0.0
        #: True while more of its jobs are known to wait at the server.
        self.has_more = False


class Shares:
    """The slots of one worker."""

    def __init__(self) -> None:
        self._reserving: list[Share] = []
        #: Number of queues.
        self.queues = 0
        #: False if jobs may only be read into free slots: one that waits could take a slot kept for another queue.
        self.may_read_ahead = True

    def add(self, share: Share) -> None:
        """Add a queue."""
        self.queues += 1
        if share.reserve:
            self._reserving.append(share)
        self.may_read_ahead = self.may_read_ahead and not share.reserve and share.limit is None

    def room_of(self, share: Share, room: int) -> int:
        """Return how many of `room` slots a queue may get: less those kept for others, and no more than its limit."""
        kept = sum(max(other.reserve - other.occupied, 0) for other in self._reserving if other is not share)
        return room - kept if share.limit is None else min(room - kept, share.limit - share.occupied)


class Turns:
    """The turns of queues on one server with waiting jobs."""

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._ring: deque[Share] = deque()
        self._weight = 0

    def __len__(self) -> int:
        return len(self._ring)

    def begin(self, share: Share) -> None:
        """Let a queue take part: more of its jobs wait."""
        if not share.has_more:
            share.has_more = True
            self._ring.append(share)
            self._weight += share.weight

    def end(self, share: Share) -> None:
        """Let a queue no longer take part: it is empty, paused or cannot be read."""
        if share.has_more:
            share.has_more = False
            share.deficit = 0.0
            self._ring.remove(share)
            self._weight -= share.weight

    def plan(self, room: int, batch: int, jobs_per_sec: float) -> list[tuple[Share, int]]:
        """Return the queues to read now and how many jobs of each, at most `room` in total."""
        plan: list[tuple[Share, int]] = []
        quantum = min(max(jobs_per_sec * ROUND_SECS / max(self._weight, 1), 1.0), MAX_QUANTUM)
        for _ in range(len(self._ring)):
            share = self._ring[0]
            if share.deficit < 1:
                share.deficit += quantum * share.weight
            count = min(int(share.deficit), batch, self._shares.room_of(share, room))
            if count > 0:
                plan.append((share, count))
                share.deficit -= count
                room -= count
                if share.deficit >= 1 and (room <= 0 or count == batch):
                    break  # its turn is not over
            self._ring.rotate(-1)
            if room <= 0 or len(plan) >= MAX_READS:
                break
        return plan
