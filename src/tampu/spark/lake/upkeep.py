"""Upkeep of a lake: compaction, vacuum and retention. Needs no Spark; delta-rs does the work."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from deltalake import DeltaTable

from tampu.errors import ConfigError
from tampu.spark.lake.folder import sole_writer
from tampu.spark.lake.pipeline import STREAMS, day_of, is_bucket, is_undated
from tampu.spark.lake.rows import published
from tampu.spark.lake.table import TABLES, File, Table
from tampu.spark.lake.versions import NAME, LakeVersion

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

#: Files that are not part of a table any more are kept this long, in hours, for readers that opened it before.
DEFAULT_KEEP_HOURS = 2
#: A partition with at least this many files is compacted.
MIN_FILES = 8
#: With `--every`, upkeep runs after this many rounds that landed something.
ROUNDS_BETWEEN = 50


@dataclass
class Upkeep:
    """Summary of one upkeep."""

    #: Files that were merged, and those that they became.
    merged: int = 0
    written: int = 0
    #: Files that were deleted.
    deleted: int = 0
    #: Rows that retention removed, per stream.
    retired: dict[str, int] = field(default_factory=dict)


def compact(lake: Path) -> Upkeep:
    """Merge the files of partitions that have many. Readers see the same rows, before and after."""
    with sole_writer(lake):
        state, done = published(lake), Upkeep()
        for name in TABLES:
            table = Table(lake, name)
            counts: dict[tuple[str, ...], int] = {}
            for file in table.files():
                counts[file.partition] = counts.get(file.partition, 0) + 1
            for partition in sorted(part for part, count in counts.items() if count >= MIN_FILES):
                opened = table.open()
                assert opened is not None  # noqa: S101 - it has files
                filters = [(column, "=", value) for column, value in zip(table.by, partition, strict=True)]
                metrics = opened.optimize.compact(partition_filters=filters)
                done.merged += metrics["numFilesRemoved"]
                done.written += metrics["numFilesAdded"]
        if done.merged:
            _publish(lake, state)
        return done


def vacuum(lake: Path, keep_hours: int = DEFAULT_KEEP_HOURS) -> Upkeep:
    """Delete files that no version of the last `keep_hours` needs, and those that killed runs left behind."""
    with sole_writer(lake):
        state, done = published(lake), Upkeep()
        for name in (*TABLES, NAME):
            folder = lake / name
            if not (folder / "_delta_log").is_dir():
                continue
            shutil.rmtree(folder / "_temporary", ignore_errors=True)  # of a Spark job that was killed
            deleted = DeltaTable(str(folder)).vacuum(
                retention_hours=keep_hours,
                dry_run=False,
                enforce_retention_duration=False,
                full=True,  # files that were staged and never committed too
            )
            done.deleted += len(deleted)
        _publish(lake, state)
        return done


def retain(lake: Path, days: int, *, today: datetime | None = None) -> Upkeep:
    """Remove events and letters of jobs older than this many days from bronze. Silver and gold keep their rows.

    Buckets of jobs of unknown age stay. `vacuum` deletes the files.
    """
    if days < 1:
        raise ConfigError(f"bronze must be kept for at least 1 day, got {days}")
    with sole_writer(lake):
        state, done = published(lake), Upkeep()
        first = ((today or datetime.now(UTC)) - timedelta(days=days)).date().isoformat()
        state.retained_from = max(state.retained_from, first)
        silver = Table(lake, "silver/jobs")
        for stream in STREAMS:
            table = Table(lake, f"bronze/{stream}")
            if stream == "events":
                unread = table.changed(silver.transaction(table.name), table.version())
                if unread is None or unread:
                    raise ConfigError("bronze has rows that silver was not computed from: run the pipeline first")
            with_buckets = {file.partition[0] for file in table.files() if is_bucket(file.partition[1])}

            def is_old(file: File, with_buckets: set[str] = with_buckets) -> bool:
                queue, date = file.partition
                day = day_of(date)
                return day is not None and day < first and not (queue in with_buckets and is_undated(date))

            retired = state.retired.setdefault(stream, {})
            for file in table.files():
                if is_old(file):
                    retired[file.partition[0]] = retired.get(file.partition[0], 0) + file.rows
            done.retired[stream] = table.remove(is_old, f"retain from {first}")
        _publish(lake, state)
        return done


def run_upkeep(
    lake: Path, keep_hours: int = DEFAULT_KEEP_HOURS, on_step: Callable[[str], None] = lambda _: None
) -> Upkeep:
    """Compact and vacuum."""
    on_step("compacting")
    done = compact(lake)
    on_step("vacuuming")
    done.deleted = vacuum(lake, keep_hours).deleted
    return done


def _publish(lake: Path, state: LakeVersion) -> None:
    """Publish the versions that upkeep made: readers of older ones would miss the files that it deletes later."""
    state.tables = {name: version for name in TABLES if (version := Table(lake, name).version()) >= 0}
    state.publish(lake)
