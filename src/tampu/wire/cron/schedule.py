"""Parse a cron expression, field by field, into bit masks (bit n is set if the value n matches), and find its fires.

The dialect is that of the crate croner 3.0.1, which ChasquiMQ uses: a schedule means the same in both implementations.
"""

from __future__ import annotations

import re
from calendar import isleap, monthrange
from dataclasses import dataclass
from datetime import date
from functools import cache, lru_cache
from typing import NoReturn

from tampu.base.checks import check_text, invalid, shown
from tampu.errors import ConfigError
from tampu.wire.cron.zones import Shift, Zone, parse_zone

#: First and last year that a schedule may name and fires in (croner's limits).
FIRST_YEAR = 1
LAST_YEAR = 5000

#: Maximum length of an expression. Listing every second, minute, hour, day and month takes 620 characters; the limit
#: bounds the parsing time and keeps numbers short enough for int().
MAX_EXPRESSION_CHARS = 1024

#: Largest step. A step larger than its range matches only the start of the range.
MAX_STEP = 65535

NICKNAMES = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@hourly": "0 * * * *",
}

_MONTH_NAMES = ("JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC")
_DAY_NAMES = ("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT")
_SPAN = re.compile(r"(?P<start>\*|[0-9]+|[A-Z]{3})(?:-(?P<end>[0-9]+|[A-Z]{3}))?(?:/(?P<step>[0-9]+))?")
_NEAREST = re.compile(r"([0-9]+)W")
_LAST_WEEKDAY = re.compile(r"([0-9]+|[A-Z]{3})L")
_ORDINAL = re.compile(r"0*[1-5]")


@dataclass(frozen=True, slots=True)
class MonthDays:
    """The day-of-month field. `any_day`: the field is `*`, so only the day-of-week field restricts the days."""

    any_day: bool
    days: int = 0
    nearest_weekday_to: int = 0
    last: bool = False


@dataclass(frozen=True, slots=True)
class WeekDays:
    """The day-of-week field, 0 = Sunday. Days in `nth[k]` match only as a month's k-th, days in `last` as its last."""

    any_day: bool
    every: int
    nth: tuple[int, ...]
    last: int
    must_match_both: bool


@dataclass(frozen=True, slots=True)
class Fields:
    """A parsed expression. Bit n of a mask is set if the value n matches."""

    seconds: int
    minutes: int
    hours: int
    #: The hour has a star: what happens when clocks change, see `CronSchedule`.
    is_cadence: bool
    month_days: MonthDays
    months: int
    week_days: WeekDays
    years: int


@dataclass(frozen=True, slots=True)
class _Field:
    """The text of one field, with what is needed to parse it and to report errors."""

    expression: str
    text: str
    name: str
    low: int
    high: int
    names: tuple[str, ...] = ()
    first_name: int = 0
    extras: str = ""

    def items(self) -> list[str]:
        # Empty items are allowed, as in croner: schedules such as "0,30," exist and must keep running.
        found = [item for item in self.text.upper().split(",") if item]
        return found or self.reject(self.text, "at least one value")

    def reject(self, item: str, allowed: str) -> NoReturn:
        expression = shown(self.expression)
        raise ConfigError(f"cron field '{self.name}' must be {allowed}; got {shown(item)} in {expression}")

    def reject_syntax(self, item: str) -> NoReturn:
        names = f" or {self.names[0]} to {self.names[-1]}" if self.names else ""
        forms = "*, or a list of n, a-b, */step, a-b/step and a/step"
        self.reject(item, f"{forms} with values from {self.low} to {self.high}{names}{self.extras}")

    def value(self, text: str, item: str, *, ends_range: bool = False) -> int:
        if text in self.names:
            value = self.names.index(text) + self.first_name
            return 7 if ends_range and text == "SUN" else value
        if not text.isdecimal():
            self.reject_syntax(item)
        if not self.low <= int(text) <= self.high:
            self.reject(item, f"from {self.low} to {self.high}")
        return int(text)

    def span(self, text: str, item: str) -> int:
        """Return the mask of `a`, `a-b`, `*/n`, `a-b/n` or `a/n`; `text` is all or the first part of `item`."""
        match = _SPAN.fullmatch(text)
        if match is None or (match["start"] == "*" and (match["end"] or not match["step"])):
            self.reject_syntax(item)
        start = self.low if match["start"] == "*" else self.value(match["start"], item)
        end = self.high if match["step"] else start
        if match["end"]:
            end = self.value(match["end"], item, ends_range=True)
        if start > end:
            self.reject(item, f"an ascending range (to wrap around, use two: {start}-{self.high},{self.low}-{end})")
        return _mask(start, end, self._step(match["step"], item))

    def _step(self, text: str | None, item: str) -> int:
        step = 1 if text is None else int(text)
        if not 1 <= step <= MAX_STEP:
            self.reject(item, f"with a step from 1 to {MAX_STEP}")
        return step

    def mask(self) -> int:
        if self.text == "*":
            return _mask(self.low, self.high, 1)
        mask = 0
        for item in self.items():
            mask |= self.span(item, item)
        return mask


