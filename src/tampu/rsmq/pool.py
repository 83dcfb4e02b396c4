"""A pool of connections, each used by one operation at a time."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from tampu.errors import ShutdownError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from tampu.redis.pipe import Pipe
    from tampu.rsmq.options import PoolOptions


class PipePool:
    """Hands out pipes, the one used last first: those that nobody needs grow old and are closed."""

    def __init__(self, options: PoolOptions, make_pipe: Callable[[], Pipe]) -> None:
        self._options = options
        self._make_pipe = make_pipe
        self._places = asyncio.Semaphore(options.max_size)
        #: Pipes nobody uses, and since when, the longest unused first.
        self._idle: deque[tuple[Pipe, float]] = deque()
        self._busy: set[Pipe] = set()
        self._closed = False

    @property
    def size(self) -> int:
        """How many pipes there are."""
        return len(self._idle) + len(self._busy)

    @property
    def idle(self) -> int:
        """How many of them nobody uses."""
        return len(self._idle)

    async def fill(self, patience_secs: float) -> None:
        """Open what is kept ready at all times; at least one, to learn whether the server is there."""
        missing = max(self._options.min_idle, 1) - len(self._idle)
        pipes = [self._make_pipe() for _ in range(missing)]
        now = asyncio.get_running_loop().time()
        self._idle.extend((pipe, now) for pipe in pipes)
        await asyncio.gather(*(pipe.up(patience_secs) for pipe in pipes))

    @asynccontextmanager
    async def pipe(self) -> AsyncIterator[Pipe]:
        """A pipe for one operation; waits while all are busy."""
        async with self._places:
            if self._closed:
                raise ShutdownError("the pool was closed by its owner")
            pipe = self._idle.pop()[0] if self._idle else self._make_pipe()
            self._busy.add(pipe)
            try:
                yield pipe
            finally:
                self._busy.discard(pipe)
                self._idle.append((pipe, asyncio.get_running_loop().time()))
                await self._close_old()

    async def close(self) -> None:
        """Close all, busy ones too."""
        self._closed = True
        pipes = [pipe for pipe, _ in self._idle] + list(self._busy)
        self._idle.clear()
        for pipe in pipes:
            await pipe.close()

    async def _close_old(self) -> None:
        too_old = asyncio.get_running_loop().time() - self._options.idle_secs
        while len(self._idle) > self._options.min_idle and self._idle[0][1] < too_old:
            await self._idle.popleft()[0].close()
