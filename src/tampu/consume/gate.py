"""The gate of a limited queue in a worker: takes jobs that may run now, and reports those that were settled.

While a queue has limits, its consumer group delivers nothing, and its reader waits for its *bell* instead: a stream to
which the server's scripts add an entry when a job may start. The worker that leads the queue also runs a `GateKeeper`,
which indexes new jobs, rings when limits of a rate allow the next job, and repairs what dead workers left.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

from tampu.consume.outcomes import Outcome, Retried
from tampu.errors import RedisError
from tampu.redis.client import Client
from tampu.redis.faults import ServerError
from tampu.redis.gate import (
    FIRST_PAGE,
    INDEX,
    TAKE,
    TAKE_UNDER_OOM,
    Taken,
    mend,
    packed_take,
    read_taken,
    take_nothing,
)
from tampu.redis.scripts import SettleCode

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tampu.consume.runtime import ServedQueue
    from tampu.redis.connection import Part, Reply
    from tampu.redis.settings import ConnectionSettings
    from tampu.wire.job import Job

#: Longest time that an idle worker waits for the bell, in seconds: a lost ring delays a job by no more than this.
BELL_SECS = 1.0
#: While more jobs may be taken, settled ones are reported with the next take, or after this time, in seconds.
NEWS_SECS = 0.002
#: Maximum number of pieces of news in one call: two for each settled job.
MAX_NEWS = 2000
#: How often one page of each gate is checked and repaired, in seconds.
MEND_SECS = 1.0
#: Minimum time between two looks at new jobs, in seconds: a flood of adds must not become a flood of calls.
PAUSE_SECS = 0.005
#: How often a worker checks whether it leads a limited queue, in seconds.
STANDBY_SECS = 0.25


class Gate:
    """Takes the jobs of one limited queue."""

    def __init__(self, queue: ServedQueue, client: Client) -> None:
        self._queue = queue
        self._client = client
        self._news: list[Part] = []
        self._is_flushing = False
        self._look_timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        #: The entry of the bell that was read last.
        self.bell = b""
        queue.settler.on_settled = self._on_settled
        queue.settler.on_all_succeeded = self._on_all_succeeded

    def close(self) -> None:
        """Stop reporting: the queue has no limits any more, or the worker ends."""
        self._is_closed = True
        if self._look_timer is not None:
            self._look_timer.cancel()
        queue = self._queue
        queue.settler.on_settled = queue.inflight.settled
        queue.settler.on_all_succeeded = queue.inflight.all_succeeded

    async def take(self, want: int) -> Taken | None:
        """Take up to `want` jobs that may run now. Return None if the queue has no limits any more.

        Not sent again after a lost connection: the jobs of a lost reply are pending, and the reader hands them back.
        """
        news = self._take_news()
        bell, self.bell = self.bell, b""
        try:
            taken = read_taken(await self._client.send(self._packed(want, bell, news), resend=False))
        except RedisError:
            self._news = [*news, *self._news]
            raise
        self._look_again(taken)
        return taken

    def _look_again(self, taken: Taken | None) -> None:
        """Look again when a key has cooled: the leader learns of it only with its next look."""
        if self._is_closed or taken is None or taken.wait_ms is None or taken.wait_ms >= BELL_SECS * 1000:
            return
        loop = asyncio.get_running_loop()
        at = loop.time() + taken.wait_ms / 1000
        if self._look_timer is None or self._look_timer.cancelled() or not loop.time() < self._look_timer.when() <= at:
            if self._look_timer is not None:
                self._look_timer.cancel()
            self._look_timer = loop.call_at(at, self._look)

    def _look(self) -> None:
        self._look_timer = None
        self._send_news()

    def _packed(self, want: int, bell: bytes, news: Sequence[Part]) -> bytes:
        config = self._queue.config
        return packed_take(
            self._queue.keys.gate,
            group=config.group,
            consumer=config.consumer_id,
            want=want,
            index=INDEX if want else 0,
            bell=bell,
            news=news,
            script=TAKE_UNDER_OOM if self._queue.has_script_flags else TAKE,
        )

    # --- news

    def _on_settled(self, outcome: Outcome, code: str) -> None:
        self._queue.inflight.settled(outcome, code)
        if code == SettleCode.WRITTEN:
            self._report("r" if isinstance(outcome, Retried) else "f", [outcome.delivery.entry_id])

    def _on_all_succeeded(self, outcomes: list[Outcome]) -> None:
        self._queue.inflight.all_succeeded(outcomes)
        self._report("f", [outcome.delivery.entry_id for outcome in outcomes])

    def returned(self, entry_ids: Iterable[bytes]) -> None:
        """Report entries that were handed back."""
        self._report("r", entry_ids)

    def rest(self, job: Job[object], rest_ms: int) -> None:
        """Let the key of a job rest."""
        self._report("h", [f"{rest_ms} :{job.extras.key or job.name}".encode(errors="replace")])

    def _report(self, kind: str, values: Iterable[bytes]) -> None:
        for value in values:
            self._news += (kind, value)
        if not self._is_flushing:
            self._is_flushing = True
            delay_secs = NEWS_SECS if self._queue.share.has_more else 0.0
            asyncio.get_running_loop().call_later(delay_secs, self.flush)

    def _take_news(self) -> list[Part]:
        news, self._news = self._news[:MAX_NEWS], self._news[MAX_NEWS:]
        return news

    def flush(self) -> None:
        """Send the news now, unless a take has sent them."""
        self._is_flushing = False
        if self._news:
            self._send_news()

    def _send_news(self) -> None:
        connection = self._client.connection
        if connection is None:
            return  # they travel with the next take
        news = self._take_news()

        def on_reply(reply: Reply) -> None:
            if isinstance(reply, RedisError):
                self._news = [*news, *self._news]
            else:
                self._look_again(read_taken(reply))

        connection.request(self._packed(0, b"", news), on_reply)


class GateKeeper:
    """Keeps the gates of the queues on one server that this process leads."""

    def __init__(
        self, settings: ConnectionSettings, routing_key: bytes, client: Client, queues: Sequence[ServedQueue]
    ) -> None:
        self._client = client
        #: Waits for new jobs.
        self._listening = Client(settings, routing_key, response_timeout_secs=BELL_SECS + 5.0)
        #: All queues on the server; it may grow.
        self._queues = queues
        #: Per queue: the last indexed entry, when to look again, when to mend, and the next page to mend.
        self._seen: dict[ServedQueue, bytes] = {}
        self._look_at: dict[ServedQueue, float] = {}
        self._mend_at: dict[ServedQueue, float] = {}
        self._pages: dict[ServedQueue, tuple[bytes, ...]] = {}

    async def close(self) -> None:
        """Close the connection."""
        await self._listening.close()

    async def one_round(self) -> None:
        """Look at the gates that are due, then wait for new jobs."""
        queues = [queue for queue in self._queues if queue.gate is not None and queue.is_led and queue.has_group]
        if not queues:
            self._look_at.clear()
            await asyncio.sleep(STANDBY_SECS)
            return
        now = time.monotonic()
        for queue in queues:
            # A queue without its group, or without access to it, must not stop the others: its reader reports it.
            with contextlib.suppress(ServerError):
                if self._look_at.get(queue, 0.0) <= now:
                    await self._look(queue)
                if self._mend_at.get(queue, 0.0) <= now:
                    await self._mend(queue)
        wait_secs = min(self._look_at.get(queue, now + BELL_SECS) for queue in queues) - time.monotonic()
        seen = {queue.keys.stream: self._seen[queue] for queue in queues if queue in self._seen}
        if not seen:
            await asyncio.sleep(STANDBY_SECS)
            return
        block_ms = max(int(wait_secs * 1000), 1)
        await self._listening.up()
        reply = await self._listening.call(
            "XREAD", "COUNT", 1, "BLOCK", block_ms, "STREAMS", *seen.keys(), *seen.values()
        )
        changed = {stream for stream, _ in reply or ()}
        for queue in queues:
            if queue.keys.stream.encode() in changed:
                with contextlib.suppress(ServerError):
                    await self._look(queue)
        await asyncio.sleep(PAUSE_SECS)

    async def _look(self, queue: ServedQueue) -> None:
        """Index new jobs, and ring if any may start."""
        self._look_at[queue] = time.monotonic() + BELL_SECS
        config = queue.config
        taken = await take_nothing(self._client, queue.keys.gate, group=config.group, consumer=config.consumer_id)
        if taken is None:
            return
        self._seen[queue] = taken.seen
        wait_ms = 0 if taken.is_behind else taken.wait_ms
        if wait_ms is not None:
            self._look_at[queue] = time.monotonic() + min(wait_ms / 1000, BELL_SECS)

    async def _mend(self, queue: ServedQueue) -> None:
        self._mend_at[queue] = time.monotonic() + MEND_SECS
        pages = self._pages.get(queue, FIRST_PAGE)
        keys, group = queue.keys, queue.config.group
        self._pages[queue], _ = await mend(
            self._client, keys.gate, keys.due, group=group, index_prefix=keys.delayed_index(""), cursors=pages
        )
