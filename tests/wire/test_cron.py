"""Cron schedules: the vectors of ChasquiMQ 1.3.0, where tampu differs and why, and clock changes."""

from __future__ import annotations

import json
import time
from dataclasses import FrozenInstanceError, dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from tampu.errors import ConfigError
from tampu.wire.cron.schedule import MAX_EXPRESSION_CHARS, next_fire, parse_cron
from tampu.wire.cron.zones import FixedZone, IanaZone, parse_zone

VECTORS: list[dict[str, Any]] = json.loads((Path(__file__).parent.parent / "vectors" / "cmq_cron.json").read_text())

NEW_YEAR_2027 = 1798761600000  # a Friday

# --- the vectors -----------------------------------------------------------------------------------------------------

SUB_SECOND = "1.3.0: every fire keeps the milliseconds of the start; tampu fires at whole seconds"
TWICE = "1.3.0: a daily job in the hour before a gap fires a second time at the end of the gap"
HOLE = "1.3.0: a repeated hour has no fires; a cadence fires in both passes"
PAST = "1.3.0: in the second pass the next fire is in the past"
OFFSET = "1.3.0: minutes of an offset are not checked"


@dataclass(frozen=True)
class Instead:
    """How tampu differs from a vector: fires it leaves out, fires it adds, or that it rejects the expression."""

    reason: str
    never: tuple[str, ...] = ()
    only_ours: tuple[str, ...] = ()
    refused: bool = False


# Every vector that tampu does not follow, by expression, zone and start.
EXCEPTIONS: dict[tuple[str, str | None, str], Instead] = {
    ("* * * * * *", None, "2027-01-01T00:00:00.500Z"): Instead(
        SUB_SECOND,
        never=("2027-01-01T00:00:01.500Z", "2027-01-01T00:00:02.500Z"),
        only_ours=("2027-01-01T00:00:01Z", "2027-01-01T00:00:02Z"),
    ),
    ("0 1 * * *", "America/New_York", "2027-03-13T00:00Z"): Instead(TWICE, never=("2027-03-14T07:00Z",)),
    ("59 1 * * *", "America/New_York", "2027-03-13T00:00Z"): Instead(TWICE, never=("2027-03-14T07:00Z",)),
    ("0 1 14 3 *", "America/New_York", "2027-03-13T00:00Z"): Instead(TWICE, never=("2027-03-14T07:00Z",)),
    ("0 30 1 * * *", "America/New_York", "2027-03-13T00:00Z"): Instead(TWICE, never=("2027-03-14T07:00Z",)),
    ("0 * * * *", "America/New_York", "2027-11-06T00:00Z"): Instead(HOLE, only_ours=("2027-11-07T06:00Z",)),
    ("*/30 * * * *", "America/New_York", "2027-11-06T00:00Z"): Instead(
        HOLE, only_ours=("2027-11-07T06:00Z", "2027-11-07T06:30Z")
    ),
    ("*/20 * * * *", "Europe/London", "2027-10-30T12:00Z"): Instead(
        HOLE, only_ours=("2027-10-31T01:00Z", "2027-10-31T01:20Z", "2027-10-31T01:40Z")
    ),
    ("*/20 * * * *", "Europe/Madrid", "2027-10-30T12:00Z"): Instead(
        HOLE, only_ours=("2027-10-31T01:00Z", "2027-10-31T01:20Z", "2027-10-31T01:40Z")
    ),
    ("30 1 * * *", "America/New_York", "2027-11-07T06:10Z"): Instead(PAST, never=("2027-11-07T05:30Z",)),
    ("*/10 * * * *", "America/New_York", "2027-11-07T06:05Z"): Instead(
        PAST,
        never=tuple(f"2027-11-07T05:{minute}Z" for minute in (10, 20, 30, 40, 50)),
        only_ours=tuple(f"2027-11-07T06:{minute}Z" for minute in (10, 20, 30, 40, 50)),
    ),
    ("0 2 * * *", "+05:99", "2027-01-01T00:00Z"): Instead(OFFSET, refused=True),
}


def ms(text: str) -> int:
    return int(datetime.fromisoformat(text).timestamp() * 1000)


