"""Cron schedules: the next instant at which an expression fires in a zone. Pure: the clock comes in as `after_ms`.

Fires are at whole seconds. Where the zone's clocks change, the hour field decides:

- with a `*` in it (`*`, `*/2`) the schedule is a *cadence*: it fires whenever the wall clock shows a matching time, so
  in both passes of a repeated hour, and not for times the clock never shows;
- without (`2`, `9-17`, `0,12`) it is a *fixed time of day*: it fires once for it. In a repeated hour that is the first
  pass. Times that a gap leaves out fire at the end of the gap, all those of one gap together, be it of 30 minutes or,
  as in Samoa on 2011-12-30, of a whole day. The date that must match is that of the time left out.

ChasquiMQ differs there: it leaves a hole in a repeated hour, skips the lists and ranges a gap leaves out, fires twice
for the hour before a gap, and may answer with an instant in the past.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from functools import lru_cache

from tampu.base.checks import invalid
from tampu.wire.cron.days import days_by_shape, month_shape, years_with_a_day
from tampu.wire.cron.fields import LAST_YEAR, read_fields
from tampu.wire.cron.zones import Shift, Zone, parse_zone

_DAY = 86_400
_EPOCH_ORDINAL = date(1970, 1, 1).toordinal()

#: From here on, in seconds, there is nothing to find in any zone: two days are more than any offset.
_END_OF_TIME = (date(LAST_YEAR + 1, 1, 3).toordinal() - _EPOCH_ORDINAL) * _DAY


def next_fire(expression: str, tz: str | None, after_ms: int) -> int | None:
    """The first fire strictly after `after_ms`, in epoch milliseconds, or None if there is none up to the year 5000.

    Raises `ConfigError`, naming the field, for an expression or a zone that cannot be understood.
    """
    return parse_cron(expression).next_after(after_ms, parse_zone(tz))


def parse_cron(expression: str) -> CronSchedule:
    """The schedule of a 5, 6 or 7 field cron expression, or a `ConfigError` that names the field."""
    if not isinstance(expression, str):
        raise invalid("cron", expression, "a str")
    return _parse(expression)


@dataclass(frozen=True, slots=True)
class CronSchedule:
    """A parsed expression. Fields are bit masks: bit n is set if the value n matches."""

    expression: str
    seconds: int
    minutes: int
    hours: int
    months: int
    years: int  #: those with at least one matching day, so that the search meets no barren year
    days: tuple[int, ...]  #: the matching days for each shape of a month, see `days.py`
    is_cadence: bool  #: how it meets clock changes, see the top of this module

    def next_after(self, after_ms: int, zone: Zone) -> int | None:
        """The first fire strictly after `after_ms`, in epoch milliseconds; None if there is none up to the year 5000.

        Nothing fires before 1970: the wire's times are unsigned.
        """
        last = max(after_ms, -1) // 1000
        fire = self._after(last, zone) if last < _END_OF_TIME else None
        return None if fire is None else fire * 1000

    def _after(self, last: int, zone: Zone) -> int | None:
        reading = zone.reading(last)
        place = zone.place(reading)
        if not isinstance(place, Shift):
            return self._first_from(reading + 1, zone)
        # The clock shows this reading twice, so what comes next depends on which pass we are in.
        in_second_pass = last >= place.at
        if self.is_cadence:
            fire = self._within_repeat(reading, place, in_second_pass)
            return self._first_from(place.end_reading, zone) if fire is None else fire
        return self._first_from(place.end_reading if in_second_pass else reading + 1, zone)

    def _within_repeat(self, reading: int, repeat: Shift, in_second_pass: bool) -> int | None:
        """The next fire of a cadence in what is left of the two passes."""
        found = self._next_reading(reading + 1)
        if found is not None and found < repeat.end_reading:
            return found - (repeat.after if in_second_pass else repeat.before)
        if in_second_pass:
            return None
        found = self._next_reading(repeat.first_reading)
        return found - repeat.after if found is not None and found < repeat.end_reading else None

    def _first_from(self, reading: int, zone: Zone) -> int | None:
        """The first fire for a wall clock reading of `reading` or later, repeated ones counting in their first pass."""
        found = self._next_reading(reading)
        while found is not None:
            place = zone.place(found)
            if not isinstance(place, Shift):
                return place
            if not place.is_gap:
                return found - place.before
            if not self.is_cadence:
                # The next search starts after the end of the gap, so the other times left out do not fire again.
                return place.at
            found = self._next_reading(place.end_reading)
        return None

    def _next_reading(self, reading: int) -> int | None:
        """The first matching reading at or after `reading`, whether the zone's clock ever shows it or not."""
        day_number, second_of_day = divmod(reading, _DAY)
        today = date.fromordinal(day_number + _EPOCH_ORDINAL)
        day = self._next_day(today.year, today.month, today.day)
        if day == today:
            time = self._next_time(second_of_day)
            if time is not None:
                return day_number * _DAY + time
            # Day 32 of a month is past its end and leads on to the next one.
            day = self._next_day(today.year, today.month, today.day + 1)
        if day is None:
            return None
        return (day.toordinal() - _EPOCH_ORDINAL) * _DAY + self._first_time(_lowest(self.hours, 0))

    def _next_day(self, year: int, month: int, day: int) -> date | None:
        found_year = _lowest(self.years, year)
        while found_year >= 0:
            if found_year > year:
                month, day = 1, 1
            found_month = _lowest(self.months, month)
            while found_month >= 0:
                days = self.days[month_shape(found_year, found_month)]
                found_day = _lowest(days, day if found_month == month else 1)
                if found_day >= 0:
                    return date(found_year, found_month, found_day)
                found_month = _lowest(self.months, found_month + 1)
            found_year = _lowest(self.years, found_year + 1)
        return None

    def _next_time(self, second_of_day: int) -> int | None:
        """The first matching second of a day at or after this one."""
        minute_of_day, second = divmod(second_of_day, 60)
        hour, minute = divmod(minute_of_day, 60)
        if self.hours >> hour & 1:
            if self.minutes >> minute & 1:
                found = _lowest(self.seconds, second)
                if found >= 0:
                    return minute_of_day * 60 + found
            found = _lowest(self.minutes, minute + 1)
            if found >= 0:
                return (hour * 60 + found) * 60 + _lowest(self.seconds, 0)
        found = _lowest(self.hours, hour + 1)
        return self._first_time(found) if found >= 0 else None

    def _first_time(self, hour: int) -> int:
        """The first matching second of a day in this hour."""
        return (hour * 60 + _lowest(self.minutes, 0)) * 60 + _lowest(self.seconds, 0)


@lru_cache(maxsize=1024)
def _parse(expression: str) -> CronSchedule:
    fields = read_fields(expression)
    days = days_by_shape(fields)
    return CronSchedule(
        expression=expression,
        seconds=fields.seconds,
        minutes=fields.minutes,
        hours=fields.hours,
        months=fields.months,
        years=years_with_a_day(fields, days),
        days=days,
        is_cadence=fields.hour_has_star,
    )


def _lowest(mask: int, at_least: int) -> int:
    """The lowest set bit of `mask` that is `at_least` or higher, or -1."""
    rest = mask >> at_least
    return at_least + (rest & -rest).bit_length() - 1 if rest else -1
