"""One queue whose messages are all of one type."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable
    from contextlib import AbstractAsyncContextManager

    from tampu.rsmq.codec import Decoder, Encoder
    from tampu.rsmq.message import RsmqMessage
    from tampu.rsmq.protocols import RsmqConnection
    from tampu.rsmq.validate import Duration

T = TypeVar("T")


class TypedQueue(Generic[T]):
    """A view of a queue: its name, encoder and decoder are given once. Made by `rsmq.queue(...)`.

        invoices = rsmq.queue("invoices", encoder=msgspec.json.encode, decoder=msgspec.json.Decoder(Invoice).decode)
        await invoices.send(Invoice(...))

    Each method does what the client's method of the longer name does.
    """

    def __init__(self, rsmq: RsmqConnection, qname: str, encoder: Encoder[T], decoder: Decoder[T]) -> None:
        self._rsmq = rsmq
        self._qname = qname
        self._encoder = encoder
        self._decoder = decoder

    @property
    def qname(self) -> str:
        """The queue's name."""
        return self._qname

    async def send(self, message: T, delay: Duration | None = None) -> str:
        """Put a message into the queue; its id."""
        return await self._rsmq.send_message(self._qname, message, delay, encoder=self._encoder)

    async def send_many(self, messages: Iterable[T], delay: Duration | None = None) -> list[str]:
        """Put messages into the queue; their ids."""
        return await self._rsmq.send_messages(self._qname, messages, delay, encoder=self._encoder)

    async def receive(self, vt: Duration | None = None) -> RsmqMessage[T] | None:
        """The next message, hidden for `vt`."""
        return await self._rsmq.receive_message(self._qname, vt, decoder=self._decoder)

    async def receive_many(self, most: int, vt: Duration | None = None) -> list[RsmqMessage[T]]:
        """Up to `most` messages, each hidden for `vt`."""
        return await self._rsmq.receive_messages(self._qname, most, vt, decoder=self._decoder)

    async def pop(self) -> RsmqMessage[T] | None:
        """The next message, taken out for good."""
        return await self._rsmq.pop_message(self._qname, decoder=self._decoder)

    async def delete(self, message: RsmqMessage[T] | str) -> bool:
        """Delete a message, or the one with this id."""
        return await self._rsmq.delete_message(self._qname, message if isinstance(message, str) else message.id)

    def receiving(self, vt: Duration | None = None) -> AbstractAsyncContextManager[RsmqMessage[T] | None]:
        """Receive a message and delete it when the block succeeds."""
        return self._rsmq.receiving(self._qname, vt, decoder=self._decoder)

    def listen(self, vt: Duration | None = None) -> AsyncGenerator[RsmqMessage[T]]:
        """Messages as they come."""
        return self._rsmq.listen(self._qname, vt, decoder=self._decoder)
