"""The server of one queue, for code without an event loop: the engine's Pipe behind plain calls.

Made where it is used, on the driver or on an executor: connections do not travel.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Self

from tampu.loop_thread import LoopThread
from tampu.redis.pipe import DEFAULT_PATIENCE_SECS, Pipe
from tampu.redis.settings import parse_url
from tampu.wire.keys import QueueKeys

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence
    from types import TracebackType
    from typing import TypeVar

    from tampu.redis.connection import Part, Reply
    from tampu.redis.scripts import Script

    T = TypeVar("T")


class QueueServer:
    """Commands about one queue. Close it, or use it with `with`."""

    def __init__(self, url: str, queue: str, scripts: Sequence[Script] = ()) -> None:
        self.keys = QueueKeys(queue)
        self._thread = LoopThread()
        self._pipe = self._thread.run(_make_pipe(url, self.keys.tag.encode(), scripts))

    def call(self, *parts: Part, patience_secs: float = DEFAULT_PATIENCE_SECS) -> Reply:
        """One command and its reply."""
        return self._thread.run(self._pipe.call(*parts, patience_secs=patience_secs))

    def call_many(self, commands: Sequence[tuple[Part, ...]]) -> list[Reply]:
        """Several commands, sent together."""
        return self._thread.run(self._pipe.call_many(commands))

    def run(self, script: Script, keys: Sequence[bytes | str], args: Sequence[Part]) -> Reply:
        """One script call and its reply."""
        return self._thread.run(self._pipe.run(script, keys, args))

    def do(self, work: Callable[[Pipe], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine that is given the pipe."""
        return self._thread.run(work(self._pipe))

    def close(self) -> None:
        """Close the connection and end the thread."""
        self._thread.run(self._pipe.close())
        self._thread.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


async def _make_pipe(url: str, tag: bytes, scripts: Sequence[Script]) -> Pipe:
    return Pipe(parse_url(url), tag, scripts)


class Pages:
    """Pages of a walk, each fetched while the one before is worked on.

    `fetch(pipe, position)` gives a page and the position behind it, None at the end.
    """

    def __init__(
        self, server: QueueServer, first: Any, fetch: Callable[[Pipe, Any], Awaitable[tuple[list[Any], Any]]]
    ) -> None:
        self._server = server
        self._fetch = fetch
        self._pending: Any = None
        self._position = first

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> list[Any]:
        if self._position is None:
            raise StopIteration
        return self._server.do(self._step)

    async def _step(self, pipe: Pipe) -> list[Any]:
        async def fetch(position: Any) -> tuple[list[Any], Any]:
            return await self._fetch(pipe, position)

        if self._pending is None:
            self._pending = asyncio.ensure_future(fetch(self._position))
        page, self._position = await self._pending
        self._pending = None if self._position is None else asyncio.ensure_future(fetch(self._position))
        return list(page)
