"""Reads tables of the lake with Spark. No Delta jars are needed: the log is read by delta-rs, the files by Spark."""

# ruff: noqa: E402 - a missing extra is named before it is imported

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from tampu.spark.session import require_lake

require_lake()

from tampu.errors import ConfigError
from tampu.spark.lake.folder import lake_folder
from tampu.spark.lake.rows import published
from tampu.spark.lake.table import TABLES, File, Table

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession


def read_table(spark: SparkSession, lake: str | Path, name: str) -> DataFrame:
    """Return a table of a lake, such as `silver/jobs`, as it was published last.

    The frame stays readable until `vacuum` removes files that were replaced meanwhile, 2 hours later by default.
    """
    if name not in TABLES:
        raise ConfigError(f"table must be one of {', '.join(TABLES)}; got {name!r}")
    state = published(lake)
    if name not in state.tables:
        raise ConfigError(f"the lake {lake} has no table {name} yet")
    table = Table(lake_folder(lake), name)
    return read_files(spark, table, table.files(state.tables[name]))


#: Columns of tables that do not exist yet, as far as queries name them.
_EMPTY = {
    "events": "queue STRING, date STRING, entry_id STRING, error STRING",
    "dlq": "queue STRING, date STRING, entry_id STRING, error STRING",
    "jobs": "queue STRING, job_id STRING, outcome STRING",
}


def read_files(spark: SparkSession, table: Table, files: list[File], empty_as: str = "") -> DataFrame:
    """Return the rows of these files of a table. `empty_as` names the columns of a table that does not exist."""
    from pyspark.sql.types import StructType

    opened = table.open()
    if opened is None:
        return spark.createDataFrame([], _EMPTY[empty_as])
    schema = StructType.fromJson(json.loads(opened.schema().to_json()))
    if not files:
        return spark.createDataFrame([], schema)

    def read(some: list[File]) -> DataFrame:
        # With the scheme: the default file system of a cluster may be another one.
        paths = [f"file://{table.path / file.path}" for file in some]
        frame: DataFrame = spark.read.schema(schema).option("basePath", f"file://{table.path}").parquet(*paths)
        return frame

    # Partition values are those of the log. Spark takes them from folder names, and decodes percent escapes byte by
    # byte. delta-rs, which merges files, escapes the UTF-8 of a name: Spark reads `queue=m%C3%A9dia` as `mÃ©dia`.
    misread = [file for file in files if _queue_as_spark_reads(file) != file.partition[0]]
    if not misread:
        return read(files)
    names: dict[Any, Any] = {_queue_as_spark_reads(file): file.partition[0] for file in misread}
    frame = read(misread).replace(names, subset=["queue"])  # the other partition column is a day: no escapes
    # Apart from the others: a queue may have the name that Spark misreads another one as.
    others = [file for file in files if _queue_as_spark_reads(file) == file.partition[0]]
    return frame.unionByName(read(others)) if others else frame


def _queue_as_spark_reads(file: File) -> str:
    return unquote(file.path.partition("/")[0].removeprefix("queue="), encoding="latin-1")
