"""Everything published is generated from the file of a run: tables, plots and targets."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))
from bench.contestants import PeerFailed, Program  # noqa: E402
from bench.profile import draw, own_costs, tree  # noqa: E402
from bench.program.latency import percentiles  # noqa: E402
from bench.record import Record, new_record  # noqa: E402
from bench.runner import Measure, interleave  # noqa: E402

from bench import bars, report  # noqa: E402 - can only be imported after the path is set


@pytest.fixture
def record() -> Record:
    made = new_record("full", "Redis 8.6.3")
    made.rounds = 3
    made.contestants = {
        "tampu": {"versions": {"tampu": "0.1.0"}, "settings": {"adding": "as it is", "working": "batch=256"}},
        "chasquimq": {"versions": {"chasquimq": "1.3.0"}, "settings": {"adding": "", "working": ""}},
        "streaq": {"unavailable": "streaq 7.2.0 cannot be installed: no matching distribution"},
    }
    for number, ours, theirs, limit in ((0, 90_000.0, 10_000.0, 200_000.0), (1, 100_000.0, 12_500.0, 180_000.0)):
        made.add("worker-concurrent", "tampu", number, {"batch": 256}, {"rate": ours, "client_us": 6, "server_us": 4})
        made.add("worker-concurrent", "chasquimq", number, {}, {"rate": theirs, "client_us": 60, "server_us": 5})
        made.add("worker-concurrent", "bare loop", number, {}, {"rate": limit})
    made.add("worker-concurrent", "arq", 0, {}, {"error": "arq did not answer within 60 s: worker"})
    return made


def test_a_record_is_unchanged_after_saving_and_loading(record: Record, tmp_path: Path) -> None:
    record.save(tmp_path / "run.json")
    assert Record.load(tmp_path / "run.json") == record


def test_targets_compare_medians(record: Record) -> None:
    lines = bars.judge(record)
    assert lines == [
        "bar worker-concurrent ratio 8.44 needs 7 ok; cpu per job 10.0 us, chasquimq 65.0 us, ratio 6.50",
        "bar worker-concurrent-of-limit ratio 0.50 needs 0.6 short",
    ]
    assert [bar["holds"] for bar in record.bars] == [True, False]


def test_the_page_shows_figures_failures_and_missing_peers(record: Record) -> None:
    bars.judge(record)
    page = report.page(record)
    assert "| **tampu** | **95,000** |" in page
    assert "| chasquimq | 11,200 (8.4) |" in page
    assert "| arq | failed |" in page
    assert "streaq | could not be installed: streaq 7.2.0 cannot be installed: no matching distribution" in page
    assert "| `worker-concurrent-of-limit` | 0.50 | at least 0.6 | **missed** |" in page
    assert "## Spark" not in page, "the run has no Spark figures"


README = "before\n<!-- bench:begin -->\nold\n<!-- bench:end -->\nafter\n"


@pytest.fixture
def whole(record: Record) -> Record:
    """A run with a figure for each row of the README."""
    for name, factor in (("tampu", 1.0), ("chasquimq", 10.0)):
        figures = {"rate": 12_345 / factor, "client_us": 6 * factor, "server_us": 4.2 * factor}
        figures |= {"p50_ms": 0.51 * factor, "p99_ms": 1.7 * factor}
        for scenario in report.IN_README:
            if (scenario, name) != ("worker-default-def", "chasquimq"):
                record.add(scenario, name, 0, {}, figures)
        sizes = {"waiting_bytes": 184 - factor, "finished_bytes": 175 - factor, "delayed_bytes": 289 - factor}
        record.add("server-memory 100 B", name, 0, {}, sizes)
    return record


def test_only_the_table_of_the_readme_is_replaced(whole: Record) -> None:
    made = report.with_table(README, whole)
    assert made.startswith("before\n<!-- bench:begin -->\nWith default settings (`@queue.task`")
    assert made.endswith("<!-- bench:end -->\nafter\n")
    assert "old" not in made


def test_without_figures_in_the_run_the_table_stays_as_it_is(record: Record) -> None:
    assert report.with_table(README, record) == README


def test_the_default_settings_are_shown_with_cpu_latency_and_memory(whole: Record) -> None:
    made = report.readme_table(whole)
    assert "its result | **12,300 jobs/s**, 10 µs of CPU | 1,230 jobs/s (10.0), 102 µs |" in made
    assert "in threads | **12,300 jobs/s**, 10 µs | - |" in made
    assert "one caller | **p50 0.5 ms**, p99 1.7 ms | p50 5.1 ms, p99 17 ms |" in made
    assert "100 callers | **12,300 jobs/s**, p99 1.7 ms | 1,230 jobs/s (10.0), p99 17 ms |" in made
    assert "payload of 100 bytes | 183 / 174 / 288 bytes | **174 / 165 / 279 bytes** |" in made


def test_the_readme_has_the_rows_that_the_report_writes(whole: Record) -> None:
    def outline(text: str) -> list[str]:
        block = text.split("<!-- bench:begin -->")[1].split("<!-- bench:end -->")[0]
        lines = [line for line in block.splitlines() if line.startswith(("|", "With"))]
        is_head = ("| |", "|  |", "| jobs", "| ---")
        found = [line if line.startswith(is_head) else line.split(" | ")[0] for line in lines]
        return [re.sub(r"for [\d.]+:", "for VERSION:", line.replace("|  |", "| |")) for line in found]

    readme = (ROOT / "README.md").read_text()
    assert outline(readme) == outline(report.with_table(readme, whole))


def test_plots_are_well_formed(record: Record) -> None:
    for number in (1, 2):
        record.add(f"processes-{number}", "tampu", 0, {}, {"rate": 80_000.0 * number})
    drawn = report.plots(record)
    assert set(drawn) == {"worker-concurrent", "processes"}
    for svg in drawn.values():
        assert ET.fromstring(svg).tag.endswith("svg")


def test_contestants_take_turns_in_rotating_order() -> None:
    order: list[str] = []
    made = new_record("quick", "Redis 8.6.3")

    def contestant(name: str) -> Measure:
        return Measure("queue-add", name, lambda: order.append(name) or {"rate": 1.0})  # type: ignore[func-returns-value]

    interleave([contestant("a"), contestant("b"), contestant("c")], 3, made, lambda: order.append("empty"))
    assert "".join(name for name in order if name != "empty") == "abcbcacab"
    assert order[::2] == ["empty"] * 10
    assert made.values("queue-add", "b") == [1.0, 1.0, 1.0]


def test_a_contestant_that_fails_is_recorded_and_not_run_again() -> None:
    made = new_record("quick", "Redis 8.6.3")

    def fail() -> Any:
        raise PeerFailed("arq is gone")

    interleave([Measure("queue-add", "arq", fail)], 3, made, lambda: None)
    assert made.error("queue-add", "arq") == "arq is gone"
    assert len(made.samples) == 1


def test_a_program_that_cannot_start_reports_why() -> None:
    with pytest.raises(PeerFailed, match="nope exited with code 3 in startup: no such module"):
        Program(
            "nope", [sys.executable, "-c", "import sys; print('no such module', file=sys.stderr); sys.exit(3)"], "", 0
        )


def test_percentiles_are_in_milliseconds() -> None:
    found = percentiles([number / 1000 for number in range(1, 101)])
    assert found["p50_ms"] == pytest.approx(51)
    assert found["p99_ms"] == pytest.approx(100)
    assert found["max_ms"] == pytest.approx(100)


def test_a_flame_graph_shows_where_the_samples_are() -> None:
    folded = "main (a.py:1);work (tampu/b.py:7) 30\nmain (a.py:1);work (tampu/b.py:9);write (libc.so.6) 70"
    assert own_costs(folded) == [("write (libc.so.6)", 0.7), ("work (tampu/b.py)", 0.3)]
    svg = draw("worker", tree(folded))
    assert "write (libc.so.6): 70.0%" in svg
    ET.fromstring(svg)


def test_the_page_shows_cold_starts_with_their_cpu_time(record: Record) -> None:
    assert "## Cold start" not in report.page(record)
    for number, ours in enumerate((400.0, 420.0, 900.0)):
        record.add("cold-start", "tampu", number, {}, {"first_job_ms": ours, "cpu_ms": 250.0})
        record.add("cold-start", "celery", number, {}, {"error": "celery did not answer within 60 s: cold-start"})
    section = report.page(record).partition("## Cold start")[2].partition("\n## ")[0]
    assert "| tampu | 420 | 250 |" in section
    assert "celery |" not in section
