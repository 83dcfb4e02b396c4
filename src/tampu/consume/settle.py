"""Settles jobs in windows: one call writes results, retries and dead letters, acknowledges the entries, writes events.

A window of successes without results or events is a single acknowledgement. A window is sent when it is full, when the
pool has no more jobs to start, or after `ack_idle_ms`. Outcomes that arrive while a window is in flight share the next
one: the busier the worker, the larger its windows. Windows that could not be written are kept and written later, and
their leases renewed meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from typing import TYPE_CHECKING, Any

import msgpack

from tampu.base.checks import MAX_CALL_BYTES
from tampu.base.clock import wall_clock_ms
from tampu.consume.outcomes import MAX_LUA_NUMBER, DeadLetter, Outcome, Retried, Success, for_lua
from tampu.errors import Error, RedisError
from tampu.redis.client import backoff_secs
from tampu.redis.connection import pack_command
from tampu.redis.faults import PASSING, ConnectionLost, Remedy, ServerError
from tampu.redis.resend import Recovery
from tampu.redis.scripts import Script, SettleCode, load_script
from tampu.wire.codec import QueueCodec
from tampu.wire.entry import entry_order
from tampu.wire.payload import encode_no_result

if TYPE_CHECKING:
    from collections.abc import Callable

    from tampu.config import ConsumerConfig
    from tampu.consume.inflight import Delivery
    from tampu.redis.client import Client
    from tampu.redis.connection import Connection, Reply
    from tampu.wire.keys import QueueKeys

logger = logging.getLogger("tampu.worker")

# Globals: looking up an enum member takes ten times as long, for every failure.
_WRITTEN, _HELD = SettleCode.WRITTEN, SettleCode.HELD

#: Maximum number of windows in flight: the next one is packed while the server works on the last.
MAX_IN_FLIGHT = 2
#: How long an outcome that the server could not write waits before it is sent again, in seconds.
HELD_RETRY_SECS = 0.5
#: Outcomes of more bytes than this are sent on their own, after the others that are ready: they may take a while.
LARGE_BYTES = 64 * 1024
#: Connections that may break under a window before it is split.
MAX_LOSSES = 3
#: Unwritten outcomes at which reading stops; four windows of outcomes if that is more.
MAX_UNWRITTEN = 1000
#: Reading stops when the outcomes that the server could not write reach this size, in bytes.
MAX_PUT_OFF_BYTES = 32 * 1024 * 1024

ACK = load_script("ack")
#: The settle script, and its form for servers with script flags, which let it write above maxmemory.
SETTLE = load_script("settle_window")
SETTLE_UNDER_OOM = Script("settle_window", "#!lua flags=allow-oom\n" + SETTLE.text)

#: Packs a window. The servers' MessagePack has no bin type: bytes are written as text is.
_pack = msgpack.Packer(use_bin_type=False).pack


class SettleWindow(list[Outcome]):
    """Outcomes that are written in one call."""

    #: Connections that broke while this window was in flight.
    losses = 0


class SettleCall:
    """The arguments of one call of the settle script, to which each outcome of a window adds its own."""

    __slots__ = ("keys", "other_keys", "others", "result_keys", "successes")

    def __init__(self, keys: QueueKeys) -> None:
        self.keys = keys
        #: The keys of results.
        self.result_keys: list[str] = []
        #: Nine values for each success, in one list: a list for each costs the server more.
        self.successes: list[Any] = []
        #: A list of values for each other outcome, and the keys of all.
        self.others: list[tuple[Any, ...]] = []
        self.other_keys: list[str] = []


class Settler:
    """Collects outcomes and writes them in windows."""

    def __init__(
        self,
        client: Client,
        keys: QueueKeys,
        config: ConsumerConfig,
    ) -> None:
        self._client = client
        self._keys = keys
        #: Prefix of the keys of results.
        self._result_prefix = keys.result("")
        self._config = config
        #: Called with each outcome and the server's code for it.
        self.on_settled: Callable[[Outcome, str], None] = lambda outcome, code: None
        #: Called instead with a window of successes that were all written.
        self.on_all_succeeded: Callable[[list[Outcome]], None] = lambda outcomes: None
        #: Called first with the outcomes of a window that were written.
        self.on_written: Callable[[list[Outcome]], None] = lambda outcomes: None
        self._script = SETTLE
        self._has_xackdel = False
        self._loop = asyncio.get_running_loop()
        self._outcomes: list[Outcome] = []
        #: Bytes of results, retries and dead letters in them.
        self._outcome_bytes = 0
        #: Large ones at the start of them, each to be sent on its own.
        self._large = 0
        #: Deliveries that have started and whose `active` event was not sent. It travels with the outcome if that is
        #: known by the time the window is sent.
        self._started: list[Delivery] = []
        codec = QueueCodec.of(config.codec, config.queue_name)
        #: Seals the results of a window together. A codec that may fail seals in the runner, where the job then fails.
        self._codec = codec if codec is not None and codec.seals_many else None
        self._is_flushing = False
        self._in_flight = 0
        self._outcomes_in_flight = 0
        self._max_unwritten = max(MAX_UNWRITTEN, 2 * MAX_IN_FLIGHT * config.ack_batch)
        self._timer: asyncio.TimerHandle | None = None
        self._again: list[SettleWindow] = []
        #: Outcomes that the server could not write, to be sent again after `HELD_RETRY_SECS`, and their bytes.
        self._put_off: list[Outcome] = []
        self._put_off_bytes = 0
        self._put_off_timer: asyncio.TimerHandle | None = None
        self._recovery = Recovery(client, "settler", self._resume, self._on_hopeless)
        self._last_failure = ""
        #: How many more retries and dead letters fit before callers must wait, and the callers that wait.
        self._room: dict[type[Outcome], int] = {Retried: config.retry_inflight, DeadLetter: config.dlq_inflight}
        self._waiters: dict[type[Outcome], deque[asyncio.Future[None]]] = {Retried: deque(), DeadLetter: deque()}
        self._idle = asyncio.Event()
        self._closed = False

    def use(self, *, xackdel: bool, script_flags: bool) -> None:
        """Set the server's capabilities."""
        self._has_xackdel = xackdel
        self._script = SETTLE_UNDER_OOM if script_flags else SETTLE

    # --- what the pool calls

    def started(self, delivery: Delivery) -> None:
        """Add the event that a handler starts; it is sent with the next window."""
        delivery.started_at_ms = wall_clock_ms()
        self._started.append(delivery)
        if self._timer is None:
            self._wake()

    def add(self, outcome: Outcome) -> None:
        """Add one outcome; it is sent with the next window."""
        outcomes = self._outcomes
        outcomes.append(outcome)
        if isinstance(outcome, Success):
            self._outcome_bytes += len(outcome.result)
        else:
            self._outcome_bytes += outcome.size
            self._count(outcome, 1)
        if len(outcomes) >= self._config.ack_batch:
            self._pump()
        elif self._timer is None:
            self._wake()

    def flush_soon(self) -> None:
        """Send what there is at the end of this turn of the event loop: the pool has no more jobs to start.

        While a window is in flight, it is sent with the reply instead.
        """
        if self._outcomes and not self._is_flushing:
            self._is_flushing = True
            if not self._in_flight:
                self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        if self._is_flushing and not self._in_flight:
            self._on_timer()

    def drained(self, at_ms: int) -> None:
        """Write a `drained` event, without waiting for the reply."""
        connection = self._client.connection
        if connection is not None and self._config.events_enabled:
            limit = self._config.events_max_stream_len
            fields = ("e", "drained", "id", "", "ts", at_ms)
            event = pack_command(("XADD", self._keys.events, "MAXLEN", "~", limit, "*", *fields))
            connection.request(event, lambda reply: None)

    def has_room(self, outcome: type[Outcome]) -> bool:
        """Return True if more retries or dead letters fit. Other outcomes are not limited."""
        return self._room.get(outcome, 1) > 0

    async def wait_for_room(self, outcome: type[Outcome]) -> None:
        """Wait until there is room for more retries or dead letters."""
        while not self.has_room(outcome):
            waiter = self._loop.create_future()
            self._waiters[outcome].append(waiter)
            if self._in_flight < MAX_IN_FLIGHT:
                self._pump(partial=True)
            try:
                await waiter
            except asyncio.CancelledError:
                self._wake_waiters()  # the room may have been given to this caller: pass it on
                raise

    def _wake_waiters(self) -> None:
        for outcome, waiters in self._waiters.items():
            room = self._room[outcome]
            while waiters and room > 0:
                waiter = waiters.popleft()
                if not waiter.done():
                    waiter.set_result(None)
                    room -= 1

    async def drain(self, timeout_secs: float) -> bool:
        """Write all outcomes. Return False if some are left after `timeout_secs`."""
        self._on_timer()
        self._check_idle()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_secs)
        return self._idle.is_set()

    def close(self) -> None:
        """Stop sending."""
        self._closed = True
        for timer in (self._timer, self._put_off_timer):
            if timer is not None:
                timer.cancel()
        self._recovery.stop()

    @property
    def is_behind(self) -> bool:
        """Return True if outcomes must be written before new entries are read."""
        return (
            bool(self._again)
            or self._recovery.task is not None
            or len(self._outcomes) + self._outcomes_in_flight + len(self._put_off) >= self._max_unwritten
            or self._put_off_bytes >= MAX_PUT_OFF_BYTES
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

    def _retry_put_off(self) -> None:
        if self._put_off_timer is not None:
            self._put_off_timer.cancel()
            self._put_off_timer = None
        held, self._put_off = self._put_off, []
        for outcome in held:
            self._count(outcome, 1)
        self._outcomes = held + self._outcomes
        self._outcome_bytes += self._put_off_bytes
        self._put_off_bytes = 0
        self._pump(partial=True)

    def _pump(self, *, partial: bool = False) -> None:
        """Send full windows (`partial`: all outcomes), while fewer than `MAX_IN_FLIGHT` are in flight."""
        if partial:
            self._is_flushing = False
        if self._recovery.task is not None or self._closed:
            return
        if not (self._outcomes or self._started or self._again):
            self._check_idle()
            return
        connection = self._client.connection
        if connection is None:
            self._recovery.start()
            return
        while self._in_flight < MAX_IN_FLIGHT and (self._again or self._outcomes or (partial and self._started)):
            if self._again:
                self._send(connection, self._again.pop(0), [])
                continue
            if not partial and len(self._outcomes) < self._config.ack_batch:
                break
            self._send(connection, self._take_window(), self._take_actives())
        if (self._outcomes or self._started) and self._timer is None:
            self._wake()
        self._check_idle()

    def _take_window(self) -> SettleWindow:
        size = min(len(self._outcomes), self._config.ack_batch)
        if size == len(self._outcomes) and self._outcome_bytes <= LARGE_BYTES:
            window, self._outcomes, self._outcome_bytes = SettleWindow(self._outcomes), [], 0
            return window
        if self._large:
            size = 1
            self._large -= 1
        else:
            self._outcomes[:size] = sorted(self._outcomes[:size], key=_is_large)
            self._large = sum(map(_is_large, self._outcomes[:size]))
            size -= self._large
            if not size:
                size = 1
                self._large -= 1
        total = 0
        for count, outcome in enumerate(self._outcomes[:size], 1):
            total += outcome.size
            if total > MAX_CALL_BYTES and count < size:
                size, self._large = count, 0  # others still go first
                break
        window, self._outcomes = SettleWindow(self._outcomes[:size]), self._outcomes[size:]
        self._outcome_bytes -= total
        return window

    def _take_actives(self) -> list[Any]:
        """Return the `active` events of jobs that still run."""
        started, self._started = self._started, []
        actives: list[Any] = []
        for delivery in started:
            if not delivery.has_outcome:
                job = delivery.job
                actives += (job.id, job.name, delivery.started_at_ms, job.attempt + 1, for_lua(job.created_at_ms))
                delivery.started_at_ms = 0
        return actives

    def _send(self, connection: Connection, window: SettleWindow, actives: list[Any]) -> None:
        self._in_flight += 1
        self._outcomes_in_flight += len(window)
        packed = self._packed(window, actives)
        connection.request(packed, lambda reply: self._on_reply(connection, window, reply))

    def _packed(self, window: SettleWindow, actives: list[Any]) -> bytes:
        config = self._config
        stream = self._keys.stream
        if not config.events_enabled and all(outcome.result == b"" for outcome in window):
            ids = [outcome.delivery.entry_id for outcome in window]
            if self._has_xackdel:
                return pack_command(("XACKDEL", stream, config.group, "IDS", len(ids), *ids))
            return ACK.packed_call((stream,), (config.group, *ids))
        call = SettleCall(self._keys)
        self._write(window, call)
        keys: list[str] = [stream, self._keys.delayed, self._keys.dlq, self._keys.events, *call.result_keys]
        first = last = ""
        if call.others:
            window.sort(key=_is_failure)  # the reply has the codes of successes first
            keys += (*call.other_keys, self._keys.wake, self._keys.due)
            orders = [entry_order(outcome.delivery.entry_id) for outcome in window[-len(call.others) :]]
            first, last = (f"{ms}-{sequence}" for ms, sequence in (min(orders), max(orders)))
        head = (
            config.group,
            config.consumer_id,
            "1" if self._has_xackdel else "0",
            config.events_max_stream_len if config.events_enabled else 0,
            config.dlq_max_stream_len,
            config.result_ttl_secs,
            first,
            last,
            _pack((actives, call.successes, call.others)),
        )
        return pack_command(("EVALSHA", self._script.sha, len(keys), *keys, *head))

    def _write(self, window: SettleWindow, call: SettleCall) -> None:
        """Add the settle script's arguments for all outcomes. Most are successes, for which this loop makes no call."""
        successes, prefix = call.successes, self._result_prefix
        sealed = None if self._codec is None else iter(_sealed_results(window, self._codec))
        for outcome in window:
            result = outcome.result
            if result is None:
                outcome.write(call)
                continue
            delivery = outcome.delivery
            job = delivery.job
            job_id, created_at_ms = job.id, job.created_at_ms
            if result:
                call.result_keys.append(prefix + job_id)
                if sealed is not None:
                    result = next(sealed)
            successes += (
                *(delivery.entry_id, job_id, job.name, delivery.started_at_ms, outcome.finished_at_ms),
                *(outcome.runs, outcome.duration_us),
                *(created_at_ms if created_at_ms < MAX_LUA_NUMBER else str(created_at_ms), result),
            )
            delivery.started_at_ms = 0  # sent once: the window may have been written before it is sent again

    def _on_reply(self, connection: Connection, window: SettleWindow, reply: Reply) -> None:
        self._in_flight -= 1
        self._outcomes_in_flight -= len(window)
        if isinstance(reply, ServerError) and reply.kind == "NOGROUP":
            # The stream is gone, and every entry of this window with it: nothing is left to settle.
            for outcome in window:
                self._settled(outcome, SettleCode.LOST)
        elif isinstance(reply, RedisError):
            if window:
                self._keep(window, reply)
            self._recover_from(reply, connection)
            return
        else:
            if self._recovery.since is not None:
                self._recovery.accepted()
            self._on_answer(window, reply)
        self._wake_waiters()
        self._pump(partial=self._is_flushing)
        self._check_idle()

    def _on_answer(self, window: SettleWindow, reply: Reply) -> None:
        codes = failure = ""
        if isinstance(reply, list) and len(reply) == 2 and isinstance(reply[0], bytes):
            codes, failure = reply[0].decode(), reply[1].decode(errors="replace")
        elif isinstance(reply, list) and min(reply, default=1) < 1:
            # A bare acknowledgement: XACKDEL answers -1 for an entry that was no longer pending.
            codes = "".join(_WRITTEN if answer > 0 else SettleCode.LOST for answer in reply)
        elif window and not _is_failure(window[-1]):  # successes come first
            self.on_written(window)
            self.on_all_succeeded(window)
            return
        codes = codes or _WRITTEN * len(window)
        self.on_written([outcome for outcome, code in zip(window, codes, strict=True) if code == _WRITTEN])
        for outcome, code in zip(window, codes, strict=True):
            if code == _HELD:
                self._hold(outcome)
            else:
                self._settled(outcome, code)
        failure = failure.rpartition(": -")[2]  # Redis below 7 names the line of the script, of which several may fail
        if failure and failure != self._last_failure:
            logger.error("the server could not write part of a settle window: %s", failure)
        if failure or not self._put_off:
            self._last_failure = failure

    def _settled(self, outcome: Outcome, code: str) -> None:
        self._count(outcome, -1)
        outcome.delivery.done()
        self.on_settled(outcome, code)

    def _count(self, outcome: Outcome, number: int) -> None:
        """Count an outcome that is to be written, or with -1 one that is written or put off."""
        kind = type(outcome)
        if kind in self._room:
            self._room[kind] -= number

    def _check_idle(self) -> None:
        if not (self._outcomes or self._started or self._again or self._put_off or self._in_flight):
            self._idle.set()
        else:
            self._idle.clear()

    # --- recovering

    def _keep(self, window: SettleWindow, error: RedisError) -> None:
        """Keep a window that was not written, to send it again whole or in halves.

        One outcome that the server always refuses must not hold up the others. A server that refuses a request for
        its size may close the connection before its reply is read, so a window that breaks connections is split too.
        """
        is_refused = isinstance(error, ServerError) and error.remedy is Remedy.NONE and error.kind not in PASSING
        if isinstance(error, ConnectionLost):
            window.losses += 1
        if not is_refused and window.losses < MAX_LOSSES:
            self._again.append(window)
        elif len(window) > 1:
            middle = len(window) // 2
            self._again += [SettleWindow(window[:middle]), SettleWindow(window[middle:])]
        else:
            self._set_aside(window[0], error, is_too_large=is_refused and _is_about_size(error))

    def _set_aside(self, outcome: Outcome, error: RedisError, *, is_too_large: bool) -> None:
        size = outcome.size
        is_too_large = is_too_large or (size > MAX_CALL_BYTES and isinstance(error, ConnectionLost))
        if is_too_large and isinstance(outcome, Success) and outcome.result:
            logger.error("the server refused the result of job %s: %s", outcome.delivery.job.id, error)
            outcome.result = encode_no_result(f"the server refused its {size:,} bytes: {error}")
        self._hold(outcome)

    def _hold(self, outcome: Outcome) -> None:
        """Send an outcome again after `HELD_RETRY_SECS`.

        No handler waits for it in the meantime: the key may have the wrong type until an operator removes it, and a
        waiting handler would hold a slot that other queues need.
        """
        self._count(outcome, -1)
        self._put_off.append(outcome)
        self._put_off_bytes += outcome.size
        outcome.delivery.done()
        if self._put_off_timer is None and not self._closed:
            self._put_off_timer = self._loop.call_later(HELD_RETRY_SECS, self._retry_put_off)

    def _recover_from(self, error: RedisError, connection: Connection) -> None:
        if self._closed:
            return
        is_redirect = isinstance(error, ServerError) and error.kind == "ASK"
        if self._recovery.attempt in (0, 9) and not isinstance(error, ConnectionLost) and not is_redirect:
            logger.warning("the server refused a settle window; retrying: %s", error)
        self._recovery.note(error, connection)
        self._recovery.start()

    def _resume(self, connection: Connection) -> None:
        while connection is not self._client.connection and self._again and self._in_flight < MAX_IN_FLIGHT:
            self._send(connection, self._again.pop(0), [])  # an ASK redirect: these windows only
        self._pump(partial=True)

    def _on_hopeless(self, error: Error) -> None:
        """Keep trying: a worker that gave up would lose the outcomes of its handlers."""
        delay_secs = backoff_secs(self._recovery.attempt)
        logger.error("settling failed; retrying in %.1f s: %s", delay_secs, error)
        if not self._closed:
            self._loop.call_later(delay_secs, self._recovery.start)


def _sealed_results(window: SettleWindow, codec: QueueCodec) -> list[bytes]:
    outcomes = [outcome for outcome in window if isinstance(outcome, Success) and outcome.result]
    job_ids = [outcome.delivery.job.id for outcome in outcomes]
    return codec.seal_results([outcome.result for outcome in outcomes], job_ids)


def _is_failure(outcome: Outcome) -> bool:
    return not isinstance(outcome, Success)


def _is_large(outcome: Outcome) -> bool:
    return outcome.size > LARGE_BYTES


def _is_about_size(error: RedisError) -> bool:
    text = str(error)
    return "bulk length" in text or "Protocol error" in text or "maximum allowed size" in text
