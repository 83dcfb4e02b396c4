"""Receive, pop and delete messages, change their visibility, and listen for them.

If the connection breaks during an operation:

| operation | what happens |
|---|---|
| `receive_message` | repeated; a message that the first attempt received reappears after its vt, so nothing is lost |
| `pop_message` | raises `OutcomeUnknownError`: a message may have been removed and is then lost (at most once) |
| `delete_message` | repeated; the second attempt may return False although the first one deleted the message |
| `change_message_visibility` | repeated; the last attempt wins |
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, overload

from tampu.base.checks import MAX_CALL_ENTRIES, check_float, check_int, split_into_calls
from tampu.errors import Error, OutcomeUnknownError, ShutdownError
from tampu.redis.client import Client, backoff_secs
from tampu.redis.connection import pack_command
from tampu.redis.faults import PASSING, ConnectionLost, ServerError, Unreachable
from tampu.rsmq.errors import QueueNotFound
from tampu.rsmq.message import Decoder, decode, decode_text
from tampu.rsmq.options import Duration, check_id
from tampu.rsmq.session import DELETE, RECEIVE, VISIBILITY, Session

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable, Sequence
    from contextlib import AbstractAsyncContextManager

    from tampu.redis.connection import Connection, Reply
    from tampu.redis.settings import ConnectionSettings
    from tampu.rsmq.message import RsmqMessage
    from tampu.rsmq.options import RsmqOptions
    from tampu.rsmq.session import Hiding, QueueKeys

# ruff: noqa: A002 - the parameters `id` and `max` have these names in other clients

T = TypeVar("T")

logger = logging.getLogger("tampu.rsmq")

DEFAULT_MAX = 10
#: How often a listener polls if it is not notified, in seconds.
DEFAULT_POLL_SECS = 1.0
#: Interval between PINGs of a subscriber, and the timeout for a reply, in seconds.
PING_EVERY_SECS = 15.0

_PING = pack_command(("PING",))

#: A message as the server replies it: ID, body, receive count, first received.
RawMessage = list[Any]
#: A message, or None; and the seconds until the next one is due, -1 if there is none.
Received = tuple[RawMessage | None, float]


class ReceiveOperations(Session):
    """Receives one message, or many, deletes them, and waits for them."""

    def __init__(self, options: RsmqOptions) -> None:
        super().__init__(options)
        #: For each listener: the subscriber's task, and the event that wakes the listener.
        self._listeners: dict[asyncio.Task[None], asyncio.Event] = {}

    @overload
    async def receive_message(self, qname: str, vt: Duration | None = None) -> RsmqMessage[str] | None: ...
    @overload
    async def receive_message(
        self, qname: str, vt: Duration | None = None, *, decoder: Decoder[T]
    ) -> RsmqMessage[T] | None: ...
    async def receive_message(
        self, qname: str, vt: Duration | None = None, *, decoder: Decoder[Any] = decode_text
    ) -> RsmqMessage[Any] | None:
        """Return the next message, hidden from others for `vt` seconds (None = the queue's `vt`), or None.

        Delete it when it has been processed; otherwise it is received again (at-least-once delivery). After `vt`
        another consumer receives the same message, even if this one is still processing it. Raises `QueueNotFound`,
        and `CannotDecodeMessage` if `decoder` fails.
        """
        queue = self._queues[qname]
        found, _ = await self._receive_one(queue, self._duration("vt", vt))
        return decode(found, decoder) if found else None

    @overload
    async def receive_messages(
        self, qname: str, max: int = DEFAULT_MAX, vt: Duration | None = None
    ) -> list[RsmqMessage[str]]: ...
    @overload
    async def receive_messages(
        self, qname: str, max: int = DEFAULT_MAX, vt: Duration | None = None, *, decoder: Decoder[T]
    ) -> list[RsmqMessage[T]]: ...
    async def receive_messages(
        self,
        qname: str,
        max: int = DEFAULT_MAX,
        vt: Duration | None = None,
        *,
        decoder: Decoder[Any] = decode_text,
    ) -> list[RsmqMessage[Any]]:
        """Return up to `max` messages that are due, each hidden for `vt` seconds (None = the queue's `vt`).

        Fewer than `max` messages do not mean that the queue is empty: a call returns at most 256 KiB. The vt of all
        messages starts now, so receive no more than you can process in that time.
        """
        queue = self._queues[qname]
        check_int("max", max, low=1)
        checked_vt = self._duration("vt", vt)
        found: list[RawMessage] = []
        while (missing := max - len(found)) > 0:
            limit = min(missing, MAX_CALL_ENTRIES)
            try:
                received, _ = await self._receive(queue, checked_vt, limit)
            except Error:
                if not found:
                    raise
                break  # the messages received so far are hidden from others: the caller must get them
            # With a vt of 0 the messages stay due, and the next call returns them again.
            repeated = {raw[0] for raw in found[-MAX_CALL_ENTRIES:]}.intersection(raw[0] for raw in received)
            found += [raw for raw in received if raw[0] not in repeated]
            if repeated or len(received) < limit:
                break
        return [decode(raw, decoder) for raw in found]

    @overload
    async def pop_message(self, qname: str) -> RsmqMessage[str] | None: ...
    @overload
    async def pop_message(self, qname: str, *, decoder: Decoder[T]) -> RsmqMessage[T] | None: ...
    async def pop_message(self, qname: str, *, decoder: Decoder[Any] = decode_text) -> RsmqMessage[Any] | None:
        """Remove the next message from the queue and return it; None if there is none. At-most-once delivery.

        If the caller fails, the message is lost. Do not wrap this call in a timeout: cancelling a pop in flight loses
        its message. Raises `QueueNotFound`, and `OutcomeUnknownError` if the connection breaks.
        """
        queue = self._queues[qname]
        try:
            found, _ = await self._receive_one(queue, "pop")
        except ConnectionLost as error:
            raise OutcomeUnknownError(
                f"{error}; a message may have been popped from queue {queue.name!r} and lost"
            ) from error
        return decode(found, decoder) if found else None

    async def delete_message(self, qname: str, id: str) -> bool:
        """Delete a message, received or not. Return False if the message or the queue does not exist.

        There is no receipt handle: the message is deleted even if its vt has passed and another consumer received it.
        """
        queue = self._queues[qname]
        deleted: bool = await self._shared(("delete", queue.name), check_id(id), partial(self._delete, queue))
        return deleted

    async def delete_messages(self, qname: str, ids: Iterable[str]) -> int:
        """Delete messages and return how many of them existed. Repeated if the connection breaks."""
        queue = self._queues[qname]
        checked = [check_id(message_id) for message_id in ids]
        deleted = 0
        for call in split_into_calls((message_id, len(message_id)) for message_id in checked):
            deleted += sum(await self._delete(queue, call))
        return deleted

    async def change_message_visibility(self, qname: str, id: str, vt: Duration) -> bool:
        """Hide a message for `vt` seconds from now; with 0 it is due at once, after those already due.

        Return False if the message does not exist. Raises `QueueNotFound`.
        """
        queue = self._queues[qname]
        message_id = check_id(id)
        arguments = (self._options.precision, self._step, self._checked("vt", vt), message_id)
        reply = await self._ask(VISIBILITY.packed_call(queue.both, arguments))
        if reply is None:
            raise QueueNotFound(queue.name)
        return bool(reply)

    @overload
    def listen(
        self, qname: str, vt: Duration | None = None, *, poll_secs: float = DEFAULT_POLL_SECS
    ) -> AsyncGenerator[RsmqMessage[str]]: ...
    @overload
    def listen(
        self, qname: str, vt: Duration | None = None, *, decoder: Decoder[T], poll_secs: float = DEFAULT_POLL_SECS
    ) -> AsyncGenerator[RsmqMessage[T]]: ...
    def listen(
        self,
        qname: str,
        vt: Duration | None = None,
        *,
        decoder: Decoder[Any] = decode_text,
        poll_secs: float = DEFAULT_POLL_SECS,
    ) -> AsyncGenerator[RsmqMessage[Any]]:
        """Yield messages as they arrive, each hidden for `vt` seconds (None = the queue's `vt`).

        Delete each message when it has been processed:

            async for message in rsmq.listen("mail"):
                await deliver(message.message)
                await rsmq.delete_message("mail", message.id)

        The listener wakes when a sender with `realtime=True` publishes, when a hidden or delayed message becomes due,
        and every `poll_secs` seconds; then it receives until the queue is empty. It retries while the server is down,
        and ends when the client is closed. Use one listener per queue and process: all of them wake for a message.
        Raises `QueueNotFound`, and `CannotDecodeMessage` if `decoder` fails.
        """
        queue = self._queues[qname]
        batches = self._batches(queue, self._duration("vt", vt), 1, check_float("poll_secs", poll_secs))
        return self._one_by_one(batches, decoder)

    @overload
    def listen_batches(
        self, qname: str, max: int = DEFAULT_MAX, vt: Duration | None = None, *, poll_secs: float = DEFAULT_POLL_SECS
    ) -> AsyncGenerator[list[RsmqMessage[str]]]: ...
    @overload
    def listen_batches(
        self,
        qname: str,
        max: int = DEFAULT_MAX,
        vt: Duration | None = None,
        *,
        decoder: Decoder[T],
        poll_secs: float = DEFAULT_POLL_SECS,
    ) -> AsyncGenerator[list[RsmqMessage[T]]]: ...
    def listen_batches(
        self,
        qname: str,
        max: int = DEFAULT_MAX,
        vt: Duration | None = None,
        *,
        decoder: Decoder[Any] = decode_text,
        poll_secs: float = DEFAULT_POLL_SECS,
    ) -> AsyncGenerator[list[RsmqMessage[Any]]]:
        """Yield lists of up to `max` messages (1 to 256), otherwise like `listen`. The vt of all starts at once."""
        queue = self._queues[qname]
        check_int("max", max, low=1, high=MAX_CALL_ENTRIES)
        batches = self._batches(queue, self._duration("vt", vt), max, check_float("poll_secs", poll_secs))
        return self._decoded(batches, decoder)

    @overload
    def receiving(
        self, qname: str, vt: Duration | None = None
    ) -> AbstractAsyncContextManager[RsmqMessage[str] | None]: ...
    @overload
    def receiving(
        self, qname: str, vt: Duration | None = None, *, decoder: Decoder[T]
    ) -> AbstractAsyncContextManager[RsmqMessage[T] | None]: ...
    @contextlib.asynccontextmanager
    async def receiving(
        self, qname: str, vt: Duration | None = None, *, decoder: Decoder[Any] = decode_text
    ) -> AsyncGenerator[RsmqMessage[Any] | None]:
        """Receive a message, or None, and delete it after the `async with` block succeeds: at-least-once delivery.

            async with rsmq.receiving("mail") as message:
                if message is not None:
                    await deliver(message.message)

        If the block raises or is cancelled, the message stays in the queue and is received again after its vt.
        """
        message = await self.receive_message(qname, vt, decoder=decoder)
        yield message
        if message is not None:
            await self.delete_message(qname, message.id)

    async def _receive_one(self, queue: QueueKeys, vt: Hiding) -> Received:
        received: Received = await self._shared(
            ("receive", queue.name, vt), None, partial(self._receive_for_callers, queue, vt)
        )
        return received

    async def _receive(self, queue: QueueKeys, vt: Hiding, limit: int) -> tuple[list[RawMessage], float]:
        """Receive up to `limit` messages in one call, and return the seconds until the next one if none is due."""
        is_plain = vt is None and limit == 1 and self._is_plain
        how = () if is_plain else (self._options.precision, self._step, "" if vt is None else vt, limit)
        packed = RECEIVE.packed_call(queue.both, how)
        while True:
            # A second pop would lose the message of the first; a second receive only delays it by its vt.
            reply = await self._ask(packed, resend=vt != "pop")
            if type(reply) is not list:
                self._check_reply(reply, queue, "vt")
            if reply[0]:
                self._check_unit(queue, "vt", reply[0])
            if len(reply) > 2:
                return [reply[at : at + 4] for at in range(1, len(reply), 4)], 0.0
            if reply[1] < 0:
                return [], -1.0
            if reply[1] > 0:
                return [], reply[1] / (1000 if self._options.precision == "ms" else 1_000_000)
            # The script stopped early, at its limit of members without a body: there may be messages after them.

    async def _receive_for_callers(
        self, queue: QueueKeys, vt: Hiding, callers: Sequence[None]
    ) -> Sequence[Received | Exception]:
        """Receive one message for each caller, if there are enough."""
        outcomes: list[Received | Exception] = []
        while missing := len(callers) - len(outcomes):
            try:
                found, wait = await self._receive(queue, vt, missing)
            except Exception as error:  # messages received before it belong to the first callers
                return [*outcomes, *[error] * missing]
            outcomes += [(raw, 0.0) for raw in found] or [(None, wait)] * missing
        return outcomes

    async def _delete(self, queue: QueueKeys, message_ids: Sequence[str]) -> list[bool]:
        """Delete messages in one call and return for each ID whether it existed."""
        reply: bytes = await self._ask(DELETE.packed_call(queue.both, message_ids))
        return [each == ord("1") for each in reply]

    async def _one_by_one(
        self, batches: AsyncGenerator[list[RawMessage]], decoder: Decoder[Any]
    ) -> AsyncGenerator[RsmqMessage[Any]]:
        async with contextlib.aclosing(batches):
            async for (fields,) in batches:
                yield decode(fields, decoder)

    async def _decoded(
        self, batches: AsyncGenerator[list[RawMessage]], decoder: Decoder[Any]
    ) -> AsyncGenerator[list[RsmqMessage[Any]]]:
        async with contextlib.aclosing(batches):
            async for batch in batches:
                yield [decode(fields, decoder) for fields in batch]

    async def _batches(
        self, queue: QueueKeys, vt: int | None, limit: int, poll_secs: float
    ) -> AsyncGenerator[list[RawMessage]]:
        wake = asyncio.Event()
        subscriber = Subscriber(self._options.connection_settings(), queue.channel, wake)
        subscription = asyncio.get_running_loop().create_task(subscriber.run(), name=f"tampu-rsmq-{queue.name}")
        self._listeners[subscription] = wake
        failures = 0
        try:
            while True:
                # Cleared before the receive: a message sent after it sets the event again.
                wake.clear()
                try:
                    found, wait = await self._receive(queue, vt, limit)
                except ShutdownError:
                    return
                except (Unreachable, ConnectionLost, ServerError) as error:
                    if isinstance(error, ServerError) and error.kind not in PASSING:
                        raise
                    if not failures:
                        logger.warning("cannot receive from RSMQ queue %s; retrying: %s", queue.name, error)
                    failures += 1
                    await asyncio.sleep(backoff_secs(failures))
                    continue
                failures = 0
                if found:
                    yield found
                    continue
                pause = poll_secs if wait < 0 else min(wait, poll_secs)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await wake.wait()
        finally:
            await self._end(subscription)

    async def _end_listeners(self) -> None:
        """End all subscribers and wake the listeners, which then find the client closed."""
        for subscription, wake in list(self._listeners.items()):
            wake.set()
            await self._end(subscription)

    async def _end(self, subscription: asyncio.Task[None]) -> None:
        self._listeners.pop(subscription, None)
        subscription.cancel()
        await asyncio.gather(subscription, return_exceptions=True)


class Subscriber:
    """Subscribes to the channel of a queue on its own connection, and reconnects whenever that breaks.

    Sets `wake` for each notification, and for each new connection: messages may have been sent in between.
    """

    def __init__(self, settings: ConnectionSettings, channel: bytes, wake: asyncio.Event) -> None:
        self._client = Client(settings, channel, response_timeout_secs=PING_EVERY_SECS)
        self._channel = channel
        self._wake = wake
        self._is_down = False

    async def run(self) -> None:
        """Stay subscribed until cancelled. Retries every failure: listeners poll meanwhile."""
        attempt = 0
        try:
            while True:
                try:
                    connection = await self._client.up()
                    await self._subscribe(connection)
                    attempt = 0
                    await self._stay(connection)
                except Error as error:
                    if not self._is_down:
                        logger.warning("subscription to %s lost; polling instead: %s", self._channel.decode(), error)
                    self._is_down = True
                attempt += 1
                await asyncio.sleep(backoff_secs(attempt))
        finally:
            await self._client.close()

    async def _subscribe(self, connection: Connection) -> None:
        connection.on_push = self._on_reply
        await connection.ask("SUBSCRIBE", self._channel)
        if self._is_down:
            logger.info("subscription to %s restored", self._channel.decode())
        self._is_down = False
        self._wake.set()

    async def _stay(self, connection: Connection) -> None:
        """Wait until the connection is lost. PINGs detect a server that vanished without closing it."""
        lost = asyncio.Event()
        connection.on_loss(lost.set)
        while not lost.is_set() and connection.is_up:
            connection.request(_PING, self._on_reply)
            try:
                async with asyncio.timeout(PING_EVERY_SECS):
                    await lost.wait()
            except TimeoutError:
                continue
        if connection.loss is not None:
            raise connection.loss

    def _on_reply(self, reply: Reply) -> None:
        # Replies to PINGs arrive here, too; one may be a notification that the server sent before its PONG.
        if isinstance(reply, list) and reply[0] == b"message":
            self._wake.set()
