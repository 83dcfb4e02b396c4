"""The values of limits: what is allowed, and how they are stored."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tampu.errors import ConfigError
from tampu.wire.limits import Limit, check_key, decode_limits


@pytest.mark.parametrize(
    ("rate", "stored"),
    [
        ("10/s", "10/s"),
        ("100/m", "100/m"),
        (" 600 / m ", "10/s"),
        ("5/2h", "60/d"),
        ("1/30s", "2/m"),
        ("1000000/s", "1000000/s"),
        ("1/366d", "1/31622400s"),
        ("off", "off"),
    ],
)
def test_a_rate_is_stored_as_the_time_between_two_starts(rate: str, stored: str) -> None:
    assert Limit.unpack(Limit(rate=rate).pack()) == Limit(rate=stored)


@pytest.mark.parametrize(
    "limit",
    [
        Limit(),
        Limit(concurrency=0),
        Limit(concurrency=math.inf, burst=5),
        Limit(concurrency=1, rate="7/s", burst=2, weight=0.5, ordered=True),
        Limit(ordered=False),
    ],
)
def test_a_stored_limit_is_read_as_it_was_written(limit: Limit) -> None:
    assert Limit.unpack(limit.pack()) == limit


@pytest.mark.parametrize(
    "values",
    [
        {"concurrency": -1},
        {"concurrency": 1.5},
        {"concurrency": True},
        {"concurrency": math.nan},
        {"concurrency": 10**10},
        {"rate": "0/s"},
        {"rate": "10"},
        {"rate": "10/w"},
        {"rate": "-1/s"},
        {"rate": "1000001/s"},
        {"rate": "1/367d"},
        {"rate": "1/0s"},
        {"rate": 10},
        {"burst": 0},
        {"weight": 0},
        {"weight": math.inf},
        {"weight": "3"},
        {"ordered": 1},
    ],
)
def test_a_value_that_is_not_allowed_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(values))} must be"):
        Limit(**values)


@pytest.mark.parametrize("key", ["", "a\0b", "x" * 257, "ä" * 129, "\ud800", 7, None])
def test_a_key_that_is_not_allowed_is_refused(key: object) -> None:
    with pytest.raises(ConfigError, match="key must be text of 1 to 256 bytes"):
        check_key(key)


def test_a_key_may_have_any_characters() -> None:
    assert check_key("tenant 7: ä/{}\n") == "tenant 7: ä/{}\n"


def test_unreadable_limits_limit_nothing() -> None:
    stored = [b"", b"short", b"*", b"\xff" * 40, b":acme", Limit(weight=2).pack(), b";charge", b"", b"#", b"1"]
    limits = decode_limits(stored)
    assert not limits.queue.is_set
    assert not limits.per_key.is_set
    assert limits.keys == {"acme": Limit(weight=2.0)}
    assert limits.tasks == {"charge": Limit()}
