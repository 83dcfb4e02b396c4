"""One Delta table of the lake: Spark's executors write Parquet files, the driver commits them through delta-rs.

A file belongs to the table only once a commit names it, so a run that is killed leaves files that no reader sees. Each
commit carries application transactions (name and number): a commit that is tried again is refused.
"""

from __future__ import annotations

import glob
import json
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable, Schema
from deltalake.transaction import (
    AddAction,
    CommitProperties,
    RemoveAction,
    Transaction,
    create_table_with_add_actions,
)

from tampu.errors import Error
from tampu.spark.lake.folder import CONFIGURATION, is_table

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pyspark.sql import DataFrame

#: Values of the partition columns, in their order.
Partition = tuple[str, ...]

#: Tables of a lake and their partition columns.
TABLES: dict[str, tuple[str, ...]] = {
    "bronze/events": ("queue", "date"),
    "bronze/dlq": ("queue", "date"),
    "bronze/repairs": ("queue",),
    "silver/jobs": ("queue", "date"),
    "gold/ends": ("queue", "day"),
    "gold/failures": ("queue", "day"),
    "gold/throughput": ("queue", "day"),
    "gold/latency": ("queue", "day"),
    "gold/slo": ("queue", "day"),
    "gold/undecodable": ("queue", "day"),
    "gold/dlq_clusters": ("queue",),
    "gold/repairs": ("queue",),
    "gold/violations": ("queue",),
}

#: Rows of a file of sorted rows: the last one is written again in every round, the others rarely.
SORTED_ROWS_PER_FILE = 25_000
#: Longer text is left out of the statistics: a shortened maximum would make readers skip rows.
LONGEST_STATISTIC = 32
#: The name of the commits that move rows out of a table without a change to what follows from them.
UPKEEP = "tampu.upkeep"
#: The name of the commits that compute rows again which may have been wrong.
REBUILD = "tampu.rebuild"


class LakeError(Error):
    """A table of the lake is not in the state that the pipeline left it in."""

    code = "CMQ-032"


@dataclass(frozen=True, slots=True)
class File:
    """A file of a table, as the log describes it."""

    path: str
    partition: Partition
    rows: int
    size: int
    #: Column to its lowest and highest value; columns without statistics are missing.
    lowest: Mapping[str, Any]
    highest: Mapping[str, Any]
    #: Column to its number of nulls.
    nulls: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Changes:
    """Files that commits added and removed, with their partitions."""

    added: dict[str, Partition]
    removed: dict[str, Partition]
    #: Whether rows may differ that follow from the same events.
    is_rebuild: bool = False

    @property
    def partitions(self) -> set[Partition]:
        """The partitions whose rows changed."""
        return {*self.added.values(), *self.removed.values()}


