"""`bench.lake`: the limit of growth is checked, and options that it cannot measure with are refused."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from types import ModuleType


@pytest.fixture
def lake() -> ModuleType:
    pytest.importorskip("pyspark")
    pytest.importorskip("deltalake")
    from bench import lake

    return lake


def figures_of(early: float, late: float) -> list[float]:
    # Rounds before the early ones are slow, because Java is cold; those in between do not count.
    return [*[99.0] * 10, *[early] * 10, *[50.0] * 5, *[late] * 10]


@pytest.mark.parametrize("name", ["seconds", "CPU seconds", "files"])
def test_growth_beyond_the_limit_is_exit_code_1(
    name: str, lake: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = {key: figures_of(2, 2) for key in ("seconds", "CPU seconds", "files", "files of tables")}
    assert lake.compare(figures, "ulid") == 0
    assert lake.compare(figures | {name: figures_of(2, 3)}, "ulid") == 0
    assert lake.compare(figures | {name: figures_of(2, 3.1)}, "ulid") == 1
    shown = capsys.readouterr()
    assert f"ulid: {name}: 2.00 -> 3.10 (1.55 x)" in shown.out
    assert shown.err == f"ulid: more than 1.5 x: {name}\n"


@pytest.mark.parametrize("options", [("--rounds", "29"), ("--rounds", "x"), ("--events", "1"), ("--history", "-1")])
def test_options_that_cannot_be_measured_are_refused(
    options: tuple[str, str], lake: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.lake", *options])
    with pytest.raises(SystemExit) as ended:
        lake.main()
    assert ended.value.code == 2
    assert f"argument {options[0]}: must be a whole number >= " in capsys.readouterr().err
