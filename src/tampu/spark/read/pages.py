"""Reads a range of a stream in pages of bounded size. Needs no Spark."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tampu.spark.server import QueueServer, pages

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tampu.redis.client import Client
    from tampu.spark.read.partitions import Span

#: Maximum number of entries in one read, and in the first read of a span, when their size is not known yet.
PAGE = 2_500
FIRST_PAGE = 16
#: Size of one read that is aimed at, in bytes.
PAGE_BYTES = 8 * 1024 * 1024


def next_count(sizes: Sequence[int], count: int) -> int:
    """Return how many entries to read next, after a page of at most `count` entries of these sizes in bytes."""
    fitting = PAGE_BYTES // max(1, *sizes, 1)
    return max(1, min(fitting, 2 * count, PAGE))


def span_pages(server: QueueServer, key: str, span: Span) -> Iterator[tuple[list[Any], int]]:
    """Yield the entries of a span in pages of about `PAGE_BYTES`, and the size of each in bytes.

    XRANGE limits entries, not bytes. So each page is sized by the largest entry of the page before, and has at most
    twice as many entries as that one: a payload of 1 MB in 2,500 entries would be 2.5 GB in one reply.
    """
    last = str(span.last)

    async def fetch(client: Client, position: tuple[str, int]) -> tuple[Any, tuple[str, int] | None]:
        start, count = position
        page: list[Any] = await client.call("XRANGE", key, start, last, "COUNT", count)
        sizes = [sum(map(len, fields)) for _, fields in page]
        if len(page) < count or page[-1][0].decode() == last:  # nothing can follow the highest ID of all
            return (page, sum(sizes)), None
        # "(" for what is behind an ID came with Redis 6.2, the oldest server that tampu supports.
        return (page, sum(sizes)), ("(" + page[-1][0].decode(), next_count(sizes, count))

    return pages(server, (str(span.first), FIRST_PAGE), fetch)
