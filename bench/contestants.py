"""Starts the contestants' programs, each in its own environment, and asks them to run scenarios."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

from bench.paths import ROOT

if TYPE_CHECKING:
    from pathlib import Path

#: How long a program may take for one scenario, in seconds.
PATIENCE_SECS = 60.0


class PeerFailed(Exception):  # noqa: N818 - names what happened, not a kind of error
    """A program did not answer or reported an error; the message is one line."""


class Program:
    """A running contestant: `program.ask("queue-add", total=1000)`."""

    def __init__(self, name: str, command: list[str], url: str, server_pid: int) -> None:
        self.name = name
        self._command = [*command, url, str(server_pid)]
        self._start()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            bufsize=1,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self._complaints: list[str] = []
        self._readers = [threading.Thread(target=each, daemon=True) for each in (self._read, self._listen)]
        for reader in self._readers:
            reader.start()
        try:
            #: Name, versions, settings and scenarios, as reported by the program.
            self.about: dict[str, Any] = self._answer("startup")
        except PeerFailed:
            self.close()
            raise

    def ask(self, scenario: str, **arguments: Any) -> dict[str, float]:
        """Run a scenario once and return its figures."""
        if self._process.poll() is not None:
            self._start()  # it failed in an earlier scenario, which says nothing about this one
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"scenario": scenario, **arguments}) + "\n")
        except OSError as error:
            raise PeerFailed(f"{self.name} has ended: {error}") from error
        figures = self._answer(scenario)
        if "error" in figures:
            raise PeerFailed(f"{self.name} in {scenario}: {figures['error']}")
        return figures

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # type: ignore[union-attr]  # it is a pipe
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(5)
        for reader, stream in zip(self._readers, (self._process.stdout, self._process.stderr), strict=True):
            reader.join(5)
            if stream is not None and not reader.is_alive():
                stream.close()

    @property
    def last_words(self) -> str:
        """Return the last lines it wrote to stderr."""
        return "\n".join(self._complaints[-20:])

    def _answer(self, what: str) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=PATIENCE_SECS)
        except queue.Empty:
            self._process.kill()
            self._process.wait(10)
            raise PeerFailed(f"{self.name} did not answer within {PATIENCE_SECS:g} s: {what}") from None
        if not line:
            code = self._process.wait(10)
            self._readers[1].join(5)  # its last output may not have arrived yet
            raise PeerFailed(f"{self.name} exited with code {code} in {what}: {self._last_complaint()}")
        return dict(json.loads(line))

    def _last_complaint(self) -> str:
        return self._complaints[-1] if self._complaints else "no output"

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _listen(self) -> None:
        # Read continuously: a full pipe would block the program.
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._complaints.append(line.rstrip())


def own_command(module: str) -> list[str]:
    """Return the command for one of our own programs, in our own environment."""
    return [sys.executable, "-m", module]


def peer_command(name: str) -> list[str]:
    """Return the command for a peer, in its environment. Install it if necessary; raise `Unavailable` if impossible."""
    from install_peers import PACKAGES, environment, program

    package = PACKAGES[name]
    if package.is_node:
        script: Path = ROOT / "bench" / "peers" / f"{name.replace('-', '_')}.js"
        return [str(program(name)), str(script), str(environment(name))]
    return [str(program(name)), "-m", f"bench.peers.{name}"]
