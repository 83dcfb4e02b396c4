"""Properties of cron schedules, compared with a reference that checks every minute (or second) of a time range."""

from __future__ import annotations

import time
from calendar import monthrange
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tampu.errors import ConfigError
from tampu.wire.cron.schedule import next_fire, parse_cron
from tampu.wire.cron.zones import Zone, _iana_names, parse_zone

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tampu.wire.cron.schedule import CronSchedule

# The two clock changes of 2027 in each zone: those of Lord Howe are of half an hour, those of Santiago at midnight.
CLOCK_CHANGES = {
    "America/New_York": ("2027-03-14T07:00Z", "2027-11-07T06:00Z"),
    "Europe/London": ("2027-03-28T01:00Z", "2027-10-31T01:00Z"),
    "Australia/Lord_Howe": ("2027-04-03T15:00Z", "2027-10-02T15:30Z"),
    "America/Santiago": ("2027-04-04T03:00Z", "2027-09-05T04:00Z"),
}

ODD_CHANGES = [
    ("Antarctica/Troll", "2027-03-28T01:00Z"),  # two hours forward
    ("Antarctica/Troll", "2027-10-31T01:00Z"),  # two hours back
    ("Antarctica/Casey", "2010-03-04T15:00Z"),  # three hours back
    ("Africa/Monrovia", "1972-01-07T00:44:30Z"),  # 44 minutes and 30 seconds forward
    ("Pacific/Apia", "2011-12-30T10:00Z"),  # a day forward
]

# --- the reference ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pattern:
    """An expression and the values it stands for, drawn together so that the reference needs no parser."""

    expression: str
    is_cadence: bool
    seconds: frozenset[int]
    minutes: frozenset[int]
    hours: frozenset[int]
    weekdays: frozenset[int]  # 0 = Sunday

    def matches(self, wall: datetime) -> bool:
        return (
            wall.minute in self.minutes
            and wall.hour in self.hours
            and wall.second in self.seconds
            and wall.isoweekday() % 7 in self.weekdays
        )


@cache
def walk(tz: str, start: datetime, end: datetime, step: timedelta) -> list[tuple[datetime, datetime]]:
    """Yield every instant of the range with the local time in the zone, without its offset."""
    zone = ZoneInfo(tz)
    instants = [start + step * n for n in range(int((end - start) / step) + 1)]
    return [(instant, instant.astimezone(zone).replace(tzinfo=None)) for instant in instants]


def naive_fires(pattern: Pattern, tz: str, start: datetime, end: datetime, step: timedelta) -> list[datetime]:
    """Return the fires after `start` and up to `end`, found by checking the local time at every step."""
    found: list[datetime] = []
    moments = walk(tz, start, end, step)
    seen = {moments[0][1]}
    for (_, earlier_wall), (instant, wall) in pairwise(moments):
        fires = pattern.matches(wall)
        if not pattern.is_cadence:
            if wall in seen:
                fires = False  # the second pass of a repeated hour
            if any(pattern.matches(missing) for missing in between(earlier_wall, wall, step)):
                fires = True  # the end of a gap, for all that it left out
        seen.add(wall)
        if fires:
            found.append(instant)
    return found


def between(earlier: datetime, later: datetime, step: timedelta) -> Iterator[datetime]:
    """Return the readings that a clock skips when it goes from `earlier` to `later` in one step."""
    reading = earlier + step
    while reading < later:
        yield reading
        reading += step


def our_fires(expression: str, tz: str, start: datetime, end: datetime) -> list[datetime]:
    found: list[datetime] = []
    last = start
    while True:
        fire = next_fire(expression, tz, int(last.timestamp() * 1000))
        if fire is None or fire > end.timestamp() * 1000:
            return found
        last = datetime.fromtimestamp(fire / 1000, UTC)
        found.append(last)


# --- what is drawn ---------------------------------------------------------------------------------------------------


def spans(low: int, high: int) -> st.SearchStrategy[tuple[str, frozenset[int]]]:
    """Draw the text and the values of `a`, `a-b`, `a-b/n`, `a/n` or `*/n`."""
    value, step = st.integers(low, high), st.integers(1, high - low + 3)
    pair = st.tuples(value, value).map(sorted)
    return st.one_of(
        value.map(lambda a: (f"{a}", frozenset([a]))),
        pair.map(lambda p: (f"{p[0]}-{p[1]}", frozenset(range(p[0], p[1] + 1)))),
        st.tuples(pair, step).map(
            lambda ps: (f"{ps[0][0]}-{ps[0][1]}/{ps[1]}", frozenset(range(ps[0][0], ps[0][1] + 1, ps[1])))
        ),
        st.tuples(value, step).map(lambda vs: (f"{vs[0]}/{vs[1]}", frozenset(range(vs[0], high + 1, vs[1])))),
        step.map(lambda n: (f"*/{n}", frozenset(range(low, high + 1, n)))),
    )


