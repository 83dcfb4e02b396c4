"""Settles outcomes in windows: results, retries, dead letters and events are written, the acknowledgement last.

A window of plain successes without events is one bare acknowledgement. Windows that could not be written are kept and
written later: nothing is dropped, and their leases are renewed meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from typing import TYPE_CHECKING, Any

from tampu.engine.delivery import entry_order
from tampu.errors import RedisError
from tampu.redis.connection import pack_command
from tampu.redis.faults import PASSING, ConnectionLost, Remedy, ServerError, remedy_of
from tampu.redis.pipe import backoff_secs
from tampu.redis.scripts import Script, load_script

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tampu.engine.config import ConsumerConfig
    from tampu.engine.delivery import Delivery
    from tampu.engine.outcomes import Outcome
    from tampu.redis.connection import Connection, Part, Reply
    from tampu.redis.pipe import Pipe
    from tampu.wire.keys import QueueKeys

logger = logging.getLogger("tampu.worker")

#: Windows under way at once: the next is packed while the server works on the last.
MAX_IN_FLIGHT = 2
#: How long an outcome that the server could not write waits for its next try, in seconds.
HELD_RETRY_SECS = 0.5
#: Outcomes that wait to be written, for whatever reason, before reading stops; four windows of them if that is more.
MAX_UNWRITTEN = 1000
#: About how many bytes one script call carries.
MAX_WINDOW_BYTES = 256 * 1024

ACK = load_script("ack")
#: The settle script for servers that know script flags, where it may write at maxmemory, and for those that do not.
SETTLE = load_script("settle_window")
SETTLE_UNDER_OOM = Script("settle_window", "#!lua flags=allow-oom\n" + SETTLE.text)


class Settler:
    """Gathers outcomes and writes them. `on_settled(outcome, code)` is told what the script said."""

    def __init__(
        self,
        pipe: Pipe,
        keys: QueueKeys,
        config: ConsumerConfig,
        on_settled: Callable[[Outcome, str], None],
    ) -> None:
        self._pipe = pipe
        self._keys = keys
        self._config = config
        self._on_settled = on_settled
        self._script = SETTLE
        self._native = False
        self._loop = asyncio.get_running_loop()
        self._outcomes: list[Outcome] = []
        self._actives: list[Any] = []
        self._in_flight = 0
        self._outcomes_in_flight = 0
        self._max_unwritten = max(MAX_UNWRITTEN, 2 * MAX_IN_FLIGHT * config.ack_batch)
        self._timer: asyncio.TimerHandle | None = None
        self._again: list[list[Outcome]] = []
        self._held: list[Outcome] = []
        self._held_timer: asyncio.TimerHandle | None = None
        self._recovery: asyncio.Task[None] | None = None
        self._trouble: RedisError | None = None
        self._trouble_on: Connection | None = None
        self._attempt = 0
        self._last_failure = ""
        #: Those who wait until more retries, or dead letters, are taken.
        self._waiters: dict[bytes, deque[asyncio.Future[None]]] = {b"t": deque(), b"x": deque()}
        self._idle = asyncio.Event()
        self._closed = False
        self.unsettled_retries = 0
        self.unsettled_letters = 0

    def use(self, *, xackdel: bool, script_flags: bool) -> None:
        """Tell it what the server can do."""
        self._native = xackdel
        self._script = SETTLE_UNDER_OOM if script_flags else SETTLE

    # --- what the pool calls

    def started(self, delivery: Delivery, started_at_ms: int) -> None:
        """Note that a handler starts; the event leaves with the next window."""
        job = delivery.job
        self._actives += (job.id, job.name, started_at_ms, job.attempt + 1, job.created_at_ms)
        if self._timer is None:
            self._wake()

    def add(self, outcome: Outcome) -> None:
        """Take over one outcome."""
        outcomes = self._outcomes
        outcomes.append(outcome)
        if outcome.kind == b"t":
            self.unsettled_retries += 1
        elif outcome.kind == b"x":
            self.unsettled_letters += 1
        if len(outcomes) >= self._config.ack_batch:
            self._pump()
        elif self._timer is None:
            self._wake()

    def drained(self, at_ms: int) -> None:
        """Tell the events stream that the queue ran empty; nobody waits for it."""
        connection = self._pipe.connection
        if connection is not None and self._config.events_enabled:
            limit = self._config.events_max_stream_len
            fields = ("e", "drained", "id", "", "ts", at_ms)
            event = pack_command(("XADD", self._keys.events, "MAXLEN", "~", limit, "*", *fields))
            connection.request(event, lambda reply: None)

    def _room_for(self, kind: bytes) -> int:
        """How many more retries (`t`) or dead letters (`x`) are taken before whoever makes them must wait."""
        if kind == b"t":
            return self._config.retry_inflight - self.unsettled_retries
        return self._config.dlq_inflight - self.unsettled_letters

    async def wait_for_room(self, kind: bytes) -> None:
        """Wait until more retries (`t`) or dead letters (`x`) are taken; of the other kinds any number is."""
        if kind not in self._waiters:
            return
        while self._room_for(kind) <= 0:
            waiter = self._loop.create_future()
            self._waiters[kind].append(waiter)
            if self._in_flight < MAX_IN_FLIGHT:
                self._pump(partial=True)
            try:
                await waiter
            except asyncio.CancelledError:
                self._wake_waiters()  # the turn may have been given to this one, who has no use for it
                raise

    def _wake_waiters(self) -> None:
        for kind, waiters in self._waiters.items():
            room = self._room_for(kind)
            while waiters and room > 0:
                waiter = waiters.popleft()
                if not waiter.done():
                    waiter.set_result(None)
                    room -= 1

    async def drain(self, timeout_secs: float) -> bool:
        """Write everything; False when that took too long and something is left."""
        self._on_timer()
        self._check_idle()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_secs)
        return self._idle.is_set()

    def close(self) -> None:
        """Stop trying."""
        self._closed = True
        for timer in (self._timer, self._held_timer):
            if timer is not None:
                timer.cancel()
        if self._recovery is not None:
            self._recovery.cancel()

    @property
    def is_behind(self) -> bool:
        """Whether what was done has to be written before anything new is read."""
        return (
            bool(self._again)
            or self._recovery is not None
            or len(self._outcomes) + self._outcomes_in_flight + len(self._held) >= self._max_unwritten
        )

    # --- sending

    def _wake(self) -> None:
        if not self._closed:
            self._timer = self._loop.call_later(self._config.ack_idle_ms / 1000, self._on_timer)

    def _on_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._pump(partial=True)

    def _retry_held(self) -> None:
        if self._held_timer is not None:
            self._held_timer.cancel()
            self._held_timer = None
        held, self._held = self._held, []
        self._outcomes = held + self._outcomes
        self._pump(partial=True)

    def _pump(self, *, partial: bool = False) -> None:
        """Send what is due, as far as the server keeps up."""
        if self._recovery is not None or self._closed:
            return
        connection = self._pipe.connection
        if connection is None:
            if self._outcomes or self._actives or self._again:
                self._recover()
            return
        while self._in_flight < MAX_IN_FLIGHT and (self._again or self._outcomes or (partial and self._actives)):
            if self._again:
                self._send(connection, self._again.pop(0), [])
                continue
            if not partial and len(self._outcomes) < self._config.ack_batch:
                break
            window = self._take_window()
            actives, self._actives = self._actives, []
            self._send(connection, window, actives)
        if (self._outcomes or self._actives) and self._timer is None:
            self._wake()
        self._check_idle()

    def _take_window(self) -> list[Outcome]:
        size = min(len(self._outcomes), self._config.ack_batch)
        total = 0
        for count, outcome in enumerate(self._outcomes[:size], 1):
            if outcome.extra:
                total += sum(len(part) for part in outcome.extra if isinstance(part, bytes))
                if total > MAX_WINDOW_BYTES:
                    size = count
                    break
        window, self._outcomes = self._outcomes[:size], self._outcomes[size:]
        return window

    def _send(self, connection: Connection, window: list[Outcome], actives: list[Any]) -> None:
        self._in_flight += 1
        self._outcomes_in_flight += len(window)
        packed = self._packed(window, actives)
        connection.request(packed, lambda reply: self._on_reply(connection, window, reply))

    def _packed(self, window: Sequence[Outcome], actives: list[Any]) -> bytes:
        config = self._config
        stream = self._keys.stream
        if not config.events_enabled and all(outcome.kind == b"s" for outcome in window):
            ids = [outcome.delivery.entry_id for outcome in window]
            if self._native:
                return pack_command(("XACKDEL", stream, config.group, "IDS", len(ids), *ids))
            return ACK.packed_call((stream,), (config.group, *ids))
        keys: list[str] = [stream, self._keys.delayed, self._keys.dlq, self._keys.events]
        parts: list[Part] = []
        for outcome in window:
            delivery = outcome.delivery
            job = delivery.job
            parts += (
                outcome.kind,
                delivery.entry_id,
                job.id,
                job.name,
                outcome.finished_at_ms,
                outcome.runs,
                outcome.duration_us,
                job.created_at_ms,
                *outcome.extra,
            )
            if outcome.kind == b"r":
                keys.append(self._keys.result(job.id))
            elif outcome.kind == b"t":
                keys.append(self._keys.delayed_index(job.id))
        orders = [entry_order(outcome.delivery.entry_id) for outcome in window] or [(0, 0)]
        first, last = min(orders), max(orders)
        head: tuple[Part, ...] = (
            config.group,
            config.consumer_id,
            "1" if self._native else "0",
            config.events_max_stream_len if config.events_enabled else 0,
            config.dlq_max_stream_len,
            len(actives) // 5,
            len(window),
            f"{first[0]}-{first[1]}",
            f"{last[0]}-{last[1]}",
        )
        return pack_command(("EVALSHA", self._script.sha, len(keys), *keys, *head, *actives, *parts))

    def _on_reply(self, connection: Connection, window: list[Outcome], reply: Reply) -> None:
        self._in_flight -= 1
        self._outcomes_in_flight -= len(window)
        if isinstance(reply, ServerError) and reply.kind == "NOGROUP":
            # The stream is gone, and with it every entry of this window: nothing is left to settle.
            for outcome in window:
                self._settled(outcome, "l")
        elif isinstance(reply, RedisError):
            if window:
                self._again.append(window)
            self._trouble = reply
            self._trouble_on = connection
            self._recover()
            return
        else:
            self._attempt = 0
            self._on_answer(window, reply)
        self._wake_waiters()
        self._pump()
        self._check_idle()

    def _on_answer(self, window: list[Outcome], reply: Reply) -> None:
        if isinstance(reply, list) and len(reply) == 2 and isinstance(reply[0], bytes) and isinstance(reply[1], bytes):
            self._on_codes(window, reply[0].decode(), reply[1].decode(errors="replace"))
        else:  # a bare acknowledgement: XACKDEL answers -1 for an entry that was no longer pending
            answers = reply if isinstance(reply, list) else [1] * len(window)
            for outcome, answer in zip(window, answers, strict=True):
                self._settled(outcome, "k" if answer > 0 else "l")

    def _on_codes(self, window: list[Outcome], codes: str, failure: str) -> None:
        for outcome, code in zip(window, codes, strict=True):
            if code == "h":
                self._held.append(outcome)
                outcome.delivery.done()
            else:
                self._settled(outcome, code)
        if self._held and self._held_timer is None and not self._closed:
            self._held_timer = self._loop.call_later(HELD_RETRY_SECS, self._retry_held)
        if failure and failure != self._last_failure:
            logger.error("the server could not write everything of a settle window: %s", failure)
        if failure or not self._held:
            self._last_failure = failure

    def _settled(self, outcome: Outcome, code: str) -> None:
        if outcome.kind == b"t":
            self.unsettled_retries -= 1
        elif outcome.kind == b"x":
            self.unsettled_letters -= 1
        outcome.delivery.done()
        self._on_settled(outcome, code)

    def _check_idle(self) -> None:
        if not (self._outcomes or self._actives or self._again or self._held or self._in_flight):
            self._idle.set()
        else:
            self._idle.clear()

    # --- recovering

    def _recover(self) -> None:
        if self._recovery is None and not self._closed:
            self._recovery = self._loop.create_task(self._recover_once(), name="tampu-settle-recovery")
            self._recovery.add_done_callback(self._on_recovered)

    def _on_recovered(self, task: asyncio.Task[None]) -> None:
        self._recovery = None
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            logger.error("settling is in trouble and goes on trying", exc_info=error)
            self._loop.call_later(backoff_secs(self._attempt), self._recover)
            return
        self._pump(partial=True)

    async def _recover_once(self) -> None:
        """Do what the trouble's remedy says. A worker never gives up: what has no remedy is tried again later."""
        trouble, self._trouble = self._trouble, None
        self._attempt += 1
        if trouble is not None:
            if self._attempt in (1, 10) and not isinstance(trouble, ConnectionLost):
                logger.warning("a settle window was refused and is tried again: %s", trouble)
            if remedy_of(trouble) is Remedy.NONE or getattr(trouble, "kind", "") in PASSING:
                await asyncio.sleep(backoff_secs(self._attempt + 1))
            else:
                deadline = self._loop.time() + 60
                await self._pipe.cure(trouble, self._attempt - 1, deadline, self._trouble_on)
        await self._pipe.up(patience_secs=3600)
