"""The chain: numbers the windows of one producer, so that sending one again is safe.

The server applies window n only after n - 1 and remembers its reply. After a lost connection the windows without a
reply are sent again in order, with the same numbers, and each is applied exactly once. Number 1 is the *opening*, an
empty window that is confirmed before any other is sent: a server that has forgotten the chain (its key expired, was
evicted, or was lost in a failover) answers the others with a gap instead of applying them a second time.

| reply to a window | meaning | then |
|---|---|---|
| ok | applied, now or when it was first sent | its adds return |
| taken back | the transaction of a window of large jobs was not applied | sent again through the script |
| gap | an earlier window is missing | sent again, numbered after the last one applied |
| gap, and the chain is forgotten | not applied now | sent again in a new chain; if a reply was lost, its adds raise |
| full | overflow="wait" and no room | sent again a little later, with the same number |
| a transient error (LOADING, BUSY, MOVED ...) | not applied | sent again after the remedy |
| any other error | not applied | its adds raise; windows behind it are renumbered |
| connection lost | unknown | sent again with the same number |
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from tampu.errors import Error, OutcomeUnknownError, RedisError, ShutdownError
from tampu.produce.window import Opening
from tampu.redis.connection import pack_command
from tampu.redis.faults import ConnectionLost, Remedy, remedy_of
from tampu.redis.resend import Recovery
from tampu.redis.scripts import AddCode
from tampu.wire.job import JobId

if TYPE_CHECKING:
    from collections.abc import Callable

    from tampu.produce.window import SingleWindow, Window, WindowHeader
    from tampu.redis.client import Client
    from tampu.redis.connection import Connection, Reply

logger = logging.getLogger("tampu.producer")

#: Maximum number of windows in flight. The script remembers the replies of the last 8, so it must not exceed that.
MAX_IN_FLIGHT = 4
#: How long the server remembers an idle chain, in seconds.
CHAIN_TTL_SECS = 3600
#: How often the chain's TTL is renewed, in seconds.
TTL_RENEWAL_SECS = CHAIN_TTL_SECS / 60
#: How long a producer that closes waits for the server to delete its chain, in seconds.
FORGET_SECS = 0.2


class Chain:
    """Sends windows in order. The module docstring lists what each reply leads to."""

    def __init__(
        self,
        client: Client,
        make_header: Callable[[str], WindowHeader],
        *,
        patience_secs: float = 10.0,
        min_replicas: int = 0,
        min_replicas_timeout_ms: int = 1000,
    ) -> None:
        self._client = client
        self._make_header = make_header
        self._min_replicas = min_replicas
        self._wait = pack_command(("WAIT", min_replicas, min_replicas_timeout_ms))
        self._now = time.time
        self._queue: deque[Window] = deque()
        #: Sent and not answered, in order, all on `_connection`.
        self._sent: deque[Window] = deque()
        self._connection: Connection | None = None
        #: The connection that was last asked whether transactions may be used, and the answer.
        self._probed: Connection | None = None
        self._can_use_multi = False
        #: Answered, but to be sent again, in order.
        self._again: list[Window] = []
        self._recovery = Recovery(client, "chain", self._resume, self._give_up, patience_secs)
        self._drained: asyncio.Event | None = None
        self._closed = False
        #: Confirmed windows that a failover lost. They cannot be recovered, so they are counted and logged.
        self.windows_lost_by_server = 0
        self.windows_sent_again = 0
        self._begin()

    def _begin(self) -> None:
        """Start a new chain, with a new id. Its number 1 is the opening."""
        self.id = uuid.uuid4().hex
        self._header = self._make_header(self.id)
        #: True if `send_single` may be used: the window only needs a number and never waits for room.
        self._is_plain = not self._min_replicas and self._header.has_short_form
        self._confirmed = 0
        self._next_number = Opening.number + 1
        #: True while the first window waits for room in the queue; those behind it are not sent meanwhile.
        self._waits_for_room = False
        #: True if a window was given up that may be applied, wholly or in part: its number cannot be used again.
        self._has_spent_number = False
        self._ttl_set_at = float("-inf")

    # --- what the producer calls

    def submit(self, window: Window) -> None:
        """Send this window after those submitted before it."""
        if self._closed:
            self._fail(window, ShutdownError("the producer is closed"))
            return
        self._queue.append(window)
        self._pump()

    def send_single(self, window: SingleWindow) -> bool:
        """Send the window of one job if the chain is idle. Return False if it has to be submitted.

        A faster `submit` for callers that add one job at a time and wait for each.
        """
        connection = self._client.connection
        now = self._now()
        if (
            connection is None
            or not self._is_plain
            or not self.is_idle()
            or self._recovery.task is not None
            or self._recovery.since is not None
            or self._closed
            or now - self._ttl_set_at > TTL_RENEWAL_SECS
        ):
            return False
        self._connection = connection
        window.number = self._next_number
        self._next_number += 1
        self._sent.append(window)
        packed = self._header.packed_single(window.number, window.name, window.envelope)
        connection.request(packed, partial(self._on_single_reply, window))
        return True

    async def drain(self, timeout_secs: float) -> None:
        """Wait until every submitted window was answered, for up to `timeout_secs`."""
        if self.is_idle():
            return
        self._drained = asyncio.Event()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._drained.wait(), timeout_secs)

    def is_idle(self) -> bool:
        """Return True if every submitted window was answered."""
        return not (self._queue or self._sent or self._again)

    def abandon(self) -> None:
        """Drop all windows and begin a new chain: the old one belongs to a fork's parent or to another event loop."""
        self._queue.clear()
        self._sent.clear()
        self._again.clear()
        self._recovery.abandon()
        self._begin()

    def close(self) -> None:
        """Give up windows without a reply: their adds raise."""
        self._closed = True
        self._recovery.stop()
        self._give_up(ShutdownError("the producer was closed before the server confirmed this job"))

    async def forget(self) -> None:
        """Delete the chain's state on the server. If that fails, or a window has no reply, the state expires later."""
        connection = self._client.connection
        if connection is not None and self._confirmed:
            with contextlib.suppress(Error, TimeoutError):
                async with asyncio.timeout(FORGET_SECS):
                    await connection.ask("DEL", self._header.chain_key)

    # --- sending

    def _pump(self) -> None:
        if self._recovery.task is not None or self._again or self._waits_for_room:
            return
        connection = self._client.connection
        if connection is None:
            if self._queue:
                self._recovery.start()
            return
        if self._sent and self._connection is not connection:
            return  # an ASK redirect: replies must come in order, over one connection
        self._connection = connection
        queue, sent = self._queue, self._sent
        if not sent and self._confirmed and self._now() - self._ttl_set_at > CHAIN_TTL_SECS / 2:
            self._begin()  # the server forgets an idle chain, which is safe to leave with nothing in flight
        if not self._confirmed:
            if queue and not sent:
                self._send(connection, Opening())
            return
        while queue and len(sent) < MAX_IN_FLIGHT:
            window = queue.popleft()
            window.number = self._next_number
            self._next_number += 1
            self._send(connection, window)

    def _send(self, connection: Connection, window: Window) -> None:
        self._sent.append(window)
        # The chain's TTL is renewed at intervals: with every window it would cost a tenth of the server's time. A
        # window sent again may only fetch its reply; the TTL makes it a write, which WAIT needs to wait for.
        if window.may_be_applied or self._now() - self._ttl_set_at > TTL_RENEWAL_SECS:
            window.chain_ttl_secs = CHAIN_TTL_SECS
        if (
            window.large is not None
            and self._is_plain
            and self._can_use_multi_on(connection)
            and not window.was_transacted
        ):
            window.was_transacted = True
            pieces, count = self._header.pieces(window, window.large)
            connection.request_pieces(pieces, count, partial(self._on_transaction, window))
            return
        packed = window.packed(self._header)
        if self._min_replicas and window.ids:
            window.replicas = 0
            connection.request(packed, lambda reply: setattr(window, "reply", reply))
            connection.request(self._wait, lambda count: self._on_replicas(window, count))
        else:
            connection.request(packed, partial(self._on_reply, window))

    def _can_use_multi_on(self, connection: Connection) -> bool:
        """Return True if large jobs may be sent in transactions. An ACL or a proxy may forbid what they need.

        Asked once for each connection; until the answer arrives, the script sends them.
        """
        if self._probed is not connection:
            self._probed, self._can_use_multi = connection, False

            def on_probed(replies: list[Reply]) -> None:
                self._can_use_multi = self._probed is connection and replies[-1] == [1]

            if connection is self._client.connection:  # not one that follows an ASK redirect
                connection.request_pieces([self._header.transaction_probe], 3, on_probed)
        return self._can_use_multi

    def _on_transaction(self, window: Window, replies: list[Reply]) -> None:
        """Handle the replies to a window of large jobs; the last one is that of EXEC."""
        last = replies[-1]
        if isinstance(last, ConnectionLost):
            self._on_reply(window, last)
            return
        added, committed = (last[:-1], last[-1]) if isinstance(last, list) else ([], 0)
        are_added = [isinstance(entry_id, bytes) for entry_id in added]
        if committed == 1 and all(are_added):
            self._on_reply(window, b"")
        elif committed == 0 or (committed != 1 and not any(are_added)):
            # Nothing was applied: the transaction was refused or taken back. The script's reply will say why.
            self._on_reply(window, [b"gap", self._confirmed])
        else:
            # Part of it may be applied, and sending it again would add that twice.
            window.may_be_applied = True
            why = next((reply for reply in last if isinstance(reply, Exception)), committed)
            self._on_reply(window, RedisError(f"the server did not carry out the whole transaction: {why}"))

    def _on_replicas(self, window: Window, count: Reply) -> None:
        """Handle the reply to WAIT, which arrives after the reply to the window."""
        window.replicas = 0 if isinstance(count, Exception) else count
        self._on_reply(window, count if isinstance(count, ConnectionLost) else window.reply)

    def _on_single_reply(self, window: SingleWindow, reply: Reply) -> None:
        if reply == b"" and not self._queue and self._sent and self._sent[0] is window and self._drained is None:
            self._sent.popleft()
            self._confirmed = window.number
            if not window.future.done():  # done if its caller was cancelled
                window.future.set_result(JobId(window.job_id))
        else:
            self._on_reply(window, reply)

    def _on_reply(self, window: Window, reply: Reply) -> None:
        sent = self._sent
        if not sent or sent[0] is not window:
            return  # a reply to a window that was given up meanwhile
        sent.popleft()
        if isinstance(reply, Error):
            self._on_error(window, reply)
        elif not reply or reply[0] == b"ok":
            self._on_applied(window, reply)
        elif reply[0] == b"gap":
            self._on_gap(window, reply[1])
        else:
            self._waits_for_room = True
            self._confirmed = max(self._confirmed, window.number - 1)
            window.codes = reply[2].decode()
            self._recovery.since = None
            self._send_again(window)
        if self._again and not self._sent and not self._closed:
            self._recovery.start()
        elif self._queue:
            self._pump()
        if self._drained is not None and self.is_idle():
            self._drained.set()

    def _on_applied(self, window: Window, reply: Reply) -> None:
        if window.number > self._confirmed:  # one sent again may be answered after its successor
            self._confirmed = window.number
        self._recovery.accepted()
        self._waits_for_room = False
        if window.chain_ttl_secs:
            self._ttl_set_at = self._now()
        if reply:
            window.codes, window.failure = reply[1].decode(), reply[2].decode(errors="replace")
        if window.replicas < self._min_replicas:
            window.codes = (window.codes or AddCode.ADDED * len(window.ids)).replace(AddCode.ADDED, AddCode.UNKNOWN)
            window.error = OutcomeUnknownError(
                f"the job was added, but only {window.replicas} of {self._min_replicas} replicas confirmed it in time: "
                "a failover may lose it",
                ids=[job_id for job_id, code in zip(window.ids, window.codes, strict=True) if code == AddCode.UNKNOWN],
            )
        window.resolve()

    def _on_gap(self, window: Window, last: int) -> None:
        if last < self._confirmed:
            lost = self._confirmed - max(last, Opening.number)
            self.windows_lost_by_server += lost
            logger.warning(
                "the server forgot %d confirmed windows of chain %s (a failover, a flush, or the chain's key was "
                "evicted or expired); starting a new chain",
                lost,
                self.id,
            )
            self._begin()
        if not self._confirmed:  # a window of a forgotten chain
            if last:  # the server's data are older than this window, or gone: it is not applied
                window.may_be_applied, window.codes = False, ""
            elif window.may_be_applied or window.codes:
                self._fail(window, RedisError("the server forgot which windows of this producer it has applied"))
                return
        self._send_again(window)

    def _on_error(self, window: Window, error: Error) -> None:
        is_lost = isinstance(error, ConnectionLost)
        if isinstance(window, Opening):
            if is_lost:
                self._begin()  # a copy that arrives late must not open a chain that is in use and was forgotten
            if remedy_of(error) in (Remedy.NONE, Remedy.MAKE_GROUP):
                self._fail(self._queue.popleft(), error)
            else:
                self._send_again(window, error)
        elif is_lost:
            window.may_be_applied = True
            self._send_again(window, error)
        elif remedy_of(error) in (Remedy.NONE, Remedy.MAKE_GROUP):
            if window.codes or window.may_be_applied:
                self._has_spent_number = True
            self._waits_for_room = False
            self._fail(window, error)
        else:
            self._send_again(window, error)

    def _send_again(self, window: Window, error: Error | None = None) -> None:
        if isinstance(error, RedisError):
            self._recovery.note(error, self._connection)
        self.windows_sent_again += 1
        self._again.append(window)

    # --- recovering

    def _resume(self, connection: Connection) -> None:
        """Send windows without a reply again, in order, then the queued ones."""
        self._connection = connection
        self._close_gap()
        again, self._again = self._again, []
        if not self._confirmed:  # a new chain: its opening goes first, alone
            self._queue.extendleft(reversed([window for window in again if not isinstance(window, Opening)]))
            self._next_number = Opening.number + 1
            again = [Opening()] if self._queue else []
        behind = again[1:]
        if self._waits_for_room and behind and not self._has_spent_number and not any(w.may_be_applied for w in behind):
            self._queue.extendleft(reversed(again[1:]))
            del again[1:]
            self._next_number = again[0].number + 1
        for window in again:
            self._send(connection, window)
        self._pump()

    def _close_gap(self) -> None:
        """Renumber the windows behind one that was refused for good."""
        if self._again and self._again[0].number <= self._confirmed + 1:
            return  # no number is missing
        # A window that was in flight when a connection broke may still be applied with its old number.
        stray = [window for window in self._again if window.may_be_applied]
        if stray:
            self._has_spent_number = True
            self._again = [window for window in self._again if not window.may_be_applied]
        if self._has_spent_number:
            self._begin()
        self._next_number = self._confirmed + 1
        for window in self._again:
            window.number = self._next_number
            self._next_number += 1
        for window in stray:
            self._fail(window, RedisError("the connection broke, and then the server refused a job added earlier"))

    def _give_up(self, error: Error) -> None:
        """Fail all windows. Ids that may have been added are named, and their numbers are never used again."""
        for window in self._sent:
            window.may_be_applied = True
        unanswered = [*self._sent, *self._again]
        if unanswered:
            self._begin()
        waiting = [*unanswered, *self._queue]
        self._sent.clear()
        self._again.clear()
        self._queue.clear()
        self._recovery.accepted()
        self._waits_for_room = False
        for window in waiting:
            self._fail(window, error)
        if self._drained is not None:
            self._drained.set()

    def _fail(self, window: Window, error: Error) -> None:
        if window.may_be_applied:
            error = OutcomeUnknownError(
                f"{error}; the jobs in .ids may or may not have been added: check before adding them again",
                ids=window.ids[len(window.codes) :],
            )
        window.error = error
        window.resolve()
