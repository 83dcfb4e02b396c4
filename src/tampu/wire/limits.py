"""Limits of a queue, a task or a key, and how they are stored: five doubles, as `redis/lua/lib/gate.lua` reads them."""

from __future__ import annotations

import math
import re
import struct
from dataclasses import asdict, dataclass
from typing import Any

from tampu.base.checks import check_bool, invalid
from tampu.errors import ConfigError

#: Maximum length of a job's key, in bytes of UTF-8.
MAX_KEY_BYTES = 256
#: Seconds in each unit of a rate.
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_RATE = re.compile(r"(\d{1,9})\s*/\s*(\d{0,9})\s*([smhd])")
#: Highest and lowest rate, as milliseconds between two starts: a million a second, and one in about a year.
_MIN_INTERVAL_MS, _MAX_INTERVAL_MS = 0.001, 366 * 86_400_000
_MAX_NUMBER = 1_000_000_000
#: The last delivered ID of the group of a limited queue: it delivers nothing to XREADGROUP.
CLOSED = "18446744073709551615-18446744073709551615"
_FORMAT = struct.Struct("<5d")
#: A value that is not set: that of every key applies.
_INHERIT = -1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """How many jobs of a queue, a task or a key may run. What is not set is not limited.

    | field | example | meaning |
    |---|---|---|
    | `concurrency` | `2` | jobs that run at the same time, in all workers; 0 = none start |
    | `rate` | `"100/m"`, `"5/2h"` | starts per second (`s`), minute (`m`), hour (`h`) or day (`d`), evenly spaced |
    | `burst` | `20` | starts that may follow each other at once after a pause, within the rate. Defaults to 1 |
    | `weight` | `3` | share of a key beside the others that wait. Defaults to 1 |
    | `ordered` | `True` | one job of a key at a time, in the order of the adds, also through retries |

    A limit of one key inherits what it does not set from the limit of every key; `math.inf` and `"off"` undo a
    `concurrency` and a `rate` there.

    Raises:
        ConfigError: A value is not allowed.
    """

    concurrency: float | None = None
    rate: str | None = None
    burst: int | None = None
    weight: float | None = None
    ordered: bool | None = None

    def __post_init__(self) -> None:
        if self.concurrency is not None and self.concurrency != math.inf:
            _check_number("concurrency", self.concurrency, 0, whole=True)
        if self.rate is not None:
            _interval_ms(self.rate)
        if self.burst is not None:
            _check_number("burst", self.burst, 1, whole=True)
        if self.weight is not None:
            _check_number("weight", self.weight, 0.001)
        if self.ordered is not None:
            check_bool("ordered", self.ordered)

    @property
    def is_set(self) -> bool:
        """True if it limits anything."""
        return self != Limit()

    @property
    def interval_ms(self) -> float:
        """Milliseconds between two starts; 0 without a rate."""
        return 0.0 if self.rate is None else _interval_ms(self.rate)

    def pack(self) -> bytes:
        """Return it as it is stored."""
        interval = None if self.rate is None else self.interval_ms
        values = (self.concurrency, interval, self.burst, self.weight, self.ordered)
        return _FORMAT.pack(*(_INHERIT if value is None else float(value) for value in values))

    @classmethod
    def unpack(cls, stored: bytes) -> Limit:
        """Return a stored limit; an empty one if it cannot be read."""
        if len(stored) != _FORMAT.size:
            return cls()
        most, interval, burst, weight, ordered = (None if value < 0 else value for value in _FORMAT.unpack(stored))
        try:
            return cls(
                concurrency=most if most in (None, math.inf) else int(most or 0),
                rate=None if interval is None else _rate_text(interval),
                burst=None if burst is None else int(burst),
                weight=weight,
                ordered=None if ordered is None else ordered == 1,
            )
        except (ConfigError, ValueError, OverflowError):  # such as NaN: another program wrote it
            return cls()

    def as_dict(self) -> dict[str, Any]:
        """Return the values that are set, for JSON: a concurrency without a limit as None."""
        values = {name: value for name, value in asdict(self).items() if value is not None}
        return values | ({"concurrency": None} if self.concurrency == math.inf else {})


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """All limits of a queue."""

    #: Of the queue.
    queue: Limit
    #: Of every key that has none of its own. A job without a key counts under its task's name.
    per_key: Limit
    keys: dict[str, Limit]
    tasks: dict[str, Limit]

    def as_dict(self) -> dict[str, Any]:
        """Return them for JSON."""
        own = {"keys": self.keys, "tasks": self.tasks}
        named = {field: {name: limit.as_dict() for name, limit in limits.items()} for field, limits in own.items()}
        return {"queue": self.queue.as_dict(), "per_key": self.per_key.as_dict(), **named}


