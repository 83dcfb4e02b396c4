"""`tampu rsmq ...`: through typer's runner, and as a separate process where pipes and signals matter."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from servers.process import eventually
from tampu.cli.errors import CliError, UsageError
from tampu.cli.main import app, run_command
from tampu.errors import ConfigError
from tampu.rsmq import RsmqOptions, RsmqSync

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from servers.process import Server

ID = "a" * 32
COMMAND = [sys.executable, "-m", "tampu", "rsmq"]


@pytest.fixture
def client(server: Server) -> Iterator[RsmqSync]:
    with RsmqSync(RsmqOptions(url=server.url)) as rsmq:
        yield rsmq


@pytest.fixture
def invoke(server: Server, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Run a command and return its output; errors are raised."""
    monkeypatch.setenv("TAMPU_URL", server.url)

    def call(*arguments: str, given: bytes | None = None) -> str:
        result = CliRunner().invoke(app, ["rsmq", *arguments], input=given, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.stdout

    return call


def as_json(text: str) -> Any:
    return json.loads(text)


def run(server: Server, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command as a process."""
    environment = os.environ | {"TAMPU_URL": server.url}
    return subprocess.run(
        [*COMMAND, *arguments], env=environment, capture_output=True, text=True, timeout=60, **options
    )


def test_a_queue_is_created_listed_changed_and_deleted(invoke: Callable[..., str], client: RsmqSync) -> None:
    assert as_json(invoke("list", "--json")) == []
    assert as_json(invoke("create", "mail", "--vt", "60", "--json")) == {"queue": "mail", "created": True}
    assert invoke("create", "other") == "created other\n"
    assert invoke("list") == "mail\nother\n"
    assert as_json(invoke("list", "--json")) == ["mail", "other"]
    attributes = as_json(invoke("attrs", "mail", "--json"))
    assert (attributes["vt"], attributes["maxsize"], attributes["msgs"]) == (60, 65536, 0)
    assert "hiddenmsgs" in invoke("attrs", "mail")
    changed = as_json(invoke("set", "mail", "--vt", "7", "--maxsize", "-1", "--delay", "2", "--json"))
    assert (changed["vt"], changed["maxsize"], changed["delay"]) == (7, -1, 2)
    client.send_message("mail", "x")
    assert as_json(invoke("delete", "mail", "--dry-run", "--json")) == {
        "queue": "mail",
        "messages": 1,
        "deleted": False,
    }
    assert client.list_queues() == ["mail", "other"]
    with pytest.raises(UsageError, match="--yes"):
        invoke("delete", "mail")
    assert invoke("delete", "mail", "--yes") == "deleted mail\n"
    assert client.list_queues() == ["other"]


def test_a_message_is_sent_received_hidden_and_acked(invoke: Callable[..., str], client: RsmqSync) -> None:
    client.create_queue("mail")
    sent = as_json(invoke("send", "mail", "hé 世 🎉", "--json"))["id"]
    (received,) = as_json(invoke("receive", "mail", "--json"))
    assert (received["id"], received["message"], received["rc"]) == (sent, "hé 世 🎉", 1)
    assert set(received) == {"id", "message", "rc", "fr", "sent"}
    assert as_json(invoke("receive", "mail", "--json")) == []
    assert invoke("receive", "mail") == ""
    assert as_json(invoke("visibility", "mail", sent, "0", "--json")) == {"id": sent, "vt": "0"}
    assert invoke("receive", "mail", "--vt", "0") == f"{sent} hé 世 🎉\n"
    assert as_json(invoke("ack", "mail", sent, "--json")) == {"deleted": 1}
    with pytest.raises(CliError, match="no such message"):
        invoke("ack", "mail", sent)
    with pytest.raises(CliError, match="no such message"):
        invoke("visibility", "mail", sent, "5")


def test_messages_come_from_the_input_whole_or_line_by_line(invoke: Callable[..., str], client: RsmqSync) -> None:
    client.create_queue("mail")
    invoke("send", "mail", given=b"two\nlines\n")
    ids = invoke("send", "mail", "--lines", given=b"one\nby\none\n").split()
    received = as_json(invoke("receive", "mail", "--max", "10", "--json"))
    assert [message["message"] for message in received] == ["two\nlines\n", "one", "by", "one"]
    assert [message["id"] for message in received[1:]] == ids
    with pytest.raises(UsageError, match="--lines"):
        invoke("send", "mail", "--lines", "x")


def test_pop_takes_a_message_out_and_bytes_are_shown_as_they_are(invoke: Callable[..., str], client: RsmqSync) -> None:
    client.create_queue("mail")
    invoke("send", "mail", "-", given=b"\xff\x00")
    (popped,) = as_json(invoke("pop", "mail", "--json"))
    assert popped["body"] == {"$base64": "/wA="}
    assert as_json(invoke("pop", "mail", "--json")) == []
    client.send_message("mail", "\x1b[31mred")
    assert "\x1b" not in invoke("pop", "mail")  # control characters of a message must not reach the terminal


def test_the_namespace_and_the_unit_are_options(invoke: Callable[..., str], server: Server) -> None:
    invoke("create", "mail", "--ns", "shop", "--duration-unit", "ms", "--vt", "30")
    assert server.client().hget("shop:mail:Q", "vt") == b"30000"
    assert as_json(invoke("attrs", "mail", "--ns", "shop", "--duration-unit", "ms", "--json"))["vt"] == 30
    suspicious = as_json(invoke("attrs", "mail", "--ns", "shop", "--json"))
    assert suspicious["looks_like_milliseconds"] is True


@pytest.mark.parametrize(
    ("arguments", "code", "line"),
    [
        (["attrs", "nope"], 1, "tampu: Queue not found (nope)"),
        (["create", "there"], 1, "tampu: Queue exists (there)"),
        (["send", "there", "x" * 70_000], 1, "tampu: Message too long (there)"),
        (["create", "a b"], 2, "tampu: Invalid qname format"),
        (["create", "QUEUES"], 2, "tampu: Invalid qname format: QUEUES is the index of all queues"),
        (["receive", "there", "--vt", "-1"], 2, "tampu: vt must be between 0 and 9999999"),
        (["set", "there"], 2, "tampu: No attribute was supplied"),
        (["ack", "there", "short"], 2, "tampu: Invalid id format"),
        (["ack", "there", ID], 1, "tampu: no such message in there"),
        (["receive", "there", "--max", "0"], 2, "tampu: Invalid value for '--max'"),
        (["nonsense"], 2, "tampu: No such command 'nonsense'"),
        (["list", "--url", "http://x"], 2, "tampu: url scheme"),
        (["list", "--url", "redis://127.0.0.1:1", "--timeout", "0.2"], 1, "tampu: no connection to 127.0.0.1:1"),
        (["list", "--url", "redis+cluster://127.0.0.1:1"], 2, "tampu: ns must have a hash tag"),
        (["create", "a b", "--url", "redis://127.0.0.1:1"], 2, "tampu: Invalid qname format"),
        (["listen", "there", "--url", "redis://127.0.0.1:1", "--timeout", "0.2"], 1, "tampu: no connection to"),
    ],
)
def test_an_error_is_one_line_and_an_exit_code(
    server: Server,
    client: RsmqSync,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    line: str,
) -> None:
    client.create_queue("there")
    monkeypatch.setenv("TAMPU_URL", server.url)
    ended = run_command(["rsmq", *arguments])
    written = capsys.readouterr()
    assert ended == code
    assert written.err.startswith(line)
    assert written.err.count("\n") == 1
    assert "ack" in arguments or written.out == ""


def test_help_names_every_command(invoke: Callable[..., str]) -> None:
    shown = invoke("--help")
    for command in "create list delete attrs set send receive pop ack visibility listen bridge".split():
        assert command in shown
        assert "--url" in invoke(command, "--help")


def start(server: Server, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, *arguments],
        env=os.environ | {"TAMPU_URL": server.url},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_listen_prints_messages_and_ends_with_ctrl_c_without_a_traceback(server: Server, client: RsmqSync) -> None:
    client.create_queue("mail")
    client.send_message("mail", "first")
    with start(server, "listen", "mail", "--json", "--ack") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert json.loads(process.stdout.readline())["message"] == "first"
        client.send_message("mail", "second")
        assert json.loads(process.stdout.readline())["message"] == "second"
        eventually(lambda: client.get_queue_attributes("mail").msgs == 0, "both are acked")
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        assert process.stderr.read() in ("", "tampu: interrupted\n")  # as the version of typer has it


def test_listen_ends_after_max_messages(server: Server, client: RsmqSync) -> None:
    client.create_queue("mail")
    client.send_messages("mail", ["a", "b", "c"])
    done = run(server, "listen", "mail", "--max", "2", "--ack")
    assert done.returncode == 0
    assert [line.split()[1] for line in done.stdout.splitlines()] == ["a", "b"]
    assert client.get_queue_attributes("mail").msgs == 1


@pytest.mark.parametrize("comes_more", [True, False])
def test_a_closed_pipe_ends_listen_quietly(server: Server, client: RsmqSync, comes_more: bool) -> None:
    client.create_queue("mail")
    client.send_message("mail", "x")
    with start(server, "listen", "mail") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        if comes_more:
            client.send_message("mail", "unread")
        assert process.wait(30) == 0
        assert process.stderr.read() == ""


def test_a_closed_pipe_ends_a_long_list_quietly(server: Server, client: RsmqSync) -> None:
    server.client().sadd("rsmq:QUEUES", *[f"{number:0160}" for number in range(5000)])
    with start(server, "list") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(30) == 0
        assert process.stderr.read() == ""


def test_an_error_while_listening_is_printed(server: Server, client: RsmqSync) -> None:
    done = run(server, "listen", "nope")
    assert done.returncode == 1
    assert done.stderr == "tampu: Queue not found (nope)\n"


def test_a_wrong_url_is_a_config_error(invoke: Callable[..., str]) -> None:
    with pytest.raises(ConfigError):
        invoke("list", "--url", "nonsense")


def test_a_command_may_run_in_any_thread(server: Server, invoke: Callable[..., str]) -> None:
    """No command depends on the event loop of the main thread."""
    outputs: list[str] = []
    thread = threading.Thread(target=lambda: outputs.append(invoke("list", "--json")))
    thread.start()
    thread.join()
    assert outputs == ["[]\n"]
