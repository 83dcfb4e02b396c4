"""The dashboard in Chromium: without violations of accessibility, with and without JavaScript, wide and narrow."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import uvicorn

from cli.shop import QUEUE, _fill
from dashboard.conftest import HOSTILE
from servers.require import require
from tampu import Queue
from tampu.dashboard import Access, dashboard

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cli.shop import Filled
    from servers.process import Server

playwright = pytest.importorskip("playwright.sync_api")
axe = pytest.importorskip("axe_playwright_python.sync_playwright")
expect = playwright.expect

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("browser")]

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()
PAGES = ("", "queue?q=shop", "queue?q=shop&span=24h", "jobs?q=shop", "jobs?q=shop&state=running",
         "jobs?q=shop&state=delayed", "jobs?q=shop&state=dead", "jobs?q=shop&state=finished", "dead", "workers",
         "schedules", "events?q=shop", "search?text=sho", "queue?q=nope", "confirm?q=shop&action=pause",
         "confirm?q=shop&action=purge", "confirm?q=shop&action=limit", "job?q=shop&id={dead}", "job?q=shop&id={done}",
         "job?q=shop&id={delayed}")  # fmt: skip


class Served:
    """A dashboard on a free loopback port, in a thread."""

    def __init__(self, url: str) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.base = f"http://127.0.0.1:{self.listener.getsockname()[1]}/"
        app = dashboard(url, authorize=lambda request: Access("ada", "operator"), allow_actions=True)
        self.server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
        self.thread = threading.Thread(target=lambda: self.server.run(sockets=[self.listener]))

    def __enter__(self) -> str:
        self.thread.start()
        return self.base

    def __exit__(self, *error: object) -> None:
        self.server.should_exit = True
        self.thread.join(10)


def in_thread(work: Any, *args: Any) -> Any:
    """Run a coroutine in another thread: this one has Playwright's event loop."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: asyncio.run(work(*args))).result()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Start Chromium."""
    path = require("chromium")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def shop(server: Server) -> Filled:
    return in_thread(_fill, server.url)


@pytest.fixture
def base(server: Server, shop: Filled) -> Iterator[str]:
    with Served(server.url) as base:
        yield base


@pytest.mark.parametrize("width", [1200, 400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_is_accessible_and_fits(browser: Any, base: str, shop: Filled, width: int, scheme: str) -> None:
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page = context.new_page()
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: said.append(str(error)))
    for path in PAGES:
        page.goto(base + path.format(**vars(shop)))
        found = axe.Axe().run(page)
        assert found.violations_count == 0, (path, found.generate_report())
        assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth"), path
    assert [text for text in said if "404" not in text] == []
    context.close()


def test_without_javascript_everything_can_be_done(browser: Any, base: str, server: Server) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(base)
    page.get_by_role("link", name=QUEUE, exact=True).first.click()
    page.get_by_role("link", name="Pause…").first.click()
    page.get_by_label("Reason").fill("maintenance")
    page.get_by_role("button", name="Pause").click()
    expect(page.locator(".banner.ok")).to_contain_text("Queue shop is paused.")
    page.get_by_role("link", name="Resume…").click()
    page.get_by_role("button", name="Resume").click()
    expect(page.locator(".banner.ok")).to_contain_text("Queue shop is resumed.")
    page.goto(f"{base}jobs?q=shop&state=dead")
    page.get_by_role("checkbox", name=re.compile("Choose")).first.check()
    page.get_by_role("button", name="Delete chosen…").click()
    page.get_by_role("button", name="Delete 1 dead letter").click()
    expect(page.locator(".banner.ok")).to_contain_text("1 dead letter deleted.")
    context.close()


def test_an_operator_finds_a_cause_fixes_the_payload_and_replays(browser: Any, base: str, shop: Filled) -> None:
    context = browser.new_context()
    page = context.new_page()
    page.goto(base)
    page.get_by_role("navigation", name="Pages").get_by_role("link", name="Dead letters").click()
    cause = page.locator("#clusters > li", has_text="UnrecoverableError")
    if cause.locator("details[open]").count() == 0:
        cause.locator("summary").click()
    cause.get_by_role("link", name="Edit and replay…").click()
    payload = page.get_by_label("Payload")
    payload.fill(payload.input_value().replace("none", "gold"))
    page.get_by_role("button", name="Replay").click()
    expect(page.locator(".banner.ok")).to_contain_text("Replayed with the new payload.")
    page.goto(f"{base}job?q=shop&id={shop.hopeless}")
    expect(page.locator("#chip")).to_contain_text("waiting")
    expect(page.locator("pre.json")).to_contain_text("gold")
    context.close()


def test_updates_keep_what_is_being_used(browser: Any, base: str, server: Server) -> None:
    context = browser.new_context()
    page = context.new_page()
    page.goto(f"{base}jobs?q=shop&state=dead")
    page.get_by_role("checkbox", name=re.compile("Choose")).first.check()
    page.goto(base)
    expect(page.locator("#rows")).to_contain_text("shop")
    page.get_by_label("Filter queues by name").fill("sho")

    async def add() -> None:
        async with Queue(QUEUE, url=server.url) as queue:
            await asyncio.gather(*(queue.add("pack", {"order": number}) for number in range(41)))

    in_thread(add)
    expect(page.locator("#hero")).to_contain_text("42", timeout=15_000)  # without loading the page again
    assert page.get_by_label("Filter queues by name").input_value() == "sho"
    page.locator("h2").first.click()
    page.keyboard.press("p")
    expect(page.locator("#live")).to_have_attribute("aria-pressed", "false")
    page.keyboard.press("/")
    expect(page.get_by_label("Find a job ID or a queue")).to_be_focused()
    context.close()


def test_hostile_data_runs_no_script(browser: Any, base: str, server: Server) -> None:
    async def add() -> None:
        async with Queue(HOSTILE, url=server.url) as queue:
            await queue.add("<script>alert(1)</script>", {"</script><script>alert(1)</script>": HOSTILE}, job_id="<b>")

    in_thread(add)
    context = browser.new_context()
    page = context.new_page()
    dialogs: list[str] = []

    def note(dialog: Any) -> None:
        dialogs.append(dialog.message)
        dialog.dismiss()

    page.on("dialog", note)
    page.goto(base)
    page.get_by_role("link", name="onerror=alert").first.click()
    expect(page.locator("h1")).to_contain_text("<img src=x onerror=alert(1)>")
    page.locator(".tiles .waiting a").click()
    page.locator("#rows th a").first.click()
    expect(page.locator("pre.json")).to_contain_text("</script><script>")
    page.wait_for_timeout(2500)  # one update
    assert dialogs == []
    context.close()


def test_another_page_cannot_frame_it_or_post_to_it(browser: Any, base: str, server: Server) -> None:
    context = browser.new_context()
    page = context.new_page()
    page.route("http://evil.example/", lambda route: route.fulfill(content_type="text/html", body=f"""
        <iframe src="{base}"></iframe><form method="post" action="{base}act"><input name="action" value="pause">
        <input name="q" value="shop"><button>Win</button></form>"""))  # fmt: skip
    page.goto("http://evil.example/")
    expect(page.frame_locator("iframe").locator(".brand")).to_have_count(0)
    page.get_by_role("button", name="Win").click()
    expect(page.locator("body")).to_contain_text("403")
    assert not server.client().exists("{chasqui:shop}:paused")
    context.close()
