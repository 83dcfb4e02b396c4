"""The lake as Delta tables: who can read them, upkeep, and what happens to old, moved and foreign lakes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, Schema

from cli.lab import invoke
from spark.lake_check import differences
from spark.test_spark_lake import DAY_MS, NOON, TABLES, History, fill, jobs_of, sorted_rows, ulid
from tampu.errors import ConfigError
from tampu.spark import lake, read_table
from tampu.spark.lake import pipeline as pipelines
from tampu.spark.lake import silver, upkeep
from tampu.spark.lake import table as lake_table
from tampu.spark.lake.bronze import OffsetLog
from tampu.spark.lake.folder import DEFINITIONS, LakeVersion
from tampu.spark.lake.incremental import MAX_NEW_EVENTS, Touched, group_of
from tampu.spark.lake.pipeline import DEFINED, Pipeline
from tampu.spark.lake.read import read_files
from tampu.spark.lake.repair import find_letters, record, repairs_of
from tampu.spark.lake.rows import query, read_rows, sql_name
from tampu.spark.lake.table import TABLES as ALL_TABLES
from tampu.spark.lake.table import Changes, LakeError, Table
from tampu.spark.lake.upkeep import MIN_FILES, compact, retain, vacuum
from tampu.wire.dlq import cluster_id

if TYPE_CHECKING:
    from spark.filling import Filled

# --- one table, without Spark

FIELDS = [
    {"name": name, "type": kind, "nullable": True, "metadata": {}}
    for name, kind in (("n", "long"), ("queue", "string"), ("day", "string"))
]
SCHEMA = Schema.from_json(json.dumps({"type": "struct", "fields": FIELDS}))


@pytest.fixture
def table(tmp_path: Path) -> Table:
    return Table(tmp_path, "gold/slo")


def staged(table: Table, folder: str, name: str, *values: int) -> Any:
    path = table.path / folder / f"{name}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"n": pa.array(values, pa.int64())}), path)
    return table.add_action(str(path))


def files_below(folder: Path) -> int:
    return sum(path.is_file() for path in folder.rglob("*"))


def values_of(table: Table) -> list[tuple[Any, ...]]:
    opened = table.open()
    assert opened is not None
    return sorted((row["n"], row["queue"], row["day"]) for row in opened.to_pyarrow_table().to_pylist())


def test_a_commit_that_is_tried_again_changes_nothing(table: Table) -> None:
    adds = [staged(table, "queue=q/day=d", "one", 1, 2)]
    assert table.commit(adds, SCHEMA, {"app": 7})
    assert not table.commit([staged(table, "queue=q/day=d", "two", 3)], SCHEMA, {"app": 7})
    assert values_of(table) == [(1, "q", "d"), (2, "q", "d")]
    assert (table.version(), table.transaction("app"), table.transaction("other")) == (0, 7, -1)


@pytest.mark.parametrize("queue", ["a:b", "x y", "50%", "ü/ö", "a=b", "007", "a%3Ab"])
def test_partitions_of_any_name_are_replaced_and_not_doubled(queue: str, table: Table) -> None:
    from urllib.parse import quote

    folder = f"queue={quote(queue, safe=' ')}/day=d"
    table.commit([staged(table, folder, "one", 1)], SCHEMA, {"app": 0})
    add = staged(table, folder, "two", 2)
    assert table.commit([add], SCHEMA, {"app": 1}, replaces=lambda file: file.partition == (queue, "d"))
    assert values_of(table) == [(2, queue, "d")]


def test_a_missing_file_can_be_removed_only_by_a_rebuild(table: Table) -> None:
    table.commit([staged(table, "queue=q/day=d", "one", 1)], SCHEMA, {"app": 0})
    (table.path / "queue=q/day=d/one.parquet").unlink()
    add = staged(table, "queue=q/day=d", "two", 2)
    with pytest.raises(LakeError, match=r"one\.parquet, which is not there: restore it, or run rebuild"):
        table.commit([add], SCHEMA, {"app": 1}, replaces=lambda file: True)
    assert table.commit([add], SCHEMA, {"app": 1}, replaces=lambda file: True, again=True)
    assert values_of(table) == [(2, "q", "d")]


def test_compaction_and_retention_are_not_changes(table: Table) -> None:
    for number in range(3):
        table.commit([staged(table, "queue=q/day=d", f"f{number}", number)], SCHEMA, {"app": number})
    opened = table.open()
    assert opened is not None
    opened.optimize.compact()
    nothing = Changes({}, {})
    assert table.changes(-1, table.version()) == Changes(
        {f"queue=q/day=d/f{number}.parquet": ("q", "d") for number in range(3)}, {}
    )
    assert table.changes(2, table.version()) == nothing
    assert table.remove(lambda file: True, "retain") == 3
    assert table.changes(2, table.version()) == nothing
    (table.path / "_delta_log" / f"{1:020d}.json").unlink()
    assert table.changes(0, 2) is None  # the log does not say any more


def test_a_run_leaves_the_published_version_readable_until_the_next_is_published(tmp_path: Path) -> None:
    table = Table(tmp_path, "gold/slo")
    for number in range(2 * upkeep.MAX_LOG_FILES):
        table.commit([staged(table, "queue=q/day=d", f"v{number}", number)], SCHEMA, {"a": number})
    upkeep.delete_old_files(tmp_path, {table.name: table}, keep_hours=0)
    published = table.version()
    for number in range(100, 125):  # a checkpoint is made on the way
        table.commit([staged(table, "queue=q/day=d", f"v{number}", number)], SCHEMA, {"a": number})
    assert [*(table.path / "_delta_log").glob("*.checkpoint.parquet")]
    assert table.open(published) is not None


def test_a_killed_vacuum_leaves_the_published_versions_readable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, state = Table(tmp_path, "gold/slo"), LakeVersion()
    for number in range(2 * upkeep.MAX_LOG_FILES):
        table.commit([staged(table, "queue=q/day=d", f"v{number}", number)], SCHEMA, {"a": number})
    state.tables = {table.name: table.version()}
    state.publish(tmp_path)

    def killed(lake: Path, state: LakeVersion) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(upkeep, "_publish", killed)
        with pytest.raises(KeyboardInterrupt):
            vacuum(tmp_path, keep_hours=0)
    found = table.open(LakeVersion.load(tmp_path).tables[table.name])
    assert found is not None
    assert found.to_pyarrow_table().num_rows == 2 * upkeep.MAX_LOG_FILES
    vacuum(tmp_path, keep_hours=0)
    assert len([*(table.path / "_delta_log").iterdir()]) < upkeep.MAX_LOG_FILES
    assert table.open(LakeVersion.load(tmp_path).tables[table.name]) is not None


@pytest.mark.slow
def test_files_do_not_grow_with_the_number_of_rounds(tmp_path: Path) -> None:
    first, second = Table(tmp_path, "gold/slo"), Table(tmp_path, "gold/ends")
    tables, state = {table.name: table for table in (first, second)}, LakeVersion()
    before_vacuum, after_vacuum = [], []
    for number in range(4 * upkeep.ROUNDS_BETWEEN):
        # One table grows, as bronze does; the other follows it and is replaced, as gold is.
        first.commit([staged(first, "queue=q/day=d", f"v{number}", number)], SCHEMA, {"a": number})
        new = staged(second, "queue=q/day=d", f"v{number}", number)
        second.commit([new], SCHEMA, {first.name: first.version()}, replaces=lambda file: True)
        upkeep.merge_small_files(tables)
        is_last = number % upkeep.ROUNDS_BETWEEN == upkeep.ROUNDS_BETWEEN - 1
        if is_last:
            before_vacuum.append(files_below(tmp_path))
            upkeep.delete_old_files(tmp_path, tables, keep_hours=0)
        state.publish(tmp_path)
        if is_last:
            upkeep.shorten_logs(tmp_path, tables, keep_hours=0)
            after_vacuum.append(files_below(tmp_path))
    # The first one begins without a log, so the second is the measure.
    assert max(before_vacuum) < 1.3 * before_vacuum[1], before_vacuum
    assert max(after_vacuum) < 1.3 * after_vacuum[0], after_vacuum
    assert len(values_of(first)) == 4 * upkeep.ROUNDS_BETWEEN


def test_statistics_are_exact_or_missing(tmp_path: Path) -> None:
    from tampu.spark.lake.table import statistics

    day = datetime(2026, 3, 1, 12, 0, 0, 5000, tzinfo=UTC)
    rows = {
        "n": [3, 1, None],
        "text": ["a", "b" * 100, None],
        "at": pa.array([day, None, day], pa.timestamp("us", "UTC")),
        "odd": pa.array([day.replace(microsecond=1), day, day], pa.timestamp("us", "UTC")),
        "none": pa.array([None] * 3, pa.string()),
        "ratio": [0.5, float("nan"), float("inf")],
    }
    pq.write_table(pa.table(rows), tmp_path / "x.parquet")
    found = json.loads(statistics(str(tmp_path / "x.parquet")))
    assert found["numRecords"] == 3
    assert found["minValues"] == {"n": 1, "at": "2026-03-01T12:00:00.005Z"}
    assert found["maxValues"] == {"n": 3, "at": "2026-03-01T12:00:00.005Z"}
    assert found["nullCount"]["none"] == 3


def test_offsets_are_kept_for_the_last_batch_only(tmp_path: Path) -> None:
    log = OffsetLog(tmp_path, "events")
    assert log.read(-1) == {}
    log.write(0, {"q": {"id": "1-0"}})
    log.write(1, {"q": {"id": "2-0"}})
    log.forget_before(1)
    assert log.read(1) == {"q": {"id": "2-0"}}
    with pytest.raises(ConfigError, match="missing"):
        log.read(0)


def events_file(lake: Path, folder: str, name: str, *rows: tuple[str | None, str]) -> Any:
    table = Table(lake, "bronze/events")
    path = table.path / folder / f"{name}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = [pa.array(column, pa.string()) for column in zip(*rows, strict=True)]
    pq.write_table(pa.table(columns, names=["job_id", "event"]), path)
    return table.add_action(str(path))


def test_only_files_with_jobs_of_new_events_are_touched(tmp_path: Path) -> None:
    names = ("job_id", "event", "queue", "date")
    fields = [{"name": name, "type": "string", "nullable": True, "metadata": {}} for name in names]
    schema = Schema.from_json(json.dumps({"type": "struct", "fields": fields}))
    table = Table(tmp_path, "bronze/events")
    adds = [
        events_file(tmp_path, "queue=q/date=d1", "new", ("m", "active"), ("x", "progress"), (None, "drained")),
        events_file(tmp_path, "queue=q/date=d1", "same", ("a", "active"), ("m", "active"), ("z", "active")),
        events_file(tmp_path, "queue=q/date=d1", "around", ("a", "active"), ("z", "active")),
        events_file(tmp_path, "queue=q/date=d1", "above", ("n", "active"), ("z", "active")),
        events_file(tmp_path, "queue=q/date=d2", "other-day", ("m", "active")),
        events_file(tmp_path, "queue=q/date=c2", "other-ids", ("m", "active")),
        events_file(tmp_path, "queue=q/date=h00", "no-day", ("m", "active")),
        events_file(tmp_path, "queue=r/date=d1", "other-queue", ("m", "active")),
    ]
    table.commit(adds, schema, {"app": 0})
    files = {file.path.rpartition("/")[2].removesuffix(".parquet"): file for file in table.files()}
    touched = Touched.read(table, {("q", "d1"): [files["new"]]})
    assert touched.jobs == {("q", "d1"): ["m"]}
    found = touched.files(table, files.values(), mixed=())
    assert sorted(file.path for file in found) == ["queue=q/date=d1/new.parquet", "queue=q/date=d1/same.parquet"]
    # Where jobs of unknown age are, all partitions of IDs without a day may hold a job; days in IDs still tell it.
    mixed = Touched.read(table, {group_of(("q", "h00"), {"q"}): [files["no-day"]]})
    found = mixed.files(table, files.values(), {"q"})
    assert sorted(file.path for file in found) == [
        *("queue=q/date=c2/other-ids.parquet", "queue=q/date=h00/no-day.parquet"),
    ]
    # Statistics spare reading: a file that cannot hold the job may even be unreadable.
    (table.path / files["above"].path).write_bytes(b"torn")
    assert len(touched.files(table, files.values(), mixed=())) == 2


def test_the_lake_is_not_read_through_a_file_system_in_python() -> None:
    """Threads of PyArrow that call Python crash a process that ends meanwhile, such as a command of the CLI."""
    for module in Path(lake.__file__).parent.glob("*.py"):
        code = "\n".join(line for line in module.read_text().splitlines() if "`to_pyarrow_table`" not in line)
        assert ".to_pyarrow" not in code, module


# --- lakes that are not one


def test_a_folder_of_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.docx").touch()
    session: Any = None
    with pytest.raises(ConfigError, match="is not a lake"):
        Pipeline(session, "redis://127.0.0.1:1", ["q"], tmp_path)
    for command in (("compact",), ("show",), ("sql", "SELECT 1")):
        done = invoke("pipeline", *command, "--lake", str(tmp_path))
        assert done.code == 2
        assert "holds other files and is not a lake: use an empty or a new folder" in done.err


def test_a_lake_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    LakeVersion(format=99).publish(tmp_path)
    for command in (("report",), ("show",), ("vacuum",)):
        done = invoke("pipeline", *command, "--lake", str(tmp_path))
        assert done.code == 2
        assert "upgrade tampu" in done.err


def test_a_lake_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = invoke("pipeline", "vacuum", "--lake", str(tmp_path / "file" / "lake"))
    assert done.code == 2
    assert f"cannot write to {tmp_path / 'file'}: check its owner" in done.err


def test_without_deltalake_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tampu.spark import session

    monkeypatch.setattr(session, "find_spec", lambda name: None if name == "deltalake" else object())
    done = invoke("pipeline", "report", "--lake", str(tmp_path))
    assert done.code == 2
    assert "pip install 'tampu[lake]'" in done.err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("missing", "statement", "extra"),
    [
        ("deltalake", "from tampu.spark import read_table", "lake"),
        ("deltalake", "from tampu.spark.lake.pipeline import Pipeline", "lake"),
        ("pyarrow", "import tampu.spark.source", "connector"),
        ("pyspark", "from tampu.spark import TampuDataSource", "spark"),
    ],
)
def test_python_code_without_an_extra_names_it(missing: str, statement: str, extra: str) -> None:
    code = f"""
