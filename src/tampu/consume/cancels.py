"""Carries out cancels: reads new marks once a second, drops marked jobs that wait here and cancels those that run.

`Delivery.cancel` does it: an `async def` handler's task is cancelled, a handler's process killed, and a `def` handler
in a thread finds the request with `job.check_cancelled()`. Before a job is dropped, its mark is checked on the server:
adding the job's ID again removes the mark.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tampu.base.checks import MAX_ID_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tampu.config import ConsumerConfig
    from tampu.consume.inflight import Delivery, InFlight
    from tampu.redis.client import Client
    from tampu.wire.keys import QueueKeys

#: Marks read in one call.
PAGE = 1000
#: Marks remembered. When there are more, all are read again.
MAX_MARKS = 100_000
#: Highest score of a mark, as in `cancel_job.lua`: scores are epoch milliseconds, and no clock reaches higher ones.
MAX_SCORE = 2**52
#: After this many checks, all marks are read again, and those that no longer exist are dropped.
LOOKS_PER_REFRESH = 60


class Cancels:
    """The marks of one queue that this worker knows."""

    def __init__(self, client: Client, keys: QueueKeys, config: ConsumerConfig, inflight: InFlight) -> None:
        self._client = client
        self._keys = keys
        self._config = config
        self._inflight = inflight
        #: IDs of jobs that may be marked. Empty nearly always: a job is only looked up when it is not.
        self.marked: set[str] = set()
        #: Deliveries whose handlers cannot start yet, for example because no process is free.
        self.reserving: set[Delivery] = set()
        self._cursor = 0.0
        self._looks = 0

    @property
    def command(self) -> tuple[str, ...]:
        """The read of new marks; the reply goes to `learn`."""
        self._looks += 1
        if self._looks >= LOOKS_PER_REFRESH or len(self.marked) > MAX_MARKS:
            self._looks, self._cursor = 0, 0.0
            self.marked.clear()
        return (
            *("ZRANGEBYSCORE", self._keys.cancel_marks, f"{self._cursor:.0f}", str(MAX_SCORE)),
            *("WITHSCORES", "LIMIT", "0", str(PAGE)),
        )

    def forget(self) -> None:
        """Forget all marks: the queue has none."""
        if self.marked:
            self.marked.clear()
        self._cursor = 0.0

    async def learn(self, reply: Sequence[bytes]) -> None:
        """Note new marks, and act on those of jobs that run here."""
        while reply:
            ids = {one.decode(errors="replace") for one in reply[::2] if len(one) <= MAX_ID_BYTES}
            newest = float(reply[-1])
            new = ids - self.marked
            self.marked |= new
            if new:
                await self._cancel_running(new)
            if len(reply) < 2 * PAGE or newest <= self._cursor:
                self._cursor = newest
                return
            self._cursor = newest
            reply = await self._client.call(*self.command)

    async def _cancel_running(self, ids: set[str]) -> None:
        for delivery in self.reserving:
            if delivery.job.id in ids:
                delivery.task.cancel()  # it stops waiting, and checks its mark before it starts
        for delivery in self._inflight.running_deliveries():
            if delivery.job.id in ids:
                reason = await self.reason_for(delivery)
                if reason is not None and not delivery.has_outcome:
                    delivery.cancel(reason)

    async def reason_for(self, delivery: Delivery) -> str | None:
        """Return why a job is to be cancelled; None if its mark is gone."""
        job_id = delivery.job.id
        mark = await self._client.call("GET", self._keys.cancel_mark(job_id))
        if mark is None or not mark.startswith(b"r"):
            self.marked.discard(job_id)
            return None
        return str(mark[1:].decode(errors="replace"))
