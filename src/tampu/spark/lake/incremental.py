"""Finds the jobs that new events are about, the files that hold rows of these jobs, and the days that gold counts them
on. Needs no Spark.

A round with few new events reads and writes little, however many jobs there are: of other files only the column of job
IDs is scanned, and not even that if the file's statistics exclude all of these IDs.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, date, datetime, time
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from tampu.spark.lake.bronze import is_of_other_ids
from tampu.spark.lake.silver import literal

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from tampu.spark.lake.files import Partition
    from tampu.spark.lake.table import File, Table

    Minutes = tuple[datetime, datetime]
    Span = Minutes | None
    Spans = Mapping[Partition, Span]

#: Stands for all partitions of jobs whose IDs hold no day, in queues where some of them are of unknown age.
OTHER_IDS = "other"


def group_of(partition: Partition, mixed: Collection[str]) -> Partition:
    """Return the partitions that hold all events of a job of this one, as one name.

    Usually that is the partition itself. In the queues of `mixed` the creation of some jobs is unknown, so events of
    one job may be in partitions with and without a day.
    """
    queue, date = partition
    return (queue, OTHER_IDS) if queue in mixed and is_of_other_ids(date) else partition


@dataclass(frozen=True, slots=True)
class Touched:
    """Jobs by the group of partitions that holds their events."""

    jobs: Mapping[Partition, pa.Array]

    @classmethod
    def read(cls, table: Table, new_files: Mapping[Partition, Iterable[File]]) -> Touched:
        """Return the jobs of new files of bronze."""
        found: dict[Partition, pa.Array] = {}
        for group, files in new_files.items():
            chunks: list[pa.Array] = []
            for file in files:
                rows = table.store.parquet(file.path, ["job_id", "event"])
                is_counted = pc.and_kleene(
                    pc.is_valid(rows["job_id"]), pc.fill_null(pc.not_equal(rows["event"], "progress"), False)
                )
                chunks += (rows["job_id"].filter(is_counted).unique().cast(pa.string()),)
            found[group] = pc.unique(pa.chunked_array(chunks, pa.string()))
        return cls(found)

    def files(self, table: Table, files: Iterable[File], mixed: Collection[str]) -> list[File]:
        """Return the files that hold rows of these jobs."""
        candidates = [file for file in files if self._may_be_in(file, mixed)]

        def is_in(file: File) -> bool:
            return holds_any(table, file.path, self.jobs[group_of(file.partition, mixed)])

        with ThreadPoolExecutor(4) as pool:
            return [file for file, found in zip(candidates, pool.map(is_in, candidates), strict=True) if found]

    def table(self) -> pa.Table:
        """Return the jobs as rows of queue, group and job ID."""
        tables = [
            pa.table(
                {
                    "queue": pa.repeat(pa.scalar(queue), len(ids)),
                    "job_group": pa.repeat(pa.scalar(group), len(ids)),
                    "job_id": ids,
                }
            )
            for (queue, group), ids in self.jobs.items()
        ]
        return pa.concat_tables(tables)

    def _may_be_in(self, file: File, mixed: Collection[str]) -> bool:
        ids = self.jobs.get(group_of(file.partition, mixed))
        if ids is None or not len(ids):
            return False
        low, high = file.lowest.get("job_id"), file.highest.get("job_id")
        if low is None or high is None:
            return True
        return bool(pc.any(pc.and_(pc.greater_equal(ids, low), pc.less_equal(ids, high))).as_py())


def holds_any(table: Table, path: str, ids: pa.Array, column: str = "job_id") -> bool:
    """Return whether a file has a row of one of these jobs."""
    rows = table.store.parquet(path, [column])
    return bool(rows.num_columns and pc.any(pc.is_in(rows[column], ids)).as_py())


def changed_spans(table: Table, files: Iterable[File], since: int) -> dict[Partition, Minutes]:
    """Return the queues, days and minutes in which jobs ended or failed whose rows changed after a round.

    Logs of jobs only grow: the minutes of former rows are among those of the present ones.
    """
    found: dict[Partition, Minutes] = {}
    for file in files:
        rows = table.store.parquet(file.path, ["changed_round", "end_log", "failure_log"])
        rows = rows.filter(pc.greater(rows["changed_round"], since))
        for log in ("end_log", "failure_log"):
            times = pc.struct_field(pc.list_flatten(rows[log]), "ts").drop_null()
            for day, span in _spans_of(times).items():
                key = (file.partition[0], day)
                found[key] = joined(found.get(key, span), span)
    return found


def _spans_of(times: pa.ChunkedArray) -> dict[str, Minutes]:
    """Return the first and last minute of each day."""
    days = times.cast(pa.date32())
    rows = pa.table({"day": days, "time": times}).group_by("day").aggregate([("time", "min"), ("time", "max")])
    return {
        row["day"].isoformat(): (minute_of(row["time_min"]), minute_of(row["time_max"])) for row in rows.to_pylist()
    }


#: Maximum number of days for which gold computes single minutes; of more days, it computes all minutes.
MAX_SPANS = 50


def minute_of(moment: datetime) -> datetime:
    """Return the start of the minute, in UTC."""
    return _in_utc(moment).replace(second=0, microsecond=0)


def joined(one: Minutes, other: Minutes) -> Minutes:
    """Return the minutes from the first to the last of both."""
    return min(one[0], other[0]), max(one[1], other[1])


def is_row_in(spans: Spans) -> str:
    """Return a condition on rows of gold with a queue, a day and a minute."""
    conditions = []
    whole: dict[str, list[str]] = {}
    for (queue, day), span in spans.items():
        if span is None:
            whole.setdefault(queue, []).append(day)
        else:
            minutes = f"minute BETWEEN {_timestamp(span[0])} AND {_timestamp(span[1])}"
            conditions.append(f"queue = {literal(queue)} AND day = {literal(day)} AND {minutes}")
    for queue, days in whole.items():
        conditions.append(f"queue = {literal(queue)} AND day IN ({', '.join(map(literal, sorted(days)))})")
    return " OR ".join(f"({condition})" for condition in conditions)


def is_job_in(spans: Spans) -> str:
    """Return a condition that holds for all jobs of silver which ended or failed in the spans, and for few others."""
    by_queue: dict[str, tuple[datetime, datetime]] = {}
    for (queue, day), span in spans.items():
        span = _whole(day) if span is None else span
        by_queue[queue] = joined(by_queue.get(queue, span), span)
    conditions: list[str] = []
    for queue, (first, last) in by_queue.items():
        # The last minute may not be over: the minute of a time is compared.
        conditions += (
            f"(queue = {literal(queue)} AND {high} >= {_timestamp(first)} AND "
            f"date_trunc('MINUTE', {low}) <= {_timestamp(last)})"
            for low, high in (("first_ended_at", "done_at"), ("first_failed_at", "last_failed_at"))
        )
    return " OR ".join(conditions)


def holds_jobs_in(file: File, spans: Spans) -> bool:
    """Return whether jobs of a silver file may have ended or failed in the spans."""
    runs = _runs(file)
    for (queue, day), span in spans.items():
        if queue == file.partition[0]:
            first, last = _whole(day) if span is None else span
            if runs is None or any(end >= first and minute_of(begin) <= last for begin, end in runs):
                return True
    return False


def holds_rows_in(file: File, span: Span) -> bool:
    """Return whether a file of gold may have rows of these minutes."""
    minutes = _minutes(file)
    return span is None or minutes is None or (minutes[0] <= span[1] and minutes[1] >= span[0])


def holds_only_rows_in(file: File, span: Span) -> bool:
    """Return whether a file of gold has no rows of other minutes."""
    minutes = _minutes(file)
    return span is None or (minutes is not None and span[0] <= minutes[0] and minutes[1] <= span[1])


def _runs(file: File) -> list[tuple[datetime, datetime]] | None:
    """Return the first and last end, and the first and last failure, of a silver file; None if they are not known."""
    found: list[tuple[datetime, datetime]] = []
    for first, last in (("first_ended_at", "done_at"), ("first_failed_at", "last_failed_at")):
        low, high = file.lowest.get(first), file.highest.get(last)
        if isinstance(low, datetime) and isinstance(high, datetime):
            found.append((_in_utc(low), _in_utc(high)))
        elif file.nulls.get(last) != file.rows:
            return None
    return found


def _minutes(file: File) -> Minutes | None:
    low, high = file.lowest.get("minute"), file.highest.get("minute")
    return (_in_utc(low), _in_utc(high)) if isinstance(low, datetime) and isinstance(high, datetime) else None


def _whole(day: str) -> Minutes:
    midnight = datetime.combine(date.fromisoformat(day), time(), UTC)
    return midnight, midnight.replace(hour=23, minute=59)


def _in_utc(moment: datetime) -> datetime:
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


def _timestamp(moment: datetime) -> str:
    # Spark compiles numbers and times of a query into its code, and would compile it again for every minute. Text is
    # passed to the code, unless the optimizer can make a time of it: hence the empty start of a column.
    text = moment.replace(tzinfo=None).isoformat(sep=" ")
    return f"CAST(concat('{text}', coalesce(left(name, 0), '')) AS TIMESTAMP)"
