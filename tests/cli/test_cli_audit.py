"""Changes by an operator leave an audit event, and the redaction hook decides what commands show."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from cli.lab import Done, invoke
from cli.shop import QUEUE, Filled
from tampu import Job, Queue, UnrecoverableError, Worker
from tampu.inspect.admin import operator_name
from tampu.inspect.jobs import JobState
from tampu.inspect.views import redacted_state
from tampu.wire.keys import QueueKeys

if TYPE_CHECKING:
    from servers.process import Server

KEYS = QueueKeys(QUEUE)


def audits(server: Server) -> list[dict[str, str]]:
    client: Any = server.client()
    found = client.xrange(KEYS.events)
    events = [{key.decode(): value.decode() for key, value in fields.items()} for _, fields in found]
    return [event for event in events if event["e"] == "audit"]


@pytest.mark.parametrize(
    ("command", "action", "count"),
    [
        (("queue", "pause", QUEUE, "--reason", "upgrade"), "pause", "1"),
        (("queue", "purge", QUEUE, "--yes"), "purge", "2"),
        (("dlq", "replay", QUEUE, "--yes"), "replay", "2"),
        (("dlq", "remove", QUEUE, "--yes"), "remove", "2"),
        (("cancel", QUEUE, "--state", "delayed", "--yes", "--reason", "obsolete"), "cancel", "1"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0] + value[1],
)
def test_a_change_is_recorded_with_the_operators_name(
    command: tuple[str, ...],
    action: str,
    count: str,
    server: Server,
    shop: Filled,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TAMPU_OPERATOR", "ada")
    assert invoke(*command).code == 0
    (event,) = audits(server)
    assert (event["action"], event["operator"], event["count"]) == (action, "ada", count)
    assert event["id"] == ""
    assert int(event["ts"]) > 0
    shown = invoke("events", QUEUE)
    assert (f"{action} of {count} by ada" if count != "1" else f"{action} by ada") in shown.out
    if "--reason" in command:
        assert event["detail"] == command[command.index("--reason") + 1]
        assert event["detail"] in shown.out


def test_resuming_is_recorded_only_if_it_changed_something(server: Server, shop: Filled) -> None:
    assert invoke("queue", "resume", QUEUE).code == 0
    assert audits(server) == []
    for command in ("pause", "resume"):
        assert invoke("queue", command, QUEUE).code == 0
    assert [event["action"] for event in audits(server)] == ["pause", "resume"]
    assert audits(server)[0]["operator"] == operator_name({})


def test_a_dry_run_is_not_recorded(server: Server, shop: Filled) -> None:
    assert invoke("dlq", "replay", QUEUE, "--dry-run").code == 0
    assert audits(server) == []


def hide(kind: str, value: Any) -> Any:
    """A redaction hook."""
    return f"<{kind} hidden>"


def broken(kind: str, value: Any) -> Any:
    raise ValueError(value)


SECRETS = ("503 Service", "order", "packed", "Traceback", "File ")


def outputs(shop: Filled) -> list[Done]:
    commands = [
        ("dlq", "peek", QUEUE, "--full"),
        ("dlq", "peek", QUEUE, "--raw"),
        ("dlq", "summary", QUEUE),
        ("job", "show", shop.dead),
        ("job", "show", shop.done),
        ("job", "show", shop.waiting),
        ("job", "why", shop.dead),
        ("job", "list", QUEUE, "--state", "dead"),
        ("events", QUEUE),
    ]
    return [invoke(*command) for command in commands] + [invoke(*command, "--json") for command in commands]


def test_the_hook_replaces_payloads_results_errors_and_tracebacks(
    shop: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = "".join(done.out for done in outputs(shop))
    seen = [secret for secret in SECRETS if secret in plain]
    assert len(seen) >= 3, "without the hook they are shown"
    monkeypatch.setenv("TAMPU_REDACT", "cli.test_cli_audit:hide")
    shown = outputs(shop)
    assert {done.code for done in shown} == {0}
    text = "".join(done.out for done in shown)
    assert [secret for secret in seen if secret in text] == []
    for kind in ("payload", "result", "error", "traceback"):
        assert f"<{kind} hidden>" in text


def test_the_hook_replaces_notes_of_progress_and_reasons(
    server: Server, shop: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TAMPU_REDACT", "cli.test_cli_audit:hide")
    state = JobState(id="a", state="running", progress=0.5, progress_note="for ada@example.com", reason="fraud by ada")
    assert "ada" not in repr(redacted_state(state))
    client: Any = server.client()
    client.xadd(KEYS.events, {"e": "dlq", "id": "a", "ts": 1, "reason": "malformed", "detail": "for ada@example.com"})
    shown = invoke("events", QUEUE, "--json")
    assert shown.code == 0
    assert "ada@" not in shown.out


@pytest.mark.parametrize("outcome", ["result", "error"])
async def test_the_hook_replaces_what_add_waited_for(
    outcome: str, server: Server, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TAMPU_REDACT", "cli.test_cli_audit:hide")

    async def answer(job: Job[Any]) -> str:
        if outcome == "error":
            raise UnrecoverableError("no card for ada@example.com")
        return "sent to ada@example.com"

    async with Queue(QUEUE, url=url) as queue, Worker(queue, answer, store_results=True):
        done = await asyncio.to_thread(invoke, "add", QUEUE, "mail", "--wait", "20s", "--url", url)
    assert f"<{outcome} hidden>" in done.out + done.err
    assert "ada@" not in done.out + done.err


def test_a_hook_that_fails_shows_nothing(shop: Filled, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAMPU_REDACT", "cli.test_cli_audit:broken")
    done = invoke("dlq", "peek", QUEUE, "--full")
    assert "(redaction failed: ValueError)" in done.out
    assert "order" not in done.out


def test_a_hook_that_does_not_exist_is_an_error(shop: Filled, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAMPU_REDACT", "cli.test_cli_audit:KEYS")
    done = invoke("dlq", "peek", QUEUE)
    assert (done.code, done.out) == (2, "")
    assert "TAMPU_REDACT must name a function" in done.complaint
