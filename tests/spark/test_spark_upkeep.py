"""Upkeep of a lake: compact, vacuum and retain, which need no Spark."""

from __future__ import annotations

import json
import os
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import polars as pl
import pyarrow as pa
import pytest
from deltalake import DeltaTable, Schema

from cli.lab import invoke
from tampu.errors import ConfigError
from tampu.spark import read_table
from tampu.spark.lake import contracts, upkeep
from tampu.spark.lake.bronze import LANDING, transactions_of
from tampu.spark.lake.contracts import Violation
from tampu.spark.lake.folder import LakeVersion
from tampu.spark.lake.repair import Letter, Repair, record
from tampu.spark.lake.rows import read_rows
from tampu.spark.lake.store import Store
from tampu.spark.lake.table import Changes, Table
from tampu.spark.lake.upkeep import compact, merge_small_files, retain, vacuum
from tampu.wire.envelope import decode_job, encode_envelope
from tampu.wire.payload import encode_slot

if TYPE_CHECKING:
    from pathlib import Path

    from spark.filling import Filled

FIELDS = [
    {"name": name, "type": "string", "nullable": True, "metadata": {}} for name in ("job_id", "event", "queue", "date")
]
SCHEMA = Schema.from_json(json.dumps({"type": "struct", "fields": FIELDS}))
#: The day of the tests of retention: with 90 days, bronze begins on 2026-03-12.
TODAY = datetime(2026, 6, 10, tzinfo=UTC)


class SmallLake:
    """A lake as the pipeline leaves it: events in bronze, one row per event in silver, and a published state."""

    def __init__(self, folder: Path | Store) -> None:
        self.store = Store.of(folder)
        self.events = Table(folder, "bronze/events")
        self.letters = Table(folder, "bronze/dlq")
        self.jobs = Table(folder, "silver/jobs")
        self._number = 0

    def land(self, date: str, *jobs: str, queue: str = "q", table: Table | None = None) -> None:
        """Commit one file to a table of bronze, by default the events."""
        self._write(table or self.events, queue, date, jobs, {LANDING: self._number})

    def compute(self, date: str = "2026-03-01", *jobs: str) -> None:
        """Commit one file to silver, as computed from all events so far, and publish the state."""
        self._write(self.jobs, "q", date, jobs or ("a",), {self.events.name: self.events.version()})
        self.publish()

    def publish(self) -> None:
        state = LakeVersion.load(self.store)
        state.tables = {table.name: table.version() for table in self.tables if table.version() >= 0}
        state.publish(self.store)

    @property
    def folder(self) -> Path:
        assert self.store.folder is not None
        return self.store.folder

    @property
    def tables(self) -> tuple[Table, ...]:
        return self.events, self.letters, self.jobs

    @property
    def state(self) -> LakeVersion:
        return LakeVersion.load(self.store)

    def rows(self) -> dict[str, list[str]]:
        """Return the jobs that readers of the published state see, per table."""
        return {
            table.name: sorted(row["job_id"] for row in read_rows(self.store, table.name, self.state))
            for table in self.tables
        }

    def is_silver_up_to_date(self) -> bool:
        return self.jobs.transaction(self.events.name) == self.events.version()

    def _write(self, table: Table, queue: str, date: str, jobs: tuple[str, ...], transactions: dict[str, int]) -> None:
        self._number += 1
        count = len(jobs)
        rows = {"job_id": jobs, "event": ["completed"] * count, "queue": [queue] * count, "date": [date] * count}
        assert table.commit(table.write(pa.table(rows)), SCHEMA, transactions)


@pytest.fixture
def lake(tmp_path: Path) -> SmallLake:
    return SmallLake(tmp_path / "lake")


def data_files(table: Table) -> list[str]:
    paths = (file["path"] for file in table.store.list())
    return sorted(path for path in paths if path.endswith(".parquet") and not path.startswith("_delta_log"))


def pipeline(lake: SmallLake, command: str, *options: str) -> str:
    """Run a command of `tampu pipeline` on the lake; return what it prints."""
    done = invoke("pipeline", command, "--lake", str(lake.folder), *options)
    assert done.code == 0, done.err
    return done.out.strip()


