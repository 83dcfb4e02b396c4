"""`tampu dashboard` refuses to serve without protection; `tampu stats` shows what workers counted."""

from __future__ import annotations

import asyncio
import signal
import socket
import urllib.error
import urllib.request
from typing import TYPE_CHECKING

import pytest

from cli.lab import invoke, start
from cli.shop import QUEUE, Filled
from tampu.cli.commands.dashboard import _hosts
from tampu.consume.meter import fold
from tampu.inspect.meters import meter_key
from tampu.redis.client import Client
from tampu.redis.settings import parse_url
from tampu.wire.keys import QueueKeys
from tampu.wire.meter import Counts, bucket, encode_cell

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator
    from pathlib import Path

    from servers.process import Server


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--host", "0.0.0.0"), "anyone who reaches 0.0.0.0 could read the queues: pass --auth or --trusted-header"),
        (("--host", "ops.example.com"), "anyone who reaches ops.example.com"),
        (("--operator", "ada"), "--operator needs --trusted-header"),
        (("--auth", "users", "--trusted-header", "x-user"), "exclude each other"),
    ],
)
def test_it_refuses_to_serve_without_protection(url: str, arguments: tuple[str, ...], said: str) -> None:
    done = invoke("dashboard", *arguments)
    assert (done.code, done.out) == (2, "")
    assert said in done.complaint


def test_a_port_in_use_is_one_line(url: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = invoke("dashboard", "--port", str(port))
    assert (done.code, done.out) == (1, "")
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use; choose another --port" in done.complaint


def test_a_password_file_that_others_can_read_is_refused(url: str, tmp_path: Path) -> None:
    users = tmp_path / "users"
    users.write_text("ada:operator:correct horse\n")
    users.chmod(0o644)
    done = invoke("dashboard", "--auth", str(users))
    assert done.code == 2
    assert "chmod 600" in done.complaint


def test_hosts_are_the_address_and_what_is_allowed() -> None:
    assert _hosts("127.0.0.1", 8266, ["Ops.example.com"]) == {
        *("127.0.0.1", "127.0.0.1:8266", "localhost", "localhost:8266", "[::1]", "[::1]:8266"),
        *("ops.example.com", "ops.example.com:8266"),
    }
    assert _hosts("10.0.0.1", 80, []) == {"10.0.0.1", "10.0.0.1:80"}


@pytest.fixture
def serving(url: str, shop: Filled) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Start the dashboard and return the URL that it prints."""
    process = start("dashboard", "--port", "0")
    assert process.stdout is not None
    yield process, process.stdout.readline().decode().split()[1]
    process.kill()
    process.communicate()


@pytest.mark.slow
def test_the_printed_url_opens_it_and_it_stops_at_once(serving: tuple[subprocess.Popen[bytes], str]) -> None:
    process, address = serving
    assert address.startswith("http://127.0.0.1:")
    base = address.partition("?")[0]
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    with opener.open(address) as answer:
        assert answer.url == base  # the token has left the address
        assert QUEUE in answer.read().decode()
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(base)
    with pytest.raises(urllib.error.HTTPError, match="421"):
        urllib.request.urlopen(urllib.request.Request(address, headers={"host": "evil.example"}))
    with pytest.raises(urllib.error.HTTPError, match="404"):
        opener.open(f"{base}confirm?q={QUEUE}&action=pause")  # read-only by default
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) in (0, -signal.SIGTERM, 143)


def test_stats_shows_the_runs_of_each_task(server: Server, shop: Filled, url: str) -> None:
    counts = Counts()
    counts.kinds, counts.runs, counts.waits = [90, 8, 2, 0], {bucket(20_000): 100}, {bucket(300): 100}
    minute = int(server.client().time()[0]) // 60 - 5

    async def fold_it() -> None:
        client, keys = Client(parse_url(url), b"x"), QueueKeys(QUEUE)
        await client.call("HSET", meter_key(keys, minute), "worker", encode_cell({"pay": counts}))
        await fold(client, keys, minute)
        await client.close()

    asyncio.run(fold_it())
    found = invoke("stats", QUEUE, "--json").json["tasks"]["pay"]
    assert (found["runs"], found["succeeded"], found["retried"], found["dead"]) == (100, 90, 8, 2)
    assert 16 <= found["run_p50_ms"] <= 25
    table = invoke("stats", QUEUE).out.splitlines()
    assert table[0].split() == ["task", "runs", "failed", "died", "run", "p50", "p95", "p99", "wait", "p95"]
    assert table[1].split()[:5] == ["pay", "100", "10.0", "%", "2"]
    assert "no runs of shop in the last 2m" in invoke("stats", QUEUE, "--since", "2m").err
    for since in ("25h", "10s"):
        assert "between 1m and 24h" in invoke("stats", QUEUE, "--since", since).complaint
