"""Parse a cron expression, field by field, into bit masks (bit n is set if the value n matches).

The dialect is that of the crate croner 3.0.1, which ChasquiMQ uses: a schedule means the same in both implementations.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NoReturn

from tampu.base.checks import check_text, invalid, shown
from tampu.errors import ConfigError

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
    """A parsed expression. `hour_has_star` decides what happens when clocks change, see `schedule.py`."""

    seconds: int
    minutes: int
    hours: int
    hour_has_star: bool
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
        hour_has_star="*" in hour,
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
