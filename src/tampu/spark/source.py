"""The data source `format("tampu")`: checks options and creates the readers and writers.

spark.read.format("tampu").option("queue", "emails").option("stream", "dlq").load()
spark.readStream.format("tampu").option("queue", "emails").load()            # follows the events
df.write.format("tampu").option("queue", "emails").mode("append").save()     # adds jobs
"""

# ruff: noqa: E402 - a missing extra is named before it is imported

from __future__ import annotations

from typing import TYPE_CHECKING

from tampu.spark.session import require_connector

require_connector()

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)

from tampu.errors import ConfigError
from tampu.spark.options import ReadOptions
from tampu.spark.read.batch import columns_of, spark_schema
from tampu.spark.read.readers import HAS_ADMISSION_CONTROL, BatchReader, PlainStreamReader, PushdownReader
from tampu.spark.server import check_can_scan
from tampu.spark.write.writers import BatchWriter, Plan, stream_writer

if HAS_ADMISSION_CONTROL:
    from tampu.spark.read.readers import LimitedStreamReader

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


class TampuDataSource(DataSource):
    """The streams and sets of tampu queues as tables."""

    @classmethod
    def name(cls) -> str:
        return "tampu"

    def schema(self) -> str:
        options = ReadOptions.parse(self.options, streaming=None)
        return spark_schema(options.stream, options.payload)

    def reader(self, schema: StructType) -> DataSourceReader:
        options = self._read_options(schema, streaming=False)
        return PushdownReader(options) if options.pushdown else BatchReader(options)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        options = self._read_options(schema, streaming=True)
        if HAS_ADMISSION_CONTROL:
            return LimitedStreamReader(options)
        if options.max_offsets_per_trigger or options.min_offsets_per_trigger:
            raise ConfigError("options maxOffsetsPerTrigger and minOffsetsPerTrigger need PySpark 4.2 or later")
        return PlainStreamReader(options)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        return BatchWriter(Plan(self.options, schema, overwrite=overwrite, streaming=False))

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        return stream_writer(Plan(self.options, schema, overwrite=overwrite, streaming=True))

    def _read_options(self, schema: StructType, *, streaming: bool) -> ReadOptions:
        options = ReadOptions.parse(self.options, streaming=streaming)
        if options.queue_pattern is not None:
            check_can_scan(options.url)
        given = {field.name: field.dataType.simpleString() for field in schema.fields}
        if given != {name: kind.lower() for name, kind in columns_of(options.stream, options.payload).items()}:
            raise ConfigError(
                f"the columns of stream={options.stream} are fixed: leave out .schema(...), and select or cast instead"
            )
        return options
