"""Commands that change data: `add`, `cancel`, `queue`, `dlq`, `repeatable`. Destructive ones need confirmation."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

from cli.lab import invoke
from cli.shop import QUEUE, Filled
from support.queues import QueueView
from tampu import JobRetryOverride, Queue

if TYPE_CHECKING:
    from pathlib import Path

    from servers.process import Server


def peek(url: str) -> list[dict[str, Any]]:
    async def look() -> list[dict[str, Any]]:
        async with Queue(QUEUE, url=url) as queue:
            return await queue.peek_dlq(1000)

    return asyncio.run(look())


# --- add and cancel


def test_add_prints_the_id_of_the_new_job(url: str) -> None:
    job_id = invoke("add", "emails", "welcome", '{"to": "ada@example.com", "n": [1, 2.5, null]}').out.strip()
    told = invoke("job", "show", job_id, "--json").json
    assert (told["state"], told["name"]) == ("waiting", "welcome")
    assert told["payload"] == {"to": "ada@example.com", "n": [1, 2.5, None]}


def test_add_reads_the_payload_from_stdin(url: str) -> None:
    job_id = invoke("add", "emails", "welcome", "-", stdin='["from", "stdin"]').out.strip()
    assert invoke("job", "show", job_id, "--json").json["payload"] == ["from", "stdin"]


def test_add_takes_a_delay_an_id_and_attempts(url: str) -> None:
    first = invoke("add", "emails", "x", "{}", "--delay", "1h 30m", "--id", "mine", "--attempts", "7", "--json")
    assert first.json == {"id": "mine", "is_new": True, "queue": "emails", "name": "x"}
    again = invoke("add", "emails", "x", "{}", "--delay", "1h 30m", "--id", "mine", "--json")
    assert (again.code, again.json["is_new"]) == (0, False)
    assert "nothing was added" in again.err
    delayed = invoke("job", "show", "mine", "--json").json
    assert delayed["state"] == "delayed"


APP = """
from tampu import Queue, Worker

queue = Queue("mails")


@queue.task(attempts=7)
async def welcome(to: str) -> None: ...


