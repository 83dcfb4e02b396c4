"""Ways to run commands: in this process (fast), in a separate process behind pipes, and in a real terminal."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from servers.process import eventually
from tampu.cli.main import run_command

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import TracebackType

#: Like the installed `tampu` program, -P keeps the current folder out of the module search path.
PROGRAM = (sys.executable, "-P", "-m", "tampu.cli")
#: How long a program may take to exit on a busy machine, in seconds.
PATIENCE_SECS = 30.0


@dataclass(frozen=True)
class Done:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Return its output, which is one JSON document."""
        return json.loads(self.out, parse_constant=_refuse)

    @property
    def json_lines(self) -> list[Any]:
        """Return its output, one JSON document per line."""
        return [json.loads(line, parse_constant=_refuse) for line in self.out.splitlines()]

    @property
    def complaint(self) -> str:
        """Return the only line on stderr."""
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("tampu: "), self.err
        return lines[0]


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not valid JSON")


def invoke(*arguments: str, stdin: str = "") -> Done:
    """Run a command in this process, with stdin, stdout and stderr redirected."""
    out, err, given = io.StringIO(), io.StringIO(), sys.stdin
    sys.stdin = io.StringIO(stdin)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = run_command(list(arguments))
    finally:
        sys.stdin = given
    return Done(code, out.getvalue(), err.getvalue())


def start(*arguments: str, cwd: Path | None = None, **options: Any) -> subprocess.Popen[bytes]:
    """Start a command in a separate process."""
    defaults: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([*PROGRAM, *arguments], cwd=cwd, **(defaults | options))


def run_program(*arguments: str, cwd: Path | None = None, **options: Any) -> Done:
    """Run a command in a separate process, behind pipes."""
    process = start(*arguments, cwd=cwd, **options)
    out, err = process.communicate(timeout=PATIENCE_SECS)
    return Done(process.returncode, (out or b"").decode(), (err or b"").decode())


def run_shell(script: str) -> subprocess.CompletedProcess[str]:
    """Run a line of shell in which `tampu` is the program under test."""
    program = " ".join(PROGRAM)
    return subprocess.run(
        ["bash", "-c", f'tampu() {{ {program} "$@"; }}; {script}'],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECS,
        check=False,
    )


class Terminal:
    """A command in a terminal with 40 lines; Ctrl-C typed there reaches it as from a keyboard."""

    def __init__(self, *arguments: str, cwd: Path | None = None, columns: int = 120) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        environment = os.environ | {"TERM": "xterm-256color"}
        environment.pop("COLUMNS", None)
        self.process = subprocess.Popen(
            [*PROGRAM, *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=cwd,
            env=environment,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(slave)
        self._received = bytearray()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # raised when the program in the terminal has ended
            while chunk := os.read(self._master, 65536):
                self._received += chunk

    @property
    def shown(self) -> str:
        """Return everything written to the terminal so far."""
        return self._received.decode(errors="replace")

    def until(self, text: str) -> None:
        """Wait until a text is shown."""
        eventually(lambda: text in self.shown or self.process.poll() is not None, f"the terminal shows {text!r}")
        assert text in self.shown, self.shown

    def press(self, keys: str) -> None:
        """Press keys; `\\x03` is Ctrl-C."""
        os.write(self._master, keys.encode())

    def wait(self) -> int:
        """Wait for the program to end and return its exit code."""
        code = self.process.wait(PATIENCE_SECS)
        self._reader.join(PATIENCE_SECS)
        return code

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._reader.join(PATIENCE_SECS)
        os.close(self._master)


class WorkerProgram:
    """`tampu worker ...` in a separate process that logs to a file. All its processes are killed at the end."""

    def __init__(self, folder: Path, *arguments: str, **environment: str) -> None:
        self._log = folder / "worker.log"
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [*PROGRAM, "worker", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=folder,
                env=os.environ | environment,
                start_new_session=True,
            )

    @property
    def log(self) -> str:
        """Return its log so far."""
        return self._log.read_text()

    def until_logged(self, text: str, times: int = 1) -> None:
        """Wait for a text in its log."""
        eventually(lambda: self.log.count(text) >= times or not self.is_alive, f"the log says {text!r}")
        assert self.log.count(text) >= times, self.log

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def children(self) -> list[int]:
        """Return the pids of its worker processes."""
        path = f"/proc/{self.process.pid}/task/{self.process.pid}/children"
        with open(path) as file:
            return [int(pid) for pid in file.read().split()]

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        return self.process.wait(PATIENCE_SECS)

    def end(self) -> None:
        """Kill all its processes."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(PATIENCE_SECS)


@contextlib.contextmanager
def worker_program(folder: Path, *arguments: str, **environment: str) -> Iterator[WorkerProgram]:
    """Run a worker: `with worker_program(tmp_path, "app:queue") as worker:`."""
    program = WorkerProgram(folder, *arguments, **environment)
    try:
        yield program
    finally:
        program.end()