# --- compact


def test_compacting_merges_each_partition_and_keeps_its_rows(lake: SmallLake) -> None:
    for job in "abc":
        lake.land("2026-03-01", job)
    lake.land("2026-03-02", "d")
    lake.compute("2026-03-01", "a", "b")
    before = lake.rows()
    assert pipeline(lake, "compact") == "merged 3 files into 1"
    assert len(lake.events.files()) == 2
    assert lake.rows() == before
    assert lake.state.tables["bronze/events"] == lake.events.version()  # readers would lose the old files to vacuum
    assert pipeline(lake, "compact") == "there are no files to merge"


def test_compaction_is_not_a_change_that_silver_is_computed_for(lake: SmallLake) -> None:
    lake.land("2026-03-01", "a")
    lake.land("2026-03-01", "b")
    lake.compute()
    compact(lake.store)
    assert lake.is_silver_up_to_date()
    # What silver has not read yet stays news, although the files were merged.
    lake.land("2026-03-01", "c")
    compact(lake.store)
    assert not lake.is_silver_up_to_date()


def test_after_a_round_only_many_small_files_are_merged(lake: SmallLake, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = {lake.events.name: lake.events}
    for number in range(upkeep.MIN_FILES - 1):
        lake.land("2026-03-01", f"job-{number}")
    assert merge_small_files(tables).merged == 0
    lake.land("2026-03-01", "one more")
    monkeypatch.setattr(upkeep, "SMALL_FILE", 1)  # none of them counts as small
    assert merge_small_files(tables).merged == 0
    monkeypatch.undo()
    assert merge_small_files(tables).merged == upkeep.MIN_FILES
    assert [file.rows for file in lake.events.files()] == [upkeep.MIN_FILES]


def test_files_of_any_queue_are_merged(lake: SmallLake) -> None:
    queues = ["~home", "é" * 45, "é/" * 30, "a=b/c%20d", "q"]
    for queue in queues:
        for job in "ab":
            lake.land("2026-03-01", f"{job} of {queue}", queue=queue)
    lake.compute()
    before = lake.rows()
    assert compact(lake.store).merged == 10
    assert lake.rows() == before
    assert sorted(file.partition[0] for file in lake.events.files()) == sorted(queues)
    by_polars = pl.read_delta(lake.events.store.uri)
    assert sorted(by_polars["queue"].unique()) == sorted(queues)


# --- vacuum


def test_vacuum_deletes_what_killed_runs_left_and_no_row(lake: SmallLake) -> None:
    lake.land("2026-03-01", "a")
    lake.compute()
    (add,) = lake.events.write(pa.table({"job_id": ["staged"], "event": ["e"], "queue": ["q"], "date": ["d"]}))
    long_ago = time.time() - 86_400
    os.utime(lake.folder / "bronze/events" / add.path, (long_ago, long_ago))
    before = lake.rows()
    assert pipeline(lake, "vacuum") == "deleted 1 file"
    assert data_files(lake.events) == [file.path for file in lake.events.files()]
    assert lake.rows() == before
    assert lake.is_silver_up_to_date()  # vacuum writes to the log of bronze
    assert lake.state.tables["bronze/events"] == lake.events.version()


def test_vacuum_keeps_the_files_that_a_recent_reader_may_need(lake: SmallLake) -> None:
    lake.land("2026-03-01", "a")
    lake.land("2026-03-01", "b")
    lake.compute()
    opened = DeltaTable(lake.events.store.uri)
    compact(lake.store)
    assert vacuum(lake.store).deleted == 0  # they are younger than two hours
    assert opened.to_pyarrow_table().num_rows == 2
    vacuum(lake.store, keep_hours=0)
    assert len(data_files(lake.events)) == 1


def test_vacuum_shortens_a_long_log_and_sets_its_retention(lake: SmallLake) -> None:
    for number in range(upkeep.MAX_LOG_FILES + 2):
        lake.land(f"2026-03-{number + 1:02}", f"job-{number}")
    lake.compute()
    log, before = lake.folder / "bronze/events/_delta_log", lake.rows()
    long_ago = time.time() - 86_400
    for path in log.iterdir():
        os.utime(path, (long_ago, long_ago))
    vacuum(lake.store, keep_hours=3)
    assert len(list(log.glob("*.json"))) < upkeep.MAX_LOG_FILES
    assert list(log.glob("*.checkpoint.parquet"))
    assert lake.rows() == before
    configuration = DeltaTable(lake.events.store.uri).metadata().configuration
    assert configuration["delta.logRetentionDuration"] == "interval 3 hours"
    assert lake.is_silver_up_to_date()  # it could not read from the log what has changed


# --- retain


def test_retention_removes_old_days_of_both_streams_and_counts_them(lake: SmallLake) -> None:
    for date in ("2026-03-11", "2026-03-12"):
        lake.land(date, f"a {date}", f"b {date}")
        lake.land(date, f"letter {date}", table=lake.letters)
    lake.land("c2026-03-11", "an ID without a day", queue="other")
    lake.compute("2026-03-11", "a", "b")
    done = retain(lake.store, 90, today=TODAY)
    assert done.retired == {"events": 3, "dlq": 1}
    assert lake.rows() == {
        "bronze/events": ["a 2026-03-12", "b 2026-03-12"],
        "bronze/dlq": ["letter 2026-03-12"],
        "silver/jobs": ["a", "b"],
    }
    assert lake.state.retired == {"events": {"q": 2, "other": 1}, "dlq": {"q": 1}}
    assert lake.state.retained_from == "2026-03-12"
    assert lake.is_silver_up_to_date()
    # Days that are gone do not come back: a longer retention later must not promise them.
    retain(lake.store, 365, today=TODAY)
    assert lake.state.retained_from == "2026-03-12"


def test_retention_keeps_jobs_whose_age_is_unknown(lake: SmallLake) -> None:
    """A job in `c2020-01-01` may have later events in `h00`: without its first ones it would be computed wrongly."""
    for date in ("h00", "c2020-01-01", "none", "2020-01-01"):
        lake.land(date, date)
    lake.land("c2020-01-01", "of a queue without jobs of unknown age", queue="dated")
    lake.compute()
    lake.land("c2026-06-09", "recent")
    lake.compute()
    done = retain(lake.store, 90, today=TODAY)
    assert (done.retired["events"], done.kept["events"]) == (2, 2)
    assert lake.rows()["bronze/events"] == ["c2020-01-01", "h00", "none", "recent"]
    said = invoke("pipeline", "retain", "--bronze", "1d", "--lake", str(lake.folder))
    assert "created at an unknown time" in said.err
    assert said.err.startswith("kept ")


def test_retention_removes_old_repairs(lake: SmallLake) -> None:
    lake.land("2020-01-01", "a")
    lake.compute()
    letter = Letter("1-0", decode_job(encode_envelope("a", encode_slot(1), 0), "work"), "work", None, None, 1)
    for at in (datetime(2026, 3, 11, 23, 59, tzinfo=UTC), datetime(2026, 3, 12, tzinfo=UTC)):
        repaired = [Repair(letter, 2, "work", {})]
        record(lake.folder, f"{at:%d}", "q", "c", "SELECT", repaired, int(at.timestamp() * 1000), canary=False)
    version = Table(lake.folder, "bronze/repairs").version()
    done = retain(lake.store, 90, today=TODAY)
    assert done.retired == {"events": 1, "dlq": 0, "repairs": 1}
    assert [row["repair"] for row in read_rows(lake.folder, "bronze/repairs", lake.state)] == ["12"]
    # gold/repairs is not computed again for it
    table = Table(lake.folder, "bronze/repairs")
    assert table.changes(version, table.version()) == Changes({}, {})
    assert pipeline(lake, "retain", "--bronze", "90d").startswith("removed 0 events, 0 dead letters and ")


def test_events_that_silver_has_not_read_are_not_removed(lake: SmallLake) -> None:
    lake.land("2020-01-01", "a")
    lake.compute()
    lake.land("2020-01-01", "late")
    with pytest.raises(ConfigError, match="run the pipeline first"):
        retain(lake.store, 90, today=TODAY)
    assert len(lake.events.files()) == 2


def test_retention_of_less_than_a_day_is_refused(lake: SmallLake) -> None:
    lake.compute()
    with pytest.raises(ConfigError, match="at least 1 day; got 0"):
        retain(lake.store, 0)


def test_the_command_removes_rows_and_vacuum_their_files(lake: SmallLake) -> None:
    lake.land("2020-01-01", "a", "b")
    lake.land("2999-01-01", "c")
    lake.compute()
    assert pipeline(lake, "retain", "--bronze", "90d") == "removed 2 events and 0 dead letters from bronze"
    assert len(data_files(lake.events)) == 2
    assert pipeline(lake, "vacuum", "--keep", "0s").startswith("deleted ")
    assert data_files(lake.events) == [file.path for file in lake.events.files()]


# --- forget


def test_a_forgotten_job_is_in_no_table_and_no_file(lake: SmallLake) -> None:
    secret, other = "job-of-a-person", "other"
    lake.land("2026-03-01", secret, other)
    lake.land("2026-03-02", other)
    lake.land("2026-03-01", secret, table=lake.letters)
    lake.compute("2026-03-01", secret, other)
    violations = Table(lake.store, "gold/violations")
    found = [Violation("q", "jobs", "n", "f", "type", 3, job, f"sample of {job}") for job in (secret, other)]
    contracts.publish(lake.store, ["q"], found)
    said = pipeline(lake, "forget", "--job", secret)
    assert said.splitlines() == [
        *("bronze_events: 1 row", "bronze_dlq: 1 row", "silver_jobs: 1 row", "gold_violations: 1 row")
    ]
    assert lake.rows() == {"bronze/events": [other, other], "bronze/dlq": [], "silver/jobs": [other]}
    assert lake.is_silver_up_to_date()
    assert lake.state.retired == {"events": {"q": 1}, "dlq": {"q": 1}}
    rows = sorted(read_rows(lake.store, "gold/violations"), key=lambda row: str(row["sample"]))
    assert [(row["sample_job_id"], row["jobs"]) for row in rows] == [(None, 3), (other, 3)]
    files = [
        file for file in lake.store.list() if file["path"].endswith(".parquet") and "_delta_log" not in file["path"]
    ]
    assert not [file for file in files if secret.encode() in lake.store.read(file["path"])]
    assert violations.version() >= 0
    assert pipeline(lake, "forget", "--job", secret) == "the lake has no rows of these jobs"


def test_ddl_names_every_published_table(lake: SmallLake) -> None:
    lake.land("2026-03-01", "a")
    lake.compute()
    for catalog in ("athena", "databricks", "duckdb", "snowflake", "trino"):
        lines = pipeline(lake, "ddl", "--for", catalog).splitlines()
        assert [name in line for name, line in zip(("bronze_events", "silver_jobs"), lines, strict=True)] == [
            True,
            True,
        ]
    done = invoke("pipeline", "ddl", "--for", "oracle", "--lake", str(lake.folder))
    assert (done.code, "must be one of athena, " in done.err) == (2, True)


# --- show, sql and read_table


def test_show_lists_the_published_tables(lake: SmallLake) -> None:
    lake.land("2026-03-01", "a", "b")
    lake.land("2026-03-02", "c")
    lake.compute()
    lake.land("2026-03-03", "not published yet")
    shown = json.loads(pipeline(lake, "show", "--json"))
    (events, jobs) = shown["tables"]
    assert (events["table"], events["version"], events["rows"], events["files"]) == ("bronze_events", 1, 3, 2)
    assert events["bytes"] == sum(file.size for file in lake.events.files(1))
    assert (jobs["table"], jobs["rows"], shown["round"]) == ("silver_jobs", 1, 1)
    heading, *rows = pipeline(lake, "show").splitlines()
    assert heading.split() == ["table", "version", "rows", "files", "size"]
    assert [row.split()[:4] for row in rows] == [["bronze_events", "1", "3", "2"], ["silver_jobs", "0", "1", "1"]]


def test_status_says_how_far_a_lake_is_behind(lake: SmallLake, filled: Filled) -> None:
    filled.events(5)
    rows = pa.table({"job_id": ["a"], "event": ["completed"], "queue": ["q"], "date": ["d"]})
    transactions = transactions_of("events", {"q": {"id": "3-0", "added": 3}})
    lake.events.commit(lake.events.write(rows), SCHEMA, {LANDING: 0}, offsets=transactions)
    lake.compute()

    def status(*options: str) -> Any:
        done = invoke("pipeline", "status", "-q", "q", "--lake", str(lake.folder), "--url", filled.url, *options)
        return done.code, done.out

    code, out = status("--max-lag", "1h")
    assert (code, "events of q: 2 entries behind" in out, "dlq of q: 0 entries behind" in out) == (0, True, True)
    code, out = status("--max-lag", "0s", "--json")
    assert (code, json.loads(out)["behind"]) == (1, {"events": {"q": 2}, "dlq": {"q": 0}})
    filled.client.delete(filled.keys().events)
    assert status("--max-lag", "0s")[0] == 0  # nothing waits


def test_sql_prints_a_table_or_json(lake: SmallLake) -> None:
    lake.land("2026-03-01", "b", "a")
    lake.compute()
    text = "SELECT job_id, [event] AS events, {} AS at, NULL AS none FROM bronze_events ORDER BY job_id"
    query = text.format("to_timestamp('2026-03-01T12:00:00')")
    rows = json.loads(pipeline(lake, "sql", query, "--json"))
    assert rows == [
        {"job_id": job, "events": ["completed"], "at": "2026-03-01T12:00:00", "none": None} for job in ("a", "b")
    ]
    heading, first, _ = pipeline(lake, "sql", "SELECT job_id, event FROM bronze_events ORDER BY 1").splitlines()
    assert (heading.split(), first.split()) == (["job_id", "event"], ["a", "completed"])
    done = invoke("pipeline", "sql", "SELECT nothing FROM bronze_events", "--lake", str(lake.folder))
    assert done.code == 2
    assert "nothing" in done.complaint


@pytest.mark.parametrize(
    "statement",
    [
        "COPY (SELECT 1) TO '{}'",
        "EXPLAIN ANALYZE COPY (SELECT 1) TO '{}'",
        "/* /* */ SELECT */ COPY (SELECT 1) TO '{}'",
        "SELECT 1; COPY (SELECT 1) TO '{}'",
        "DROP TABLE bronze_events",
    ],
)
def test_sql_only_reads(lake: SmallLake, statement: str, tmp_path: Path) -> None:
    lake.land("2026-03-01", "a")
    lake.compute()
    file = tmp_path / "stolen.csv"
    done = invoke("pipeline", "sql", statement.format(file), "--lake", str(lake.folder))
    assert (done.code, done.out) == (2, "")
    assert not file.exists()


@pytest.mark.parametrize(
    "statement", ["values (1)", " -- one\n(SELECT 1)", "/* one */ with a AS (SELECT 1) SELECT * FROM a"]
)
def test_sql_reads_with_any_query(lake: SmallLake, statement: str) -> None:
    lake.land("2026-03-01", "a")
    lake.compute()
    assert pipeline(lake, "sql", statement).split()[-1] == "1"


def test_a_table_that_cannot_be_read_is_named(lake: SmallLake) -> None:
    lake.land("2026-03-01", "a")
    lake.compute()
    session: Any = None  # it is not used
    with pytest.raises(ConfigError, match=r"table must be one of bronze/events, .*; got 'silver'"):
        read_table(session, lake.folder, "silver")
    with pytest.raises(ConfigError, match="has no table gold/slo yet"):
        read_table(session, lake.folder, "gold/slo")
