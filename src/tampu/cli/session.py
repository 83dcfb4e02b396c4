"""One command's way to the server: finds it quickly or says why not, and closes what it opened."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self, TypeVar

from tampu.cli.exits import CliError
from tampu.cli.finder import FoundQueues, find_queues
from tampu.queue import Queue
from tampu.queue_events import QueueEvents
from tampu.redis.pipe import Pipe
from tampu.redis.settings import Address, parse_url, resolve_url
from tampu.wire.keys import QueueKeys

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from types import TracebackType

T = TypeVar("T")

#: Where commands about the server and not about a queue are sent on a Cluster: to whoever serves this key.
ANY_KEY = b"{chasqui:}"
#: Queues named in an error's text.
MOST_NAMED = 10


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a command's work. Ctrl-C cancels it and raises KeyboardInterrupt."""
    with asyncio.Runner() as runner:
        return runner.run(work)


class Session:
    """`async with Session(url, timeout_secs) as session:`"""

    def __init__(self, url: str | None, timeout_secs: float) -> None:
        self._url = resolve_url(url)
        self._timeout_secs = timeout_secs
        self.settings = parse_url(self._url)
        self._closing = contextlib.AsyncExitStack()
        self._pipe: Pipe | None = None
        self._masters: list[tuple[str, Pipe]] = []

    @property
    def place(self) -> str:
        """The server's address, fit to be shown: without password."""
        if self.settings.kind == "embedded":
            return f"embedded://{self.settings.data_dir or ''}"
        return ", ".join(map(str, self.settings.addresses))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._closing.aclose()

    async def new_queue(self, name: str) -> Queue:
        """A queue, connected, whether it exists or not."""
        queue = Queue(name, url=self._url)
        self._closing.push_async_callback(queue.close)
        await queue.producer.ready_pipe().up(self._timeout_secs)
        return queue

    async def queue(self, name: str) -> Queue:
        """A queue that exists; an error that names those that do otherwise."""
        queue = await self.new_queue(name)
        await self._require(queue.producer.ready_pipe(), queue.keys)
        return queue

    async def views(self, name: str | None) -> list[tuple[Pipe, QueueKeys]]:
        """For looking only: the queue of that name, or without a name all there are, each with a pipe to its server."""
        if name is None:
            return [await self.view(found) for found in (await self.find_queues()).names]
        view = await self.view(name)
        await self._require(*view)
        return [view]

    async def view(self, name: str) -> tuple[Pipe, QueueKeys]:
        """The same of one queue, whether it exists or not."""
        keys = QueueKeys(name)
        if self.settings.kind == "cluster":
            return await self._open(Pipe(self.settings, keys.tag.encode())), keys
        return await self.pipe(), keys

    async def _require(self, pipe: Pipe, keys: QueueKeys) -> None:
        own = (keys.stream, keys.delayed, keys.dlq, keys.events, keys.repeat, keys.paused)
        if await pipe.call("EXISTS", *own):
            return
        there = (await self.find_queues()).names
        known = ", ".join(there[:MOST_NAMED]) + (" ..." if len(there) > MOST_NAMED else "")
        raise CliError(
            f"there is no queue {keys.queue_name!r} at {self.place}; "
            + (f"there are: {known}" if there else "there is none yet")
        )

    def follow(self, name: str, last_event_id: str) -> QueueEvents:
        """The events of a queue behind that id."""
        return QueueEvents(name, url=self._url, last_event_id=last_event_id)

    async def find_queues(self) -> FoundQueues:
        """The queues on all nodes."""
        return await find_queues([pipe for _, pipe in await self.nodes()])

    async def pipe(self) -> Pipe:
        """A pipe for commands about the server and not about a queue."""
        if self._pipe is None:
            self._pipe = await self._open(Pipe(self.settings, ANY_KEY))
        return self._pipe

    async def nodes(self) -> list[tuple[str, Pipe]]:
        """The name of, and a pipe to, each server that holds data: one, or the masters of a Cluster."""
        pipe = await self.pipe()
        if self.settings.kind != "cluster":
            return [(self.place, pipe)]
        if not self._masters:
            addresses = {
                Address(master[0].decode() or self.settings.addresses[0].host, master[1])
                for _, _, master, *_ in await pipe.call("CLUSTER", "SLOTS")
            }
            self._masters = [(str(each), await self._open_node(each)) for each in sorted(addresses, key=str)]
        return self._masters

    async def _open_node(self, address: Address) -> Pipe:
        return await self._open(Pipe(replace(self.settings, kind="single", addresses=(address,)), ANY_KEY))

    async def _open(self, pipe: Pipe) -> Pipe:
        self._closing.push_async_callback(pipe.close)
        await pipe.up(self._timeout_secs)
        return pipe


async def server_now_ms(pipe: Pipe) -> int:
    """The server's clock."""
    seconds, microseconds = await pipe.call("TIME")
    return int(seconds) * 1000 + int(microseconds) // 1000
