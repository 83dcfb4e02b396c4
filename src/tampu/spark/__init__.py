"""The data pipeline on Apache Spark: queues as tables, a lake of their history, workers on executors.

| extra | installs | use it for |
|---|---|---|
| `tampu[connector]` | NumPy, PyArrow | `format("tampu")` on platforms that provide PySpark |
| `tampu[lake]` | NumPy, PyArrow, deltalake | reading a lake: the report, SQL, upkeep; no Java |
| `tampu[spark]` | all of it and PySpark | everything |

Names are loaded when they are used, so that the report starts without loading PySpark.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tampu.spark.lake.read import read_table
    from tampu.spark.session import spark_session
    from tampu.spark.source import TampuDataSource

__all__ = ["TampuDataSource", "read_table", "spark_session"]


def __getattr__(name: str) -> Any:
    if name == "spark_session":
        from tampu.spark.session import spark_session

        return spark_session
    if name == "TampuDataSource":
        from tampu.spark.source import TampuDataSource

        return TampuDataSource
    if name == "read_table":
        from tampu.spark.lake.read import read_table

        return read_table
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
