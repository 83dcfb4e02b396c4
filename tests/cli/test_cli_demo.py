"""`tampu demo` runs a whole day, behind a pipe and in a terminal, and loses no job."""

from __future__ import annotations

import io
import sys
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from cli.lab import Terminal, invoke, run_program
from tampu import Queue
from tampu.cli.commands.demo_shop import DayClock
from tampu.cli.commands.demo_view import DayView, Story, Tally, TaskTally, _activation, summary

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAMPU_CACHE", str(tmp_path / "cache"))


def test_the_demo_prints_its_story_as_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    done = run_program("demo", "--no-spark", "--hour", "0.15")
    assert (done.code, done.err) == (0, "")
    assert "\x1b" not in done.out
    for words in ("The shop opens", "Newsletter", "payment provider is down", "dead payments replayed", "0 lost"):
        assert words in done.out
    # The commands it suggests work.
    [export] = [line for line in done.out.splitlines() if "export TAMPU_URL=" in line]
    monkeypatch.setenv("TAMPU_URL", export.partition("=")[2])
    [why] = [line for line in done.out.splitlines() if "tampu job why" in line]
    told = invoke("job", "why", why.split()[3], "--json").json
    assert told["state"] == "done"
    assert "dlq" in [step["what"] for step in told["steps"]]
    [letter] = invoke("dlq", "peek", "images", "--json").json
    assert letter["payload"]["path"] == "/photos/corrupt.jpg"
    assert invoke("doctor").code == 0


def test_the_demo_is_live_in_a_terminal() -> None:
    with Terminal("demo", "--no-spark", "--hour", "0.2") as terminal:
        terminal.until("jobs done")
        terminal.until("payments")
        assert terminal.wait() == 0
        terminal.until("0 lost")
        assert "Traceback" not in terminal.shown
        assert "The demo's data has been kept. To look at it:" in terminal.shown


def test_nothing_in_the_tables_of_the_demo_is_cut_off_in_60_columns() -> None:
    tally = Tally([Queue(name) for name in ("orders", "payments", "emails")])
    tally.by_queue["emails"]["completed"] = 15_000
    tally.tasks["ask_for_review"] = TaskTally(Counter(completed=15_000, failed=103), [18_000])
    console = Console(width=60, height=40, file=io.StringIO())
    day = DayView(DayClock(3600), tally, Story(is_live=True), "Valkey 9.1.2")
    end = summary({"ask_for_review": 15_000}, tally, replayed=0, secs=1, url="embedded://", is_live=True)
    for shown in (day, end):
        with console.capture() as captured:
            console.print(shown)
        table = [line for line in captured.get().splitlines() if "│" in line]
        assert any("15,000" in line for line in table)
        assert not [line for line in table if "…" in line]


def test_ctrl_c_ends_the_demo_with_one_line() -> None:
    with Terminal("demo", "--no-spark", "--hour", "10") as terminal:
        terminal.until("The shop opens")
        terminal.press("\x03")
        assert terminal.wait() == 130
        assert "Traceback" not in terminal.shown
        assert terminal.shown.rstrip().endswith("tampu: interrupted")


def test_the_demo_says_how_to_activate_the_virtual_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").touch()
    monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv" / "bin" / "python"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")
    assert _activation() == ["source .venv/bin/activate"]
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert _activation() == [f"source {tmp_path}/.venv/bin/activate"]
    (tmp_path / ".venv" / "bin" / "tampu").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / ".venv" / "bin"))
    assert _activation() == []
