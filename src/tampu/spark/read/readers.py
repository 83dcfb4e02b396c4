"""The readers that Spark calls: partitions and offsets on the driver, Arrow batches on executors."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition

from tampu.redis.acl import literal_glob
from tampu.spark.options import WITH_IDS
from tampu.spark.read import decode
from tampu.spark.read.offsets import stream_key
from tampu.spark.read.plan import StreamPlanner, plan_batch, require_queue
from tampu.spark.server import FIRST_PAGE, QueueServer, made_with_gc_paused, next_count, pages, queues_of, span_pages
from tampu.wire.entry import score_ms

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import pyarrow as pa
    from pyspark.sql.datasource import Filter

    from tampu.redis.client import Client
    from tampu.spark.options import Payload, ReadOptions
    from tampu.spark.read.partitions import Span

try:
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadLimit,
        ReadMaxRows,
        SupportsTriggerAvailableNow,
    )
except ImportError:  # PySpark 4.0 and 4.1
    HAS_ADMISSION_CONTROL = False
else:
    HAS_ADMISSION_CONTROL = "limit" in inspect.signature(DataSourceStreamReader.latestOffset).parameters

#: Most rows of an Arrow batch, and the size of its entries at which it is passed on, in bytes.
BATCH_ROWS = 10_000
BATCH_BYTES = 32 * 1024 * 1024
#: Keys per step of a scan for results.
SCAN_COUNT = 1_000


class BatchReader(DataSourceReader):
    """`spark.read`."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options

    def partitions(self) -> Sequence[InputPartition]:
        whole = self._options.stream not in WITH_IDS
        return [InputPartition(part) for part in (queues_of(self._options) if whole else plan_batch(self._options))]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_partition(self._options, partition)


class PushdownReader(BatchReader):
    """`spark.read` with `pushdown=true`: reads only what conditions on `queue`, `entry_ms` and `event` leave.

    A separate class: Spark refuses a reader with `pushFilters` if `spark.sql.python.filterPushdown.enabled` is off.
    """

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's name
        for condition in filters:
            self._options = narrowed(self._options, condition)
            yield condition  # Spark checks all of them again: what is read may be more than what was asked for


def narrowed(options: ReadOptions, condition: Filter) -> ReadOptions:
    """Return the options of a read without what the condition excludes. Conditions of other kinds change nothing."""
    from pyspark.sql.datasource import (  # not in PySpark 4.0
        EqualTo,
        GreaterThan,
        GreaterThanOrEqual,
        In,
        LessThan,
        LessThanOrEqual,
    )

    column, value = getattr(condition, "attribute", ()), getattr(condition, "value", None)
    if isinstance(condition, EqualTo | In):
        values = set(value if isinstance(condition, In) else (value,))  # type: ignore[arg-type]
        if column == ("queue",) and options.queue_pattern is None:
            return replace(options, queues=tuple(queue for queue in options.queues if queue in values))
        if column == ("event",) and options.stream == "events":
            events = {str(item).encode() for item in values}
            return replace(options, events=frozenset(events if options.events is None else events & options.events))
        if column == ("entry_ms",) and all(isinstance(item, int) for item in values) and values:
            return _within(options, min(values), max(values))
    if column == ("entry_ms",) and isinstance(value, int):
        if isinstance(condition, GreaterThan | GreaterThanOrEqual):
            return _within(options, value, None)
        if isinstance(condition, LessThan | LessThanOrEqual):
            return _within(options, None, value)
    return options


def _within(options: ReadOptions, first_ms: int | None, last_ms: int | None) -> ReadOptions:
    firsts = [ms for ms in (first_ms, options.first_ms) if ms is not None]
    lasts = [ms for ms in (last_ms, options.last_ms) if ms is not None]
    return replace(options, first_ms=max(firsts, default=None), last_ms=min(lasts, default=None))


