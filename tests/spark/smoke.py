"""Every part of the connector and the pipeline once, under whatever PySpark this Python has, with the settings of a
session that tampu did not create: `make test-spark-versions`. `smoke.py sc://127.0.0.1:15002` does it on Spark Connect.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pyspark
import redis

from spark.filling import Filled
from tampu.embedded.server import EmbeddedServer
from tampu.spark import read_table, spark_session
from tampu.spark.lake.pipeline import Pipeline
from tampu.spark.lake.rows import query
from tampu.spark.session import SHORT_LIVED

#: The first events are of this day in UTC, and of the next day in the session's time zone.
DAY, TIME_ZONE = "2025-06-15", "Pacific/Kiritimati"
#: Spark would take the name for a number.
QUEUE = "007"


def check(what: str, found: object, expected: object) -> None:
    if found != expected:
        raise SystemExit(f"PySpark {pyspark.__version__}: {what}: {found}, not {expected}")
    sys.stdout.write(f"PySpark {pyspark.__version__}: {what}: {found}\n")


def session(remote: str) -> Any:
    if remote:
        from pyspark.sql import SparkSession

        return SparkSession.builder.remote(remote).getOrCreate()
    inferring = {"spark.sql.sources.partitionColumnTypeInference.enabled": "true"}
    return spark_session("tampu-smoke", master="local[2,4]", conf=SHORT_LIVED | inferring)


def check_connector(spark: Any, filled: Filled, folder: str) -> None:
    url = filled.url

    def read(**options: str) -> int:
        return spark.read.format("tampu").options(url=url, queue=QUEUE, **options).load().count()

    check("events", read(), 500)
    check("jobs", read(stream="jobs", payload="json"), 50)
    check("dead letters", read(stream="dlq"), 1)
    payloads = spark.range(1000).selectExpr("to_json(struct(id AS n)) AS payload")
    payloads.write.format("tampu").options(url=url, queue="written").mode("append").save()
    check("jobs written", filled.client.xlen(filled.keys("written").stream), 1000)
    events = spark.readStream.format("tampu").options(url=url, queue=QUEUE).load()
    copy = events.selectExpr("to_json(struct(entry_ms AS n)) AS payload").writeStream.format("tampu")
    copy = copy.options(url=url, queue="copies", checkpointLocation=f"{folder}/checkpoint")
    copy.trigger(availableNow=True).start().awaitTermination()
    check("events copied by a stream", filled.client.xlen(filled.keys("copies").stream), 500)


def check_pipeline(spark: Any, filled: Filled, lake: Path) -> None:
    pipeline = Pipeline(spark, filled.url, [QUEUE], lake)
    check("landed in a lake", pipeline.run().landed, {"events": 500, "dlq": 1})
    filled.events(100, QUEUE, start=501)
    check("landed later", pipeline.run().landed, {"events": 100, "dlq": 0})
    pipeline.close()
    check("rows of silver", read_table(spark, lake, "silver/jobs").where(f"queue = '{QUEUE}'").count(), 600)
    found = query(lake, "SELECT queue, day, sum(completed) AS jobs FROM gold_slo GROUP BY queue, day").to_pylist()
    check("days of gold", found, [{"queue": QUEUE, "day": DAY, "jobs": 600}])
    check("time zone of the session", spark.conf.get("spark.sql.session.timeZone"), TIME_ZONE)


def main(remote: str = "") -> None:
    with tempfile.TemporaryDirectory() as folder, EmbeddedServer(folder) as server:
        url = server.url
        filled = Filled(SimpleNamespace(url=url, client=lambda: redis.Redis.from_url(url, protocol=2)))
        filled.events(500, QUEUE)
        filled.jobs(50, QUEUE)
        filled.letter("x", {"a": "1"}, QUEUE)
        spark = session(remote)
        spark.conf.set("spark.sql.session.timeZone", TIME_ZONE)
        check_connector(spark, filled, folder)
        check_pipeline(spark, filled, Path(folder) / "lake")
        spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
