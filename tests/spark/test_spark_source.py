"""The data source `tampu` as Spark calls it: which reader or writer it returns, and what it refuses. No session."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from pyspark.sql.datasource import DataSourceStreamWriter
from pyspark.sql.types import BinaryType, LongType, StringType, StructField, StructType, TimestampType

import tampu.spark
from tampu.errors import ConfigError
from tampu.spark import TampuDataSource
from tampu.spark.read.readers import HAS_ADMISSION_CONTROL, BatchReader, LimitedStreamReader, PushdownReader
from tampu.spark.write.writers import BatchWriter

if TYPE_CHECKING:
    from servers.process import Server

#: The types of columns, as Spark passes them back.
TYPES = {"STRING": StringType(), "BINARY": BinaryType(), "BIGINT": LongType(), "TIMESTAMP": TimestampType()}
JOBS = StructType([StructField("payload", StringType())])


def source(url: str, **options: str) -> TampuDataSource:
    return TampuDataSource({"url": url, "queue": "q"} | options)


def schema_of(found: TampuDataSource) -> StructType:
    columns = [column.split("` ") for column in found.schema().split(", ")]
    return StructType([StructField(name.removeprefix("`"), TYPES[kind]) for name, kind in columns])


def test_reads_take_filters_only_with_the_option_pushdown(server: Server) -> None:
    plain = source(server.url, stream="dlq")
    filtering = source(server.url, stream="dlq", pushdown="true")
    assert TampuDataSource.name() == "tampu"
    assert isinstance(filtering.reader(schema_of(filtering)), PushdownReader)
    reader = plain.reader(schema_of(plain))
    assert isinstance(reader, BatchReader)
    assert not isinstance(reader, PushdownReader)


def test_streams_are_read_with_a_limit_per_batch(server: Server) -> None:
    assert HAS_ADMISSION_CONTROL
    limited = source(server.url, stream="dlq", maxOffsetsPerTrigger="10")
    assert isinstance(limited.streamReader(schema_of(limited)), LimitedStreamReader)


def test_another_schema_is_refused_with_the_remedy(server: Server) -> None:
    with pytest.raises(ConfigError, match=r"columns of stream=dlq are fixed: leave out \.schema"):
        source(server.url, stream="dlq").reader(JOBS)


def test_writes_append_and_never_overwrite(server: Server) -> None:
    assert isinstance(source(server.url).writer(JOBS, overwrite=False), BatchWriter)
    assert isinstance(source(server.url).streamWriter(JOBS, overwrite=False), DataSourceStreamWriter)
    with pytest.raises(ConfigError, match="overwrite would delete the waiting jobs"):
        source(server.url).writer(JOBS, overwrite=True)


def test_an_unknown_name_of_the_package_is_an_attribute_error() -> None:
    assert callable(tampu.spark.spark_session)
    with pytest.raises(AttributeError, match=r"tampu\.spark.* has no attribute 'nothing'"):
        _ = tampu.spark.nothing
