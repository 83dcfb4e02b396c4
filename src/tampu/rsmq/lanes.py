"""Lets calls that many tasks make at once share a trip to the server.

The first calls leave at once, alone. Those that come while so many are under way wait until these are back, and then
leave together, as one batch: a few callers never wait for company, and a hundred of them need a few scripts. As long as
they leave together the lane is crowded: then whoever comes waits for the others of the same turn of the event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

Item = TypeVar("Item")
Answer = TypeVar("Answer")

#: Trips of one lane under way at a time.
MOST_UNDER_WAY = 4
#: Most calls, and most bytes, in one trip.
MOST_CALLS = 256
MOST_BYTES = 256 * 1024


class Lane(Generic[Item, Answer]):
    """Calls of one kind. `carry` takes items to the server and brings an answer, or an error, for each, in order."""

    def __init__(
        self,
        carry: Callable[[Sequence[Item]], Awaitable[Sequence[Answer | Exception]]],
        weigh: Callable[[Item], int] = lambda item: 0,
    ) -> None:
        self._carry = carry
        self._weigh = weigh
        self._waiting: deque[tuple[Item, asyncio.Future[Answer]]] = deque()
        self._under_way = 0
        self._is_crowded = False
        self._gathers = False
        self._trips: set[asyncio.Task[None]] = set()

    @property
    def is_idle(self) -> bool:
        """Whether nobody uses it."""
        return not self._under_way and not self._waiting

    def enter(self) -> bool:
        """Whether one may go alone, at once. Whoever does must `leave` afterwards."""
        if self._waiting or self._is_crowded or self._under_way >= MOST_UNDER_WAY:  # nobody is overtaken
            return False
        self._under_way += 1
        return True

    def leave(self) -> None:
        """Say that a trip is over."""
        self._under_way -= 1
        # Not before all are back: the more go together, the less each of them costs.
        if self._waiting and not self._under_way:
            self._depart_soon()

    async def join(self, item: Item) -> Answer:
        """The answer for this item, carried together with others. First come, first served."""
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        if not self._under_way:
            self._depart_soon()
        return await future

    def _depart_soon(self) -> None:
        """Once everybody who comes in this turn of the event loop is there: those who were just answered, say."""
        if not self._gathers:
            self._gathers = True
            asyncio.get_running_loop().call_soon(self._depart)

    def _depart(self) -> None:
        self._gathers = self._is_crowded = False
        while self._waiting and self._under_way < MOST_UNDER_WAY:
            load = self._load()
            if load:
                self._is_crowded |= len(load) > 1
                self._under_way += 1
                trip = asyncio.get_running_loop().create_task(self._travel(load))
                self._trips.add(trip)
                trip.add_done_callback(self._trips.discard)

    def _load(self) -> list[tuple[Item, asyncio.Future[Answer]]]:
        load: list[tuple[Item, asyncio.Future[Answer]]] = []
        weight = 0
        while self._waiting and len(load) < MOST_CALLS:
            item, future = self._waiting[0]
            weight += self._weigh(item)
            if load and weight > MOST_BYTES:
                break
            self._waiting.popleft()
            if not future.done():  # whoever was cancelled asks for nothing any more
                load.append((item, future))
        return load

    async def _travel(self, load: list[tuple[Item, asyncio.Future[Answer]]]) -> None:
        try:
            answers: Sequence[Answer | Exception] = await self._carry([item for item, _ in load])
        except Exception as error:  # all of them must hear of it, or they would wait for ever
            answers = [error] * len(load)
        except BaseException:
            for _, future in load:
                future.cancel()
            self.leave()
            raise
        for (_, future), answer in zip(load, answers, strict=True):
            if future.done():
                continue
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)
        self.leave()  # only now: those who were answered may come again, and go with the next
