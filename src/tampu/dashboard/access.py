"""Who may do what, and the checks of every request: its host, its origin, and the headers of its answer."""

from __future__ import annotations

import base64
import binascii
import hmac
import inspect
import logging
import os
import secrets
import stat
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

from starlette.responses import PlainTextResponse, RedirectResponse, Response

from tampu.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from starlette.requests import Request

logger = logging.getLogger("tampu.dashboard")

Role = Literal["viewer", "operator"]
ROLES: tuple[Role, ...] = ("viewer", "operator")


@dataclass(frozen=True, slots=True)
class Access:
    """Who sends a request. The name is written to the audit events of their actions."""

    name: str
    role: Role = "viewer"

    def __post_init__(self) -> None:
        if not self.name or self.role not in ROLES:
            raise ConfigError(f"Access needs a name and one of the roles {', '.join(ROLES)}; got {self!r}")


#: Returns who sends a request, a response that asks them to log in, or None, which refuses it.
Authorize = Callable[["Request"], Access | Response | Awaitable[Access | Response | None] | None]

#: No other origin is asked for anything, no other page may frame this one, and nothing is stored.
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    # Not `no-referrer`: browsers then send the origin `null` with every form.
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
COOKIE = "tampu-session"
#: The cookie and the form field that must be equal in every POST, besides the checks of its origin.
FORM_COOKIE = "tampu-form"
#: Logins that may fail in a minute; then all are refused for the rest of it.
MAX_FAILURES = 10


async def who(authorize: Authorize, request: Request) -> Access | Response:
    """Return who sends a request, or the response that refuses it."""
    found = authorize(request)
    if inspect.isawaitable(found):
        found = await found
    return PlainTextResponse("403: you may not see this dashboard\n", 403) if found is None else found


def refusal_of_post(request: Request, form: dict[str, list[str]]) -> str:
    """Return why a POST is refused, or an empty string: another site must not act with a browser's cookies."""
    headers = request.headers
    site = headers.get("sec-fetch-site")  # browsers leave it out on plain HTTP, except to this machine
    if site is not None and site != "same-origin":
        return f"the request comes from another site ({site})"
    if urlsplit(headers.get("origin", "")).netloc.lower() != headers.get("host", "").lower() or "origin" not in headers:
        return f"its origin {headers.get('origin')!r} is not this dashboard"
    cookie, field = request.cookies.get(FORM_COOKIE, ""), form.get("form", [""])[0]
    if not cookie or not hmac.compare_digest(cookie.encode(), field.encode()):
        return "its form was not made for this browser: open the page again, with cookies allowed"
    return ""


class Failures:
    """Counts failed logins and logs them."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._minute, self._count = 0, 0

    @property
    def are_too_many(self) -> bool:
        """Return True while logins are refused."""
        return self._minute == int(self._now() // 60) and self._count >= MAX_FAILURES

    def note(self, request: Request, why: str) -> Response:
        """Note a failure, and return the response."""
        minute = int(self._now() // 60)
        self._count = self._count + 1 if minute == self._minute else 1
        self._minute = minute
        client = request.client.host if request.client else "unknown"
        logger.warning("failed login from %s: %s", client, why)
        return PlainTextResponse(f"401: {why}\n", 401)


def _too_many() -> Response:
    return PlainTextResponse("429: too many failed logins; try again in a minute\n", 429)


class ByToken:
    """Lets in who has the token that was printed at the start: it is exchanged for a cookie."""

    def __init__(self, access: Access) -> None:
        self.token = secrets.token_urlsafe(24)
        self._session = secrets.token_urlsafe(24)
        self._access = access
        self._failures = Failures()

    def __call__(self, request: Request) -> Access | Response:
        # Cookies are shared by all ports of a host: two dashboards on one machine must not log each other out.
        cookie = f"{COOKIE}-{request.url.port or 0}"
        if hmac.compare_digest(request.cookies.get(cookie, "").encode(), self._session.encode()):
            return self._access
        if self._failures.are_too_many:
            return _too_many()
        token = request.query_params.get("token")
        if token is None:
            return PlainTextResponse("401: open the URL that `tampu dashboard` printed\n", 401)
        if not hmac.compare_digest(token.encode(errors="replace"), self.token.encode()):
            return self._failures.note(request, "the token is wrong: open the URL that `tampu dashboard` printed")
        # The token leaves the address bar, the history keeps it, so it is worth nothing after a restart.
        answer = RedirectResponse(request.url.path, 303)
        # Lax, so that links in alerts open jobs; every POST is checked by its origin besides.
        answer.set_cookie(cookie, self._session, httponly=True, samesite="lax", secure=request.url.scheme == "https")
        return answer


class ByPassword:
    """HTTP Basic authentication against a file of lines `name:role:password`."""

    def __init__(self, path: Path) -> None:
        self._users: dict[str, tuple[Access, bytes]] = {}
        self._failures = Failures()
        try:
            if stat.S_IMODE(os.stat(path).st_mode) & 0o077:
                raise ConfigError(f"{path} has passwords and other users can read it: run `chmod 600 {path}`")
            rows = path.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read {path}: {error}") from error
        for number, row in enumerate(rows, 1):
            if not row.strip() or row.startswith("#"):
                continue
            name, _, rest = row.partition(":")
            role, _, password = rest.partition(":")
            if role not in ROLES or not name or len(password) < 8:
                raise ConfigError(
                    f"{path}, line {number}: must be name:viewer:password or name:operator:password, with a password "
                    "of at least 8 characters"
                )
            self._users[name] = (Access(name, role), password.encode())
        if not self._users:
            raise ConfigError(f"{path} has no line name:role:password")

    def __call__(self, request: Request) -> Access | Response:
        if self._failures.are_too_many:
            return _too_many()
        scheme, _, packed = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "basic":
            answer: Response = PlainTextResponse("401: log in\n", 401)
        else:
            try:
                name, _, password = base64.b64decode(packed, validate=True).partition(b":")
            except binascii.Error:
                name = password = b""
            access, right = self._users.get(name.decode(errors="replace"), (None, secrets.token_bytes(16)))
            if hmac.compare_digest(password, right) and access is not None:
                return access
            answer = self._failures.note(request, "wrong name or password")
        answer.headers["www-authenticate"] = 'Basic realm="tampu", charset="UTF-8"'
        return answer


class ByHeader:
    """Trusts the name in a header that a reverse proxy sets. `operators` may act, all others may look."""

    def __init__(self, header: str, operators: Collection[str]) -> None:
        self._header = header
        self._operators = frozenset(operators)

    def __call__(self, request: Request) -> Access | None:
        names = request.headers.getlist(self._header)
        if len(names) != 1 or not names[0].strip():  # two: the client sent one that the proxy did not remove
            return None
        name = names[0].strip()[:200]
        return Access(name, "operator" if name in self._operators else "viewer")
