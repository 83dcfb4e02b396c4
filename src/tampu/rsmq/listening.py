"""Consuming without a polling loop of one's own: `listen` and `receiving`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any, TypeVar, overload

from tampu.checks import check_float, check_int
from tampu.errors import ShutdownError
from tampu.redis.faults import PASSING, ConnectionLost, ServerError, Unreachable
from tampu.redis.pipe import backoff_secs
from tampu.rsmq.batches import DEFAULT_MAX, STEP_MESSAGES
from tampu.rsmq.codec import Decoder, decode, decode_text
from tampu.rsmq.messages import MessageOperations
from tampu.rsmq.subscriber import Subscriber
from tampu.rsmq.validate import Duration, check_duration

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from tampu.rsmq.keys import QueueKeys
    from tampu.rsmq.message import RsmqMessage
    from tampu.rsmq.options import RsmqOptions
    from tampu.rsmq.taking import Fields

T = TypeVar("T")

logger = logging.getLogger("tampu.rsmq")

#: How often a listener that hears nothing looks into the queue, in seconds.
DEFAULT_POLL_SECS = 1.0


class ListeningOperations(MessageOperations):
    """Listening, on any session."""

    def __init__(self, options: RsmqOptions) -> None:
        super().__init__(options)
        #: Of each listener the subscriber's task, and what makes it look.
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
        """Messages as they come, each received (hidden for `vt`): delete it when it is done with.

            async for message in rsmq.listen("mail"):
                await deliver(message.message)
                await rsmq.delete_message("mail", message.id)

        It wakes when a sender with `realtime=True` publishes, when a message that waits becomes due, and every
        `poll_secs`; then it receives until the queue is empty. It goes on through a server that is away, and ends when
        the client is closed. One listener for each queue and process is enough: several wake for the same message.
        """
        queue = self._queues[qname]
        checked_vt = None if vt is None else check_duration("vt", vt, self._options.unit)
        check_float("poll_secs", poll_secs)
        return self._one_by_one(self._hear(queue, checked_vt, 1, poll_secs), decoder)

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
        """As `listen`, up to `max` messages at a time. The vt of all of them runs from then on."""
        queue = self._queues[qname]
        check_int("max", max, low=1, high=STEP_MESSAGES)
        checked_vt = None if vt is None else check_duration("vt", vt, self._options.unit)
        check_float("poll_secs", poll_secs)
        return self._decoded(self._hear(queue, checked_vt, max, poll_secs), decoder)

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
        """Receive a message, or None, and delete it when the block succeeds: at least once.

            async with rsmq.receiving("mail") as message:
                if message is not None:
                    await deliver(message.message)

        A block that raises, or is cancelled, leaves the message where it is; it comes again when its vt has passed.
        """
        message = await self.receive_message(qname, vt, decoder=decoder)
        yield message
        if message is not None:
            await self.delete_message(qname, message.id)

    async def _one_by_one(
        self, batches: AsyncGenerator[list[Fields]], decoder: Decoder[Any]
    ) -> AsyncGenerator[RsmqMessage[Any]]:
        async with contextlib.aclosing(batches):
            async for (fields,) in batches:
                yield decode(fields, decoder)

    async def _decoded(
        self, batches: AsyncGenerator[list[Fields]], decoder: Decoder[Any]
    ) -> AsyncGenerator[list[RsmqMessage[Any]]]:
        async with contextlib.aclosing(batches):
            async for batch in batches:
                yield [decode(fields, decoder) for fields in batch]

    async def _hear(
        self, queue: QueueKeys, vt: int | None, most: int, poll_secs: float
    ) -> AsyncGenerator[list[Fields]]:
        heard = asyncio.Event()
        subscriber = Subscriber(self._options.connection_settings(), queue.channel, heard)
        hearing = asyncio.get_running_loop().create_task(subscriber.run(), name=f"tampu-rsmq-{queue.name}")
        self._listeners[hearing] = heard
        failures = 0
        try:
            while True:
                # Before the look into the queue: what is sent after that look wakes us.
                heard.clear()
                try:
                    found, wait = await self._take(queue, vt, most)
                except ShutdownError:
                    return
                except (Unreachable, ConnectionLost, ServerError) as error:
                    if isinstance(error, ServerError) and error.kind not in PASSING:
                        raise
                    if not failures:
                        logger.warning("RSMQ queue %s cannot be received from, trying on: %s", queue.name, error)
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
                        await heard.wait()
        finally:
            await self._end(hearing)

    async def _end_listeners(self) -> None:
        """End the subscribers, also of listeners that nobody closed, and have those at work see that it is over."""
        for hearing, heard in list(self._listeners.items()):
            heard.set()
            await self._end(hearing)

    async def _end(self, hearing: asyncio.Task[None]) -> None:
        self._listeners.pop(hearing, None)
        hearing.cancel()
        await asyncio.gather(hearing, return_exceptions=True)
