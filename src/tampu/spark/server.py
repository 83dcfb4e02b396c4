"""A synchronous client for the server of one queue, with paged reads, and a pause for Python's garbage collector.

Create a `QueueServer` where it is used, on the driver or on an executor: connections cannot be pickled.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import re
from typing import TYPE_CHECKING, Any, TypeVar

from tampu.base.event_loop import LoopThread
from tampu.errors import ConfigError
from tampu.inspect.streams import find_queues
from tampu.redis.client import DEFAULT_PATIENCE_SECS, Client
from tampu.redis.settings import parse_url
from tampu.wire.keys import QueueKeys

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Sequence

    from tampu.redis.connection import Part, Reply
    from tampu.redis.scripts import Script
    from tampu.spark.options import ReadOptions
    from tampu.spark.read.partitions import Span

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


#: Maximum number of entries in one read, and in the first read of a span, when their size is not known yet.
PAGE = 2_500
FIRST_PAGE = 16
#: Size of one read that is aimed at, in bytes.
PAGE_BYTES = 8 * 1024 * 1024


def next_count(sizes: Sequence[int], count: int) -> int:
    """Return how many entries to read next, after a page of at most `count` entries of these sizes in bytes."""
    fitting = PAGE_BYTES // max(1, *sizes, 1)
    return max(1, min(fitting, 2 * count, PAGE))


def span_pages(server: QueueServer, key: str, span: Span | None = None) -> Iterator[tuple[list[Any], int]]:
    """Yield the entries of a span, by default all, in pages of about `PAGE_BYTES`, and the size of each in bytes.

    XRANGE limits entries, not bytes. So each page is sized by the largest entry of the page before, and has at most
    twice as many entries as that one: a payload of 1 MB in 2,500 entries would be 2.5 GB in one reply.
    """
    first, last = ("-", "+") if span is None else (str(span.first), str(span.last))

    async def fetch(client: Client, position: tuple[str, int]) -> tuple[Any, tuple[str, int] | None]:
        start, count = position
        page: list[Any] = await client.call("XRANGE", key, start, last, "COUNT", count)
        sizes = [sum(map(len, fields)) for _, fields in page]
        if len(page) < count or page[-1][0].decode() == last:  # nothing can follow the highest ID of all
            return (page, sum(sizes)), None
        # "(" for what is behind an ID came with Redis 6.2, the oldest server that tampu supports.
        return (page, sum(sizes)), ("(" + page[-1][0].decode(), next_count(sizes, count))

    return pages(server, (first, FIRST_PAGE), fetch)


def check_can_scan(url: str) -> None:
    """Raise `ConfigError` if the keys of a server cannot be listed in one place."""
    if parse_url(url).kind == "cluster":
        raise ConfigError("option subscribePattern does not work with a Cluster: name the queues with option queue")


def queues_of(options: ReadOptions) -> tuple[str, ...]:
    """Return the queues of a read: those that were named, or those that match now, in order."""
    if options.queue_pattern is None:
        return options.queues
    pattern = re.compile(options.queue_pattern)
    with QueueServer(options.url, "default") as server:
        found = server.do(lambda client: find_queues([client]))
    return tuple(name for name in found.names if pattern.fullmatch(name))