worker = Worker(queue)
"""


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str) -> str:
    (tmp_path / "mail_app.py").write_text(APP)
    monkeypatch.setenv("TAMPU_URL", url)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "mail_app", raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return "mail_app:queue"


def test_add_with_an_app_checks_the_job_and_uses_the_tasks_options(app: str, server: Server) -> None:
    done = invoke("add", "mails", "welcome", '{"to": "ada"}', "--delay", "1h", "--app", app)
    assert done.code == 0
    [job] = QueueView(server, "mails").delayed_jobs()
    assert job.retry == JobRetryOverride(7)
    assert invoke("add", "mails", "welcome", '{"to": "ada"}', "--app", "mail_app:worker").code == 0


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("mails", "welcome", '{"too": "ada"}'), "missing a required argument: 'to'"),
        (("mails", "welcome", '{"to": 5}'), "Expected `str`, got `int`"),
        (("mails", "welcome", "[1]"), "must be a dict of the task's arguments, got [1]"),
        (("mails", "welcom"), "no task named 'welcom' in this program; did you mean 'welcome'?"),
        (("mail", "welcome"), "mail_app:queue has no queue 'mail'; it has mails"),
    ],
)
def test_add_with_an_app_refuses_what_the_app_would_refuse(
    app: str, url: str, arguments: tuple[str, ...], complaint: str
) -> None:
    done = invoke("add", *arguments, "--app", app)
    assert done.code != 0
    assert complaint in done.complaint
    assert invoke("queue", "list", "--json").json == []


def test_add_waits_for_a_result_up_to_the_given_time(url: str) -> None:
    done = invoke("add", "emails", "x", "{}", "--wait", "100ms")
    assert done.code == 1
    assert "within 0.1 s: it is waiting, and no worker serves queue 'emails'" in done.complaint


@pytest.mark.parametrize(
    ("payload", "said"),
    [
        ("{", "the payload is not valid JSON: Expecting property name"),
        ("", "the payload is not valid JSON: Expecting value"),
        ("NaN", "the payload contains NaN, which is not valid JSON"),
        ('{"a": Infinity}', "the payload contains Infinity, which is not valid JSON"),
        ("{'a': 1}", "the payload is not valid JSON"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_a_payload_that_is_not_json_is_refused(url: str, payload: str, said: str) -> None:
    done = invoke("add", "emails", "x", payload)
    assert (done.code, done.out) == (2, "")
    assert said in done.complaint
    assert len(done.complaint) < 300


def test_a_number_messagepack_cannot_hold_is_refused(url: str) -> None:
    done = invoke("add", "emails", "x", str(2**70))
    assert done.code == 1
    assert "MessagePack" in done.complaint


def test_cancel_removes_a_delayed_job(shop: Filled) -> None:
    assert invoke("cancel", QUEUE, shop.delayed, "--dry-run").err == f"would cancel 1 job of {QUEUE}\n"
    done = invoke("cancel", QUEUE, shop.delayed, "--reason", "by hand", "--yes", "--json")
    assert done.code == 0
    assert done.json["outcomes"] == {shop.delayed: "cancelled"}
    assert invoke("inspect", QUEUE, "--json").json["delayed"] == 0
    told = invoke("job", "show", shop.delayed, "--json").json
    assert (told["state"], told["reason"]) == ("cancelled", "by hand")


def test_cancel_marks_waiting_jobs_and_names_unknown_ones(shop: Filled) -> None:
    done = invoke("cancel", QUEUE, shop.waiting, "nobody", "--yes")
    assert done.code == 1
    assert done.out == "1 job marked; workers drop or cancel it within about two seconds\n"
    assert "no such job: nobody" in done.err


def test_cancel_takes_a_filter_instead_of_ids(shop: Filled) -> None:
    assert invoke("cancel", QUEUE, "--state", "delayed", "--older-than", "1d", "--yes").code == 0
    assert invoke("inspect", QUEUE, "--json").json["delayed"] == 1
    assert invoke("cancel", QUEUE, "--state", "delayed", "--yes").out == "1 job cancelled\n"
    assert invoke("inspect", QUEUE, "--json").json["delayed"] == 0
    for wrong in ((), (shop.waiting, "--state", "waiting")):
        done = invoke("cancel", QUEUE, *wrong, "--yes")
        assert done.code == 2
        assert "either job IDs or a filter" in done.complaint


# --- nothing is destroyed without confirmation


@pytest.mark.parametrize(
    ("command", "count"),
    [
        (("dlq", "remove", QUEUE), "delete 2 dead letters of shop permanently"),
        (("dlq", "replay", QUEUE), "replay 2 dead letters in shop"),
        (("queue", "purge", QUEUE), "delete 2 jobs of shop permanently (1 waiting and 1 delayed)"),
        (("repeatable", "remove", QUEUE, "daily"), "remove the schedule daily of shop permanently"),
        (("cancel", QUEUE, "DELAYED"), "cancel 1 job of shop"),
        (
            ("queue", "delete", QUEUE, "--force"),
            "delete queue shop permanently, with everything in it (2 jobs, 2 dead letters, 1 schedule)",
        ),
    ],
)
def test_destructive_commands_first_print_how_many_are_affected(
    shop: Filled, server: Server, command: tuple[str, ...], count: str
) -> None:
    command = tuple(shop.delayed if word == "DELAYED" else word for word in command)
    before = _contents(server)
    dry = invoke(*command, "--dry-run")
    assert (dry.code, dry.err) == (0, f"would {count}\n")
    assert invoke(*command, "--dry-run", "--json").json["dry_run"] is True
    unasked = invoke(*command)  # not a terminal
    assert unasked.code == 2
    assert f"would {count}; not a terminal, so pass --yes to confirm" in unasked.complaint
    assert _contents(server) == before
    told = invoke(*command, "--yes")
    assert told.code == 0
    assert told.err.startswith(f"{count} ...")
    assert _contents(server) != before


def _contents(server: Server) -> dict[bytes, bytes]:
    client = server.client()
    return {key: client.dump(key) for key in client.scan_iter() if b":pseq:" not in key}


# --- dead letters


def test_peek_shows_the_error_of_a_dead_letter(shop: Filled) -> None:
    letters = invoke("dlq", "peek", QUEUE, "--json").json
    by_job = {letter["job_id"]: letter for letter in letters}
    assert set(by_job) == {shop.dead, shop.hopeless}
    assert by_job[shop.dead]["reason"] == "retries_exhausted"
    assert by_job[shop.dead]["error_type"] == "RuntimeError"
    assert by_job[shop.dead]["attempts"] == 2
    assert by_job[shop.hopeless]["payload"] == {"order": 3, "card": "none"}
    text = invoke("dlq", "peek", QUEUE, "--full").out
    assert "RuntimeError: 503 Service Unavailable" in text
    assert "Traceback" in text
    assert "b'" in invoke("dlq", "peek", QUEUE, "--raw").out


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ((), 2),
        (("--reason", "unrecoverable"), 1),
        (("--reason", "malformed"), 0),
        (("--name", "pay"), 2),
        (("--name", "pack"), 0),
        (("--error-type", "RuntimeError"), 1),
        (("--error-type", "Runtime"), 0),
        (("--match", "service unavailable"), 1),
        (("--match", "no card"), 1),
        (("--match", "UnrecoverableError: no"), 1),
        (("--match", "teapot"), 0),
        (("--older-than", "1h"), 0),
        (("--older-than", "0s"), 2),
        (("--since", "1h"), 2),
        (("--since", "0s"), 0),
        (("--cluster", "CLUSTER"), 1),
        (("--cluster", "00000000"), 0),
        (("--newest",), 2),
        (("--id", "DEAD"), 1),
        (("--id", "DEAD", "--id", "HOPELESS"), 2),
        (("--id", "LETTER"), 1),
        (("--id", "DEAD", "--reason", "unrecoverable"), 0),
        (("--id", "1-1"), 0),
        (("--limit", "1"), 1),
    ],
)
def test_dead_letters_can_be_selected(shop: Filled, url: str, options: tuple[str, ...], count: int) -> None:
    names = {"DEAD": shop.dead, "HOPELESS": shop.hopeless, "LETTER": peek(url)[0]["dlq_id"]}
    names["CLUSTER"] = invoke("dlq", "summary", QUEUE, "--json").json[0]["cluster"]
    options = tuple(names.get(word, word) for word in options)
    assert len(invoke("dlq", "peek", QUEUE, *options, "--json").json) == count
    assert invoke("dlq", "replay", QUEUE, *options, "--dry-run", "--json").json["matched"] == count
    assert invoke("dlq", "remove", QUEUE, *options, "--yes", "--json").json["removed"] == count
    assert len(peek(url)) == 2 - count


def test_the_newest_dead_letters_come_first_on_request(shop: Filled, url: str) -> None:
    older, newer = (letter["dlq_id"] for letter in peek(url))
    [first] = invoke("dlq", "peek", QUEUE, "--newest", "--limit", "1", "--json").json
    assert first["dlq_id"] == newer
    assert invoke("dlq", "remove", QUEUE, "--newest", "--limit", "1", "--yes").code == 0
    assert [letter["dlq_id"] for letter in peek(url)] == [older]


def test_the_number_of_dead_letters_is_of_those_that_match(shop: Filled, server: Server) -> None:
    invoke("dlq", "replay", QUEUE, "--yes")
    for number in range(5):
        fields = {"d": b"?", "n": f"n{number % 2}", "reason": "unrecoverable", "error_type": "E", "error": "x"}
        server.client().xadd(f"{{chasqui:{QUEUE}}}:dlq", fields)
    some = invoke("dlq", "peek", QUEUE, "--name", "n0", "--limit", "2")
    assert "showing 2 of 3 matching dead letters; raise --limit" in some.err
    assert "showing 2 of 5 dead letters" in invoke("dlq", "peek", QUEUE, "--limit", "2").err
    assert "no matching dead letters" in invoke("dlq", "peek", QUEUE, "--name", "n7").err


def test_replay_moves_dead_letters_back(shop: Filled, url: str) -> None:
    done = invoke("dlq", "replay", QUEUE, "--reason", "retries_exhausted", "--yes")
    assert (done.code, done.out) == (0, "replayed 1 dead letter\n")
    assert len(peek(url)) == 1
    assert invoke("job", "show", shop.dead, "--json").json["state"] == "waiting"


def test_more_dead_letters_than_one_batch_are_all_handled(url: str, server: Server) -> None:
    pipeline = server.client().pipeline()
    envelope = b"\x94\xa1x\xc4\x01\xc0\x01\x00"
    for number in range(1203):
        broken = number % 100 == 0
        pipeline.xadd(
            f"{{chasqui:{QUEUE}}}:dlq", {"d": b"?" if broken else envelope, "n": "x", "reason": "unrecoverable"}
        )
    pipeline.execute()
    done = invoke("dlq", "replay", QUEUE, "--name", "x", "--yes", "--json")
    assert (done.json["matched"], done.json["replayed"], done.json["unreadable"]) == (1203, 1190, 13)
    assert invoke("dlq", "remove", QUEUE, "--yes", "--json").json["removed"] == 13


def test_a_dead_letter_that_cannot_be_decoded_is_still_shown(url: str, server: Server) -> None:
    server.client().xadd(f"{{chasqui:{QUEUE}}}:dlq", {"d": b"\xff\x00", "reason": "decode_failed", "n": b"\xfe"})
    [letter] = invoke("dlq", "peek", QUEUE, "--json").json
    assert (letter["job_id"], letter["payload"], letter["envelope"]) == (None, None, {"$base64": "/wA="})
    assert "(cannot be decoded)" in invoke("dlq", "peek", QUEUE).out
    done = invoke("dlq", "replay", QUEUE, "--yes")
    assert done.code == 0
    assert "skipped 1 dead letter that cannot be decoded" in done.err


def test_an_unknown_reason_is_refused(shop: Filled) -> None:
    done = invoke("dlq", "peek", QUEUE, "--reason", "bored")
    assert done.code == 2
    assert "retries_exhausted" in done.complaint


# --- the whole queue


def test_a_paused_task_is_shown_with_its_reason_everywhere(shop: Filled) -> None:
    said = invoke("queue", "pause", QUEUE, "--task", "pack", "--reason", "bank is down").out
    assert said == f"paused task pack of {QUEUE}; run `tampu queue resume {QUEUE} --task pack` to continue\n"
    assert invoke("inspect", QUEUE, "--json").json["paused_tasks"] == {"pack": "bank is down"}
    assert "task pack paused: bank is down" in invoke("inspect", QUEUE).out
    assert " paused" in invoke("inspect").out
    assert "task pack is paused (bank is down)" in invoke("doctor", QUEUE).out
    assert "task pack is paused: bank is down" in invoke("job", "why", shop.delayed).out
    assert invoke("queue", "resume", QUEUE, "--task", "pack").out == f"resumed task pack of {QUEUE}\n"
    assert invoke("queue", "resume", QUEUE, "--task", "pack").out == f"task pack of {QUEUE} was not paused\n"
    assert invoke("inspect", QUEUE, "--json").json["paused_tasks"] == {}


def test_the_reason_of_a_paused_queue_is_shown_everywhere(shop: Filled) -> None:
    invoke("queue", "pause", QUEUE, "--reason", "bank is down")
    assert "paused: bank is down" in invoke("inspect", QUEUE).out
    assert "paused (bank is down), 1 job waiting" in invoke("doctor", QUEUE).out
    assert "the queue is paused: bank is down" in invoke("job", "why", shop.waiting).out


def test_pause_and_resume(shop: Filled) -> None:
    paused = invoke("queue", "pause", QUEUE, "--reason", "bank is down", "--for", "15m", "--json").json
    assert paused == {"queue": QUEUE, "task": None, "is_paused": True, "reason": "bank is down", "for_secs": 900.0}
    assert invoke("queue", "resume", QUEUE).out == f"resumed {QUEUE}\n"
    assert invoke("queue", "resume", QUEUE, "--json").json["was_paused"] is False


def test_queues_are_listed_and_deleted(shop: Filled) -> None:
    assert invoke("queue", "list").out == f"{QUEUE}\n"
    assert invoke("queue", "list", "--json").json == [QUEUE]
    refused = invoke("queue", "delete", QUEUE, "--yes")
    assert refused.code == 2
    assert refused.err.endswith(": drain or purge it, or pass --force\n")
    assert invoke("queue", "delete", QUEUE, "--yes", "--force").out == f"deleted {QUEUE}\n"
    assert invoke("queue", "list", "--json").json == []


def test_drain_gives_up_after_its_time(shop: Filled) -> None:
    done = invoke("queue", "drain", QUEUE, "--within", "100ms")
    assert done.code == 1
    assert f"{QUEUE} still has jobs after 100ms" in done.complaint
    invoke("queue", "purge", QUEUE, "--yes")
    assert invoke("queue", "drain", QUEUE, "--within", "10s").out == f"{QUEUE} is drained\n"


def test_purge_keeps_what_is_excluded(shop: Filled) -> None:
    assert invoke("queue", "purge", QUEUE, "--no-delayed", "--yes").out == "deleted 1 job\n"
    told = invoke("inspect", QUEUE, "--json").json
    assert (told["waiting"], told["delayed"], told["dlq"], told["repeatables"]) == (0, 1, 2, 1)
    assert invoke("queue", "purge", QUEUE, "--yes", "--json").json["deleted"] == 1


# --- schedules


def test_schedules_are_listed(shop: Filled) -> None:
    [one] = invoke("repeatable", "list", QUEUE, "--json").json
    assert (one["key"], one["job_name"], one["fired"]) == ("daily", "pack", 0)
    assert one["pattern"] == {"kind": "cron", "expression": "0 9 * * *", "tz": "America/Lima"}
    assert "0 9 * * * (America/Lima)" in invoke("repeatable", "list", QUEUE).out


def test_a_schedule_can_be_fired_now(shop: Filled) -> None:
    told = invoke("repeatable", "fire", QUEUE, "daily", "--json").json
    job = invoke("job", "show", told["id"], "--json").json
    assert (job["name"], job["payload"]) == ("pack", {"order": 6})
    assert len(invoke("repeatable", "list", QUEUE, "--json").json) == 1


def test_an_unknown_schedule_is_an_error(shop: Filled) -> None:
    for verb in ("fire", "remove"):
        done = invoke("repeatable", verb, QUEUE, "weekly", *(("--yes",) if verb == "remove" else ()))
        assert done.code == 1
        assert "existing schedules: daily" in done.complaint


def test_every_reading_command_has_json_output(shop: Filled) -> None:
    for command in (
        ("inspect",),
        ("inspect", QUEUE),
        ("job", "show", shop.done),
        ("job", "why", shop.done),
        ("dlq", "peek", QUEUE),
        ("repeatable", "list", QUEUE),
        ("doctor",),
    ):
        json.loads(invoke(*command, "--json").out)


def test_values_that_json_lacks_become_valid_json(url: str) -> None:
    async def add() -> str:
        async with Queue("odd", url=url) as queue:
            payload = {1: float("nan"), b"key": b"\xff", "list": [float("inf")], "text": "\x1b[31m"}
            return (await queue.add("x", payload)).id

    told = invoke("job", "show", asyncio.run(add()), "--json").json["payload"]
    assert told["1"] == "nan"
    assert told["list"] == ["inf"]
    assert told['{"$base64": "a2V5"}'] == {"$base64": "/w=="}
