"""Formats counts, sizes, rates and durations for people."""

from __future__ import annotations

_SIZES = ("B", "KiB", "MiB", "GiB", "TiB")


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
