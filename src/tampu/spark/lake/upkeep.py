"""Upkeep of a lake: compaction, vacuum and retention. Needs no Spark; delta-rs does the work."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc

from tampu.errors import ConfigError
from tampu.spark.lake.bronze import STREAMS, day_of, is_of_other_ids, is_without_day
from tampu.spark.lake.folder import NAME, LakeVersion, sole_writer
from tampu.spark.lake.incremental import holds_any
from tampu.spark.lake.rows import published
from tampu.spark.lake.store import Store
from tampu.spark.lake.table import TABLES, File, Table, open_delta, retention

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

#: Files that are not part of a table any more are kept this long, in hours, for readers that opened it before.
DEFAULT_KEEP_HOURS = 2
#: A partition with at least this many small files is compacted after a round.
MIN_FILES = 8
#: Files of at least this size, in bytes, are left alone by the compaction after a round: each file of silver with a job
#: that changes is written again, so files must not grow without a limit.
SMALL_FILE = 16 * 1024 * 1024
#: The same for silver, whose files must also span few days, and for ends, whose files must span few minutes: gold reads
#: all files with jobs of the minutes that it computes, and writes those of ends again.
SMALL_JOBS_FILE = 512 * 1024
#: Files are merged into ones of up to this size, in bytes.
MERGED_SIZE = 64 * 1024 * 1024
#: Old files are deleted every this many rounds.
ROUNDS_BETWEEN = 10
#: The log of a table is shortened once this many of its files are old. A log that was just shortened has about four.
MAX_LOG_FILES = 6


@dataclass
class Upkeep:
    """Summary of one upkeep."""

    #: Files that were merged, and those that they became.
    merged: int = 0
    written: int = 0
    #: Files that were deleted.
    deleted: int = 0
    #: Rows that retention removed, per table of bronze.
    retired: dict[str, int] = field(default_factory=dict)
    #: Rows of jobs of unknown age, and older rows that may belong to such jobs, which retention kept; per stream.
    kept: dict[str, int] = field(default_factory=dict)


def compact(lake: Store | Path | str) -> Upkeep:
    """Merge the files of each partition. Readers see the same rows, before and after."""
    lake = Store.of(lake)
    with sole_writer(lake):
        state, tables = published(lake), _tables(lake)
        done = merge_small_files(tables, min_files=2, merge_all=True)
        if done.merged:
            _publish(lake, state)
        return done


def merge_small_files(tables: Mapping[str, Table], *, min_files: int = MIN_FILES, merge_all: bool = False) -> Upkeep:
    """Merge the small files of partitions that have many, or all of their files. The caller holds the lake's lock."""
    done = Upkeep()
    with _followed(tables):
        for name, table in tables.items():
            small = SMALL_JOBS_FILE if name in ("silver/jobs", "gold/ends") else SMALL_FILE
            limit = MERGED_SIZE if merge_all else small
            by_partition: dict[tuple[str, ...], list[File]] = {}
            for file in table.files():
                if file.size < limit:
                    by_partition.setdefault(file.partition, []).append(file)
            for _, files in sorted(by_partition.items()):
                for group in _groups(files, limit) if len(files) >= min_files else ():
                    if len(group) > 1:
                        done.written += table.rewrite(group, lambda rows: rows, "compact")
                        done.merged += len(group)
    return done


def _groups(files: list[File], limit: int) -> Iterator[list[File]]:
    """Yield the files of a partition, in the order of their rows, in groups of up to `limit` bytes."""
    group: list[File] = []
    for file in sorted(files, key=lambda file: str(file.lowest.get("last_entry_ms", file.lowest.get("ended_at", "")))):
        if group and sum(other.size for other in group) + file.size > limit:
            yield group
            group = []
        group.append(file)
    yield group