import sys
sys.modules["{missing}"] = None
from tampu.errors import ConfigError
try:
    {statement}
except ConfigError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == f"this needs {missing}, which is not installed: pip install 'tampu[{extra}]'", done


# --- with Spark

#: Names that Spark and delta-rs write differently into folder names. The second is how Spark misreads the first. Files
#: of the last one cannot be merged.
ODD_QUEUES = ["média", "mÃ©dia", "日本 語", "50%", "%C3%A9", "a=b/c d", "~home"]


def news_of_odd_queues(filled: Filled, number: int) -> None:
    """Write another failure of each queue's only job, another letter, and another entry that cannot be decoded."""
    for queue in ODD_QUEUES:
        job_id = ulid(1, NOON)
        History(filled, queue).failed(job_id, NOON, NOON + number * 1000, number + 1, "ValueError: no")
        History(filled, queue).dead(job_id, NOON, NOON + number * 1000 + 6, number + 1)
        filled.letter(job_id, {"n": number}, queue, created_ms=NOON)
        filled.xadd(filled.keys(queue).events, "e", "active", "id", job_id, "ts", "soon")


def repair_odd_queues(filled: Filled, lake: Path, number: int) -> None:
    cluster = cluster_id("retries_exhausted", "ValueError", "no")
    for queue in ODD_QUEUES:
        plan = repairs_of(find_letters(filled.url, queue, cluster), "SELECT _entry_id, 100 AS n FROM letters")
        record(lake, f"repair-{number}", queue, cluster, "", plan.repairs[-1:], NOON, canary=False)


