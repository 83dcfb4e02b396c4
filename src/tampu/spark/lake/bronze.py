"""Bronze: events and dead letters as they were, each landed once.

A batch is planned on the driver and its offsets are written to `_offsets/STREAM/NUMBER.json`. Spark then reads exactly
that range and stages the files, and one Delta commit adds them with the transaction NUMBER. Killed before the commit,
the next run plans the batch again; killed after it, the next run continues with the next batch.
"""

from __future__ import annotations

import json
import os
import re
from typing import TYPE_CHECKING, Any

from tampu.errors import ConfigError
from tampu.spark.lake.table import Table, schema_of
from tampu.spark.options import ReadOptions
from tampu.spark.read.batch import MAX_TIMESTAMP_MS
from tampu.spark.read.offsets import BEFORE_ALL
from tampu.spark.read.plan import StreamPlanner

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    Offsets = dict[str, Any]

#: Streams that are landed.
STREAMS = ("events", "dlq")
#: Maximum number of entries of one batch.
MAX_PER_BATCH = 1_000_000
#: Name of the transactions of landing.
LANDING = "tampu.landing"
#: Partition for jobs whose ID holds no day and whose time of creation is unknown. Lakes of earlier versions have
#: several, h00 to h31, by a hash of the ID.
UNDATED = "h00"

# Crockford's alphabet to the digits that `conv` knows in base 32.
_ULID_MS = (
    "cast(conv(translate(substring(job_id, 1, 10), 'ABCDEFGHJKMNPQRSTVWXYZ', 'ABCDEFGHIJKLMNOPQRSTUV'), 32, 10) "
    "AS BIGINT)"
)
_DAY = re.compile(r"c?(\d{4,}-\d\d-\d\d)")


def date_of_job(stream: str = "events") -> str:
    """Return an expression for the partition of a row, the same for all rows of a job.

    | ID of the job | partition |
    |---|---|
    | a ULID | the day in the ULID |
    | other | `c` and the day the job was created |
    | other, and the time of creation is unknown (events of ChasquiMQ's workers) | `h00` |
    | none (`drained`, undecodable entries), and progress reports | the day of the entry |
    """
    of_no_job = "job_id IS NULL" + (" OR event = 'progress'" if stream == "events" else "")
    return f"""
CASE
  WHEN ({of_no_job}) AND entry_ms BETWEEN 0 AND {MAX_TIMESTAMP_MS}
    THEN date_format(timestamp_millis(entry_ms), 'yyyy-MM-dd')
  WHEN {of_no_job} THEN 'none'
  WHEN job_id RLIKE '^[0-7][0-9A-HJKMNP-TV-Z]{{25}}$' AND {_ULID_MS} BETWEEN 946684800000 AND 4102444800000
    THEN date_format(timestamp_millis({_ULID_MS}), 'yyyy-MM-dd')
  WHEN created_at IS NOT NULL THEN concat('c', date_format(created_at, 'yyyy-MM-dd'))
  ELSE '{UNDATED}'
END
"""


def day_of(date: str) -> str | None:
    """Return the day of a partition; None if it has none."""
    found = _DAY.fullmatch(date)
    return found[1] if found else None


def is_without_day(date: str) -> bool:
    """Return whether a partition is of jobs that were created at an unknown time."""
    return date.startswith("h")


def is_of_other_ids(date: str) -> bool:
    """Return whether a partition is of jobs whose IDs hold no day."""
    return date.startswith(("c", "h"))


class Landing:
    """Lands one stream of some queues."""

    def __init__(
        self, spark: SparkSession, url: str, queues: list[str], lake: Path, stream: str, max_per_batch: int
    ) -> None:
        self._spark = spark
        self._queues = queues
        self._options = {"url": url, "stream": stream, "failOnDataLoss": "false"}
        self._stream = stream
        self._max_per_batch = max_per_batch
        self.table = Table(lake, f"bronze/{stream}")
        self._log = OffsetLog(lake, stream)
        self._planner: StreamPlanner | None = None

    def run(self, on_rows: Callable[[int], None] = lambda rows: None) -> int:
        """Land everything that is present now; return the number of rows."""
        if self._planner is None:  # kept for later rounds: its connections stay open
            options = ReadOptions.parse(self._options | {"queue": ",".join(self._queues)}, streaming=True)
            self._planner = StreamPlanner(options)
        self._planner.stop_at_now()
        landed = 0
        while True:
            number = self.table.transaction(LANDING)
            start = self._log.read(number)
            end = self._planner.latest(start, self._max_per_batch)
            queues = [queue for queue in self._queues if _id(end, queue) != _id(start, queue)]
            if not queues:
                return landed
            landed += self._land(number + 1, queues, start, end)
            on_rows(landed)

    def close(self) -> None:
        """Close the connections."""
        if self._planner is not None:
            self._planner.close()
            self._planner = None

    def _land(self, number: int, queues: list[str], start: Offsets, end: Offsets) -> int:
        self._log.write(number, end)
        frame = self._frame(queues, start, end)
        adds = self.table.stage(frame, rebalance=False)
        self.table.commit(adds, schema_of(frame), {LANDING: number})
        self._log.forget_before(number)
        return sum(json.loads(add.stats)["numRecords"] for add in adds)

    def _frame(self, queues: list[str], start: Offsets, end: Offsets) -> DataFrame:
        reader = self._spark.read.format("tampu").options(
            **self._options,
            queue=",".join(queues),
            payload="json" if self._stream == "dlq" else "binary",
            startingOffsets=json.dumps({queue: start[queue] for queue in queues if queue in start}),
            endingOffsets=json.dumps({queue: end[queue] for queue in queues}),
        )
        return reader.load().selectExpr("*", f"{date_of_job(self._stream)} AS date")


def _id(offsets: Offsets, queue: str) -> str:
    """Return the ID that a queue was read up to."""
    return str(offsets[queue]["id"]) if queue in offsets else str(BEFORE_ALL)


class OffsetLog:
    """The offsets of batches, by number. Written before a batch is read, so that its commit and offsets agree."""

    def __init__(self, lake: Path, stream: str) -> None:
        self._folder = lake / "_offsets" / stream

    def read(self, number: int) -> Offsets:
        """Return the offsets behind a committed batch; an empty mapping before the first one."""
        if number < 0:
            return {}
        path = self._path(number)
        try:
            found: Offsets = json.loads(path.read_text())
        except FileNotFoundError:
            raise ConfigError(
                f"{path} is missing, so it is not known how far the lake has read: restore it from a backup"
            ) from None
        return found

    def write(self, number: int, offsets: Offsets) -> None:
        """Write the offsets of a batch in one step that survives a crash."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._path(number)
        draft = path.with_suffix(".new")
        with draft.open("w") as file:
            json.dump(offsets, file)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)

    def forget_before(self, number: int) -> None:
        """Remove the offsets of batches before this one."""
        for path in self._folder.glob("*.json"):
            if path != self._path(number):
                path.unlink()

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:012d}.json"
