"""Plots as SVG, drawn by hand: bars on a logarithmic scale, and lines. They follow the reader's light or dark theme."""

from __future__ import annotations

import math
from html import escape

STYLE = """<style>
text { font: 12px system-ui, sans-serif; fill: #24292f } .title { font-weight: 600; font-size: 14px }
.faint { fill: #57606a } .grid { stroke: #d0d7de; stroke-width: 1 } .them { fill: #9aa4b2 } .us { fill: #c2571a }
.limit { fill: #4c78a8 } .spread { stroke: #24292f; stroke-width: 1.5 } .line { fill: none; stroke-width: 2 }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .faint { fill: #9198a1 } .grid { stroke: #3d444d }
.spread { stroke: #e6edf3 } }
</style>"""
COLOURS = ("#c2571a", "#4c78a8", "#54a24b", "#b279a2", "#9aa4b2")


def bars(title: str, text: str, rows: list[tuple[str, float, float, float, str]], unit: str = "jobs/s") -> str:
    """One bar a row: label, median, lowest, highest and whose it is (`us`, `them`, `limit`). Logarithmic."""
    left, right, width, step, top = 170, 90, 760, 24, 72
    height = top + step * len(rows) + 12
    lowest = 10 ** math.floor(math.log10(max(min(row[2] for row in rows), 1e-9)))
    highest = 10 ** math.ceil(math.log10(max(row[3] for row in rows)))
    if highest <= lowest:
        highest = lowest * 10
    span = math.log10(highest / lowest)

    def at(value: float) -> float:
        return left + (width - left - right) * math.log10(max(value, lowest) / lowest) / span

    below = f"{text} ({unit}, logarithmic)"
    parts = [_head(width, height, title), f'<text x="12" y="40" class="faint">{escape(below)}</text>']
    decade = lowest
    while decade <= highest * 1.001:
        parts.append(
            f'<line x1="{at(decade):.1f}" x2="{at(decade):.1f}" y1="{top - 8}" y2="{height - 8}" class="grid"/>'
        )
        parts.append(
            f'<text x="{at(decade):.1f}" y="{top - 11}" text-anchor="middle" class="faint">{short(decade)}</text>'
        )
        decade *= 10
    for number, (label, median, low, high, whose) in enumerate(rows):
        y = top + step * number
        parts.append(f'<text x="{left - 8}" y="{y + 14}" text-anchor="end">{escape(label)}</text>')
        parts.append(
            f'<rect x="{left}" y="{y + 2}" width="{max(at(median) - left, 1):.1f}" height="16" class="{whose}"/>'
        )
        parts.append(f'<line x1="{at(low):.1f}" x2="{at(high):.1f}" y1="{y + 10}" y2="{y + 10}" class="spread"/>')
        parts.append(f'<text x="{max(at(high), at(median)) + 6:.1f}" y="{y + 14}">{short(median)}</text>')
    return "\n".join([*parts, "</svg>\n"])


def lines(title: str, series: dict[str, list[tuple[float, float]]], x_unit: str, y_unit: str) -> str:
    """Values over numbers, both scales from nought."""
    left, right, width, height, top, bottom = 70, 160, 760, 320, 56, 44
    most_x = max(x for points in series.values() for x, _ in points)
    most_y = max(y for points in series.values() for _, y in points) * 1.1 or 1

    def at(x: float, y: float) -> str:
        across = left + (width - left - right) * x / most_x
        return f"{across:.1f},{height - bottom - (height - top - bottom) * y / most_y:.1f}"

    parts = [_head(width, height, title)]
    for number in range(5):
        value = most_y * number / 4
        y = at(0, value).split(",")[1]
        parts.append(f'<line x1="{left}" x2="{width - right}" y1="{y}" y2="{y}" class="grid"/>')
        parts.append(
            f'<text x="{left - 6}" y="{float(y) + 4:.1f}" text-anchor="end" class="faint">{short(value)}</text>'
        )
    parts.append(f'<text x="{left}" y="40" class="faint">{y_unit}</text>')
    middle = (left + width - right) / 2
    parts.append(f'<text x="{middle}" y="{height - 8}" text-anchor="middle" class="faint">{x_unit}</text>')
    for x in sorted({x for points in series.values() for x, _ in points}):
        across = at(x, 0).split(",")[0]
        parts.append(f'<text x="{across}" y="{height - 26}" text-anchor="middle" class="faint">{short(x)}</text>')
    for number, (name, points) in enumerate(series.items()):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(at(x, y) for x, y in points)
        parts.append(f'<polyline points="{path}" class="line" stroke="{colour}"/>')
        parts += [
            f'<circle cx="{at(x, y).split(",")[0]}" cy="{at(x, y).split(",")[1]}" r="3.5" fill="{colour}"/>'
            for x, y in points
        ]
        y = float(at(*points[-1]).split(",")[1]) + 4
        parts.append(f'<text x="{width - right + 10}" y="{y:.1f}" style="fill:{colour}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>\n"])


def short(value: float) -> str:
    """A number as people say it: 1.2 k, 340, 0.8."""
    for limit, suffix in ((1e6, " M"), (1e3, " k")):
        if value >= limit:
            scaled = value / limit
            return (f"{scaled:.0f}" if scaled >= 100 or scaled == int(scaled) else f"{scaled:.1f}") + suffix
    return f"{value:.0f}" if value >= 10 or value == int(value) else f"{value:.2g}"


def _head(width: int, height: int, title: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img" '
        f'aria-label="{escape(title)}">{STYLE}\n<text x="12" y="22" class="title">{escape(title)}</text>'
    )
