"""Reads tables of the lake without Spark: for the report, for `tampu pipeline sql`, and for small tables in general."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deltalake import DeltaTable, QueryBuilder

from tampu.errors import ConfigError
from tampu.spark.lake.folder import OLD_MANIFEST, lake_folder
from tampu.spark.lake.table import TABLES, Table
from tampu.spark.lake.versions import NAME, LakeVersion

if TYPE_CHECKING:
    from datetime import datetime
    from pathlib import Path

    import pyarrow as pa


def published(lake: str | Path) -> LakeVersion:
    """Return the published state of a lake; `ConfigError` if the folder is not one."""
    folder = lake_folder(lake)
    if (folder / OLD_MANIFEST).exists():
        raise ConfigError(f"{folder} is a lake of tampu 0.1: run `tampu pipeline upgrade --lake {folder}` first")
    if not (folder / NAME / "_delta_log").is_dir():
        raise ConfigError(f"{folder} is not a lake yet: run `tampu pipeline run --lake {folder} --queue ...` first")
    return LakeVersion.load(folder)


def open_table(lake: Path, name: str, state: LakeVersion | None = None) -> DeltaTable | None:
    """Return a table at its latest version, or at the one in `state`; None if it has none."""
    if state is not None and name not in state.tables:
        return None
    return Table(lake, name).open(None if state is None else state.tables[name])


def query_table(table: DeltaTable, text: str) -> pa.Table:
    """Run a SQL query over one table, which is named `rows`.

    DataFusion reads the files. `to_pyarrow_table` would make threads of PyArrow call Python, which crashes a process
    that ends soon after it: on a busy machine, 3 of 40 processes that read one small table.
    """
    import pyarrow as pa

    return pa.table(QueryBuilder().register("rows", table).execute(text))


def read_rows(lake: Path, name: str, state: LakeVersion | None = None) -> list[dict[str, Any]]:
    """Return the rows of a small table."""
    table = open_table(lake, name, state)
    found: list[dict[str, Any]] = [] if table is None else query_table(table, "SELECT * FROM rows").to_pylist()
    return found


def count_by_minute(lake: Path, name: str, column: str, state: LakeVersion | None = None) -> list[tuple[datetime, int]]:
    """Return the number of rows per minute by a column of times, of jobs whose creation is known."""
    table = open_table(lake, name, state)
    if table is None:
        return []
    counts = query_table(
        table,
        f"SELECT date_trunc('minute', {column}) AS minute, count(*) AS jobs FROM rows "  # noqa: S608 - our own column
        f"WHERE created_at IS NOT NULL AND {column} IS NOT NULL GROUP BY 1 ORDER BY 1",
    )
    return [(row["minute"], row["jobs"]) for row in counts.to_pylist()]


def sql_name(table: str) -> str:
    """Return the name of a table in SQL: `silver_jobs` for `silver/jobs`."""
    return table.replace("/", "_")


def query(lake: Path, text: str) -> pa.Table:
    """Run a SQL query over the published tables, with DataFusion; no Spark, no Java."""
    import pyarrow as pa

    state = published(lake)
    builder = QueryBuilder()
    for name in TABLES:
        if (table := open_table(lake, name, state)) is not None:
            builder = builder.register(sql_name(name), table)
    return pa.table(builder.execute(text))
