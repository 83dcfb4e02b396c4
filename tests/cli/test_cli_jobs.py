"""`tampu events`, `job show` and `job why` show what happened to jobs."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
import redis

from cli.lab import invoke, run_shell, start
from cli.shop import QUEUE, Filled
from servers.process import eventually
from tampu import JobState, Queue, QueueEvent
from tampu.base.clock import wall_clock_ms
from tampu.inspect.timeline import condensed, steps_of
from tampu.wire.heartbeat import ALIVE_MS, KEPT_MS
from tampu.wire.keys import QueueKeys

if TYPE_CHECKING:
    from servers.process import Server


def test_events_are_shown_oldest_first(shop: Filled) -> None:
    lines = invoke("events", QUEUE).out.splitlines()
    assert [line.split()[2] for line in lines] == sorted_by_time(lines)
    assert any("503 Service Unavailable" in line for line in lines)


def sorted_by_time(lines: list[str]) -> list[str]:
    return [line.split()[2] for line in sorted(lines, key=lambda line: line.split()[:2])]


def test_events_as_json_are_one_document_per_line(shop: Filled) -> None:
    events = invoke("events", "--json").json_lines
    assert {event["queue"] for event in events} == {QUEUE}
    completed = [event for event in events if event["event"] == "completed"]
    assert [event["job_id"] for event in completed] == [shop.done]
    assert completed[0]["attempt"] == 1


def test_events_can_be_selected(shop: Filled) -> None:
    found = invoke("events", QUEUE, "--name", "failed", "--name", "dlq", "--job", shop.dead, "--json").json_lines
    assert [event["event"] for event in found] == ["failed", "failed", "dlq"]
    assert len(invoke("events", QUEUE, "--limit", "2", "--json").json_lines) == 2
    assert invoke("events", QUEUE, "--limit", "0").out == ""


def test_an_unknown_event_is_refused(shop: Filled) -> None:
    done = invoke("events", "--name", "finished")
    assert done.code == 2
    assert "no event named 'finished'; choose from waiting, active, completed" in done.complaint


def test_follow_continues_without_a_gap(url: str, server: Server) -> None:
    server.client().xadd("{chasqui:q}:events", {"e": "completed", "id": "first", "ts": "1"})
    with start("events", "q", "--follow", "--json") as process:
        assert process.stdout is not None
        assert b'"first"' in process.stdout.readline()
        server.client().xadd("{chasqui:q}:events", {"e": "completed", "id": "second", "ts": "2"})
        assert b'"second"' in process.stdout.readline()
        process.send_signal(2)
        assert process.wait(20) == 0  # Ctrl-C is the normal way to exit
        assert process.stderr is not None
        assert process.stderr.read() == b""


def test_following_all_queues_finds_new_queues(url: str, server: Server) -> None:
    with start("events", "--follow", "--json") as process:
        _until_clients(server, 2)
        server.client().xadd("{chasqui:late}:events", {"e": "completed", "id": "x", "ts": "1"})
        assert process.stdout is not None
        assert b'"late"' in process.stdout.readline()
        process.send_signal(2)
        assert process.wait(20) == 0


def _until_clients(server: Server, count: int) -> None:
    client = server.client()
    eventually(lambda: sum(one["name"] == "tampu" for one in client.client_list()) >= count - 1, "it is connected")


def test_a_closed_pipe_ends_a_command_silently(shop: Filled) -> None:
    for command in ("events", f"events {QUEUE} --follow --json", "top --interval 0.05"):
        done = run_shell(f"tampu {command} | head -1; echo ${{PIPESTATUS[0]}}")
        assert done.stdout.splitlines()[-1] == "0", command
        assert len(done.stdout.splitlines()) == 2, command
        assert done.stderr == "", command


def test_follow_ends_with_its_reader_even_without_new_events(shop: Filled) -> None:
    with start("events", QUEUE, "--follow", "-n", "1") as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(20) == 0


# --- one job


def test_show_reports_each_state(shop: Filled) -> None:
    states = {
        job_id: invoke("job", "show", job_id, "--json").json
        for job_id in (shop.done, shop.dead, shop.hopeless, shop.waiting, shop.delayed)
    }
    assert [told["state"] for told in states.values()] == ["done", "dead", "dead", "waiting", "delayed"]
    assert states[shop.done]["result"] == {"packed": 1}
    assert states[shop.dead]["dead_letter"]["error"] == "503 Service Unavailable"
    assert states[shop.dead]["payload"] == {"order": 2, "card": ""}
    assert states[shop.waiting]["payload"] == {"order": 4}
    assert all(told["queue"] == QUEUE for told in states.values())
    text = invoke("job", "show", shop.dead, "--queue", QUEUE).out
    assert "dead" in text
    assert "RuntimeError: 503 Service Unavailable" in text


def test_show_finds_a_done_job_without_a_result_by_its_events(server: Server, shop: Filled) -> None:
    server.client().delete(f"{{chasqui:{QUEUE}}}:result:{shop.done}")
    assert invoke("job", "show", shop.done, "--json").json["state"] == "done"


def test_raw_shows_a_payload_as_bytes(shop: Filled) -> None:
    assert "b'" in invoke("job", "show", shop.waiting, "--raw").out
    assert set(invoke("job", "show", shop.waiting, "--raw", "--json").json["payload"]) == {"$base64"}


def test_an_unknown_job_is_an_error(shop: Filled) -> None:
    for verb in ("show", "why"):
        for queue in ((), ("--queue", QUEUE)):
            done = invoke("job", verb, "01ARZ3NDEKTSV4RRFFQ69G5FAV", *queue)
            assert done.code == 1
            assert "no such job: '01ARZ3NDEKTSV4RRFFQ69G5FAV'" in done.complaint


def test_why_shows_the_whole_history(shop: Filled) -> None:
    told = invoke("job", "why", shop.dead, "--json").json
    whats = [step["what"] for step in told["steps"]]
    assert whats == ["added", "active", "failed", "retry-scheduled", "waiting", "active", "failed", "dlq"]
    assert all(step["after_ms"] >= 0 for step in told["steps"])
    assert "503 Service Unavailable" in told["why"][0]
    assert f"tampu dlq replay {QUEUE} --id" in told["why"][-1]
    text = invoke("job", "why", shop.dead).out
    assert "retry-scheduled" in text
    assert text.splitlines()[0].split()[:2] == [shop.dead, "pay"]
    assert "dead after " in text.splitlines()[0]


@pytest.mark.parametrize(
    ("prepare", "why"),
    [
        ((), "no worker serves this queue"),
        (("queue", "pause", QUEUE), f"tampu queue resume {QUEUE}"),
    ],
)
def test_why_says_what_a_waiting_job_is_waiting_for(
    shop: Filled, prepare: tuple[str, ...], why: str, server: Server
) -> None:
    if prepare:
        assert invoke(*prepare).code == 0
    # Consumers of stopped workers stay for a while; these were active a moment ago.
    server.client().xgroup_destroy(f"{{chasqui:{QUEUE}}}:stream", "default")
    assert why in invoke("job", "why", shop.waiting).out


def test_why_says_when_a_delayed_job_is_due(fresh_shop: Filled) -> None:
    assert "it is delayed, due in 59 min" in invoke("job", "why", fresh_shop.delayed).out


def test_why_mentions_replays(shop: Filled) -> None:
    invoke("dlq", "replay", QUEUE, "--id", shop.dead, "--yes")
    told = invoke("job", "why", shop.dead, "--json").json
    assert "was replayed 1 time" in told["why"][0]
    assert told["state"] == "waiting"


def test_why_names_the_worker_of_a_running_job(url: str) -> None:
    async def take() -> str:
        async with Queue("q", url=url) as queue:
            job = await queue.add("x", 1)
            pipe = queue.producer.ready_client()
            await pipe.call("XGROUP", "CREATE", queue.keys.stream, "default", "0")
            await pipe.call("XREADGROUP", "GROUP", "default", "me", "STREAMS", queue.keys.stream, ">")
            started = ("e", "active", "id", job.id, "ts", str(wall_clock_ms() - 125_000))
            await pipe.call("XADD", queue.keys.events, "*", *started)
            return job.id

    job_id = asyncio.run(take())
    text = invoke("job", "why", job_id).out
    assert "it is running on worker me of group default" in text
    assert "running for 2 min 5 s" in text.splitlines()[0]
    assert invoke("job", "show", job_id, "--json").json["worker"] == "me"
    with redis.Redis.from_url(url) as client:
        client.set(QueueKeys("q").heartbeat("default", "me"), b"", px=KEPT_MS - 2 * ALIVE_MS)
    text = invoke("job", "why", job_id).out
    assert "its worker me is dead; another worker will run it again once its lease has expired" in text


def test_a_payload_that_is_not_messagepack_is_reported(server: Server, url: str) -> None:
    envelope = b"\x94\xa3bad\xc4\x01\xc1\x01\x00"  # the payload slot holds 0xc1, which is never valid
    server.client().xadd("{chasqui:q}:stream", {"d": envelope})
    eventually(lambda: invoke("inspect", "q").code == 0, "it is there")
    told = invoke("job", "show", "bad", "--json")
    assert told.code == 0
    assert "not MessagePack" in told.json["payload"]["$undecodable"]
    assert "cannot be decoded" in invoke("job", "show", "bad").out


def progress(at_ms: int, part: float) -> tuple[str, QueueEvent]:
    return f"{at_ms}-1", QueueEvent("progress", "j", "n", {"ts": at_ms, "progress": part})


def test_progress_comes_after_a_start_in_the_same_millisecond() -> None:
    """An `active` event is sent with the next window, and so is written after progress that was sent at once."""
    active = ("1001-0", QueueEvent("active", "j", "n", {"ts": 1000, "attempt": 1}))
    entries = [progress(1000, 0.0), progress(1000, 0.1), active, progress(1200, 0.2)]
    whats = [(step.what, step.note) for step in steps_of(JobState(id="j", state="running"), entries)]
    assert whats == [("active", "attempt 1"), ("progress", "0 %"), ("progress", "10 %"), ("progress", "20 %")]


def test_a_long_run_of_progress_is_shortened_to_three_lines() -> None:
    steps = steps_of(JobState(id="j", state="running"), [progress(1000 + n * 100, n / 100) for n in range(100)])
    assert len(steps) == 100
    assert [(step.note, step.after_ms) for step in condensed(steps)] == [
        ("0 %", 0),
        ("98 more", 9800),
        ("99 %", 100),
    ]
    assert condensed(steps[:5]) == steps[:5]
