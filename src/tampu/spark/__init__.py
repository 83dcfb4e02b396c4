"""The data pipeline on Apache Spark: queues as tables, a lake of their history, workers on executors.

Using it needs the extra `spark` (PySpark, PyArrow); Java is only looked for when a session is made. Names are loaded
when they are asked for: the report, which reads Parquet alone, starts without loading PySpark.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tampu.spark.session import spark_session
    from tampu.spark.source import TampuDataSource

__all__ = ["TampuDataSource", "spark_session"]


def __getattr__(name: str) -> Any:
    if name == "spark_session":
        from tampu.spark.session import spark_session

        return spark_session
    if name == "TampuDataSource":
        from tampu.spark.source import TampuDataSource

        return TampuDataSource
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
