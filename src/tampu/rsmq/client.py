"""The clients: `Rsmq` with one shared connection, `PooledRsmq` with a pool, and `TypedQueue`, a view of one queue."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections import deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from tampu.errors import ShutdownError
from tampu.redis.client import Client
from tampu.redis.connection import future_setter
from tampu.redis.faults import ConnectionLost, Remedy, ServerError
from tampu.rsmq.options import PoolOptions, RsmqOptions, as_options
from tampu.rsmq.queues import QueueOperations
from tampu.rsmq.receive import ReceiveOperations
from tampu.rsmq.send import Batcher, SendOperations
from tampu.rsmq.session import ALL_SCRIPTS

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Iterable, Sequence
    from contextlib import AbstractAsyncContextManager
    from types import TracebackType

    from tampu.redis.connection import Reply
    from tampu.rsmq.message import Decoder, Encoder, RsmqMessage
    from tampu.rsmq.options import Duration

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

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
    """An RSMQ client with a connection pool, for large messages that would delay others on a shared connection."""

    def __init__(self, options: RsmqOptions | str | None = None, pool: PoolOptions | None = None) -> None:
        super().__init__(options)
        self._pool = ConnectionPool(pool or PoolOptions(), self._make_client)

    @classmethod
    def connect(cls, options: RsmqOptions | str | None = None, pool: PoolOptions | None = None) -> Self:
        """Return a client for `await` or `async with`, which connect. `options` may be a URL. Raises `RedisError`."""
        return cls(options, pool)

    @property
    def pool_size(self) -> int:
        """The current number of connections."""
        return self._pool.size

    async def open(self) -> Self:
        await self._pool.fill(self._options.patience_secs)
        return self

    async def close(self) -> None:
        await self._pool.close()
        await self._end_listeners()

    async def _ask(self, packed: bytes, *, resend: bool = True) -> Reply:
        try:
            async with self._pool.client() as client:
                return await client.send(packed, resend=resend, patience_secs=self._options.patience_secs)
        except ServerError as error:
            self._explain(error)
            raise


class ConnectionPool:
    """Clients that each serve one operation at a time. Reuses the last used one first, so that surplus ones expire."""

    def __init__(self, options: PoolOptions, make_client: Callable[[], Client]) -> None:
        self._options = options
        self._make_client = make_client
        self._places = asyncio.Semaphore(options.max_size)
        #: Idle clients and the time of their last use, longest idle first.
        self._idle: deque[tuple[Client, float]] = deque()
        self._busy: set[Client] = set()
        self._closed = False

    @property
    def size(self) -> int:
        """The current number of clients."""
        return len(self._idle) + len(self._busy)

    async def fill(self, patience_secs: float) -> None:
        """Open `min_idle` connections, and at least one, to check that the server is reachable."""
        missing = max(self._options.min_idle, 1) - len(self._idle)
        clients = [self._make_client() for _ in range(missing)]
        now = asyncio.get_running_loop().time()
        self._idle.extend((client, now) for client in clients)
        await asyncio.gather(*(client.up(patience_secs) for client in clients))

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        """Provide a client for one operation; wait while all are busy."""
        async with self._places:
            if self._closed:
                raise ShutdownError("the connection pool is closed")
            client = self._idle.pop()[0] if self._idle else self._make_client()
            self._busy.add(client)
            try:
                yield client
            finally:
                self._busy.discard(client)
                self._idle.append((client, asyncio.get_running_loop().time()))
                await self._close_expired()

    async def close(self) -> None:
        """Close all clients, including busy ones."""
        self._closed = True
        clients = [client for client, _ in self._idle] + list(self._busy)
        self._idle.clear()
        for client in clients:
            await client.close()

    async def _close_expired(self) -> None:
        too_old = asyncio.get_running_loop().time() - self._options.idle_secs
        while len(self._idle) > self._options.min_idle and self._idle[0][1] < too_old:
            await self._idle.popleft()[0].close()


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
