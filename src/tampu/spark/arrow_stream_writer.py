"""`df.writeStream` in Arrow batches. A module of its own: its base class is not in PySpark 4.0."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage

from tampu.spark.writers import Plan, _log, _stream_task

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa


class ArrowStreamWriter(DataSourceStreamArrowWriter):
    """`df.writeStream`."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return self._plan.write(iterator, _stream_task())

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        _log(messages)
