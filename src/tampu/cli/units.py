"""Parses and formats durations, sizes and times."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime

from tampu.cli.errors import UsageError

_UNITS_MS = {"ms": 1, "s": 1000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000, "": 1000}
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|min|m|h|d|)\s*")
_SIZES = ("B", "KiB", "MiB", "GiB", "TiB")


def parse_duration(text: str) -> float:
    """Return the seconds in `90`, `90s`, `1.5h`, `500ms` or `1h 30m`."""
    total_ms = 0.0
    position = 0
    while position < len(text) or not text:
        found = _DURATION.match(text, position)
        if found is None:
            raise UsageError(f"{text!r} is not a valid duration; use seconds or 500ms, 90s, 15m, 2h, 7d")
        total_ms += float(found[1]) * _UNITS_MS[found[2]]
        position = found.end()
    if total_ms == math.inf:
        raise UsageError(f"{text[:20]!r}... is not a valid duration: it is too long")
    return total_ms / 1000


def duration(ms: float | None) -> str:
    """Format milliseconds: `40 µs`, `850 ms`, `12.3 s`, `4 min 10 s`, `2 h 5 min`, `3 d 4 h`."""
    if ms is None:
        return "-"
    if ms < 0:
        return f"-{duration(-ms)}"
    if 0 < ms < 1:
        return f"{ms * 1000:.0f} µs"
    if ms < 1000:
        return f"{ms:.0f} ms"
    seconds = ms / 1000
    for size, name, small_size, small_name in ((86_400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if seconds >= size:
            large, rest = divmod(seconds, size)
            small = int(rest // small_size)
            return f"{large:.0f} {name} {small} {small_name}" if small else f"{large:.0f} {name}"
    return f"{seconds:.1f} s"


def size(count: int | None) -> str:
    """Format bytes: `512 B`, `1.5 MiB`."""
    if count is None:
        return "-"
    amount = float(count)
    for unit in _SIZES:
        if amount < 1024 or unit == _SIZES[-1]:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    raise AssertionError("unreachable: the last unit has no upper limit")


def rate(per_sec: float | None) -> str:
    """Format a rate: `0`, `0.4/s`, `12.5/s`, `1,200/s`."""
    if per_sec is None:
        return "-"
    if per_sec == 0:
        return "0"
    return f"{per_sec:,.0f}/s" if per_sec >= 100 else f"{per_sec:.2g}/s" if per_sec < 1 else f"{per_sec:.1f}/s"


def number(count: int | None) -> str:
    """Format an integer with thousands separators: `1,234`."""
    return "-" if count is None else f"{count:,}"


def plural(count: int, thing: str, things: str = "") -> str:
    """Format a count with its noun: `1 dead letter`, `2 dead letters`."""
    return f"{count:,} {thing if count == 1 else things or thing + 's'}"


def instant(ms: float) -> str:
    """Format an epoch time as local time with milliseconds; one that is out of range stays a number."""
    try:
        return datetime.fromtimestamp(ms / 1000, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
    except (OverflowError, ValueError, OSError):
        return f"{ms:.0f}"


def time_of_day(ms: float) -> str:
    """Format an epoch time as local time of day with milliseconds."""
    return instant(ms).rpartition(" ")[2]