class Table:
    """A table of a lake by its name, such as `silver/jobs`. It need not exist yet."""

    def __init__(self, lake: Path, name: str) -> None:
        self.name = name
        self.path = lake / name
        self.by = TABLES[name]
        #: The table at its latest known version: reading only what was committed since then is fast.
        self._latest: DeltaTable | None = None

    # --- reading

    def open(self, version: int | None = None) -> DeltaTable | None:
        """Return the table at a version, by default the latest; None if it does not exist."""
        if not is_table(self.path):
            return None
        if version is not None:
            return DeltaTable(str(self.path), version=version)
        if self._latest is None:
            self._latest = DeltaTable(str(self.path))
        else:
            self._latest.update_incremental()
        return self._latest

    def version(self) -> int:
        """Return the latest version; -1 if the table does not exist."""
        table = self.open()
        return -1 if table is None else table.version()

    def transaction(self, app: str) -> int:
        """Return the number of the last committed transaction of `app`; -1 if there is none."""
        table = self.open()
        return -1 if table is None else _committed(table, app)

    def files(self, version: int | None = None) -> list[File]:
        """Return the files of the table at a version, by default the latest."""
        table = self.open(version)
        if table is None:
            return []
        found = []
        for row in pa.table(table.get_add_actions(flatten=False)).to_pylist():
            values = row.get("partition") or row.get("partition_values") or {}
            found.append(
                File(
                    path=unquote(row["path"]),  # the log encodes paths
                    partition=tuple(values[column] for column in self.by),
                    rows=row["num_records"] or 0,
                    size=row["size_bytes"],
                    lowest=row.get("min") or {},
                    highest=row.get("max") or {},
                    nulls=row.get("null_count") or {},
                )
            )
        return found

    def changes(self, since: int, upto: int) -> Changes | None:
        """Return the files of the versions after `since` whose rows are new or gone; None if the log does not say.

        Compaction and retention change files, but not what silver and gold are computed from.
        """
        added: dict[str, Partition] = {}
        removed: dict[str, Partition] = {}
        is_rebuild = False
        for version in range(since + 1, upto + 1):
            try:
                lines = (self.path / "_delta_log" / f"{version:020d}.json").read_text().splitlines()
            except FileNotFoundError:
                return None
            actions = [json.loads(line) for line in lines]
            if any(UPKEEP in action.get("commitInfo", {}) for action in actions):
                continue
            is_rebuild |= any(REBUILD in action.get("commitInfo", {}) for action in actions)
            for action in actions:
                change = action.get("add") or action.get("remove")
                if change and change["dataChange"]:
                    side = added if "add" in action else removed
                    side[unquote(change["path"])] = tuple(change["partitionValues"][column] for column in self.by)
        return Changes(added, removed, is_rebuild)

    # --- writing

    def stage(self, frame: DataFrame, *, rebalance: bool = True, part: str = "", sort_by: str = "") -> list[AddAction]:
        """Write the rows as files that no commit names yet; return the actions that add them.

        Files of an earlier attempt at the same version are removed first. If one commit is staged in several parts,
        each has its own name. With `sort_by`, large partitions become several files with narrow ranges of that column.
        """
        tag = f"v{self.version() + 1:010d}{part}"
        folders = "/".join("*=*" for _ in self.by)
        pattern = f"{glob.escape(str(self.path))}/{folders}/{tag}-*.parquet"
        for orphan in glob.glob(pattern):
            os.remove(orphan)
        shutil.rmtree(self.path / "_temporary", ignore_errors=True)
        if rebalance:  # one file per partition, unless it is large
            frame = frame.hint("rebalance", *self.by)
        if sort_by:
            frame = frame.sortWithinPartitions(*self.by, sort_by)
        from pyspark.sql import Observation
        from pyspark.sql import functions as fn

        seen = Observation()
        (
            frame.observe(seen, fn.count(fn.lit(1)).alias("rows"))
            .write.mode("append")
            .option("mapreduce.output.basename", tag)
            .option("maxRecordsPerFile", SORTED_ROWS_PER_FILE if sort_by else 0)
            .option("mapreduce.fileoutputcommitter.marksuccessfuljobs", "false")
            .partitionBy(*self.by)
            .parquet(f"file://{self.path}")  # with the scheme: the default file system of a cluster may be another one
        )
        # Hadoop writes a checksum next to each file, which only Hadoop reads and vacuum does not delete.
        for checksum in glob.glob(f"{glob.escape(str(self.path))}/{folders}/.{tag}-*.crc"):
            os.remove(checksum)
        with ThreadPoolExecutor(4) as pool:
            adds = list(pool.map(self.add_action, glob.glob(pattern)))
        written, found = seen.get["rows"], sum(json.loads(add.stats)["numRecords"] for add in adds)
        if found != written:
            raise LakeError(
                f"Spark wrote {written:,} rows to {self.path}, but {found:,} are there: nothing was committed. The "
                "lake must be a folder that the driver and all executors share"
            )
        return adds

    def add_action(self, file: str) -> AddAction:
        """Return the action that adds a file of this table's folder."""
        status = os.stat(file)
        folders = Path(file).relative_to(self.path).parts[:-1]
        values = {column: unquote(part.partition("=")[2]) for column, part in zip(self.by, folders, strict=True)}
        return AddAction(
            path=os.path.relpath(file, self.path),  # as it is on disk: delta-rs encodes it
            size=status.st_size,
            partition_values=values,
            modification_time=int(status.st_mtime * 1000),
            data_change=True,
            stats=statistics(file),
        )

    def commit(
        self,
        adds: list[AddAction],
        schema: Schema,
        transactions: Mapping[str, int],
        *,
        replaces: Callable[[File], bool] | None = None,
        again: bool = False,
    ) -> bool:
        """Add files, and remove those for which `replaces` holds, in one commit.

        Returns False, and changes nothing, if these transactions have been committed before; `again` commits them
        once more, and also removes files that are missing on disk.
        """
        properties = _properties(transactions, {REBUILD: "true"} if again else {})
        table = self.open()
        if table is None:
            self.path.mkdir(parents=True, exist_ok=True)
            create_table_with_add_actions(
                str(self.path),
                schema,
                adds,
                mode="error",
                partition_by=list(self.by),
                name=self.name,
                configuration=CONFIGURATION,
                commit_properties=properties,
            )
            return True
        if not again and all(_committed(table, app) >= number for app, number in transactions.items()):
            return False
        known = {field.name for field in table.schema().fields}
        if new := [field for field in schema.fields if field.name not in known]:
            table.alter.add_columns(new)
        removes = [] if replaces is None else self.removes(replaces, missing_ok=again)
        self._write(table, [*adds, *removes], properties)
        return True

    def mark(self, transactions: Mapping[str, int]) -> None:
        """Commit transactions without a change: what they stand for needs none."""
        table = self.open()
        if table is not None and any(_committed(table, app) < number for app, number in transactions.items()):
            self._write(table, [], _properties(transactions))

    def removes(self, is_removed: Callable[[File], bool], *, missing_ok: bool = False) -> list[RemoveAction]:
        """Return the actions that remove the files for which `is_removed` holds."""
        now_ms = int(time.time() * 1000)
        found = []
        for file in self.files():
            if not is_removed(file):
                continue
            if not missing_ok:
                # A removal that matches no file is accepted silently and would double the rows.
                self.require(file)
            values: dict[str, str | None] = dict(zip(self.by, file.partition, strict=True))
            found.append(RemoveAction(file.path, True, now_ms, file.size, values))
        return found

    def require(self, file: File) -> None:
        """Raise `LakeError` if a file of the table is missing on disk."""
        if not (self.path / file.path).exists():
            raise LakeError(f"{self.path} names {file.path}, which is not there: restore it, or run rebuild")

    def remove(self, is_removed: Callable[[File], bool], reason: str) -> int:
        """Remove files as a matter of upkeep: tables that follow from this one stay as they are. Returns the rows."""
        table = self.open()
        rows = sum(file.rows for file in self.files() if is_removed(file))
        if table is not None and rows:
            self._write(table, [*self.removes(is_removed)], CommitProperties(custom_metadata={UPKEEP: reason}))
        return rows

    def _write(self, table: DeltaTable, actions: list[AddAction | RemoveAction], properties: CommitProperties) -> None:
        # `append`, although files may be removed: delta-rs takes the actions as they are.
        table.create_write_transaction(actions, "append", table.schema(), list(self.by), commit_properties=properties)


def _committed(table: DeltaTable, app: str) -> int:
    number = table.transaction_version(app)
    return -1 if number is None else number


def _properties(transactions: Mapping[str, int], notes: Mapping[str, str] | None = None) -> CommitProperties:
    applied = [Transaction(app, number) for app, number in transactions.items()]
    return CommitProperties(custom_metadata=dict(notes or {}), app_transactions=applied)


def schema_of(frame: DataFrame) -> Schema:
    """Return the Delta schema of a frame. Spark and Delta share the notation; all columns may be null."""
    return Schema.from_json(json.dumps(_nullable(json.loads(frame.schema.json()))))


def _nullable(node: Any) -> Any:
    if isinstance(node, dict):
        return {
            key: True if key in ("nullable", "containsNull", "valueContainsNull") else _nullable(value)
            for key, value in node.items()
        }
    return [_nullable(item) for item in node] if isinstance(node, list) else node


def statistics(file: str) -> str:
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
