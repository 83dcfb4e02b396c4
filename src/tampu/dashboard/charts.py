"""Charts as SVG that stretches with the page. Their labels are HTML around them, so that text keeps its size."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple

from markupsafe import Markup

from tampu.dashboard.html import compact, short

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

WIDTH, HEIGHT = 600, 120


class Line(NamedTuple):
    """One series of a chart."""

    #: Class that gives it its colour.
    css: str
    name: str
    values: Sequence[float | None]


def spark(ok: Sequence[int], failed: Sequence[int], label: str) -> Markup:
    """Return small bars, 2 units apart: failures at the bottom, in another colour."""
    most = max((good + bad for good, bad in zip(ok, failed, strict=True)), default=0) or 1
    goods: list[str] = []
    bads: list[str] = []
    for number, (good, bad) in enumerate(zip(ok, failed, strict=True)):
        low = max(round(bad / most * 26), 2) if bad else 0
        if good:
            goods.append(f"M{2 * number + 1} {28 - low}v-{max(round(good / most * 26), 1)}")
        if bad:
            bads.append(f"M{2 * number + 1} 28v-{low}")
    return Markup(
        '<svg class="spark" viewBox="0 0 {width} 28" preserveAspectRatio="none" role="img" aria-label="{label}">'
        '<path class="base" d="M0 27.5h{width}"/><path class="ok" d="{ok}"/><path class="bad" d="{bad}"/></svg>'
    ).format(width=2 * len(ok), label=label, ok="".join(goods), bad="".join(bads))


def bars(title: str, minutes: Sequence[int], stacks: Sequence[Line], per: str = "minute") -> Markup:
    """Return stacked bars, the last series at the bottom."""
    totals = [sum(line.values[number] or 0 for line in stacks) for number in range(len(minutes))]
    top = _round_up(max(totals, default=0))
    step = WIDTH / len(minutes)
    base = [0.0] * len(minutes)
    shapes = []
    for line in reversed(stacks):
        path = []
        for number, value in enumerate(line.values):
            if value:
                height = max(value / top * HEIGHT, 1.5)
                x, y = number * step, HEIGHT - base[number]
                path.append(f"M{x:.1f} {y:.1f}h{step * 0.8:.2f}v-{height:.1f}h-{step * 0.8:.2f}z")
                base[number] += height
        shapes.append(Markup('<path class="fill {}" d="{}"/>').format(line.css, "".join(path)))
    label = f"{title}: highest {max(totals, default=0):,} per {per}, last {totals[-1] if totals else 0:,}"
    return _chart(title, label, minutes, stacks, shapes, top, compact, shift=0)


def lines(
    title: str, minutes: Sequence[int], series: Sequence[Line], unit: Callable[[float | None], str] = short
) -> Markup:
    """Return lines over an axis that starts at 0, with gaps where a value is missing."""
    top = _round_up(max((value for line in series for value in line.values if value is not None), default=0))
    step = WIDTH / max(len(minutes) - 1, 1)
    shapes = []
    for line in series:
        path, is_down = [], False
        for number, value in enumerate(line.values):
            if value is not None:
                path.append(f"{'L' if is_down else 'M'}{number * step:.1f} {HEIGHT - value / top * (HEIGHT - 2):.1f}")
                if not is_down:
                    path.append("h.5")  # a value between two gaps is a dot
            is_down = value is not None
        shapes.append(Markup('<path class="line {}" d="{}"/>').format(line.css, "".join(path)))
    last = ", ".join(f"{line.name} {unit(_last(line.values))}" for line in series)
    return _chart(title, f"{title}: now {last}", minutes, series, shapes, top, unit, shift=0.5)


def _chart(
    title: str,
    label: str,
    minutes: Sequence[int],
    series: Sequence[Line],
    shapes: list[Markup],
    top: float,
    unit: Callable[[float | None], str],
    shift: float,
) -> Markup:
    step = WIDTH / max(len(minutes) - (1 if shift else 0), 1)
    hits = []
    for number, minute in enumerate(minutes):
        values = [f"{line.name} {unit(value)}" for line in series if (value := line.values[number])]
        text = f"{_clock(minute)} UTC: {', '.join(values) or 'nothing'}"
        hit = Markup('<rect class="hit" x="{:.1f}" width="{:.2f}" height="{}"><title>{}</title></rect>')
        hits.append(hit.format(max((number - shift) * step, 0), step, HEIGHT, text))
    grid = Markup('<path class="grid" d="M0 .5H{w}M0 {h}H{w}"/>').format(w=WIDTH, h=HEIGHT / 2)
    svg = Markup('<svg viewBox="0 0 {} {}" preserveAspectRatio="none" role="img" aria-label="{}">{}</svg>').format(
        WIDTH, HEIGHT, label, Markup("").join([grid, *shapes, *hits])
    )
    times = Markup("").join(
        Markup('<li><time datetime="{}" data-clock>{}</time></li>').format(_at(minute).isoformat(), _clock(minute))
        for minute in (minutes[0], minutes[len(minutes) // 3], minutes[2 * len(minutes) // 3], minutes[-1])
    )
    keys = Markup("").join(Markup('<span class="key {}">{}</span>').format(line.css, line.name) for line in series)
    axis = Markup("<li>{}</li><li>{}</li><li>0</li>").format(unit(top), unit(top / 2))
    return Markup(
        '<figure class="chart"><figcaption><b>{}</b><span class="legend">{}</span><output></output></figcaption>'
        '<div class="plot"><ol class="y" aria-hidden="true">{}</ol>{}<ol class="x" aria-hidden="true">{}</ol></div>'
        "</figure>"
    ).format(title, keys, axis, svg, times)


def _round_up(most: float) -> float:
    """Return a round number of at least `most` that can be halved."""
    if most <= 0:
        return 2.0
    power = 10.0 ** math.floor(math.log10(most))
    return next(step * power for step in (1, 2, 4, 6, 8, 10, 20) if step * power >= most * 1.0001)


def _at(minute: int) -> datetime:
    return datetime.fromtimestamp(minute * 60, UTC)


def _clock(minute: int) -> str:
    return _at(minute).strftime("%H:%M")


def _last(values: Sequence[float | None]) -> float | None:
    return next((value for value in reversed(values) if value is not None), None)