def vacuum(lake: Store | Path | str, keep_hours: int = DEFAULT_KEEP_HOURS) -> Upkeep:
    """Delete files that no version of the last `keep_hours` needs, and those that killed runs left behind."""
    lake = Store.of(lake)
    with sole_writer(lake):
        state = published(lake)
        tables = _tables(lake)
        done = Upkeep(deleted=delete_old_files(lake, tables, keep_hours))
        _publish(lake, state)
        shorten_logs(lake, tables, keep_hours)
        return done


def delete_old_files(lake: Store, tables: Mapping[str, Table], keep_hours: int) -> int:
    """Delete the files that `vacuum` deletes, except those of logs; return their number. The caller holds the lock."""
    deleted = 0
    with _followed(tables):
        for name in (*tables, NAME):
            store = lake / name
            opened = open_delta(store)
            if opened is None:
                continue
            # Files that were staged and never committed too. The list also names files that are gone already, and
            # vacuum writes to the log even if there is nothing to do.
            present = {file["path"] for file in store.list()}
            listed = opened.vacuum(keep_hours, enforce_retention_duration=False, full=True)
            if count := sum(path in present or unquote(path) in present for path in listed):
                opened.vacuum(keep_hours, dry_run=False, enforce_retention_duration=False, full=True)
                deleted += count
            if not retention(keep_hours).items() <= opened.metadata().configuration.items() and _has_long_log(
                store, keep_hours
            ):
                opened.alter.set_table_properties(retention(keep_hours))
    return deleted


def shorten_logs(lake: Store, tables: Iterable[str], keep_hours: int) -> None:
    """Delete log files that no version of the last `keep_hours` needs. The caller holds the lock of the lake.

    Call it after the latest versions are published: a published version whose log is gone cannot be opened.
    """
    for name in (*tables, NAME):
        opened = open_delta(lake / name) if _has_long_log(lake / name, keep_hours) else None
        if opened is not None:
            opened.create_checkpoint()
            opened.cleanup_metadata()


def _has_long_log(table: Store, keep_hours: int) -> bool:
    oldest = datetime.now(UTC) - timedelta(hours=keep_hours)
    old = [file for file in table.list("_delta_log") if file["last_modified"] < oldest]
    return len(old) >= MAX_LOG_FILES


@contextmanager
def _followed(tables: Mapping[str, Table]) -> Iterator[None]:
    """Note in the tables that were up to date that they still are, after upkeep made new versions of their sources.

    Otherwise they would look for changes in log files that may have been deleted by then, and be computed from scratch.
    """
    before = {name: table.version() for name, table in tables.items()}
    yield
    moved: dict[str, int] = {}
    for name, table in tables.items():
        table.refresh()  # a vacuum is not a commit of this object
        if 0 <= before[name] < table.version():
            changes = table.changes(before[name], table.version())
            # In an object store, another pipeline may have added rows meanwhile.
            if changes is not None and not changes.partitions:
                moved[name] = table.version()
    for target in tables.values():
        target.mark({name: new for name, new in moved.items() if target.transaction(name) == before[name]})


def _tables(lake: Store) -> dict[str, Table]:
    return {name: Table(lake, name) for name in TABLES}


