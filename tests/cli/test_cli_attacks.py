"""What others have written to the server must not run in a shell, reach the terminal, or blind the operator."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import subprocess
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from cli.lab import Done, invoke, run_program
from cli.shop import QUEUE, Filled
from support.waiting import until
from tampu.cli.commands.worker import health
from tampu.cli.commands.worker.health import HealthServer
from tampu.cli.commands.worker.protocol import LIMIT_BYTES, Link, Report
from tampu.cli.options import complete_queue
from tampu.queue import Queue
from tampu.wire.keys import QueueKeys

if TYPE_CHECKING:
    from pathlib import Path

    from servers.process import Server

ESCAPE = "\x1b]0;owned\x07"


def test_completion_offers_no_name_that_a_shell_would_run(server: Server, url: str, tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    for name in ("good", f"$(touch {proof})", f"`touch {proof}`", "a;b", "a b", "a'b"):
        server.client().xadd(QueueKeys(name).stream, {"d": "x"})
    assert complete_queue("") == ["good"]
    words = " ".join(complete_queue(""))
    subprocess.run(["bash", "-c", f'COMPREPLY=( $(compgen -W "{words}" -- "") )'], check=True)
    assert not proof.exists()


def test_suggested_commands_are_quoted_for_a_shell(server: Server, url: str, tmp_path: Path) -> None:
    name = f"a;touch {tmp_path / 'proof'}"
    client = server.client()
    client.xadd(QueueKeys(name).dlq, {"d": "x"})
    client.set(QueueKeys(name).paused, "1")
    said = invoke("doctor").out + invoke("queue", "pause", name, "--task", "b c").out
    commands = re.findall("`tampu (.*?)`", re.sub(r"\s+", " ", said))
    assert [words for words in commands if name in words] == [
        f"queue resume '{name}'",
        f"dlq peek '{name}'",
        f"queue resume '{name}' --task 'b c'",
    ]


@pytest.mark.parametrize("command", [("inspect", QUEUE), ("doctor",), ("queue", "list"), ("inspect",)], ids=" ".join)
def test_no_name_reaches_the_terminal_unescaped(command: tuple[str, ...], server: Server, shop: Filled) -> None:
    client = server.client()
    client.xgroup_create(QueueKeys(QUEUE).stream, f"group{ESCAPE}", "0")
    client.xadd(QueueKeys(f"name{ESCAPE}").stream, {"d": "x"})
    client.set(QueueKeys(f"other{ESCAPE}").delayed, "wrong type")
    done = invoke(*command)
    assert ESCAPE[:2] not in done.out + done.err
    assert "owned" in done.out + done.err


def run_all(job_id: str) -> list[Done]:
    commands = [
        ("inspect",),
        ("inspect", QUEUE),
        ("top", "--rounds", "1"),
        ("doctor",),
        ("job", "show", job_id),
        ("job", "why", job_id),
        ("job", "list", QUEUE, "--state", "delayed"),
        ("repeatable", "list", QUEUE),
    ]
    return [invoke(*command) for command in commands] + [invoke(*command, "--json") for command in commands]


@pytest.mark.parametrize("score", ["inf", "-inf", "1e308", "-1e308"])
def test_a_score_that_is_no_time_blinds_no_tool(score: str, server: Server, shop: Filled) -> None:
    client: Any = server.client()
    keys = QueueKeys(QUEUE)
    for key in (keys.delayed, keys.repeat):
        for member in client.zrange(key, 0, -1):
            client.zadd(key, {member: score})
    for done in run_all(shop.delayed):
        assert "internal error" not in done.err
        assert done.code in (0, 3)


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_result_that_is_nested_deeply_is_shown(options: tuple[str, ...], server: Server, shop: Filled) -> None:
    server.client().set(QueueKeys(QUEUE).result("deep"), b"\x91" * 900 + b"\xc0")
    done = invoke("job", "show", "deep", "--queue", QUEUE, *options)
    assert (done.code, done.err) == (0, "")
    assert "$deeper" in done.out if options else "[[[" in done.out


def test_a_count_of_replays_that_is_no_number_blinds_no_tool(server: Server, shop: Filled) -> None:
    for value in ("many", "9" * 5000):
        server.client().hset(QueueKeys(QUEUE).replays, shop.delayed, value)
        assert invoke("job", "why", shop.delayed).code == 0


def test_one_broken_queue_does_not_hide_the_others(server: Server, shop: Filled) -> None:
    server.client().set(QueueKeys("broken").delayed, "not a sorted set")
    done = invoke("inspect")
    assert done.code == 0
    assert QUEUE in done.out
    assert "queue broken cannot be read: WRONGTYPE" in done.err
    assert list(invoke("inspect", "--json").json["faults"]) == ["broken"]
    assert {finding["about"] for finding in invoke("doctor", "--json").json["findings"]} >= {QUEUE, "broken"}


@pytest.mark.parametrize("key", ["stream", "delayed", "dlq", "events"])
def test_a_key_of_the_wrong_type_hides_no_job_worker_or_event_of_others(key: str, server: Server, shop: Filled) -> None:
    broken = QueueKeys("a-broken-queue")  # comes first: the jobs are searched in the order of the names
    server.client().xadd(broken.events, {"e": "drained", "ts": "1"})
    server.client().delete(getattr(broken, key))
    server.client().set(getattr(broken, key), "not it")
    for command, text in (
        (("job", "show", shop.dead), "dead"),
        (("job", "why", shop.dead), "dead"),
        (("events",), shop.dead),
        (("workers", "--dead"), ""),
    ):
        done = invoke(*command)
        assert done.code == 0, (command, done)
        assert text in done.out
        reads = {"job": ("stream", "delayed", "dlq"), "events": ("events",), "workers": ("stream",)}[command[0]]
        assert ("queue a-broken-queue cannot be read: WRONGTYPE" in done.err) == (key in reads)


def test_a_group_whose_name_is_not_text_hides_no_job(server: Server, shop: Filled) -> None:
    client: Any = server.client()
    client.xgroup_create(QueueKeys(QUEUE).stream, b"\xff\x1b[31m", "0")
    client.xreadgroup(b"\xff\x1b[31m", b"\xfe", {QueueKeys(QUEUE).stream: ">"})
    for state in ("waiting", "running"):
        assert invoke("job", "list", QUEUE, "--state", state).code == 0
    assert shop.waiting in invoke("job", "list", QUEUE).out


@pytest.mark.slow
def test_a_password_in_url_is_warned_of_but_never_printed(server: Server, shop: Filled) -> None:
    url = server.url.replace("redis://", "redis://default:s3cret@")
    for arguments in (("--url", url), (f"--url={url}",)):
        done = run_program("queue", "list", *arguments)
        assert "other users can see the password of --url" in done.err
        assert "s3cret" not in done.out + done.err
    assert "warning" not in run_program("queue", "list", "--url", server.url).err


async def test_a_line_that_is_too_long_does_not_break_the_link() -> None:
    ours, theirs = socket.socketpair()
    sender, receiver = await Link.over(ours), await Link.over(theirs)
    sender.send_line(b"x" * (LIMIT_BYTES + 10) + b"\n")
    sender.send_line(msgspec.json.encode(Report(state="running")) + b"\n")
    async with asyncio.timeout(20):
        async for report in receiver.reports():
            assert report.state == "running"
            break
    sender.close()
    receiver.close()


async def test_silent_connections_do_not_block_the_health_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "MAX_CONNECTIONS", 2)
    server = HealthServer(None, "127.0.0.1", 0, None)  # type: ignore[arg-type]  # nothing is asked of it
    port = int((await server.start()).split(":")[2].split("/")[0])
    try:
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.timeout(health.REQUEST_SECS / 2):
            writer.write(b"GET /none HTTP/1.1\r\n\r\n")
            assert (await reader.read()).startswith(b"HTTP/1.1 404 ")
            assert await silent[0][0].read() == b""  # the oldest made room
        for _, one in [*silent, (reader, writer)]:
            one.close()
    finally:
        await server.stop()


async def test_clients_that_do_not_read_do_not_block_the_health_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "MAX_CONNECTIONS", 1)
    server = HealthServer(None, "127.0.0.1", 0, None)  # type: ignore[arg-type]  # nothing is asked of it
    page = b"x" * 16_000_000

    async def respond(head: bytes) -> tuple[int, str, bytes]:
        return 200, "text/plain", page if b"/metrics" in head else b"well"

    monkeypatch.setattr(server, "_respond", respond)
    port = int((await server.start()).split(":")[2].split("/")[0])
    try:
        slow, slow_writer = await asyncio.open_connection("127.0.0.1", port)
        slow_writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
        await slow.readexactly(1)  # it is being answered
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.timeout(health.REQUEST_SECS / 2):
            writer.write(b"GET /health HTTP/1.1\r\n\r\n")
            assert (await reader.read()).endswith(b"well")
            await until(lambda: server._open == 0, "the slow connection is closed too")
            with contextlib.suppress(ConnectionResetError):
                assert len(await slow.read()) < len(page)
        # Without another connection, it is closed after its time is up, with what it did not read.
        monkeypatch.setattr(health, "REQUEST_SECS", 0.1)
        slow, last_writer = await asyncio.open_connection("127.0.0.1", port)
        last_writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
        await slow.readexactly(1)
        await until(lambda: server._open == 0, "the slow connection is closed")
        async with asyncio.timeout(2):
            with contextlib.suppress(ConnectionResetError):
                assert len(await slow.read()) < len(page)
        for one in (slow_writer, writer, last_writer):
            one.close()
    finally:
        await server.stop()


async def test_the_health_port_closes_connections_beyond_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "MAX_CONNECTIONS", 1)
    server = HealthServer(None, "127.0.0.1", 0, None)  # type: ignore[arg-type]  # nothing is asked of it
    answered, release = asyncio.Event(), asyncio.Event()

    async def slow(head: bytes) -> tuple[int, str, bytes]:
        answered.set()
        await release.wait()
        return 200, "text/plain", head

    monkeypatch.setattr(server, "_respond", slow)
    port = int((await server.start()).split(":")[2].split("/")[0])
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
        await answered.wait()
        next_reader, next_writer = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.timeout(health.REQUEST_SECS / 2):
            assert await next_reader.read() == b""
            release.set()
            assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
        writer.close()
        next_writer.close()
    finally:
        await server.stop()


async def test_a_long_name_or_id_is_not_added(url: str) -> None:
    async with Queue("q", url=url) as queue:
        with pytest.raises(ValueError, match="id must be at most 65536 bytes"):
            await queue.add("x", 1, job_id="x" * 65_537)