def utc(instant: int | None) -> str:
    return "never" if instant is None else datetime.fromtimestamp(instant / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


EXCEPTION_BY_VECTOR = {(expression, tz, ms(start)): instead for (expression, tz, start), instead in EXCEPTIONS.items()}


def instead_of(vector: dict[str, Any]) -> Instead | None:
    return EXCEPTION_BY_VECTOR.get((vector["expression"], vector["tz"], vector["after_ms"]))


def fires(expression: str, tz: str | None, after_ms: int, count: int) -> list[int]:
    found: list[int] = []
    while len(found) < count and (fire := next_fire(expression, tz, after_ms)) is not None:
        found.append(fire)
        after_ms = fire
    return found


def fires_until(expression: str, tz: str | None, after_ms: int, end_ms: int) -> list[int]:
    found: list[int] = []
    while (fire := next_fire(expression, tz, after_ms)) is not None and fire <= end_ms:
        found.append(fire)
        after_ms = fire
    return found


def shown_vector(vector: dict[str, Any]) -> str:
    return f"{vector['expression']} {vector['tz']} {vector['after_utc']}"


@pytest.mark.parametrize("vector", [v for v in VECTORS if instead_of(v) is None], ids=shown_vector)
def test_a_vector_of_chasquimq_is_followed(vector: dict[str, Any]) -> None:
    expression, tz, after_ms, error = (vector[key] for key in ("expression", "tz", "after_ms", "error"))
    if error and "search limit exceeded" not in error:
        with pytest.raises(ConfigError):
            next_fire(expression, tz, after_ms)
        return
    expected = vector["fires_ms"]
    # With an error the vector's fires are all there are.
    assert fires(expression, tz, after_ms, len(expected) + bool(error)) == expected


@pytest.mark.parametrize("vector", [v for v in VECTORS if instead_of(v) is not None], ids=shown_vector)
def test_a_fault_of_chasquimq_is_not_copied(vector: dict[str, Any]) -> None:
    expression, tz, after_ms, theirs = (vector[key] for key in ("expression", "tz", "after_ms", "fires_ms"))
    instead = instead_of(vector)
    assert instead is not None
    if instead.refused:
        with pytest.raises(ConfigError):
            next_fire(expression, tz, after_ms)
        return
    never, only_ours = {ms(text) for text in instead.never}, {ms(text) for text in instead.only_ours}
    ours = fires_until(expression, tz, after_ms, max(theirs[-1], *only_ours, 0))
    assert ours == sorted((set(theirs) - never) | only_ours)
    assert never <= set(theirs)
    assert not only_ours & set(theirs)


def test_all_but_twelve_of_the_vectors_are_followed() -> None:
    excepted = [vector for vector in VECTORS if instead_of(vector)]
    print(f"cron vectors: {len(VECTORS) - len(excepted)} passed, {len(excepted)} excepted of {len(VECTORS)}")
    assert len(VECTORS) == 134
    assert len(excepted) == len(EXCEPTIONS) == 12


# --- the dialect -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "first"),
    [
        # Observed with chasquimq 1.3.0 (croner 3.0.1), from 2027-01-01T00:00Z on.
        ("0,30, * * * *", "2027-01-01T00:30:00Z"),
        ("0 0 1,,2 * *", "2027-01-02T00:00:00Z"),
        ("5/5 * * * *", "2027-01-01T00:05:00Z"),
        ("1/100 * * * *", "2027-01-01T00:01:00Z"),
        ("1-5/10 * * * *", "2027-01-01T00:01:00Z"),
        ("*/65535 * * * *", "2027-01-01T01:00:00Z"),
        ("0000000005 * * * *", "2027-01-01T00:05:00Z"),
        ("*/0000000005 * * * *", "2027-01-01T00:05:00Z"),
        ("0 0 * * 5#02", "2027-01-08T00:00:00Z"),
        ("0 0 L,15 * *", "2027-01-15T00:00:00Z"),
        ("0 0 1W,15W * *", "2027-01-15T00:00:00Z"),
        ("0 0 15w * *", "2027-01-15T00:00:00Z"),
        ("0 0 1W 1 *", "2028-01-03T00:00:00Z"),
        ("0 0 2W 1 *", "2028-01-03T00:00:00Z"),
        ("0 0 3W 1 *", "2027-01-04T00:00:00Z"),
        ("0 0 28W 2 *", "2027-02-26T00:00:00Z"),
        ("0 0 29W 2 *", "2028-02-29T00:00:00Z"),
        ("0 0 31W 10 *", "2027-10-29T00:00:00Z"),
        ("0 0 15W * MON", "2027-01-04T00:00:00Z"),
        ("0 0 15W * +MON", "2027-02-15T00:00:00Z"),
        ("0 0 * * 5L", "2027-01-29T00:00:00Z"),
        ("0 0 * * friL", "2027-01-29T00:00:00Z"),
        ("0 0 * * FRI#L", "2027-01-29T00:00:00Z"),
        ("0 0 * * 0#L", "2027-01-31T00:00:00Z"),
        ("0 0 * * 1-5#L", "2027-01-25T00:00:00Z"),
        ("0 0 * * 1-3#2", "2027-01-11T00:00:00Z"),
        ("0 0 * * */2#2", "2027-01-09T00:00:00Z"),
        ("0 0 * * 7#1", "2027-01-03T00:00:00Z"),
        ("0 0 * * 1,3#2", "2027-01-04T00:00:00Z"),
        ("0 0 * * L,5", "2027-01-08T00:00:00Z"),
        ("0 0 1 * L", "2027-02-01T00:00:00Z"),
        ("0 0 * * SAT-SUN", "2027-01-02T00:00:00Z"),
        ("0 0 * * 1-FRI", "2027-01-04T00:00:00Z"),
        ("0 0 * * 1/2", "2027-01-03T00:00:00Z"),
        ("0 0 * FEB-MAR/2 *", "2027-02-01T00:00:00Z"),
        ("0 0 ?/2 * ?", "2027-01-03T00:00:00Z"),
        ("0 0 13 * +?", "2027-01-13T00:00:00Z"),
        ("0 0 ? * +5", "2027-01-08T00:00:00Z"),
        ("0 0 13 * +5#2", "2027-08-13T00:00:00Z"),
        ("0 0 L * +5", "2027-04-30T00:00:00Z"),
        ("0 0 1-31 * 1", "2027-01-02T00:00:00Z"),
        ("0 0 1-31 * +1", "2027-01-04T00:00:00Z"),
        ("0 0 31 2-4 *", "2027-03-31T00:00:00Z"),
        ("0 0 30 2 1", "2027-02-01T00:00:00Z"),
        ("0 0 29 2 +1#5", "2044-02-29T00:00:00Z"),
        ("0 0 0 1 1 * 2030/3", "2030-01-01T00:00:00Z"),
        ("0 0 0 1 1 * */4", "2029-01-01T00:00:00Z"),
        ("0 0 0 1 1 * 5000", "5000-01-01T00:00:00Z"),
        ("@YEARLY", "2028-01-01T00:00:00Z"),
        (" @daily ", "2027-01-02T00:00:00Z"),
        ("0\n0\u00a0*\t* *", "2027-01-02T00:00:00Z"),
        # In 1.3.0 the next one never fires: 7 is Sunday except before L.
        ("0 0 * * 7L", "2027-01-31T00:00:00Z"),
        ("0 0 * * 7#L", "2027-01-31T00:00:00Z"),
    ],
)
def test_an_expression_of_the_dialect_fires_first_at(expression: str, first: str) -> None:
    assert utc(next_fire(expression, None, NEW_YEAR_2027)) == first


