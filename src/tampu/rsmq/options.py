"""The options of an RSMQ client and of its connection pool."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from tampu.base.checks import check_bool, check_float, check_int, check_text, invalid
from tampu.errors import ConfigError
from tampu.redis.client import DEFAULT_PATIENCE_SECS
from tampu.redis.settings import ConnectionSettings, parse_url, resolve_url

if TYPE_CHECKING:
    from redis.credentials import CredentialProvider

    from tampu.redis.settings import CredentialCallback
    from tampu.rsmq.validate import DurationUnit

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
