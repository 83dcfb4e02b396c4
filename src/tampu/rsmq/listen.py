"""`listen`, `listen_batches` and `receiving`: consume messages without writing a polling loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any, TypeVar, overload

from tampu.base.checks import MAX_CALL_ENTRIES, check_float, check_int
from tampu.errors import Error, ShutdownError
from tampu.redis.client import Client, backoff_secs
from tampu.redis.connection import pack_command
from tampu.redis.faults import PASSING, ConnectionLost, ServerError, Unreachable
from tampu.rsmq.message import Decoder, decode, decode_text
from tampu.rsmq.options import Duration, check_duration
from tampu.rsmq.receive import DEFAULT_MAX, RawMessage, ReceiveOperations

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from tampu.redis.connection import Connection, Reply
    from tampu.redis.settings import ConnectionSettings
    from tampu.rsmq.message import RsmqMessage
    from tampu.rsmq.options import RsmqOptions
    from tampu.rsmq.session import QueueKeys

T = TypeVar("T")

logger = logging.getLogger("tampu.rsmq")

#: How often a listener polls if it is not notified, in seconds.
DEFAULT_POLL_SECS = 1.0
#: Interval between PINGs of a subscriber, and the timeout for a reply, in seconds.
PING_EVERY_SECS = 15.0

_PING = pack_command(("PING",))


class ListenOperations(ReceiveOperations):
    """Waits for messages."""

    def __init__(self, options: RsmqOptions) -> None:
        super().__init__(options)
        #: For each listener: the subscriber's task, and the event that wakes the listener.
        self._listeners: dict[asyncio.Task[None], asyncio.Event] = {}

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
        checked_vt = None if vt is None else check_duration("vt", vt, self._options.unit)
        check_float("poll_secs", poll_secs)
        return self._one_by_one(self._batches(queue, checked_vt, 1, poll_secs), decoder)

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
        max: int = DEFAULT_MAX,  # noqa: A002 - as in `receive_messages`
        vt: Duration | None = None,
        *,
        decoder: Decoder[Any] = decode_text,
        poll_secs: float = DEFAULT_POLL_SECS,
    ) -> AsyncGenerator[list[RsmqMessage[Any]]]:
        """Yield lists of up to `max` messages (1 to 256), otherwise like `listen`. The vt of all starts at once."""
        queue = self._queues[qname]
        check_int("max", max, low=1, high=MAX_CALL_ENTRIES)
        checked_vt = None if vt is None else check_duration("vt", vt, self._options.unit)
        check_float("poll_secs", poll_secs)
        return self._decoded(self._batches(queue, checked_vt, max, poll_secs), decoder)

    @overload
    def receiving(
        self, qname: str, vt: Duration | None = None
    ) -> contextlib.AbstractAsyncContextManager[RsmqMessage[str] | None]: ...

    @overload
    def receiving(
        self, qname: str, vt: Duration | None = None, *, decoder: Decoder[T]
    ) -> contextlib.AbstractAsyncContextManager[RsmqMessage[T] | None]: ...

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
        self, queue: QueueKeys, vt: int | None, most: int, poll_secs: float
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
                    found, wait = await self._receive(queue, vt, most)
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
