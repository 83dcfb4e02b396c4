"""Gets bodies into a queue, and knows what to do when the connection breaks while they are on the way."""

from __future__ import annotations

import asyncio
import heapq
import os
import weakref
from typing import TYPE_CHECKING

from tampu.errors import OutcomeUnknownError, RedisError, ShutdownError
from tampu.redis.faults import ConnectionLost, Unreachable
from tampu.redis.pipe import backoff_secs
from tampu.rsmq.errors import MessageTooLong
from tampu.rsmq.ids import random_part
from tampu.rsmq.session import Session

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tampu.redis.connection import Reply
    from tampu.rsmq.keys import QueueKeys
    from tampu.rsmq.options import RsmqOptions


class Sending(Session):
    """The sending half of a session."""

    def __init__(self, options: RsmqOptions) -> None:
        super().__init__(options)
        self._markers = Markers() if options.send_once else None

    async def _put(
        self, queue: QueueKeys, bodies: Sequence[bytes], largest: int | None, delay: int | None
    ) -> list[str]:
        """Send these bodies in one step; their ids. `largest`: size of the largest if it is not what the bytes say."""
        parts = [random_part() for _ in bodies]
        if self._markers is None:
            try:
                reply = await self._ask(self._calls.send(queue, delay, largest, parts, bodies), resend=False)
            except ConnectionLost as error:
                raise _unknown(queue, parts, error) from error
        else:
            slot = self._markers.take(queue.name)
            marker = (queue.sent + self._markers.sender, slot)
            reply = await self._put_once(queue, self._calls.send(queue, delay, largest, parts, bodies, marker), parts)
            # Not after an error: a send whose end nobody knows may still arrive, and its marker must then stand.
            self._markers.give(queue.name, slot)
        if type(reply) is not list:
            self._check_found(reply, queue, "delay")
            raise MessageTooLong(max(map(len, bodies)) if largest is None else largest)
        if reply[0]:
            self._watch_unit(queue, "delay", reply[0])
        return [message_id.decode() for message_id in reply[1:]]

    async def _put_for_all(
        self, queue: QueueKeys, messages: Sequence[tuple[bytes, int | None]], delay: int | None
    ) -> Sequence[str | Exception]:
        """One message each of so many callers, who must not suffer for each other's mistakes."""
        bodies, sizes = [body for body, _ in messages], [size for _, size in messages if size is not None]
        try:
            return await self._put(queue, bodies, max(sizes) if sizes else None, delay)
        except MessageTooLong as error:
            if len(messages) == 1:
                return [error]
            # None of them was sent: each for itself.
            answers = await asyncio.gather(*(self._put_for_all(queue, [message], delay) for message in messages))
            return [answer for (answer,) in answers]
        except OutcomeUnknownError as error:
            return [OutcomeUnknownError(str(error), ids=[part]) for part in error.ids]

    async def _put_once(self, queue: QueueKeys, packed: bytes, parts: Sequence[bytes]) -> Reply:
        """Again and again until there is an answer: by the marker the server knows a send that it has seen."""
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
                    raise _unknown(queue, parts, error) from error
                await asyncio.sleep(pause)
            except (Unreachable, ShutdownError) as error:
                if attempt:  # this time nothing was sent, but an earlier one may have arrived
                    raise _unknown(queue, parts, error) from error
                raise


class Markers:
    """Slots in the marker key of this sender, one for each send under way.

    A slot holds the random part that a send began with, and its ids. It is used by one send at a time, so that a
    repeated send finds its own trace there however many others are under way.
    """

    def __init__(self) -> None:
        self.sender = random_part()
        self._free: dict[str, list[int]] = {}
        self._used: dict[str, int] = {}
        _all_markers.add(self)

    def take(self, qname: str) -> int:
        """The lowest slot that is free: few slots make a small key."""
        free = self._free.get(qname)
        if free:
            return heapq.heappop(free)
        slot = self._used.get(qname, 0)
        self._used[qname] = slot + 1
        return slot

    def give(self, qname: str, slot: int) -> None:
        """Let others have it."""
        heapq.heappush(self._free.setdefault(qname, []), slot)


def _unknown(queue: QueueKeys, parts: Sequence[bytes], error: RedisError | ShutdownError) -> OutcomeUnknownError:
    names = [part.decode() for part in parts]
    return OutcomeUnknownError(
        f"{error}; {len(names)} message(s) to queue {queue.name!r} may be there or not (ids end in {names[0]}...). "
        "RsmqOptions(send_once=True) repeats such sends without doubling them",
        ids=names,
    )


_all_markers: weakref.WeakSet[Markers] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    # Two senders in one slot would wipe out each other's traces.
    for markers in list(_all_markers):
        markers.sender = random_part()


os.register_at_fork(after_in_child=_after_fork_in_child)
