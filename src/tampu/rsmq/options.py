"""The options of an RSMQ client and of its connection pool, and the checks of what callers pass."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

from tampu.base.checks import check_bool, check_float, check_int, check_text, invalid
from tampu.errors import ConfigError
from tampu.redis.client import DEFAULT_PATIENCE_SECS
from tampu.redis.settings import ConnectionSettings, parse_url, resolve_url
from tampu.rsmq.errors import InvalidFormat, InvalidValue, MissingParameter

if TYPE_CHECKING:
    from tampu.redis.settings import CredentialCallback, CredentialProvider

Precision = Literal["ms", "us"]
SizeUnit = Literal["bytes", "utf16"]


@dataclass(frozen=True, kw_only=True)
class RsmqOptions:
    """The server, and how queues are stored. Raises `ConfigError` if an option is not valid.

    | field | default | meaning |
    |---|---|---|
    | `url` | `TAMPU_URL`, or `redis://127.0.0.1:6379` | see `tampu.redis.settings` |
    | `ns` | `"rsmq"` | prefix of all keys; needs a hash tag on a Cluster: `"{rsmq}"` |
    | `realtime` | False | publish each send on the channel `{ns}:rt:{queue}` |
    | `precision` | `"ms"` | unit of scores; `"us"` is Rust's feature break-js-comp |
    | `duration_unit` | `"s"`; with `precision="us"` `"ms"` | unit of `vt` and `delay` in a queue's hash |
    | `size_unit` | `"bytes"` | unit of `maxsize`; `"utf16"` as in JavaScript |
    | `send_once` | False | repeat sends after a lost connection, without duplicates, using a marker key |
    | `patience_secs` | 10 | how long an operation waits for a server that is down, in seconds |
    """

    url: str = field(default_factory=lambda: resolve_url(None))
    ns: str = "rsmq"
    #: Wakes listeners at once, at the cost of one PUBLISH per message.
    realtime: bool = False
    #: Use one precision per queue: to clients with "ms", scores in microseconds are far in the future.
    precision: Precision = "ms"
    #: "s" is compatible with JavaScript, "ms" with Rust's rsmq_async 8.0 and later, with or without break-js-comp. The
    #: arguments `vt` and `delay` are in seconds in either case. None = the default for `precision`.
    duration_unit: DurationUnit | None = None
    #: A message of 1024 euro signs has 3072 bytes and 1024 UTF-16 units.
    size_unit: SizeUnit = "bytes"
    #: False: a send whose connection breaks raises `OutcomeUnknownError`, because it may or may not have succeeded.
    #: True: the send is repeated without duplicates. The sender writes a key `{ns}:{queue}:sent:{sender}` with a TTL of
    #: one minute, which JavaScript does not.
    send_once: bool = False
    patience_secs: float = DEFAULT_PATIENCE_SECS
    #: Returns user and password; called before each connection.
    credential_provider: CredentialProvider | CredentialCallback | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_text("ns", self.ns)
        check_bool("realtime", self.realtime)
        check_bool("send_once", self.send_once)
        check_float("patience_secs", self.patience_secs)
        _one_of("precision", self.precision, "ms", "us")
        _one_of("duration_unit", self.duration_unit, "s", "ms", None)
        _one_of("size_unit", self.size_unit, "bytes", "utf16")
        settings = self.connection_settings()
        if settings.kind == "cluster" and not has_hash_tag(self.ns):
            raise ConfigError(no_hash_tag(self.ns))

    def connection_settings(self) -> ConnectionSettings:
        """Return the connection settings of `url`."""
        return parse_url(self.url, credential_provider=self.credential_provider)

    @property
    def unit(self) -> DurationUnit:
        """The unit of `vt` and `delay` in a queue's hash, with the default resolved."""
        return self.duration_unit or ("s" if self.precision == "ms" else "ms")


@dataclass(frozen=True, kw_only=True)
class PoolOptions:
    """The size of a `PooledRsmq`'s connection pool."""

    #: Maximum number of connections; further operations wait for one.
    max_size: int = 10
    #: Connections that are opened at the start and kept open when idle.
    min_idle: int = 0
    #: Seconds after which an idle connection beyond `min_idle` is closed.
    idle_secs: float = 600.0

    def __post_init__(self) -> None:
        check_int("max_size", self.max_size, low=1)
        check_int("min_idle", self.min_idle, low=0, high=self.max_size)
        check_float("idle_secs", self.idle_secs)


def as_options(given: RsmqOptions | str | None) -> RsmqOptions:
    """Return the options for a constructor's argument: options, a URL or None."""
    if given is None:
        return RsmqOptions()
    if isinstance(given, str):
        return RsmqOptions(url=given)
    if isinstance(given, RsmqOptions):
        return given
    raise invalid("options", given, "an RsmqOptions or a URL")


def has_hash_tag(ns: str) -> bool:
    """Return whether `ns` has a non-empty `{...}`, which puts all its keys into one Cluster slot."""
    _, opened, rest = ns.partition("{")
    tag, closed, _ = rest.partition("}")
    return bool(opened and tag and closed)


def no_hash_tag(ns: str) -> str:
    """Return the error message for a Cluster without a hash tag."""
    return (
        f"ns must have a hash tag on a Cluster, such as '{{rsmq}}', so that all keys of a queue are on one node; "
        f"got {ns!r}. Clients in other languages must use the same ns"
    )


def _one_of(name: str, value: object, *allowed: str | None) -> None:
    if value not in allowed:
        raise invalid(name, value, f"one of {', '.join(map(repr, allowed))}")


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
