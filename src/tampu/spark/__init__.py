"""The data pipeline on Apache Spark: queues as tables, a lake of their history, workers on executors.

Importing this needs the extra `spark` (PySpark, PyArrow); Java is only looked for when a session is made.
"""

from tampu.spark.session import spark_session
from tampu.spark.source import TampuDataSource

__all__ = ["TampuDataSource", "spark_session"]
