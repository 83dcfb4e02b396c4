"""Connection settings, parsed from a URL.

| URL | server |
|---|---|
| `redis://[user:password@]host[:6379][/db]` | one server |
| `rediss://...` | over TLS; `?ssl_ca_certs=ca.pem&ssl_certfile=...&ssl_keyfile=...&ssl_check_hostname=false` |
| `unix:///path/to.sock[?db=0]` | one server on a Unix socket |
| `redis+sentinel://host1:26379,host2:26379/mymaster[/db]` | the sentinels' current master (`rediss+sentinel://`) |
| `redis+cluster://host1:6379,host2:6379` | a Cluster; each queue is on the node of its slot (`rediss+cluster://`) |
| `embedded://`, `embedded:///var/lib/x` | its own Valkey server, with temporary data or with data in that directory |
"""

from __future__ import annotations

import inspect
import os
import re
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, Protocol
from urllib.parse import parse_qsl, unquote

from tampu.base.checks import check_float, invalid
from tampu.errors import ConfigError
from tampu.redis.faults import Unreachable

Kind = Literal["single", "sentinel", "cluster", "embedded"]
Credentials = tuple[str | None, str | None]
#: Called with "host:port" before each AUTH; returns (user or None, password or None).
CredentialCallback = Callable[[str | None], Credentials | Awaitable[Credentials]]


class CredentialProvider(Protocol):
    """Returns (password,) or (user, password): redis-py's providers do."""

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]: ...


DEFAULT_URL = "redis://127.0.0.1:6379"
#: The environment variable with the default URL.
URL_VARIABLE = "TAMPU_URL"
DEFAULT_PORT = 6379
DEFAULT_SENTINEL_PORT = 26379

_SCHEMES: dict[str, tuple[Kind, bool]] = {
    "redis": ("single", False),
    "rediss": ("single", True),
    "valkey": ("single", False),
    "valkeys": ("single", True),
    "unix": ("single", False),
    "redis+sentinel": ("sentinel", False),
    "rediss+sentinel": ("sentinel", True),
    "redis+cluster": ("cluster", False),
    "rediss+cluster": ("cluster", True),
    "embedded": ("embedded", False),
}
#: Each network scheme, and the corresponding scheme with TLS.
_WITH_TLS = {
    **{scheme: scheme.replace("redis", "rediss", 1) for scheme in ("redis", "redis+sentinel", "redis+cluster")},
    **{scheme: scheme for scheme in ("rediss", "rediss+sentinel", "rediss+cluster", "valkeys")},
    "valkey": "valkeys",
}
_TLS_OPTIONS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_check_hostname")
_OPTIONS = ("db", "username", "password", "sentinel_username", "sentinel_password", "response_timeout", *_TLS_OPTIONS)
#: Schemes whose path is a file path; in the others it is a database number.
_SCHEMES_OF_PATHS = ("unix", "embedded")
#: Longest database number, in digits. Python refuses to convert more than 4300.
MAX_DB_DIGITS = 9
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")
_HOST = re.compile(r"(?:\[(?P<ipv6>[0-9A-Fa-f:.]+(?:%\w+)?)\]|(?P<name>[^\[\]:\s]*))(?::(?P<port>\d{0,5}))?")
_ENCODE = " (in a user name or password, write / ? # @ : as %2F %3F %23 %40 %3A)"


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a server: a host and a port, or the path of a Unix socket."""

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    path: str | None = None

    def __str__(self) -> str:
        return self.path or f"{self.host}:{self.port}"


@dataclass(frozen=True, kw_only=True)
class ConnectionSettings:
    """Everything needed to connect to a server; created by `parse_url`."""

    kind: Kind
    addresses: tuple[Address, ...]
    db: int = 0
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: bool = False
    ca_certs: str | None = None
    certfile: str | None = None
    keyfile: str | None = None
    check_hostname: bool = True
    #: Sentinel: the name of the master, and the credentials for the sentinels themselves.
    master_name: str = ""
    sentinel_username: str | None = None
    sentinel_password: str | None = field(default=None, repr=False)
    #: Embedded: the data directory; None = temporary data.
    data_dir: str | None = None
    credential_provider: CredentialProvider | CredentialCallback | None = field(default=None, repr=False)
    #: Timeout of one attempt to connect, in seconds.
    connect_timeout_secs: float = 5.0
    #: The connection counts as lost when a request gets no reply and none of its bytes are sent for this long, in
    #: seconds.
    response_timeout_secs: float = 15.0
    client_name: str = "tampu"

    @cached_property
    def identity(self) -> object:
        """A value that is equal for settings that connect to the same server with the same credentials."""
        return replace(self, credential_provider=None), id(self.credential_provider)

    @cached_property
    def ssl_context(self) -> ssl.SSLContext | None:
        """The TLS context; None without TLS."""
        if not self.tls:
            return None
        try:
            context = ssl.create_default_context(cafile=self.ca_certs)
            context.check_hostname = self.check_hostname
            if self.certfile:
                context.load_cert_chain(self.certfile, self.keyfile)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"cannot read the TLS files: {error} (ssl_ca_certs={self.ca_certs}, ssl_certfile={self.certfile})"
            ) from error
        return context


def resolve_url(url: str | None, redis_url: str | None = None, *, tls: bool = False) -> str:
    """Return the given URL, else `TAMPU_URL`, else that of a local server. `tls` turns redis:// into rediss://."""
    if url is not None and redis_url is not None and url != redis_url:
        raise ConfigError("url and redis_url are aliases and differ: pass only one of them")
    found = url or redis_url or os.environ.get(URL_VARIABLE) or DEFAULT_URL
    if tls:
        scheme, _, rest = found.partition("://")
        if scheme.lower() not in _WITH_TLS:
            raise ConfigError(
                "tls=True requires a URL such as redis://, valkey://, redis+sentinel:// or redis+cluster://"
            )
        found = f"{_WITH_TLS[scheme.lower()]}://{rest}"
    return found


