"""`RsmqSync`: the operations of `Rsmq` for synchronous code and threads."""

from __future__ import annotations

import contextlib
import functools
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar, overload

from tampu.base.event_loop import LoopThread, blocking
from tampu.errors import ShutdownError
from tampu.rsmq.client import Rsmq
from tampu.rsmq.message import Decoder, decode_text
from tampu.rsmq.options import RsmqOptions, as_options

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
    from contextlib import AbstractContextManager
    from types import TracebackType

    from tampu.rsmq.message import RsmqMessage
    from tampu.rsmq.options import Duration

P = ParamSpec("P")
T = TypeVar("T")


def iterating(
    method: Callable[Concatenate[Rsmq, P], AsyncGenerator[T]],
) -> Callable[Concatenate[RsmqSync, P], Iterator[T]]:
    """Return a method of `RsmqSync` that iterates over this method of `Rsmq` until the client is closed."""

    @functools.wraps(method)
    def call(self: RsmqSync, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        return self._iterate(method(self._inner, *args, **kwargs))

    return call


class RsmqSync:
    """An RSMQ client for synchronous code. Threads may share it; a forked child opens its own connection.

        with RsmqSync("redis://127.0.0.1:6379") as rsmq:
            rsmq.send_message("mail", "hello")

    The methods are those of `Rsmq`. They block, so use `Rsmq` in coroutines.
    """

    def __init__(self, options: RsmqOptions | str | None = None) -> None:
        self._options = as_options(options)
        self._thread = LoopThread()
        self._inner = Rsmq(self._options)
        self._closed = False

    @property
    def options(self) -> RsmqOptions:
        """The options of this client."""
        return self._options

    @classmethod
    def connect(cls, options: RsmqOptions | str | None = None) -> Self:
        """Return a connected client. Raises `RedisError` if the server cannot be reached."""
        return cls(options).open()

    def open(self) -> Self:
        """Connect now. Raises `RedisError` if the server cannot be reached."""
        self._run(self._inner.open())
        return self

    def close(self) -> None:
        """Close the connection and stop the background thread. Listeners in other threads end."""
        if not self._closed:
            self._closed = True
            self._thread.run(self._inner.close())
            self._thread.stop()

    def quit(self) -> None:
        """Close the connection. The JavaScript name of `close`."""
        self.close()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    create_queue = blocking(Rsmq.create_queue)
    list_queues = blocking(Rsmq.list_queues)
    delete_queue = blocking(Rsmq.delete_queue)
    get_queue_attributes = blocking(Rsmq.get_queue_attributes)
    set_queue_attributes = blocking(Rsmq.set_queue_attributes)
    send_message = blocking(Rsmq.send_message)
    send_messages = blocking(Rsmq.send_messages)
    receive_message = blocking(Rsmq.receive_message)
    receive_messages = blocking(Rsmq.receive_messages)
    pop_message = blocking(Rsmq.pop_message)
    delete_message = blocking(Rsmq.delete_message)
    delete_messages = blocking(Rsmq.delete_messages)
    change_message_visibility = blocking(Rsmq.change_message_visibility)
    listen = iterating(Rsmq.listen)

    @overload
    def receiving(self, qname: str, vt: Duration | None = None) -> AbstractContextManager[RsmqMessage[str] | None]: ...
    @overload
    def receiving(
        self, qname: str, vt: Duration | None = None, *, decoder: Decoder[T]
    ) -> AbstractContextManager[RsmqMessage[T] | None]: ...
    @contextlib.contextmanager
    def receiving(
        self, qname: str, vt: Duration | None = None, *, decoder: Decoder[Any] = decode_text
    ) -> Iterator[RsmqMessage[Any] | None]:
        """Receive a message, or None, and delete it after the `with` block succeeds."""
        message = self.receive_message(qname, vt, decoder=decoder)
        yield message
        if message is not None:
            self.delete_message(qname, message.id)

    def _iterate(self, messages: AsyncGenerator[T]) -> Iterator[T]:
        async def receive() -> T | None:
            return await anext(messages, None)

        async def end() -> None:
            await messages.aclose()

        try:
            while (message := self._run(receive())) is not None:
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
            raise ShutdownError("the client is closed")
        return self._thread.run(coroutine)


#: The type of synchronous clients.
RsmqConnectionSync = RsmqSync
