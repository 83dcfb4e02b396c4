"""Found by Spark itself (it looks for modules named `pyspark_*`): makes `format("tampu")` known without `register`."""

from tampu.spark.source import TampuDataSource as DefaultSource

__all__ = ["DefaultSource"]