def fields(low: int, high: int, *, max_items: int = 3) -> st.SearchStrategy[tuple[str, frozenset[int]]]:
    """Draw a list of spans, or `*`."""
    lists = st.lists(spans(low, high), min_size=1, max_size=max_items).map(
        lambda items: (",".join(text for text, _ in items), frozenset().union(*(values for _, values in items)))
    )
    return st.one_of(lists, st.just(("*", frozenset(range(low, high + 1)))))


@st.composite
def patterns(draw: st.DrawFn, *, with_seconds: bool = False, max_values: int = 6) -> Pattern:
    few = fields(0, 59).filter(lambda field: len(field[1]) <= max_values)  # more make the test slow, not better
    second, seconds = draw(few) if with_seconds else ("", frozenset([0]))
    minute, minutes = draw(few)
    # Hours around the changes, so that most examples meet one.
    near = st.lists(st.sampled_from([0, 1, 2, 3, 23]), min_size=1, max_size=3, unique=True)
    near_hours = near.map(lambda hours: (",".join(map(str, hours)), frozenset(hours)))
    hour, hours = draw(st.one_of(near_hours, fields(0, 23)))
    weekday, weekdays = draw(fields(0, 7))  # 7 is Sunday again
    expression = f"{second} {minute} {hour} * * {weekday}".strip()
    return Pattern(expression, "*" in hour, seconds, minutes, hours, frozenset(day % 7 for day in weekdays))


def windows(tz: str, margin: timedelta) -> list[tuple[datetime, datetime]]:
    changes = [datetime.fromisoformat(text) for text in CLOCK_CHANGES[tz]]
    return [(change - margin, change + margin) for change in changes]


# --- the properties --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tz", CLOCK_CHANGES)
def test_the_windows_contain_a_gap_and_a_repeat(tz: str) -> None:
    minute = timedelta(minutes=1)
    jumps = []
    for start, end in windows(tz, timedelta(hours=30)):
        walls = [wall for _, wall in walk(tz, start, end, minute)]
        jumps += [later - earlier for earlier, later in pairwise(walls) if later - earlier != minute]
    assert len(jumps) == 2
    assert min(jumps) < minute < max(jumps)


@pytest.mark.parametrize("tz", CLOCK_CHANGES)
@given(pattern=patterns())
@settings(max_examples=25, deadline=None)
def test_no_minute_around_two_clock_changes_is_skipped_or_added(tz: str, pattern: Pattern) -> None:
    for start, end in windows(tz, timedelta(hours=30)):
        expected = naive_fires(pattern, tz, start, end, timedelta(minutes=1))
        assert our_fires(pattern.expression, tz, start, end) == expected


@pytest.mark.parametrize("tz", CLOCK_CHANGES)
@given(pattern=patterns(with_seconds=True, max_values=4))
@settings(max_examples=12, deadline=None)
def test_no_second_around_two_clock_changes_is_skipped_or_added(tz: str, pattern: Pattern) -> None:
    for start, end in windows(tz, timedelta(minutes=75)):
        expected = naive_fires(pattern, tz, start, end, timedelta(seconds=1))
        assert our_fires(pattern.expression, tz, start, end) == expected


@pytest.mark.parametrize(("tz", "change"), ODD_CHANGES)
@given(pattern=patterns())
@settings(max_examples=12, deadline=None)
def test_nothing_around_an_odd_clock_change_is_skipped_or_added(tz: str, change: str, pattern: Pattern) -> None:
    start, end = (datetime.fromisoformat(change) + timedelta(hours=hours) for hours in (-12, 12))
    expected = naive_fires(pattern, tz, start, end, timedelta(seconds=30))
    assert our_fires(pattern.expression, tz, start, end) == expected


