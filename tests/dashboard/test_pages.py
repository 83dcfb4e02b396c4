"""Every page answers as HTML and as JSON, escapes what it shows, and turns bad input into 404 or 413."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from cli.shop import QUEUE, Filled
from dashboard.conftest import HOSTILE, Site, make_site
from support.waiting import until
from tampu import Queue

if TYPE_CHECKING:
    from servers.process import Server

#: Every page, with what it shows of the queue `shop`.
PAGES: dict[tuple[str, str], str] = {
    ("/", ""): "<h2>1 queue</h2>",
    ("/queue", "q=shop"): "<h2>Tasks</h2>",
    ("/jobs", "q=shop"): "in the queue",
    ("/jobs", "q=shop&state=running"): "No running jobs.",
    ("/jobs", "q=shop&state=delayed"): "Due in",
    ("/jobs", "q=shop&state=dead"): "503 Service Unavailable",
    ("/jobs", "q=shop&state=finished"): "succeeded",
    ("/dead", ""): "503 Service Unavailable",
    ("/dead", "q=shop"): "UnrecoverableError",
    ("/workers", ""): "No worker is running",
    ("/schedules", ""): "America/Lima",
    ("/events", "q=shop"): "dlq",
    ("/search", "text=sho"): "shop",
}


@pytest.mark.parametrize(("path", "query"), PAGES)
async def test_a_page_answers_as_html_and_as_json(site: Site, shop: Filled, path: str, query: str) -> None:
    given = dict(part.split("=") for part in query.split("&") if part)
    answer = await site.get(path, **given)
    assert answer.status_code == 200, answer.text
    assert PAGES[path, query] in answer.text
    found = await site.json(path, **given)
    assert isinstance(found, dict)
    assert "error" not in found


@pytest.mark.parametrize("state", ["done", "dead", "hopeless", "waiting", "delayed"])
async def test_the_page_of_a_job_says_why_it_is_in_its_state(site: Site, shop: Filled, state: str) -> None:
    job_id = getattr(shop, state)
    found = await site.json("/job", q=QUEUE, id=job_id)
    assert found["state"] == {"hopeless": "dead"}.get(state, state)
    said = {
        "done": "it completed",
        "dead": "it is a dead letter: retries_exhausted",
        "hopeless": "it is a dead letter: unrecoverable",
        "waiting": "no worker serves this queue",
        "delayed": "it is delayed, due in",
    }
    assert found["why"][0].startswith(said[state])
    if state in ("dead", "hopeless"):
        assert "Error" in found["traceback"]
        assert {"bad", "waiting"} <= found["time_ms"].keys()
    answer = await site.get("/job", q=QUEUE, id=job_id)
    assert answer.status_code == 200
    assert job_id in answer.text


async def test_the_overview_says_what_needs_attention(site: Site, shop: Filled) -> None:
    found = await site.json("/")
    assert found["totals"] == {"waiting": 1, "running": 0, "delayed": 1, "dead": 2}
    assert [one["text"][:31] for one in found["attention"]] == ["no worker serves this queue; 1 "]
    assert found["queues"][0]["dead"] == 2


async def test_dead_letters_are_grouped_by_cause(site: Site, shop: Filled) -> None:
    causes = (await site.json("/dead", q=QUEUE))["causes"]
    assert {(cause["name"], cause["error_type"], cause["letters"]) for cause in causes} == {
        ("pay", "RuntimeError", 1),
        ("pay", "UnrecoverableError", 1),
    }
    assert {cause["sample"]["payload"]["order"] for cause in causes} == {2, 3}


async def test_jobs_are_found_by_text_page_by_page(site: Site, server: Server) -> None:
    async with Queue(QUEUE, url=server.url) as queue:
        await asyncio.gather(*(queue.add("pack", {"n": number}) for number in range(120)))
        await queue.add("odd", {"n": 0})
    pages, after = [], None
    while True:
        page = await site.json("/jobs", q=QUEUE, state="waiting", **({"after": after} if after else {}))
        pages.append(len(page["jobs"]))
        after = page["next"]
        if after is None:
            break
    assert pages == [50, 50, 21]
    found = await site.json("/jobs", q=QUEUE, text="ODD")
    assert [job["name"] for job in found["jobs"]] == ["odd"]
    assert found["looked_at"] == 121


async def test_search_finds_queues_and_jobs(site: Site, shop: Filled) -> None:
    assert (await site.json("/search", text=QUEUE))["queues"] == [QUEUE]
    for job_id in (shop.done, shop.dead, shop.waiting, shop.delayed):
        assert (await site.json("/search", text=job_id))["jobs"] == [[QUEUE, job_id]]
    assert (await site.get("/search", text="nowhere")).status_code == 404


async def test_hostile_names_payloads_and_errors_are_escaped(site: Site, server: Server) -> None:
    async with Queue(HOSTILE, url=server.url) as queue:
        await queue.add(HOSTILE[:40], {HOSTILE: [HOSTILE, "\x1b[31m", "x" * 30_000]}, job_id="\u202e<b>")
        await queue.pause(reason=HOSTILE)
    for path, query in {
        "/": {},
        "/queue": {"q": HOSTILE},
        "/jobs": {"q": HOSTILE},
        "/job": {"q": HOSTILE, "id": "\u202e<b>"},
        "/events": {"q": HOSTILE},
        "/confirm": {"q": HOSTILE, "action": "pause", "task": HOSTILE},
    }.items():
        answer = await site.get(path, **query)
        assert answer.status_code == 200, (path, answer.text)
        for raw in ("<img src=x", '<b>"', "\u202e", "\x1b"):
            shown = answer.text.replace('value="\u202e', "").replace(f'value="{HOSTILE}', "")
            assert raw not in _without_attributes(shown), (path, raw)
    assert "characters, " in (await site.get("/job", q=HOSTILE, id="\u202e<b>")).text


def _without_attributes(page: str) -> str:
    """Leave out the values of forms: they must hold names as they are, and are quoted."""
    import re

    return re.sub(r'value="[^"]*"', "", page)


@pytest.mark.parametrize(
    ("path", "query"),
    [
        ("/queue", {"q": "nope"}),
        ("/queue", {"q": "a{b}"}),
        ("/queue", {}),
        ("/job", {"q": QUEUE, "id": "nope"}),
        ("/job", {"q": QUEUE}),
        ("/job", {"q": QUEUE, "id": "x", "letter": "no-id"}),
        ("/jobs", {"q": QUEUE, "state": "odd"}),
        ("/jobs", {"q": QUEUE, "after": "++"}),
        ("/jobs", {"q": QUEUE, "state": "delayed", "after": "(1-1-1"}),
        ("/events", {"q": QUEUE, "kind": "odd"}),
        ("/events", {"q": QUEUE, "after": "0"}),
        ("/confirm", {"q": QUEUE, "action": "odd"}),
        ("/confirm", {"q": QUEUE, "action": "replay"}),
        ("/confirm", {"q": QUEUE, "action": "fire", "key": "odd"}),
        ("/static/../app.py", {}),
        ("/nope", {}),
    ],
)
async def test_bad_input_is_not_found(site: Site, shop: Filled, path: str, query: dict[str, str]) -> None:
    answer = await site.get(path, **query)
    assert answer.status_code == 404, answer.text
    assert "Traceback" not in answer.text


async def test_an_oversized_query_or_form_is_refused(site: Site, shop: Filled) -> None:
    assert (await site.get("/", find="x" * 9000)).status_code == 413
    assert (await site.post({"x": "y" * 70_000})).status_code == 413


@pytest.mark.parametrize("key", ["stream", "delayed", "dlq", "events", "meter", "paused-tasks", "repeat"])
async def test_a_key_of_the_wrong_type_is_unreadable(site: Site, server: Server, shop: Filled, key: str) -> None:
    client = server.client()
    client.delete(f"{{chasqui:{QUEUE}}}:{key}")
    client.set(f"{{chasqui:{QUEUE}}}:{key}", "odd")
    async with Queue("other", url=server.url) as queue:
        await queue.add("x", {})
    for path, query in PAGES:
        answer = await site.get(path, **dict(part.split("=") for part in query.split("&") if part))
        assert answer.status_code in (200, 404), (path, answer.text)
    found = await site.json("/")
    faults = {one["queue"]: one["fault"] for one in found["queues"]}
    assert not faults["other"]
    assert ("WRONGTYPE" in faults[QUEUE]) == (key in ("stream", "delayed", "dlq", "paused-tasks"))


async def test_values_are_redacted_before_they_are_shown_or_searched(
    server: Server, shop: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hide(kind: str, value: Any) -> Any:
        return "(hidden)" if kind in ("payload", "result", "error", "traceback") else value

    async with make_site(server.url, redact=hide) as site:
        for path, query in [*PAGES, ("/job", f"q={QUEUE}&id={shop.dead}"), ("/job", f"q={QUEUE}&id={shop.done}")]:
            given = dict(part.split("=") for part in query.split("&") if part)
            for answer in (await site.get(path, **given), await site.get(path, format="json", **given)):
                assert answer.status_code == 200
                assert "503 Service" not in answer.text
                assert '"order"' not in answer.text
                assert "packed" not in answer.text
        found = await site.json("/jobs", q=QUEUE, state="dead", text="503")
        assert (found["jobs"], found["looked_at"]) == ([], 2)
        answer = await site.get("/confirm", q=QUEUE, action="edit", id="1-1")
        assert answer.status_code == 404


async def test_viewers_of_one_page_share_its_answer(site: Site, server: Server, shop: Filled) -> None:
    first = await site.client.get("/queue", params={"q": QUEUE}, headers={"x-user": "ada"})
    before = server.client().info("commandstats")["cmdstat_xinfo|consumers"]["calls"]
    for _ in range(20):
        again = await site.client.get("/queue", params={"q": QUEUE}, headers={"x-user": "ada"})
        assert again.headers["etag"] == first.headers["etag"]
    after = server.client().info("commandstats")["cmdstat_xinfo|consumers"]["calls"]
    assert after - before <= 2  # the poller's
    unchanged = await site.client.get(
        "/queue", params={"q": QUEUE}, headers={"x-user": "ada", "if-none-match": first.headers["etag"]}
    )
    assert (unchanged.status_code, unchanged.content) == (304, b"")
    # A viewer must not get the answer for an operator, with its buttons.
    assert "Purge" in first.text
    assert "Purge" not in (await site.client.get("/queue", params={"q": QUEUE}, headers={"x-user": "bob"})).text


@pytest.mark.slow
async def test_a_server_that_is_away_is_named_and_comes_back(fresh_server: Any) -> None:
    server = fresh_server()
    async with Queue(QUEUE, url=server.url) as queue:
        await queue.add("x", {})
    async with make_site(server.url) as site:
        assert (await site.json("/"))["totals"]["waiting"] == 1
        server.kill()

        async def is_noted() -> bool:
            return "No connection to the server" in (await site.get("/")).text

        await until(is_noted, "the banner")
        assert (await site.json("/"))["totals"]["waiting"] == 1  # the last numbers
        answer = await site.get("/queue", q=QUEUE)
        assert answer.status_code == 503
        assert answer.elapsed.total_seconds() < 3
        server.start()

        async def is_back() -> bool:
            return (await site.get("/queue", q=QUEUE)).status_code in (200, 404)

        await until(is_back, "the page")
