"""The lake: what the tables hold, that a run again changes nothing, and that a run cut off anywhere goes on."""

from __future__ import annotations

import re
import subprocess
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import polars as pl
import pytest

from servers.require import require
from spark.extremes import EXTREMES, extreme_letters, tell_extremes, tell_highest_ids
from spark.lake_check import KEYS, difference, differences, expected_tables, stored_tables
from spark.picture import count_colour, pixels_of
from tampu.errors import ConfigError
from tampu.spark.lake.charts import COLOURS, Series, line_chart, time_marks
from tampu.spark.lake.folder import LakeVersion
from tampu.spark.lake.gold import fingerprint_sql
from tampu.spark.lake.pipeline import Pipeline
from tampu.spark.lake.report import Figures, _over_time, bucket_of, forecast_of, write_report
from tampu.spark.lake.rows import read_rows
from tampu.spark.lake.table import TABLES as ALL_TABLES
from tampu.spark.lake.table import Table
from tampu.spark.lake.upkeep import vacuum
from tampu.wire.dlq import fingerprint
from tampu.wire.events import encode_event_fields
from tampu.wire.ulid import encode_ulid

if TYPE_CHECKING:
    from pathlib import Path

    from spark.filling import Filled

pytestmark = pytest.mark.spark_session

#: Noon of a day, in ms.
NOON = int(datetime(2026, 3, 1, 12, tzinfo=UTC).timestamp() * 1000)
DAY_MS = 86_400_000


def ulid(number: int, at_ms: int) -> str:
    return encode_ulid(at_ms, number.to_bytes(16, "big"))


class History:
    """Writes the events of a queue's jobs, in order."""

    def __init__(self, filled: Filled, queue: str = "q") -> None:
        self._filled = filled
        self._events = filled.keys(queue).events

    def tell(self, event: str, job_id: str, at_ms: int, created_ms: int, name: str = "work", **extra: Any) -> None:
        fields = encode_event_fields(event, job_id, at_ms, name, {"created_at_ms": created_ms, "worker": "w"} | extra)
        self._filled.xadd(self._events, *fields)

    def completed(self, job_id: str, created_ms: int, wait_ms: int = 40, run_ms: int = 10) -> None:
        start = created_ms + wait_ms
        self.tell("active", job_id, start, created_ms, attempt=1)
        self.tell("completed", job_id, start + run_ms, created_ms, attempt=1, duration_us=run_ms * 1000)

    def failed(self, job_id: str, created_ms: int, at_ms: int, attempt: int, reason: str) -> None:
        self.tell("active", job_id, at_ms, created_ms, attempt=attempt)
        self.tell("failed", job_id, at_ms + 5, created_ms, attempt=attempt, reason=reason, duration_us=5000)

    def dead(self, job_id: str, created_ms: int, at_ms: int, attempt: int) -> None:
        self.tell("dlq", job_id, at_ms, created_ms, attempt=attempt, reason="retries_exhausted")


def jobs_of(lake: Path) -> dict[str, dict[str, Any]]:
    return {row["job_id"]: row for row in read_rows(lake, "silver/jobs")}


def sorted_rows(lake: Path, table: str) -> list[str]:
    """Return the rows, without the round that computed them."""
    rows = ({name: value for name, value in row.items() if name != "changed_round"} for row in read_rows(lake, table))
    return sorted(repr(sorted(row.items())) for row in rows)


TABLES = tuple(name for name in ALL_TABLES if not name.startswith("bronze"))


