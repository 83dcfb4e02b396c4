"""`format("tampu")`: what Spark sees. Thin; planning is in `plan`, reading in `readers`, writing in `sink`.

spark.read.format("tampu").option("queue", "emails").option("stream", "dlq").load()
spark.readStream.format("tampu").option("queue", "emails").load()            # follows the events
df.write.format("tampu").option("queue", "emails").mode("append").save()     # adds jobs
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    InputPartition,
)

from tampu.errors import ConfigError
from tampu.spark.collector import made_without_collections
from tampu.spark.columns import columns_of, spark_schema
from tampu.spark.follow import Follower
from tampu.spark.options import WITH_IDS, ReadOptions
from tampu.spark.plan import plan_batch
from tampu.spark.readers import read_snapshot, read_span
from tampu.spark.writers import BatchWriter, Plan, stream_writer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pyarrow as pa
    from pyspark.sql.types import StructType

    from tampu.spark.partitions import Span

try:
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadLimit,
        ReadMaxRows,
        SupportsTriggerAvailableNow,
    )
except ImportError:  # PySpark 4.0 and 4.1
    HAS_ADMISSION_CONTROL = False
else:
    HAS_ADMISSION_CONTROL = "limit" in inspect.signature(DataSourceStreamReader.latestOffset).parameters


class SpanPartition(InputPartition):
    """A span of a stream."""

    def __init__(self, span: Span) -> None:
        super().__init__(span)
        self.span = span


class SnapshotPartition(InputPartition):
    """A whole queue."""

    def __init__(self, queue: str) -> None:
        super().__init__(queue)
        self.queue = queue


class BatchReader(DataSourceReader):
    """`spark.read`."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options

    def partitions(self) -> Sequence[InputPartition]:
        if self._options.stream not in WITH_IDS:
            return [SnapshotPartition(queue) for queue in self._options.queues]
        return [SpanPartition(span) for span in plan_batch(self._options)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if isinstance(partition, SnapshotPartition):
            return made_without_collections(read_snapshot(self._options, partition.queue))
        if isinstance(partition, SpanPartition):
            return made_without_collections(read_span(self._options, partition.span))
        return iter(())  # Spark's stand-in for "no partitions at all"


class _StreamReader(DataSourceStreamReader):
    """What all versions of PySpark have in common."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._opened: Follower | None = None

    @property
    def _follower(self) -> Follower:
        # Made at the first use: this object also travels to executors, which only read.
        if self._opened is None:
            self._opened = Follower(self._options)
        return self._opened

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        return self._follower.initial()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        return [SpanPartition(span) for span in self._follower.plan(start, end)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if isinstance(partition, SpanPartition):
            return made_without_collections(read_span(self._options, partition.span))
        return iter(())

    def stop(self) -> None:
        if self._opened is not None:
            self._opened.close()


class PlainStreamReader(_StreamReader):
    """`spark.readStream` before PySpark 4.2, which takes all there is in each micro-batch."""

    def latestOffset(self) -> dict[str, Any]:  # type: ignore[override]  # noqa: N802 - the signature of 4.0 and 4.1
        return self._follower.latest(None, None)


if HAS_ADMISSION_CONTROL:

    class LimitedStreamReader(_StreamReader, SupportsTriggerAvailableNow):
        """`spark.readStream` with `maxOffsetsPerTrigger`, and with an end under `availableNow`."""

        def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
            most = self._options.max_offsets_per_trigger
            return ReadMaxRows(most) if most else ReadAllAvailable()

        def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
            return self._follower.latest(start, limit.max_rows if isinstance(limit, ReadMaxRows) else None)

        def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
            return self._follower.newest()

        def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
            self._follower.stop_at_now()


class TampuDataSource(DataSource):
    """The streams and sets of tampu queues as tables."""

    @classmethod
    def name(cls) -> str:
        return "tampu"

    def schema(self) -> str:
        options = ReadOptions.parse(self.options, streaming=None)
        return spark_schema(options.stream, options.payload)

    def reader(self, schema: StructType) -> DataSourceReader:
        return BatchReader(self._read_options(schema, streaming=False))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        options = self._read_options(schema, streaming=True)
        if HAS_ADMISSION_CONTROL:
            return LimitedStreamReader(options)
        if options.max_offsets_per_trigger:
            raise ConfigError("option maxOffsetsPerTrigger needs PySpark 4.2 or later")
        return PlainStreamReader(options)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        return BatchWriter(Plan(self.options, schema, overwrite=overwrite, streaming=False))

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        return stream_writer(Plan(self.options, schema, overwrite=overwrite, streaming=True))

    def _read_options(self, schema: StructType, *, streaming: bool) -> ReadOptions:
        options = ReadOptions.parse(self.options, streaming=streaming)
        given = {field.name: field.dataType.simpleString() for field in schema.fields}
        if given != {name: kind.lower() for name, kind in columns_of(options.stream, options.payload).items()}:
            raise ConfigError(
                f"the columns of stream={options.stream} are fixed: leave out .schema(...), and select or cast instead"
            )
        return options