@pytest.mark.parametrize(
    ("expression", "field", "got", "allowed"),
    [
        ("0 25 * * *", "hour", "25", "from 0 to 23"),
        ("60 * * * *", "minute", "60", "from 0 to 59"),
        ("61 0 * * * *", "second", "61", "from 0 to 59"),
        ("0 0 0 * *", "day of month", "0", "from 1 to 31"),
        ("0 0 32W * *", "day of month", "32W", "from 1 to 31"),
        ("0 0 * 13 *", "month", "13", "from 1 to 12"),
        ("0 0 * * 8", "day of week", "8", "from 0 to 7"),
        ("0 0 0 1 1 * 5001", "year", "5001", "from 1 to 5000"),
        ("0 0 0 1 1 * 0", "year", "0", "from 1 to 5000"),
        ("0 0 1 1 * 2030", "day of week", "2030", "from 0 to 7"),
        ("9999999999999999999 * * * *", "minute", "9999999999999999999", "from 0 to 59"),
        ("5,10,x * * * *", "minute", "X", "with values from 0 to 59"),
        ("0 22-2 * * *", "hour", "22-2", "an ascending range (to wrap around, use two: 22-23,0-2)"),
        ("*/0 * * * *", "minute", "*/0", "a step from 1 to 65535"),
        ("*/65536 * * * *", "minute", "*/65536", "a step from 1 to 65535"),
        ("*,5 * * * *", "minute", "*", "or a list of n"),
        ("*-5 * * * *", "minute", "*-5", "or a list of n"),
        ("*-5/2 * * * *", "minute", "*-5/2", "or a list of n"),
        ("*/5/2 * * * *", "minute", "*/5/2", "or a list of n"),
        ("1-5-7 * * * *", "minute", "1-5-7", "or a list of n"),
        ("+5 * * * *", "minute", "+5", "or a list of n"),
        ("\u0665 * * * *", "minute", "\u0665", "or a list of n"),
        ("? * * * *", "minute", "?", "or a list of n"),
        ("0 0 * ? *", "month", "?", "JAN to DEC"),
        ("0 0 L-3 * *", "day of month", "L-3", "L (the last day)"),
        ("0 0 LW * *", "day of month", "LW", "nW (the weekday nearest to n)"),
        ("0 0 1-5W * *", "day of month", "1-5W", "nW (the weekday nearest to n)"),
        ("0 0 * * 1#6", "day of week", "1#6", "with #1 to #5, or #L"),
        ("0 0 * * 1#", "day of week", "1#", "with #1 to #5, or #L"),
        ("0 0 * * 1#\u0665", "day of week", "1#\u0665", "with #1 to #5, or #L"),
        ("0 0 * * 1#0", "day of week", "1#0", "with #1 to #5, or #L"),
        ("0 0 * * *#2", "day of week", "*#2", "n#k (the k-th n of the month)"),
        ("0 0 * * 1-5L", "day of week", "1-5L", "nL or n#L (the last n)"),
        ("0 0 * * MONDAY", "day of week", "MONDAY", "SUN to SAT"),
        ("0 0 * JANUARY *", "month", "JANUARY", "JAN to DEC"),
        ("0 0 13 * ++5", "day of week", "+5", "a leading + (day of month must match too)"),
        # ChasquiMQ accepts these, but with an absurd meaning.
        ("0 0 * MON *", "month", "MON", "JAN to DEC"),
        ("JAN 0 * * *", "minute", "JAN", "or a list of n"),
        ("0 0 * JANFEB *", "month", "JANFEB", "JAN to DEC"),
        ("0 0 * * */MON", "day of week", "*/MON", "SUN to SAT"),
        ("0 0 * * 5#2L", "day of week", "5#2L", "with #1 to #5, or #L"),
        ("0 0 15WL * *", "day of month", "15WL", "nW (the weekday nearest to n)"),
        (", * * * *", "minute", ",", "at least one value"),
        ("0 0 * * +", "day of week", "", "at least one value"),
    ],
)
def test_a_refusal_points_at_the_field(expression: str, field: str, got: str, allowed: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse_cron(expression)
    message = str(refusal.value)
    assert message.startswith(f"cron field '{field}' must be ")
    assert allowed in message
    assert message.endswith(f"; got {got!r} in {expression!r}")


@pytest.mark.parametrize(
    ("expression", "allowed"),
    [
        ("", "not blank"),
        ("   ", "not blank"),
        ("* * * *", "5 to 7 fields: [second] minute hour"),
        ("* * * * * * * *", "5 to 7 fields"),
        ("0 0 * * * # c", "cron field 'day of week'"),
        ("@midnight", "one of @yearly, @annually, @monthly, @weekly, @daily, @hourly"),
        ("@daily *", "one of @yearly"),
        ("0 0 * * \x00", "without NUL"),
        ("0 0 * * \ud800", "UTF-8"),
        (None, "a str"),
        (["0 0 * * *"], "a str"),
        ("0," * MAX_EXPRESSION_CHARS + "0 * * * *", "at most 1024 characters"),
    ],
)
def test_an_expression_as_a_whole_is_refused(expression: Any, allowed: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse_cron(expression)
    assert allowed in str(refusal.value)
    assert len(str(refusal.value)) < 500


def test_every_value_written_out_fits_into_an_expression() -> None:
    def all_of(low: int, high: int) -> str:
        return ",".join(str(value) for value in range(low, high + 1))

    days_of_week = "SUN,MON,TUE,WED,THU,FRI,SAT"
    expression = f"{all_of(0, 59)} {all_of(0, 59)} {all_of(0, 23)} {all_of(1, 31)} {all_of(1, 12)} {days_of_week}"
    assert utc(next_fire(expression, None, NEW_YEAR_2027)) == "2027-01-01T00:00:01Z"


def test_a_schedule_is_a_frozen_value_parsed_once() -> None:
    schedule = parse_cron("0 2 * * *")
    assert parse_cron("0 2 * * *") is schedule
    with pytest.raises(FrozenInstanceError):
        schedule.years = 0  # type: ignore[misc]  # that is the point


# --- the ends of time ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "expression",
    [
        "0 0 30 2 *",
        "0 0 31 2,4,6,9,11 *",
        "0 0 30W 2 *",
        "0 0 * * L",
        "0 0 1 * +L",
        "0 0 0 1 1 * 2026",
        "0 0 0 29 2 * 2100",
        "0 0 0 29 2 * 1/4",
        "0 0 29 2 +1#4",
    ],
)
@pytest.mark.parametrize("tz", [None, "America/New_York"])
def test_a_schedule_that_never_fires_returns_none(expression: str, tz: str | None) -> None:
    assert next_fire(expression, tz, NEW_YEAR_2027) is None


def test_fires_end_with_the_year_5000() -> None:
    last_minute = ms("4999-12-31T00:00Z") + 366 * 86_400_000 - 60_000
    assert next_fire("* * * * *", None, last_minute - 1) == last_minute
    for after_ms in (last_minute, last_minute + 60_000, last_minute + 10**9, 2**63, 2**64 - 1):
        assert next_fire("* * * * *", None, after_ms) is None
        assert next_fire("* * * * *", "Europe/London", after_ms) is None


def test_nothing_fires_before_1970() -> None:
    assert next_fire("0 0 1 1 *", None, -(10**20)) == 0
    assert next_fire("* * * * * *", None, -1) == 0
    assert next_fire("* * * * * *", None, 0) == 1000
    assert next_fire("0 * * * *", "Asia/Kolkata", -1) == 30 * 60_000


@pytest.mark.parametrize("after", ["2027-01-01T00:00:00Z", "2027-01-01T00:00:00.001Z", "2027-01-01T00:00:00.999Z"])
def test_finding_21_the_sub_second_part_of_the_start_is_dropped(after: str) -> None:
    assert next_fire("* * * * * *", None, ms(after)) == ms("2027-01-01T00:00:01Z")


def test_a_fire_is_strictly_after_the_start_even_by_a_millisecond() -> None:
    assert next_fire("0 0 * * *", None, NEW_YEAR_2027 - 1) == NEW_YEAR_2027
    assert next_fire("0 0 * * *", None, NEW_YEAR_2027) == NEW_YEAR_2027 + 86_400_000


# --- clock changes ---------------------------------------------------------------------------------------------------


def local_fires(expression: str, tz: str, after: str, until: str) -> list[str]:
    """Return fires as local times with their offset; `after` and `until` are local times too."""
    zone = ZoneInfo(tz)
    start, end = (int(datetime.fromisoformat(text).replace(tzinfo=zone).timestamp() * 1000) for text in (after, until))
    found = fires_until(expression, tz, start, end)
    return [datetime.fromtimestamp(fire / 1000, zone).strftime("%d %H:%M %z") for fire in found]


NEW_YORK_SPRING = ("America/New_York", "2027-03-14T00:30", "2027-03-14T04:30")  # 02:00 -> 03:00
TWICE_BY_CADENCE = ("1:20 -0400", "1:40 -0400", "1:20 -0500", "1:40 -0500")
NEW_YORK_AUTUMN = ("America/New_York", "2027-11-07T00:30", "2027-11-07T02:30")  # 02:00 -> 01:00


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("0 2 * * *", ["14 03:00 -0400"]),
        ("59 2 * * *", ["14 03:00 -0400"]),
        ("0,30 2 * * *", ["14 03:00 -0400"]),
        ("*/10 2 * * *", ["14 03:00 -0400"]),
        ("* * 2 * * *", ["14 03:00 -0400"]),
        ("30 2,3 * * *", ["14 03:00 -0400", "14 03:30 -0400"]),
        ("0 2,3 * * *", ["14 03:00 -0400"]),
        ("0 1-4 * * *", ["14 01:00 -0500", "14 03:00 -0400", "14 04:00 -0400"]),
        ("0 1 * * *", ["14 01:00 -0500"]),
        ("59 1 * * *", ["14 01:59 -0500"]),
        ("30 2 14 3 SUN", ["14 03:00 -0400"]),
        ("30 2 15 3 *", []),
        ("0 * * * *", ["14 01:00 -0500", "14 03:00 -0400", "14 04:00 -0400"]),
        ("30 */2 * * *", ["14 04:30 -0400"]),
        ("20 */2,3 * * *", ["14 03:20 -0400", "14 04:20 -0400"]),
    ],
)
def test_times_skipped_by_a_gap_fire_once_at_its_end_unless_a_cadence(expression: str, expected: list[str]) -> None:
    assert local_fires(expression, *NEW_YORK_SPRING) == expected


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("30 1 * * *", ["07 01:30 -0400"]),
        ("0,30 1,2 * * *", ["07 01:00 -0400", "07 01:30 -0400", "07 02:00 -0500", "07 02:30 -0500"]),
        ("0 0-23 * * *", ["07 01:00 -0400", "07 02:00 -0500"]),
        ("*/30 1 * * *", ["07 01:00 -0400", "07 01:30 -0400"]),
        ("0 * * * *", ["07 01:00 -0400", "07 01:00 -0500", "07 02:00 -0500"]),
        ("15 * * * *", ["07 01:15 -0400", "07 01:15 -0500", "07 02:15 -0500"]),
        ("20,40 */1 * * *", [f"07 0{t}" for t in ("0:40 -0400", *TWICE_BY_CADENCE, "2:20 -0500")]),
        ("30 */2 * * *", ["07 02:30 -0500"]),
        ("30 */3,1 * * *", ["07 01:30 -0400", "07 01:30 -0500"]),
    ],
)
def test_a_repeated_hour_fires_in_the_second_pass_only_for_a_cadence(expression: str, expected: list[str]) -> None:
    assert local_fires(expression, *NEW_YORK_AUTUMN) == expected


