"""The writers that Spark calls: check options and columns on the driver, pass rows to the sinks on executors."""

from __future__ import annotations

import logging
import uuid
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamWriter, WriterCommitMessage

from tampu.errors import ConfigError
from tampu.spark.options import WriteOptions
from tampu.spark.server import QueueServer, gc_paused
from tampu.spark.write.rows import check_job_columns, check_letter_columns, job_rows, letter_rows
from tampu.spark.write.sinks import JobSink, ReplaySink, TaskIdentity, Written

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    import pyarrow as pa
    from pyspark.sql.types import StructType

try:
    from pyspark.sql.datasource import DataSourceStreamArrowWriter
except ImportError:  # PySpark 4.0
    HAS_ARROW_STREAM_WRITER = False
else:
    HAS_ARROW_STREAM_WRITER = True

logger = logging.getLogger("tampu.spark")

#: Queue whose server is pinged if only a column names queues.
_ANY_QUEUE = "default"
#: Rows per Arrow batch where Spark passes rows (streams in PySpark 4.0).
ROWS_PER_BATCH = 1_000


@dataclass
class Report(WriterCommitMessage):
    """The counts of one task."""

    written: Written


class Plan:
    """A checked write that is sent to the executors."""

    def __init__(self, options: Mapping[str, str], schema: StructType, *, overwrite: bool, streaming: bool) -> None:
        self.options = WriteOptions.parse(options, streaming=streaming)
        self.columns = {column.name: column.dataType.simpleString() for column in schema.fields}
        if overwrite:
            raise ConfigError("mode overwrite would delete the waiting jobs: use mode append")
        check = check_letter_columns if self.options.stream == "dlq" else check_job_columns
        check(self.columns, has_queue_option=self.options.queue is not None)
        # An unreachable server is an error now, before any Spark job starts.
        with QueueServer(self.options.url, self.options.queue or _ANY_QUEUE) as server:
            server.call("PING")

    def write(self, batches: Iterable[pa.RecordBatch], task: TaskIdentity) -> Report:
        """Write the rows of one task."""
        options, columns = self.options, self.columns
        with gc_paused():
            if options.stream == "dlq":
                letters = (pair for batch in batches for pair in letter_rows(batch, columns, options.queue))
                return Report(ReplaySink(options).write(letters))
            rows = (pair for batch in batches for pair in job_rows(batch, columns, options.name, options.queue))
            return Report(JobSink(options, task).write(rows))


def _log(messages: list[WriterCommitMessage | None]) -> None:
    total = Written()
    for message in messages:
        if isinstance(message, Report):
            total.add(message.written)
    logger.info("%s", total)


class BatchWriter(DataSourceArrowWriter):
    """`df.write`."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        # Created on the driver and sent to all tasks: it identifies this write in the markers.
        self._query = uuid.uuid4().hex

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        from pyspark import TaskContext

        context = TaskContext.get()
        partition = 0 if context is None else context.partitionId()
        return self._plan.write(iterator, TaskIdentity(self._query, "0", partition))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        _log(messages)


def _stream_task() -> TaskIdentity:
    """Return the identity of this task: writers are not passed query and batch, but tasks have both."""
    from pyspark import TaskContext

    context = TaskContext.get()
    query = context.getLocalProperty("sql.streaming.queryId") if context else None
    batch = context.getLocalProperty("streaming.sql.batchId") if context else None
    if context is None or query is None or batch is None:
        raise ConfigError(
            "this version of Spark does not pass query and batch to tasks: write with foreachBatch instead"
        )
    return TaskIdentity(query, batch, context.partitionId())


class _StreamWriter:
    """Common part of both stream writers."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        _log(messages)


class RowStreamWriter(_StreamWriter, DataSourceStreamWriter):
    """`df.writeStream` where Spark passes rows (PySpark 4.0)."""

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        return self._plan.write(_as_batches(iterator), _stream_task())


if HAS_ARROW_STREAM_WRITER:

    class ArrowStreamWriter(_StreamWriter, DataSourceStreamArrowWriter):
        """`df.writeStream` in Arrow batches (PySpark 4.1)."""

        def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
            return self._plan.write(iterator, _stream_task())


def _as_batches(rows: Iterator[Any]) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    while some := [row.asDict(recursive=True) for row in islice(rows, ROWS_PER_BATCH)]:
        yield pa.RecordBatch.from_pylist(some)


def stream_writer(plan: Plan) -> DataSourceStreamWriter:
    """Return the writer for `df.writeStream`, in Arrow batches where Spark supports it."""
    return ArrowStreamWriter(plan) if HAS_ARROW_STREAM_WRITER else RowStreamWriter(plan)
