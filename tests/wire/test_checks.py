"""Every rejected argument is reported the same way: the field, what is allowed, the value given."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime, timedelta, timezone
from functools import reduce
from typing import Any

import pytest

from tampu.base.checks import (
    MAX_U64,
    check_bool,
    check_delay_ms,
    check_float,
    check_instant_ms,
    check_int,
    check_job_id,
    check_job_name,
    check_queue_name,
    check_text,
    shown,
)
from tampu.errors import ConfigError

from .vectors import vectors

NAN, INF = math.nan, math.inf

BAD: list[tuple[Any, Any, str]] = [
    *((check_delay_ms, value, "delay must be a finite number of 0 or more") for value in (NAN, INF, -INF, -1, -0.001)),
    *((check_delay_ms, value, "delay must be a finite number of 0 or more") for value in (True, "5", None, [], 1j)),
    (check_delay_ms, timedelta(seconds=-1), "delay must be a finite number of 0 or more"),
    *(
        (check_instant_ms, value, "run_at must be a finite number of 0 or more")
        for value in (NAN, INF, -1, True, "now")
    ),
    (check_instant_ms, datetime(1969, 12, 31), "run_at must be a finite number of 0 or more"),
    (check_instant_ms, datetime.min, "run_at must be a finite number of 0 or more"),
    *((check_job_id, value, "id must be text that is not blank") for value in ("", " ", "\t\n", "\u2003")),
    *((check_job_id, value, "id must be text without NUL characters") for value in ("\x00", "a\x00b", " \x00")),
    *((check_job_id, value, "id must be a str") for value in (None, 7, b"a", True, ["a"])),
    *((check_job_id, value, "id must be text that UTF-8 can carry") for value in ("\ud800", "a\udfffb")),
    (check_job_name, "n" * 257, "name must be at most 256 bytes of UTF-8 (it has 257)"),
    (check_job_name, "é" * 129, "name must be at most 256 bytes of UTF-8 (it has 258)"),
    (check_job_name, "\x00", "name must be text without NUL"),
    (check_job_name, None, "name must be a str"),
    (check_queue_name, "a{b", "queue_name must be text without { or }"),
    (check_queue_name, "a}b", "queue_name must be text without { or }"),
    (check_queue_name, " ", "queue_name must be text that is not blank"),
]


@pytest.mark.parametrize(("check", "value", "says"), BAD, ids=[f"{c.__name__}-{v!r}"[:45] for c, v, _ in BAD])
def test_a_bad_value_is_refused_by_name_value_and_what_is_allowed(check: Any, value: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(says)}") as refusal:
        check(value)
    given = value.total_seconds() if isinstance(value, timedelta) else value
    if not isinstance(given, datetime):
        assert f"; got {repr(given)[:80]}" in str(refusal.value)
    assert refusal.value.code == "CMQ-004"


@pytest.mark.parametrize("value", [-1, 11, True, False, 1.0, NAN, "1", None, 10**30])
def test_a_number_out_of_its_bounds_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"^batch must be a whole number from 0 to 10; got "):
        check_int("batch", value, high=10)


@pytest.mark.parametrize("value", [-0.1, NAN, INF, True, "1", None])
def test_a_float_out_of_its_bounds_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"^multiplier must be a finite number of 0 or more; got "):
        check_float("multiplier", value)


@pytest.mark.parametrize("value", [0, 1, "yes", "", None, []])
def test_only_a_bool_is_a_bool(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"^tls must be True or False; got "):
        check_bool("tls", value)


def test_good_values_pass_as_they_are() -> None:
    assert check_int("x", MAX_U64) == MAX_U64
    assert check_int("x", 3, low=3, high=3) == 3
    assert check_float("x", 2) == 2.0
    assert isinstance(check_float("x", 2), float)
    assert check_bool("x", False) is False
    assert check_text("x", "", blank_ok=True) == ""
    assert check_job_name("") == ""
    assert check_job_name("é" * 128) == "é" * 128
    assert check_job_id(" é-1 ") == " é-1 "
    assert check_queue_name("we ird é:1") == "we ird é:1"


@pytest.mark.parametrize(
    ("delay", "ms"),
    [(0, 0), (1, 1000), (0.0005, 0), (0.0015, 2), (1.2345, 1234), (timedelta(minutes=5), 300_000), (timedelta(), 0)],
)
def test_a_delay_is_seconds_or_a_timedelta_to_whole_milliseconds(delay: Any, ms: int) -> None:
    assert check_delay_ms(delay) == ms


def test_an_instant_is_epoch_seconds_or_a_datetime_and_a_naive_one_is_utc() -> None:
    assert check_instant_ms(1.5) == 1500
    assert check_instant_ms(datetime(2027, 1, 1, tzinfo=UTC)) == 1798761600000
    assert check_instant_ms(datetime(2027, 1, 1)) == 1798761600000
    assert check_instant_ms(datetime(2027, 1, 1, tzinfo=timezone(timedelta(hours=-5)))) == 1798761600000 + 5 * 3_600_000
    assert check_instant_ms(datetime.max) == 253402300800000


def test_a_huge_value_does_not_drown_the_message() -> None:
    with pytest.raises(ConfigError) as refusal:
        check_job_name("n" * 1_000_000)
    assert len(str(refusal.value)) < 250
    assert "(1000002 characters)" in str(refusal.value)


@pytest.mark.parametrize(
    "vector",
    [v for v in vectors("cmq_captures.json", "refusals") if v.values[0]["name"].startswith(("named_", "add_id"))],
)
def test_names_and_ids_1_3_0_refuses_are_refused(vector: dict[str, Any]) -> None:
    given = vector["input"]
    with pytest.raises(ConfigError):
        check_job_id(given["job_id"]) if "job_id" in given else check_job_name(given["name"])


class Unshowable:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


UNSHOWABLE = {
    "5000 digits": 10**5000,
    "100000 deep": reduce(lambda inner, _: [inner], range(100_000), []),
    "no repr": Unshowable(),
}


@pytest.mark.parametrize("value", UNSHOWABLE.values(), ids=UNSHOWABLE.keys())
def test_a_value_that_cannot_be_shown_is_refused_like_any_other(value: Any) -> None:
    assert type(value).__name__ in shown(value)
    for check in (check_job_id, check_delay_ms, lambda v: check_int("x", v), lambda v: check_bool("x", v)):
        with pytest.raises(ConfigError):
            check(value)


@pytest.mark.parametrize("value", [10**400, 1e306, 1e300, 2**64], ids=["10**400", "1e306", "1e300", "2**64"])
def test_a_time_too_far_away_to_be_written_is_refused(value: Any) -> None:
    for check in (check_delay_ms, check_instant_ms):
        with pytest.raises(ConfigError):
            check(value)


def test_an_int_no_float_can_hold_is_refused() -> None:
    with pytest.raises(ConfigError):
        check_float("multiplier", 10**400)


def test_the_error_for_a_number_beyond_64_bits_names_the_limit() -> None:
    with pytest.raises(ConfigError, match="18446744073709551615; got 18446744073709551616"):
        check_int("limit", 2**64)