def fill(filled: Filled) -> None:
    history = History(filled)
    for number in range(40):
        history.completed(ulid(number, NOON + number * 1000), NOON + number * 1000, wait_ms=number)
    retried, lost = ulid(100, NOON), "an-id-of-their-own"
    history.failed(retried, NOON, NOON + 100, 1, "ValueError: bad amount 17")
    history.tell("retry-scheduled", retried, NOON + 105, NOON, attempt=2, backoff_ms=1000)
    history.failed(lost, NOON, NOON + 100, 1, "ValueError: bad amount 99")
    history.dead(lost, NOON, NOON + 106, 1)
    filled.xadd(filled.keys().events, "e", "drained", "id", "", "ts", NOON)
    filled.letter(lost, {"amount": "99"}, error="bad amount 99")
    filled.letter("other", {"amount": "5"}, error="bad amount 5")


def test_jobs_are_told_by_all_of_their_events(spark: Any, filled: Filled, tmp_path: Path) -> None:
    fill(filled)
    steps: list[str] = []
    pipeline = Pipeline(spark, filled.url, ["q"], tmp_path, on_step=steps.append)
    summary = pipeline.run()
    assert summary.landed == {"events": 87, "dlq": 2}
    assert summary.trimmed == {"events": 0, "dlq": 0}
    assert steps[0] == "landing events"

    jobs = jobs_of(tmp_path)
    assert len(jobs) == 42
    plain = jobs[ulid(7, NOON + 7000)]
    assert (plain["outcome"], plain["wait_ms"], plain["run_us"], plain["total_ms"]) == ("completed", 7, 10_000, 17)
    retried = jobs[ulid(100, NOON)]
    assert (retried["outcome"], retried["failures"], retried["done_at"]) == ("retry-scheduled", 1, None)
    lost = jobs["an-id-of-their-own"]
    assert (lost["outcome"], lost["last_error"], lost["dlq_reason"]) == (
        *("dead", "ValueError: bad amount 99", "retries_exhausted"),
    )
    (cluster,) = read_rows(tmp_path, "gold/dlq_clusters")
    assert (cluster["letters"], cluster["fingerprint"]) == (2, "bad amount <n>")
    assert sum(row["completed"] for row in read_rows(tmp_path, "gold/throughput")) == 40
    assert [row["failures"] for row in read_rows(tmp_path, "gold/failures")] == [2]
    (slo,) = read_rows(tmp_path, "gold/slo")
    assert (slo["jobs"], slo["completed"], slo["dead"], slo["within_1s"]) == (41, 40, 1, 40)

    # A day later the retried job ends: its row changes, and both days it counts on are right.
    history = History(filled)
    history.completed(retried["job_id"], NOON, wait_ms=DAY_MS)
    summary = pipeline.run()
    assert summary.landed["events"] == 2
    assert summary.silver_partitions == 1
    assert jobs_of(tmp_path)[ulid(100, NOON)]["outcome"] == "completed"
    assert len(jobs_of(tmp_path)) == 42
    assert {row["day"]: row["completed"] for row in read_rows(tmp_path, "gold/slo")} == {
        "2026-03-01": 40,
        "2026-03-02": 1,
    }

    # Nothing new: nothing is computed, and nothing changes.
    before = [sorted_rows(tmp_path, table) for table in TABLES]
    assert pipeline.run().silver_partitions == 0
    assert [sorted_rows(tmp_path, table) for table in TABLES] == before


def test_extremes_in_every_field_do_not_stop_the_pipeline(spark: Any, filled: Filled, tmp_path: Path) -> None:
    number = tell_extremes(filled) + tell_highest_ids(filled)
    letters = extreme_letters(filled)
    summary = Pipeline(spark, filled.url, ["q"], tmp_path).run()
    assert summary.landed == {"events": number, "dlq": letters}
    jobs = jobs_of(tmp_path)
    assert jobs[f"duration_us-{EXTREMES.index(2**63 - 1)}"]["total_run_us"] is None  # twice 2^63 - 1 is too much
    assert jobs[f"duration_us-{EXTREMES.index(1)}"]["total_run_us"] == 5
    assert differences(filled.client, ["q"], tmp_path) == {}
    assert Pipeline(spark, filled.url, ["q"], tmp_path).run().landed["events"] == 0
    # The check itself: it notices another value in any column of any table, a missing row and a doubled one.
    stored = stored_tables(tmp_path)
    expected = expected_tables(filled.client, ["q"], stored)
    for table, rows in stored.items():
        for name, kind in rows.schema.items():
            values = rows[name].to_list()
            place = next((place for place, value in enumerate(values) if value is not None), 0)
            values[place] = changed_value(values[place], kind)
            changed = rows.with_columns(pl.Series(name, values, kind))
            assert difference(expected[table], changed, KEYS[table]), (table, name)
        for changed in (rows[1:], pl.concat([rows, rows[:1]])):
            assert difference(expected[table], changed, KEYS[table]), table


