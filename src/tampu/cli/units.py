"""Parses and formats durations, sizes and times."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime

from tampu.cli.errors import UsageError

_UNITS_MS = {"ms": 1, "s": 1000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000, "": 1000}
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|min|m|h|d|)\s*")


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


def instant(ms: float) -> str:
    """Format an epoch time as local time with milliseconds; one that is out of range stays a number."""
    try:
        return datetime.fromtimestamp(ms / 1000, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
    except (OverflowError, ValueError, OSError):
        return f"{ms:.0f}"


def time_of_day(ms: float) -> str:
    """Format an epoch time as local time of day with milliseconds."""
    return instant(ms).rpartition(" ")[2]
