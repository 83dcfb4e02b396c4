"""Reads one partition: Arrow batches out of a span of a stream, or out of a snapshot. Needs no Spark."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tampu.spark import decode
from tampu.spark.plan import stream_key
from tampu.spark.server import Pages, QueueServer

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

    from tampu.redis.pipe import Pipe
    from tampu.spark.options import ReadOptions
    from tampu.spark.partitions import Span

#: Entries of one read from the server, and rows of one Arrow batch.
PAGE = 2_500
BATCH_ROWS = 10_000
#: Keys looked at in one step of a scan for results.
SCAN_COUNT = 1_000


def read_span(options: ReadOptions, span: Span) -> Iterator[pa.RecordBatch]:
    """The entries of a span."""
    decoder = decode.DECODERS[options.stream]
    with QueueServer(options.url, span.queue) as server:
        key = stream_key(server.keys, options.stream)
        last = str(span.last)

        async def fetch(pipe: Pipe, start: str) -> tuple[list[Any], str | None]:
            page: list[Any] = await pipe.call("XRANGE", key, start, last, "COUNT", PAGE)
            return page, "(" + page[-1][0].decode() if len(page) == PAGE else None

        entries: list[Any] = []
        # "(" for what is behind an id came with Redis 6.2, the oldest server there is for us.
        for page in Pages(server, str(span.first), fetch):
            entries += page
            if len(entries) >= BATCH_ROWS:
                batch = decoder(span.queue, entries, options.payload)
                entries = []
                yield batch
        if entries:
            yield decoder(span.queue, entries, options.payload)


def read_snapshot(options: ReadOptions, queue: str) -> Iterator[pa.RecordBatch]:
    """Everything in the delayed set, the repeatables or the results, as it passes by: not of one instant."""
    read = {"delayed": _read_delayed, "repeat": _read_repeatables, "results": _read_results}[options.stream]
    with QueueServer(options.url, queue) as server:
        yield from read(options, server)


def _read_delayed(options: ReadOptions, server: QueueServer) -> Iterator[pa.RecordBatch]:
    key = server.keys.delayed

    # By score and not by rank: what is promoted meanwhile must not push others out of the walk.
    async def fetch(pipe: Pipe, position: tuple[bytes, int]) -> tuple[list[Any], tuple[bytes, int] | None]:
        low, seen = position
        flat = await pipe.call("ZRANGEBYSCORE", key, low, "+inf", "WITHSCORES", "LIMIT", seen, PAGE)
        members = list(zip(flat[::2], flat[1::2], strict=True))
        if len(members) < PAGE:
            return members, None
        score = members[-1][1]
        ties = sum(1 for _, other in members if other == score)
        return members, (score, ties + seen if score == low else ties)

    for page in Pages(server, (b"-inf", 0), fetch):
        if page:
            members = [(member, int(float(score))) for member, score in page]
            yield decode.decode_delayed(server.keys.queue_name, members, options.payload)


def _read_repeatables(options: ReadOptions, server: QueueServer) -> Iterator[pa.RecordBatch]:
    flat = server.call("ZRANGE", server.keys.repeat, 0, -1, "WITHSCORES")
    specs: list[tuple[str, int, bytes | None, int]] = []
    for key, score in zip(flat[::2], flat[1::2], strict=True):
        spec_key = server.keys.repeat_spec("").encode() + key
        packed, fired = server.call("HMGET", spec_key, "spec", "fired")
        specs.append((key.decode(errors="replace"), int(float(score)), packed, int(fired or 0)))
    if specs:
        yield decode.decode_repeatables(server.keys.queue_name, specs, options.payload)


def _read_results(options: ReadOptions, server: QueueServer) -> Iterator[pa.RecordBatch]:
    prefix = server.keys.result("").encode()
    pattern = "".join(f"\\{letter}" if letter in "*?[]\\" else letter for letter in prefix.decode()) + "*"
    seconds, microseconds = server.call("TIME")
    now_ms = int(seconds) * 1000 + int(microseconds) // 1000
    cursor, seen = b"0", set()
    while True:
        cursor, keys = server.call("SCAN", cursor, "MATCH", pattern, "COUNT", SCAN_COUNT)
        fresh = [key for key in dict.fromkeys(keys) if key not in seen]
        seen.update(fresh)
        if fresh:
            values = server.call_many([("GET", key) for key in fresh])
            ttls = server.call_many([("PTTL", key) for key in fresh])
            rows = [
                (key[len(prefix) :].decode(errors="replace"), value, now_ms + ttl if ttl >= 0 else None)
                for key, value, ttl in zip(fresh, values, ttls, strict=True)
                if value is not None  # it expired on the way
            ]
            if rows:
                yield decode.decode_results(server.keys.queue_name, rows, options.payload)
        if cursor == b"0":
            return
