"""Bronze, silver and gold as declared tables, computed by the functions that `tampu pipeline run` uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark import pipelines as dp
from pyspark.sql import SparkSession

from tampu.spark.lake import gold, silver
from tampu.spark.lake.bronze import date_of_job
from tampu.spark.lake.gold import clusters_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

spark = SparkSession.active()


def _follow(stream: str, payload: str) -> DataFrame:
    reader = spark.readStream.format("tampu").options(
        url=spark.conf.get("tampu.url"),
        queue=spark.conf.get("tampu.queue"),
        stream=stream,
        payload=payload,
        failOnDataLoss="false",
    )
    return reader.load().selectExpr("*", f"{date_of_job(stream)} AS date")


@dp.table(partition_cols=["queue", "date"])
def bronze_events() -> DataFrame:
    return _follow("events", "binary")


@dp.table(partition_cols=["queue", "date"])
def bronze_dlq() -> DataFrame:
    return _follow("dlq", "json")


@dp.materialized_view
def silver_jobs() -> DataFrame:
    return silver.jobs_of(spark.read.table("bronze_events"))


@dp.materialized_view
def gold_ends() -> DataFrame:
    return gold.ends(spark.read.table("silver_jobs"))


@dp.materialized_view
def gold_throughput() -> DataFrame:
    return gold.throughput(spark.read.table("gold_ends"), gold.failed_runs(spark.read.table("silver_jobs")))


@dp.materialized_view
def gold_latency() -> DataFrame:
    return gold.latency(spark.read.table("gold_ends"))


@dp.materialized_view
def gold_failures() -> DataFrame:
    return gold.failures(gold.failed_runs(spark.read.table("silver_jobs")))


@dp.materialized_view
def gold_slo() -> DataFrame:
    return gold.slo(spark.read.table("gold_ends"))


@dp.materialized_view
def gold_dlq_clusters() -> DataFrame:
    return clusters_of(spark.read.table("bronze_dlq"), spark.read.table("silver_jobs"))
