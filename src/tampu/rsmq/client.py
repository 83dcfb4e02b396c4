"""The clients: `Rsmq` on one shared connection, `PooledRsmq` on a pool of them."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, Self, TypeVar

from tampu.redis.connection import future_setter
from tampu.redis.faults import ConnectionLost, Remedy, ServerError
from tampu.redis.pipe import Pipe
from tampu.rsmq.batches import BatchOperations
from tampu.rsmq.lanes import Lane
from tampu.rsmq.listening import ListeningOperations
from tampu.rsmq.options import PoolOptions, RsmqOptions, as_options
from tampu.rsmq.pool import PipePool
from tampu.rsmq.queues import QueueOperations
from tampu.rsmq.scripts import ALL
from tampu.rsmq.typed_queue import TypedQueue

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator, Sequence
    from types import TracebackType

    from tampu.redis.connection import Reply
    from tampu.rsmq.codec import Decoder, Encoder
    from tampu.rsmq.keys import QueueKeys
    from tampu.rsmq.taking import Hiding, Taken

    Weigh = Callable[[Any], int]

T = TypeVar("T")

#: Lanes kept before those that nobody uses are thrown away.
MOST_LANES = 1000


class _Client(QueueOperations, BatchOperations, ListeningOperations):
    """All operations, and the life of a client.

        async with Rsmq("redis://127.0.0.1:6379") as rsmq: ...
        rsmq = await Rsmq.connect(RsmqOptions(ns="shop"))

    It connects at its first use if nobody does so before.
    """

    def __init__(self, options: RsmqOptions | str | None = None) -> None:
        super().__init__(as_options(options))

    @classmethod
    def connect(cls, options: RsmqOptions | str | None = None) -> Self:
        """`await` it, or use it in `async with`: both connect, and raise what stands in the way."""
        return cls(options)

    @abstractmethod
    async def open(self) -> Self:
        """Connect now; raises what stands in the way."""

    @abstractmethod
    async def close(self) -> None:
        """Close the connection for good. Listeners end; operations under way are told that it is lost."""

    async def quit(self) -> None:
        """`close`, by its name in JavaScript."""
        await self.close()

    def queue(self, qname: str, *, encoder: Encoder[T], decoder: Decoder[T]) -> TypedQueue[T]:
        """A view of one queue whose messages are of one type."""
        return TypedQueue(self, qname, encoder, decoder)

    def __await__(self) -> Generator[object, None, Self]:
        return self.open().__await__()

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _make_pipe(self) -> Pipe:
        return Pipe(self._options.connection_settings(), self._queues.index, ALL)


class Rsmq(_Client):
    """RSMQ on one connection that all callers share; right for nearly everybody.

    Sends, receives, pops and deletes that many tasks ask for at once travel together. Share it between the tasks of one
    event loop; threads and synchronous programs use `RsmqSync`. After a fork the child connects anew.
    """

    def __init__(self, options: RsmqOptions | str | None = None) -> None:
        super().__init__(options)
        self._pipe = self._make_pipe()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lanes: dict[object, Lane[Any, Any]] = {}

    async def open(self) -> Self:
        self._bind_to_loop()
        await self._pipe.up(self._options.patience_secs)
        return self

    async def close(self) -> None:
        self._bind_to_loop()  # what belongs to a loop that has ended cannot be closed in this one
        await self._pipe.close()
        await self._end_listeners()

    async def _ask(self, packed: bytes, *, resend: bool = True) -> Reply:
        loop = self._bind_to_loop()
        connection = self._pipe.connection
        if connection is not None:
            # The pipe's own way, shortened for when nothing is wrong: it is taken for every message.
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
            return await self._pipe.send(packed, resend=resend, patience_secs=self._options.patience_secs)
        except ServerError as error:
            self._explain(error)
            raise

    # Whoever finds the lane free goes alone, by the shortest way; the others share a trip.

    async def _send_one(self, queue: QueueKeys, body: bytes, size: int | None, delay: int | None) -> str:
        lane = self._lane(("send", queue.name, delay)) or self._new_lane(
            ("send", queue.name, delay), lambda items: self._put_for_all(queue, items, delay), _weight
        )
        if not lane.enter():
            sent: str = await lane.join((body, size))
            return sent
        try:
            return (await self._put(queue, (body,), size, delay))[0]
        finally:
            lane.leave()

    async def _take_one(self, queue: QueueKeys, vt: Hiding) -> Taken:
        lane = self._lane(("take", queue.name, vt)) or self._new_lane(
            ("take", queue.name, vt), lambda items: self._take_for_all(queue, vt, len(items))
        )
        if not lane.enter():
            taken: Taken = await lane.join(None)
            return taken
        try:
            return await super()._take_one(queue, vt)
        finally:
            lane.leave()

    async def _delete_one(self, queue: QueueKeys, message_id: str) -> bool:
        lane = self._lane(("delete", queue.name)) or self._new_lane(
            ("delete", queue.name), lambda items: self._delete(queue, items)
        )
        if not lane.enter():
            deleted: bool = await lane.join(message_id)
            return deleted
        try:
            return (await self._delete(queue, (message_id,)))[0]
        finally:
            lane.leave()

    def _lane(self, key: object) -> Lane[Any, Any] | None:
        self._bind_to_loop()
        return self._lanes.get(key)

    def _new_lane(
        self, key: object, carry: Callable[[Sequence[Any]], Awaitable[Sequence[Any]]], *weigh: Weigh
    ) -> Lane[Any, Any]:
        if len(self._lanes) >= MOST_LANES:
            self._lanes = {kept: lane for kept, lane in self._lanes.items() if not lane.is_idle}
        lane: Lane[Any, Any] = Lane(carry, *weigh)
        self._lanes[key] = lane
        return lane

    def _bind_to_loop(self) -> asyncio.AbstractEventLoop:
        """A connection belongs to the event loop it was made in: in another one, start afresh."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            if self._loop is not None:
                self._pipe.abandon()
                self._lanes.clear()
            self._loop = loop
        return loop


class PooledRsmq(_Client):
    """RSMQ on a pool: for large bodies, behind which the callers of one shared connection would have to wait."""

    def __init__(self, options: RsmqOptions | str | None = None, pool: PoolOptions | None = None) -> None:
        super().__init__(options)
        self._pool = PipePool(pool or PoolOptions(), self._make_pipe)

    @classmethod
    def connect(cls, options: RsmqOptions | str | None = None, pool: PoolOptions | None = None) -> Self:
        """`await` it, or use it in `async with`: both connect, and raise what stands in the way."""
        return cls(options, pool)

    @property
    def pool_size(self) -> int:
        """How many connections there are at the moment."""
        return self._pool.size

    async def open(self) -> Self:
        await self._pool.fill(self._options.patience_secs)
        return self

    async def close(self) -> None:
        await self._pool.close()
        await self._end_listeners()

    async def _ask(self, packed: bytes, *, resend: bool = True) -> Reply:
        try:
            async with self._pool.pipe() as pipe:
                return await pipe.send(packed, resend=resend, patience_secs=self._options.patience_secs)
        except ServerError as error:
            self._explain(error)
            raise


def _weight(item: tuple[bytes, int | None]) -> int:
    return len(item[0])
