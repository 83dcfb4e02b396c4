"""The servers used by the other tests: each has the right version, starts empty, and leaves nothing behind."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from servers import require as require_module
from servers.binaries import KINDS, cache_dir, server_binary
from servers.cluster import MASTERS, SLOTS, Cluster
from servers.liveness import is_alive
from servers.process import Server, ServerFailed, eventually, free_port
from servers.require import require, require_server

if TYPE_CHECKING:
    from collections.abc import Callable

    from servers.sentinel import SentinelSetup

NO_RETRY = Retry(NoBackoff(), 0)
ALONE = pytest.mark.servers("valkey", "redis62", "redis70", "redis86")


def nodes_of(server: Server | Cluster) -> list[Server]:
    return server.nodes if isinstance(server, Cluster) else [server]


@pytest.mark.xdist_group("a_group")
def test_tests_of_a_group_run_in_one_process(request: pytest.FixtureRequest) -> None:
    """pytest-xdist reads a test's group from its ID. pytest 9.2 lost it, and every process started a Spark session."""
    assert request.node.nodeid.endswith("@a_group") == ("PYTEST_XDIST_WORKER" in os.environ)


# Every kind


@pytest.mark.servers
def test_every_kind_has_the_right_version(server: Server | Cluster, server_kind: str) -> None:
    for node in nodes_of(server):
        client = node.client()
        assert client.ping()
        info = client.info("server")
        version = info["valkey_version"] if server_kind == "valkey" else info["redis_version"]
        assert version == node.version
        assert version.startswith(f"{KINDS[server_kind].version}.")
        assert info["process_id"] == node.pid


@pytest.mark.servers
@pytest.mark.parametrize("turn", ["first", "second"])
def test_every_test_gets_an_empty_server(server: Server | Cluster, turn: str) -> None:
    for node in nodes_of(server):
        client = node.client()
        assert client.dbsize() == 0
        assert client.script_exists(hashlib.sha1(b"return 1").hexdigest()) == [False]
        client.script_load("return 1")
    server.client().set("left behind by", turn)


@pytest.mark.parametrize("turn", ["first", "second"])
def test_changes_to_the_shared_server_are_undone(server: Server, turn: str) -> None:
    assert server.client().config_get("maxmemory") == {"maxmemory": "0"}
    assert server.is_running
    server.config_set(maxmemory="1mb")
    if turn == "first":
        server.pause()


def test_a_server_killed_by_a_test_is_up_again_for_the_next(server: Server) -> None:
    server.kill()
    server.reset()
    assert server.client().ping()


def test_without_the_mark_a_test_runs_on_the_embedded_valkey(server: Server) -> None:
    assert server.kind == "valkey"


@pytest.mark.servers
def test_a_stopped_server_leaves_no_process_behind(fresh_server: Callable[..., Server], server_kind: str) -> None:
    server = fresh_server(server_kind)
    pids = [node.pid for node in nodes_of(server)]
    assert all(is_alive(pid) for pid in pids)
    server.stop()
    assert not any(is_alive(pid) for pid in pids)


# Private servers


def test_two_servers_get_different_ports_and_folders(fresh_server: Callable[..., Server]) -> None:
    one, other = fresh_server(), fresh_server()
    assert one.port != other.port
    assert one.data_dir != other.data_dir
    one.client().set("here", 1)
    assert other.client().get("here") is None


@ALONE
def test_a_killed_server_keeps_the_data_of_its_append_only_file(
    fresh_server: Callable[..., Server], server_kind: str
) -> None:
    server = fresh_server(server_kind, appendonly="yes", appendfsync="always")
    server.client().set("kept", "yes")
    port = server.port
    server.kill()
    with pytest.raises(redis.ConnectionError):
        server.client().ping()
    server.start()
    assert server.port == port
    assert server.client().get("kept") == b"yes"