def changed_value(value: Any, kind: pl.DataType) -> Any:
    """Return another value of the same type."""
    if value is None or isinstance(value, str | bytes):
        return (value or b"") + b"!" if kind == pl.Binary else str(value) + "!"
    if isinstance(value, datetime):
        return value - timedelta(milliseconds=1) if value.year > 1970 else value + timedelta(milliseconds=1)
    if isinstance(value, float):
        return value * 1.001 + 0.001
    return not value if isinstance(value, bool) else value - 1 if value else 1


def test_cancelled_jobs_are_ends_of_their_own_kind(spark: Any, filled: Filled, tmp_path: Path) -> None:
    history, keys = History(filled), filled.keys()
    for number in range(3):
        history.completed(ulid(number, NOON), NOON)
    running = ulid(10, NOON)
    history.tell("active", running, NOON + 10, NOON, attempt=1)
    history.tell("cancelled", running, NOON + 20, NOON, attempt=1, duration_us=10_000, reason="by request")
    # A delayed job that is cancelled leaves an event without its time of creation: as in `cancel_job.lua`.
    filled.xadd(keys.events, "e", "cancelled", "id", "order-7", "ts", NOON + 30, "n", "work", "reason", "")
    # An event that the worker wrote late does not bring a cancelled job back; being added again does.
    history.tell("active", running, NOON + 15, NOON, attempt=1)
    again = ulid(11, NOON)
    history.tell("cancelled", again, NOON + 40, NOON, reason="twice")
    history.completed(again, NOON, wait_ms=100)
    expired = ulid(12, NOON)
    history.tell("dlq", expired, NOON + 50, NOON, attempt=0, reason="expired")
    snoozed = ulid(13, NOON)
    history.tell("active", snoozed, NOON + 60, NOON, attempt=1)
    history.tell("retry-scheduled", snoozed, NOON + 61, NOON, attempt=2, backoff_ms=30_000)
    Pipeline(spark, filled.url, ["q"], tmp_path).run()
    jobs = jobs_of(tmp_path)
    outcomes = {job_id: jobs[job_id]["outcome"] for job_id in (running, "order-7", again, expired, snoozed)}
    assert list(outcomes.values()) == ["cancelled", "cancelled", "completed", "dead", "retry-scheduled"]
    assert (jobs[expired]["dlq_reason"], jobs[snoozed]["failures"]) == ("expired", 0)
    (slo,) = read_rows(tmp_path, "gold/slo")
    assert (slo["jobs"], slo["completed"], slo["dead"], slo["cancelled"]) == (8, 4, 1, 3)
    assert sum(row["cancelled"] for row in read_rows(tmp_path, "gold/throughput")) == 3
    assert sum(row["jobs"] for row in read_rows(tmp_path, "gold/latency")) == 5
    assert differences(filled.client, ["q"], tmp_path) == {}
    page = write_report(tmp_path, tmp_path / "report.html").read_text()
    assert "80.00%" in page  # 4 of the 5 that were not cancelled