@pytest.mark.parametrize(
    ("expression", "after", "expected"),
    [
        # 05:00Z to 06:00Z is the first 01:xx hour, 06:00Z to 07:00Z the second.
        ("30 1 * * *", "2027-11-07T05:29:59.999Z", "2027-11-07T05:30:00Z"),
        ("30 1 * * *", "2027-11-07T05:30Z", "2027-11-08T06:30:00Z"),
        ("30 1 * * *", "2027-11-07T06:00Z", "2027-11-08T06:30:00Z"),
        ("30 1 * * *", "2027-11-07T06:10Z", "2027-11-08T06:30:00Z"),
        ("30 1 * * *", "2027-11-07T06:40Z", "2027-11-08T06:30:00Z"),
        ("0 1,2 * * *", "2027-11-07T06:10Z", "2027-11-07T07:00:00Z"),
        ("30 * * * *", "2027-11-07T05:30Z", "2027-11-07T06:30:00Z"),
        ("30 * * * *", "2027-11-07T05:59:59Z", "2027-11-07T06:30:00Z"),
        ("30 * * * *", "2027-11-07T06:00Z", "2027-11-07T06:30:00Z"),
        ("30 * * * *", "2027-11-07T06:30Z", "2027-11-07T07:30:00Z"),
        ("30 * 1 7 *", "2027-11-07T05:30Z", "2028-07-01T04:30:00Z"),
        ("59 59 * * * *", "2027-11-07T05:59:58Z", "2027-11-07T05:59:59Z"),
        ("0 0 * * * *", "2027-11-07T05:59:59Z", "2027-11-07T06:00:00Z"),
    ],
)
def test_finding_23_in_a_repeated_hour_the_next_fire_is_in_the_future(
    expression: str, after: str, expected: str
) -> None:
    assert utc(next_fire(expression, "America/New_York", ms(after))) == expected


