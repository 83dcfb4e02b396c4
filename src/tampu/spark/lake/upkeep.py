"""Upkeep of a lake: compaction, vacuum and retention. Needs no Spark; delta-rs does the work."""

from __future__ import annotations

import shutil
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote

from deltalake import CommitProperties, DeltaTable

from tampu.errors import ConfigError
from tampu.spark.lake.bronze import STREAMS, day_of, is_of_other_ids, is_without_day
from tampu.spark.lake.folder import NAME, LakeVersion, is_table, retention, sole_writer
from tampu.spark.lake.rows import published
from tampu.spark.lake.table import TABLES, UPKEEP, File, Table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
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
#: Longest name of a folder, in bytes.
MAX_FOLDER_NAME = 255
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


def compact(lake: Path) -> Upkeep:
    """Merge the files of each partition. Readers see the same rows, before and after."""
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
            target_size = None if merge_all else small
            counts: dict[tuple[str, ...], int] = {}
            for file in table.files():
                if target_size is None or file.size < target_size:
                    counts[file.partition] = counts.get(file.partition, 0) + 1
            for partition in sorted(part for part, count in counts.items() if count >= min_files):
                if not _can_merge(partition[0]):
                    continue
                opened = table.open()
                assert opened is not None  # noqa: S101 - it has files
                filters = [(column, "=", value) for column, value in zip(table.by, partition, strict=True)]
                metrics = opened.optimize.compact(partition_filters=filters, target_size=target_size)
                done.merged += metrics["numFilesRemoved"]
                done.written += metrics["numFilesAdded"]
    return done


def _can_merge(queue: str) -> bool:
    # delta-rs does not find files in a folder with ~, and it cannot create one whose escaped name is too long.
    return "~" not in queue and len(f"queue={quote(queue, safe='')}") <= MAX_FOLDER_NAME


def vacuum(lake: Path, keep_hours: int = DEFAULT_KEEP_HOURS) -> Upkeep:
    """Delete files that no version of the last `keep_hours` needs, and those that killed runs left behind."""
    with sole_writer(lake):
        state = published(lake)
        tables = _tables(lake)
        done = Upkeep(deleted=delete_old_files(lake, tables, keep_hours))
        _publish(lake, state)
        shorten_logs(lake, tables, keep_hours)
        return done


def delete_old_files(lake: Path, tables: Mapping[str, Table], keep_hours: int) -> int:
    """Delete the files that `vacuum` deletes, except those of logs; return their number. The caller holds the lock."""
    deleted = 0
    with _followed(tables):
        for name in (*tables, NAME):
            folder = lake / name
            if not is_table(folder):
                continue
            shutil.rmtree(folder / "_temporary", ignore_errors=True)  # of a Spark job that was killed
            opened = DeltaTable(str(folder))
            for orphan in folder.rglob(".*.crc"):  # checksums of a killed Spark job, which only Hadoop reads
                orphan.unlink()
            # Files that were staged and never committed too. The list also names files that are gone already, and
            # vacuum writes to the log even if there is nothing to do.
            listed = opened.vacuum(keep_hours, enforce_retention_duration=False, full=True)
            if count := sum((folder / path).exists() or (folder / unquote(path)).exists() for path in listed):
                opened.vacuum(keep_hours, dry_run=False, enforce_retention_duration=False, full=True)
                deleted += count
            if not retention(keep_hours).items() <= opened.metadata().configuration.items() and _has_long_log(
                folder, keep_hours
            ):
                opened.alter.set_table_properties(retention(keep_hours))
    return deleted


def shorten_logs(lake: Path, tables: Iterable[str], keep_hours: int) -> None:
    """Delete log files that no version of the last `keep_hours` needs. The caller holds the lock of the lake.

    Call it after the latest versions are published: a published version whose log is gone cannot be opened.
    """
    for name in (*tables, NAME):
        if is_table(lake / name) and _has_long_log(lake / name, keep_hours):
            opened = DeltaTable(str(lake / name))
            opened.create_checkpoint()
            opened.cleanup_metadata()


def _has_long_log(folder: Path, keep_hours: int) -> bool:
    oldest = time.time() - keep_hours * 3600
    return sum(path.stat().st_mtime < oldest for path in (folder / "_delta_log").iterdir()) >= MAX_LOG_FILES


@contextmanager
def _followed(tables: Mapping[str, Table]) -> Iterator[None]:
    """Note in the tables that were up to date that they still are, after upkeep made new versions of their sources.

    Otherwise they would look for changes in log files that may have been deleted by then, and be computed from scratch.
    """
    before = {name: table.version() for name, table in tables.items()}
    yield
    after = {name: table.version() for name, table in tables.items()}
    for target in tables.values():
        target.mark(
            {
                name: after[name]
                for name, version in before.items()
                if 0 <= version < after[name] and target.transaction(name) == version
            }
        )


def _tables(lake: Path) -> dict[str, Table]:
    return {name: Table(lake, name) for name in TABLES}


def retain(lake: Path, days: int, *, today: datetime | None = None) -> Upkeep:
    """Remove events, letters and repairs of jobs older than this many days from bronze. Silver and gold keep theirs.

    Jobs of unknown age stay, and in their queues all jobs whose IDs hold no day. `vacuum` deletes the files.
    """
    if days < 1:
        raise ConfigError(f"bronze must be kept for at least 1 day; got {days}")
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

                def is_old(file: File, is_undated: Callable[[File], bool] = is_undated) -> bool:
                    day = day_of(file.partition[1])
                    return day is not None and day < first and not is_undated(file)

                retired = state.retired.setdefault(stream, {})
                for file in table.files():
                    if is_old(file):
                        retired[file.partition[0]] = retired.get(file.partition[0], 0) + file.rows
                done.kept[stream] = sum(file.rows for file in table.files() if is_undated(file))
                done.retired[stream] = table.remove(is_old, f"retain from {first}")
            if (rows := _retire_repairs(tables["bronze/repairs"], first)) is not None:
                done.retired["repairs"] = rows
        _publish(lake, state)
        return done


def _retire_repairs(table: Table, first: str) -> int | None:
    """Remove the repairs before a day; return their number, None if there is no table of repairs."""
    opened = table.open()
    if opened is None:
        return None
    rows = sum(file.rows for file in table.files())
    first_ms = int(datetime.fromisoformat(first).replace(tzinfo=UTC).timestamp() * 1000)
    # They have no partitions by day: delta-rs writes the files with old repairs again, without them.
    opened.delete(
        f"repaired_ms < {first_ms}",
        commit_properties=CommitProperties(custom_metadata={UPKEEP: f"retain from {first}"}),
    )
    return rows - sum(file.rows for file in table.files())


def _publish(lake: Path, state: LakeVersion) -> None:
    """Publish the versions that upkeep made: readers of older ones would miss the files that it deletes later."""
    state.tables = {name: version for name in TABLES if (version := Table(lake, name).version()) >= 0}
    state.publish(lake)
