"""Compute when a cron expression fires next in a time zone. Pure: the current time is the parameter `after_ms`.

Fires are at whole seconds. When clocks change, the hour field decides what happens:

- With a `*` in it (`*`, `*/2`) the schedule is a *cadence*. It fires whenever the wall clock shows a matching time: in
  both passes of a repeated hour, and not for times that the clock skips.
- Without one (`2`, `9-17`, `0,12`) it is a *fixed time of day* and fires once. In a repeated hour it fires in the first
  pass. All times skipped by one gap fire together, at the end of the gap, whether it lasts 30 minutes or, as in Samoa
  on 2011-12-30, a whole day. The date that must match is that of the skipped time.

ChasquiMQ differs: it misses fires in a repeated hour, drops lists and ranges that a gap skips, fires twice for the hour
before a gap, and may return an instant in the past.
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
    """A parsed expression. Fields are bit masks: bit n is set if the value n matches."""

    expression: str
    seconds: int
    minutes: int
    hours: int
    months: int
    years: int  #: only those with at least one matching day, so the search skips all others
    days: tuple[int, ...]  #: the matching days for each shape of a month, see `days.py`
    is_cadence: bool  #: what happens when clocks change, see the top of this module

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
        if self.is_cadence:
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
            if not self.is_cadence:
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
        """Return the first matching second of a day at or after this one; None if there is none."""
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
        """Return the first matching second of a day in this hour."""
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
    """Return the lowest set bit of `mask` that is `at_least` or higher; -1 if there is none."""
    rest = mask >> at_least
    return at_least + (rest & -rest).bit_length() - 1 if rest else -1
