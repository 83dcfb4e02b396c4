"""Compute the days of a month and the years in which a cron schedule can fire, once, when it is parsed.

A month has one of 28 shapes (four lengths, seven first weekdays) and a year one of 14, so the search for the next fire
never tries days one by one, and a schedule that matches no date (30 February) is detected at once.
"""

from __future__ import annotations

from calendar import isleap, monthrange
from datetime import date
from functools import cache
from typing import TYPE_CHECKING

from tampu.wire.cron.fields import FIRST_YEAR, LAST_YEAR

if TYPE_CHECKING:
    from tampu.wire.cron.fields import Fields, MonthDays, WeekDays

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
