"""Draws charts as SVG without a library: lines and horizontal bars. The page provides the style sheet."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

WIDTH, HEIGHT = 860, 260
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 28, 34
BAR_STEP = 26
#: Lines with up to this many points show each point.
FEW_POINTS = 12
#: The last second that a datetime can hold.
LAST_SECS = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC).timestamp()
#: Charts with up to this many positions on the x axis show their values when the pointer is over them.
MAX_TOOLTIPS = 400
#: Colours by position: the Okabe-Ito palette, which colour-blind people can distinguish. A page may replace them by the
#: style of the classes `s0` to `s5`, for a dark background.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
#: Distances between two marks on a time axis, in seconds: from a tenth of a second to a month.
TIME_STEPS = (
    *(0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200),
    *(86_400, 2 * 86_400, 7 * 86_400, 14 * 86_400, 30 * 86_400),
)


@dataclass(frozen=True)
class Series:
    """A named line; y is None where a value is missing."""

    name: str
    points: Sequence[tuple[float, float | None]]
    dashed: bool = False


@dataclass(frozen=True)
class Bar:
    """A bar and its value as text. `spread` (lowest, highest) is drawn as a thin line over it."""

    label: str
    value: float
    text: str
    colour: str = COLOURS[1]
    spread: tuple[float, float] | None = None


@dataclass(frozen=True)
class Chart:
    """The elements of a drawing, `WIDTH` wide. The style sheet defines the classes `grid` and `spread`."""

    title: str
    elements: str = ""
    height: int = 0
    names: tuple[str, ...] = ()

    def figure(self) -> str:
        """Return the chart as part of an HTML page, with its legend."""
        caption = f"<figure><figcaption>{escape(self.title)}</figcaption>"
        if not self.elements:
            return f'{caption}<p class="empty">nothing yet</p></figure>'
        label = escape(self.title)
        svg = f'<svg viewBox="0 0 {WIDTH} {self.height}" role="img" aria-label="{label}">{self.elements}</svg>'
        items = (
            f'<span><i class="s{number % len(COLOURS)}" style="background:{COLOURS[number % len(COLOURS)]}"></i>'
            f"{escape(name)}</span>"
            for number, name in enumerate(self.names)
        )
        legend = f'<div class="legend">{"".join(items)}</div>' if len(self.names) > 1 else ""
        return f"{caption}{svg}{legend}</figure>"


class _Scale:
    """Maps values to shares of an axis that starts at 0, or is logarithmic, and ends at a round number.

    `whole` keeps fractions off a linear axis; `narrow` lets a logarithmic one end at 2 or 5 times a power of ten.
    """

    def __init__(self, values: Sequence[float], *, log: bool, whole: bool = False, narrow: bool = False) -> None:
        top = max(values)
        self._is_log = log and top > 0
        if self._is_log:
            bottom = max(min(value for value in values if value > 0), 0.01)
            # Of few decades also halves and fifths, or most of the plot would be empty. Bars start at a power of ten.
            factors = (1, 2, 5) if narrow and top / bottom < 100 else (1,)
            low, high = math.floor(math.log10(bottom)), math.ceil(math.log10(max(top, bottom)))
            steps = [10.0**power * factor for power in range(low, max(high, low + 1) + 1) for factor in factors]
            first = max(number for number, step in enumerate(steps) if step <= bottom * (1 + 1e-9))
            last = next(number for number, step in enumerate(steps) if step >= top * (1 - 1e-9) and number > first)
            self.ticks = steps[first : last + 1]
        else:
            step = 10.0 ** math.floor(math.log10(top)) if top > 0 else 1.0
            step *= next((factor for factor in (0.2, 0.5, 1, 2) if top / (step * factor) <= 6), 1)
            step = max(step, 1.0) if whole else step
            self.ticks = [number * step for number in range(max(math.ceil(top / step), 1) + 1)]

    def share(self, value: float) -> float:
        low, high = self.ticks[0], self.ticks[-1]
        return math.log(max(value, low) / low) / math.log(high / low) if self._is_log else value / high


def line_chart(
    title: str, unit: str, series: Sequence[Series], *, log: bool = False, x_label: Callable[[float], str] | None = None
) -> Chart:
    """Draw lines over time (x in epoch seconds), or over numbers with `x_label`."""
    ys = [y for line in series for _, y in line.points if y is not None]
    if not ys:
        return Chart(title)
    xs = sorted({x for line in series for x, _ in line.points})
    low_x, high_x = xs[0], xs[-1] if xs[-1] > xs[0] else xs[0] + 60
    marks = xs
    value_label = x_label
    if x_label is None:
        marks = time_marks(low_x, high_x)
        x_label, value_label = _mark_label(marks), _instant_label(xs)
    # Counts get whole ticks, such as 1 job and not 0.2 jobs. Dashed lines are forecasts, which have fractions.
    measured = [y for line in series for _, y in line.points if y is not None and not line.dashed]
    scale = _Scale(ys, log=log, whole=all(y == int(y) for y in measured), narrow=True)

    def px(x: float) -> float:
        return LEFT + (x - low_x) / (high_x - low_x) * (WIDTH - LEFT - RIGHT)

    def py(y: float) -> float:
        return HEIGHT - BOTTOM - scale.share(y) * (HEIGHT - TOP - BOTTOM)

    parts = [_text(4, TOP - 16, unit)]
    for tick in scale.ticks:
        parts += _line("grid", LEFT, WIDTH - RIGHT, py(tick), py(tick)), _text(LEFT - 8, py(tick) + 4, _si(tick), "end")
    for x in marks:
        # Centred, the last label would be cut off.
        anchor = "end" if px(x) > WIDTH - RIGHT - 24 else "start" if px(x) < LEFT + 4 else "middle"
        parts.append(_text(px(x), HEIGHT - 12, x_label(x), anchor))
    for number, line in enumerate(series):
        points = [None if y is None else (px(x), py(y)) for x, y in line.points]
        if not log and not line.dashed and number == 0:
            parts.append(_area(points, number, py(0.0)))
        parts.append(_path(points, number, dashed=line.dashed))
    if len(xs) <= MAX_TOOLTIPS and value_label is not None:
        parts += _tooltips(xs, series, unit, px, value_label)
    return Chart(title, "".join(parts), HEIGHT, tuple(line.name for line in series))


def bar_chart(title: str, bars: Sequence[Bar], *, log: bool = False, label_width: int = 380) -> Chart:
    """Draw horizontal bars in the given order; with `log`, on a logarithmic scale with labelled grid lines."""
    if not bars:
        return Chart(title)
    scale = _Scale([value for bar in bars for value in (bar.value, *(bar.spread or ()))], log=log)
    top = 26 if log else 4
    height = top + BAR_STEP * len(bars) + 2

    def px(value: float) -> float:
        return label_width + scale.share(value) * (WIDTH - label_width - 90)

    parts: list[str] = []
    for tick in scale.ticks if log else ():
        parts += _line("grid", px(tick), px(tick), top - 6, height), _text(px(tick), top - 11, _si(tick), "middle")
    for number, bar in enumerate(bars):
        y = top + number * BAR_STEP
        low, high = bar.spread or (bar.value, bar.value)
        shown = bar.label if len(bar.label) <= 58 else bar.label[:57] + "…"
        parts += (
            f"<g><title>{escape(bar.label)}: {escape(bar.text)}</title>",
            _text(label_width - 10, y + 15, shown, "end"),
            f'<rect class="bar" x="{label_width}" y="{y}" width="{max(px(bar.value) - label_width, 1):.1f}" '
            f'height="20" rx="2" fill="{bar.colour}"/></g>',
            _text(max(px(high), px(bar.value)) + 8, y + 15, bar.text),
        )
        if bar.spread:
            parts.append(_line("spread", px(low), px(high), y + 10, y + 10))
    return Chart(title, "".join(parts), height)


def time_marks(low: float, high: float) -> list[float]:
    """Return round times between two others, at most eight, in epoch seconds."""
    step = next((step for step in TIME_STEPS if (high - low) / step <= 7), TIME_STEPS[-1])
    # Tenths of a second are not exact as floats.
    first, last = math.ceil((low - 0.01) / step), math.floor((high + 0.01) / step)
    return [round(number * step, 1) for number in range(first, last + 1)]


def _tooltips(
    xs: Sequence[float],
    series: Sequence[Series],
    unit: str,
    px: Callable[[float], float],
    label: Callable[[float], str],
) -> list[str]:
    """Return an invisible column for each position; its title lists the values there."""
    values = [dict(line.points) for line in series]
    edges = [px(xs[0]), *((px(left) + px(right)) / 2 for left, right in pairwise(xs)), px(xs[-1])]
    columns = []
    for x, left, right in zip(xs, edges, edges[1:], strict=False):
        known = [
            f"{line.name}: {_value(found)} {unit}"
            for line, at in zip(series, values, strict=True)
            if (found := at.get(x)) is not None
        ]
        title = escape("\n".join([label(x), *known]))
        width = max(right - left, 1.0)
        columns.append(
            f'<rect class="hit" x="{left:.1f}" y="{TOP}" width="{width:.1f}" height="{HEIGHT - TOP - BOTTOM}" '
            f'fill="transparent"><title>{title}</title></rect>'
        )
    return columns


def _value(value: float) -> str:
    """Return a value with three digits, or all of a whole number."""
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def _colour(number: int) -> tuple[str, str]:
    """Return the class and the colour of a line."""
    return f"s{number % len(COLOURS)}", COLOURS[number % len(COLOURS)]


def _runs(points: Sequence[tuple[float, float] | None]) -> list[list[tuple[float, float]]]:
    """Return the points without gaps, as several lists."""
    runs = groupby(points, key=lambda point: point is not None)
    return [[point for point in run if point is not None] for has_value, run in runs if has_value]


def _area(points: Sequence[tuple[float, float] | None], number: int, bottom: float) -> str:
    style, colour = _colour(number)
    areas = [
        f"M{run[0][0]:.1f} {bottom:.1f} "
        + " ".join(f"L{x:.1f} {y:.1f}" for x, y in run)
        + f" L{run[-1][0]:.1f} {bottom:.1f}Z"
        for run in _runs(points)
    ]
    return f'<path class="area {style}" d="{" ".join(areas)}" fill="{colour}" fill-opacity="0.12" stroke="none"/>'


def _path(points: Sequence[tuple[float, float] | None], number: int, *, dashed: bool) -> str:
    style, colour = _colour(number)
    lines = [f"M{' L'.join(f'{x:.1f} {y:.1f}' for x, y in run)}" for run in _runs(points)]
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    path = (
        f'<path class="line {style}" d="{" ".join(lines)}" fill="none" stroke="{colour}" stroke-width="2" '
        f'stroke-linejoin="round"{dash}/>'
    )
    known = [point for point in points if point is not None]
    # A point between two gaps would not be seen.
    shown = known if len(known) <= FEW_POINTS and not dashed else [run[0] for run in _runs(points) if len(run) == 1]
    dots = (f'<circle class="dot {style}" cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in shown)
    return path + "".join(dots)


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _line(style: str, x1: float, x2: float, y1: float, y2: float) -> str:
    return f'<line class="{style}" x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}"/>'


def _mark_label(marks: Sequence[float]) -> Callable[[float], str]:
    """Return the labels of marks on a time axis: the parts that differ, and the day at midnight."""
    step = marks[1] - marks[0] if len(marks) > 1 else 60
    form = "%H:%M:%S.%f" if step < 1 else "%H:%M:%S" if step < 60 else "%H:%M"

    def label(x: float) -> str:
        return _clock(x, "%d %b" if step >= 60 and x % 86_400 == 0 else form)

    return label


def _instant_label(xs: Sequence[float]) -> Callable[[float], str]:
    form = "%d %b %H:%M" if xs[-1] - xs[0] >= 6 * 3600 else "%H:%M:%S"
    if any(round(x, 1) % 1 for x in xs):
        form = "%H:%M:%S.%f"
    return lambda x: _clock(x, form)


def _clock(x: float, form: str) -> str:
    """Return a time as text, with tenths of a second at most."""
    # A mark or a forecast can lie beyond the year 9999, if the clock of a job was wrong.
    text = datetime.fromtimestamp(round(min(x, LAST_SECS), 1), UTC).strftime(form)
    return text[:-5] if form.endswith("%f") else text


def _si(value: float) -> str:
    """Return the label of a tick with an SI suffix: 20k."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"