def test_a_gap_of_half_an_hour_moves_only_what_lies_in_it() -> None:
    # Lord Howe, 2027-10-03: 02:00 -> 02:30.
    window = ("Australia/Lord_Howe", "2027-10-03T01:00", "2027-10-03T03:00")
    assert local_fires("15 2 * * *", *window) == ["03 02:30 +1100"]
    assert local_fires("15,45 2 * * *", *window) == ["03 02:30 +1100", "03 02:45 +1100"]
    assert local_fires("0,30 2 * * *", *window) == ["03 02:30 +1100"]
    assert local_fires("15,45 * * * *", *window) == ["03 01:15 +1030", "03 01:45 +1030", "03 02:45 +1100"]


def test_a_repeat_of_half_an_hour_repeats_only_what_lies_in_it() -> None:
    # Lord Howe, 2027-04-04: 02:00 -> 01:30.
    window = ("Australia/Lord_Howe", "2027-04-04T01:00", "2027-04-04T02:30")
    assert local_fires("15,45 1 * * *", *window) == ["04 01:15 +1100", "04 01:45 +1100"]
    both = ["04 01:15 +1100", "04 01:45 +1100", "04 01:45 +1030", "04 02:15 +1030"]
    assert local_fires("15,45 * * * *", *window) == both


