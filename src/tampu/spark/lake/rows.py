"""Reads tables of the lake without Spark: for the report, for `tampu pipeline sql`, and for small tables in general."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from deltalake import DeltaTable, QueryBuilder

from tampu.base.checks import one_line
from tampu.errors import ConfigError
from tampu.spark.lake.folder import NAME, LakeVersion, is_table, lake_folder, refuse_other_files
from tampu.spark.lake.table import TABLES, Table

if TYPE_CHECKING:
    from pathlib import Path

    import pyarrow as pa

#: Percentiles of latencies, as in `gold/latency`.
PERCENTILES = (50, 95, 99)
#: A statement that reads, after comments and parentheses. Comments within comments, which DataFusion has, do not match.
_READS = re.compile(r"(?:\s|\(|--[^\n]*\n|/\*(?:(?!/\*|\*/).)*\*/)*(?:SELECT|WITH|VALUES)\b", re.IGNORECASE | re.DOTALL)


def published(lake: str | Path) -> LakeVersion:
    """Return the published state of a lake; `ConfigError` if the folder is not one."""
    folder = lake_folder(lake)
    if not is_table(folder / NAME):
        refuse_other_files(folder)
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


def count_by_time(
    lake: Path, name: str, column: str, state: LakeVersion | None = None, *, bucket_secs: float = 60
) -> list[tuple[datetime, int]]:
    """Return the number of rows per bucket by a column of times, of jobs whose creation is known."""
    table = open_table(lake, name, state)
    if table is None:
        return []
    bucket = f"CAST(arrow_cast({column}, 'Timestamp(Millisecond, None)') AS BIGINT) / {round(1000 * bucket_secs)}"
    counts = query_table(
        table,
        f"SELECT {bucket} AS bucket, count(*) AS jobs FROM rows "  # noqa: S608 - our own columns
        f"WHERE created_at IS NOT NULL AND {column} IS NOT NULL GROUP BY 1 ORDER BY 1",
    )
    return [(datetime.fromtimestamp(row["bucket"] * bucket_secs, UTC), row["jobs"]) for row in counts.to_pylist()]


def _epoch_ms(times: Any) -> Any:
    import pyarrow as pa

    return times.cast(pa.timestamp("ms", tz="UTC"), safe=False).cast(pa.int64())


def span_of_ends(lake: Path, state: LakeVersion) -> float | None:
    """Return the seconds between the first and the last end of a job; None if there is none."""
    import pyarrow.compute as pc

    table = open_table(lake, "gold/ends", state)
    if table is None:
        return None
    times = pc.min_max(_epoch_ms(query_table(table, "SELECT ended_at FROM rows").column(0))).as_py()
    return None if times["min"] is None else (times["max"] - times["min"]) / 1000


def ends_by_time(lake: Path, state: LakeVersion, bucket_secs: float) -> list[dict[str, Any]]:
    """Return what `gold/throughput` and `gold/latency` hold, per bucket instead of per minute, over all names.

    The rows have the columns of both tables. Empty if the lake has no table of ends.
    """
    import pyarrow.compute as pc

    table = open_table(lake, "gold/ends", state)
    if table is None:
        return []
    rows = query_table(table, "SELECT ended_at, outcome, wait_ms, run_us FROM rows")
    bucket = pc.divide(_epoch_ms(rows.column("ended_at")), round(1000 * bucket_secs))
    rows = rows.append_column("bucket", bucket).append_column("run_ms", pc.divide(rows.column("run_us"), 1000.0))
    digest = pc.TDigestOptions(q=[share / 100 for share in PERCENTILES], skip_nulls=True)
    found: dict[int, dict[str, Any]] = {}
    for row in rows.group_by(["bucket", "outcome"]).aggregate([("outcome", "count")]).to_pylist():
        found.setdefault(row["bucket"], {})[row["outcome"]] = row["outcome_count"]
    measured = rows.group_by("bucket").aggregate([("wait_ms", "tdigest", digest), ("run_ms", "tdigest", digest)])
    for row in measured.to_pylist():
        for what in ("wait", "run"):
            values = row[f"{what}_ms_tdigest"]
            known = {f"{what}_p{share}_ms": value for share, value in zip(PERCENTILES, values, strict=True)}
            found[row["bucket"]] |= {name: None if value != value else value for name, value in known.items()}
    return [
        {"minute": datetime.fromtimestamp(number * bucket_secs, UTC), "completed": 0, "dead": 0, "cancelled": 0} | row
        for number, row in sorted(found.items())
    ]


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


def query(lake: Path, text: str) -> pa.Table:
    """Run a SQL query over the published tables, with DataFusion; no Spark, no Java."""
    import pyarrow as pa

    check_reads(text)
    state = published(lake)
    builder = QueryBuilder()
    for name in TABLES:
        if (table := open_table(lake, name, state)) is not None:
            builder = builder.register(sql_name(name), table)
    return pa.table(builder.execute(text))
