"""Validate names, IDs, durations and sizes by the rules, and with the errors, of the JavaScript client."""

from __future__ import annotations

import math
import re
from datetime import timedelta
from typing import Literal

from tampu.rsmq.errors import InvalidFormat, InvalidValue, MissingParameter

#: A duration: whole seconds, as a number or as text that JavaScript's `parseInt` reads, or a `timedelta`.
Duration = float | str | timedelta

#: The unit of `vt` and `delay` in a queue's hash.
DurationUnit = Literal["s", "ms"]

#: Maximum `vt` and `delay`, in seconds: about 115 days.
MAX_DURATION_SECS = 9_999_999
#: Limits of `maxsize`; -1 means no limit.
MIN_MAXSIZE = 1024
MAX_MAXSIZE = 65536
UNLIMITED = -1
#: Not allowed as a queue name: its key would be the index of all queues.
RESERVED_NAME = "QUEUES"

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,160}")
_ID = re.compile(r"[a-zA-Z0-9:]{32}")
#: Python converts at most 4300 digits; beyond 300 no number is a float.
_INTEGER = re.compile(r"\s*([+-]?[0-9]{1,300})")


def parse_int(value: object) -> int | None:
    """Return JavaScript's `parseInt(value, 10)`: 1 for "1abc" and 1.9; None instead of NaN."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        return int(value) if math.isfinite(value) else None
    if isinstance(value, str):
        found = _INTEGER.match(value)
        return int(found[1]) if found else None
    return None


def check_qname(value: object) -> str:
    """Return a valid queue name: 1 to 160 characters of A-Z a-z 0-9 _ -. A number is converted to text."""
    name = _text("qname", value)
    if not _NAME.fullmatch(name):
        raise InvalidFormat("qname", value)
    if name == RESERVED_NAME:
        raise InvalidFormat("qname", value, "QUEUES is the index of all queues: choose another name")
    return name


def check_id(value: object) -> str:
    """Return a valid message ID: exactly 32 characters of A-Z a-z 0-9 and the colon."""
    text = _text("id", value)
    if not _ID.fullmatch(text):
        raise InvalidFormat("id", value)
    return text


def check_duration(item: str, value: object, unit: DurationUnit = "s") -> int:
    """Return a valid duration in whole units of the queue's hash."""
    number = _in_unit(value, unit)
    high = MAX_DURATION_SECS if unit == "s" else MAX_DURATION_SECS * 1000
    if number is None or not 0 <= number <= high:
        notes = ["a timedelta must be whole seconds"] if isinstance(value, timedelta) and unit == "s" else []
        raise InvalidValue(item, 0, MAX_DURATION_SECS, value, *notes)
    return number


def looks_like_milliseconds(*durations: float) -> bool:
    """Return whether one of these, read as seconds, is out of range or a multiple of 1000.

    Rust's rsmq_async has stored milliseconds since 8.0, others store seconds, and a queue does not record the unit. A
    `vt` of 30000 seconds is unlikely, one of 30000 ms is common. It is only a hint: five hours (18000 s) match, too.
    """
    return any(value > MAX_DURATION_SECS or (value >= 1000 and value % 1000 == 0) for value in durations)


def check_maxsize(value: object) -> int:
    """Return a valid `maxsize`: 1024 to 65536 bytes, or -1 for no limit."""
    number = parse_int(value)
    if number is None or (number != UNLIMITED and not MIN_MAXSIZE <= number <= MAX_MAXSIZE):
        raise InvalidValue("maxsize", MIN_MAXSIZE, MAX_MAXSIZE, value)
    return number


def _in_unit(value: object, unit: DurationUnit) -> int | None:
    if isinstance(value, timedelta):
        whole, rest = divmod(value, timedelta(**{"seconds" if unit == "s" else "milliseconds": 1}))
        # Half a second must not become a vt of 0: every consumer would receive the message at once.
        return None if rest else whole
    if unit == "ms" and isinstance(value, float) and math.isfinite(value):
        return int(value * 1000)
    number = parse_int(value)
    return number if number is None or unit == "s" else number * 1000


def _text(item: str, value: object) -> str:
    """Convert a value to text as JavaScript does: everything falsy is missing, the rest uses `toString`."""
    if isinstance(value, bool):
        raise InvalidFormat(item, value)
    if not value:
        raise MissingParameter(item)
    return str(value)