def read_fields(expression: str) -> Fields:
    """Parse an expression of 5 fields, 6 (seconds first) or 7 (and a year last), or a nickname such as `@daily`."""
    second, minute, hour, month_day, month, week_day, year = _split(expression)
    return Fields(
        seconds=_Field(expression, second, "second", 0, 59).mask(),
        minutes=_Field(expression, minute, "minute", 0, 59).mask(),
        hours=_Field(expression, hour, "hour", 0, 23).mask(),
        is_cadence="*" in hour,
        month_days=_month_days(expression, month_day),
        months=_Field(expression, month, "month", 1, 12, _MONTH_NAMES, first_name=1).mask(),
        week_days=_week_days(expression, week_day),
        years=_Field(expression, year, "year", FIRST_YEAR, LAST_YEAR).mask(),
    )


def _split(expression: str) -> list[str]:
    if len(check_text("cron", expression)) > MAX_EXPRESSION_CHARS:
        raise invalid("cron", expression, f"at most {MAX_EXPRESSION_CHARS} characters")
    text = expression.strip()
    if text.startswith("@") and text.lower() not in NICKNAMES:
        raise invalid("cron nickname", expression, f"one of {', '.join(NICKNAMES)}")
    texts = NICKNAMES.get(text.lower(), text).split()
    if not 5 <= len(texts) <= 7:
        layout = "5 to 7 fields: [second] minute hour day-of-month month day-of-week [year, only with seconds]"
        raise invalid("cron", expression, f"{layout} (it has {len(texts)})")
    return ["0"] * (len(texts) == 5) + texts + ["*"] * (len(texts) < 7)


def _month_days(expression: str, text: str) -> MonthDays:
    extras = ", or ?, L (the last day), nW (the weekday nearest to n)"
    field = _Field(expression, text.replace("?", "*"), "day of month", 1, 31, extras=extras)
    if field.text == "*":
        return MonthDays(any_day=True)
    days = nearest = 0
    last = False
    for item in field.items():
        if item == "L":
            last = True
        elif match := _NEAREST.fullmatch(item):
            nearest |= 1 << field.value(match[1], item)
        else:
            days |= field.span(item, item)
    return MonthDays(any_day=False, days=days, nearest_weekday_to=nearest, last=last)


def _week_days(expression: str, text: str) -> WeekDays:
    extras = ", or ?, n#k (the k-th n of the month), nL or n#L (the last n), a leading + (day of month must match too)"
    rest = text.removeprefix("+").replace("?", "*")
    field = _Field(expression, rest, "day of week", 0, 7, _DAY_NAMES, extras=extras)
    every = last = 0
    nth = [0] * 6
    if field.text != "*":
        for item in field.items():
            span, hash_sign, which = item.partition("#")
            if match := _LAST_WEEKDAY.fullmatch(item):
                last |= 1 << field.value(match[1], item)
            elif hash_sign and which == "L":
                last |= field.span(span, item)
            elif hash_sign:
                nth[_ordinal(field, which, item)] |= field.span(span, item)
            elif item != "L":  # croner accepts a bare L, which matches no day
                every |= field.span(item, item)
    return WeekDays(
        any_day=field.text == "*",
        every=_sunday_is_0(every),
        nth=tuple(_sunday_is_0(days) for days in nth),
        last=_sunday_is_0(last),
        must_match_both=text.startswith("+"),
    )


def _ordinal(field: _Field, text: str, item: str) -> int:
    if not _ORDINAL.fullmatch(text):
        field.reject(item, "with #1 to #5, or #L for the last")
    return int(text)


def _sunday_is_0(days: int) -> int:
    return (days | days >> 7) & 0b111_1111


def _mask(start: int, end: int, step: int) -> int:
    if step == 1:
        return (1 << end + 1) - (1 << start)
    return sum(1 << value for value in range(start, end + 1, step))


#: Years that cover all 14 shapes: within a century the calendar repeats every 28 years.
_YEARS_OF_ALL_SHAPES = range(2000, 2028)

#: The Gregorian calendar, weekdays included, repeats after this many years.
_CALENDAR_CYCLE = 400

_SATURDAY = 6
_SUNDAY = 0


