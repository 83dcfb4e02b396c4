"""Opens every table of a lake with every reader, and reads all of its columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import duckdb
import polars as pl
from deltalake import DeltaTable

from tampu.spark.lake.folder import NAME, LakeVersion
from tampu.spark.lake.read import read_table
from tampu.spark.lake.report import write_report
from tampu.spark.lake.rows import query, sql_name
from tampu.spark.lake.table import TABLES
from tampu.spark.session import SHORT_LIVED, spark_session

if TYPE_CHECKING:
    from pathlib import Path

    from tampu.spark.lake.store import Store

#: Readers of the latest versions, and those of the published ones.
LATEST = ("Polars", "pandas", "DuckDB")
PUBLISHED = ("DataFusion", "Spark")
READERS = (*LATEST, *PUBLISHED)


class Readers:
    """All readers of one lake. Spark's session starts when it is first needed."""

    def __init__(self, lake: Store, folder: Path) -> None:
        self._lake = lake
        #: For the report and the log of Java.
        self._folder = folder
        self._spark: Any = None
        #: Tables that were read, and (reader, table) of them.
        self.reads = 0
        self.pairs: set[tuple[str, str]] = set()
        #: Reads that began with a version whose files were deleted at once, and succeeded with the next one.
        self.overtaken = 0
        self._next = 0

    def read_next(self, *, is_overtaken: bool) -> None:
        """Read all tables with the next reader, and the report; raises if one cannot be read.

        Where replaced files are deleted at once, a read may lose the files of its version: then there must be a newer
        one, and the read must succeed with that.
        """
        reader = READERS[self._next % len(READERS)]
        self._next += 1
        for table in self.tables(reader):
            self._read(reader, table, is_overtaken=is_overtaken)
        if reader == "DataFusion" and self.tables(reader):
            self._read("report", "", is_overtaken=is_overtaken)

    def counts(self) -> dict[str, dict[str, int]]:
        """Return per table the number of rows that each reader finds."""
        found: dict[str, dict[str, int]] = {}
        for reader in READERS:
            for table in self.tables(reader):
                found.setdefault(table, {})[reader] = self._read(reader, table, is_overtaken=False)
        return found

    def tables(self, reader: str) -> list[str]:
        """Return the tables that a reader can open at this moment."""
        if reader in LATEST:
            return [name for name in TABLES if self._newest(name)]
        return list(LakeVersion.load(self._lake).tables) if self._newest(NAME) else []

    def close(self) -> None:
        if self._spark is not None:
            self._spark.stop()

    def _read(self, reader: str, table: str, *, is_overtaken: bool) -> int:
        while True:
            before = (self._newest(table), self._newest(NAME))
            try:
                rows = self._rows(reader, table)
            except Exception:
                if not is_overtaken or before == (self._newest(table), self._newest(NAME)):
                    print(f"{reader} cannot read {table or 'the lake'}", flush=True)
                    raise
                self.overtaken += 1
            else:
                self.reads += 1
                self.pairs.add((reader, table))
                return rows

    def _newest(self, table: str) -> str:
        """Return the name of a table's newest log entry, without opening the table; an empty text if it has none."""
        names = (file["path"] for file in (self._lake / table).list("_delta_log"))
        return max((name for name in names if name.endswith(".json")), default="")

    def _rows(self, reader: str, table: str) -> int:
        """Read a table with all of its columns and return the number of its rows."""
        path, options = (self._lake / table).uri, self._lake.delta_options
        if reader == "Polars":
            return pl.scan_delta(path, storage_options=options).collect().height
        if reader == "pandas":
            return len(DeltaTable(path, storage_options=options).to_pandas())
        if reader == "DuckDB":
            rows = DeltaTable(path, storage_options=options).to_pyarrow_dataset()
            found = duckdb.query("SELECT * FROM rows").to_arrow_table()  # type: ignore[union-attr]
            del rows
            return int(found.num_rows)
        if reader == "DataFusion":
            return int(query(self._lake, f"SELECT * FROM {sql_name(table)}").num_rows)
        if reader == "report":
            write_report(self._lake, self._folder / "report.html")
            return 0
        if self._spark is None:
            log_file = self._folder / "readers.log"
            self._spark = spark_session("tampu-readers", master="local[1]", conf=SHORT_LIVED, log_file=log_file)
        return int(read_table(self._spark, self._lake.uri, table, options).toArrow().num_rows)
