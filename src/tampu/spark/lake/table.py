"""One Delta table of the lake: executors write Parquet files and report them, the driver commits them through delta-rs.

A file belongs to the table only once a commit names it, so a run that is killed leaves files that no reader sees. Each
commit carries application transactions (name and number): a commit that is tried again is refused. The partition of a
file is what the log says, whatever the name of its folder.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import pyarrow as pa
from deltalake import DeltaTable, Schema
from deltalake.exceptions import CommitFailedError
from deltalake.transaction import (
    AddAction,
    CommitProperties,
    RemoveAction,
    Transaction,
    create_table_with_add_actions,
)

from tampu.errors import ConfigError, Error
from tampu.spark.lake.files import Part, Partition, as_table, write_parts, writer
from tampu.spark.lake.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping
    from pathlib import Path

    from pyspark.sql import DataFrame

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
#: The name of the commits that move rows out of a table without a change to what follows from them.
UPKEEP = "tampu.upkeep"


def retention(hours: int) -> dict[str, str]:
    """Return the properties of a table whose versions of the last hours can be read."""
    kept = f"interval {hours} hours"
    # Without automatic cleanup: a checkpoint during a run would delete the log of the version that is published.
    return {
        "delta.logRetentionDuration": kept,
        "delta.deletedFileRetentionDuration": kept,
        "delta.enableExpiredLogCleanup": "false",
    }


#: A checkpoint of the log every 20 commits: opening a table reads at most that many log files. Checkpoints drop names
#: of removed files that are older than the retention, which `vacuum` sets; `shorten_logs` deletes old log files.
CONFIGURATION = {
    "delta.checkpointInterval": "20",
    **retention(2),
}


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

    @property
    def partitions(self) -> set[Partition]:
        """The partitions whose rows changed."""
        return {*self.added.values(), *self.removed.values()}


class Table:
    """A table of a lake by its name, such as `silver/jobs`. It need not exist yet."""

    def __init__(self, lake: Store | Path | str, name: str) -> None:
        self.name = name
        self.store = Store.of(lake) / name
        self.by = TABLES[name]
        #: The table at its latest known version: reading only what was committed since then is fast.
        self._latest: DeltaTable | None = None
        self._is_pinned = False

    # --- reading

    def pin(self) -> None:
        """Take the latest version as the one to work on: from now on, only commits of this object change it.

        Otherwise a commit that another pipeline made after this one has planned could be taken for known, and the same
        events be added twice: delta-rs refuses commits that conflict with versions after the known one.
        """
        self.refresh()
        self._is_pinned = True

    def refresh(self) -> None:
        """Take note of the latest version, also if another one is pinned."""
        was_pinned, self._is_pinned = self._is_pinned, False
        self.open()
        self._is_pinned = was_pinned

    def open(self, version: int | None = None) -> DeltaTable | None:
        """Return the table at a version, by default the latest; None if it does not exist."""
        if self._latest is not None and version is None:
            if not self._is_pinned:
                self._latest.update_incremental()
            return self._latest
        if self._is_pinned and version is None:
            return None
        opened = open_delta(self.store, version)
        if version is None:
            self._latest = opened
        return opened

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
        for version in range(since + 1, upto + 1):
            try:
                lines = self.store.read(f"_delta_log/{version:020d}.json").splitlines()
            except FileNotFoundError:
                return None
            actions = [json.loads(line) for line in lines]
            if any(UPKEEP in action.get("commitInfo", {}) for action in actions):
                continue
            for action in actions:
                change = action.get("add") or action.get("remove")
                if change and change["dataChange"]:
                    side = added if "add" in action else removed
                    side[unquote(change["path"])] = tuple(change["partitionValues"][column] for column in self.by)
        return Changes(added, removed)

    # --- writing

    def stage(self, frame: DataFrame, *, rebalance: bool = True, sort_by: str = "") -> list[AddAction]:
        """Write the rows as files that no commit names yet; return the actions that add them.

        With `sort_by`, large partitions become several files with narrow ranges of that column.
        """
        if rebalance:  # one file per partition, unless it is large
            frame = frame.hint("rebalance", *self.by)
        if sort_by:
            frame = frame.sortWithinPartitions(*self.by, sort_by)
        write = writer(self.store, self.by, SORTED_ROWS_PER_FILE if sort_by else None)
        reports = [row.asDict() for row in frame.mapInArrow(write, Part.SCHEMA).collect()]
        parts = [Part(**report) for report in reports if report["path"]]
        read, written = (
            sum(rows) for rows in ((row["rows"] for row in reports if not row["path"]), (p.rows for p in parts))
        )
        # Executors with disks of their own: their rows would count as landed, and be nowhere.
        lost = [part for part in parts if self.store.folder and self.store.size(part.path) != part.size]
        if lost or read != written:
            raise LakeError(
                f"Spark wrote {read:,} rows to {self.store}, but {written - sum(part.rows for part in lost):,} are "
                "there: nothing was committed. The lake must be an object store, or a folder that the driver and all "
                "executors share"
            )
        return [self._add(part) for part in parts]

    def write(self, rows: pa.Table) -> list[AddAction]:
        """Write rows of this process as files that no commit names yet; return the actions that add them."""
        return [self._add(part) for part in write_parts(self.store, rows.to_batches(), self.by)]

    def rewrite(self, files: Iterable[File], change: Callable[[pa.Table], pa.Table], reason: str) -> int:
        """Replace files by one with their changed rows, as upkeep: what follows from the table stays as it is.

        Returns the number of new files. All files must be of the same partition.
        """
        table, files = self.open(), list(files)
        assert table is not None  # noqa: S101 - it has files
        schema = pa.schema(table.schema())
        rows = pa.concat_tables([self.rows(file, schema) for file in files])
        adds = [
            self._add(part, is_change=False) for part in write_parts(self.store, change(rows).to_batches(), self.by)
        ]
        removes = self.removes({file.path for file in files}, is_change=False)
        self._write(table, [*adds, *removes], CommitProperties(custom_metadata={UPKEEP: reason}))
        return len(adds)

    def rows(self, file: File, schema: pa.Schema) -> pa.Table:
        """Return the rows of a file in the given columns; those that it does not have are null."""
        return as_table(
            self.store.parquet(file.path, schema.names), schema, dict(zip(self.by, file.partition, strict=True))
        )

    def _add(self, part: Part, *, is_change: bool = True) -> AddAction:
        values: dict[str, str | None] = json.loads(part.key)
        return AddAction(part.path, part.size, values, int(time.time() * 1000), is_change, part.stats)

    def commit(
        self,
        adds: list[AddAction],
        schema: Schema,
        transactions: Mapping[str, int],
        *,
        replaces: Collection[str] = (),
        again: bool = False,
        offsets: Mapping[str, int] | None = None,
    ) -> bool:
        """Add files, and remove those with the paths in `replaces`, in one commit.

        Return False, and change nothing, if these transactions have been committed before; `again` commits them
        once more, and also removes files that are missing on disk. `offsets` are further transactions, which may go
        down.
        """
        properties = _properties({**transactions, **(offsets or {})})
        table = self.open()
        if table is None:
            create_table_with_add_actions(
                self.store.uri,
                schema,
                adds,
                mode="error",
                partition_by=list(self.by),
                name=self.name,
                configuration=CONFIGURATION,
                storage_options=self.store.delta_options,
                commit_properties=properties,
            )
            self._latest = open_delta(self.store)
            return True
        if transactions and not again and all(_committed(table, app) >= number for app, number in transactions.items()):
            return False
        known = {field.name for field in table.schema().fields}
        if new := [field for field in schema.fields if field.name not in known]:
            table.alter.add_columns(new)
            table.update_incremental()
        removes = [] if not replaces else self.removes(replaces, missing_ok=again)
        self._write(table, [*adds, *removes], properties)
        return True

    def mark(self, transactions: Mapping[str, int]) -> None:
        """Commit transactions without a change: what they stand for needs none."""
        table = self.open()
        if table is not None and any(_committed(table, app) < number for app, number in transactions.items()):
            self._write(table, [], _properties(transactions))

    def removes(
        self, paths: Collection[str], *, missing_ok: bool = False, is_change: bool = True
    ) -> list[RemoveAction]:
        """Return the actions that remove the files with these paths."""
        now_ms = int(time.time() * 1000)
        found = []
        for file in self.files():
            if file.path not in paths:
                continue
            if not missing_ok:
                # A removal that matches no file is accepted silently and would double the rows.
                self.require(file)
            values: dict[str, str | None] = dict(zip(self.by, file.partition, strict=True))
            found.append(RemoveAction(file.path, is_change, now_ms, file.size, values))
        return found

    def require(self, file: File) -> None:
        """Raise `LakeError` if a file of the table is missing."""
        if self.store.size(file.path) is None:
            raise LakeError(f"{self.store} names {file.path}, which is not there: restore it, or run rebuild")

    def remove(self, files: Iterable[File], reason: str) -> int:
        """Remove files as a matter of upkeep: tables that follow from this one stay as they are. Returns the rows."""
        table, found = self.open(), {file.path: file.rows for file in files}
        if table is not None and found:
            removes = self.removes(found)
            self._write(table, [*removes], CommitProperties(custom_metadata={UPKEEP: reason}))
        return sum(found.values())

    def _write(self, table: DeltaTable, actions: list[AddAction | RemoveAction], properties: CommitProperties) -> None:
        # `append`, although files may be removed: delta-rs takes the actions as they are.
        try:
            table.create_write_transaction(
                actions, "append", table.schema(), list(self.by), commit_properties=properties
            )
        except CommitFailedError as error:
            self._is_pinned = False
            raise ConfigError(
                f"another pipeline writes to the lake: {self.store} has a commit that this one did not know"
            ) from error
        table.update_incremental()


def open_delta(store: Store, version: int | None = None) -> DeltaTable | None:
    """Return a Delta table, which begins with its first commit; None if it does not exist.

    The folder of its log is not enough: delta-rs creates it before that commit, which may fail on a full disk.
    """
    try:
        has_commits = any(file["path"].endswith((".json", ".parquet")) for file in store.list("_delta_log"))
        return DeltaTable(store.uri, version, store.delta_options) if has_commits else None
    except PermissionError:
        raise ConfigError(f"cannot read {store}: check the owner and the mode of the lake's folders") from None


def _committed(table: DeltaTable, app: str) -> int:
    number = table.transaction_version(app)
    return -1 if number is None else number


def _properties(transactions: Mapping[str, int]) -> CommitProperties:
    return CommitProperties(app_transactions=[Transaction(app, number) for app, number in transactions.items()])


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
