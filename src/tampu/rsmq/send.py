"""`send_message` and `send_messages`, and what happens if the connection breaks during a send.

Without `send_once` the outcome is then unknown, and the send raises `OutcomeUnknownError`. With `send_once=True` the
send is repeated: a marker key on the server records the sends that were already executed.
"""

from __future__ import annotations

import asyncio
import heapq
import os
import weakref
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from tampu.base.checks import MAX_CALL_BYTES, MAX_CALL_ENTRIES, split_into_calls
from tampu.errors import Error, OutcomeUnknownError, ShutdownError
from tampu.redis.client import backoff_secs
from tampu.redis.faults import ConnectionLost, Unreachable
from tampu.rsmq.errors import BatchInterrupted, MessageTooLong
from tampu.rsmq.message import Encoder, encode, random_part
from tampu.rsmq.session import MARKER_TTL_MS, SEND, Session

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from tampu.redis.connection import Reply
    from tampu.rsmq.options import Duration, RsmqOptions
    from tampu.rsmq.session import QueueKeys

T = TypeVar("T")


class SendOperations(Session):
    """Sends one message, or many."""

    def __init__(self, options: RsmqOptions) -> None:
        super().__init__(options)
        self._markers = SendMarkers() if options.send_once else None

    @overload
    async def send_message(self, qname: str, message: str | bytes, delay: Duration | None = None) -> str: ...

    @overload
    async def send_message(
        self, qname: str, message: T, delay: Duration | None = None, *, encoder: Encoder[T]
    ) -> str: ...

    async def send_message(
        self, qname: str, message: Any, delay: Duration | None = None, *, encoder: Encoder[Any] | None = None
    ) -> str:
        """Send a message and return its ID. `delay` is in seconds; None means the queue's `delay`.

        `message` is str or bytes, or any value that `encoder` turns into one. Once this returns, the message is stored
        on the server. Raises `QueueNotFound`, `MessageTooLong`, `MessageNotString`, and `OutcomeUnknownError` if the
        connection breaks: the message may or may not have been sent, and sending it again may duplicate it. With
        `RsmqOptions(send_once=True)` it is repeated safely instead.
        """
        queue = self._queues[qname]
        checked_delay = self._duration("delay", delay)
        encoded = encode(message, encoder, self._options.size_unit)
        sent: str = await self._shared(
            ("send", queue.name, checked_delay),
            encoded,
            partial(self._send_for_callers, queue, checked_delay),
            _size_of,
        )
        return sent

    @overload
    async def send_messages(
        self, qname: str, messages: Iterable[str | bytes], delay: Duration | None = None
    ) -> list[str]: ...

    @overload
    async def send_messages(
        self, qname: str, messages: Iterable[T], delay: Duration | None = None, *, encoder: Encoder[T]
    ) -> list[str]: ...

    async def send_messages(
        self, qname: str, messages: Iterable[Any], delay: Duration | None = None, *, encoder: Encoder[Any] | None = None
    ) -> list[str]:
        """Send messages in order and return their IDs. Nothing is sent if one is invalid or larger than `maxsize`.

        Each script call sends up to 256 messages (256 KiB), all or none. Raises `BatchInterrupted`, with the IDs of the
        messages that were sent, if a later call fails; otherwise the errors of `send_message`.
        """
        queue = self._queues[qname]
        checked_delay = self._duration("delay", delay)
        encoded = [encode(message, encoder, self._options.size_unit) for message in messages]
        # The largest of all messages, so that the first call already fails if any of them is too long.
        largest = max((len(body) if size is None else size for body, size in encoded), default=0)
        ids: list[str] = []
        for bodies in split_into_calls((body, len(body)) for body, _ in encoded):
            try:
                ids += await self._send(queue, bodies, largest, checked_delay)
            except Error as error:
                if not ids:
                    raise
                raise BatchInterrupted(ids, len(encoded), error) from error
        return ids

    async def _send(
        self, queue: QueueKeys, bodies: Sequence[bytes], largest: int | None, delay: int | None
    ) -> list[str]:
        """Send bodies in one call and return their IDs. `largest` is the largest size if not counted in bytes."""
        parts = [random_part() for _ in bodies]
        messages = [part for message in zip(parts, bodies, strict=True) for part in message]
        markers = self._markers
        if markers is None:
            try:
                packed = self._packed_send(queue, queue.both, "", delay, largest, messages)
                reply = await self._ask(packed, resend=False)
            except ConnectionLost as error:
                raise _outcome_unknown(queue, parts, error) from error
        else:
            slot = markers.acquire(queue.name)
            packed = self._packed_send(
                queue, (*queue.both, queue.sent + markers.sender), slot, delay, largest, messages
            )
            reply = await self._resend_until_answered(queue, packed, parts)
            # Not released after an error: the send may still arrive and then needs its marker.
            markers.release(queue.name, slot)
        if type(reply) is not list:
            self._check_reply(reply, queue, "delay")
            raise MessageTooLong(max(map(len, bodies)) if largest is None else largest)
        if reply[0]:
            self._check_unit(queue, "delay", reply[0])
        return [message_id.decode() for message_id in reply[1:]]

    def _packed_send(
        self,
        queue: QueueKeys,
        keys: tuple[bytes, ...],
        slot: int | str,
        delay: int | None,
        largest: int | None,
        messages: list[bytes],
    ) -> bytes:
        options = self._options
        if self._is_plain and slot == "" and delay is None and largest is None and not options.realtime:
            return SEND.packed_call(keys, ("", *messages))
        size = max(map(len, messages[1::2])) if largest is None else largest
        channel = queue.channel if options.realtime else ""
        how = (options.precision, self._step, "" if delay is None else delay, channel, size, slot, MARKER_TTL_MS)
        return SEND.packed_call(keys, ("with", *how, *messages))

    async def _send_for_callers(
        self, queue: QueueKeys, delay: int | None, messages: Sequence[tuple[bytes, int | None]]
    ) -> Sequence[str | Exception]:
        """Send the messages of several callers, (body, size) each. One caller's error does not affect the others."""
        bodies, sizes = [body for body, _ in messages], [size for _, size in messages if size is not None]
        try:
            return await self._send(queue, bodies, max(sizes) if sizes else None, delay)
        except (MessageTooLong, OutcomeUnknownError) as error:
            if len(messages) == 1:
                return [error]
            if isinstance(error, OutcomeUnknownError):
                return [OutcomeUnknownError(str(error), ids=[part]) for part in error.ids]
            # None of them was sent: send each alone.
            outcomes = await asyncio.gather(*(self._send_for_callers(queue, delay, [message]) for message in messages))
            return [outcome for (outcome,) in outcomes]

    async def _resend_until_answered(self, queue: QueueKeys, packed: bytes, parts: Sequence[bytes]) -> Reply:
        """Repeat a send until the server replies. The marker in the call prevents duplicates."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._options.patience_secs
        attempt = 0
        while True:
            try:
                return await self._ask(packed, resend=False)
            except ConnectionLost as error:
                attempt += 1
                pause = backoff_secs(attempt)
                if clock() + pause > deadline:
                    raise _outcome_unknown(queue, parts, error) from error
                await asyncio.sleep(pause)
            except (Unreachable, ShutdownError) as error:
                if attempt:  # this attempt sent nothing, but an earlier one may have arrived
                    raise _outcome_unknown(queue, parts, error) from error
                raise


class SendMarkers:
    """Slots in the marker key of this sender, one for each send in flight.

    A slot records the first random part of a send, and its IDs. Only one send at a time uses a slot, so a repeated send
    always finds its own record.
    """

    def __init__(self) -> None:
        self.sender = random_part()
        self._free: dict[str, list[int]] = {}
        self._used: dict[str, int] = {}
        _all_markers.add(self)

    def acquire(self, qname: str) -> int:
        """Return the lowest free slot: few slots make a small key."""
        free = self._free.get(qname)
        if free:
            return heapq.heappop(free)
        slot = self._used.get(qname, 0)
        self._used[qname] = slot + 1
        return slot

    def release(self, qname: str, slot: int) -> None:
        """Free a slot."""
        heapq.heappush(self._free.setdefault(qname, []), slot)


def _size_of(encoded: tuple[bytes, int | None]) -> int:
    return len(encoded[0])


def _outcome_unknown(queue: QueueKeys, parts: Sequence[bytes], error: Error) -> OutcomeUnknownError:
    names = [part.decode() for part in parts]
    return OutcomeUnknownError(
        f"{error}; {len(names)} message(s) to queue {queue.name!r} may or may not have been sent (ids end in "
        f"{names[0]}...); RsmqOptions(send_once=True) repeats such sends without duplicates",
        ids=names,
    )


_all_markers: weakref.WeakSet[SendMarkers] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    # Parent and child must not share slots: they would overwrite each other's records.
    for markers in list(_all_markers):
        markers.sender = random_part()


os.register_at_fork(after_in_child=_after_fork_in_child)


Item = TypeVar("Item")
Result = TypeVar("Result")

#: Maximum round trips in flight per batcher.
MAX_IN_FLIGHT = 4
#: Minimum number of waiting calls for which a batch is sent while another one is in flight.
WORTH_A_BATCH = 32


class Batcher(Generic[Item, Result]):
    """Batches calls of one kind. `send_batch` takes items and returns a result, or an error, for each, in order."""

    def __init__(
        self,
        send_batch: Callable[[Sequence[Item]], Awaitable[Sequence[Result | Exception]]],
        size_of: Callable[[Item], int] | None = None,
    ) -> None:
        self._send_batch = send_batch
        self._size_of = size_of
        self._waiting: deque[tuple[Item, asyncio.Future[Result]]] = deque()
        self._in_flight = 0
        self._calls_in_flight = 0
        self._is_crowded = False
        self._flush_scheduled = False
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_idle(self) -> bool:
        """True if no call is in flight or waiting."""
        return not self._in_flight and not self._waiting

    def start_alone(self) -> bool:
        """Return whether the caller may send its item alone, now. It must then call `finish` afterwards."""
        if self._waiting or self._is_crowded or self._in_flight >= MAX_IN_FLIGHT:  # first come, first served
            return False
        self._in_flight += 1
        self._calls_in_flight += 1
        return True

    def finish(self, calls: int = 1) -> None:
        """Note the end of a round trip."""
        self._in_flight -= 1
        self._calls_in_flight -= calls
        self._flush_soon()

    async def join(self, item: Item) -> Result:
        """Send the item with the next batch and return its result."""
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        self._flush_soon()
        return await future

    def _can_flush(self) -> bool:
        # Few calls wait until all others have returned: the larger a batch, the less each call costs.
        enough = 1 if not self._in_flight else WORTH_A_BATCH if self._in_flight == 1 else MAX_CALL_ENTRIES
        return len(self._waiting) >= enough

    def _flush_soon(self) -> None:
        """Flush at the end of this event loop iteration: callers that just got a result may call again in it."""
        if not self._flush_scheduled and self._can_flush():
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = self._is_crowded = False
        while self._can_flush() and self._in_flight < MAX_IN_FLIGHT:
            batch = self._next_batch()
            if batch:
                self._is_crowded |= len(batch) > 1
                self._in_flight += 1
                self._calls_in_flight += len(batch)
                task = asyncio.get_running_loop().create_task(self._run(batch))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    def _next_batch(self) -> list[tuple[Item, asyncio.Future[Result]]]:
        batch: list[tuple[Item, asyncio.Future[Result]]] = []
        size = 0
        calls = len(self._waiting) + self._calls_in_flight
        limit = min(calls if calls < 2 * WORTH_A_BATCH else (calls + 1) // 2, MAX_CALL_ENTRIES)
        while self._waiting and len(batch) < limit:
            item, future = self._waiting[0]
            size += self._size_of(item) if self._size_of else 0
            if batch and size > MAX_CALL_BYTES:
                break
            self._waiting.popleft()
            if not future.done():  # a caller that was cancelled needs no result
                batch.append((item, future))
        return batch

    async def _run(self, batch: list[tuple[Item, asyncio.Future[Result]]]) -> None:
        try:
            results: Sequence[Result | Exception] = await self._send_batch([item for item, _ in batch])
        except Exception as error:  # every caller gets it, or it would wait forever
            results = [error] * len(batch)
        except BaseException:
            for _, future in batch:
                future.cancel()
            self.finish(len(batch))
            raise
        for (_, future), result in zip(batch, results, strict=True):
            if future.done():
                continue
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)
        self.finish(len(batch))  # last, so that callers that got a result can join the next batch
