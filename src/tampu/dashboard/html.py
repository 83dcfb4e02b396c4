"""Values as safe HTML: text, numbers, durations, times, JSON and tracebacks. Templates use these as filters."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from typing import Any

from markupsafe import Markup, escape

from tampu.inspect.views import jsonable

#: Longest value that is shown, in characters.
MAX_SHOWN = 20_000
_TOKEN = re.compile(r'("(?:[^"\\]|\\.)*")(\s*:)?|(-?\d[\d.eE+-]*)|(true|false|null)')
_VARYING = re.compile(r"<(n|text|uuid|ulid|hex)>")
_UNITS = ((86_400_000, "d"), (3_600_000, "h"), (60_000, "min"), (1000, "s"))


def visible(value: Any) -> str:
    """Return text with control and direction characters as escapes; line breaks are kept."""
    text = "" if value is None else str(value)
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() or letter == "\n" else letter.encode("unicode_escape").decode()
        for letter in text.encode(errors="backslashreplace").decode()
    )


def pretty(value: Any) -> tuple[Markup, int]:
    """Return a value as coloured JSON, and how many characters were left out."""
    text = json.dumps(jsonable(value), indent=2, ensure_ascii=False)
    left_out = max(len(text) - MAX_SHOWN, 0)
    text = visible(text[:MAX_SHOWN])
    parts: list[str] = []
    end = 0
    for found in _TOKEN.finditer(text):
        parts.append(escape(text[end : found.start()]))
        string, colon, number, word = found.groups()
        kind = "n" if string is None else "k" if colon else "s"
        parts.append(Markup('<span class="{}">{}</span>{}').format(kind, string or number or word, colon or ""))
        end = found.end()
    return Markup("").join([*parts, escape(text[end:])]), left_out


def traceback(text: str) -> Markup:
    """Return a traceback with its frames and its error marked."""
    rows = visible(text.rstrip()[-MAX_SHOWN:]).split("\n")
    lines = []
    for place, row in enumerate(rows):
        kind = "code"
        if row.lstrip().startswith("File "):
            kind = "frame own" if "/tampu/" in row or "site-packages" in row else "frame"
        elif place == len(rows) - 1:
            kind = "error"
        elif row.strip() and set(row.strip()) <= {"^", "~"}:
            kind = "caret"
        lines.append(Markup('<span class="{}">{}</span>').format(kind, row))
    return Markup("\n").join(lines)


def shape(fingerprint: str) -> Markup:
    """Return a fingerprint with what varies marked."""
    parts: list[str] = []
    end, text = 0, visible(fingerprint)
    for found in _VARYING.finditer(text):
        parts += (escape(text[end : found.start()]), Markup('<span class="tok">{}</span>').format(found[1]))
        end = found.end()
    return Markup("").join([*parts, escape(text[end:])])


def short(ms: float | None) -> str:
    """Return a duration in one unit: `4.2 min`, `12 s`, `850 ms`, `40 µs`."""
    if ms is None:
        return "–"
    ms = max(ms, 0)
    for size, unit in _UNITS:
        if ms >= size:
            value = ms / size
            return f"{value:.1f} {unit}" if value < 10 else f"{value:.0f} {unit}"
    return f"{ms:.0f} ms" if ms >= 1 or ms == 0 else f"{ms * 1000:.0f} µs"


def when(ms: float | None, form: str) -> Markup:
    """Return a time in UTC, which the script shows in the local zone. `form` is `clock` or `date`."""
    if ms is None:
        return Markup("–")
    try:
        at = datetime.fromtimestamp(ms / 1000, UTC)
    except (OverflowError, ValueError, OSError):
        return escape(str(ms))
    full = at.strftime("%Y-%m-%d %H:%M:%S")
    text = full[11:] if form == "clock" else full
    stamp = at.isoformat(timespec="milliseconds")
    return Markup('<time datetime="{}" data-{} title="{} UTC">{}</time>').format(stamp, form, full, text)


def compact(count: float | None) -> str:
    """Return a count in at most five characters: `9,999`, `12.3k`, `1.2M`."""
    if count is None:
        return "–"
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= max(size, 10_000):
            return f"{count / size:.3g}{letter}"
    return f"{count:,.0f}"


def percent(share: float | None) -> str:
    """Return a share: `0 %`, `0.8 %`, `26 %`."""
    if not share:
        return "–" if share is None else "0 %"
    return f"{share * 100:.1f} %" if share < 0.0995 else f"{share * 100:.0f} %"


FILTERS = {
    "visible": visible,
    "trace": traceback,
    "shape": shape,
    "short": short,
    "compact": compact,
    "pct": percent,
    "clock": lambda ms: when(ms, "clock"),
    "date": lambda ms: when(ms, "date"),
    "num": lambda count: f"{count:,}",
}