def parse_url(
    url: str, *, credential_provider: CredentialProvider | CredentialCallback | None = None
) -> ConnectionSettings:
    """Parse a URL. Raises `ConfigError`, which names the invalid part and never contains a password."""
    if not isinstance(url, str):
        raise ConfigError(f"url must be a str such as 'redis://127.0.0.1:6379'; got a {type(url).__name__}")
    scheme, _, rest = url.partition("://")
    scheme = scheme.lower()
    if scheme not in _SCHEMES:
        # Without a scheme this may be the whole URL, including the password.
        given = scheme if _SCHEME.fullmatch(scheme) else "something else"
        raise invalid("url scheme", given, f"one of {', '.join(f'{known}://' for known in _SCHEMES)}")
    kind, tls = _SCHEMES[scheme]
    rest, _, fragment = rest.partition("#")
    rest, _, query = rest.partition("?")
    authority, slash, path = rest.partition("/")
    # In a socket's path an @ is allowed, but unix://user:pass/word@host is a password with a / in it.
    is_cut_password = "@" in path and (scheme not in _SCHEMES_OF_PATHS or (authority and "@" not in authority))
    if fragment or is_cut_password:
        raise ConfigError(f"url has an unexpected {'#' if fragment else '/'}{_ENCODE}")
    options = _options(query, tls=tls)
    user_info, _, hosts = authority.rpartition("@")
    username, _, password = (unquote(part) for part in user_info.partition(":"))
    path = unquote(slash + path)
    master_name = ""
    if kind == "sentinel":
        master_name, _, path = path.strip("/").partition("/")
        if not master_name:
            raise ConfigError("url must name the master: redis+sentinel://host:26379/mymaster")
    data_dir = None
    if kind == "embedded":
        data_dir = (hosts + path) or None
        addresses: tuple[Address, ...] = ()
    elif scheme == "unix":
        if not hosts + path:
            raise ConfigError("url must name the socket: unix:///path/to.sock")
        addresses = (Address(path=hosts + path),)
    else:
        addresses = _addresses(hosts, DEFAULT_SENTINEL_PORT if kind == "sentinel" else DEFAULT_PORT)
    db = _db(options.get("db", "") or ("" if scheme in _SCHEMES_OF_PATHS else path.strip("/")))
    if kind == "cluster" and db:
        raise invalid("url database", db, "0 on a Cluster")
    return ConnectionSettings(
        kind=kind,
        addresses=addresses,
        db=db,
        username=options.get("username") or username or None,
        password=options.get("password") or password or None,
        tls=tls,
        ca_certs=options.get("ssl_ca_certs"),
        certfile=options.get("ssl_certfile"),
        keyfile=options.get("ssl_keyfile"),
        check_hostname=_flag("ssl_check_hostname", options.get("ssl_check_hostname", "true")),
        master_name=master_name,
        sentinel_username=options.get("sentinel_username"),
        sentinel_password=options.get("sentinel_password"),
        data_dir=data_dir,
        credential_provider=credential_provider,
        response_timeout_secs=_seconds("response_timeout", options.get("response_timeout", "15")),
    )


