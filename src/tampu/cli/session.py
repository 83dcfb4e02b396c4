"""A command's connection to the server: connects or fails within the timeout, and closes what it opened."""

from __future__ import annotations

import asyncio
import contextlib
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar

from tampu.cli.errors import CliError
from tampu.cli.options import DEFAULT_TIMEOUT_SECS, AsJson, Timeout, Url
from tampu.cli.output import say
from tampu.errors import ConfigError
from tampu.events import QueueEvents
from tampu.queue import Queue
from tampu.redis.client import Client
from tampu.redis.faults import ServerError
from tampu.redis.settings import Address, parse_url, resolve_url
from tampu.wire.codec import codec_from_environment
from tampu.wire.keys import QueueKeys

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
    from types import TracebackType

P = ParamSpec("P")
T = TypeVar("T")

#: Routing key for commands about the server rather than a queue: on a Cluster they go to the node that owns this key.
ANY_KEY = b"{chasqui:}"
#: Maximum number of queues listed in an error message.
MOST_NAMED = 10
#: Matches the keys that make up a queue by their last letter. Results and job indexes end differently, so a million
#: results on the server are filtered out there and not sent to us.
PATTERN = "{chasqui:*}:*[mdqst]"
_KEY = re.compile(rb"\{chasqui:(?P<name>.*)\}:(?:stream|delayed|dlq|events|repeat|paused)", re.DOTALL)
#: Keys the server examines per SCAN call.
SCAN_COUNT = 2000


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


class Session:
    """Connections to the server for one command: `async with Session(url, timeout_secs) as session:`."""

    def __init__(self, url: str | None, timeout_secs: float) -> None:
        self._url = resolve_url(url)
        self._timeout_secs = timeout_secs
        self.settings = parse_url(self._url)
        self._closing = contextlib.AsyncExitStack()
        self._client: Client | None = None
        self._masters: list[tuple[str, Client]] = []

    @property
    def place(self) -> str:
        """Return the server's address without the password, for messages."""
        if self.settings.kind == "embedded":
            return f"embedded://{self.settings.data_dir or ''}"
        return ", ".join(map(str, self.settings.addresses))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._closing.aclose()

    async def new_queue(self, name: str, *, strict: bool = False) -> Queue:
        """Return a connected queue, whether or not it exists on the server."""
        queue = Queue(name, url=self._url, strict=strict, codec=codec_from_environment())
        self._closing.push_async_callback(queue.close)
        await queue.producer.ready_client().up(self._timeout_secs)
        return queue

    async def queue(self, name: str) -> Queue:
        """Return an existing queue; otherwise raise `CliError` with the names of the queues that exist."""
        queue = await self.new_queue(name)
        await self._require(queue.producer.ready_client(), queue.keys)
        return queue

    async def views(self, name: str | None) -> list[tuple[Client, QueueKeys]]:
        """Return (client, keys) for reading: of the queue `name`, or of every queue."""
        if name is None:
            return [await self.view(found) for found in (await self.find_queues()).names]
        view = await self.view(name)
        await self._require(*view)
        return [view]

    async def view(self, name: str) -> tuple[Client, QueueKeys]:
        """Return (client, keys) for reading one queue, whether or not it exists on the server."""
        keys = QueueKeys(name)
        if self.settings.kind == "cluster":
            return await self._open(Client(self.settings, keys.tag.encode())), keys
        return await self.client(), keys

    async def _require(self, client: Client, keys: QueueKeys) -> None:
        own = (keys.stream, keys.delayed, keys.dlq, keys.events, keys.repeat, keys.paused)
        if await client.call("EXISTS", *own):
            return
        there = (await self.find_queues()).names
        known = ", ".join(there[:MOST_NAMED]) + (" ..." if len(there) > MOST_NAMED else "")
        raise CliError(
            f"no queue {keys.queue_name!r} at {self.place}; "
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
        if self._client is None:
            self._client = await self._open(Client(self.settings, ANY_KEY))
        return self._client

    async def nodes(self) -> list[tuple[str, Client]]:
        """Return the name of, and a client for, each server with data: a single one, or a Cluster's masters."""
        client = await self.client()
        if self.settings.kind != "cluster":
            return [(self.place, client)]
        if not self._masters:
            addresses = {
                Address(master[0].decode() or self.settings.addresses[0].host, master[1])
                for _, _, master, *_ in await client.call("CLUSTER", "SLOTS")
            }
            self._masters = [(str(each), await self._open_node(each)) for each in sorted(addresses, key=str)]
        return self._masters

    async def _open_node(self, address: Address) -> Client:
        return await self._open(Client(replace(self.settings, kind="single", addresses=(address,)), ANY_KEY))

    async def _open(self, client: Client) -> Client:
        self._closing.push_async_callback(client.close)
        await client.up(self._timeout_secs)
        return client


@dataclass(frozen=True, slots=True)
class FoundQueues:
    """Sorted names of queues; `unusable` holds names that tampu cannot open: not UTF-8, or with braces."""

    names: list[str]
    unusable: list[bytes]


@contextlib.contextmanager
def skip_if_broken(queue: str, *, is_one_of_many: bool) -> Iterator[None]:
    """Print a server error about one of many queues as one line, so that it does not hide the others."""
    try:
        yield
    except ServerError as error:
        if not is_one_of_many:
            raise
        say(f"queue {queue} cannot be read: {error}; run `tampu doctor`", "yellow")


async def find_queues(clients: Sequence[Client]) -> FoundQueues:
    """Return the queues on these servers."""
    raw: set[bytes] = set()
    for client in clients:
        async for key in scan_keys(client, PATTERN):
            if found := _KEY.fullmatch(key):
                raw.add(found["name"])
    names: list[str] = []
    unusable: list[bytes] = []
    for name in sorted(raw):
        try:
            names.append(QueueKeys(name.decode()).queue_name)
        except (UnicodeDecodeError, ConfigError):
            unusable.append(name)
    return FoundQueues(names, unusable)


async def scan_keys(client: Client, pattern: str | bytes) -> AsyncIterator[bytes]:
    """Yield all keys of a server that match, in no order; a key may be returned twice."""
    cursor = b"0"
    while True:
        cursor, keys = await client.call("SCAN", cursor, "MATCH", pattern, "COUNT", SCAN_COUNT)
        for key in keys:
            yield key
        if cursor == b"0":
            return


def literal_glob(text: str) -> str:
    """Return a glob pattern that matches exactly this text."""
    return "".join(f"\\{character}" if character in "*?[]^\\" else character for character in text)


def parse_info(text: bytes) -> dict[str, str]:
    """Return the reply of INFO as a dict."""
    lines = text.decode(errors="replace").splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line and not line.startswith("#"))


def product_version(info: Mapping[str, str]) -> str:
    """Return `Valkey 8.1.4` or `Redis 7.2.5`."""
    if "valkey_version" in info:
        return f"Valkey {info['valkey_version']}"
    return f"Redis {info.get('redis_version', 'unknown')}"