@pytest.mark.parametrize(
    ("tz", "sunday_or_friday", "after", "until", "expected"),
    [
        ("America/Santiago", "SUN", "2027-09-04T22:00", "2027-09-05T12:00", "05 01:00 -0300"),
        ("Africa/Cairo", "FRI", "2027-04-29T22:00", "2027-04-30T12:00", "30 01:00 +0300"),
        ("Asia/Beirut", "SUN", "2027-03-27T22:00", "2027-03-28T12:00", "28 01:00 +0300"),
    ],
)
def test_a_midnight_that_does_not_exist_fires_when_its_day_begins(
    tz: str, sunday_or_friday: str, after: str, until: str, expected: str
) -> None:
    assert local_fires("0 0 * * *", tz, after, until) == [expected]
    assert local_fires("@daily", tz, after, until) == [expected]
    assert local_fires(f"0 0 * * {sunday_or_friday}", tz, after, until) == [expected]
    assert local_fires(f"30 0,1 * * {sunday_or_friday}", tz, after, until) == [
        expected,
        expected.replace(":00 ", ":30 "),
    ]
    assert local_fires("*/20 */24 * * *", tz, after, until) == []


def test_a_last_hour_of_the_day_that_repeats_fires_once() -> None:
    # Santiago, 2027-04-03: 24:00 -> 23:00.
    window = ("America/Santiago", "2027-04-03T22:10", "2027-04-04T00:10")
    assert local_fires("30 23 * * *", *window) == ["03 23:30 -0300"]
    assert local_fires("30 23,0 * * *", *window) == ["03 23:30 -0300"]
    assert local_fires("0 0 * * *", *window) == ["04 00:00 -0400"]
    assert local_fires("30 * * * SAT", *window) == ["03 22:30 -0300", "03 23:30 -0300", "03 23:30 -0400"]


