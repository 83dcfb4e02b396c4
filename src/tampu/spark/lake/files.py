"""The Parquet files of a table: executors write them and report what they hold, and read those that the log names."""

from __future__ import annotations

import json
import re
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from tampu.spark.lake.store import Store

#: Values of the partition columns, in their order.
Partition = tuple[str, ...]

#: A task that holds more rows than this, in bytes of Arrow, writes a file: its memory does not grow with its rows.
MAX_HELD_BYTES = 64 * 1024 * 1024
#: Rows of a batch that a task passes to Spark.
BATCH_ROWS = 16_384
#: Longest name of a partition with all escapes, in bytes.
MAX_ESCAPED = 240
#: Longer text is left out of the statistics: a shortened maximum would make readers skip rows.
LONGEST_STATISTIC = 32


@dataclass(frozen=True, slots=True)
class Part:
    """A file that a task wrote, as the log describes it. Without a path: the rows that the task read."""

    SCHEMA: ClassVar = "path string, size bigint, rows bigint, stats string, key string"
    path: str
    size: int
    rows: int
    stats: str
    #: The partition as JSON: column to value.
    key: str


# --- writing


def writer(
    store: Store, by: Sequence[str], max_rows: int | None
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return the function for `mapInArrow` that writes the rows of a task and yields its parts."""

    def write(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        read = 0

        def counted() -> Iterator[pa.RecordBatch]:
            nonlocal read
            for batch in batches:
                read += batch.num_rows
                yield batch

        columns = ("path", "size", "rows", "stats", "key")
        for part in write_parts(store, counted(), by, max_rows):
            yield pa.RecordBatch.from_pylist([{name: getattr(part, name) for name in columns}], _PARTS)
        yield pa.RecordBatch.from_pylist([dict.fromkeys(columns) | {"rows": read}], _PARTS)

    return write


_PARTS = pa.schema(
    [("path", pa.string()), ("size", pa.int64()), ("rows", pa.int64()), ("stats", pa.string()), ("key", pa.string())]
)


def write_parts(
    store: Store, batches: Iterable[pa.RecordBatch], by: Sequence[str], max_rows: int | None = None
) -> Iterator[Part]:
    """Write rows as files of one partition each, in their order, with at most `max_rows` rows if that is given."""
    held: dict[Partition, list[pa.Table]] = {}
    for batch in batches:
        for partition, rows in split(pa.Table.from_batches([batch]), by):
            held.setdefault(partition, []).append(rows)
            if max_rows is not None and sum(map(len, held[partition])) >= max_rows:
                whole = pa.concat_tables(held.pop(partition))
                for start in range(0, len(whole) - max_rows + 1, max_rows):
                    yield _write(store, by, partition, whole.slice(start, max_rows))
                if rest := len(whole) % max_rows:
                    held[partition] = [whole.slice(len(whole) - rest)]
        sizes = {partition: sum(rows.nbytes for rows in tables) for partition, tables in held.items()}
        while sum(sizes.values()) > MAX_HELD_BYTES:
            largest = max(sizes, key=lambda partition: sizes[partition])
            del sizes[largest]
            yield _write(store, by, largest, pa.concat_tables(held.pop(largest)))
    for partition, tables in held.items():
        yield _write(store, by, partition, pa.concat_tables(tables))


def split(rows: pa.Table, by: Sequence[str]) -> Iterator[tuple[Partition, pa.Table]]:
    """Yield the rows of each partition, in their order, without the partition columns."""
    if not len(rows):
        return
    codes, values = np.zeros(len(rows), np.int64), []
    for name in by:
        column = rows[name].combine_chunks().dictionary_encode()
        codes = codes * len(column.dictionary) + column.indices.to_numpy()
        values.append(column)
    order = np.argsort(codes, kind="stable")
    edges = [0, *(np.flatnonzero(np.diff(codes[order])) + 1).tolist(), len(rows)]
    data = rows.drop_columns(list(by))
    data = data if len(edges) == 2 else data.take(pa.array(order))
    for start, end in pairwise(edges):
        yield tuple(column[int(order[start])].as_py() for column in values), data.slice(start, end - start)


def _write(store: Store, by: Sequence[str], partition: Partition, rows: pa.Table) -> Part:
    sink = pa.BufferOutputStream()
    pq.write_table(rows, sink, compression="zstd")
    data = sink.getvalue()
    values = dict(zip(by, partition, strict=True))
    # Polars takes partition values from the names of folders; everything else takes them from the log.
    folders = "".join(f"{name}={_escaped(value)}/" for name, value in values.items())
    path = f"{folders}{uuid.uuid4().hex}.parquet"
    store.put(path, data.to_pybytes())
    return Part(path, data.size, len(rows), statistics(pa.BufferReader(data)), json.dumps(values))


def _escaped(value: str) -> str:
    """Return a value as part of the name of a folder. delta-rs cannot read files in one with ~."""
    escaped = quote(value, safe=" ").replace("~", "%7E")
    # Names of folders have at most 255 bytes: then only what is ASCII is escaped.
    return (
        escaped if len(escaped) <= MAX_ESCAPED else re.sub(r"[^\w .-]", lambda found: quote(found[0], safe=""), value)
    )


# --- reading


def reader(
    store: Store, tasks: Sequence[Sequence[tuple[str, Mapping[str, str]]]], schema: pa.Schema
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return the function for `mapInArrow` that reads files: those of a task's number, which is its only row."""

    def read(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                for path, partition in tasks[number]:
                    rows = as_table(store.parquet(path, schema.names), schema, partition)
                    yield from rows.to_batches(max_chunksize=BATCH_ROWS)

    return read


def as_table(rows: pa.Table, schema: pa.Schema, partition: Mapping[str, str]) -> pa.Table:
    """Return rows in the columns of a schema. Those of the partition are not in the file; others may be missing."""
    present = set(rows.column_names)
    columns = [
        rows[field.name].cast(field.type)
        if field.name in present
        else pa.repeat(pa.scalar(partition.get(field.name), field.type), len(rows))
        for field in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)


# --- statistics


def statistics(file: Any) -> str:
    """Return the statistics of a Parquet file as the log holds them: rows, lowest and highest values, nulls."""
    footer = pq.read_metadata(file)
    lowest: dict[str, Any] = {}
    highest: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    unknown: set[str] = set()
    for group in range(footer.num_row_groups):
        for number in range(footer.num_columns):
            column = footer.row_group(group).column(number)
            name, found = column.path_in_schema, column.statistics
            if "." in name:  # a column within a column
                continue
            if found is None:
                unknown.add(name)
                continue
            nulls[name] = nulls.get(name, 0) + (found.null_count or 0)
            if found.has_min_max:
                low, high = _statistic(found.min), _statistic(found.max)
                if low is None or high is None:
                    unknown.add(name)
                else:
                    lowest[name] = min(lowest.get(name, low), low)
                    highest[name] = max(highest.get(name, high), high)
            elif found.null_count != footer.row_group(group).num_rows:
                unknown.add(name)
    for name in unknown:
        lowest.pop(name, None)
        highest.pop(name, None)
    return json.dumps({"numRecords": footer.num_rows, "minValues": lowest, "maxValues": highest, "nullCount": nulls})


def _statistic(value: Any) -> Any:
    """Return a value as the log holds it; None if it cannot be held exactly."""
    if isinstance(value, datetime):
        instant = value if value.tzinfo else value.replace(tzinfo=UTC)
        # The log stores milliseconds, and times in the lake have no finer resolution.
        if instant.microsecond % 1000:
            return None
        return instant.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.") + f"{instant.microsecond // 1000:03d}Z"
    if isinstance(value, str):
        return value if len(value) <= LONGEST_STATISTIC else None
    if isinstance(value, float):
        return value if value - value == 0 else None
    return value if isinstance(value, int | bool) else None
