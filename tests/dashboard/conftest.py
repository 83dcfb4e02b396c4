"""Fixtures: a server with jobs in every state, and a dashboard of it that is asked without a socket."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html import unescape
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import httpx
import pytest_asyncio

from cli.shop import QUEUE, Filled, _fill
from tampu.dashboard import Access, dashboard

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import pytest

    from servers.process import Server

HOST = "ops.example.com"
#: A name that breaks pages which do not escape it.
HOSTILE = '<img src=x onerror=alert(1)>&"q"\'../\u202egnp.exe'


@dataclass
class Site:
    """A dashboard, and what its user is called and may do."""

    client: httpx.AsyncClient
    app: Any
    users: dict[str, Access] = field(default_factory=dict)
    #: The name that requests are sent with.
    name: str = "ada"

    def forget(self) -> None:
        """Drop shared answers: a test changes things faster than they are looked at again."""
        self.app.state.board._shared.clear()

    async def get(self, path: str = "/", **query: Any) -> httpx.Response:
        """Open a page."""
        self.forget()
        return await self.client.get(path, params=query, headers={"x-user": self.name})

    async def json(self, path: str = "/", **query: Any) -> Any:
        """Return a page as JSON."""
        answer = await self.get(path, format="json", **query)
        assert answer.headers["content-type"] == "application/json"
        return answer.json()

    async def post(self, form: dict[str, Any], headers: dict[str, str] | None = None) -> httpx.Response:
        """Send a form as a browser does, from this site unless `headers` say otherwise."""
        given = {"x-user": self.name, "origin": f"http://{HOST}", "sec-fetch-site": "same-origin"}
        given |= {"content-type": "application/x-www-form-urlencoded"} | (headers or {})
        body = urlencode(form, doseq=True)
        sent = {name: value for name, value in given.items() if value}
        return await self.client.post("/act", content=body, headers=sent)

    async def act(self, action: str, queue: str = QUEUE, typed: dict[str, Any] | None = None, **target: Any) -> str:
        """Do something by its two steps: the page that asks, and its form. Return where it leads."""
        asked = await self.get("/confirm", action=action, q=queue, **target)
        assert asked.status_code == 200, asked.text
        done = await self.post(form_of(asked.text) | (typed or {}))
        assert done.status_code == 303, done.text
        return done.headers["location"]


def form_of(page: str) -> dict[str, Any]:
    """Return the hidden fields of the form on a page."""
    found: dict[str, Any] = {}
    for name, value in re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)">', page):
        found.setdefault(unescape(name), []).append(unescape(value))
    return found


@pytest_asyncio.fixture
async def shop(server: Server) -> Filled:
    """Fill a queue with jobs in every state."""
    return await _fill(server.url)


@pytest_asyncio.fixture
async def site(server: Server, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    """Make a dashboard that `ada` may act on and `bob` may look at."""
    monkeypatch.delenv("TAMPU_REDACT", raising=False)
    async with make_site(server.url) as site:
        yield site


class make_site:  # noqa: N801 - reads as a function
    """Open a dashboard: `async with make_site(url) as site`."""

    def __init__(self, url: str, **options: Any) -> None:
        self._users = {"ada": Access("ada", "operator"), "bob": Access("bob")}
        self._app = dashboard(
            url, authorize=lambda request: self._users.get(request.headers.get("x-user", "")),
            **({"allow_actions": True} | options),
        )  # fmt: skip

    async def __aenter__(self) -> Site:
        transport = httpx.ASGITransport(self._app)
        self._client = httpx.AsyncClient(transport=transport, base_url=f"http://{HOST}")
        return Site(self._client, self._app, self._users)

    async def __aexit__(self, *error: object) -> None:
        await self._client.aclose()
        await self._app.state.board.watch.close()
        await self._app.state.board.view.close()
