"""One server process: a Redis or Valkey on a free loopback port, in its own folder, stopped by its pid."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from servers.binaries import tool_binary, version_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from servers.tls import Certificates

HOST = "127.0.0.1"

#: Below the range from which the kernel chooses client ports. Inside it, a server that is down for a moment could lose
#: its port to a connection, and a client that keeps trying to connect to it could even connect to itself.
PORTS = range(10_000, 30_000)

#: How long a server may take to start or stop, in seconds. It takes about 10 ms, or 2 s for a Cluster.
PATIENCE_SECS = 30.0

#: The first line of a crash report, of Redis and of Valkey.
CRASHING = "BUG REPORT START"

#: How often a condition is checked, in seconds.
POLL_SECS = 0.005

#: Stops the server when the test run is killed. The shell starts a watcher and then becomes the server, so the pid is
#: the server's. The watcher reads a pipe from the test run: a line means that the server was stopped normally, end of
#: file without a line that the test run is gone.
LAUNCH = 'exec 3<&0 </dev/null; (read -r _ <&3 || kill -KILL $$) >/dev/null 2>&1 & exec "$@" 3<&-'


class ServerFailed(Exception):  # noqa: N818 - reads like a sentence in a test report
    """The server did not do what was asked; the message ends with its log."""


def free_port() -> int:
    """Return a free loopback port. Another program may take it first; `start` then tries another."""
    for _ in range(1000):
        port = random.choice(PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            return port
    raise ServerFailed(f"no free port from {PORTS.start} to {PORTS.stop}")


def eventually(condition: Callable[[], Any], what: str, within_secs: float = PATIENCE_SECS) -> Any:
    """Wait until the condition is truthy and return its value; a lost connection counts as not yet."""
    deadline = time.monotonic() + within_secs
    last: Exception | None = None
    while True:
        try:
            if value := condition():
                return value
        except (redis.ConnectionError, redis.TimeoutError, OSError) as error:
            last = error
        if time.monotonic() > deadline:
            raise ServerFailed(f"not within {within_secs:g} s: {what}" + (f" ({last})" if last else ""))
        time.sleep(POLL_SECS)


def whole_transactions(log: bytes) -> int:
    """Return the length of an append-only file without the command or transaction that is incomplete at its end."""
    if log.startswith(b"REDIS"):
        return len(log)  # Redis 6.2 has rewritten it, and begins it with a snapshot
    position = whole = 0
    in_transaction = False
    with contextlib.suppress(ValueError):  # the file ends inside a command
        while position < len(log):
            end = log.index(b"\r\n", position)
            words = []
            for _ in range(int(log[position + 1 : end])):
                start = log.index(b"\r\n", end + 2) + 2
                length = int(log[end + 3 : start - 2])
                words.append(log[start : start + length])
                end = log.index(b"\r\n", start + length)
            position = end + 2
            in_transaction = words[0].upper() == b"MULTI" or (in_transaction and words[0].upper() != b"EXEC")
            if not in_transaction:
                whole = position
    return whole


@dataclass
class Server:
    """A private server. Call `start`, and `stop` in the end; the other methods simulate faults in between."""

    kind: str
    binary: Path
    data_dir: Path
    #: Lines of its configuration file, in addition to the defaults of `_configuration`.
    settings: dict[str, str] = field(default_factory=dict)
    certificates: Certificates | None = None
    #: Chosen on the first start and kept across restarts, so that clients can reconnect.
    port: int = 0
    version: str = ""
    process: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        self.version = version_of(self.binary)
        self._clients: list[redis.Redis] = []
        self._former: dict[str, str] = {}
        self._lifeline = -1
        self._keep_port = False
        self._log_start = 0
        #: Clients with a higher ID have connected since the last `reset`: those of the test that runs.
        self.reset_id = 0

    # Address

    @property
    def url(self) -> str:
        password = f":{quote(self.password, safe='')}@" if self.password else ""
        if self.certificates:
            return f"rediss://{password}{HOST}:{self.port}/0?ssl_ca_certs={quote(str(self.certificates.ca), safe='/')}"
        return f"redis://{password}{HOST}:{self.port}/0"

    @property
    def address(self) -> tuple[str, int]:
        return HOST, self.port

    @property
    def password(self) -> str | None:
        return self.settings.get("requirepass")

    @property
    def pid(self) -> int:
        if self.process is None:
            raise ServerFailed(f"{self.kind} is not running")
        return self.process.pid

    @property
    def log(self) -> Path:
        return self.data_dir / "server.log"

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def require_no_crash(self) -> None:
        """Raise `ServerFailed` with the end of its log if it has ended without `stop` or `kill`.

        The test itself only sees a connection that was reset.
        """
        if self.process is None:
            return
        if self.is_running and CRASHING in self._log_text():
            self.process.wait(PATIENCE_SECS)  # it closes connections first, and then writes its report
        if not self.is_running:
            code = self.process.returncode
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            self._reap()
            raise ServerFailed(f"{self.kind} ended by itself ({how}); its log:\n{self._last_run()}")

    # Start and stop

    def start(self) -> None:
        """Start it and wait until it answers. A restart after `stop` or `kill` uses the same port and data."""
        self.launch()
        self.await_ready()

    def launch(self) -> None:
        """Run the first half of `start`, so that several servers can start at the same time."""
        if self.is_running:
            raise ServerFailed(f"{self.kind} is already running")
        self.data_dir.mkdir(parents=True, exist_ok=True)
        self._keep_port = bool(self.port)
        if not self._keep_port:
            self._choose_ports()
        self._repair_append_only_file()
        self._spawn()

    def await_ready(self) -> None:
        """Run the second half of `start`."""
        deadline = time.monotonic() + PATIENCE_SECS
        while not self._answers():
            if not self.is_running:
                self._reap()
                if "Address already in use" not in self._last_run():
                    raise ServerFailed(f"{self.kind} exited during startup; its log:\n{self._last_run()}")
                if not self._keep_port:
                    self._choose_ports()
                self._spawn()
            if time.monotonic() > deadline:
                self.kill()
                raise ServerFailed(f"{self.kind} did not answer on port {self.port}; its log:\n{self._last_run()}")
            time.sleep(POLL_SECS)

    def stop(self) -> None:
        """Stop it cleanly, or by force if that takes too long. Does nothing if it is not running."""
        self._close_clients()
        if self.process is None:
            return
        self.process.terminate()
        self.process.send_signal(signal.SIGCONT)  # a paused process gets the first signal only when it resumes
        try:
            self.process.wait(PATIENCE_SECS)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self._reap()

    def kill(self) -> None:
        """Kill it with SIGKILL, as in a power failure."""
        if self.process is not None:
            self.process.kill()
            self._reap()

    def restart(self) -> None:
        """Stop and start it; data that was not persisted is lost."""
        self.stop()
        self.start()

    def pause(self) -> None:
        """Stop it with SIGSTOP: it keeps its connections but does nothing, like a host that hangs."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """End a pause."""
        os.kill(self.pid, signal.SIGCONT)

    # Clients and commands

    def client(self, **options: Any) -> redis.Redis:
        """Return a client that returns bytes and does not retry; it is closed after the test."""
        client = self._connect(**options)
        self._clients.append(client)
        return client

    def cli(self, *arguments: str) -> str:
        """Return the output of redis-cli."""
        program = tool_binary("redis-cli")
        if program is None:
            raise ServerFailed("redis-cli is missing; run `make servers`")
        command = [str(program), "-h", HOST, "-p", str(self.port)]
        if self.certificates:
            command += ["--tls", "--cacert", str(self.certificates.ca)]
        environment = os.environ | ({"REDISCLI_AUTH": self.password} if self.password else {})
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, env=environment, timeout=30)
        if done.returncode:
            raise ServerFailed(f"redis-cli {' '.join(arguments)}: {done.stderr or done.stdout}")
        return done.stdout.removesuffix("\n")

    def config_set(self, **settings: str | int) -> None:
        """Run CONFIG SET, with underscores for hyphens; `reset` undoes it."""
        with self._connect(decode_responses=True) as client:
            for name, value in settings.items():
                option = name.replace("_", "-")
                self._former.setdefault(option, client.config_get(option)[option])
                client.config_set(option, value)

    def reset(self) -> None:
        """Reset it for the next test: up, empty, without scripts, with its initial configuration."""
        self._close_clients()
        if not self.is_running:
            self._former.clear()
            self.kill()
            self.start()
        self.resume()
        with self._connect() as client:
            while self._former:
                client.config_set(*self._former.popitem())
            client.flushall()
            client.script_flush()
            self.reset_id = client.client_id()

    # The process

    def _choose_ports(self) -> None:
        self.port = free_port()

    def _configuration(self) -> dict[str, str]:
        port: dict[str, str] = {"port": str(self.port)}
        if self.certificates:
            port = {"port": "0", "tls-port": str(self.port), **self.certificates.settings()}
        return {
            "bind": HOST,
            **port,
            "dir": f'"{self.data_dir}"',
            "daemonize": "no",
            "save": '""',
            "appendonly": "no",
            # By default a master waits 5 s for more replicas before it starts to send its data to the first.
            "repl-diskless-sync-delay": "0",
            # By default a Cluster lists a replica only after the first of these pings, which takes 10 s.
            "repl-ping-replica-period": "1",
            **self.settings,
        }

    def _command(self) -> list[str]:
        path = self.data_dir / "server.conf"
        path.write_text("".join(f"{name} {value}\n" for name, value in self._configuration().items()))
        return [str(self.binary), str(path)]

    def _repair_append_only_file(self) -> None:
        """Cut off a transaction that a kill left half written.

        Redis 6.2 to 8.6 ignore such a transaction when they start, but leave its bytes in the file and write behind
        them. At the next start they apply it and lose what follows, so that a second kill would damage the data.
        """
        # Redis 6.2 writes one file, later versions a folder.
        for path in (*self.data_dir.glob("appendonly.aof"), *self.data_dir.glob("appendonlydir/*.incr.aof")):
            with path.open("r+b") as file:
                file.truncate(whole_transactions(file.read()))

    def _spawn(self) -> None:
        self.reset_id = 0  # a new process assigns IDs from 1 again
        command = self._command()
        read_end, self._lifeline = os.pipe()
        try:
            with self.log.open("ab") as log:
                self._log_start = log.tell()
                self.process = subprocess.Popen(
                    ["/bin/sh", "-c", LAUNCH, "sh", *command],
                    stdin=read_end,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=self.data_dir,
                    start_new_session=True,  # Ctrl-C is for pytest, which then stops its servers
                )
        finally:
            os.close(read_end)

    def _reap(self) -> None:
        """Reap the process, which has ended or is ending, and release its watcher."""
        if self.process is None:
            return
        self.process.wait(PATIENCE_SECS)
        self.process = None
        with contextlib.suppress(BrokenPipeError):
            os.write(self._lifeline, b"\n")
        os.close(self._lifeline)

    def _answers(self) -> bool:
        with self._connect() as client, contextlib.suppress(redis.RedisError):
            # The pid distinguishes our server from another that took the port first. INFO is answered while data is
            # still being loaded, PING only after that.
            return client.info("server")["process_id"] == self.pid and bool(client.ping())
        return False

    def _connect(self, **options: Any) -> redis.Redis:
        defaults = {"protocol": 2, "decode_responses": False, "socket_timeout": 10.0, "retry": Retry(NoBackoff(), 0)}
        return redis.Redis.from_url(self.url, **(defaults | options))

    def _close_clients(self) -> None:
        while self._clients:
            self._clients.pop().close()

    def _last_run(self) -> str:
        """The end of its log since it was started; of a crash report, which is long, the beginning."""
        lines = self._log_text().splitlines()
        crash = next((number for number, line in enumerate(lines) if CRASHING in line), None)
        return "\n".join(lines[-30:] if crash is None else lines[max(crash - 10, 0) : crash + 40])

    def _log_text(self) -> str:
        with self.log.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace")