def month_shape(year: int, month: int) -> int:
    """Return the index of this month's mask in the result of `days_by_shape`."""
    first_weekday, length = monthrange(year, month)
    return (length - 28) * 7 + (first_weekday + 1) % 7


def days_by_shape(fields: Fields) -> tuple[int, ...]:
    """Return, for each shape of a month, the mask of the days that match the two day fields combined."""
    return tuple(_matching_days(fields, length, first) for length in range(28, 32) for first in range(7))


def years_with_a_day(fields: Fields, days: tuple[int, ...]) -> int:
    """Return the mask of the years that the schedule names and that have at least one matching day."""
    mask = 0
    for shape, sample in {_year_shape(year): year for year in _YEARS_OF_ALL_SHAPES}.items():
        if any(fields.months >> month & 1 and days[month_shape(sample, month)] for month in range(1, 13)):
            mask |= _years_by_shape()[shape]
    return fields.years & mask


def _matching_days(fields: Fields, length: int, first: int) -> int:
    whole_month = (1 << length + 1) - 2
    by_month_day = _by_month_day(fields.month_days, length, first) & whole_month
    by_week_day = _by_week_day(fields.week_days, length, first)
    if fields.month_days.any_day:
        return whole_month if fields.week_days.any_day else by_week_day
    if fields.week_days.any_day:
        return by_month_day
    if fields.week_days.must_match_both:
        return by_month_day & by_week_day
    return by_month_day | by_week_day


def _by_month_day(rule: MonthDays, length: int, first: int) -> int:
    mask = rule.days
    if rule.last:
        mask |= 1 << length
    for day in range(1, length + 1):
        if rule.nearest_weekday_to >> day & 1:
            mask |= 1 << _nearest_weekday(day, length, first)
    return mask


def _nearest_weekday(day: int, length: int, first: int) -> int:
    """Return the day from Monday to Friday nearest to `day`, within the same month."""
    weekday = (first + day - 1) % 7
    if weekday == _SATURDAY:
        return day - 1 if day > 1 else day + 2
    if weekday == _SUNDAY:
        return day + 1 if day < length else day - 2
    return day