def _options(query: str, *, tls: bool) -> dict[str, str]:
    try:
        options = dict(parse_qsl(query, strict_parsing=True)) if query else {}
    except ValueError:
        raise ConfigError(f"url options must be name=value, joined by &{_ENCODE}") from None
    for name in options:
        if name not in _OPTIONS:
            # With an @ after the ? this may be the second half of a password.
            given = "something else" if "@" in query else name
            raise invalid("url option", given, f"one of {', '.join(_OPTIONS)}")
        if name in _TLS_OPTIONS and not tls:
            raise ConfigError(f"url option {name} requires TLS: the scheme must be rediss://, rediss+cluster:// ...")
    return options


def _seconds(name: str, text: str) -> float:
    try:
        return check_float(name, float(text), low=0.1)
    except (ValueError, ConfigError):
        raise invalid(f"url option {name}", text, "a number of seconds of 0.1 or more") from None


def _flag(name: str, text: str) -> bool:
    if text.lower() not in ("true", "1", "yes", "false", "0", "no"):
        raise invalid(f"url option {name}", text, "true or false")
    return text.lower() in ("true", "1", "yes")


def _addresses(hosts: str, default_port: int) -> tuple[Address, ...]:
    addresses = []
    for item in hosts.split(",") if hosts else [""]:
        found = _HOST.fullmatch(item)
        port = int(found["port"] or default_port) if found else 0
        if found is None or not 0 < port < 65536:
            # The value is not shown: without an @ it may be user:password.
            raise ConfigError(f"url host must be host, host:port (1 to 65535) or [ipv6]:port{_ENCODE}")
        addresses.append(Address(found["ipv6"] or found["name"] or "127.0.0.1", port))
    return tuple(addresses)


def _db(text: str) -> int:
    if not text:
        return 0
    if not (text.isascii() and text.isdigit() and len(text) <= MAX_DB_DIGITS):
        raise invalid("url database", text, "a whole number, such as redis://host/0")
    return int(text)


async def credentials_for(settings: ConnectionSettings, address: Address) -> Credentials:
    """Return (user, password) for AUTH at this address; (None, None) if none are configured."""
    source: Any = settings.credential_provider
    if settings.kind == "embedded":
        return None, None
    if source is None:
        return settings.username, settings.password
    is_provider = hasattr(source, "get_credentials_async")
    if not is_provider and not callable(source):
        raise ConfigError(f"credential_provider must be a callable or a redis-py CredentialProvider; got {source!r}")
    try:
        answer = source.get_credentials_async() if is_provider else source(str(address))
        if inspect.isawaitable(answer):
            answer = await answer
    except Exception as error:
        # Temporary: the service behind it may be down for a moment, so connecting is retried.
        raise Unreachable(f"credential_provider failed: {error!r}") from error
    if isinstance(answer, tuple) and len(answer) == 1:
        return None, answer[0]
    if isinstance(answer, tuple) and len(answer) == 2:
        return answer
    raise ConfigError("credential_provider must return (user or None, password or None)")