@pytest.mark.parametrize("tz", CLOCK_CHANGES)
@pytest.mark.parametrize(
    ("hour", "hours"),
    [("*", range(24)), ("0-3", range(4))],
)
def test_no_half_hour_of_a_whole_year_is_skipped_or_added(tz: str, hour: str, hours: tuple[int, ...]) -> None:
    pattern = Pattern(
        expression=f"0,30 {hour} * * *",
        is_cadence="*" in hour,
        seconds=frozenset([0]),
        minutes=frozenset([0, 30]),
        hours=frozenset(hours),
        weekdays=frozenset(range(7)),
    )
    start, end = datetime(2027, 1, 1, tzinfo=UTC), datetime(2027, 12, 31, tzinfo=UTC)
    # The clock changes fall on half hours too.
    expected = naive_fires(pattern, tz, start, end, timedelta(minutes=30))
    assert our_fires(pattern.expression, tz, start, end) == expected


@given(
    pattern=st.one_of(patterns(), patterns(with_seconds=True)),
    tz=st.sampled_from(sorted(_iana_names())),
    after_ms=st.integers(0, 4_000_000_000_000),
    within=st.floats(0, 1, exclude_max=True),
)
@settings(max_examples=80, deadline=None)
def test_fires_increase_and_match_their_pattern_in_any_zone(
    pattern: Pattern, tz: str, after_ms: int, within: float
) -> None:
    schedule, zone = parse_cron(pattern.expression), parse_zone(tz)
    for _ in range(4):
        fire = schedule.next_after(after_ms, zone)
        assert fire is not None
        assert fire > after_ms
        assert fire % 1000 == 0
        # Any start before a fire finds the same fire.
        assert schedule.next_after(after_ms + int(within * (fire - after_ms)), zone) == fire
        instant = datetime.fromtimestamp(fire // 1000, UTC)
        wall = instant.astimezone(ZoneInfo(tz))
        if not pattern.matches(wall):
            assert not pattern.is_cadence
            just_before = (instant - timedelta(seconds=1)).astimezone(ZoneInfo(tz))
            assert wall.utcoffset() > just_before.utcoffset(), "it may only be the end of a gap"  # type: ignore[operator]  # both are aware
        elif not pattern.is_cadence:
            assert wall.fold == 0, "a fixed time fires in the first pass"
        after_ms = fire


# --- days: a reference that asks of each date whether it matches -----------------------------------------------------


def is_last_of_month(day: date) -> bool:
    return (day + timedelta(days=1)).month != day.month


def nearest_weekday(year: int, month: int, to: int) -> date | None:
    length = monthrange(year, month)[1]
    if to > length:
        return None
    workdays = [date(year, month, n) for n in range(1, length + 1) if date(year, month, n).isoweekday() <= 5]
    return min(workdays, key=lambda day: abs(day.day - to))


@dataclass(frozen=True)
class DayRule:
    """One item of a day field: `kind` is its form, `n` its day, `k` its number in the month."""

    kind: str
    n: int = 0
    k: int = 0

    @property
    def text(self) -> str:
        forms = {"last day": "L", "nearest": f"{self.n}W", "nth": f"{self.n}#{self.k}", "last": f"{self.n}L"}
        return forms.get(self.kind, f"{self.n}")

    def matches(self, day: date) -> bool:
        weekday = day.isoweekday() % 7
        if self.kind == "day":
            return day.day == self.n
        if self.kind == "last day":
            return is_last_of_month(day)
        if self.kind == "nearest":
            return day == nearest_weekday(day.year, day.month, self.n)
        if self.kind == "weekday":
            return weekday == self.n % 7
        if self.kind == "nth":
            before = [day - timedelta(weeks=week) for week in range(1, 6)]
            return weekday == self.n % 7 and self.k == 1 + sum(earlier.month == day.month for earlier in before)
        return weekday == self.n % 7 and (day + timedelta(weeks=1)).month != day.month


month_day_rules = st.one_of(
    st.builds(DayRule, st.just("day"), st.integers(1, 31)),
    st.builds(DayRule, st.just("nearest"), st.integers(1, 31)),
    st.just(DayRule("last day")),
)
week_day_rules = st.one_of(
    st.builds(DayRule, st.just("weekday"), st.integers(0, 7)),
    st.builds(DayRule, st.just("nth"), st.integers(0, 7), st.integers(1, 5)),
    st.builds(DayRule, st.just("last"), st.integers(0, 7)),
)


@given(
    month_days=st.lists(month_day_rules, max_size=3),
    week_days=st.lists(week_day_rules, max_size=3),
    both=st.booleans(),
    month=st.one_of(fields(1, 12), st.just(("2", frozenset([2])))),
    start=st.dates(date(1999, 1, 1), date(2101, 1, 1)),
)
@settings(max_examples=100, deadline=None)
def test_no_day_is_skipped_or_added(
    month_days: list[DayRule],
    week_days: list[DayRule],
    both: bool,
    month: tuple[str, frozenset[int]],
    start: date,
) -> None:
    month_text, months = month
    month_day_text = ",".join(rule.text for rule in month_days) or "*"
    week_day_text = "+" * both + (",".join(rule.text for rule in week_days) or "*")

    def matches(day: date) -> bool:
        by_month_day = any(rule.matches(day) for rule in month_days)
        by_week_day = any(rule.matches(day) for rule in week_days)
        if not month_days or not week_days:
            day_matches = (by_month_day or not month_days) and (by_week_day or not week_days)
        else:
            day_matches = (by_month_day and by_week_day) if both else (by_month_day or by_week_day)
        return day.month in months and day_matches

    end = start + timedelta(days=800)
    days = [start + timedelta(days=n) for n in range(1, 801)]
    expression = f"0 0 {month_day_text} {month_text} {week_day_text}"
    midnight, end_midnight = (datetime(day.year, day.month, day.day, tzinfo=UTC) for day in (start, end))
    found = [fire.date() for fire in our_fires(expression, "UTC", midnight, end_midnight)]
    assert found == [day for day in days if matches(day)]


# --- bad input -------------------------------------------------------------------------------------------------------

cron_like = st.lists(
    st.text("0123456789*/,-LWlw#?+JANMONFRI", min_size=1, max_size=6), min_size=4, max_size=8
).map(" ".join)  # fmt: skip


def parsed_or_refused(expression: str) -> CronSchedule | None:
    try:
        return parse_cron(expression)
    except ConfigError as refusal:
        if len(str(refusal)) > 500:
            pytest.fail(f"a refusal of {len(str(refusal))} characters")
        return None


@given(expression=st.one_of(st.text(), cron_like, st.text("@dailymonthyer ")), after_ms=st.integers(-(2**64), 2**64))
@settings(max_examples=200, deadline=None)
def test_no_text_makes_the_parser_raise_anything_but_a_config_error(expression: str, after_ms: int) -> None:
    schedule = parsed_or_refused(expression)
    fire = schedule.next_after(after_ms, parse_zone("Europe/London")) if schedule else None
    assert fire is None or fire > after_ms


@given(tz=st.one_of(st.text(), st.text("+-0123456789:", max_size=8), st.text("/._", max_size=8)))
@settings(max_examples=200, deadline=None)
def test_no_text_makes_the_zone_parser_raise_anything_but_a_config_error(tz: str) -> None:
    zone: Zone | None = None
    with suppress(ConfigError):
        zone = parse_zone(tz)
    assert zone is None or abs(zone.reading(0)) < 86_400


HOSTILE_EXPRESSIONS = [
    "1," * 50_000 + "1 * * * *",
    "9" * 100_000 + " * * * *",
    "0" * 100_000 + " * * * *",
    "*/" + "9" * 100_000 + " * * * *",
    "* " * 50_000,
    "-" * 100_000,
    "0 0 * * " + "#" * 100_000,
    " " * 100_000 + "x",
    "@" * 100_000,
    "0 " * 4 + "1-" * 500,
    "0" * 1000 + "5 * * * *",
    "0 0 0 1 1 * " + ",".join(f"1-{4999 - n}/2" for n in range(110)),
    "0 0 0 1 1 * " + ",".join(["1-5000"] * 140),
    "0 0 " + ",".join(["*/1", "31W", "L"] * 90) + " * " + ",".join(["7L", "1-7#5"] * 60),
]


@pytest.mark.untraced
@pytest.mark.parametrize("expression", HOSTILE_EXPRESSIONS, ids=lambda text: f"{text[:20]} ({len(text)})")
def test_a_hostile_expression_is_dealt_with_at_once(expression: str) -> None:
    started = time.process_time()
    schedule = parsed_or_refused(expression)
    if schedule:
        schedule.next_after(0, parse_zone("America/New_York"))
    assert time.process_time() - started < 0.25


@pytest.mark.untraced
@pytest.mark.parametrize("tz", ["a/" * 50_000, "+" + "9" * 100_000, "America/New_York" * 6_000, " " * 100_000 + "x"])
def test_a_hostile_zone_is_dealt_with_at_once(tz: str) -> None:
    started = time.process_time()
    with pytest.raises(ConfigError):
        parse_zone(tz)
    assert time.process_time() - started < 0.25
