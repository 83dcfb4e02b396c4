"""Bad input is reported in one clear line with the right exit code, no traceback and nothing on stdout."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from cli.lab import invoke, run_program, run_shell, start
from cli.shop import QUEUE, Filled
from servers.process import eventually
from tampu.cli.options import complete_queue

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

    from servers.process import Server

#: A port that no server listens on.
NOBODY = "redis://127.0.0.1:9"

#: Every command that needs a server, with valid arguments.
COMMANDS = [
    ("inspect",),
    ("inspect", "q"),
    ("watch", "q"),
    ("top",),
    ("events",),
    ("stats", "q"),
    ("events", "q", "--follow"),
    ("job", "show", "x"),
    ("job", "why", "x"),
    ("limit", "show", "q"),
    ("limit", "set", "q", "--concurrency", "1"),
    ("limit", "clear", "q"),
    ("queue", "pause", "q"),
    ("queue", "resume", "q"),
    ("queue", "purge", "q", "--yes"),
    ("dlq", "peek", "q"),
    ("dlq", "replay", "q", "--yes"),
    ("dlq", "remove", "q", "--yes"),
    ("repeatable", "list", "q"),
    ("repeatable", "remove", "q", "k", "--yes"),
    ("repeatable", "fire", "q", "k"),
    ("add", "q", "x", "{}"),
    ("cancel", "q", "x", "--yes"),
    ("doctor",),
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_reports_a_missing_server(command: tuple[str, ...]) -> None:
    done = invoke(*command, "--url", NOBODY, "--timeout", "0.1")
    assert (done.code, done.out) == (1, "")
    assert "cannot connect to 127.0.0.1:9" in done.complaint


@pytest.mark.parametrize("command", [one for one in COMMANDS if "q" in one and one[0] != "add"], ids=" ".join)
def test_an_unknown_queue_is_reported_with_the_existing_ones(command: tuple[str, ...], shop: Filled) -> None:
    done = invoke(*command)
    assert (done.code, done.out) == (1, "")
    assert "no queue 'q'" in done.complaint
    assert f"existing queues: {QUEUE}" in done.complaint


def test_a_wrong_password_is_named_and_never_shown(fresh_server: Callable[..., Server]) -> None:
    server = fresh_server(requirepass="right")
    for password, said in ((":wr0ng@", "WRONGPASS"), ("", "NOAUTH")):
        done = invoke("inspect", "--url", f"redis://{password}127.0.0.1:{server.port}")
        assert (done.code, done.out) == (1, "")
        assert said in done.complaint
        assert "wr0ng" not in done.complaint


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("inspect", "--url", "http://x"), "url scheme must be one of"),
        (("inspect", "--url", "redis://h:99999"), "url host must be"),
        (("inspect", "a{b}"), "without { or }"),
        (("inspect", "\udcff"), "UTF-8"),
        (("inspect", " "), "not blank"),
        (("add", "q", "\udcff", "{}"), "UTF-8"),
        (("add", "q", "x" * 300, "{}"), "256 bytes"),
        (("add", "q", "x", "{}", "--delay", "soon"), "'soon' is not a valid duration"),
        (("add", "q", "x", "{}", "--delay", "-5"), "'-5' is not a valid duration"),
        (("add", "q", "x", "{}", "--delay", "90d"), "max_delay_secs"),
        (("add", "q", "x", "{}", "--attempts", "0"), "--attempts"),
        (("add", "q", "x", "{}", "--id", " "), "job_id must be"),
        (("add", "q"), "Missing argument"),
        (("inspect", "--max-waiting", "many"), "--max-waiting"),
        (("inspect", "--max-age", ""), "is not a valid duration"),
        (("inspct",), "No such command 'inspct'"),
        (("inspect", "--jsn"), "No such option: --jsn"),
        (("inspect", "a", "b"), "unexpected extra argument"),
        (("dlq", "peek", "q", "--limit", "0"), "--limit"),
        (("worker",), "Missing argument"),
        (("worker", "a:b", "--log", "xml"), "--log must be one of"),
        (("worker", "a:b", "--log-level", "loud"), "--log-level must be one of"),
        (("worker", "a:b", "--log-jobs", "some"), "--log-jobs must be one of"),
        (("worker", "a:b", "--processes", "0"), "--processes"),
        (("worker", "a:b", "--url", "ftp://x"), "url scheme"),
        (("promoter",), "Missing argument"),
        (("scheduler", "a{b}"), "without { or }"),
    ],
)
def test_invalid_arguments_exit_with_code_2(url: str, arguments: tuple[str, ...], said: str) -> None:
    done = invoke(*arguments)
    assert (done.code, done.out) == (2, "")
    assert said.lower() in done.complaint.lower()


def test_a_key_of_another_type_is_reported(server: Server, url: str) -> None:
    server.client().set("{chasqui:q}:stream", "not a stream")
    done = invoke("inspect", "q")
    assert (done.code, done.out) == (1, "")
    assert "WRONGTYPE" in done.complaint
    assert invoke("top", "--rounds", "1").code == 0


def test_a_group_without_a_verb_shows_its_help() -> None:
    for group in ("dlq", "queue", "job", "repeatable", "rsmq"):
        done = invoke(group)
        assert done.code == 2
        assert "Usage" in done.out + done.err


def test_help_names_the_variables_of_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    text = invoke("dlq", "peek", "--help").out
    for variable in ("TAMPU_URL", "TAMPU_JSON", "TAMPU_RAW", "TAMPU_TIMEOUT"):
        assert variable in text
    assert "TAMPU_WORKER_CONCURRENCY" in invoke("worker", "--help").out


def test_an_invalid_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "set by" not in invoke("worker", "app:queue", "-c", "abc").complaint
    monkeypatch.setenv("TAMPU_WORKER_CONCURRENCY", "abc")
    assert "'--concurrency'" in (said := invoke("worker", "app:queue").complaint)
    assert "; set by TAMPU_WORKER_CONCURRENCY (see tampu worker --help)" in said
    monkeypatch.setenv("TAMPU_TIMEOUT", "x")
    assert "; set by TAMPU_TIMEOUT (see" in invoke("inspect").complaint


def test_variables_that_no_option_declares_are_ignored(shop: Filled, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("VERSION", "HELP", "INSTALL_COMPLETION", "QUEUE_LIST_HELP", "YES", "INSPECT_MAX_DLQ"):
        monkeypatch.setenv(f"TAMPU_{variable}", "1")
    assert invoke("queue", "list").out.split() == [QUEUE]
    assert invoke("inspect").code == 0
    monkeypatch.setenv("TAMPU_DLQ_REMOVE_NAME", "another")
    assert invoke("dlq", "remove", QUEUE, "--dry-run", "--json").json["matched"] == 2


def test_no_argument_shows_the_help_and_dash_version_the_version() -> None:
    bare = invoke()
    assert "doctor" in bare.out + bare.err
    assert invoke("--version").out.startswith("tampu 0.")


def test_the_shell_completes_commands_and_queues(shop: Filled) -> None:
    def completed(words: str) -> list[str]:
        asked = {"_TAMPU_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
        return run_program(env=os.environ | asked).out.split()

    assert completed("tampu schedul") == ["scheduler", "schedule"]
    assert completed("tampu inspect sh") == [QUEUE]
    assert complete_queue("nothing like it") == []


def test_completion_without_a_server_offers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAMPU_URL", NOBODY)
    assert complete_queue("") == []


def test_an_interrupt_is_one_line_and_exit_code_130(shop: Filled) -> None:
    for command in (("inspect", QUEUE, "--sample", "30"), ("add", QUEUE, "x", "{}", "--wait", "30s")):
        with start(*command) as process:
            # It is running once it has connected: its socket is visible in /proc.
            _until_connected(process)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=20)
        assert (process.returncode, out) == (130, b"")
        assert err == b"tampu: interrupted\n"


def _until_connected(process: subprocess.Popen[bytes]) -> None:
    def has_socket() -> bool:
        folder = f"/proc/{process.pid}/fd"
        links = []
        for name in os.listdir(folder):
            try:
                links.append(os.readlink(f"{folder}/{name}"))
            except FileNotFoundError:
                continue
        return sum(link.startswith("socket:") for link in links) >= 3  # two of them belong to the event loop

    eventually(has_socket, "the command has connected")


def test_output_that_cannot_be_written_is_one_line(shop: Filled) -> None:
    with open("/dev/full", "wb") as full:
        done = run_program("inspect", stdout=full)
    assert done.code == 1
    assert "No space left" in done.complaint


def test_closed_streams_are_not_an_error(shop: Filled) -> None:
    done = run_shell("tampu inspect >&-; echo $?; tampu inspect 2>&-; echo $?")
    assert done.stdout.splitlines()[0] == "0"
    assert done.stdout.splitlines()[-1] == "0"
    assert done.stderr == ""


def test_an_internal_error_is_one_line_too(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    import tampu.cli.commands.inspect as module

    async def broken(*arguments: object) -> None:
        raise KeyError("oops")

    monkeypatch.setattr(module, "_take_samples", broken)
    done = invoke("inspect")
    assert done.code == 1
    assert "internal error (please report it): KeyError: 'oops'; set TAMPU_TRACEBACK=1" in done.complaint
    monkeypatch.setenv("TAMPU_TRACEBACK", "1")
    assert "Traceback" in invoke("inspect").err


def test_the_program_without_arguments_prints_its_help() -> None:
    done = run_program()
    assert "Usage: tampu" in done.out + done.err
    assert "Traceback" not in done.err
