"""Reading a server: streams page by page, keys by pattern, the queues that exist, and replies as dicts and text."""

from __future__ import annotations

import asyncio
import math
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from tampu.errors import ConfigError
from tampu.redis.faults import ServerError
from tampu.wire.keys import QueueKeys

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from tampu.redis.client import Client
    from tampu.redis.connection import Part, Reply

#: Entries read in one call.
PAGE = 500
#: Keys the server examines per SCAN call.
SCAN_COUNT = 2000
#: Matches the keys that make up a queue by their last letter. Results and job indexes end differently, so a million
#: results on the server are filtered out there and not sent to us.
QUEUE_KEYS = "{chasqui:*}:*[mdqst]"
_QUEUE_KEY = re.compile(rb"\{chasqui:(?P<name>.*)\}:(?:stream|delayed|dlq|events|repeat|paused)", re.DOTALL)

Entry = tuple[bytes, list[bytes]]


async def stream_pages(
    client: Client,
    key: str,
    low: str = "-",
    high: str = "+",
    *,
    newest_first: bool = False,
    page: int = PAGE,
    first_page: int = PAGE,
    max_pages: float = math.inf,
) -> AsyncIterator[list[Entry]]:
    """Yield the entries of a stream in pages, oldest first or newest first. Entries of earlier pages may be deleted.

    A first page of `first_page` entries is followed by pages that double up to `page`: the caller may need no more.
    """
    size = min(first_page, page)
    while max_pages > 0:
        command, *span = ("XREVRANGE", high, low) if newest_first else ("XRANGE", low, high)
        entries = await client.call(command, key, *span, "COUNT", size)
        yield entries
        if len(entries) < size:
            return
        max_pages -= 1
        size = min(2 * size, page)
        last = "(" + entries[-1][0].decode()
        low, high = (low, last) if newest_first else (last, high)


async def stream_entries(client: Client, key: str, low: str = "-", **paging: Any) -> AsyncIterator[Entry]:
    """Yield the entries of a stream since `low`, one by one; `paging` as in `stream_pages`."""
    async for entries in stream_pages(client, key, low, **paging):
        for entry in entries:
            yield entry


async def newest_id(client: Client, key: str) -> str:
    """Return the ID of the newest entry of a stream, `0-0` if it has none."""
    newest = await client.call("XREVRANGE", key, "+", "-", "COUNT", 1)
    return newest[0][0].decode() if newest else "0-0"


async def stream_groups(client: Client, key: str) -> list[dict[str, Any]]:
    """Return the consumer groups of a stream; none if the stream does not exist."""
    try:
        return [as_dict(flat) for flat in await client.call("XINFO", "GROUPS", key)]
    except ServerError as error:
        if "no such key" in str(error):
            return []
        raise


async def scan_keys(client: Client, pattern: str | bytes) -> AsyncIterator[bytes]:
    """Yield all keys of a server that match, in no order; a key may be returned twice."""
    cursor = b"0"
    while True:
        cursor, keys = await client.call("SCAN", cursor, "MATCH", pattern, "COUNT", SCAN_COUNT)
        for key in keys:
            yield key
        if cursor == b"0":
            return


class FoundQueues(NamedTuple):
    """Sorted names of queues; `unusable` holds names that tampu cannot open: not UTF-8, or with braces."""

    names: list[str]
    unusable: list[bytes]


async def find_queues(clients: Sequence[Client]) -> FoundQueues:
    """Return the queues on these servers."""
    raw: set[bytes] = set()
    for client in clients:
        raw |= {found["name"] async for key in scan_keys(client, QUEUE_KEYS) if (found := _QUEUE_KEY.fullmatch(key))}
    names: list[str] = []
    unusable: list[bytes] = []
    for name in sorted(raw):
        try:
            names.append(QueueKeys(name.decode()).queue_name)
        except (UnicodeDecodeError, ConfigError):
            unusable.append(name)
    return FoundQueues(names, unusable)


async def ask_each(client: Client, commands: Sequence[tuple[Part, ...]]) -> list[Reply | ServerError]:
    """Send several commands at once. Server errors are returned as values, so that one does not hide other replies."""
    replies = await asyncio.gather(*(client.call(*command) for command in commands), return_exceptions=True)
    for reply in replies:
        if isinstance(reply, BaseException) and not isinstance(reply, ServerError):
            raise reply
    return list(replies)


def text(value: bytes) -> str:
    """Decode a name from the server. Bytes that are not UTF-8 are escaped."""
    return value.decode(errors="backslashreplace")


def as_dict(flat: Sequence[Any]) -> dict[str, Any]:
    """Return a flat reply of names and values as a dict."""
    return {text(name): value for name, value in zip(flat[::2], flat[1::2], strict=True)}
