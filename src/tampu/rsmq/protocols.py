"""What code needs of a client, whichever it is: write against these to stay free in the choice.

`Rsmq` and `PooledRsmq` are an `RsmqConnection`, `RsmqSync` is an `RsmqConnectionSync`. What each operation does is said
where it is done, in `queues`, `messages`, `batches` and `listening`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar, overload, runtime_checkable

from tampu.rsmq.batches import DEFAULT_MAX
from tampu.rsmq.listening import DEFAULT_POLL_SECS
from tampu.rsmq.queues import DEFAULT_DELAY_SECS, DEFAULT_MAXSIZE, DEFAULT_VT_SECS

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable, Iterator
    from contextlib import AbstractAsyncContextManager, AbstractContextManager

    from tampu.rsmq.codec import Decoder, Encoder
    from tampu.rsmq.message import QueueAttributes, RsmqMessage
    from tampu.rsmq.validate import Duration

T = TypeVar("T")

# The names `id` and `max` are those of the operations in every other client.
# ruff: noqa: A002


@runtime_checkable
class RsmqConnection(Protocol):
    """An asynchronous client."""

    async def create_queue(
        self,
        qname: str,
        vt: Duration | None = DEFAULT_VT_SECS,
        delay: Duration | None = DEFAULT_DELAY_SECS,
        maxsize: int | None = DEFAULT_MAXSIZE,
    ) -> bool: ...
    async def list_queues(self) -> list[str]: ...
    async def delete_queue(self, qname: str) -> bool: ...
    async def get_queue_attributes(self, qname: str) -> QueueAttributes: ...
    async def set_queue_attributes(
        self, qname: str, vt: Duration | None = None, maxsize: int | None = None, delay: Duration | None = None
    ) -> QueueAttributes: ...
    @overload
    async def send_message(self, qname: str, message: str | bytes, delay: Duration | None = None) -> str: ...
    @overload
    async def send_message(
        self, qname: str, message: T, delay: Duration | None = None, *, encoder: Encoder[T]
    ) -> str: ...
    @overload
    async def send_messages(
        self, qname: str, messages: Iterable[str | bytes], delay: Duration | None = None
    ) -> list[str]: ...
    @overload
    async def send_messages(
        self, qname: str, messages: Iterable[T], delay: Duration | None = None, *, encoder: Encoder[T]
    ) -> list[str]: ...
    @overload
    async def receive_message(self, qname: str, vt: Duration | None = None) -> RsmqMessage[str] | None: ...
    @overload
    async def receive_message(
        self, qname: str, vt: Duration | None = None, *, decoder: Decoder[T]
    ) -> RsmqMessage[T] | None: ...
    @overload
    async def receive_messages(
        self, qname: str, max: int = DEFAULT_MAX, vt: Duration | None = None
    ) -> list[RsmqMessage[str]]: ...
    @overload
    async def receive_messages(
        self, qname: str, max: int = DEFAULT_MAX, vt: Duration | None = None, *, decoder: Decoder[T]
    ) -> list[RsmqMessage[T]]: ...
    @overload
    async def pop_message(self, qname: str) -> RsmqMessage[str] | None: ...
    @overload
    async def pop_message(self, qname: str, *, decoder: Decoder[T]) -> RsmqMessage[T] | None: ...
    async def delete_message(self, qname: str, id: str) -> bool: ...
    async def delete_messages(self, qname: str, ids: Iterable[str]) -> int: ...
    async def change_message_visibility(self, qname: str, id: str, vt: Duration) -> bool: ...
    @overload
    def listen(
        self, qname: str, vt: Duration | None = None, *, poll_secs: float = DEFAULT_POLL_SECS
    ) -> AsyncGenerator[RsmqMessage[str]]: ...
    @overload
    def listen(
        self, qname: str, vt: Duration | None = None, *, decoder: Decoder[T], poll_secs: float = DEFAULT_POLL_SECS
    ) -> AsyncGenerator[RsmqMessage[T]]: ...
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
    @overload
    def receiving(
        self, qname: str, vt: Duration | None = None
    ) -> AbstractAsyncContextManager[RsmqMessage[str] | None]: ...
    @overload
    def receiving(
        self, qname: str, vt: Duration | None = None, *, decoder: Decoder[T]
    ) -> AbstractAsyncContextManager[RsmqMessage[T] | None]: ...
    async def close(self) -> None: ...


@runtime_checkable
class RsmqConnectionSync(Protocol):
    """A synchronous client."""

    def create_queue(
        self,
        qname: str,
        vt: Duration | None = DEFAULT_VT_SECS,
        delay: Duration | None = DEFAULT_DELAY_SECS,
        maxsize: int | None = DEFAULT_MAXSIZE,
    ) -> bool: ...
    def list_queues(self) -> list[str]: ...
    def delete_queue(self, qname: str) -> bool: ...
    def get_queue_attributes(self, qname: str) -> QueueAttributes: ...
    def set_queue_attributes(
        self, qname: str, vt: Duration | None = None, maxsize: int | None = None, delay: Duration | None = None
    ) -> QueueAttributes: ...
    @overload
    def send_message(self, qname: str, message: str | bytes, delay: Duration | None = None) -> str: ...
    @overload
    def send_message(self, qname: str, message: T, delay: Duration | None = None, *, encoder: Encoder[T]) -> str: ...
    @overload
    def send_messages(
        self, qname: str, messages: Iterable[str | bytes], delay: Duration | None = None
    ) -> list[str]: ...
    @overload
    def send_messages(
        self, qname: str, messages: Iterable[T], delay: Duration | None = None, *, encoder: Encoder[T]
    ) -> list[str]: ...
    @overload
    def receive_message(self, qname: str, vt: Duration | None = None) -> RsmqMessage[str] | None: ...
    @overload
    def receive_message(
        self, qname: str, vt: Duration | None = None, *, decoder: Decoder[T]
    ) -> RsmqMessage[T] | None: ...
    @overload
    def receive_messages(
        self, qname: str, max: int = DEFAULT_MAX, vt: Duration | None = None
    ) -> list[RsmqMessage[str]]: ...
    @overload
    def receive_messages(
        self, qname: str, max: int = DEFAULT_MAX, vt: Duration | None = None, *, decoder: Decoder[T]
    ) -> list[RsmqMessage[T]]: ...
    @overload
    def pop_message(self, qname: str) -> RsmqMessage[str] | None: ...
    @overload
    def pop_message(self, qname: str, *, decoder: Decoder[T]) -> RsmqMessage[T] | None: ...
    def delete_message(self, qname: str, id: str) -> bool: ...
    def delete_messages(self, qname: str, ids: Iterable[str]) -> int: ...
    def change_message_visibility(self, qname: str, id: str, vt: Duration) -> bool: ...
    @overload
    def listen(
        self, qname: str, vt: Duration | None = None, *, poll_secs: float = DEFAULT_POLL_SECS
    ) -> Iterator[RsmqMessage[str]]: ...
    @overload
    def listen(
        self, qname: str, vt: Duration | None = None, *, decoder: Decoder[T], poll_secs: float = DEFAULT_POLL_SECS
    ) -> Iterator[RsmqMessage[T]]: ...
    @overload
    def receiving(self, qname: str, vt: Duration | None = None) -> AbstractContextManager[RsmqMessage[str] | None]: ...
    @overload
    def receiving(
        self, qname: str, vt: Duration | None = None, *, decoder: Decoder[T]
    ) -> AbstractContextManager[RsmqMessage[T] | None]: ...
    def close(self) -> None: ...
