"""The clients: `Rsmq` with one shared connection, `PooledRsmq` with a pool, and `RsmqSync` for synchronous code.

`TypedQueue` is a view of one queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from abc import abstractmethod
from collections import deque
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Self, TypeVar, overload

from tampu.base.event_loop import LoopThread, blocking
from tampu.errors import ShutdownError
from tampu.redis.client import Client
from tampu.redis.connection import future_setter
from tampu.redis.faults import ConnectionLost, Remedy, ServerError
from tampu.rsmq.message import Decoder, decode_text
from tampu.rsmq.options import PoolOptions, RsmqOptions, as_options
from tampu.rsmq.queues import QueueOperations
from tampu.rsmq.receive import ReceiveOperations
from tampu.rsmq.send import Batcher, SendOperations
from tampu.rsmq.session import ALL_SCRIPTS

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Iterable, Iterator, Sequence
    from contextlib import AbstractAsyncContextManager, AbstractContextManager

    from tampu.redis.connection import Reply
    from tampu.rsmq.message import Encoder, RsmqMessage
    from tampu.rsmq.options import Duration

P = ParamSpec("P")
T = TypeVar("T")

#: Batchers kept before idle ones are dropped.
MAX_BATCHERS = 1000


class RsmqConnection(QueueOperations, SendOperations, ReceiveOperations):
    """Base class of the asynchronous clients: all operations, and opening and closing a client.

        async with Rsmq("redis://127.0.0.1:6379") as rsmq: ...
        rsmq = await Rsmq.connect(RsmqOptions(ns="shop"))

    Otherwise it connects at its first use.
    """

    def __init__(self, options: RsmqOptions | str | None = None) -> None:
        super().__init__(as_options(options))

    @classmethod
    def connect(cls, options: RsmqOptions | str | None = None) -> Self:
        """Return a client for `await` or `async with`, which connect. `options` may be a URL. Raises `RedisError`."""
        return cls(options)

    @abstractmethod
    async def open(self) -> Self:
        """Connect now. Raises `RedisError` if the server cannot be reached within `patience_secs`."""

    @abstractmethod
    async def close(self) -> None:
        """Close the connection. Listeners end; operations in flight raise."""

    async def quit(self) -> None:
        """Close the connection. The JavaScript name of `close`."""
        await self.close()

    def queue(self, qname: str, *, encoder: Encoder[T], decoder: Decoder[T]) -> TypedQueue[T]:
        """Return a view of one queue whose messages are values of one type; see `TypedQueue`."""
        return TypedQueue(self, qname, encoder, decoder)

    def __await__(self) -> Generator[object, None, Self]:
        return self.open().__await__()

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def _make_client(self) -> Client:
        return Client(self._options.connection_settings(), self._queues.index, ALL_SCRIPTS)


class Rsmq(RsmqConnection):
    """An RSMQ client with one connection that all callers share.

    Concurrent sends, receives, pops and deletes of many tasks share round trips. Share the client between the tasks of
    one event loop; use `RsmqSync` from threads and synchronous code. A forked child opens its own connection.
    """

    def __init__(self, options: RsmqOptions | str | None = None) -> None:
        super().__init__(options)
        self._client = self._make_client()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._batchers: dict[object, Batcher[Any, Any]] = {}

    async def open(self) -> Self:
        self._bind_to_loop()
        await self._client.up(self._options.patience_secs)
        return self

    async def close(self) -> None:
        self._bind_to_loop()  # a connection of another event loop cannot be closed in this one
        await self._client.close()
        await self._end_listeners()

    async def _ask(self, packed: bytes, *, resend: bool = True) -> Reply:
        loop = self._bind_to_loop()
        connection = self._client.connection
        if connection is not None:
            # The hot path: `Client.send` without its retries and budget.
            future: asyncio.Future[Reply] = loop.create_future()
            connection.request(packed, future_setter(future))
            try:
                return await future
            except ServerError as error:
                self._explain(error)
                if error.remedy is Remedy.NONE:
                    raise
            except ConnectionLost:
                if not resend:
                    raise
        try:
            return await self._client.send(packed, resend=resend, patience_secs=self._options.patience_secs)
        except ServerError as error:
            self._explain(error)
            raise

    async def _shared(
        self,
        key: object,
        item: Any,
        call: Callable[[Sequence[Any]], Awaitable[Sequence[Any]]],
        size_of: Callable[[Any], int] | None = None,
    ) -> Any:
        """Call the server directly if the batcher of such calls is free; otherwise join its next batch."""
        self._bind_to_loop()
        batcher = self._batchers.get(key)
        if batcher is None:
            if len(self._batchers) >= MAX_BATCHERS:
                self._batchers = {kept: batcher for kept, batcher in self._batchers.items() if not batcher.is_idle}
            batcher = self._batchers[key] = Batcher(call, size_of)
        if not batcher.start_alone():
            return await batcher.join(item)
        try:
            return await super()._shared(key, item, call)
        finally:
            batcher.finish()

    def _bind_to_loop(self) -> asyncio.AbstractEventLoop:
        """Return the running loop. A connection belongs to one event loop: in a new loop, drop the old connection."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            if self._loop is not None:
                self._client.abandon()
                self._batchers.clear()
            self._loop = loop
        return loop