#: Fields of the hash of limits: the queue's and every key's; those of a key and a task start with these.
QUEUE_FIELD, PER_KEY_FIELD, KEY_PREFIX, TASK_PREFIX = "", "*", ":", ";"


def limit_fields(limit: Limit, *, key: str | None, task: str | None, per_key: Limit | None) -> dict[str, bytes]:
    """Return the fields to store for one call of `Queue.limit`. Raises `ConfigError` if they contradict each other."""
    if key is not None and task is not None:
        raise ConfigError("pass key or task, not both: a job counts for the limits of both")
    if per_key is not None and not isinstance(per_key, Limit):
        raise invalid("per_key", per_key, "a Limit, such as Limit(concurrency=2)")
    if (key is not None or task is not None) and per_key is not None:
        raise ConfigError("per_key is the limit of every key: pass it without key and task")
    if key is None and (limit.weight is not None or limit.ordered is not None):
        raise ConfigError("weight and ordered belong to keys: pass key=..., or per_key=Limit(...) for every key")
    if not limit.is_set and per_key is None:
        raise ConfigError("pass at least one of concurrency, rate, burst, weight, ordered and per_key")
    fields = {} if per_key is None else {PER_KEY_FIELD: per_key.pack()}
    if limit.is_set:
        fields[own_field(key, task)] = limit.pack()
    return fields


def own_field(key: str | None, task: str | None) -> str:
    """Return the field of the limit of a key, of a task, or of the queue."""
    if key is not None:
        return KEY_PREFIX + check_key(key)
    return QUEUE_FIELD if task is None else TASK_PREFIX + check_key(task, "task")


def decode_limits(flat: list[bytes]) -> Limits:
    """Return the limits in the reply to HGETALL."""
    stored = {name.decode(errors="replace"): value for name, value in zip(flat[::2], flat[1::2], strict=True)}
    own: dict[str, dict[str, Limit]] = {KEY_PREFIX: {}, TASK_PREFIX: {}}
    for name, value in sorted(stored.items()):
        if name[:1] in own:
            own[name[:1]][name[1:]] = Limit.unpack(value)
    queue, per_key = (Limit.unpack(stored.get(field, b"")) for field in (QUEUE_FIELD, PER_KEY_FIELD))
    return Limits(queue=queue, per_key=per_key, keys=own[KEY_PREFIX], tasks=own[TASK_PREFIX])


def check_key(key: object, field: str = "key") -> str:
    """Return a key by which limits may count jobs, or raise `ConfigError`."""
    if isinstance(key, str) and key and "\0" not in key:
        try:
            if len(key.encode()) <= MAX_KEY_BYTES:
                return key
        except UnicodeEncodeError:
            pass
    raise invalid(field, key, f"text of 1 to {MAX_KEY_BYTES} bytes of UTF-8 without NUL characters")


def _check_number(field: str, value: object, low: float, *, whole: bool = False) -> None:
    is_number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= _MAX_NUMBER:  # type: ignore[operator]  # a number by now
        kind = "a whole number" if whole else "a number"
        raise invalid(field, value, f"{kind} from {low} to {_MAX_NUMBER:,}")


def _interval_ms(rate: object) -> float:
    """Return the milliseconds between two starts; 0 for no rate."""
    if rate == "off":
        return 0.0
    found = _RATE.fullmatch(rate.strip()) if isinstance(rate, str) else None
    starts, units = (int(found[1]), int(found[2] or 1)) if found else (0, 0)
    interval = _UNITS[found[3]] * 1000 * units / starts if found and starts else 0.0
    if not _MIN_INTERVAL_MS <= interval <= _MAX_INTERVAL_MS:
        raise invalid(
            "rate", rate, "starts per unit of time, such as '10/s', '100/m' or '5/2h', at most a million per second"
        )
    return interval


def _rate_text(interval_ms: float) -> str:
    """Return an interval as the rate with the smallest unit in which it is a whole number of starts."""
    if interval_ms == 0:
        return "off"
    for unit, secs in _UNITS.items():
        starts = secs * 1000 / interval_ms
        if starts >= 1 and math.isclose(starts, round(starts), rel_tol=1e-9):
            return f"{round(starts)}/{unit}"
    return f"1/{max(round(interval_ms / 1000), 1)}s"
