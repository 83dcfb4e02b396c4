"""Bronze: events and dead letters as they were, each landed once.

The driver plans a batch, Spark reads exactly that range and stages the files, and one Delta commit adds them together
with the offsets, as application transactions. Killed before the commit, the next run plans the batch again; killed
after it, the next run continues with the next batch.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, cast

from tampu.errors import ConfigError
from tampu.spark.lake.table import Table, schema_of
from tampu.spark.options import ReadOptions
from tampu.spark.read.batch import MAX_TIMESTAMP_MS
from tampu.spark.read.offsets import BEFORE_ALL, EntryId, Position, count_between, extent_of, stream_key
from tampu.spark.read.plan import StreamPlanner
from tampu.spark.server import QueueServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pyspark.sql import DataFrame, SparkSession

    from tampu.spark.lake.store import Store
    from tampu.spark.options import Stream

    Offsets = dict[str, Any]

#: Streams that are landed.
STREAMS = ("events", "dlq")
#: Maximum number of entries of one batch.
MAX_PER_BATCH = 1_000_000
#: Name of the transactions of landing.
LANDING = "tampu.landing"
#: Name of the transaction of tables whose offsets are transactions, and the parts of an offset.
OFFSETS = "tampu.offsets"
_PARTS = ("ms", "seq", "added", "former")
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
        self, spark: SparkSession, url: str, queues: list[str], table: Table, lake: Store, max_per_batch: int
    ) -> None:
        self._spark = spark
        self._queues = queues
        self._stream = table.name.rpartition("/")[2]
        self._options = {"url": url, "stream": self._stream, "failOnDataLoss": "false"}
        self._max_per_batch = max_per_batch
        self.table = table
        self._former = lake / "_offsets" / self._stream
        self._planner: StreamPlanner | None = None

    def run(self, on_rows: Callable[[int], None] = lambda rows: None) -> int:
        """Land everything that is present now; return the number of rows."""
        if self._planner is None:  # kept for later rounds: its connections stay open
            options = ReadOptions.parse(self._options | {"queue": ",".join(self._queues)}, streaming=True)
            self._planner = StreamPlanner(options)
            self._convert()
        self._planner.stop_at_now()
        landed = 0
        while True:
            start = offsets_of(self.table, self._queues)
            end = self._planner.latest(start, self._max_per_batch)
            queues = [queue for queue in self._queues if _id(end, queue) != _id(start, queue)]
            if not queues:
                return landed
            landed += self._land(queues, start, end)
            on_rows(landed)

    def close(self) -> None:
        """Close the connections."""
        if self._planner is not None:
            self._planner.close()
            self._planner = None

    def _land(self, queues: list[str], start: Offsets, end: Offsets) -> int:
        frame = self._frame(queues, start, end)
        adds = self.table.stage(frame, rebalance=False)
        number = self.table.transaction(LANDING) + 1
        offsets = transactions_of(self._stream, {queue: end[queue] for queue in queues})
        self.table.commit(adds, schema_of(frame), {LANDING: number}, offsets=offsets)
        return sum(json.loads(add.stats)["numRecords"] for add in adds)

    def _convert(self) -> None:
        """Take over the offsets of a lake from before 0.2, which had them in a file named after the last batch."""
        number = self.table.transaction(LANDING)
        if number < 0 or self.table.transaction(OFFSETS) >= 0:
            return
        try:
            found = json.loads(self._former.read(f"{number:012d}.json"))
        except FileNotFoundError:
            raise ConfigError(
                f"{self._former}/{number:012d}.json is missing, so it is not known how far the lake has read: restore "
                "it from a backup"
            ) from None
        self.table.mark(transactions_of(self._stream, found))
        self._former.delete([file["path"] for file in self._former.list()])

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


def transactions_of(stream: str, offsets: Offsets) -> dict[str, int]:
    """Return the transactions that say how far the queues of a stream were read. A number of -1 is unknown."""
    found = {OFFSETS: 1}
    for queue, offset in offsets.items():
        position = Position.from_json(offset)
        values = (*position.id, -1 if position.added is None else position.added, position.former)
        for name, value in zip(_PARTS, values, strict=True):
            # A transaction is a signed number of 64 bits, half of an ID an unsigned one.
            found[f"tampu.{stream}.{queue}.{name}"] = value if value < 2**63 else value - 2**64
    return found


def entries_behind(url: str, queues: Iterable[str], table: Table, version: int | None) -> dict[str, int | None]:
    """Return how many entries of each queue a version of a table does not have yet; None if that is not known."""
    stream = cast("Stream", table.name.rpartition("/")[2])
    offsets = {} if version is None else offsets_of(table, queues, version)
    found = {}
    for queue in queues:
        with QueueServer(url, queue) as server:
            extent = extent_of(server, stream_key(server.keys, stream))
        start = Position.from_json(offsets.get(queue, str(BEFORE_ALL)))
        found[queue] = count_between(start, extent.end, extent)
    return found


def offsets_of(table: Table, queues: Iterable[str], version: int | None = None) -> Offsets:
    """Return how far these queues were read; those that were never read are missing."""
    opened, stream = table.open(version), table.name.rpartition("/")[2]
    found: Offsets = {}
    for queue in queues:
        names = [f"tampu.{stream}.{queue}.{name}" for name in _PARTS]
        values = [None if opened is None else opened.transaction_version(name) for name in names]
        if (ms := values[0]) is not None:
            seq, added, former = (value or 0 for value in values[1:])
            position = Position(EntryId(ms % 2**64, seq % 2**64), None if added < 0 else added, former=former)
            found[queue] = position.to_json()
    return found
