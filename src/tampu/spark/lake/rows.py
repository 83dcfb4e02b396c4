"""Reads tables of the lake without Spark: for the report, for `tampu pipeline sql`, and for small tables in general."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from deltalake import DeltaTable, QueryBuilder

from tampu.base.checks import one_line
from tampu.errors import ConfigError
from tampu.spark.lake.folder import LakeVersion, refuse_other_files
from tampu.spark.lake.store import Store
from tampu.spark.lake.table import TABLES, Table

if TYPE_CHECKING:
    from pathlib import Path

    import pyarrow as pa

#: A statement that reads, after comments and parentheses. Comments within comments, which DataFusion has, do not match.
_READS = re.compile(r"(?:\s|\(|--[^\n]*\n|/\*(?:(?!/\*|\*/).)*\*/)*(?:SELECT|WITH|VALUES)\b", re.IGNORECASE | re.DOTALL)


def published(lake: str | Path | Store) -> LakeVersion:
    """Return the published state of a lake; `ConfigError` if the folder is not one."""
    store = Store.of(lake)
    state = LakeVersion.load(store)
    if not state.round:
        refuse_other_files(store)
        raise ConfigError(f"{store} is not a lake yet: run `tampu pipeline run --lake {store} --queue ...` first")
    return state


def open_table(lake: Store | Path, name: str, state: LakeVersion | None = None) -> DeltaTable | None:
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


def read_rows(lake: Store | Path, name: str, state: LakeVersion | None = None) -> list[dict[str, Any]]:
    """Return the rows of a small table."""
    table = open_table(lake, name, state)
    found: list[dict[str, Any]] = [] if table is None else query_table(table, "SELECT * FROM rows").to_pylist()
    return found


def sql_text(text: str) -> str:
    """Return text as a literal of DataFusion's SQL."""
    return "'{}'".format(text.replace("'", "''"))


def sql_name(table: str) -> str:
    """Return the name of a table in SQL: `silver_jobs` for `silver/jobs`."""
    return table.replace("/", "_")


def check_reads(text: str) -> str:
    """Return a SQL statement that only reads; others raise `ConfigError`. DataFusion refuses several statements."""
    if not _READS.match(text):
        raise ConfigError(
            f"the SQL may only read: it must start with SELECT, WITH or VALUES, got {one_line(text, 40)!r}"
        )
    return text


def query(lake: Store | Path, text: str) -> pa.Table:
    """Run a SQL query over the published tables, with DataFusion; no Spark, no Java."""
    import pyarrow as pa

    check_reads(text)
    state = published(lake)
    builder = QueryBuilder()
    for name in TABLES:
        if (table := open_table(lake, name, state)) is not None:
            builder = builder.register(sql_name(name), table)
    return pa.table(builder.execute(text))
