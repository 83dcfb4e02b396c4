"""`tampu inspect`, `watch` and `top` show what is in the queues."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from cli.lab import invoke, run_program
from cli.shop import QUEUE, Filled
from tampu import Queue
from tampu.base.clock import wall_clock_ms
from tampu.cli.commands.inspect import window_note
from tampu.inspect.snapshot import QueueSnapshot, Sample, event_rates, flow_between
from tampu.wire.heartbeat import ALIVE_MS, KEPT_MS, Heartbeat, QueueShare, RunningJob
from tampu.wire.keys import QueueKeys

if TYPE_CHECKING:
    from servers.cluster import Cluster
    from servers.process import Server


def test_all_queues_are_found_and_counted(shop: Filled) -> None:
    done = invoke("inspect")
    assert done.code == 0
    header, row = done.out.splitlines()
    assert done.err == ""
    assert header.split()[:3] == ["queue", "waiting", "oldest"]
    assert row.split()[:2] == [QUEUE, "1"]
    assert "\x1b" not in done.out  # no colours behind a pipe


def test_one_queue_is_shown_in_full(fresh_shop: Filled) -> None:
    told = invoke("inspect", QUEUE, "--json").json
    assert (told["waiting"], told["pending"], told["delayed"], told["due"], told["dlq"]) == (1, 0, 1, 0, 2)
    assert told["repeatables"] == 1
    assert told["events"] > 5
    assert told["oldest_waiting_ms"] >= 0
    assert 3_500_000 < told["next_due_in_ms"] <= 3_600_000
    assert told["bytes"] == sum(told["bytes_by_key"].values()) > 0
    assert [group["name"] for group in told["groups"]] == ["default"]
    assert told["event_rates"]["completed"] == pytest.approx(1 / 60, abs=0.001)
    assert told["breaches"] == []
    text = invoke("inspect", QUEUE).out
    for words in ("waiting", "dead letters", "group default", "memory"):
        assert words in text


def test_a_paused_queue_is_marked(shop: Filled) -> None:
    assert invoke("queue", "pause", QUEUE).code == 0
    assert "paused" in invoke("inspect").out
    assert invoke("inspect", QUEUE, "--json").json["is_paused"] is True


def test_two_samples_give_rates(shop: Filled) -> None:
    told = invoke("inspect", QUEUE, "--sample", "0.05", "--json").json
    assert told["added_per_sec"] == 0.0
    assert told["settled_per_sec"] == 0.0


@pytest.mark.parametrize(
    ("options", "breached"),
    [
        (("--max-waiting", "0"), "--max-waiting"),
        (("--max-dlq", "1"), "--max-dlq"),
        (("--max-age", "0ms"), "--max-age"),
        (("--max-waiting", "1", "--max-dlq", "2", "--max-age", "1h"), ""),
    ],
)
def test_an_exceeded_threshold_is_exit_code_3(shop: Filled, options: tuple[str, ...], breached: str) -> None:
    for queue in ((QUEUE,), ()):
        done = invoke("inspect", *queue, *options, "--json")
        assert done.code == (3 if breached else 0)
        assert [breached in text for text in done.json["breaches"]] == ([True] if breached else [])
        assert breached in done.err


def test_lock_holders_are_named_in_short(server: Server, fresh_shop: Filled) -> None:
    keys = QueueKeys(QUEUE)
    token = 32 * "a"
    server.client().set(keys.promoter_lock, f"web-1:17:ab12cd:{token}")
    server.client().set(keys.scheduler_lock, f"s-732b0603-a88f-4401-82b2-804629156af0:{token}")
    assert "web-1:17, s-732b0603\n" in invoke("inspect", QUEUE).out


def test_a_queue_with_an_unusable_name_is_reported(server: Server, url: str) -> None:
    server.client().xadd(b"{chasqui:caf\xe9}:stream", {"d": "x"})
    done = invoke("inspect", "--json")
    assert done.code == 0
    assert done.json == {"queues": [], "unusable": [{"$base64": "Y2Fm6Q=="}], "faults": {}, "breaches": []}
    assert "caf\\xe9" in invoke("inspect").err


def test_names_cannot_control_the_terminal(server: Server, url: str) -> None:
    server.client().xadd("{chasqui:a\x1b[31mb[bold]}:stream", {"d": "x"})
    out = invoke("inspect").out
    assert "a\\x1b[31mb[bold]" in out
    assert "\x1b" not in out


def test_groups_and_consumers_can_have_any_name(server: Server, shop: Filled) -> None:
    client = server.client()
    client.xgroup_create(f"{{chasqui:{QUEUE}}}:stream", b"\xff[bold]", id="0")
    client.xreadgroup(b"\xff[bold]", b"c\xfe\n", {f"{{chasqui:{QUEUE}}}:stream": ">"}, count=1)
    assert "\\xff[bold]" in invoke("inspect", QUEUE).out
    names = [group["name"] for group in invoke("inspect", QUEUE, "--json").json["groups"]]
    assert names == ["default", "\\xff[bold]"]
    assert "2 groups" in invoke("doctor", QUEUE).out
    assert invoke("job", "show", shop.waiting, "--json").json["state"] == "running"


def test_an_empty_server_is_not_an_error(url: str) -> None:
    done = invoke("inspect")
    assert (done.code, done.out) == (0, "")
    assert "no queues yet" in done.err
    assert invoke("inspect", "--json").json["queues"] == []


@pytest.mark.servers
def test_it_works_on_every_kind_of_server(server: Server | Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAMPU_URL", server.url)
    names = [f"queue-{number}" for number in range(6)]  # on a Cluster, on several nodes

    async def add() -> None:
        for name in names:
            async with Queue(name, url=server.url) as queue:
                await queue.add("hello", {"to": name})

    asyncio.run(add())
    assert [queue["queue"] for queue in invoke("inspect", "--json").json["queues"]] == names
    assert invoke("doctor", "--json").code in (0, 3)
    assert invoke("top", "--rounds", "1", "--json").json_lines[0]["queues"][0]["waiting"] == 1
    job = invoke("add", names[3], "hello", "{}").out.strip()
    assert invoke("job", "show", job, "--json").json["queue"] == names[3]


# --- live views, without a terminal


def test_watch_writes_one_line_per_round(shop: Filled) -> None:
    lines = invoke("watch", QUEUE, "--rounds", "3", "--interval", "0.05").out.splitlines()
    assert len(lines) == 3
    assert all(f" {QUEUE} waiting=1 " in line for line in lines)
    rounds = invoke("watch", QUEUE, "--rounds", "2", "--interval", "0.05", "--json").json_lines
    assert [one["waiting"] for one in rounds] == [1, 1]
    assert rounds[1]["added_per_sec"] == 0.0


def test_top_shows_all_queues(shop: Filled) -> None:
    invoke("add", "other", "x", "{}")
    lines = invoke("top", "--rounds", "1").out.splitlines()
    assert {line.split()[1] for line in lines} == {QUEUE, "other"}


# --- rates


def _snapshot(at_ms: int, added: int | None, length: int) -> QueueSnapshot:
    counts = dict.fromkeys(("pending", "delayed", "due", "dlq", "events", "repeatables"), 0)
    return QueueSnapshot(queue="q", taken_at_ms=at_ms, is_paused=False, waiting=length, added_in_all=added, **counts)


def test_the_window_of_rates_is_stated() -> None:
    quiet, busy = _snapshot(0, 0, 0), replace(_snapshot(0, 0, 0), rate_window_secs=4.5)
    quiet = replace(quiet, rate_window_secs=60.0)
    assert window_note([Sample(quiet)]) == "completed, failed: runs per second over the last 1 min"
    assert window_note([Sample(quiet), Sample(busy)]).endswith(
        "the last 1 min, or the last 5,000 events of a busy queue"
    )


def test_an_entry_that_left_the_stream_was_settled() -> None:
    flow = flow_between(_snapshot(0, 100, 10), _snapshot(2000, 140, 30))
    assert (flow.added_per_sec, flow.settled_per_sec) == (20.0, 10.0)


@pytest.mark.parametrize("before", [None, _snapshot(0, None, 5), _snapshot(0, 900, 5), _snapshot(1000, 5, 5)])
def test_without_two_comparable_samples_there_is_no_rate(before: QueueSnapshot | None) -> None:
    assert flow_between(before, _snapshot(1000, 10, 5)).added_per_sec is None


def test_event_rates_cover_only_the_time_of_the_events_read() -> None:
    events = [(b"%d-0" % (100_000 - number), [b"e", b"completed"]) for number in range(5000)]
    rates, secs = event_rates(events, 100_000)
    assert secs == pytest.approx(4.999)
    assert rates["completed"] == pytest.approx(1000, rel=0.01)


def test_worker_list_takes_the_options_of_workers(shop: Filled) -> None:
    for form in (("workers",), ("worker", "list")):
        assert invoke(*form, QUEUE).err == f"no worker serves {QUEUE}\n"
        assert invoke(*form, QUEUE, "--dead", "--json").json == []


async def test_workers_are_shown_with_what_they_run(server: Server, url: str) -> None:
    async with Queue("mail", url=url) as queue:
        client = server.client()
        client.xgroup_create(queue.keys.stream, "default", mkstream=True)
        running = [RunningJob("job-7", "charge", 125_000, 1)]
        beat = Heartbeat("web-1", 4711, "0.2.0", 10, wall_clock_ms(), 1, 1, running)
        for worker, kept_ms in (("alive", KEPT_MS), ("gone", KEPT_MS - 2 * ALIVE_MS)):
            client.xgroup_createconsumer(queue.keys.stream, "default", worker)
            client.set(queue.keys.heartbeat("default", worker), beat.encode(), px=kept_ms)
    header, *rows = (await asyncio.to_thread(invoke, "workers", "mail", "--dead")).out.splitlines()
    assert header.split() == "queue worker state host process version slots running pending longest heartbeat".split()
    shown = {row.split()[1]: row for row in rows}
    assert shown["alive"].split()[:9] == ["mail", "alive", "running", "web-1", "4711", "0.2.0", "10", "1", "0"]
    assert "charge 2 min" in shown["alive"]
    assert shown["gone"].split()[2] == "dead"
    assert "gone" not in (await asyncio.to_thread(invoke, "workers", "mail")).out


async def test_a_blocked_worker_is_described_as_such_everywhere(server: Server, url: str) -> None:
    said = "job charge 7 has blocked the event loop for 12.3 s at app.py:9 in charge"
    async with Queue("mail", url=url) as queue:
        job, client = await queue.add("charge", 1), server.client()
        client.xgroup_create(queue.keys.stream, "default", id="0")
        client.xreadgroup("default", "stuck", {queue.keys.stream: ">"})
        share = QueueShare(queues=1, used_by_all=1, used=1, weight=1, reserve=0, limit=0)
        running = [RunningJob(job.id, "charge", 12_300, 1)]
        beat = Heartbeat("web-1", 4711, "0.2.0", 10, wall_clock_ms(), 1, 1, running, share, said)
        client.set(queue.keys.heartbeat("default", "stuck"), beat.encode(), px=KEPT_MS)
    told = await asyncio.to_thread(invoke, "workers", "mail")
    assert told.out.splitlines()[1].split()[:3] == ["mail", "stuck", "blocked"]
    assert f"mail: {said}; use def instead of async def, or process=True" in told.out + told.err
    assert (await asyncio.to_thread(invoke, "workers", "mail", "--json")).json[0]["state"] == "blocked"
    found = (await asyncio.to_thread(invoke, "doctor", "mail", "--json")).json["findings"]
    assert [one["text"] for one in found if one["check"] == "blocked"] == [f"worker stuck: {said}"]
    assert said in (await asyncio.to_thread(invoke, "job", "why", job.id)).out
    assert "1, 1 blocked" in (await asyncio.to_thread(invoke, "inspect")).out
    assert "stuck (blocked)" in (await asyncio.to_thread(invoke, "inspect", "mail")).out
    assert "workers=1 blocked=1 " in (await asyncio.to_thread(run_program, "top", "--rounds", "1")).out
