"""Bronze: events and dead letters as they were, landed once each by Structured Streaming."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

from tampu.spark.read.batch import MAX_TIMESTAMP_MS
from tampu.spark.read.readers import HAS_ADMISSION_CONTROL

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

logger = logging.getLogger("tampu.spark")

#: Most entries of one micro-batch.
MAX_PER_BATCH = 1_000_000
#: What Spark says when a Python process takes longer than its 10 s, which cannot be set, and how often to try.
SLOW_START = "failed to connect back"
MAX_STARTS = 3
#: How often a query is asked how far it is, in seconds.
PROGRESS_SECS = 1
#: Partitions for jobs whose ids tell no day.
HASH_PARTITIONS = 32

# Crockford's alphabet to the digits that `conv` knows in base 32.
_ULID_MS = (
    "cast(conv(translate(substring(job_id, 1, 10), 'ABCDEFGHJKMNPQRSTVWXYZ', 'ABCDEFGHIJKLMNOPQRSTUV'), 32, 10) "
    "AS BIGINT)"
)
#: The day of a job, the same for all of its events: out of its ULID, or a bucket by its id's hash. So all events of a
#: job are in one partition, and silver's partition is a function of bronze's.
DATE_OF_JOB = f"""
CASE
  WHEN job_id IS NULL AND entry_ms BETWEEN 0 AND {MAX_TIMESTAMP_MS}
    THEN date_format(timestamp_millis(entry_ms), 'yyyy-MM-dd')
  WHEN job_id IS NULL THEN 'none'
  WHEN job_id RLIKE '^[0-7][0-9A-HJKMNP-TV-Z]{{25}}$' AND {_ULID_MS} BETWEEN 946684800000 AND 4102444800000
    THEN date_format(timestamp_millis({_ULID_MS}), 'yyyy-MM-dd')
  ELSE concat('h', lpad(cast(pmod(xxhash64(job_id), {HASH_PARTITIONS}) AS STRING), 2, '0'))
END
"""


def read_stream(spark: SparkSession, url: str, queues: list[str], stream: str, max_per_batch: int) -> DataFrame:
    """The stream of entries, each with its partition."""
    reader = spark.readStream.format("tampu").options(
        url=url,
        queue=",".join(queues),
        stream=stream,
        # What was trimmed before it came is counted and shown; it cannot be had any more.
        failOnDataLoss="false",
        payload="json" if stream == "dlq" else "binary",
    )
    if HAS_ADMISSION_CONTROL:  # before PySpark 4.2 all there is comes in one micro-batch
        reader = reader.option("maxOffsetsPerTrigger", str(max_per_batch))
    return reader.load().selectExpr("*", f"{DATE_OF_JOB} AS date")


def land(
    spark: SparkSession, frame: DataFrame, lake: Path, stream: str, on_rows: Callable[[int], None] = lambda rows: None
) -> dict[str, Any] | None:
    """Land all there is; the offsets reached, None when there was nothing new. `on_rows` is told how many it has."""
    from pyspark.errors import StreamingQueryException

    for attempt in range(1, MAX_STARTS + 1):
        query = (
            frame.writeStream.format("parquet")
            .option("path", str(lake / "bronze" / stream))
            .option("checkpointLocation", str(lake / "_checkpoints" / stream))
            .queryName(f"tampu-bronze-{stream}")
            .partitionBy("queue", "date")
            .trigger(availableNow=True)
            .start()
        )
        try:
            batches: dict[int, int] = {}  # kept here: Spark forgets all but the last hundred
            while not query.awaitTermination(PROGRESS_SECS):
                known = len(batches)
                batches |= {progress["batchId"]: progress["numInputRows"] for progress in query.recentProgress}
                if len(batches) > known:
                    on_rows(sum(batches.values()))
            break
        except StreamingQueryException as error:
            if SLOW_START not in str(error) or attempt == MAX_STARTS:
                raise
            logger.warning("this machine is too busy to start a Python process in 10 s; trying again")
    progress = query.lastProgress
    if progress is None:
        return None
    # From the text: before PySpark 4.2 the object holds the offset as Python would print it.
    offsets: dict[str, Any] | None = json.loads(progress.json)["sources"][0]["endOffset"]
    return offsets


def has_landed(lake: Path, stream: str) -> bool:
    """Whether bronze holds anything of this stream."""
    return any((lake / "bronze" / stream).glob("queue=*"))


def read_bronze(spark: SparkSession, lake: Path, stream: str) -> DataFrame:
    """What was landed and committed; files of batches that were cut off are left out."""
    return spark.read.parquet(str(lake / "bronze" / stream))
