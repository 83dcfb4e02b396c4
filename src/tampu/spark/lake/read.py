"""Reads tables of the lake with Spark: delta-rs reads the log, and executors the files that it names. No Delta jars."""

# ruff: noqa: E402 - a missing extra is named before it is imported

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tampu.spark.session import require_lake

require_lake()

import pyarrow as pa

from tampu.errors import ConfigError
from tampu.spark.lake.files import reader
from tampu.spark.lake.rows import published
from tampu.spark.lake.store import Store
from tampu.spark.lake.table import TABLES, File, Table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

#: Size of the files that one task reads, in bytes. A task costs tens of milliseconds, however little it reads.
TASK_BYTES = 4 * 1024 * 1024


def read_table(
    spark: SparkSession, lake: str | Path, name: str, storage_options: Mapping[str, str] | None = None
) -> DataFrame:
    """Return a table of a lake, such as `silver/jobs`, as it was published last.

    The frame stays readable until `vacuum` removes files that were replaced meanwhile, 2 hours later by default.
    """
    if name not in TABLES:
        raise ConfigError(f"table must be one of {', '.join(TABLES)}; got {name!r}")
    store = Store.of(lake, storage_options)
    state = published(store)
    if name not in state.tables:
        raise ConfigError(f"the lake {lake} has no table {name} yet")
    table = Table(store, name)
    return read_files(spark, table, table.files(state.tables[name]))


def read_files(spark: SparkSession, table: Table, files: list[File], columns: Sequence[str] = ()) -> DataFrame:
    """Return columns of these files of a table, by default all; as empty text if the table does not exist."""
    from pyspark.sql.types import StructType

    opened = table.open()
    if opened is None:
        return spark.createDataFrame([], ", ".join(f"{name} STRING" for name in columns))
    schema = StructType.fromJson(json.loads(opened.schema().to_json()))
    arrow = pa.schema(opened.schema().to_arrow())
    if columns:
        schema = StructType([schema[name] for name in columns])
        arrow = pa.schema([arrow.field(name) for name in columns])
    if not files:
        return spark.createDataFrame([], schema)
    # The largest first, each to the task that has least: tasks take about the same time.
    count = min(len(files), -(-sum(file.size for file in files) // TASK_BYTES))
    tasks: list[list[tuple[str, Mapping[str, str]]]] = [[] for _ in range(count)]
    sizes = [0] * count
    for file in sorted(files, key=lambda file: -file.size):
        number = sizes.index(min(sizes))
        sizes[number] += file.size
        tasks[number].append((file.path, dict(zip(table.by, file.partition, strict=True))))
    return spark.range(0, count, 1, count).mapInArrow(reader(table.store, tasks, arrow), schema)
