"""`RsmqSync`: the same operations for programs without an event loop, and for threads."""

from __future__ import annotations

import contextlib
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any, Self, TypeVar, overload

from tampu.errors import ShutdownError
from tampu.loop_thread import LoopThread
from tampu.rsmq.batches import DEFAULT_MAX
from tampu.rsmq.client import Rsmq
from tampu.rsmq.codec import Decoder, Encoder, decode_text
from tampu.rsmq.listening import DEFAULT_POLL_SECS
from tampu.rsmq.options import RsmqOptions, as_options
from tampu.rsmq.queues import DEFAULT_DELAY_SECS, DEFAULT_MAXSIZE, DEFAULT_VT_SECS

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Coroutine, Iterable, Iterator
    from types import TracebackType

    from tampu.rsmq.message import QueueAttributes, RsmqMessage
    from tampu.rsmq.validate import Duration

T = TypeVar("T")

# The names `id` and `max` are those of the operations in every other client.
# ruff: noqa: A002


class RsmqSync:
    """RSMQ for synchronous code. Any number of threads may share it; a forked child connects anew.

        with RsmqSync("redis://127.0.0.1:6379") as rsmq:
            rsmq.send_message("mail", "hello")

    Each method does, and promises, what its namesake of `Rsmq` does. Inside a coroutine use `Rsmq`: these calls block.
    """

    def __init__(self, options: RsmqOptions | str | None = None) -> None:
        self._options = as_options(options)
        self._thread = LoopThread()
        self._rsmq = Rsmq(self._options)
        self._closed = False

    @property
    def options(self) -> RsmqOptions:
        """The options this client was made with."""
        return self._options

    # --- its life

    @classmethod
    def connect(cls, options: RsmqOptions | str | None = None) -> Self:
        """A client that is connected; raises what stands in the way."""
        return cls(options).open()

    def open(self) -> Self:
        """Connect now; raises what stands in the way."""
        self._run(self._rsmq.open())
        return self

    def close(self) -> None:
        """Close the connection for good and end the thread. Listeners in other threads end."""
        if not self._closed:
            self._closed = True
            self._thread.run(self._rsmq.close())
            self._thread.stop()

    def quit(self) -> None:
        """`close`, by its name in JavaScript."""
        self.close()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- queues

    def create_queue(
        self,
        qname: str,
        vt: Duration | None = DEFAULT_VT_SECS,
        delay: Duration | None = DEFAULT_DELAY_SECS,
        maxsize: int | None = DEFAULT_MAXSIZE,
    ) -> bool:
        """Make a queue."""
        return self._run(self._rsmq.create_queue(qname, vt, delay, maxsize))

    def list_queues(self) -> list[str]:
        """The names of all queues, sorted."""
        return self._run(self._rsmq.list_queues())

    def delete_queue(self, qname: str) -> bool:
        """Delete a queue with all its messages."""
        return self._run(self._rsmq.delete_queue(qname))

    def get_queue_attributes(self, qname: str) -> QueueAttributes:
        """The attributes and counters of a queue."""
        return self._run(self._rsmq.get_queue_attributes(qname))

    def set_queue_attributes(
        self, qname: str, vt: Duration | None = None, maxsize: int | None = None, delay: Duration | None = None
    ) -> QueueAttributes:
        """Change the attributes that are given and read all."""
        return self._run(self._rsmq.set_queue_attributes(qname, vt, maxsize, delay))

    # --- messages

    @overload
    def send_message(self, qname: str, message: str | bytes, delay: Duration | None = None) -> str: ...

    @overload
    def send_message(self, qname: str, message: T, delay: Duration | None = None, *, encoder: Encoder[T]) -> str: ...

    def send_message(
        self, qname: str, message: Any, delay: Duration | None = None, *, encoder: Encoder[Any] | None = None
    ) -> str:
        """Put a message into a queue and give its id."""
        return self._run(self._rsmq.send_message(qname, message, delay, encoder=encoder or _as_is))

    @overload
    def send_messages(
        self, qname: str, messages: Iterable[str | bytes], delay: Duration | None = None
    ) -> list[str]: ...

    @overload
    def send_messages(
        self, qname: str, messages: Iterable[T], delay: Duration | None = None, *, encoder: Encoder[T]
    ) -> list[str]: ...

    def send_messages(
        self, qname: str, messages: Iterable[Any], delay: Duration | None = None, *, encoder: Encoder[Any] | None = None
    ) -> list[str]:
        """Send messages in this order and give their ids."""
        return self._run(self._rsmq.send_messages(qname, messages, delay, encoder=encoder or _as_is))

    @overload
    def receive_message(self, qname: str, vt: Duration | None = None) -> RsmqMessage[str] | None: ...

    @overload
    def receive_message(
        self, qname: str, vt: Duration | None = None, *, decoder: Decoder[T]
    ) -> RsmqMessage[T] | None: ...

    def receive_message(
        self, qname: str, vt: Duration | None = None, *, decoder: Decoder[Any] = decode_text
    ) -> RsmqMessage[Any] | None:
        """The next message, hidden from others for `vt` seconds, or None."""
        return self._run(self._rsmq.receive_message(qname, vt, decoder=decoder))

    @overload
    def receive_messages(
        self, qname: str, max: int = DEFAULT_MAX, vt: Duration | None = None
    ) -> list[RsmqMessage[str]]: ...

    @overload
    def receive_messages(
        self, qname: str, max: int = DEFAULT_MAX, vt: Duration | None = None, *, decoder: Decoder[T]
    ) -> list[RsmqMessage[T]]: ...

    def receive_messages(
        self,
        qname: str,
        max: int = DEFAULT_MAX,
        vt: Duration | None = None,
        *,
        decoder: Decoder[Any] = decode_text,
    ) -> list[RsmqMessage[Any]]:
        """Up to `max` messages that are due, each hidden for `vt` seconds."""
        return self._run(self._rsmq.receive_messages(qname, max, vt, decoder=decoder))

    @overload
    def pop_message(self, qname: str) -> RsmqMessage[str] | None: ...

    @overload
    def pop_message(self, qname: str, *, decoder: Decoder[T]) -> RsmqMessage[T] | None: ...

    def pop_message(self, qname: str, *, decoder: Decoder[Any] = decode_text) -> RsmqMessage[Any] | None:
        """Take the next message out of the queue for good, or None."""
        return self._run(self._rsmq.pop_message(qname, decoder=decoder))

    def delete_message(self, qname: str, id: str) -> bool:
        """Delete a message; False if there is none."""
        return self._run(self._rsmq.delete_message(qname, id))

    def delete_messages(self, qname: str, ids: Iterable[str]) -> int:
        """Delete these messages; how many of them there were."""
        return self._run(self._rsmq.delete_messages(qname, ids))

    def change_message_visibility(self, qname: str, id: str, vt: Duration) -> bool:
        """Hide a message for `vt` seconds from now; False if it is gone."""
        return self._run(self._rsmq.change_message_visibility(qname, id, vt))

    # --- listening

    @overload
    def listen(
        self, qname: str, vt: Duration | None = None, *, poll_secs: float = DEFAULT_POLL_SECS
    ) -> Iterator[RsmqMessage[str]]: ...

    @overload
    def listen(
        self, qname: str, vt: Duration | None = None, *, decoder: Decoder[T], poll_secs: float = DEFAULT_POLL_SECS
    ) -> Iterator[RsmqMessage[T]]: ...

    def listen(
        self,
        qname: str,
        vt: Duration | None = None,
        *,
        decoder: Decoder[Any] = decode_text,
        poll_secs: float = DEFAULT_POLL_SECS,
    ) -> Iterator[RsmqMessage[Any]]:
        """Messages as they come, each received: delete it when it is done with."""
        messages = self._rsmq.listen(qname, vt, decoder=decoder, poll_secs=poll_secs)
        return self._pull(messages)

    @overload
    def receiving(
        self, qname: str, vt: Duration | None = None
    ) -> contextlib.AbstractContextManager[RsmqMessage[str] | None]: ...

    @overload
    def receiving(
        self, qname: str, vt: Duration | None = None, *, decoder: Decoder[T]
    ) -> contextlib.AbstractContextManager[RsmqMessage[T] | None]: ...

    @contextlib.contextmanager
    def receiving(
        self, qname: str, vt: Duration | None = None, *, decoder: Decoder[Any] = decode_text
    ) -> Iterator[RsmqMessage[Any] | None]:
        """Receive a message, or None, and delete it when the block succeeds."""
        message = self.receive_message(qname, vt, decoder=decoder)
        yield message
        if message is not None:
            self.delete_message(qname, message.id)

    def _pull(self, messages: AsyncGenerator[RsmqMessage[Any]]) -> Iterator[RsmqMessage[Any]]:
        async def pull() -> RsmqMessage[Any] | None:
            return await anext(messages, None)

        async def end() -> None:
            await messages.aclose()

        try:
            while (message := self._run(pull())) is not None:
                yield message
        except (CancelledError, ShutdownError):
            if not self._closed:
                raise
        finally:
            if not self._closed:
                self._run(end())

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if self._closed:
            coroutine.close()
            raise ShutdownError("the client was closed by its owner")
        return self._thread.run(coroutine)


def _as_is(message: Any) -> Any:
    return message