def retain(lake: Store | Path | str, days: int, *, today: datetime | None = None) -> Upkeep:
    """Remove events, letters and repairs of jobs older than this many days from bronze. Silver and gold keep theirs.

    Jobs of unknown age stay, and in their queues all jobs whose IDs hold no day. `vacuum` deletes the files.
    """
    if days < 1:
        raise ConfigError(f"bronze must be kept for at least 1 day; got {days}")
    lake = Store.of(lake)
    with sole_writer(lake):
        state, done, tables = published(lake), Upkeep(), _tables(lake)
        first = ((today or datetime.now(UTC)) - timedelta(days=days)).date().isoformat()
        events = tables["bronze/events"]
        unread = events.changes(tables["silver/jobs"].transaction(events.name), events.version())
        if unread is None or unread.partitions:
            raise ConfigError("bronze has rows that silver was not computed from: run the pipeline first")
        state.retained_from = max(state.retained_from, first)
        with _followed(tables):
            for stream in STREAMS:
                table = tables[f"bronze/{stream}"]
                mixed = {file.partition[0] for file in table.files() if is_without_day(file.partition[1])}

                def is_undated(file: File, mixed: set[str] = mixed) -> bool:
                    queue, date = file.partition
                    return queue in mixed and is_of_other_ids(date) and (day_of(date) or "") < first

                old = [
                    file
                    for file in table.files()
                    if (day_of(file.partition[1]) or first) < first and not is_undated(file)
                ]
                retired = state.retired.setdefault(stream, {})
                for file in old:
                    retired[file.partition[0]] = retired.get(file.partition[0], 0) + file.rows
                done.kept[stream] = sum(file.rows for file in table.files() if is_undated(file))
                done.retired[stream] = table.remove(old, f"retain from {first}")
            if (rows := _retire_repairs(tables["bronze/repairs"], first)) is not None:
                done.retired["repairs"] = rows
        _publish(lake, state)
        return done


def forget(lake: Store | Path | str, job_ids: Sequence[str]) -> dict[str, int]:
    """Remove the rows of jobs from every table, and their files; return the number of rows per table.

    Sums that count the jobs stay. Readers that have opened an older version lose it.
    """
    lake, ids = Store.of(lake), pa.array(job_ids, pa.string())
    found: dict[str, int] = {}
    with sole_writer(lake):
        state, tables = published(lake), _tables(lake)
        with _followed(tables):
            for name, table in tables.items():
                opened = table.open()
                columns = [] if opened is None else [field.name for field in opened.schema().fields]
                for column, change in (("job_id", _without), ("sample_job_id", _without_samples)):
                    for file in table.files() if column in columns else ():
                        if holds_any(table, file.path, ids, column):
                            rows = sum(pc.is_in(table.store.parquet(file.path, [column])[column], ids).to_pylist())
                            table.rewrite([file], partial(change, ids), "forget")
                            found[name] = found.get(name, 0) + rows
                            if (stream := name.removeprefix("bronze/")) in STREAMS:  # they were not trimmed
                                retired = state.retired.setdefault(stream, {})
                                retired[file.partition[0]] = retired.get(file.partition[0], 0) + rows
        _publish(lake, state)
        delete_old_files(lake, tables, 0)
        _publish(lake, state)
        shorten_logs(lake, tables, 0)
    return found


def _without(ids: pa.Array, rows: pa.Table) -> pa.Table:
    return rows.filter(pc.invert(pc.is_in(rows["job_id"], ids)))


def _without_samples(ids: pa.Array, rows: pa.Table) -> pa.Table:
    """Return the rows with no sample where it is of one of these jobs."""
    is_of_job = pc.is_in(rows["sample_job_id"], ids)
    for name in rows.column_names:
        if name.startswith("sample"):
            column = pc.if_else(is_of_job, pa.scalar(None, rows.schema.field(name).type), rows[name])
            rows = rows.set_column(rows.column_names.index(name), name, column)
    return rows


def _retire_repairs(table: Table, first: str) -> int | None:
    """Remove the repairs before a day; return their number, None if there is no table of repairs."""
    if table.version() < 0:
        return None
    first_ms = int(datetime.fromisoformat(first).replace(tzinfo=UTC).timestamp() * 1000)
    files = table.files()
    for file in files:  # they have no partitions by day
        if file.lowest.get("repaired_ms", 0) < first_ms:
            reason = f"retain from {first}"
            table.rewrite([file], lambda rows: rows.filter(pc.greater_equal(rows["repaired_ms"], first_ms)), reason)
    return sum(file.rows for file in files) - sum(file.rows for file in table.files())


def _publish(lake: Store, state: LakeVersion) -> None:
    """Publish the versions that upkeep made: readers of older ones would miss the files that it deletes later."""
    state.tables = {name: version for name in TABLES if (version := Table(lake, name).version()) >= 0}
    state.publish(lake)