def test_a_day_that_does_not_exist_fires_once_at_its_end() -> None:
    # Samoa skipped 2011-12-30.
    window = ("Pacific/Apia", "2011-12-29T20:00", "2011-12-31T20:00")
    assert local_fires("0 12 30 * *", *window) == ["31 00:00 +1400"]
    assert local_fires("0 8,12,16 30 * *", *window) == ["31 00:00 +1400"]
    assert local_fires("0 12 * * *", *window) == ["31 00:00 +1400", "31 12:00 +1400"]
    assert local_fires("0 0 * * *", *window) == ["31 00:00 +1400"]
    assert local_fires("0 */6 30 * *", *window) == []
    assert local_fires("0 */12 * * *", *window) == ["31 00:00 +1400", "31 12:00 +1400"]


def test_a_shift_by_an_odd_number_of_seconds_is_found_to_the_second() -> None:
    # Monrovia, 1972-01-07: 00:00:00 at -00:44:30 -> 00:44:30 UTC.
    start = ms("1972-01-06T12:00Z")
    assert utc(next_fire("30 0 * * *", "Africa/Monrovia", start)) == "1972-01-07T00:44:30Z"
    assert utc(next_fire("30 * * * *", "Africa/Monrovia", ms("1972-01-07T00:14:30Z"))) == "1972-01-07T01:30:00Z"


