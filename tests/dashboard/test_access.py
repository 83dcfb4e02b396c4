"""Who may look and who may act: every attack of the safety page is a test here."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from cli.shop import QUEUE, Filled
from dashboard.conftest import HOST, Site, form_of, make_site
from tampu.dashboard import Access, dashboard
from tampu.dashboard.access import HEADERS, MAX_FAILURES, ByHeader, ByPassword, ByToken, Failures
from tampu.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from servers.process import Server


def request_with(headers: dict[str, str] | list[tuple[str, str]], query: str = "") -> Request:
    pairs = headers.items() if isinstance(headers, dict) else headers
    raw = [(name.lower().encode(), value.encode()) for name, value in pairs]
    scope: dict[str, Any] = {"type": "http", "method": "GET", "path": "/", "query_string": query.encode()}
    return Request(scope | {"headers": raw, "server": ("127.0.0.1", 80), "client": ("127.0.0.1", 1), "scheme": "http"})


def status(found: Access | Response | None) -> int:
    assert isinstance(found, Response)
    return found.status_code


async def test_an_unknown_user_sees_nothing(site: Site, shop: Filled) -> None:
    site.name = "eve"
    for path in ("/", "/queue", "/confirm", "/search"):
        answer = await site.get(path, q=QUEUE)
        assert (answer.status_code, QUEUE in answer.text) == (403, False)
    assert (await site.post({"action": "pause", "q": QUEUE})).status_code == 403


async def test_authorize_is_required_and_may_wait_redirect_or_refuse(server: Server) -> None:
    with pytest.raises(TypeError):
        dashboard(server.url)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="authorize"):
        dashboard(server.url, authorize=None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="roles"):
        Access("ada", "root")  # type: ignore[arg-type]

    async def authorize(request: Request) -> Access | Response | None:
        name = request.headers.get("x-user")
        return Access(name) if name else RedirectResponse("/login")

    app = dashboard(server.url, authorize=authorize)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
        assert (await client.get("/")).headers["location"] == "/login"
        assert (await client.get("/", headers={"x-user": "ada"})).status_code == 200
    await app.state.board.watch.close()
    await app.state.board.view.close()


async def test_every_answer_has_the_safety_headers(site: Site, shop: Filled) -> None:
    for answer in (
        await site.get("/"),
        await site.get("/nope"),
        await site.get("/queue", q="nope"),
        await site.post({}),
    ):
        for name, value in HEADERS.items():
            assert answer.headers[name] == value
    policy = (await site.get("/")).headers["content-security-policy"]
    assert "unsafe" not in policy
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    static = await site.get("/static/dash.js")
    assert static.headers["x-content-type-options"] == "nosniff"
    page = (await site.get("/")).text
    assert " style=" not in page
    assert "onclick" not in page
    assert "<script>" not in page


async def test_without_actions_there_is_no_address_to_act(server: Server, shop: Filled) -> None:
    async with make_site(server.url, allow_actions=False) as site:
        assert (await site.get("/confirm", q=QUEUE, action="pause")).status_code == 404
        assert (await site.post({"action": "pause", "q": QUEUE})).status_code == 404
        assert "Pause…" not in (await site.get("/queue", q=QUEUE)).text


async def test_a_viewer_may_not_act(site: Site, server: Server, shop: Filled) -> None:
    form = form_of((await site.get("/confirm", q=QUEUE, action="pause")).text)
    site.name = "bob"
    assert (await site.get("/confirm", q=QUEUE, action="pause")).status_code == 404
    answer = await site.post(form)
    assert answer.status_code == 403
    assert "bob may look" in answer.text
    assert not server.client().exists(f"{{chasqui:{QUEUE}}}:paused")


@pytest.mark.parametrize(
    "headers",
    [
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"sec-fetch-site": "none"},
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": ""},
        {"origin": f"http://{HOST}.evil.example"},
        {"origin": f"http://evil.example/{HOST}"},
        {"sec-fetch-site": "", "origin": "https://evil.example"},
        {"sec-fetch-site": "", "origin": ""},
    ],
)
async def test_another_site_cannot_act(site: Site, server: Server, shop: Filled, headers: dict[str, str]) -> None:
    form = form_of((await site.get("/confirm", q=QUEUE, action="pause")).text)
    assert (await site.post(form, headers)).status_code == 403
    assert not server.client().exists(f"{{chasqui:{QUEUE}}}:paused")


async def test_a_form_of_another_browser_is_refused(site: Site, server: Server, shop: Filled) -> None:
    form = form_of((await site.get("/confirm", q=QUEUE, action="pause")).text)
    for changed in ({"form": ["x"]}, {"form": [""]}, {"form": []}):
        assert (await site.post(form | changed)).status_code == 403
    site.client.cookies.clear()
    assert (await site.post(form)).status_code == 403
    assert not server.client().exists(f"{{chasqui:{QUEUE}}}:paused")


async def test_an_old_browser_without_fetch_metadata_can_act(site: Site, server: Server, shop: Filled) -> None:
    form = form_of((await site.get("/confirm", q=QUEUE, action="pause")).text)
    assert (await site.post(form, {"sec-fetch-site": ""})).status_code == 303
    assert server.client().exists(f"{{chasqui:{QUEUE}}}:paused")


async def test_a_get_changes_nothing(site: Site, server: Server, shop: Filled) -> None:
    before = server.client().dbsize()
    assert (await site.get("/act", action="purge", q=QUEUE)).status_code == 405
    assert (await site.get("/confirm", action="purge", q=QUEUE)).status_code == 200
    assert server.client().dbsize() == before


async def test_only_the_hosts_that_are_named_are_served(server: Server) -> None:
    async with make_site(server.url, hosts={"127.0.0.1:8266"}) as site:
        for host, code in (("127.0.0.1:8266", 200), ("evil.example:8266", 421), ("evil.example", 421)):
            answer = await site.client.get("/", headers={"host": host, "x-user": "ada"})
            assert answer.status_code == code


@pytest.mark.parametrize(
    "back", ["https://evil.example/", "//evil.example", "/\\evil.example", "javascript:alert(1)", "/\r\nx: y"]
)
async def test_an_action_leads_only_to_this_dashboard(site: Site, shop: Filled, back: str) -> None:
    location = await site.act("pause", back=back)
    assert location.startswith("/?done=")


def test_a_token_is_exchanged_for_a_cookie() -> None:
    gate = ByToken(Access("ada", "operator"))
    assert status(gate(request_with({}))) == 401
    assert status(gate(request_with({}, "token=odd"))) == 401
    answer = gate(request_with({}, f"token={gate.token}"))
    assert isinstance(answer, Response)
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=lax" in cookie
    assert gate.token not in cookie
    assert gate(request_with({"cookie": cookie.partition(";")[0]})) == Access("ada", "operator")
    assert status(gate(request_with({"cookie": cookie.partition("=")[0] + "=" + gate.token}))) == 401


def test_failed_logins_are_limited_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    gate = ByToken(Access("ada"))
    codes = [status(gate(request_with({}, "token=odd"))) for _ in range(MAX_FAILURES + 1)]
    assert codes == [401] * MAX_FAILURES + [429]
    assert caplog.text.count("failed login from 127.0.0.1") == MAX_FAILURES
    assert status(gate(request_with({}, f"token={gate.token}"))) == 429
    now = [30.0]
    failures = Failures(lambda: now[0])
    for _ in range(MAX_FAILURES):
        failures.note(request_with({}), "x")
    assert failures.are_too_many
    now[0] = 61.0
    assert not failures.are_too_many


def basic(name: str, password: str) -> dict[str, str]:
    return {"authorization": "Basic " + base64.b64encode(f"{name}:{password}".encode()).decode()}


def test_passwords_are_checked_against_a_private_file(tmp_path: Path) -> None:
    file = tmp_path / "users"
    file.write_text("# who may look\nada:operator:correct horse\nbob:viewer:battery:staple\n")
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        ByPassword(file)
    file.chmod(0o600)
    gate = ByPassword(file)
    assert gate(request_with(basic("ada", "correct horse"))) == Access("ada", "operator")
    assert gate(request_with(basic("bob", "battery:staple"))) == Access("bob", "viewer")
    for headers in ({}, basic("ada", "wrong"), basic("eve", "correct horse"), {"authorization": "Basic !"}):
        answer = gate(request_with(headers))
        assert isinstance(answer, Response)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"].startswith("Basic")
    for bad in ("", "ada:root:correct horse\n", "ada:viewer:short\n"):
        file.write_text(bad)
        with pytest.raises(ConfigError):
            ByPassword(file)


def test_a_proxys_header_names_the_user_once() -> None:
    gate = ByHeader("X-Forwarded-User", ["ada"])
    assert gate(request_with({"x-forwarded-user": "ada"})) == Access("ada", "operator")
    assert gate(request_with({"x-forwarded-user": "bob"})) == Access("bob", "viewer")
    assert gate(request_with({})) is None
    assert gate(request_with([("x-forwarded-user", "ada"), ("x-forwarded-user", "bob")])) is None


async def test_audit_events_carry_the_users_name(site: Site, shop: Filled) -> None:
    await site.act("pause", typed={"reason": "maintenance"})
    events = (await site.json("/events", q=QUEUE, kind="audit"))["events"]
    assert [(event["action"], event["operator"], event["detail"]) for event in events] == [
        ("pause", "ada", "maintenance")
    ]
