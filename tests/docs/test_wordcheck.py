"""The word check finds odd wording, and only that."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "scripts"))
import wordcheck


def found(tmp_path: Path, text: str) -> list[str]:
    page = tmp_path / "page.md"
    page.write_text(text)
    return [match.text for match in wordcheck.matches(page)]


@pytest.mark.parametrize(
    ("sentence", "phrase"),
    [
        ("The photo that is none, with its traceback.", "that is none"),
        ("It is no lock: whoever lives renews his lease.", "is no lock"),
        ("It starts a server of its own.", "of its own"),
        ("Who finishes is told.", "is told"),
        ("Wait so long for its result.", "so long"),
        ("Fires of a leader that died are made up for.", "made up for"),
        ("A worker that stood still asks again.", "stood still"),
        ('"""What a handler returned."""', '"""What '),
    ],
)
def test_an_odd_sentence_is_found(tmp_path: Path, sentence: str, phrase: str) -> None:
    assert phrase in found(tmp_path, f"A good sentence.\n{sentence}\n")


@pytest.mark.parametrize(
    "sentence",
    [
        "There is no visibility timeout to set.",
        "The key is no longer needed, so long as a worker is alive.",
        "It tells all workers to stop and starts its own server.",
        "The server holds no more than 100 jobs, so many that it must be sharded.",
    ],
)
def test_a_plain_sentence_is_not_found(tmp_path: Path, sentence: str) -> None:
    assert found(tmp_path, sentence) == []


def test_an_escaped_line_and_a_generated_table_are_skipped(tmp_path: Path) -> None:
    assert found(tmp_path, "a server of its own <!-- wordcheck: ok -->") == []
    table = "<!-- table: x -->\n| a server of its own |\n<!-- /table -->\n"
    assert found(tmp_path, table) == []
    assert found(tmp_path, f"{table}a server of its own") == ["of its own"]


def test_the_project_is_clean_where_it_is_enforced(capsys: pytest.CaptureFixture[str]) -> None:
    assert wordcheck.main([]) == 0, capsys.readouterr().out


def test_a_match_names_the_place_and_the_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text("Good.\nNobody knows.\n")
    assert wordcheck.main([str(page)]) == 1
    assert capsys.readouterr().out == f"{page}:2: 'Nobody': name the process or the person\n"
