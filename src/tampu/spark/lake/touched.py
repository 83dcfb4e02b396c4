"""Finds the jobs that new events are about, the files that hold rows of these jobs, and the days that gold counts them
on. Needs no Spark.

A round with few new events reads and writes little, however many jobs there are: of other files only the column of job
IDs is scanned, and not even that if the file's statistics exclude all of these IDs.
"""

from __future__ import annotations

from bisect import bisect_left
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tampu.spark.lake.bronze import is_of_other_ids
from tampu.spark.lake.spans import joined, minute_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping
    from pathlib import Path

    from tampu.spark.lake.spans import Minutes
    from tampu.spark.lake.table import File, Partition, Table

#: Partitions with more new events than this are computed as a whole: looking for single jobs would take longer.
MAX_NEW_EVENTS = 50_000
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

    jobs: Mapping[Partition, list[str]]

    @classmethod
    def read(cls, table: Table, new_files: Mapping[Partition, Iterable[File]]) -> Touched:
        """Return the jobs of new files of bronze."""
        found: dict[Partition, list[str]] = {}
        for group, files in new_files.items():
            ids: set[str] = set()
            for file in files:
                rows = pq.ParquetFile(table.path / file.path).read(columns=["job_id", "event"])
                is_counted = pc.and_kleene(
                    pc.is_valid(rows["job_id"]), pc.fill_null(pc.not_equal(rows["event"], "progress"), False)
                )
                ids.update(rows["job_id"].filter(is_counted).unique().to_pylist())
            found[group] = sorted(ids)
        return cls(found)

    def files(self, table: Table, files: Iterable[File], mixed: Collection[str]) -> list[File]:
        """Return the files that hold rows of these jobs."""
        candidates = [file for file in files if self._may_be_in(file, mixed)]
        values = {group: pa.array(ids, pa.string()) for group, ids in self.jobs.items()}

        def is_in(file: File) -> bool:
            return holds_any(table.path / file.path, values[group_of(file.partition, mixed)])

        with ThreadPoolExecutor(4) as pool:
            return [file for file, found in zip(candidates, pool.map(is_in, candidates), strict=True) if found]

    def table(self) -> pa.Table:
        """Return the jobs as rows of queue, group and job ID."""
        rows = [(queue, name, job_id) for (queue, name), ids in self.jobs.items() for job_id in ids]
        columns = list(zip(*rows, strict=True)) or [(), (), ()]
        names = ("queue", "job_group", "job_id")
        return pa.table({name: pa.array(values, pa.string()) for name, values in zip(names, columns, strict=True)})

    def _may_be_in(self, file: File, mixed: Collection[str]) -> bool:
        ids = self.jobs.get(group_of(file.partition, mixed))
        if not ids:
            return False
        low, high = file.lowest.get("job_id"), file.highest.get("job_id")
        if low is None or high is None:
            return True
        place = bisect_left(ids, low)
        return place < len(ids) and ids[place] <= high


def holds_any(path: Path, ids: pa.Array) -> bool:
    """Return whether a file has a row of one of these jobs."""
    column = pq.ParquetFile(path).read(columns=["job_id"])["job_id"]
    return bool(pc.any(pc.is_in(column, ids)).as_py())


def changed_spans(table: Table, before: Iterable[File], after: Iterable[File]) -> dict[Partition, Minutes]:
    """Return the queues, days and minutes in which jobs ended or failed whose rows of silver differ.

    A row follows from the events of its job, which only become more: rows with equal numbers of events are equal.
    """
    sides = (_rows_of(table, before), _rows_of(table, after))
    found: dict[Partition, Minutes] = {}
    for rows_of, others_of in (sides, sides[::-1]):
        for partition, frames in rows_of.items():
            others = [chunk for frame in others_of.get(partition, ()) for chunk in frame["row"].chunks]
            same = pa.chunked_array(others, pa.string()).combine_chunks()
            for frame in frames:
                changed = frame.filter(pc.invert(pc.is_in(frame["row"], same)))
                for log in ("end_log", "failure_log"):
                    times = pc.struct_field(pc.list_flatten(changed[log]), "ts").drop_null()
                    for day, span in _spans_of(times).items():
                        key = (partition[0], day)
                        found[key] = joined(found.get(key, span), span)
    return found


def _spans_of(times: pa.ChunkedArray) -> dict[str, Minutes]:
    """Return the first and last minute of each day."""
    days = times.cast(pa.date32())
    rows = pa.table({"day": days, "time": times}).group_by("day").aggregate([("time", "min"), ("time", "max")])
    return {
        row["day"].isoformat(): (minute_of(row["time_min"]), minute_of(row["time_max"])) for row in rows.to_pylist()
    }


def _rows_of(table: Table, files: Iterable[File]) -> dict[Partition, list[pa.Table]]:
    """Return the logs of jobs by partition. The column `row` tells the rows of a job apart."""
    found: dict[Partition, list[pa.Table]] = {}
    for file in files:
        rows = pq.ParquetFile(table.path / file.path).read(columns=["job_id", "events", "end_log", "failure_log"])
        key = pc.binary_join_element_wise(rows["job_id"].cast(pa.string()), rows["events"].cast(pa.string()), "/")
        found.setdefault(file.partition, []).append(rows.append_column("row", key))
    return found