@ALONE
def test_a_transaction_cut_by_a_kill_is_never_applied(fresh_server: Callable[..., Server], server_kind: str) -> None:
    server = fresh_server(server_kind, appendonly="yes", appendfsync="always")
    server.client().set("a", "1")
    server.kill()
    files = [*server.data_dir.glob("appendonly.aof"), *server.data_dir.glob("appendonlydir/*.incr.aof")]
    with files[0].open("ab") as file:
        file.write(b"*1\r\n$5\r\nMULTI\r\n*3\r\n$3\r\nSET\r\n$1\r\na\r\n$1\r\n2\r\n*3\r\n$3")
    server.start()
    server.client().set("b", "1")
    with server.client().pipeline(transaction=True) as pipe:
        pipe.set("c", "1")
        pipe.set("d", "1")
        pipe.execute()
    server.kill()
    server.start()
    assert server.client().mget("a", "b", "c", "d") == [b"1", b"1", b"1", b"1"]


def test_a_restarted_server_without_persistence_is_empty(fresh_server: Callable[..., Server]) -> None:
    server = fresh_server()
    server.client().set("gone", "soon")
    server.restart()
    assert server.client().dbsize() == 0


def test_a_paused_server_does_not_answer_until_it_is_resumed(fresh_server: Callable[..., Server]) -> None:
    server = fresh_server()
    server.pause()
    with pytest.raises(redis.TimeoutError):
        server.client(socket_timeout=0.05).ping()
    server.resume()
    assert server.client().ping()


def test_a_paused_server_can_be_stopped(fresh_server: Callable[..., Server]) -> None:
    server = fresh_server()
    pid = server.pid
    server.pause()
    server.stop()
    assert not is_alive(pid)


def test_another_port_is_used_if_the_first_is_taken(
    fresh_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = fresh_server()
    ports = iter([first.port, first.port, free_port()])
    monkeypatch.setattr("servers.process.free_port", lambda: next(ports))
    second = fresh_server()
    assert second.port != first.port
    assert second.client().ping()


def test_a_server_that_does_not_start_shows_its_log(fresh_server: Callable[..., Server]) -> None:
    with pytest.raises(ServerFailed, match="no-such-setting"):
        fresh_server(no_such_setting="1")


@pytest.mark.parametrize("fixture", ["server", "fresh_server"])
def test_a_server_that_crashes_fails_its_test_with_its_log(tmp_path: Path, fixture: str) -> None:
    """The inner test has its server crash, as by a bug, and passes; its teardown must not."""
    inner = textwrap.dedent(f"""
        import os, signal
        import pytest, redis

        def test_crash({fixture}):
            server = {fixture} if {fixture!r} == "server" else {fixture}()
            os.kill(server.pid, signal.SIGSEGV)
            with pytest.raises(redis.ConnectionError):
                while True:
                    server.client().ping()
    """)
    (tmp_path / "test_inner.py").write_text(inner)
    tests = Path(__file__).parents[1]
    options = ["-q", "-p", "no:cacheprovider", "-p", "conftest", "-c", str(tests.parent / "pyproject.toml")]
    # In its own folder: by default, pytest also removes old folders of other runs, and fails if one is in use.
    options += ["--basetemp", str(tmp_path / "inner")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(tmp_path / "test_inner.py")],
        env={**os.environ, "PYTHONPATH": str(tests)},
        capture_output=True,
        text=True,
    )
    assert "1 passed, 1 error" in done.stdout, done.stdout + done.stderr
    assert "valkey ended by itself (signal 11); its log:" in done.stdout
    assert "crashed by signal: 11" in done.stdout


def test_a_password_is_part_of_the_url(fresh_server: Callable[..., Server]) -> None:
    server = fresh_server("redis86", requirepass="p@ss/word")
    with redis.Redis.from_url(server.url) as client:
        assert client.ping()
    with pytest.raises(redis.AuthenticationError), redis.Redis(port=server.port, retry=NO_RETRY) as stranger:
        stranger.ping()
    assert server.cli("ping") == "PONG"


def test_a_tls_server_is_trusted_through_its_url(fresh_server: Callable[..., Server]) -> None:
    server = fresh_server("redis86", tls=True)
    with redis.Redis.from_url(server.url) as client:
        assert client.ping()
    assert server.cli("ping") == "PONG"


def test_a_replica_follows_its_master(fresh_server: Callable[..., Server]) -> None:
    master = fresh_server("redis86", requirepass="secret")
    replica = fresh_server("redis86", replicaof=master)
    master.client().set("copied", "yes")
    eventually(lambda: replica.client().get("copied") == b"yes", "the key arrives at the replica")


