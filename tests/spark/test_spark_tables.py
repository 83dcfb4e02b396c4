"""The lake as Delta tables: who can read them, upkeep, and what happens to old, moved and foreign lakes."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import sys
from contextlib import nullcontext
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, Schema
from deltalake.transaction import AddAction

from cli.lab import invoke
from spark.extremes import tell_extremes
from spark.lake_check import differences
from spark.test_spark_lake import DAY_MS, NOON, TABLES, History, fill, jobs_of, sorted_rows, ulid
from tampu.errors import ConfigError
from tampu.spark import lake, read_table
from tampu.spark.lake import pipeline as pipelines
from tampu.spark.lake import silver, upkeep
from tampu.spark.lake import table as lake_table
from tampu.spark.lake.bronze import LANDING, offsets_of, transactions_of
from tampu.spark.lake.folder import DEFINITIONS, LakeVersion
from tampu.spark.lake.incremental import Touched, group_of
from tampu.spark.lake.pipeline import DEFINED, Pipeline
from tampu.spark.lake.repair import find_letters, record, repairs_of
from tampu.spark.lake.rows import query, read_rows, sql_name
from tampu.spark.lake.store import Store
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


def staged(table: Table, queue: str, *values: int) -> Any:
    """Write a file of one partition that no commit names yet; return the action that adds it."""
    columns = {"n": pa.array(values, pa.int64()), "queue": [queue] * len(values), "day": ["d"] * len(values)}
    (add,) = table.write(pa.table(columns))
    return add


def folder_of(table: Table) -> Path:
    return Path(table.store.uri)


def files_below(folder: Path) -> int:
    return sum(path.is_file() for path in folder.rglob("*"))


def values_of(table: Table) -> list[tuple[Any, ...]]:
    opened = table.open()
    assert opened is not None
    return sorted((row["n"], row["queue"], row["day"]) for row in opened.to_pyarrow_table().to_pylist())


def test_a_commit_that_is_tried_again_changes_nothing(table: Table) -> None:
    adds = [staged(table, "q", 1, 2)]
    assert table.commit(adds, SCHEMA, {"app": 7})
    assert not table.commit([staged(table, "q", 3)], SCHEMA, {"app": 7})
    assert values_of(table) == [(1, "q", "d"), (2, "q", "d")]
    assert (table.version(), table.transaction("app"), table.transaction("other")) == (0, 7, -1)


@pytest.mark.parametrize("queue", ["a:b", "x y", "50%", "ü/ö", "a=b", "007", "a%3Ab"])
def test_partitions_of_any_name_are_replaced_and_not_doubled(queue: str, table: Table) -> None:
    table.commit([staged(table, queue, 1)], SCHEMA, {"app": 0})
    (file,) = table.files()
    assert file.partition == (queue, "d")
    assert table.commit([staged(table, queue, 2)], SCHEMA, {"app": 1}, replaces={file.path})
    assert values_of(table) == [(2, queue, "d")]


def test_a_missing_file_can_be_removed_only_by_a_rebuild(table: Table) -> None:
    table.commit([staged(table, "q", 1)], SCHEMA, {"app": 0})
    (file,) = table.files()
    table.store.delete([file.path])
    add = staged(table, "q", 2)
    with pytest.raises(LakeError, match=f"{file.path}, which is not there: restore it, or run rebuild"):
        table.commit([add], SCHEMA, {"app": 1}, replaces={file.path})
    assert table.commit([add], SCHEMA, {"app": 1}, replaces={file.path}, again=True)
    assert values_of(table) == [(2, "q", "d")]


def test_compaction_and_retention_are_not_changes(table: Table) -> None:
    for number in range(3):
        table.commit([staged(table, "q", number)], SCHEMA, {"app": number})
    files = table.files()
    assert table.rewrite(files, lambda rows: rows, "compact") == 1
    assert values_of(table) == [(number, "q", "d") for number in range(3)]
    nothing = Changes({}, {})
    assert table.changes(-1, table.version()) == Changes({file.path: ("q", "d") for file in files}, {})
    assert table.changes(2, table.version()) == nothing
    assert table.remove(table.files(), "retain") == 3
    assert table.changes(2, table.version()) == nothing
    (folder_of(table) / "_delta_log" / f"{1:020d}.json").unlink()
    assert table.changes(0, 2) is None  # the log does not say any more


def test_a_run_leaves_the_published_version_readable_until_the_next_is_published(tmp_path: Path) -> None:
    table = Table(tmp_path, "gold/slo")
    for number in range(2 * upkeep.MAX_LOG_FILES):
        table.commit([staged(table, "q", number)], SCHEMA, {"a": number})
    upkeep.delete_old_files(Store.of(tmp_path), {table.name: table}, keep_hours=0)
    published = table.version()
    for number in range(100, 125):  # a checkpoint is made on the way
        table.commit([staged(table, "q", number)], SCHEMA, {"a": number})
    assert [*(folder_of(table) / "_delta_log").glob("*.checkpoint.parquet")]
    assert table.open(published) is not None


def test_a_killed_vacuum_leaves_the_published_versions_readable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, state = Table(tmp_path, "gold/slo"), LakeVersion()
    for number in range(2 * upkeep.MAX_LOG_FILES):
        table.commit([staged(table, "q", number)], SCHEMA, {"a": number})
    state.tables = {table.name: table.version()}
    state.publish(tmp_path)

    def killed(lake: Store, state: LakeVersion) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(upkeep, "_publish", killed)
        with pytest.raises(KeyboardInterrupt):
            vacuum(Store.of(tmp_path), keep_hours=0)
    found = table.open(LakeVersion.load(tmp_path).tables[table.name])
    assert found is not None
    assert found.to_pyarrow_table().num_rows == 2 * upkeep.MAX_LOG_FILES
    vacuum(Store.of(tmp_path), keep_hours=0)
    assert len([*(folder_of(table) / "_delta_log").iterdir()]) < upkeep.MAX_LOG_FILES
    assert table.open(LakeVersion.load(tmp_path).tables[table.name]) is not None


@pytest.mark.slow
def test_files_do_not_grow_with_the_number_of_rounds(tmp_path: Path) -> None:
    first, second = Table(tmp_path, "gold/slo"), Table(tmp_path, "gold/ends")
    tables, state = {table.name: table for table in (first, second)}, LakeVersion()
    before_vacuum, after_vacuum = [], []
    for number in range(4 * upkeep.ROUNDS_BETWEEN):
        # One table grows, as bronze does; the other follows it and is replaced, as gold is.
        first.commit([staged(first, "q", number)], SCHEMA, {"a": number})
        new = staged(second, "q", number)
        second.commit([new], SCHEMA, {first.name: first.version()}, replaces={file.path for file in second.files()})
        upkeep.merge_small_files(tables)
        is_last = number % upkeep.ROUNDS_BETWEEN == upkeep.ROUNDS_BETWEEN - 1
        if is_last:
            before_vacuum.append(files_below(tmp_path))
            upkeep.delete_old_files(Store.of(tmp_path), tables, keep_hours=0)
        state.publish(tmp_path)
        if is_last:
            upkeep.shorten_logs(Store.of(tmp_path), tables, keep_hours=0)
            after_vacuum.append(files_below(tmp_path))
    # The first one begins without a log, so the second is the measure.
    assert max(before_vacuum) < 1.3 * before_vacuum[1], before_vacuum
    assert max(after_vacuum) < 1.3 * after_vacuum[0], after_vacuum
    assert len(values_of(first)) == 4 * upkeep.ROUNDS_BETWEEN


def test_statistics_are_exact_or_missing(tmp_path: Path) -> None:
    from tampu.spark.lake.files import statistics

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


def test_offsets_are_transactions_of_any_queue_and_id(tmp_path: Path) -> None:
    table = Table(tmp_path, "bronze/events")
    assert offsets_of(table, ["q"]) == {}
    highest = 2**64 - 1
    offsets = {
        "q": {"id": "5-3", "added": 7},
        "m\u00e9dia/50%": {"id": f"{highest}-{highest}", "added": 1, "former": 9},
        "r": {"id": "0-0"},
    }
    rows = pa.table({"queue": ["q"], "date": ["d"], "n": [1]})
    table.commit(
        table.write(rows), Schema.from_arrow(rows.schema), {LANDING: 0}, offsets=transactions_of("events", offsets)
    )
    assert offsets_of(Table(tmp_path, "bronze/events"), [*offsets, "other"]) == offsets
    offsets["q"] = {"id": "1-0", "added": 1, "former": 7}  # the stream was created again: lower than before
    table.commit(
        table.write(rows), Schema.from_arrow(rows.schema), {LANDING: 1}, offsets=transactions_of("events", offsets)
    )
    assert offsets_of(table, offsets) == offsets


def events_of(lake: Path, queue: str, date: str, *rows: tuple[str | None, str]) -> Any:
    """Write a file of bronze that no commit names yet; return the action that adds it."""
    jobs, events = zip(*rows, strict=True)
    columns = {"job_id": pa.array(jobs, pa.string()), "event": events}
    (add,) = Table(lake, "bronze/events").write(
        pa.table(columns | {"queue": [queue] * len(rows), "date": [date] * len(rows)})
    )
    return add


def test_only_files_with_jobs_of_new_events_are_touched(tmp_path: Path) -> None:
    columns = ("job_id", "event", "queue", "date")
    fields = [{"name": name, "type": "string", "nullable": True, "metadata": {}} for name in columns]
    schema = Schema.from_json(json.dumps({"type": "struct", "fields": fields}))
    table = Table(tmp_path, "bronze/events")
    named = {
        "new": events_of(tmp_path, "q", "d1", ("m", "active"), ("x", "progress"), (None, "drained")),
        "same": events_of(tmp_path, "q", "d1", ("a", "active"), ("m", "active"), ("z", "active")),
        "around": events_of(tmp_path, "q", "d1", ("a", "active"), ("z", "active")),
        "above": events_of(tmp_path, "q", "d1", ("n", "active"), ("z", "active")),
        "other-day": events_of(tmp_path, "q", "d2", ("m", "active")),
        "other-ids": events_of(tmp_path, "q", "c2", ("m", "active")),
        "no-day": events_of(tmp_path, "q", "h00", ("m", "active")),
        "other-queue": events_of(tmp_path, "r", "d1", ("m", "active")),
    }
    table.commit([*named.values()], schema, {"app": 0})
    names = {add.path: name for name, add in named.items()}
    files = {names[file.path]: file for file in table.files()}
    touched = Touched.read(table, {("q", "d1"): [files["new"]]})
    assert {group: ids.to_pylist() for group, ids in touched.jobs.items()} == {("q", "d1"): ["m"]}
    found = touched.files(table, files.values(), mixed=())
    assert sorted(names[file.path] for file in found) == ["new", "same"]
    # Where jobs of unknown age are, all partitions of IDs without a day may hold a job; days in IDs still tell it.
    mixed = Touched.read(table, {group_of(("q", "h00"), {"q"}): [files["no-day"]]})
    found = mixed.files(table, files.values(), {"q"})
    assert sorted(names[file.path] for file in found) == ["no-day", "other-ids"]
    # Statistics spare reading: a file that cannot hold the job may even be unreadable.
    (folder_of(table) / files["above"].path).write_bytes(b"torn")
    assert len(touched.files(table, files.values(), mixed=())) == 2


def test_the_lake_is_not_read_through_a_file_system_in_python() -> None:
    """Threads of PyArrow that call Python crash a process that ends meanwhile, such as a command of the CLI."""
    for module in Path(lake.__file__).parent.glob("*.py"):
        code = "\n".join(line for line in module.read_text().splitlines() if "`to_pyarrow_table`" not in line)
        assert ".to_pyarrow" not in code, module


def test_only_the_store_knows_where_files_are() -> None:
    """Code that opens files itself works in a local folder only."""
    for module in Path(lake.__file__).parent.glob("*.py"):
        imported = set(re.findall(r"^(?:import|from) (\w+)", module.read_text(), re.MULTILINE))
        # The report and contracts are files of the user; the folder has the lock and the log of Java.
        allowed = {"store": {"os"}, "report": {"os"}, "repair": {"tempfile"}}.get(module.stem, set())
        assert imported & {"glob", "os", "shutil", "tempfile"} <= allowed, module


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
    assert f"cannot write to {tmp_path / 'file' / 'lake'}: " in done.err or "not a lake" in done.err


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
        (tmp_path / "bronze/events/orphan.parquet").write_bytes(b"torn")
        done = compact(Store.of(tmp_path))
        assert (done.merged, done.written) == (4, 2)
        assert vacuum(Store.of(tmp_path), keep_hours=0).deleted > 9
        assert [sorted_rows(tmp_path, table) for table in ALL_TABLES] == before
        assert len(list((tmp_path / "bronze/events").glob("queue=*/*/*.parquet"))) == 1
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
        compact(Store.of(tmp_path))
        vacuum(Store.of(tmp_path), keep_hours=0)
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

    def test_files_that_the_driver_does_not_find_are_not_committed(
        self, spark: Any, filled: Filled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Executors with disks of their own: their rows would count as landed, and be nowhere."""
        filled.events(50)
        pipeline = Pipeline(spark, filled.url, ["q"], tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(Store, "size", lambda self, path: None)
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
        # Other jobs of the file were not changed since.
        tell("completed", "open", 4)
        assert computed() == {("q", "2026-03-03"), ("q", "2026-03-04"), ("q", "2026-03-05")}

    def test_merged_rows_are_those_of_a_rebuild(self, spark: Any, filled: Filled, tmp_path: Path) -> None:
        """Every event of hostile jobs arrives in a round of its own kind, and in an order that is not that of time."""
        rng, history, pipeline = random.Random(5), History(filled), Pipeline(spark, filled.url, ["q"], tmp_path)
        ids = [ulid(number, NOON) for number in range(6)] + [f"order-{number}" for number in range(6)]
        seen: dict[str, int] = {}
        for number in range(5):
            for job_id in rng.sample(ids, 8):
                event = rng.choice(["active", "failed", "failed", "completed", "dlq", "cancelled", "retry-scheduled"])
                at = NOON + rng.randrange(DAY_MS)
                extra = {"attempt": rng.randrange(4), "reason": rng.choice(["x", "y 5"]), "worker": rng.choice("ab")}
                extra |= rng.choice([{}, {"duration_us": rng.choice([5, 2**63 - 1])}])
                history.tell(event, job_id, at, NOON, rng.choice(["work", "mail"]), **extra)
            if number in (1, 3):
                tell_extremes(filled, "q", f"extreme-{number}-")
            pipeline.run()
            assert differences(filled.client, ["q"], tmp_path) == {}
            rounds = {row["job_id"]: row["changed_round"] for row in read_rows(tmp_path, "silver/jobs")}
            assert {job: at for job, at in rounds.items() if at != number + 1}.items() <= seen.items()
            assert number + 1 in rounds.values()
            seen = rounds

        def rows() -> list[str]:
            found = read_rows(tmp_path, "silver/jobs")
            return sorted(repr(sorted((row | {"changed_round": 0}).items())) for row in found)

        merged = rows()
        pipeline.rebuild()
        assert rows() == merged

    def test_a_second_pipeline_that_was_not_seen_adds_nothing_twice(
        self, spark: Any, filled: Filled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """In an object store there is no lock: the log decides."""
        monkeypatch.setattr(pipelines, "sole_writer", lambda lake: nullcontext())
        history, stage = History(filled), Table.stage
        slow, quick = (Pipeline(spark, filled.url, ["q"], tmp_path) for _ in range(2))
        history.completed(ulid(1, NOON), NOON)
        slow.run()
        overtaken_at = ""

        def overtake(self: Table, *arguments: Any, **options: Any) -> Any:
            nonlocal overtaken_at
            adds = stage(self, *arguments, **options)
            if self.name == overtaken_at:
                overtaken_at = ""
                quick.run()
            return adds

        monkeypatch.setattr(Table, "stage", overtake)
        for number, name in enumerate(("bronze/events", "silver/jobs")):
            history.completed(ulid(2 + number, NOON), NOON)
            overtaken_at = name
            with pytest.raises(ConfigError, match="another pipeline writes to the lake"):
                slow.run()
            slow.run()
            assert differences(filled.client, ["q"], tmp_path) == {}

    def test_a_lake_with_offsets_in_files_is_converted(self, spark: Any, filled: Filled, tmp_path: Path) -> None:
        filled.events(30)
        pipeline = Pipeline(spark, filled.url, ["q"], tmp_path)
        pipeline.run()
        table = Table(tmp_path, "bronze/events")
        offsets = offsets_of(table, ["q"])
        # As an earlier version leaves it: the same files and the number of the batch, and the offsets in a file.
        adds = [
            AddAction(f.path, f.size, dict(zip(table.by, f.partition, strict=True)), 0, True, "{}")
            for f in table.files()
        ]
        opened = table.open()
        assert opened is not None
        schema = opened.schema()
        shutil.rmtree(folder_of(table) / "_delta_log")
        table = Table(tmp_path, "bronze/events")
        table.commit(adds, schema, {LANDING: 0})
        (tmp_path / "_offsets/events").mkdir(parents=True)
        file = tmp_path / "_offsets/events" / f"{0:012d}.json"
        with pytest.raises(ConfigError, match=r"000000000000\.json is missing, so it is not known how far"):
            Pipeline(spark, filled.url, ["q"], tmp_path).run()
        file.write_text(json.dumps(offsets))
        filled.events(5, start=31)
        assert Pipeline(spark, filled.url, ["q"], tmp_path).run().landed["events"] == 5
        assert not file.exists()
        assert Pipeline(spark, filled.url, ["q"], tmp_path).run().landed["events"] == 0
        assert len(read_rows(tmp_path, "bronze/events")) == 35

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
        assert retain(Store.of(tmp_path), 90, today=today).retired["events"] == 2
        vacuum(Store.of(tmp_path), keep_hours=0)
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
            (folder_of(table) / table.files()[0].path).unlink()
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
        monkeypatch.setitem(silver.COLUMNS, "shout", ("upper(max(name))", "max"))
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
