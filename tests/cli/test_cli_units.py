"""Parsing and formatting of durations, sizes and JSON."""

from __future__ import annotations

import msgspec
import pytest

from tampu.base.units import duration, plural, rate, size
from tampu.cli.errors import UsageError
from tampu.cli.output import printable
from tampu.cli.units import parse_duration
from tampu.inspect.views import jsonable, one_line


@pytest.mark.parametrize(
    ("text", "secs"),
    [
        ("90", 90),
        ("90s", 90),
        ("1.5h", 5400),
        ("500ms", 0.5),
        ("1h 30m", 5400),
        ("2d", 172_800),
        ("5min", 300),
        ("0", 0),
    ],
)
def test_durations_are_parsed(text: str, secs: float) -> None:
    assert parse_duration(text) == pytest.approx(secs)


@pytest.mark.parametrize("text", ["", "s", "-1", "1y", "1h x", "one", "1e3", "nan"])
def test_an_invalid_duration_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a valid duration; use seconds or 500ms, 90s, 15m, 2h, 7d"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (0, "0 ms"),
        (0.04, "40 µs"),
        (999, "999 ms"),
        (1500, "1.5 s"),
        (250_000, "4 min 10 s"),
        (3_600_000, "1 h"),
        (7_500_000, "2 h 5 min"),
        (276_000_000, "3 d 4 h"),
        (-1500, "-1.5 s"),
        (None, "-"),
    ],
)
def test_durations_are_formatted(ms: float | None, text: str) -> None:
    assert duration(ms) == text


def test_sizes_rates_and_counts_are_formatted() -> None:
    assert [size(512), size(1536), size(3 * 1024**4), size(None)] == ["512 B", "1.5 KiB", "3.0 TiB", "-"]
    assert [rate(0), rate(0.016), rate(12.34), rate(12345.6)] == ["0", "0.016/s", "12.3/s", "12,346/s"]
    assert [plural(1, "job"), plural(1200, "job"), plural(2, "retry", "retries")] == [
        "1 job",
        "1,200 jobs",
        "2 retries",
    ]


def test_values_that_json_lacks_are_converted() -> None:
    deep: list[object] = []
    for _ in range(5000):
        deep = [deep]
    assert jsonable({1: b"\x00", "nan": float("nan"), "deep": [(1, 2)]}) == {
        "1": {"$base64": "AA=="},
        "nan": "nan",
        "deep": [[1, 2]],
    }
    assert jsonable(msgspec.msgpack.Ext(5, b"\x01")) == {"$ext": 5, "$base64": "AQ=="}
    assert "$deeper" in one_line(deep, limit=10_000)


def test_long_values_are_cut_and_control_characters_escaped() -> None:
    assert one_line("x" * 500, limit=20) == '"' + "x" * 18 + "…"
    assert printable("a\x1b[31m\n\u202e\udcff") == "a\\x1b[31m\\n\\u202e\\udcff"