def test_the_servers_of_a_killed_test_run_are_stopped(tmp_path: Path) -> None:
    run = textwrap.dedent(f"""
        import os, signal, sys
        from pathlib import Path
        sys.path.insert(0, {str(Path(__file__).parents[1])!r})
        from servers.shared import make_server
        server = make_server("valkey", Path({str(tmp_path)!r}))
        server.start()
        print(server.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    pid = int(subprocess.run([sys.executable, "-c", run], capture_output=True, text=True).stdout)
    eventually(lambda: not is_alive(pid), "the server of the killed run has ended")


# The Cluster and the sentinels


@pytest.mark.servers("cluster86")
def test_the_cluster_serves_every_slot(server: Cluster) -> None:
    assert server.url == f"redis+cluster://127.0.0.1:{server.nodes[0].port}"
    for node in server.nodes:
        ranges = node.client().execute_command("CLUSTER SLOTS")
        assert sum(last - first + 1 for first, last, *_ in ranges) == SLOTS
        assert {master[1] for _, _, master, *_ in ranges} == {node.port for node in server.nodes}
    client = server.client()
    for number in range(100):
        client.set(f"key {number}", number)
    assert sum(node.client().dbsize() for node in server.nodes) == 100
    assert server.node_of("key 7").client().get("key 7") == b"7"
    assert server.cli("get", "key 8") == "8"


def test_a_cluster_can_have_replicas(fresh_server: Callable[..., Cluster]) -> None:
    cluster = fresh_server("cluster86", replicas=1)
    roles = [node.client().info("replication")["role"] for node in cluster.nodes]
    assert roles == ["master"] * MASTERS + ["slave"] * MASTERS


def test_sentinels_promote_the_replica_of_a_killed_master(fresh_sentinel: Callable[..., SentinelSetup]) -> None:
    setup = fresh_sentinel()
    assert setup.current_master() is setup.master
    setup.master.kill()
    eventually(lambda: setup.current_master() is setup.replica, "the sentinels chose the replica")
    eventually(lambda: setup.replica.client().info("replication")["role"] == "master", "the replica was promoted")


# Missing servers and tools


@pytest.mark.parametrize(("ci", "outcome"), [("true", pytest.fail.Exception), (None, pytest.skip.Exception)])
def test_a_missing_server_skips_its_tests_but_fails_them_in_ci(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ci: str | None, outcome: type[BaseException]
) -> None:
    _set_ci(monkeypatch, ci)
    monkeypatch.setenv("TAMPU_CACHE", str(tmp_path))
    with pytest.raises(outcome, match=r"Redis 8\.6 is missing: run `make servers`"):
        require_server("redis86")


@pytest.mark.parametrize(("ci", "outcome"), [("true", pytest.fail.Exception), (None, pytest.skip.Exception)])
def test_a_missing_tool_skips_its_tests_but_fails_them_in_ci(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ci: str | None, outcome: type[BaseException]
) -> None:
    _set_ci(monkeypatch, ci)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(outcome, match="node is missing: apt install nodejs"):
        require("node")


def test_a_tool_is_found_under_any_of_its_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    browser = tmp_path / "google-chrome"
    browser.write_text("#!/bin/sh\n")
    browser.chmod(0o755)
    assert require("chromium") == str(browser)


def test_a_server_without_tls_counts_as_missing_for_a_tls_test(monkeypatch: pytest.MonkeyPatch) -> None:
    _set_ci(monkeypatch, None)
    monkeypatch.setattr(require_module, "has_tls", lambda binary: False)
    with pytest.raises(pytest.skip.Exception, match="with TLS is missing"):
        require_server("valkey", tls=True)


def test_environment_variables_set_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("TAMPU_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_dir() == tmp_path / ".cache" / "tampu"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_dir() == Path("/x/tampu")
    monkeypatch.setenv("TAMPU_CACHE", "/y")
    assert cache_dir() == Path("/y")


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="no such kind of server: 'redis99'"):
        server_binary("redis99")


def _set_ci(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    if value is None:
        monkeypatch.delenv("CI", raising=False)
    else:
        monkeypatch.setenv("CI", value)
