"""Plots as SVG, drawn by hand: no library, nothing fetched, readable in light and dark. Pure functions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

WIDTH, HEIGHT = 860, 260
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 28, 34
#: Colours by position; those of Okabe and Ito, which the colour-blind can tell apart.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")


@dataclass(frozen=True)
class Series:
    """A named line; x in epoch seconds, y None where there is nothing."""

    name: str
    points: Sequence[tuple[float, float | None]]
    dashed: bool = False


def line_chart(title: str, unit: str, series: Sequence[Series], *, log: bool = False) -> str:
    """Lines over time, as a figure with its legend."""
    ys = [y for line in series for _, y in line.points if y is not None]
    xs = [x for line in series for x, _ in line.points]
    if not ys:
        return _figure(title, '<p class="empty">nothing yet</p>')
    low_x, high_x = min(xs), max(xs)
    if high_x == low_x:
        high_x = low_x + 60
    floor = max(min(y for y in ys if y > 0), 0.01) if log and any(y > 0 for y in ys) else 0.0
    ticks = _log_ticks(floor, max(ys)) if floor else _ticks(max(ys))
    top = ticks[-1]

    def px(x: float) -> float:
        return LEFT + (x - low_x) / (high_x - low_x) * (WIDTH - LEFT - RIGHT)

    def py(y: float) -> float:
        if floor:
            share = math.log(max(y, ticks[0]) / ticks[0]) / math.log(top / ticks[0]) if top > ticks[0] else 0.5
        else:
            share = y / top
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    parts = [_y_axis(ticks, py, unit), _x_axis(low_x, high_x, px)]
    for number, line in enumerate(series):
        parts.append(_path(line, COLOURS[number % len(COLOURS)], px, py))
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'
    return _figure(title, svg + _legend([line.name for line in series]))


def bar_chart(title: str, bars: Sequence[tuple[str, float]]) -> str:
    """Bars side by side, the longest first, with their numbers."""
    if not bars:
        return _figure(title, '<p class="empty">none</p>')
    most = max(value for _, value in bars) or 1
    height = 26 * len(bars) + 6
    label_width = 380
    parts = []
    for number, (label, value) in enumerate(bars):
        y = 4 + number * 26
        width = max(value / most * (WIDTH - label_width - 90), 1)
        shown = label if len(label) <= 58 else label[:57] + "…"
        parts.append(
            f'<text x="{label_width - 10}" y="{y + 15}" text-anchor="end"><title>{escape(label)}</title>'
            f'{escape(shown)}</text><rect x="{label_width}" y="{y}" width="{width:.1f}" height="20" rx="2" '
            f'fill="{COLOURS[1]}"/><text x="{label_width + width + 8:.1f}" y="{y + 15}">{value:,.0f}</text>'
        )
    svg = f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'
    return _figure(title, svg)


def _figure(title: str, body: str) -> str:
    return f"<figure><figcaption>{escape(title)}</figcaption>{body}</figure>"


def _legend(names: Sequence[str]) -> str:
    if len(names) < 2:
        return ""
    items = (
        f'<span><i style="background:{COLOURS[number % len(COLOURS)]}"></i>{escape(name)}</span>'
        for number, name in enumerate(names)
    )
    return f'<div class="legend">{"".join(items)}</div>'


def _path(line: Series, colour: str, px: object, py: object) -> str:
    assert callable(px) and callable(py)  # noqa: S101, PT018 - for the type checker
    commands: list[str] = []
    pen = "M"
    count = 0
    for x, y in line.points:
        if y is None:
            pen = "M"
            continue
        commands.append(f"{pen}{px(x):.1f} {py(y):.1f}")
        pen = "L"
        count += 1
    if count == 1:
        x, y = next((x, y) for x, y in line.points if y is not None)
        return f'<circle cx="{px(x):.1f}" cy="{py(y):.1f}" r="3" fill="{colour}"/>'
    dash = ' stroke-dasharray="5 4"' if line.dashed else ""
    return f'<path d="{" ".join(commands)}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>'


def _y_axis(ticks: Sequence[float], py: object, unit: str) -> str:
    assert callable(py)  # noqa: S101 - for the type checker
    lines = (
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{py(tick):.1f}" y2="{py(tick):.1f}"/>'
        f'<text x="{LEFT - 8}" y="{py(tick) + 4:.1f}" text-anchor="end">{_number(tick)}</text>'
        for tick in ticks
    )
    return "".join(lines) + f'<text class="unit" x="4" y="{TOP - 16}">{escape(unit)}</text>'


def _x_axis(low: float, high: float, px: object) -> str:
    assert callable(px)  # noqa: S101 - for the type checker
    form = "%H:%M:%S" if high - low < 600 else "%H:%M" if high - low < 86400 * 2 else "%d %b"
    marks = []
    for number in range(6):
        x = low + (high - low) * number / 5
        label = datetime.fromtimestamp(x, UTC).strftime(form)
        anchor = "end" if number == 5 else "middle"  # the last would stand half outside
        marks.append(f'<text x="{px(x):.1f}" y="{HEIGHT - 12}" text-anchor="{anchor}">{label}</text>')
    return "".join(marks)


def _ticks(most: float) -> list[float]:
    """Round numbers from 0 to at least `most`."""
    step = 10.0 ** math.floor(math.log10(most)) if most > 0 else 1.0
    for factor in (0.2, 0.5, 1, 2):
        if most / (step * factor) <= 6:
            step *= factor
            break
    return [number * step for number in range(max(math.ceil(most / step), 1) + 1)]


def _log_ticks(least: float, most: float) -> list[float]:
    low, high = math.floor(math.log10(least)), math.ceil(math.log10(max(most, least)))
    return [10.0**power for power in range(low, max(high, low + 1) + 1)]


def _number(value: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"
