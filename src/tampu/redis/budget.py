"""Bounds the bytes of requests under way: who comes when there is no room waits in line."""

from __future__ import annotations

import asyncio
from collections import deque


class ByteBudget:
    """So many bytes at once, given out in the order they are asked for. A request larger than all of it goes alone."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._taken = 0
        self._line: deque[asyncio.Future[None]] = deque()

    async def take(self, size: int) -> None:
        """Wait until there is room for so many bytes, and take it."""
        while self._taken and self._taken + size > self._size:
            place = asyncio.get_running_loop().create_future()
            self._line.append(place)
            try:
                await place
            except asyncio.CancelledError:
                if not place.cancelled():
                    self._call_next()  # we were called, and leave: the next one takes our place
                raise
        self._taken += size
        if self._taken < self._size:
            self._call_next()

    def give_back(self, size: int) -> None:
        """Say that the request of so many bytes has its answer."""
        self._taken -= size
        self._call_next()

    def reset(self) -> None:
        """Forget all who have some or wait for some: they belong to another process or to a loop that has ended."""
        self._taken = 0
        self._line.clear()

    def _call_next(self) -> None:
        while self._line:
            place = self._line.popleft()
            if not place.done():
                place.set_result(None)
                return