def _by_week_day(rule: WeekDays, length: int, first: int) -> int:
    mask = 0
    for day in range(1, length + 1):
        weekday = (first + day - 1) % 7
        meant = rule.every | rule.nth[(day + 6) // 7]
        if day + 7 > length:
            meant |= rule.last
        mask |= (meant >> weekday & 1) << day
    return mask


def _year_shape(year: int) -> tuple[bool, int]:
    return isleap(year), date(year, 1, 1).weekday()


@cache
def _years_by_shape() -> dict[tuple[bool, int], int]:
    cycle: dict[tuple[bool, int], int] = {}
    for year in range(_CALENDAR_CYCLE):
        shape = _year_shape(year + _CALENDAR_CYCLE)
        cycle[shape] = cycle.get(shape, 0) | 1 << year
    in_range = (1 << LAST_YEAR + 1) - (1 << FIRST_YEAR)
    starts = range(0, LAST_YEAR + 1, _CALENDAR_CYCLE)
    return {shape: in_range & sum(mask << start for start in starts) for shape, mask in cycle.items()}


_DAY = 86_400
_EPOCH_ORDINAL = date(1970, 1, 1).toordinal()

#: From this instant on (in seconds) nothing fires in any zone: two days are more than any offset.
_END_OF_TIME = (date(LAST_YEAR + 1, 1, 3).toordinal() - _EPOCH_ORDINAL) * _DAY


def next_fire(expression: str, tz: str | None, after_ms: int) -> int | None:
    """Return the first fire strictly after `after_ms`, in epoch ms; None if there is none up to the year 5000.

    Raises `ConfigError` if the expression or the zone is not valid. The message names the field.
    """
    return parse_cron(expression).next_after(after_ms, parse_zone(tz))


def parse_cron(expression: str) -> CronSchedule:
    """Parse a cron expression of 5, 6 or 7 fields. Raises `ConfigError`, which names the invalid field."""
    if not isinstance(expression, str):
        raise invalid("cron", expression, "a str")
    return _parse(expression)


@dataclass(frozen=True, slots=True)
class CronSchedule:
    """The fires of an expression.

    When a clock is put back, a cadence (an expression whose hour has a star) fires in both passes of the repeated hour,
    others only in the first. When it is put forward, a cadence skips the fires of the gap, others fire at its end.
    """

    expression: str
    fields: Fields
    years: int  #: only those with at least one matching day, so the search skips all others
    days: tuple[int, ...]  #: the matching days for each shape of a month, see `days_by_shape`

    def next_after(self, after_ms: int, zone: Zone) -> int | None:
        """Return the first fire strictly after `after_ms`, in epoch ms; None if there is none up to the year 5000.

        Nothing fires before 1970: times on the wire are unsigned.
        """
        last = max(after_ms, -1) // 1000
        fire = self._after(last, zone) if last < _END_OF_TIME else None
        return None if fire is None else fire * 1000

    def _after(self, last: int, zone: Zone) -> int | None:
        reading = zone.reading(last)
        place = zone.place(reading)
        if not isinstance(place, Shift):
            return self._first_from(reading + 1, zone)
        # The clock shows this reading twice: the next fire depends on which of the two passes this is.
        in_second_pass = last >= place.at
        if self.fields.is_cadence:
            fire = self._within_repeat(reading, place, in_second_pass)
            return self._first_from(place.end_reading, zone) if fire is None else fire
        return self._first_from(place.end_reading if in_second_pass else reading + 1, zone)

    def _within_repeat(self, reading: int, repeat: Shift, in_second_pass: bool) -> int | None:
        """Return the next fire of a cadence in the rest of the two passes; None if there is none."""
        found = self._next_reading(reading + 1)
        if found is not None and found < repeat.end_reading:
            return found - (repeat.after if in_second_pass else repeat.before)
        if in_second_pass:
            return None
        found = self._next_reading(repeat.first_reading)
        return found - repeat.after if found is not None and found < repeat.end_reading else None

    def _first_from(self, reading: int, zone: Zone) -> int | None:
        """Return the first fire at the wall clock reading `reading` or later; repeated readings use the first pass."""
        found = self._next_reading(reading)
        while found is not None:
            place = zone.place(found)
            if not isinstance(place, Shift):
                return place
            if not place.is_gap:
                return found - place.before
            if not self.fields.is_cadence:
                # The next search starts after the end of the gap, so the other skipped times do not fire again.
                return place.at
            found = self._next_reading(place.end_reading)
        return None

    def _next_reading(self, reading: int) -> int | None:
        """Return the first matching reading at or after `reading`, even if the zone's clock never shows it."""
        day_number, second_of_day = divmod(reading, _DAY)
        today = date.fromordinal(day_number + _EPOCH_ORDINAL)
        day = self._next_day(today.year, today.month, today.day)
        if day == today:
            time = self._next_time(second_of_day)
            if time is not None:
                return day_number * _DAY + time
            # A day past the end of the month (up to 32) matches nothing, so the search moves on to the next month.
            day = self._next_day(today.year, today.month, today.day + 1)
        if day is None:
            return None
        return (day.toordinal() - _EPOCH_ORDINAL) * _DAY + self._first_time(_lowest(self.fields.hours, 0))

    def _next_day(self, year: int, month: int, day: int) -> date | None:
        found_year = _lowest(self.years, year)
        while found_year >= 0:
            if found_year > year:
                month, day = 1, 1
            found_month = _lowest(self.fields.months, month)
            while found_month >= 0:
                days = self.days[month_shape(found_year, found_month)]
                found_day = _lowest(days, day if found_month == month else 1)
                if found_day >= 0:
                    return date(found_year, found_month, found_day)
                found_month = _lowest(self.fields.months, found_month + 1)
            found_year = _lowest(self.years, found_year + 1)
        return None

    def _next_time(self, second_of_day: int) -> int | None:
        """Return the first matching second of a day at or after this one; None if there is none."""
        minute_of_day, second = divmod(second_of_day, 60)
        hour, minute = divmod(minute_of_day, 60)
        if self.fields.hours >> hour & 1:
            if self.fields.minutes >> minute & 1:
                found = _lowest(self.fields.seconds, second)
                if found >= 0:
                    return minute_of_day * 60 + found
            found = _lowest(self.fields.minutes, minute + 1)
            if found >= 0:
                return (hour * 60 + found) * 60 + _lowest(self.fields.seconds, 0)
        found = _lowest(self.fields.hours, hour + 1)
        return self._first_time(found) if found >= 0 else None

    def _first_time(self, hour: int) -> int:
        """Return the first matching second of a day in this hour."""
        return (hour * 60 + _lowest(self.fields.minutes, 0)) * 60 + _lowest(self.fields.seconds, 0)


@lru_cache(maxsize=1024)
def _parse(expression: str) -> CronSchedule:
    fields = read_fields(expression)
    days = days_by_shape(fields)
    return CronSchedule(expression, fields, years_with_a_day(fields, days), days)


def _lowest(mask: int, at_least: int) -> int:
    """Return the lowest set bit of `mask` that is `at_least` or higher; -1 if there is none."""
    rest = mask >> at_least
    return at_least + (rest & -rest).bit_length() - 1 if rest else -1