class _StreamReader(DataSourceStreamReader):
    """Common part of the readers for all versions of PySpark."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._opened: StreamPlanner | None = None

    @property
    def _planner(self) -> StreamPlanner:
        # Created at first use: this object is also sent to executors, which only read.
        if self._opened is None:
            self._opened = StreamPlanner(self._options)
        return self._opened

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        return self._planner.initial()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        return [InputPartition(span) for span in self._planner.plan(_offsets(start), _offsets(end))]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_partition(self._options, partition)

    def stop(self) -> None:
        if self._opened is not None:
            self._opened.close()


def _offsets(given: dict[str, Any] | str) -> dict[str, Any]:
    """Return offsets, which arrive as text on Spark Connect."""
    found: dict[str, Any] = json.loads(given) if isinstance(given, str) else given
    return found


class PlainStreamReader(_StreamReader):
    """`spark.readStream` before PySpark 4.2: each micro-batch reads everything that is present."""

    def latestOffset(self) -> dict[str, Any]:  # type: ignore[override]  # noqa: N802 - the signature of 4.0 and 4.1
        return self._planner.latest(None, None)


if HAS_ADMISSION_CONTROL:

    class LimitedStreamReader(_StreamReader, SupportsTriggerAvailableNow):
        """`spark.readStream` with `maxOffsetsPerTrigger`, and with an end under `availableNow`."""

        def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
            most = self._options.max_offsets_per_trigger
            return ReadMaxRows(most) if most else ReadAllAvailable()

        def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
            return self._planner.latest(_offsets(start), limit.max_rows if isinstance(limit, ReadMaxRows) else None)

        def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
            return self._planner.newest()

        def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
            self._planner.stop_at_now()


# --- one partition


def read_partition(options: ReadOptions, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    """Read a span of a stream, or the snapshot of a queue."""
    part: Span | str | None = getattr(partition, "value", None)
    if part is None:
        return iter(())  # Spark's placeholder for "no partitions"
    batches = read_snapshot(options, part) if isinstance(part, str) else read_span(options, part)
    return made_with_gc_paused(batches)


def read_span(options: ReadOptions, span: Span) -> Iterator[pa.RecordBatch]:
    """Yield the entries of a span."""
    events = options.events
    with QueueServer(options.url, span.queue) as server:
        found = span_pages(server, stream_key(server.keys, options.stream), span)
        if events is not None:
            found = (([entry for entry in page if _event(entry) in events], held) for page, held in found)
        yield from _batches(found, decode.DECODERS[options.stream], span.queue, options.payload)


def _batches(
    pages_found: Iterator[tuple[list[Any], int]],
    decoder: Callable[[str, list[Any], Payload], pa.RecordBatch],
    queue: str,
    payload: Payload,
) -> Iterator[pa.RecordBatch]:
    """Decode pages, given with their sizes in bytes, to batches of bounded size."""
    rows: list[Any] = []
    held_bytes = 0
    for page, page_bytes in pages_found:
        rows += page
        held_bytes += page_bytes
        del page  # or its rows would stay in memory until the next page
        if len(rows) >= BATCH_ROWS or held_bytes >= BATCH_BYTES:
            batch = decoder(queue, rows, payload)
            rows, held_bytes = [], 0
            yield batch
    if rows:
        yield decoder(queue, rows, payload)


def _event(entry: tuple[bytes, list[bytes]]) -> bytes | None:
    fields = entry[1]
    if fields and fields[0] == b"e":  # where all known implementations put it
        return fields[1]
    return next((fields[at + 1] for at in range(0, len(fields), 2) if fields[at] == b"e"), None)


def read_snapshot(options: ReadOptions, queue: str) -> Iterator[pa.RecordBatch]:
    """Yield the delayed set, the repeatables or the results. Not consistent: entries may change meanwhile."""
    read, decoder = _SNAPSHOTS[options.stream]
    with QueueServer(options.url, queue) as server:
        require_queue(server)
        yield from _batches(read(server), decoder, queue, options.payload)


def _delayed_pages(server: QueueServer) -> Iterator[tuple[list[Any], int]]:
    key = server.keys.delayed

    # By score, not by rank: jobs that are promoted meanwhile must not shift others out of the walk.
    async def fetch(client: Client, position: tuple[bytes, int, int]) -> tuple[Any, tuple[bytes, int, int] | None]:
        low, seen, count = position
        flat = await client.call("ZRANGEBYSCORE", key, low, "+inf", "WITHSCORES", "LIMIT", seen, count)
        members, scores = flat[::2], flat[1::2]
        sizes = list(map(len, members))
        page = [(member, score_ms(score)) for member, score in zip(members, scores, strict=True)], sum(sizes)
        if len(members) < count:
            return page, None
        ties = scores.count(scores[-1])
        return page, (scores[-1], ties + seen if scores[-1] == low else ties, next_count(sizes, count))

    return pages(server, (b"-inf", 0, FIRST_PAGE), fetch)


def _repeatable_pages(server: QueueServer) -> Iterator[tuple[list[Any], int]]:
    flat = server.call("ZRANGE", server.keys.repeat, 0, -1, "WITHSCORES")
    for key, score in zip(flat[::2], flat[1::2], strict=True):
        spec_key = server.keys.repeat_spec("").encode() + key
        packed, fired = server.call("HMGET", spec_key, "spec", "fired")
        yield [(key.decode(errors="replace"), score_ms(score), packed, _count(fired))], len(packed or b"")


def _count(value: bytes | None) -> int:
    return int(value) if value is not None and value.isdigit() and len(value) < 19 else 0


def _result_pages(server: QueueServer) -> Iterator[tuple[list[Any], int]]:
    prefix = server.keys.result("").encode()
    pattern = literal_glob(prefix.decode()) + "*"
    now_ms = server.do(lambda client: client.server_time_ms())
    cursor, seen, count = b"0", set(), FIRST_PAGE
    while True:
        cursor, keys = server.call("SCAN", cursor, "MATCH", pattern, "COUNT", SCAN_COUNT)
        fresh = [key for key in dict.fromkeys(keys) if key not in seen]
        seen.update(fresh)
        while fresh:
            some, fresh = fresh[:count], fresh[count:]
            values = server.call_many([("GET", key) for key in some])
            ttls = server.call_many([("PTTL", key) for key in some])
            rows = [
                (key[len(prefix) :].decode(errors="replace"), value, now_ms + ttl if ttl >= 0 else None)
                for key, value, ttl in zip(some, values, ttls, strict=True)
                if value is not None  # it expired meanwhile
            ]
            sizes = [len(value) for _, value, _ in rows]
            count = next_count(sizes, count)
            del values
            yield rows, sum(sizes)
        if cursor == b"0":
            return


#: Snapshot to what reads it in pages and what decodes it.
_SNAPSHOTS: dict[
    str, tuple[Callable[[QueueServer], Iterator[tuple[list[Any], int]]], Callable[..., pa.RecordBatch]]
] = {
    "delayed": (_delayed_pages, decode.decode_delayed),
    "repeat": (_repeatable_pages, decode.decode_repeatables),
    "results": (_result_pages, decode.decode_results),
}
