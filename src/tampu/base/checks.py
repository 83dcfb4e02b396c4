"""Argument checks with uniform error messages: the value given and the values allowed.

Every check returns the value if it is valid and raises `ConfigError` otherwise, before anything is sent.
"""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, TypeVar

from tampu.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

#: Maximum length of a job name, in bytes of UTF-8. Part of the wire format, shared by all implementations.
MAX_NAME_BYTES = 256

#: Maximum length of a job ID, in bytes of UTF-8. It is part of keys, events and log lines.
MAX_ID_BYTES = 65_536

#: Maximum values of the unsigned integers on the wire.
MAX_U32 = 2**32 - 1
MAX_U64 = 2**64 - 1
#: Latest time in milliseconds: scores of sorted sets are floats, which are exact up to here (about 285,000 years).
MAX_TIME_MS = 2**53


def shown(value: object, limit: int = 80) -> str:
    """Return a value as text for an error message, cut to `limit` characters."""
    try:
        text = repr(value)
    except Exception as error:  # a broken __repr__, or an int with too many digits
        text = f"a {type(value).__name__} that cannot be shown ({type(error).__name__})"
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"


def invalid(field: str, value: object, allowed: str) -> ConfigError:
    """Return the error for an invalid value, to be raised by the caller."""
    return ConfigError(f"{field} must be {allowed}; got {shown(value)}")


def check_int(field: str, value: object, *, low: int = 0, high: int = MAX_U64) -> int:
    """Check an int in [low, high]. A bool is refused: it is nearly always a misplaced argument."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        is_too_large = isinstance(value, int) and value > high
        bounds = f"of {low} or more" if high == MAX_U64 and not is_too_large else f"from {low} to {high}"
        raise invalid(field, value, f"a whole number {bounds}")
    return value


def check_float(field: str, value: object, *, low: float = 0.0) -> float:
    """Check a finite number of at least `low`."""
    if not isinstance(value, bool) and isinstance(value, int | float):
        try:
            number = float(value)
        except OverflowError:  # an int that is too large for a float
            number = math.inf
        if math.isfinite(number) and number >= low:
            return number
    raise invalid(field, value, f"a finite number of {low:g} or more")


def check_bool(field: str, value: object) -> bool:
    """Check for exactly True or False: a truthy string in a setting is a mistake."""
    if not isinstance(value, bool):
        raise invalid(field, value, "True or False")
    return value


def check_text(field: str, value: object, *, blank_ok: bool = False) -> str:
    """Check a str that can be encoded as UTF-8, contains no NUL, and is not blank unless `blank_ok`."""
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
    """Check a queue name. Braces are refused: they would break the hash tag that keeps a queue in one Cluster slot."""
    name = check_text(field, value)
    if "{" in name or "}" in name:
        raise invalid(field, value, "text without { or } (they would split the queue over Cluster slots)")
    return name


def check_job_name(value: object, field: str = "name") -> str:
    """Check a job name: empty, or up to 256 bytes of UTF-8."""
    name = check_text(field, value, blank_ok=True)
    size = len(name.encode())
    if size > MAX_NAME_BYTES:
        raise invalid(field, value, f"at most {MAX_NAME_BYTES} bytes of UTF-8 (it has {size})")
    return name


def check_job_id(value: object, field: str = "id") -> str:
    """Check an explicit job ID: text that is not blank, contains no NUL, and has up to 65,536 bytes of UTF-8."""
    job_id = check_text(field, value)
    if not is_short(job_id, MAX_ID_BYTES):
        raise invalid(field, value, f"at most {MAX_ID_BYTES} bytes of UTF-8 (it has {len(job_id.encode())})")
    return job_id


def is_short(text: str, max_bytes: int) -> bool:
    """Return whether a text has at most this many bytes of UTF-8. Fast for short ones."""
    return len(text) * 4 <= max_bytes or len(text.encode(errors="replace")) <= max_bytes


def check_delay_ms(value: object, field: str = "delay") -> int:
    """Check a delay, given as a `timedelta` or in seconds, and return whole milliseconds."""
    if isinstance(value, timedelta):
        value = value.total_seconds()
    return _to_ms(field, value)


def check_instant_ms(value: object, field: str = "run_at") -> int:
    """Check a point in time, given as a `datetime` (naive means UTC) or epoch seconds; return epoch milliseconds."""
    if isinstance(value, datetime):
        value = (value if value.tzinfo is not None else value.replace(tzinfo=UTC)).timestamp()
    return _to_ms(field, value)


def _to_ms(field: str, seconds: object) -> int:
    ms = check_float(field, seconds) * 1000
    if ms > MAX_TIME_MS:
        raise invalid(field, seconds, f"at most {MAX_TIME_MS // 1000} seconds")
    return round(ms)


#: Escape sequences that color text in a terminal.
_COLORS = re.compile(r"\x1b\[[0-9;]*m")


def without_colors(text: str) -> str:
    """Return the text without colors: delta-rs writes them into its errors."""
    return _COLORS.sub("", text)


def one_line(text: object, limit: int | None = None) -> str:
    """Return the text in one line of at most `limit` characters, without colors."""
    return " ".join(without_colors(str(text)).split())[:limit]


T = TypeVar("T")

#: Maximum number of entries (jobs, messages, dead letters) per script call.
MAX_CALL_ENTRIES = 256
#: Maximum payload bytes per script call. A larger entry is sent alone.
MAX_CALL_BYTES = 256 * 1024
#: How long the mark of a cancelled job is kept, in seconds. A job that no worker has taken by then runs.
CANCEL_TTL_SECS = 86_400


def split_into_calls(items: Iterable[tuple[T, int]], max_entries: int = MAX_CALL_ENTRIES) -> Iterator[list[T]]:
    """Split (item, bytes) pairs into lists that each fit one script call, in order."""
    batch: list[T] = []
    total = 0
    for item, size in items:
        if batch and (len(batch) >= max_entries or total + size > MAX_CALL_BYTES):
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += size
    if batch:
        yield batch
