"""A real Spark session reads and writes the streams of every kind of server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from spark.filling import Filled

pytestmark = [pytest.mark.spark_session, pytest.mark.spark_slice, pytest.mark.servers]


def fill(filled: Filled) -> dict[str, list[str]]:
    """Put a few entries into each stream; return the ids of the jobs in each."""
    filled.events(9)
    filled.jobs(5)
    filled.delayed(4)
    for number in range(3):
        filled.letter(f"dead-{number}", {"n": number})
    return {
        "events": [f"job-{number}" for number in range(1, 10)],
        "jobs": [f"job-{number}" for number in range(5)],
        "delayed": [f"later-{number}" for number in range(4)],
        "dlq": [f"dead-{number}" for number in range(3)],
    }


@pytest.mark.parametrize("stream", ["events", "jobs", "delayed", "dlq"])
def test_a_stream_is_a_table(spark: Any, filled: Filled, stream: str) -> None:
    ids = fill(filled)
    rows = (
        spark.read.format("tampu").options(url=filled.url, queue="q", stream=stream).load().select("job_id").collect()
    )
    assert sorted(row["job_id"] for row in rows) == ids[stream]


def test_rows_become_jobs(spark: Any, filled: Filled) -> None:
    frame = spark.range(0, 40, numPartitions=2).selectExpr("to_json(struct(id AS n)) AS payload", "'mail' AS name")
    frame.write.format("tampu").options(url=filled.url, queue="q").mode("append").save()
    assert sorted(job.payload["n"] for job in filled.waiting()) == list(range(40))
    assert {job.name for job in filled.waiting()} == {"mail"}


def test_rows_with_the_same_job_ids_are_added_once(spark: Any, filled: Filled) -> None:
    frame = spark.range(0, 20, numPartitions=2).selectExpr("concat('id-', id) AS job_id", "'1' AS payload")
    for _ in range(2):
        frame.write.format("tampu").options(url=filled.url, queue="q").mode("append").save()
    assert sorted(job.id for job in filled.waiting()) == sorted(f"id-{number}" for number in range(20))
