"""Driver programs for the kill tests: `driver.py MASTER PROGRAM URL ...`, one function each."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from tampu.spark import spark_session

CONF = {
    "spark.driver.memory": "500m",
    "spark.executor.memory": "520m",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "256",
    "spark.executorEnv.PYTHONPATH": os.environ.get("PYTHONPATH", ""),
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}


def slowly(batches: Any) -> Any:
    import time

    for batch in batches:
        time.sleep(0.05)
        yield batch


def sink(spark: Any, url: str, rows: str) -> None:
    """Adds jobs 0 to rows, slowly."""
    frame = spark.range(0, int(rows), numPartitions=6).selectExpr("to_json(struct(id AS n)) AS payload")
    frame = frame.mapInArrow(slowly, "payload string")
    frame.write.format("tampu").options(url=url, queue="q").mode("append").save()


def stream(spark: Any, url: str, checkpoint: str) -> None:
    """Adds a job for each event, in micro-batches."""
    frame = spark.readStream.format("tampu").options(url=url, queue="q", maxOffsetsPerTrigger="2000").load()
    jobs = frame.selectExpr("to_json(struct(entry_ms AS n)) AS payload").mapInArrow(slowly, "payload string")
    query = (
        jobs.writeStream.format("tampu")
        .options(url=url, queue="copies", checkpointLocation=checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


def worker(spark: Any, url: str) -> None:
    """Runs jobs until it is told to stop; each leaves a mark in the server."""
    from tampu.config import ConsumerConfig
    from tampu.spark.worker import SparkWorker

    def handler(job: Any) -> None:
        import time

        import redis

        client = redis.Redis.from_url(url)
        client.hincrby("ran", job.payload["n"], 1)
        client.close()
        time.sleep(0.02)

    config = ConsumerConfig(
        queue_name="q", concurrency=8, batch=8, block_ms=200, claim_min_idle_ms=2000, shutdown_deadline_secs=10
    )
    SparkWorker(spark, handler=handler, config=config, url=url, slots=2).run()


def main() -> None:
    master, program, *arguments = sys.argv[1:]
    spark = spark_session(f"tampu-{program}", master=master, conf=CONF)
    started = time.monotonic()
    {"sink": sink, "stream": stream, "worker": worker}[program](spark, *arguments)
    print(f"{program} ended in good order after {time.monotonic() - started:.1f} s")
    spark.stop()


if __name__ == "__main__":
    main()
