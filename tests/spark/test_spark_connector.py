"""`format("tampu")` in a real Spark session: reads, writes, tasks that fail, micro-batches that are replayed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from spark.filling import Filled


pytestmark = [pytest.mark.spark_session, pytest.mark.spark_slice]


def reading(spark: Any, filled: Filled, **options: Any) -> Any:
    reader = spark.read.format("tampu").options(url=filled.url, **{"queue": "q"} | options)
    return reader.load()


def following(spark: Any, filled: Filled, **options: Any) -> Any:
    return spark.readStream.format("tampu").options(url=filled.url, **{"queue": "q"} | options).load()


def run_to_the_end(query: Any) -> None:
    query.awaitTermination(120)
    assert query.exception() is None


def numbers(spark: Any, count: int, partitions: int = 4) -> Any:
    return spark.range(0, count, numPartitions=partitions).selectExpr("to_json(struct(id AS n)) AS payload")


def test_streams_are_tables_found_without_register(spark: Any, filled: Filled) -> None:
    filled.events(2_500)
    filled.jobs(20)
    filled.letter("dead", {"a": 1})
    filled.delayed(7)
    counts = {name: reading(spark, filled, stream=name).count() for name in ("events", "jobs", "dlq", "delayed")}
    assert counts == {"events": 2_500, "jobs": 20, "dlq": 1, "delayed": 7}
    slow = reading(spark, filled).where("duration_us > 2490").orderBy("entry_ms").select("job_id", "name").collect()
    assert [tuple(row) for row in slow] == [(f"job-{number}", "work") for number in range(2491, 2501)]


def test_json_payloads_are_parsed_by_spark(spark: Any, filled: Filled) -> None:
    filled.jobs(10)
    jobs = reading(spark, filled, stream="jobs", payload="json")
    total = jobs.selectExpr("sum(variant_get(parse_json(payload), '$.n', 'int')) AS total").first()["total"]
    assert total == 45


@pytest.mark.servers("cluster86")
def test_on_a_cluster(spark: Any, filled: Filled) -> None:
    url = filled.url if "cluster" in filled.url else filled.url.replace("redis://", "redis+cluster://")
    numbers(spark, 300).write.format("tampu").options(url=url, queue="a").mode("append").save()
    numbers(spark, 200).write.format("tampu").options(url=url, queue="b").mode("append").save()
    frame = spark.read.format("tampu").options(url=url, queue="a,b", stream="jobs").load()
    assert {row["queue"]: row["count"] for row in frame.groupBy("queue").count().collect()} == {"a": 300, "b": 200}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"stream": "nope"}, "option stream"),
        ({"sream": "dlq"}, "unknown option 'sream'"),
        ({"url": "redis://127.0.0.1:1"}, "127.0.0.1:1"),
    ],
)
def test_bad_reads_are_named(spark: Any, filled: Filled, options: dict[str, str], named: str) -> None:
    with pytest.raises(Exception, match=named):
        spark.read.format("tampu").options(**{"url": filled.url, "queue": "q"} | options).load().count()


def test_bad_writes_are_named_before_any_job(spark: Any, filled: Filled) -> None:
    def write(frame: Any, mode: str = "append", **options: str) -> None:
        frame.write.format("tampu").options(**{"url": filled.url, "queue": "q"} | options).mode(mode).save()

    frame = spark.range(3)
    for bad, mode, named in (
        (frame, "append", "unknown column 'id'"),
        (frame.selectExpr("1.5BD AS payload"), "append", "column payload is of type decimal"),
        (frame.selectExpr("'1' AS payload", "1 AS run_at"), "append", "column run_at must be of type timestamp"),
        (frame.selectExpr("'1' AS payload"), "overwrite", "mode overwrite"),
        (frame.selectExpr("'{' AS payload"), "append", "column payload of row 0"),
    ):
        with pytest.raises(Exception, match=named):
            write(bad, mode)
    with pytest.raises(Exception, match="dedup"):
        write(frame.selectExpr("'1' AS payload"), dedup="chunk")
    assert filled.payloads() == []


def test_a_failed_task_is_run_again_without_duplicates(spark: Any, filled: Filled, tmp_path: Path) -> None:
    """The task of each partition fails once, after two of its chunks were written."""
    marks = str(tmp_path)

    def fail_once(batches: Any) -> Any:
        from pathlib import Path

        from pyspark import TaskContext

        context = TaskContext.get()
        mark = Path(marks) / str(context.partitionId())
        for number, batch in enumerate(batches):
            if number == 3 and not mark.exists():
                mark.touch()
                raise RuntimeError("a task that fails on purpose")
            yield batch

    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "300")
    try:
        frame = numbers(spark, 8_000).mapInArrow(fail_once, "payload string")
        frame.write.format("tampu").options(url=filled.url, queue="q").mode("append").save()
    finally:
        spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")
    assert len(list(tmp_path.iterdir())) == 4
    found = [payload["n"] for payload in filled.payloads()]
    assert len(found) == 8_000
    assert sorted(found) == list(range(8_000))


def test_a_replayed_micro_batch_adds_nothing(spark: Any, filled: Filled, tmp_path: Path) -> None:
    """Spark forgets that its last micro-batch was committed, as after a crash just before, and runs it again."""
    filled.events(3_000)
    checkpoint = tmp_path / "checkpoint"

    def run() -> Any:
        frame = following(spark, filled, maxOffsetsPerTrigger=1_000).selectExpr(
            "to_json(struct(entry_ms AS n)) AS payload", "'copy' AS name"
        )
        query = (
            frame.writeStream.format("tampu")
            .options(url=filled.url, queue="copies", checkpointLocation=str(checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        run_to_the_end(query)
        return query

    run()
    assert len(filled.payloads("copies")) == 3_000
    for commit in (checkpoint / "commits").glob("*2*"):
        commit.unlink()
    for commit in (checkpoint / "commits").glob(".*2*"):
        commit.unlink()
    filled.events(500, start=3_001)
    query = run()
    assert {progress["batchId"] for progress in query.recentProgress} >= {2, 3}
    found = sorted(payload["n"] for payload in filled.payloads("copies"))
    assert found == list(range(1, 3_501))


def test_a_stream_reads_each_event_once_over_restarts(spark: Any, filled: Filled, tmp_path: Path) -> None:
    out, checkpoint = str(tmp_path / "out"), str(tmp_path / "checkpoint")
    for start in (1, 2_001, 4_001):
        filled.events(2_000, start=start)
        query = (
            following(spark, filled, maxOffsetsPerTrigger=1_500)
            .writeStream.format("parquet")
            .option("path", out)
            .option("checkpointLocation", checkpoint)
            .trigger(availableNow=True)
            .start()
        )
        run_to_the_end(query)
    rows = spark.read.parquet(out)
    assert rows.count() == rows.select("entry_ms").distinct().count() == 6_000


def test_a_query_fails_on_a_gap_and_goes_on_without_it_when_allowed(spark: Any, filled: Filled, tmp_path: Path) -> None:
    checkpoint = str(tmp_path / "checkpoint")

    def run(**options: Any) -> Any:
        query = (
            following(spark, filled, **options)
            .writeStream.format("parquet")
            .option("path", str(tmp_path / "out"))
            .option("checkpointLocation", checkpoint)
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination(120)
        return query

    filled.events(10)
    run()
    filled.events(20, start=11)
    filled.client.xtrim(filled.keys().events, maxlen=5, approximate=False)
    with pytest.raises(Exception, match="15 entries were trimmed or deleted"):
        run()
    run(failOnDataLoss="false")
    assert spark.read.parquet(str(tmp_path / "out")).count() == 15


def test_a_stream_cannot_follow_a_snapshot(spark: Any, filled: Filled, tmp_path: Path) -> None:
    writer = following(spark, filled, stream="jobs").writeStream.format("noop")
    started = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True)
    with pytest.raises(Exception, match="stream=jobs can only be read as a snapshot"):
        started.start().awaitTermination(60)


def test_dead_letters_are_repaired_with_dataframe_code_and_replayed(spark: Any, filled: Filled) -> None:
    for number in range(20):
        filled.letter(f"job-{number}", {"amount": f"{number} EUR"}, error="could not convert string to float")
    letters = reading(spark, filled, stream="dlq", payload="json")
    repaired = letters.where("error_type = 'ValueError'").selectExpr(
        "queue",
        "entry_id",
        "to_json(struct(cast(split(variant_get(parse_json(payload), '$.amount', 'string'), ' ')[0] AS int) AS amount)) "
        "AS payload",
    )
    repaired.write.format("tampu").options(url=filled.url, stream="dlq").mode("append").save()
    assert sorted(payload["amount"] for payload in filled.payloads()) == list(range(20))
    assert filled.client.hlen(filled.keys().replays) == 20


def test_a_queue_is_a_view_and_not_a_table_of_the_catalog(spark: Any, filled: Filled) -> None:
    filled.events(7)
    using = f"USING tampu OPTIONS (url '{filled.url}', queue 'q')"
    with pytest.raises(Exception, match="Use CREATE TEMPORARY VIEW"):
        spark.sql(f"CREATE TABLE queue_table {using}")
    spark.sql(f"CREATE TEMPORARY VIEW queue_events {using}")
    try:
        assert spark.sql("SELECT count(*) AS n FROM queue_events").first()["n"] == 7
    finally:
        spark.sql("DROP VIEW queue_events")


def test_conditions_are_pushed_to_the_server(spark: Any, filled: Filled) -> None:
    filled.events(1_000)
    pushed = reading(spark, filled, pushdown="true", payload="none").where("entry_ms > 900 AND event = 'completed'")
    assert pushed.count() == 100
    assert pushed.rdd.getNumPartitions() == 1
    assert reading(spark, filled, pushdown="true").where("queue = 'other'").count() == 0
