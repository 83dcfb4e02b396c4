"""A synchronous client for the server of one queue, and a pause for Python's garbage collector.

Create a `QueueServer` where it is used, on the driver or on an executor: connections cannot be pickled.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
from typing import TYPE_CHECKING, Any, TypeVar

from tampu.base.event_loop import LoopThread
from tampu.redis.client import DEFAULT_PATIENCE_SECS, Client
from tampu.redis.settings import parse_url
from tampu.wire.codec import QueueCodec, codec_from_environment
from tampu.wire.keys import QueueKeys

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Sequence

    from tampu.redis.connection import Part, Reply
    from tampu.redis.scripts import Script

T = TypeVar("T")
P = TypeVar("P")


class QueueServer(contextlib.AbstractContextManager["QueueServer"]):
    """Sends commands about one queue. Close it, or use it in a `with` block."""

    def __init__(self, url: str, queue: str, scripts: Sequence[Script] = ()) -> None:
        self.keys = QueueKeys(queue)
        self._thread = LoopThread()
        self._client = self._thread.run(_make_client(url, self.keys.tag.encode(), scripts))

    def call(self, *parts: Part, patience_secs: float = DEFAULT_PATIENCE_SECS) -> Reply:
        """Send one command and return its reply."""
        return self._thread.run(self._client.call(*parts, patience_secs=patience_secs))

    def call_many(self, commands: Sequence[tuple[Part, ...]]) -> list[Reply]:
        """Send several commands together and return their replies."""
        return self._thread.run(self._client.call_many(commands))

    def send(self, packed: bytes) -> Reply:
        """Send a packed call and return its reply."""
        return self._thread.run(self._client.send(packed))

    def do(self, work: Callable[[Client], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine function with the client and return its result."""
        return self._thread.run(work(self._client))

    def start(self, work: Callable[[Client], Coroutine[Any, Any, T]]) -> asyncio.Task[T]:
        """Start a coroutine function with the client; `result_of` waits for it."""

        async def start() -> asyncio.Task[T]:
            return asyncio.ensure_future(work(self._client))

        return self._thread.run(start())

    def result_of(self, task: asyncio.Task[T]) -> T:
        """Wait for a started task and return its result."""

        async def wait() -> T:
            return await task

        return self._thread.run(wait())

    def close(self) -> None:
        """Close the connection and end the thread."""
        self._thread.run(self._client.close())
        self._thread.stop()

    def __exit__(self, *error: object) -> None:
        self.close()


def queue_codec(queue: str) -> QueueCodec | None:
    """Return the codec of the executor's environment (`TAMPU_CODEC`) for a queue; None if it is not set."""
    return QueueCodec.of(codec_from_environment(), queue)


async def _make_client(url: str, tag: bytes, scripts: Sequence[Script]) -> Client:
    return Client(parse_url(url), tag, scripts)


def pages(
    server: QueueServer, first: P, fetch: Callable[[Client, P], Coroutine[Any, Any, tuple[T, P | None]]]
) -> Iterator[T]:
    """Yield the pages of a long read; each is fetched while the caller works on the one before.

    `fetch(client, position)` returns a page and the position after it, None at the end.
    """
    pending: asyncio.Task[tuple[T, P | None]] | None = server.start(lambda client: fetch(client, first))
    while pending is not None:
        page, position = server.result_of(pending)
        pending = None if position is None else server.start(lambda client, at=position: fetch(client, at))  # type: ignore[misc]
        yield page
        del page  # the caller may have dropped it: two pages in memory are enough


# --- garbage collection


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Pause the cyclic garbage collector within the block.

    Replies and rows are trees that reference counting frees. Scanning them for cycles finds nothing and took 40 % of
    a read.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def made_with_gc_paused(batches: Iterator[T]) -> Iterator[T]:
    """Yield the batches; the collector pauses while one is made, and runs while the caller works on it."""
    nothing = object()
    while True:
        with gc_paused():
            batch = next(batches, nothing)
        if batch is nothing:
            return
        yield batch  # type: ignore[misc]
