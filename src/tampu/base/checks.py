"""Checks of arguments, so that bad input is refused in one voice: what was given, what is allowed.

Every check returns the value it accepted and raises `ConfigError` otherwise; nothing has been sent then.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta

from tampu.errors import ConfigError

#: Longest job name, in bytes of UTF-8. A limit of the wire format, shared by all implementations.
MAX_NAME_BYTES = 256

#: Largest value of the wire's unsigned integers.
MAX_U32 = 2**32 - 1
MAX_U64 = 2**64 - 1
#: Latest time in milliseconds: scores of sorted sets are floats, exact up to here (some 285,000 years).
MAX_TIME_MS = 2**53


def shown(value: object, limit: int = 80) -> str:
    """The value as text for an error message, cut so that a huge one does not drown the message."""
    try:
        text = repr(value)
    except Exception as error:  # a hostile or broken __repr__, or an int too long to be written
        text = f"a {type(value).__name__} that cannot be shown ({type(error).__name__})"
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"


def invalid(field: str, value: object, allowed: str) -> ConfigError:
    """Return the error for a value that is not allowed: `raise invalid(...)`."""
    return ConfigError(f"{field} must be {allowed}; got {shown(value)}")


def check_int(field: str, value: object, *, low: int = 0, high: int = MAX_U64) -> int:
    """A whole number in [low, high]. A bool is not a number here: `True` is nearly always a misplaced argument."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        is_too_large = isinstance(value, int) and value > high
        bounds = f"of {low} or more" if high == MAX_U64 and not is_too_large else f"from {low} to {high}"
        raise invalid(field, value, f"a whole number {bounds}")
    return value


def check_float(field: str, value: object, *, low: float = 0.0) -> float:
    """A finite number of `low` or more."""
    if not isinstance(value, bool) and isinstance(value, int | float):
        try:
            number = float(value)
        except OverflowError:  # an int beyond all floats
            number = math.inf
        if math.isfinite(number) and number >= low:
            return number
    raise invalid(field, value, f"a finite number of {low:g} or more")


def check_bool(field: str, value: object) -> bool:
    """Exactly True or False: a truthy string in a setting is a mistake."""
    if not isinstance(value, bool):
        raise invalid(field, value, "True or False")
    return value


def check_text(field: str, value: object, *, blank_ok: bool = False) -> str:
    """A str that UTF-8 can carry, without NUL, and not blank unless allowed."""
    if not isinstance(value, str):
        raise invalid(field, value, "a str")
    if "\x00" in value:
        raise invalid(field, value, "text without NUL characters")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise invalid(field, value, "text that UTF-8 can carry (no lone surrogates)") from None
    if not blank_ok and not value.strip():
        raise invalid(field, value, "text that is not blank")
    return value


def check_queue_name(value: object, field: str = "queue_name") -> str:
    """A queue's name. Braces are refused: they would break the hash tag that keeps a queue in one Cluster slot."""
    name = check_text(field, value)
    if "{" in name or "}" in name:
        raise invalid(field, value, "text without { or } (they would split the queue over Cluster slots)")
    return name


def check_job_name(value: object, field: str = "name") -> str:
    """A job's name: empty, or up to 256 bytes of UTF-8."""
    name = check_text(field, value, blank_ok=True)
    size = len(name.encode())
    if size > MAX_NAME_BYTES:
        raise invalid(field, value, f"at most {MAX_NAME_BYTES} bytes of UTF-8 (it has {size})")
    return name


def check_job_id(value: object, field: str = "id") -> str:
    """An explicit job id: any text that is not blank and has no NUL."""
    return check_text(field, value)


def check_delay_ms(value: object, field: str = "delay") -> int:
    """A delay, as a `timedelta` or in seconds, to whole milliseconds."""
    if isinstance(value, timedelta):
        value = value.total_seconds()
    return _to_ms(field, value)


def check_instant_ms(value: object, field: str = "run_at") -> int:
    """An instant, as a `datetime` (naive means UTC) or epoch seconds, to epoch milliseconds."""
    if isinstance(value, datetime):
        value = (value if value.tzinfo is not None else value.replace(tzinfo=UTC)).timestamp()
    return _to_ms(field, value)


def _to_ms(field: str, seconds: object) -> int:
    ms = check_float(field, seconds) * 1000
    if ms > MAX_TIME_MS:
        raise invalid(field, seconds, f"at most {MAX_TIME_MS // 1000} seconds")
    return round(ms)