def test_a_cadence_skipped_by_a_gap_fires_on_the_next_day_with_that_time() -> None:
    # Santiago skips 00:30 on the first Sunday of September; here it must also be the 5th.
    first = next_fire("30 */24 5 9 *", "America/Santiago", ms("2027-01-01T00:00Z"))
    assert utc(first) == "2028-09-05T03:30:00Z"
    assert date(2027, 9, 5).strftime("%A") == "Sunday"


# --- zones -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tz", [None, "", "  ", "UTC", "utc", " Utc ", "Z", "Z "])
def test_utc_has_these_spellings(tz: str | None) -> None:
    assert parse_zone(tz) == FixedZone("UTC", 0)


@pytest.mark.parametrize(
    ("tz", "offset"),
    [
        ("+05:30", 19800),
        ("-0800", -28800),
        (" +5:30 ", 19800),
        ("+23:59", 86340),
        ("-23:59", -86340),
        ("-00:00", 0),
    ],
)
def test_an_offset_is_a_zone(tz: str, offset: int) -> None:
    assert parse_zone(tz) == FixedZone(tz.strip(), offset)


@pytest.mark.parametrize(
    "tz", ["+05:99", "+05:60", "+24:00", "-99:00", "+5", "+05", "+530", "+05:3", "+1:234", "+-5:30", "+ab:cd", "+", "-"]
)
def test_finding_25_an_offset_that_is_not_one_is_refused(tz: str) -> None:
    with pytest.raises(ConfigError, match=r"^tz must be an offset .*; got "):
        parse_zone(tz)


@pytest.mark.parametrize(
    ("tz", "meant"),
    [
        ("america/new_york", "America/New_York"),
        ("America/New York", "America/New_York"),
        ("EUROPE/LONDON", "Europe/London"),
        ("Europe/Londn", "Europe/London"),
        ("est", "EST"),
    ],
)
def test_finding_25_a_misspelt_zone_is_refused_with_the_right_spelling(tz: str, meant: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse_zone(tz)
    assert f"did you mean '{meant}'?" in str(refusal.value)
    assert str(refusal.value).endswith(f"; got {tz!r}")
    assert isinstance(parse_zone(meant), IanaZone)


@pytest.mark.parametrize(
    "tz", ["z", "5:30", "−05:00", "Factory", "localtime", "../UTC", "posix/UTC", "UTC\x00", "UTC+5"]
)
def test_an_unknown_zone_is_rejected(tz: str) -> None:
    with pytest.raises(ConfigError, match=r"^tz must be UTC, an offset such as \+05:30, or an IANA name"):
        parse_zone(tz)


def test_a_zone_is_text() -> None:
    with pytest.raises(ConfigError, match="tz must be a str or None; got 5"):
        parse_zone(5)  # type: ignore[arg-type]  # that is the point


# --- speed -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "expression",
    [
        "0 0 29 2 *",
        "0 0 29 2 +1#5",
        "0 0 30 2 *",
        "0 0 * * L",
        "0 0 0 29 2 +1#5 4996",
        "0 0 0 29 2 +1 */4",
        "59 59 23 31 12 +5#5 5000",
        "30 */24 29 2 *",
        "* * 2 * * *",
    ],
)
@pytest.mark.parametrize("tz", [None, "America/New_York", "America/Santiago"])
@pytest.mark.parametrize("after", ["2027-01-01T00:00Z", "2027-03-14T06:59Z", "2027-11-07T05:30Z"])
@pytest.mark.untraced
def test_the_rarest_fire_is_found_within_a_millisecond(expression: str, tz: str | None, after: str) -> None:
    schedule, zone, after_ms = parse_cron(expression), parse_zone(tz), ms(after)

    def timed() -> float:
        started = time.perf_counter()
        schedule.next_after(after_ms, zone)
        return time.perf_counter() - started

    # The best of several runs: the machine may be busy.
    assert min(timed() for _ in range(20)) < 0.001