def test_queues_in_turn_are_landed_once_each(spark: Any, filled: Filled, tmp_path: Path) -> None:
    filled.events(30, "a")
    filled.events(20, "b")
    runs = [Pipeline(spark, filled.url, [queue], tmp_path).run().landed["events"] for queue in ("a", "b", "a", "b")]
    assert runs == [30, 20, 0, 0]
    filled.events(5, "a", start=31)
    assert Pipeline(spark, filled.url, ["a", "b"], tmp_path).run().landed["events"] == 5
    assert len(jobs_of(tmp_path)) == 35


class Cut(Exception):  # noqa: N818 - not an error of the code
    """The run ends here, as by a power failure."""


def test_a_run_killed_around_any_commit_is_continued(
    spark: Any, filled: Filled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(filled)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    steps: list[str] = []
    Pipeline(spark, filled.url, ["q"], whole, on_step=steps.append).run()
    assert [step.split(" so far")[0] for step in steps] == [
        *("landing events", "landing events: 87", "landing dlq", "landing dlq: 2", "computing silver, partitions: 3"),
        *("computing gold, days: all", "grouping dead letters", "publishing"),
    ]
    commit = Table.commit
    killed: list[str] = []

    def commit_or_die(self: Table, *arguments: Any, **options: Any) -> bool:
        """Die before the commit, with files staged; in the next run after it, with the rest undone."""
        if f"before {self.name}" not in killed:
            killed.append(f"before {self.name}")
            raise Cut
        done = commit(self, *arguments, **options)
        if f"after {self.name}" not in killed:
            killed.append(f"after {self.name}")
            raise Cut
        return done

    monkeypatch.setattr(Table, "commit", commit_or_die)
    computed = [name for name in ALL_TABLES if Table(whole, name).version() >= 0]
    assert set(ALL_TABLES) - set(computed) == {"bronze/repairs", "gold/repairs", "gold/violations"}
    for _ in range(2 * len(computed)):
        with pytest.raises(Cut):
            Pipeline(spark, filled.url, ["q"], cut).run()
        assert LakeVersion.load(cut).round == 0  # nothing is published before the end
    assert len(killed) == 2 * len(computed)
    Pipeline(spark, filled.url, ["q"], cut).run()
    for table in ALL_TABLES:
        assert sorted_rows(cut, table) == sorted_rows(whole, table), table
    assert LakeVersion.load(cut).round == 1
    # The files of the attempts that died are gone, or go with a vacuum.
    vacuum(cut, keep_hours=0)
    for table in computed:
        on_disk = {str(path.relative_to(cut / table)) for path in (cut / table).rglob("*.parquet")}
        assert {path for path in on_disk if "_delta_log" not in path} == {f.path for f in Table(cut, table).files()}


def test_what_was_trimmed_is_counted_and_shown(spark: Any, filled: Filled, tmp_path: Path) -> None:
    history = History(filled)
    for number in range(20):
        history.completed(ulid(number, NOON), NOON)
    filled.client.xtrim(filled.keys().events, maxlen=30, approximate=False)
    pipeline = Pipeline(spark, filled.url, ["q"], tmp_path)
    assert pipeline.run().trimmed["events"] == 10
    for number in range(20, 40):
        history.completed(ulid(number, NOON), NOON)
    filled.client.xtrim(filled.keys().events, maxlen=35, approximate=False)
    assert pipeline.run().trimmed["events"] == 15
    filled.client.delete(filled.keys().events)  # of the new stream, 3 of 83 are trimmed
    for number in range(40, 81):
        history.completed(ulid(number, NOON), NOON)
    history.tell("active", ulid(81, NOON), NOON, NOON)
    filled.client.xtrim(filled.keys().events, maxlen=80, approximate=False)
    assert pipeline.run().trimmed["events"] == 18
    page = write_report(tmp_path, tmp_path / "report.html").read_text()
    assert "18 events of q" in page


def test_the_report_says_all_and_needs_nothing_else(spark: Any, filled: Filled, tmp_path: Path) -> None:
    fill(filled)
    Pipeline(spark, filled.url, ["q"], tmp_path).run()
    page = write_report(tmp_path, tmp_path / "out" / "report.html").read_text()
    for part in ("Throughput", "Latency", "Backlog", "Failures", "bad amount &lt;n&gt;", "p99", "41"):
        assert part in page
    assert page.count("<svg") >= 5
    for outside in ("http://", "https://", "<script", "<img"):
        assert outside not in page


def test_the_forecast_says_when_it_is_empty() -> None:
    start = datetime(2026, 1, 1, tzinfo=UTC)
    changes = {start + timedelta(minutes=minute): [10, 30] for minute in range(15)}
    assert "empty in about 5 minutes" in forecast_of(changes, 100).sentence
    assert "does not shrink" in forecast_of({start: [30, 10]}, 20).sentence
    assert "No backlog" in forecast_of({start: [10, 10]}, 0).sentence
    # Clocks can be wrong: neither the first nor the last time that Python knows may end it.
    for extreme in (datetime.max.replace(tzinfo=UTC), datetime.min.replace(tzinfo=UTC)):
        assert "does not shrink" in forecast_of({extreme: [30, 10]}, 20).sentence


@pytest.mark.spark_slice
def test_spark_and_python_agree_on_fingerprints(spark: Any) -> None:
    texts = [
        "no 5",
        " boom\n",
        "\tboom",
        "\u00a0boom\u00a0",
        "é" + "01J" + "0" * 23,
        "x" + "01J" + "0" * 23,
        "'a' 0x1F",
    ]
    rows = spark.createDataFrame([(text,) for text in texts], "text string")
    found = [row.shape for row in rows.selectExpr(f"{fingerprint_sql('text')} AS shape").collect()]
    assert found == [fingerprint(text) for text in texts]
    assert found[:3] == ["no <n>", "boom", "boom"]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with plots of made-up numbers, drawn without Spark."""
    import pyarrow as pa
    from deltalake import write_deltalake

    lake = tmp_path_factory.mktemp("drawn")
    minutes = [datetime(2026, 3, 1, 12, tzinfo=UTC) + timedelta(minutes=number) for number in range(90)]
    day = {"queue": "emails", "name": "welcome", "day": "2026-03-01"}
    percentiles = {f"{what}_p{p}_ms": p * 1.5 for what in ("wait", "run", "total") for p in (50, 95, 99)}
    clusters = {"cluster": "5be1c1d0", "reason": "unrecoverable", "error_type": "ValueError", "fingerprint": "no <n>"}
    tables: dict[str, list[dict[str, Any]]] = {
        "gold/throughput": [
            day | {"minute": minute, "completed": 500 + number * 7, "dead": number % 5, "cancelled": 1, "failures": 3}
            for number, minute in enumerate(minutes)
        ],
        "gold/latency": [day | {"minute": minute, "jobs": 10} | percentiles for minute in minutes],
        "gold/failures": [day | {"minute": minutes[0], "fingerprint": "no <n>", "failures": 9, "sample": "no 5"}],
        "gold/slo": [
            day
            | {"jobs": 110, "completed": 98, "dead": 2, "cancelled": 10, "first_try": 90}
            | {"within_1s": 80, "within_10s": 95, "within_60s": 98}
        ],
        "gold/dlq_clusters": [day | clusters | {"letters": 2, "dead": 1}],
        "gold/repairs": [
            day | {"repaired_at": minutes[0], "repair": "r1", "cluster": "5be1c1d0", "outcome": outcome}
            for outcome in ("completed", "pending")
        ],
        "gold/violations": [
            day | {"stream": "jobs", "field": "amount", "rule": "min", "sample": "-1", "sample_job_id": "j", "jobs": 3}
        ],
        "silver/jobs": [{"created_at": minute, "done_at": minute + timedelta(minutes=3)} for minute in minutes],
    }
    state = LakeVersion()
    for table, rows in tables.items():
        write_deltalake(str(lake / table), pa.Table.from_pylist(rows))
        state.tables[table] = 0
    state.publish(lake)
    return write_report(lake, lake / "report.html", now=minutes[-1])


def test_the_plots_are_drawn_without_spark(drawn: Path) -> None:
    page = drawn.read_text()
    assert page.count("<svg") == 6
    for words in ("Repairs", "<code>r1</code>", "Contract violations", "amount", "Dead letters", "5be1c1d0"):
        assert words in page
    assert "98.00%" in page
    assert "NaN" not in page
    assert "inf" not in page.lower().replace("info", "")


@pytest.mark.parametrize(
    ("span_secs", "bucket_secs"),
    [(0, 0.1), (9, 0.1), (15, 0.2), (45, 0.5), (90, 1), (600, 10), (5400, 60), (86_400, 1800), (30 * 86_400, 43_200)],
)
def test_a_point_stands_for_a_time_that_fits_the_span(span_secs: float, bucket_secs: float) -> None:
    assert bucket_of(span_secs) == bucket_secs


def test_marks_on_a_time_axis_are_round() -> None:
    noon = datetime(2026, 3, 1, 12, tzinfo=UTC).timestamp()
    assert time_marks(noon + 1, noon + 11) == [noon + 2, noon + 4, noon + 6, noon + 8, noon + 10]
    assert time_marks(noon - 60, noon + 3600) == [noon + minutes * 60 for minutes in (0, 10, 20, 30, 40, 50, 60)]
    assert time_marks(noon, noon) == [noon]


@pytest.mark.parametrize(
    ("span_secs", "points", "labels"),
    [
        (0.1, 2, ["12:00:00.3", "12:00:00.4"]),
        (0.5, 2, ["12:00:00.3", "12:00:00.4", "12:00:00.5", "12:00:00.6", "12:00:00.7", "12:00:00.8"]),
        (60, 2, ["12:00:10", "12:00:20", "12:00:30", "12:00:40", "12:00:50", "12:01:00"]),
        (86_400, 49, ["18:00", "02 Mar", "06:00", "12:00"]),
        (3 * 86_400, 73, ["02 Mar", "12:00", "03 Mar", "12:00", "04 Mar", "12:00"]),
        (6 * 86_400, 73, ["02 Mar", "03 Mar", "04 Mar", "05 Mar", "06 Mar", "07 Mar"]),
    ],
)
def test_marks_of_a_time_axis_differ_and_name_the_day(span_secs: float, points: int, labels: list[str]) -> None:
    start = datetime(2026, 3, 1, 12, tzinfo=UTC).timestamp() + 0.3
    line = Series("n", [(start + span_secs * number / (points - 1), 1.0) for number in range(points)])
    elements = line_chart("t", "jobs", [line]).elements
    assert re.findall(r'y="248.0"[^>]*>([^<]*)<', elements) == labels


@pytest.mark.parametrize(
    ("most", "ticks"), [(1, ["0", "1"]), (3, ["0", "1", "2", "3"]), (0.5, ["0", "0.1", "0.2", "0.3", "0.4", "0.5"])]
)
def test_an_axis_of_counts_has_whole_ticks(most: float, ticks: list[str]) -> None:
    counted = Series("open", [(0.0, 0.0), (60.0, most)])
    forecast = Series("expected", [(60.0, most), (120.0, most / 3)], dashed=True)
    elements = line_chart("t", "jobs", [counted, forecast]).elements
    assert re.findall(r'text-anchor="end">([\d.]+)</text>', elements) == ticks


@pytest.mark.parametrize(
    ("low", "top", "ticks"),
    [
        (1100, 1900, ["1k", "2k"]),
        (1000, 1000, ["1k", "2k"]),
        (3, 40, ["2", "5", "10", "20", "50"]),
        (0.5, 900, ["0.1", "1", "10", "100", "1k"]),
    ],
)
def test_a_logarithmic_axis_ends_near_its_values(low: float, top: float, ticks: list[str]) -> None:
    elements = line_chart("t", "ms", [Series("p50", [(0.0, low), (60.0, top)])], log=True).elements
    assert re.findall(r'text-anchor="end">([\d.]+k?)</text>', elements) == ticks


def test_a_report_shows_one_queue_and_a_recent_time(tmp_path: Path) -> None:
    import pyarrow as pa
    from deltalake import write_deltalake

    start = datetime(2026, 3, 1, tzinfo=UTC)
    counts = {"completed": 30, "dead": 0, "cancelled": 0, "jobs": 30, "first_try": 30}
    counts |= dict.fromkeys(("within_1s", "within_10s", "within_60s"), 30)
    state = LakeVersion(trimmed={"events": {"it's": 3, "b": 4}})
    tables: dict[str, list[dict[str, Any]]] = {"gold/throughput": [], "gold/slo": [], "silver/jobs": []}
    for queue in ("it's", "b"):
        for day in range(4):
            at = start + timedelta(days=day)
            common = counts | {"queue": queue, "name": "n", "day": f"{at:%Y-%m-%d}"}
            tables["gold/throughput"].append(common | {"minute": at})
            tables["gold/slo"].append(common)
            tables["silver/jobs"].append({"queue": queue, "created_at": at, "done_at": at if day else None})
    for table, rows in tables.items():
        write_deltalake(str(tmp_path / table), pa.Table.from_pylist(rows))
        state.tables[table] = 0
    state.publish(tmp_path)
    end = start + timedelta(days=3)
    page = write_report(tmp_path, tmp_path / "all.html", now=end).read_text()
    assert "<b>240</b><span>jobs ended" in page
    assert "3 events of it&#x27;s, " not in page
    assert "4 events of b, 3 events of it&#x27;s" in page
    page = write_report(tmp_path, tmp_path / "one.html", queues=["it's"], since=timedelta(days=2), now=end).read_text()
    assert "<b>90</b><span>jobs ended" in page
    assert "since 2026-03-02 00:00" in page
    assert "4 events of b" not in page
    assert page.count("<td>2026-03-0") == 3
    assert "Backlog of 1" in page  # the job of the first day, which is not shown, has not ended


def test_marks_beyond_the_last_time_that_python_knows_have_labels() -> None:
    last = datetime.max.replace(tzinfo=UTC).timestamp()
    line = Series("n", [(last - 9e9, 1.0), (last, 2.0), (last + 9e9, 3.0)])
    assert "<text" in line_chart("t", "jobs", [line]).elements


def test_each_point_of_an_axis_of_tenths_names_its_own_time() -> None:
    line = Series("n", [(1_772_366_400.0 + number / 10, 1.0) for number in range(3)])
    elements = line_chart("t", "jobs", [line]).elements
    assert re.findall(r"<title>(\S+)", elements) == ["12:00:00.0", "12:00:00.1", "12:00:00.2"]


def test_seconds_are_shown_if_all_happened_in_seconds(tmp_path: Path) -> None:
    import pyarrow as pa
    from deltalake import write_deltalake

    start = datetime(2026, 3, 1, 12, 0, 58, tzinfo=UTC)  # over the change of the minute
    ends = [
        {
            "ended_at": start + timedelta(milliseconds=40 * number),
            "outcome": "dead" if number % 50 == 0 else "completed",
            "wait_ms": number,
            "run_us": 1000 * number,
        }
        for number in range(200)
    ]
    minute = {"queue": "q", "name": "n", "day": "2026-03-01", "completed": 100, "dead": 0, "cancelled": 0}
    tables = {
        "gold/ends": ends,
        "gold/throughput": [minute | {"minute": start.replace(second=0)}],
        "silver/jobs": [{"created_at": one["ended_at"], "done_at": one["ended_at"]} for one in ends],
    }
    state = LakeVersion()
    for table, rows in tables.items():
        write_deltalake(str(tmp_path / table), pa.Table.from_pylist(rows))
        state.tables[table] = 0
    state.publish(tmp_path)
    _, rows, _ = _over_time(Figures(tmp_path, state))
    rows.sort(key=lambda row: row["bucket"])
    assert sum(row["completed"] + row["dead"] for row in rows) == 200
    assert [(row["bucket"], row["completed"], row["dead"]) for row in rows[:2]] == [
        (int(start.timestamp() * 10), 2, 1),
        (int(start.timestamp() * 10) + 1, 2, 0),
    ]
    # Of the waits 123 and 124 ms, and of runs of the same length.
    assert rows[49]["wait_p50_ms"] == pytest.approx(123.5, abs=1)
    assert rows[49]["run_p99_ms"] == pytest.approx(124, abs=1)
    page = write_report(tmp_path, tmp_path / "report.html").read_text()
    assert "Ended jobs per second" in page
    titles = re.findall(r"<title>(12:00:58\.0\ncompleted[^<]*)</title>", page)
    assert titles[0] == "12:00:58.0\ncompleted: 20 jobs/s\ndead: 10 jobs/s\ncancelled: 0 jobs/s"
    assert "12:01:00" in page
    assert "NaN" not in page


def test_a_day_is_shown_with_a_point_for_many_minutes(tmp_path: Path) -> None:
    import pyarrow as pa
    from deltalake import write_deltalake

    start = datetime(2026, 3, 1, tzinfo=UTC)
    rows = [
        {"queue": "q", "minute": start + timedelta(minutes=number), "completed": 30, "dead": 0, "cancelled": 0}
        for number in range(1440)
    ]
    state = LakeVersion()
    write_deltalake(str(tmp_path / "gold/throughput"), pa.Table.from_pylist(rows))
    state.tables["gold/throughput"] = 0
    state.publish(tmp_path)
    page = write_report(tmp_path, tmp_path / "report.html").read_text()
    assert page.count("completed: 30 jobs/min") == 48


def test_a_lake_that_is_none_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a lake yet"):
        write_report(tmp_path, tmp_path / "report.html")


def look_at(page: Path, folder: Path) -> tuple[Path, str]:
    """A screenshot of a page in Chromium, and what its console says."""
    browser = require("chromium")
    picture = folder / "report.png"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1000,2600"]
    # It must not call home: a test talks to nobody but this machine.
    options += ["--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
    options.append(f"--user-data-dir={folder / 'profile'}")
    said = subprocess.run(
        [browser, *options, "--enable-logging=stderr", f"--screenshot={picture}", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=90,
        check=True,
    ).stderr
    return picture, "\n".join(line for line in said.splitlines() if "CONSOLE" in line)


def test_a_real_browser_shows_the_plots_without_an_error(drawn: Path, tmp_path: Path) -> None:
    picture, console = look_at(drawn, tmp_path)
    assert console == ""
    pixels = pixels_of(picture)
    # Three lines across the page in the first colours, and the bars in the second.
    for number, least in ((0, 500), (1, 5_000), (2, 200)):
        assert count_colour(pixels, COLOURS[number]) > least, COLOURS[number]


def test_what_is_looked_for_would_be_seen(drawn: Path, tmp_path: Path) -> None:
    page = tmp_path / "broken.html"
    # Without its policy, which forbids scripts.
    text = re.sub(r"<svg.*?</svg>|<meta http-equiv[^>]*>", "", drawn.read_text(), flags=re.DOTALL)
    page.write_text(text.replace("</body>", "<script>nothing.here()</script></body>"))
    picture, console = look_at(page, tmp_path)
    assert "nothing is not defined" in console
    assert count_colour(pixels_of(picture), COLOURS[1]) < 500
