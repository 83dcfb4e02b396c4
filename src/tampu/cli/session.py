"""A command's connection to the server: connects or fails within the timeout, and closes what it opened."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from tampu.cli.errors import CliError
from tampu.cli.options import DEFAULT_TIMEOUT_SECS, AsJson, Timeout, Url
from tampu.cli.output import say, show, write_json
from tampu.events import QueueEvents
from tampu.inspect.admin import QueueAdmin
from tampu.inspect.registry import ServerView
from tampu.inspect.streams import FoundQueues, find_queues
from tampu.queue import Queue
from tampu.redis.faults import ServerError
from tampu.redis.settings import parse_url, resolve_url
from tampu.wire.codec import codec_from_environment, queue_codec
from tampu.wire.keys import QueueKeys

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping

    from rich.console import RenderableType

    from tampu.redis.client import Client
    from tampu.wire.codec import QueueCodec

P = ParamSpec("P")
T = TypeVar("T")

#: Maximum number of queues listed in an error message.
MAX_NAMED = 10


def run(work: Coroutine[Any, Any, T], loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None) -> T:
    """Run a command's coroutine. Ctrl-C cancels it and raises KeyboardInterrupt."""
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(work)


@dataclass(frozen=True, slots=True)
class CommonOptions:
    """Options that nearly every command has; a command takes them as its first parameter."""

    as_json: AsJson = False
    url: Url = None
    timeout: Timeout = DEFAULT_TIMEOUT_SECS

    def run(self, work: Callable[Concatenate[Session, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `work(session, *args, **kwargs)`, close the session, and return the result."""

        async def open_and_work() -> T:
            async with Session(self.url, self.timeout) as session:
                return await work(session, *args, **kwargs)

        return run(open_and_work())

    def read(self, queue: str, work: Callable[[QueueAdmin], Awaitable[T]]) -> T:
        """Run `work` with the admin object of an existing queue and a client that loads no scripts."""

        async def work_on(session: Session) -> T:
            [admin] = await session.admins(queue)
            return await work(admin)

        return self.run(work_on)

    def change(self, queue: str, work: Callable[[QueueAdmin], Awaitable[T]]) -> T:
        """Run `work` with the admin object of an existing queue and a client that can change it."""

        async def work_on(session: Session) -> T:
            return await work((await session.queue(queue)).producer.admin)

        return self.run(work_on)

    def report(self, value: Any, view: RenderableType) -> None:
        """Print a result as JSON, or as text or a table unless that is empty."""
        if self.as_json:
            write_json(value)
        elif view != "":
            show(view)


class Session(contextlib.AsyncExitStack):
    """Connections to the server for one command: `async with Session(url, timeout_secs) as session:`."""

    def __init__(self, url: str | None, timeout_secs: float) -> None:
        super().__init__()
        self._url = resolve_url(url)
        self._timeout_secs = timeout_secs
        self.settings = parse_url(self._url)
        self.view = ServerView(self.settings, patience_secs=timeout_secs)
        self.push_async_callback(self.view.close)

    @property
    def place(self) -> str:
        """Return the server's address without the password, for messages."""
        if self.settings.kind == "embedded":
            return f"embedded://{self.settings.data_dir or ''}"
        return ", ".join(map(str, self.settings.addresses))

    async def new_queue(self, name: str, *, strict: bool = False) -> Queue:
        """Return a connected queue, whether or not it exists on the server."""
        queue = Queue(name, url=self._url, strict=strict, codec=codec_from_environment())
        self.push_async_callback(queue.close)
        await queue.producer.ready_client().up(self._timeout_secs)
        return queue

    async def queue(self, name: str) -> Queue:
        """Return an existing queue; otherwise raise `CliError` with the names of the queues that exist."""
        queue = await self.new_queue(name)
        await self._require(queue.producer.admin)
        return queue

    async def admins(self, name: str | None, *, opens_results: bool = False) -> list[QueueAdmin]:
        """Return the admin object of the queue `name`, or of every queue, for reading: their client loads no scripts.

        `opens_results` gives them the codec of the environment.
        """
        names = (await self.find_queues()).names if name is None else [name]
        found = [await self.new_admin(each, queue_codec(each) if opens_results else None) for each in names]
        if name is not None:
            await self._require(found[0])
        return found

    async def new_admin(self, name: str, codec: QueueCodec | None = None) -> QueueAdmin:
        """Return the admin object of a queue for reading, whether or not the queue exists on the server."""
        return QueueAdmin(await self.view.client(name), QueueKeys(name), codec=codec)

    async def _require(self, admin: QueueAdmin) -> None:
        if await admin.exists():
            return
        there = (await self.find_queues()).names
        known = ", ".join(there[:MAX_NAMED]) + (" ..." if len(there) > MAX_NAMED else "")
        raise CliError(
            f"no queue {admin.name!r} at {self.place}; "
            + (f"existing queues: {known}" if there else "there are no queues yet")
        )

    def follow(self, name: str, last_event_id: str) -> QueueEvents:
        """Return a queue's events after the given entry ID."""
        return QueueEvents(name, url=self._url, last_event_id=last_event_id)

    async def find_queues(self) -> FoundQueues:
        """Return the queues on all nodes."""
        return await find_queues([client for _, client in await self.nodes()])

    async def client(self) -> Client:
        """Return a client for commands about the server rather than a queue."""
        return await self.view.client()

    async def nodes(self) -> list[tuple[str, Client]]:
        """Return the name of, and a client for, each server with data: a single one, or a Cluster's masters."""
        return await self.view.nodes()


@contextlib.contextmanager
def skip_if_broken(queue: str, *, is_one_of_many: bool) -> Iterator[None]:
    """Print a server error about one of many queues as one line, so that it does not hide the others."""
    try:
        yield
    except ServerError as error:
        if not is_one_of_many:
            raise
        say(f"queue {queue} cannot be read: {error}; run `tampu doctor`", "yellow")


def parse_info(text: bytes) -> dict[str, str]:
    """Return the reply of INFO as a dict."""
    lines = text.decode(errors="replace").splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line and not line.startswith("#"))


def product_version(info: Mapping[str, str]) -> str:
    """Return `Valkey 8.1.4` or `Redis 7.2.5`."""
    if "valkey_version" in info:
        return f"Valkey {info['valkey_version']}"
    return f"Redis {info.get('redis_version', 'unknown')}"
