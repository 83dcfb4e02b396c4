"""Tables that fit the terminal: a narrow one gets fewer columns, or one list instead of two side by side.

Columns are dropped whole, because a truncated number is wrong, and long words continue on the next line, because a
truncated ID cannot be copied. Output to a pipe is never shortened.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.box import ROUNDED
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from tampu.cli.output import cell

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.console import Console, ConsoleOptions, JustifyMethod, RenderableType, RenderResult


#: Minimum width of a column that may be shortened, in characters.
SHORTEST = 24


def table(*columns: str, numbers: tuple[str, ...] = (), whole: tuple[str, ...] = ()) -> Table:
    """Return a table in the common style. Columns in `numbers` are right-aligned; they and `whole` never wrap."""
    made = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        justify: JustifyMethod = "right" if column in numbers else "left"
        made.add_column(column, justify=justify, no_wrap=column in (*numbers, *whole), overflow="fold")
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
    """A table that drops the columns in `spare`, in this order, until the rest fits.

    Text in the column `cut` is shortened to one line. Columns in `whole` are wrapped only if the table does not fit
    even without all columns in `spare`. `note` is a column and a line to show below the table if that column is shown.
    `is_boxed` draws lines around the cells.
    """

    def __init__(
        self,
        *columns: str,
        numbers: tuple[str, ...] = (),
        whole: tuple[str, ...] = (),
        spare: tuple[str, ...] = (),
        cut: str | None = None,
        note: tuple[str, str] | None = None,
        is_boxed: bool = False,
    ) -> None:
        self._columns, self._numbers, self._whole, self._spare = columns, numbers, whole, spare
        self._cut, self._note, self._is_boxed = cut, note, is_boxed
        self._rows: list[tuple[RenderableType, ...]] = []

    def add_row(self, *cells: RenderableType) -> None:
        """Add a row with one cell per column."""
        self._rows.append(cells)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for count in range(len(self._spare) + 1):
            left_out = self._spare[:count]
            if _fits(self._without(left_out, SHORTEST), console, options):
                yield self._without(left_out)
                break
        else:  # wrap a long ID: it would leave no room for the columns next to it
            yield self._without(left_out, wraps=True)
        if self._note is not None and self._note[0] not in left_out:
            yield Text(self._note[1], style="dim")

    def _without(self, left_out: Sequence[str], max_width: int | None = None, *, wraps: bool = False) -> Table:
        """Return the table without some columns. `max_width` is the width of the column that may be shortened."""
        shown = [column for column in self._columns if column not in left_out]
        made = table(*shown, numbers=self._numbers, whole=() if wraps else self._whole)
        if self._is_boxed:
            made.box, made.border_style, made.pad_edge = ROUNDED, "dim", True
        for row in self._rows:
            cells = zip(self._columns, row, strict=True)
            made.add_row(*(self._cell(content, column, max_width) for column, content in cells if column in shown))
        return made

    def _cell(self, content: RenderableType, column: str, max_width: int | None) -> RenderableType:
        if column != self._cut or not isinstance(content, Text):
            return content
        short = content.copy()
        short.no_wrap, short.overflow = True, "ellipsis"
        if max_width is not None:
            short.truncate(max_width)
        return short


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
