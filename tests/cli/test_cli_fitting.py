"""Tables at any terminal width: a column is shown whole or not at all."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.text import Text

from cli.lab import Terminal, invoke
from cli.shop import QUEUE, Filled
from tampu.cli.tables import Facts, FittingTable


def shown(renderable: object, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(renderable)
    written: str = console.file.getvalue()  # type: ignore[attr-defined]
    return [line.rstrip() for line in written.splitlines()]


@pytest.fixture
def counts() -> FittingTable:
    made = FittingTable(
        "queue", "waiting", "bytes", "done", numbers=("waiting", "bytes", "done"), spare=("bytes", "done")
    )
    made.add_row("emails", "1,234", "12 KiB", "99/s")
    return made


@pytest.mark.parametrize(
    ("width", "lines"),
    [
        (80, ["queue   waiting   bytes  done", "emails    1,234  12 KiB  99/s"]),
        (29, ["queue   waiting   bytes  done", "emails    1,234  12 KiB  99/s"]),
        (28, ["queue   waiting  done", "emails    1,234  99/s"]),
        (20, ["queue   waiting", "emails    1,234"]),
    ],
)
def test_a_narrow_terminal_gets_fewer_columns(counts: FittingTable, width: int, lines: list[str]) -> None:
    assert shown(counts, width) == lines


def test_long_words_are_folded_except_in_the_column_that_may_be_cut() -> None:
    made = FittingTable("id", "name", "error", whole=("id",), cut="error", note=("error", "a note"))
    made.add_row(
        Text("01ABCDEF"), Text("a_name_of_thirty_characters_..."), Text("a text of more than sixty characters " * 2)
    )
    assert shown(made, 48) == [
        "id        name               error",
        "01ABCDEF  a_name_of_thirty_  a text of more tha…",
        "          characters_...",
        "a note",
    ]


def test_an_id_that_fills_the_line_is_folded_and_hides_no_column() -> None:
    made = FittingTable("id", "name", "running for", "worker", whole=("id",), spare=("worker",))
    made.add_row(Text("x" * 59), Text("charge"), Text("12 min"), Text("host:1"))
    heading, first, *_ = lines = shown(made, 60)
    assert heading.split() == ["id", "name", "running", "for"]
    assert first.split()[1:] == ["charge", "12", "min"]
    assert "".join(line.split()[0] for line in lines[1:]) == "x" * 59


def test_a_note_is_shown_only_with_its_column(counts: FittingTable) -> None:
    counts._note = ("done", "done: per second")
    assert shown(counts, 28)[-1] == "done: per second"
    assert shown(counts, 20)[-1] == "emails    1,234"


def test_facts_are_side_by_side_or_below_each_other() -> None:
    facts = Facts([("waiting", Text("1")), ("dead", Text("2"))], [("added", Text("3/s")), ("memory", Text("4 KiB"))])
    assert shown(facts, 60) == ["waiting  1      added   3/s", "dead     2      memory  4 KiB"]
    assert shown(facts, 20) == ["waiting  1", "dead     2", "added    3/s", "memory   4 KiB"]


@pytest.mark.parametrize("columns", [40, 80, 100, 140])
def test_a_summary_of_dead_letters_shows_whole_clusters_at_any_width(shop: Filled, columns: int) -> None:
    with Terminal("dlq", "summary", QUEUE, columns=columns) as terminal:
        assert terminal.wait() == 0
        for cluster in invoke("dlq", "summary", QUEUE, "--json").json:
            assert cluster["cluster"] in terminal.shown


@pytest.mark.parametrize(
    ("command", "text"),
    [(("inspect",), QUEUE), (("top", "--rounds", "1"), QUEUE), (("repeatable", "list", QUEUE), "daily")],
)
def test_the_main_columns_fit_into_40_characters(shop: Filled, command: tuple[str, ...], text: str) -> None:
    with Terminal(*command, columns=40) as terminal:
        assert terminal.wait() == 0
        assert text in terminal.shown
        assert "…" not in terminal.shown
