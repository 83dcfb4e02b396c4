"""Tables that fit the terminal: a narrow one gets fewer columns, or one list instead of two side by side.

Columns are dropped whole, because a truncated number is wrong. Output to a pipe is never shortened.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from tampu.cli.output import cell

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult


def table(*columns: str, title: str | None = None, numbers: tuple[str, ...] = ()) -> Table:
    """Return a table in the common style; columns named in `numbers` are right-aligned."""
    made = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")
    for column in columns:
        made.add_column(column, justify="right" if column in numbers else "left", no_wrap=column in numbers)
    return made


def fact_table(facts: Iterable[tuple[str, object]]) -> Table:
    """Return a table of labels and values; values that are None or empty are left out."""
    made = table("", "")
    made.show_header = False
    for label, value in facts:
        if value not in (None, ""):
            made.add_row(Text(label, style="dim"), value if isinstance(value, Text) else cell(value))
    return made


class FittingTable:
    """A table that drops the columns in `spare`, in this order, until the rest fits."""

    def __init__(self, *columns: str, numbers: tuple[str, ...] = (), spare: tuple[str, ...] = ()) -> None:
        self._columns = columns
        self._numbers = numbers
        self._spare = spare
        self._rows: list[tuple[RenderableType, ...]] = []

    def add_row(self, *cells: RenderableType) -> None:
        """Add a row with one cell per column."""
        self._rows.append(cells)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for count in range(len(self._spare) + 1):
            made = self._without(frozenset(self._spare[:count]))
            if _fits(made, console, options):
                break
        yield made

    def _without(self, left_out: frozenset[str]) -> Table:
        shown = [place for place, column in enumerate(self._columns) if column not in left_out]
        made = table(*(self._columns[place] for place in shown), numbers=self._numbers)
        for row in self._rows:
            made.add_row(*(row[place] for place in shown))
        return made


class Facts:
    """Labels with values: two lists side by side, or one below the other if the terminal is narrow."""

    def __init__(self, left: list[tuple[str, Text]], right: list[tuple[str, Text]]) -> None:
        self._left = left
        self._right = right

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        beside = table("", "", "", "")
        beside.show_header = False
        for left, right in zip(self._left, self._right, strict=True):
            beside.add_row(Text(left[0], style="dim"), left[1], Text(f"    {right[0]}", style="dim"), right[1])
        yield beside if _fits(beside, console, options) else fact_table([*self._left, *self._right])


def _fits(made: Table, console: Console, options: ConsoleOptions) -> bool:
    boundless = options.update(max_width=10_000)
    return Measurement.get(console, boundless, made).maximum <= options.max_width