def read_by_folder_names(spark: Any, table: Table, files: list[Any], empty_as: str = "") -> Any:
    rows = read_files(spark, table, files, empty_as)
    if not files:
        return rows
    paths = [str(table.path / file.path) for file in files]
    return spark.read.schema(rows.schema).option("basePath", str(table.path)).parquet(*paths)


class TestLake:
    pytestmark = pytest.mark.spark_session

    def test_everybody_can_read_it(self, spark: Any, filled: Filled, tmp_path: Path) -> None:
        import duckdb
        import polars as pl

        fill(filled)
        Pipeline(spark, filled.url, ["q"], tmp_path).run()
        expected = {row["job_id"]: row["outcome"] for row in read_rows(tmp_path, "silver/jobs")}
        assert len(expected) == 42
        path = str(tmp_path / "silver/jobs")
        polars = pl.scan_delta(path).select("job_id", "outcome").collect()
        assert dict(polars.iter_rows()) == expected
        pandas = DeltaTable(path).to_pandas()
        assert dict(zip(pandas["job_id"], pandas["outcome"], strict=True)) == expected
        jobs = DeltaTable(path).to_pyarrow_dataset()
        completed = duckdb.query("SELECT count(*) FROM jobs WHERE outcome = 'completed'")
        assert completed is not None
        assert completed.fetchall() == [(40,)]
        assert jobs.count_rows() == 42
        counted = query(tmp_path, "SELECT outcome, count(*) AS jobs FROM silver_jobs GROUP BY outcome ORDER BY jobs")
        assert counted.to_pylist()[-1] == {"outcome": "completed", "jobs": 40}
        frame = read_table(spark, tmp_path, "silver/jobs")
        assert {row["job_id"]: row["outcome"] for row in frame.collect()} == expected
        done = invoke("pipeline", "sql", "SELECT count(*) AS n FROM bronze_events", "--lake", str(tmp_path), "--json")
        assert json.loads(done.out) == [{"n": 87}]
        shown = json.loads(invoke("pipeline", "show", "--lake", str(tmp_path), "--json").out)
        assert {row["table"]: row["rows"] for row in shown["tables"]}["silver_jobs"] == 42
        # Without statistics readers could not skip files.
        (file, *_) = Table(tmp_path, "silver/jobs").files()
        assert {"created_at", "job_id", "last_entry_ms"} <= set(file.lowest)

    def test_a_queue_that_does_not_exist_yet_is_landed_when_it_does(
        self, spark: Any, filled: Filled, tmp_path: Path
    ) -> None:
        pipeline = Pipeline(spark, filled.url, ["q", "later"], tmp_path)
        assert pipeline.run().landed == {"events": 0, "dlq": 0}
        assert Table(tmp_path, "bronze/events").version() == -1  # no Spark job ran
        filled.events(3)
        assert pipeline.run().landed == {"events": 3, "dlq": 0}
        filled.events(2, "later")
        assert pipeline.run().landed == {"events": 2, "dlq": 0}

    def test_a_job_that_died_and_was_replayed_counts_on_both_days(
        self, spark: Any, filled: Filled, tmp_path: Path
    ) -> None:
        history = History(filled)
        job_id = ulid(1, NOON)
        history.failed(job_id, NOON, NOON + 10, 1, "ValueError: no")
        history.dead(job_id, NOON, NOON + 20, 1)
        filled.letter(job_id, 1, error="no")
        other = filled.letter(ulid(2, NOON), 2, error="no")
        pipeline = Pipeline(spark, filled.url, ["q"], tmp_path)
        pipeline.run()
        (cluster,) = read_rows(tmp_path, "gold/dlq_clusters")
        assert (cluster["letters"], cluster["dead"]) == (2, 2)
        history.completed(job_id, NOON, wait_ms=DAY_MS)
        filled.client.xdel(filled.keys().dlq, other)
        pipeline.run()
        days = {row["day"]: (row["completed"], row["dead"]) for row in read_rows(tmp_path, "gold/slo")}
        assert days == {"2026-03-01": (0, 1), "2026-03-02": (1, 0)}
        ends = [(row["day"], row["outcome"]) for row in read_rows(tmp_path, "gold/ends")]
        assert sorted(ends) == [("2026-03-01", "dead"), ("2026-03-02", "completed")]
        (cluster,) = read_rows(tmp_path, "gold/dlq_clusters")
        assert (cluster["letters"], cluster["dead"]) == (2, 1)  # the other one may be removed, but did not complete
        assert jobs_of(tmp_path)[job_id]["outcome"] == "completed"

    def test_entries_that_cannot_be_decoded_are_counted(self, spark: Any, filled: Filled, tmp_path: Path) -> None:
        filled.xadd(filled.keys().events, "x", "y")
        filled.xadd(filled.keys().events, "e", "active", "id", "j", "ts", "soon")
        filled.xadd(filled.keys().dlq, "d", b"\xc1")
        pipeline = Pipeline(spark, filled.url, ["q"], tmp_path)
        pipeline.run()
        assert sorted((row["stream"], row["entries"]) for row in read_rows(tmp_path, "gold/undecodable")) == [
            *(("dlq", 1), ("events", 1), ("events", 1)),
        ]
        History(filled).completed(ulid(1, NOON), NOON)
        pipeline.run()
        assert len(read_rows(tmp_path, "gold/undecodable")) == 3

    def test_upkeep_changes_no_row_and_breaks_no_reader(self, spark: Any, filled: Filled, tmp_path: Path) -> None:
        history = History(filled)
        pipeline = Pipeline(spark, filled.url, ["q"], tmp_path)
        opened: Any = None
        for number in range(MIN_FILES + 1):
            history.completed(ulid(number, NOON), NOON)
            pipeline.run()
            opened = opened or read_table(spark, tmp_path, "silver/jobs")
        assert opened.count() == 1  # eight rounds later it still reads what it opened
        for name in ("bronze/events", "silver/jobs"):
            assert len(Table(tmp_path, name).files()) == 2, name  # the first eight were merged
        before = [sorted_rows(tmp_path, table) for table in ALL_TABLES]
        (tmp_path / "bronze/events/queue=q/date=2026-03-01/orphan.parquet").write_bytes(b"torn")
        done = compact(tmp_path)
        assert (done.merged, done.written) == (4, 2)
        assert vacuum(tmp_path, keep_hours=0).deleted > 9
        assert [sorted_rows(tmp_path, table) for table in ALL_TABLES] == before
        assert len(list((tmp_path / "bronze/events").glob("queue=*/*/*"))) == 1
        assert pipeline.run().silver_partitions == 0  # compaction is not a change
        history.completed(ulid(10, NOON), NOON)
        assert pipeline.run().silver_partitions == 1
        assert len(jobs_of(tmp_path)) == 10
        # Old versions, and the log of how they came about, are gone too, and nothing is computed from scratch.
        assert len(list((tmp_path / "bronze/events/_delta_log").glob("*.json"))) < 5
        assert len(read_rows(tmp_path, "gold/slo")) == 1

    def test_a_queue_of_any_name_keeps_its_history_over_merges(
        self, spark: Any, filled: Filled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        merge = upkeep.merge_small_files
        monkeypatch.setattr(upkeep, "merge_small_files", partial(merge, min_files=2))
        pipeline = Pipeline(spark, filled.url, ODD_QUEUES, tmp_path)
        for number in range(3):
            news_of_odd_queues(filled, number)
            pipeline.run()
            repair_odd_queues(filled, tmp_path, number)
        compact(tmp_path)
        vacuum(tmp_path, keep_hours=0)
        news_of_odd_queues(filled, 3)
        pipeline.run()
        assert {(row["queue"], row["failures"]) for row in read_rows(tmp_path, "silver/jobs")} == {
            (queue, 4) for queue in ODD_QUEUES
        }
        assert differences(filled.client, ODD_QUEUES, tmp_path) == {}  # as read by Polars
        for name, version in LakeVersion.load(tmp_path).tables.items():
            by_queue = {
                str(row["queue"]): row["count"]
                for row in read_table(spark, tmp_path, name).groupBy("queue").count().collect()
            }
            text = f"SELECT queue, count(*) AS rows FROM {sql_name(name)} GROUP BY queue"
            assert {row["queue"]: row["rows"] for row in query(tmp_path, text).to_pylist()} == by_queue, name
            assert set(by_queue) == {*ODD_QUEUES}, name
            assert version == Table(tmp_path, name).version()

    @pytest.mark.parametrize("is_rebuild", [False, True])
    def test_a_lake_whose_queues_were_misread_heals(
        self, is_rebuild: bool, spark: Any, filled: Filled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Earlier versions took the names of queues from folders, as Spark decodes them."""
        with monkeypatch.context() as patch:
            merge = upkeep.merge_small_files
            patch.setattr(upkeep, "merge_small_files", partial(merge, min_files=2))
            patch.setattr(pipelines, "read_files", read_by_folder_names)
            patch.setattr(pipelines, "DEFINITIONS", DEFINITIONS - 1)
            pipeline = Pipeline(spark, filled.url, ODD_QUEUES, tmp_path)
            for number in range(4):
                news_of_odd_queues(filled, number)
                # Few new events lost those in merged files; many gave their jobs to queues that do not exist.
                patch.setattr(pipelines, "MAX_NEW_EVENTS", 0 if number == 3 else MAX_NEW_EVENTS)
                pipeline.run()
            repair_odd_queues(filled, tmp_path, 4)
            pipeline.run()
        wrong = differences(filled.client, ODD_QUEUES, tmp_path)
        assert {"silver/jobs", "gold/failures", "gold/dlq_clusters", "gold/repairs", "gold/undecodable"} <= {*wrong}
        pipeline = Pipeline(spark, filled.url, ODD_QUEUES, tmp_path)
        pipeline.rebuild("2999-01-01") if is_rebuild else pipeline.run()
        assert differences(filled.client, ODD_QUEUES, tmp_path) == {}

    def test_files_that_the_driver_does_not_find_are_not_committed(
        self, spark: Any, filled: Filled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Executors with disks of their own: their rows would count as landed, and be nowhere."""
        filled.events(50)
        pipeline = Pipeline(spark, filled.url, ["q"], tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr("tampu.spark.lake.table.glob.glob", lambda pattern: [])
            with pytest.raises(LakeError, match=r"Spark wrote 50 rows to .*, but 0 are there"):
                pipeline.run()
        assert Table(tmp_path, "bronze/events").version() == -1
        assert pipeline.run().landed["events"] == 50

    def test_the_default_file_system_may_be_another_one(self, spark: Any, filled: Filled, tmp_path: Path) -> None:
        filled.events(5)
        hadoop = spark.sparkContext._jsc.hadoopConfiguration()
        hadoop.set("fs.defaultFS", "hdfs://127.0.0.1:1")
        try:
            assert Pipeline(spark, filled.url, ["q"], tmp_path).run().landed["events"] == 5
        finally:
            hadoop.set("fs.defaultFS", "file:///")
        assert differences(filled.client, ["q"], tmp_path) == {}

    def test_later_rounds_compile_nothing_again(self, spark: Any, filled: Filled, tmp_path: Path) -> None:
        metrics = getattr(spark._jvm.org.apache.spark.metrics.source, "CodegenMetrics$")
        compiled = getattr(metrics, "MODULE$").METRIC_COMPILATION_TIME()
        pipeline, history, counts = Pipeline(spark, filled.url, ["q"], tmp_path), History(filled), []
        for number in range(4):
            moment = NOON + 60_000 * number  # each in its own minute
            history.completed(ulid(number, moment), moment)
            before = compiled.getCount()
            pipeline.run()
            counts.append(compiled.getCount() - before)
        assert counts[-1] == 0, counts

    def test_a_little_news_rewrites_only_the_files_of_its_jobs(
        self, spark: Any, filled: Filled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        history = History(filled)
        pipeline = Pipeline(spark, filled.url, ["q"], tmp_path)
        silver_table = Table(tmp_path, "silver/jobs")
        for number in range(3):
            history.completed(f"old-{number}", NOON)
            history.tell("active", f"open-{number}", NOON, NOON, attempt=1)
            pipeline.run()
        first, second, third = sorted(silver_table.files(), key=lambda file: file.path)
        monkeypatch.setattr(upkeep, "SMALL_JOBS_FILE", 1)  # what is left of the rewritten file gets its own
        history.tell("completed", "open-1", NOON + 90, NOON, attempt=1, duration_us=5)
        history.completed("new", NOON)
        pipeline.run()
        paths = {file.path for file in silver_table.files()}
        assert {first.path, third.path} < paths
        assert second.path not in paths
        assert len(paths) == 4
        monkeypatch.setattr(pipelines, "MAX_NEW_EVENTS", 1)  # with much news the partition is computed as a whole
        history.completed("another", NOON)
        pipeline.run()
        assert len(silver_table.files()) == 1
        assert differences(filled.client, ["q"], tmp_path) == {}
        # A kind of ID that was not there before, for a job that was.
        filled.xadd(filled.keys().events, "e", "completed", "id", "open-2", "ts", NOON + 95, "attempt", 1)
        pipeline.run()
        assert jobs_of(tmp_path)["open-2"]["outcome"] == "completed"
        assert differences(filled.client, ["q"], tmp_path) == {}

    def test_news_of_one_job_computes_only_its_own_days(
        self, spark: Any, filled: Filled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def tell(event: str, job_id: str, day: int) -> None:
            filled.xadd(filled.keys().events, "e", event, "id", job_id, "ts", NOON + day * DAY_MS, "attempt", 1)

        pipeline = Pipeline(spark, filled.url, ["q"], tmp_path)
        for day in range(10):
            tell("completed", f"job-{day}", day)
        tell("active", "open", 0)
        pipeline.run()
        assert len(Table(tmp_path, "silver/jobs").files()) == 1  # which holds jobs of all these days
        slo = Table(tmp_path, "gold/slo")

        def computed() -> set[tuple[str, ...]]:
            version = slo.version()
            pipeline.run()
            assert differences(filled.client, ["q"], tmp_path) == {}
            changes = slo.changes(version, slo.version())
            return set() if changes is None else changes.partitions

        tell("failed", "open", 2)
        tell("completed", "open", 3)
        assert computed() == {("q", "2026-03-03"), ("q", "2026-03-04")}
        # Of many rows, the statistics of their files say which days it may be.
        monkeypatch.setattr(pipelines, "MAX_COMPARED_ROWS", 0)
        tell("completed", "open", 4)
        assert len(computed()) == 10

    def test_news_replaces_only_the_minutes_of_its_jobs(
        self, spark: Any, filled: Filled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(lake_table, "SORTED_ROWS_PER_FILE", 2)
        history = History(filled)
        pipeline = Pipeline(spark, filled.url, ["q"], tmp_path)
        ends = Table(tmp_path, "gold/ends")

        def completed(job_id: str, minute: int) -> None:
            history.tell("completed", job_id, NOON + 60_000 * minute, NOON, attempt=1, duration_us=5)

        def paths() -> list[str]:
            return [file.path for file in sorted(ends.files(), key=lambda file: file.lowest["minute"])]

        for number in range(10):
            completed(f"job-{number}", number // 2)
        pipeline.run()
        first = paths()
        assert len(first) == 5  # one for each minute
        completed("late", 2)
        completed("latest", 3)
        history.tell("failed", "late", NOON + 180_000, NOON, attempt=1, reason="ValueError: no")
        pipeline.run()
        assert differences(filled.client, ["q"], tmp_path) == {}
        assert [path in first for path in paths()] == [True, True, False, False, False, True]
        latency = sorted(read_rows(tmp_path, "gold/latency"), key=lambda row: row["minute"])
        assert [row["jobs"] for row in latency] == [2, 2, 3, 3, 2]
        # The last file holds two minutes from now on: its rows of the first one are kept.
        monkeypatch.setattr(lake_table, "SORTED_ROWS_PER_FILE", 100)
        for number, minute in enumerate((5, 4, 6, 5)):
            completed(f"more-{number}", minute)
            pipeline.run()
            assert differences(filled.client, ["q"], tmp_path) == {}

    def test_a_missing_file_of_gold_is_named_before_its_other_rows_are_lost(
        self, spark: Any, filled: Filled, tmp_path: Path
    ) -> None:
        history = History(filled)
        pipeline = Pipeline(spark, filled.url, ["q"], tmp_path)
        history.completed("old", NOON)
        history.completed("newer", NOON + 60_000)
        pipeline.run()
        (file,) = Table(tmp_path, "gold/throughput").files()
        (tmp_path / "gold/throughput" / file.path).unlink()
        history.completed("new", NOON + 60_000)
        with pytest.raises(LakeError, match="which is not there: restore it, or run rebuild"):
            pipeline.run()
        pipeline.rebuild()
        assert differences(filled.client, ["q"], tmp_path) == {}

    def test_old_events_can_be_removed_and_their_jobs_stay(self, spark: Any, filled: Filled, tmp_path: Path) -> None:
        history = History(filled)
        old, new = ulid(1, NOON), ulid(2, NOON + 100 * DAY_MS)
        history.completed(old, NOON)
        history.completed(new, NOON + 100 * DAY_MS)
        pipeline = Pipeline(spark, filled.url, ["q"], tmp_path)
        pipeline.run()
        before = [sorted_rows(tmp_path, table) for table in TABLES]
        today = datetime.fromtimestamp(NOON / 1000 + 110 * 86_400, UTC)
        assert retain(tmp_path, 90, today=today).retired["events"] == 2
        vacuum(tmp_path, keep_hours=0)
        assert {row["job_id"] for row in read_rows(tmp_path, "bronze/events")} == {new}
        # An event that comes late must not replace what is known of the old job.
        history.tell("progress", old, NOON, NOON)
        history.tell("active", old, NOON, NOON, attempt=1)
        summary = pipeline.run()
        assert summary.trimmed["events"] == 0
        assert [sorted_rows(tmp_path, table) for table in TABLES] == before
        pipeline.rebuild()
        assert set(jobs_of(tmp_path)) == {old, new}

    @pytest.mark.spark_slice
    def test_a_moved_lake_goes_on_and_a_rebuild_gives_the_same(
        self, spark: Any, filled: Filled, tmp_path: Path
    ) -> None:
        fill(filled)
        lake, moved = tmp_path / "lake", tmp_path / "elsewhere" / "lake"
        Pipeline(spark, filled.url, ["q"], lake).run()
        moved.parent.mkdir()
        shutil.move(lake, moved)
        History(filled).completed(ulid(500, NOON), NOON)
        pipeline = Pipeline(spark, filled.url, ["q"], moved)
        assert pipeline.run().landed["events"] == 2
        assert read_table(spark, moved, "silver/jobs").count() == 43
        before = [sorted_rows(moved, table) for table in TABLES]
        rebuilt = pipeline.rebuild("2026-03-01")
        assert rebuilt.silver_partitions > 0
        assert rebuilt.gold_partitions > 0  # although no job has new events
        assert [sorted_rows(moved, table) for table in TABLES] == before

    def test_a_rebuild_replaces_files_that_are_missing(self, spark: Any, filled: Filled, tmp_path: Path) -> None:
        fill(filled)
        filled.xadd(filled.keys().events, "x", "y")
        pipeline = Pipeline(spark, filled.url, ["q"], tmp_path)
        pipeline.run()
        computed = ("silver/jobs", *pipelines.BY_DAY, "gold/undecodable", "gold/dlq_clusters")
        before = {name: sorted_rows(tmp_path, name) for name in computed}
        for name in computed:
            table = Table(tmp_path, name)
            (table.path / table.files()[0].path).unlink()
        pipeline.rebuild()
        assert {name: sorted_rows(tmp_path, name) for name in computed} == before
        pipeline.run()
        assert differences(filled.client, ["q"], tmp_path) == {}

    def test_a_new_definition_is_computed_for_all_jobs(
        self, spark: Any, filled: Filled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fill(filled)
        Pipeline(spark, filled.url, ["q"], tmp_path).run()
        monkeypatch.setattr(pipelines, "DEFINITIONS", DEFINITIONS + 1)
        monkeypatch.setitem(silver.COLUMNS, "shout", "upper(max(name))")
        Pipeline(spark, filled.url, ["q"], tmp_path).run()
        assert {row["shout"] for row in read_rows(tmp_path, "silver/jobs")} == {"WORK"}
        assert Table(tmp_path, "gold/slo").transaction(DEFINED) == DEFINITIONS + 1
        monkeypatch.setattr(pipelines, "DEFINITIONS", DEFINITIONS)
        with pytest.raises(ConfigError, match="newer version"):
            Pipeline(spark, filled.url, ["q"], tmp_path).run()

    def test_jobs_of_unknown_age_have_one_row_each(self, spark: Any, filled: Filled, tmp_path: Path) -> None:
        """Workers of ChasquiMQ do not say when a job was created, those of tampu do: a job may have events of both."""
        history = History(filled)
        pipeline = Pipeline(spark, filled.url, ["q"], tmp_path)
        for number in range(6):
            history.tell("active", f"job-{number}", NOON, NOON, attempt=1)
        pipeline.run()
        assert {row["date"] for row in read_rows(tmp_path, "silver/jobs")} == {"c2026-03-01"}
        key = filled.keys().events
        for number in range(3):
            filled.xadd(key, "e", "completed", "id", f"job-{number}", "ts", NOON + 5, "duration_us", 5, "attempt", 1)
        pipeline.run()
        jobs = read_rows(tmp_path, "silver/jobs")
        assert len(jobs) == len({row["job_id"] for row in jobs}) == 6
        assert sorted(row["outcome"] for row in jobs) == ["active"] * 3 + ["completed"] * 3
        for number in range(3, 6):
            filled.xadd(key, "e", "completed", "id", f"job-{number}", "ts", NOON + 5, "duration_us", 5, "attempt", 1)
        history.completed(ulid(7, NOON), NOON)
        pipeline.run()
        assert {row["outcome"] for row in jobs_of(tmp_path).values()} == {"completed"}
        assert len(read_rows(tmp_path, "silver/jobs")) == 7
        assert sum(row["completed"] for row in read_rows(tmp_path, "gold/slo")) == 7