class PooledRsmq(RsmqConnection):
    """An RSMQ client with a connection pool, for large messages that would delay others on a shared connection.

    Each connection serves one operation at a time. The last used one is reused first, so that surplus ones expire.
    """

    def __init__(self, options: RsmqOptions | str | None = None, pool: PoolOptions | None = None) -> None:
        super().__init__(options)
        self._pool = pool or PoolOptions()
        self._places = asyncio.Semaphore(self._pool.max_size)
        #: Idle connections and the time of their last use, longest idle first.
        self._idle: deque[tuple[Client, float]] = deque()
        self._busy: set[Client] = set()
        self._closed = False

    @classmethod
    def connect(cls, options: RsmqOptions | str | None = None, pool: PoolOptions | None = None) -> Self:
        """Return a client for `await` or `async with`, which connect. `options` may be a URL. Raises `RedisError`."""
        return cls(options, pool)

    @property
    def pool_size(self) -> int:
        """The current number of connections."""
        return len(self._idle) + len(self._busy)

    async def open(self) -> Self:
        # At least one, to check that the server is reachable.
        clients = [self._make_client() for _ in range(max(self._pool.min_idle, 1) - len(self._idle))]
        now = asyncio.get_running_loop().time()
        self._idle.extend((client, now) for client in clients)
        await asyncio.gather(*(client.up(self._options.patience_secs) for client in clients))
        return self

    async def close(self) -> None:
        self._closed = True
        clients = [client for client, _ in self._idle] + list(self._busy)
        self._idle.clear()
        for client in clients:
            await client.close()
        await self._end_listeners()

    async def _ask(self, packed: bytes, *, resend: bool = True) -> Reply:
        async with self._places:
            if self._closed:
                raise ShutdownError("the connection pool is closed")
            client = self._idle.pop()[0] if self._idle else self._make_client()
            self._busy.add(client)
            try:
                return await client.send(packed, resend=resend, patience_secs=self._options.patience_secs)
            except ServerError as error:
                self._explain(error)
                raise
            finally:
                now = asyncio.get_running_loop().time()
                self._busy.discard(client)
                self._idle.append((client, now))
                while len(self._idle) > self._pool.min_idle and self._idle[0][1] < now - self._pool.idle_secs:
                    await self._idle.popleft()[0].close()


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

    def __exit__(self, *error: object) -> None:
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


class TypedQueue(Generic[T]):
    """A view of one queue with a fixed encoder and decoder. Create it with `rsmq.queue(...)`.

        invoices = rsmq.queue("invoices", encoder=msgspec.json.encode, decoder=msgspec.json.Decoder(Invoice).decode)
        await invoices.send(Invoice(...))

    Each method calls the method with the longer name on the client: `send` calls `send_message`, and so on.
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
        """Send a message and return its ID."""
        return await self._rsmq.send_message(self._qname, message, delay, encoder=self._encoder)

    async def send_many(self, messages: Iterable[T], delay: Duration | None = None) -> list[str]:
        """Send messages and return their IDs."""
        return await self._rsmq.send_messages(self._qname, messages, delay, encoder=self._encoder)

    async def receive(self, vt: Duration | None = None) -> RsmqMessage[T] | None:
        """Return the next message, hidden for `vt`, or None."""
        return await self._rsmq.receive_message(self._qname, vt, decoder=self._decoder)

    async def receive_many(self, max: int, vt: Duration | None = None) -> list[RsmqMessage[T]]:  # noqa: A002
        """Return up to `max` messages, each hidden for `vt`."""
        return await self._rsmq.receive_messages(self._qname, max, vt, decoder=self._decoder)

    async def pop(self) -> RsmqMessage[T] | None:
        """Remove the next message from the queue and return it, or None."""
        return await self._rsmq.pop_message(self._qname, decoder=self._decoder)

    async def delete(self, message: RsmqMessage[T] | str) -> bool:
        """Delete a message, given as a message or an ID. Return False if it does not exist."""
        return await self._rsmq.delete_message(self._qname, message if isinstance(message, str) else message.id)

    def receiving(self, vt: Duration | None = None) -> AbstractAsyncContextManager[RsmqMessage[T] | None]:
        """Receive a message and delete it after the `async with` block succeeds."""
        return self._rsmq.receiving(self._qname, vt, decoder=self._decoder)

    def listen(self, vt: Duration | None = None) -> AsyncGenerator[RsmqMessage[T]]:
        """Yield messages as they arrive."""
        return self._rsmq.listen(self._qname, vt, decoder=self._decoder)
