"""Every part of the connector once, under whatever PySpark this Python has: `make test-spark-versions`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pyspark
import redis

from spark.filling import Filled
from tampu.embedded.server import EmbeddedServer
from tampu.spark import spark_session
from tampu.spark.lake.pipeline import Pipeline
from tampu.spark.session import SHORT_LIVED


def check(what: str, found: object, expected: object) -> None:
    if found != expected:
        raise SystemExit(f"PySpark {pyspark.__version__}: {what}: {found}, not {expected}")
    sys.stdout.write(f"PySpark {pyspark.__version__}: {what}: {found}\n")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, EmbeddedServer(folder) as server:
        url = server.url
        filled = Filled(SimpleNamespace(url=url, client=lambda: redis.Redis.from_url(url, protocol=2)))
        filled.events(500)
        filled.jobs(50)
        filled.letter("x", {"a": "1"})
        spark = spark_session("tampu-smoke", master="local[2,4]", conf=SHORT_LIVED)

        def read(**options: str) -> int:
            return spark.read.format("tampu").options(url=url, queue="q", **options).load().count()

        check("events", read(), 500)
        check("jobs", read(stream="jobs", payload="json"), 50)
        check("dead letters", read(stream="dlq"), 1)
        payloads = spark.range(1000).selectExpr("to_json(struct(id AS n)) AS payload")
        payloads.write.format("tampu").options(url=url, queue="written").mode("append").save()
        check("jobs written", filled.client.xlen(filled.keys("written").stream), 1000)
        events = spark.readStream.format("tampu").options(url=url, queue="q").load()
        copy = events.selectExpr("to_json(struct(entry_ms AS n)) AS payload").writeStream.format("tampu")
        copy = copy.options(url=url, queue="copies", checkpointLocation=f"{folder}/checkpoint")
        copy.trigger(availableNow=True).start().awaitTermination()
        check("events copied by a stream", filled.client.xlen(filled.keys("copies").stream), 500)
        summary = Pipeline(spark, url, ["q"], Path(folder) / "lake").run()
        check("landed in a lake", summary.landed, {"events": 500, "dlq": 1})
        spark.stop()


if __name__ == "__main__":
    main()
