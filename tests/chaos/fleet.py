"""The processes of a run: workers and producers in numbered places. One that dies is replaced."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chaos.records import Recorder

TESTS = Path(__file__).parent.parent
#: Interval between two checks of the fleet, in seconds.
WATCH_SECS = 0.05
#: How long a process takes to start, in seconds.
START_SECS = 2.0


@dataclass
class Member:
    """One process."""

    name: str
    place: int
    process: subprocess.Popen[bytes]
    log: Path
    is_expected_to_end: bool = False
    #: A fault is being injected into it; only one at a time is.
    is_in_trouble: bool = False
    born_at: float = field(default_factory=time.monotonic)

    @property
    def is_at_work(self) -> bool:
        """True if it has had time to start: a fault that hits no job proves nothing."""
        return self.is_alive and time.monotonic() - self.born_at > START_SECS

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    async def end(self, within_secs: float = 3600) -> bool:
        """Wait until it has exited. Return False if that takes too long."""
        deadline = time.monotonic() + within_secs
        while self.is_alive and time.monotonic() < deadline:  # noqa: ASYNC110 - a process sets no event
            await asyncio.sleep(0.01)
        return not self.is_alive

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    def say(self, line: str) -> None:
        """Write a line to its standard input."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.write(line.encode() + b"\n")
            self.process.stdin.flush()

    def hang_up(self) -> None:
        """Close its standard input."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()


@dataclass
class Fleet:
    """Starts processes, records their deaths and replaces them."""

    folder: Path
    records: Recorder
    #: The module and the plan of each place, without the process's name.
    plans: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    members: list[Member] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    _births: int = 0

    def start(self, module: str, plan: dict[str, Any]) -> Member:
        """Start a process in a new place."""
        self.plans.append((module, plan))
        member = self._spawn(len(self.plans) - 1)
        self.members.append(member)
        return member

    def _spawn(self, place: int) -> Member:
        module, plan = self.plans[place]
        self._births += 1
        name = f"{plan['role']}{place}.{self._births}"
        log = self.folder / f"{name}.log"
        full = plan | {"name": name, "folder": str(self.folder), "seed": f"{plan['seed']}-{name}"}
        with log.open("wb") as output:
            process = subprocess.Popen(
                [plan.get("python", sys.executable), "-m", module],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=TESTS,
                env=os.environ | {"CHAOS_PLAN": json.dumps(full)},
            )
        return Member(name, place, process, log)

    @property
    def workers(self) -> list[Member]:
        return [member for member in self.members if member.name.startswith("w")]

    @property
    def producers(self) -> list[Member]:
        return [member for member in self.members if member.name.startswith("p")]

    async def watch(self) -> None:
        """Replace processes that have exited, until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(WATCH_SECS)

    def look(self) -> None:
        """Record the deaths of processes, and replace workers and killed producers."""
        for number, member in enumerate(self.members):
            code = member.process.poll()
            if code is None or member.is_expected_to_end:
                continue
            member.is_expected_to_end = True
            member.hang_up()
            if code != 0 or member.name.startswith("w"):
                self.records.write("death", member.name)
                # 9: `os._exit` of a handler. Without file descriptors, the interpreter itself may fail.
                if code not in (9, -9) and not member.is_in_trouble:
                    self.unexpected.append(f"{member.name} ended with {code}: {tail(member.log)}")
                self.members[number] = self._spawn(member.place)

    def retire(self, member: Member) -> None:
        """Replace a process that was told to stop. Its jobs must continue elsewhere."""
        self.members[self.members.index(member)] = self._spawn(member.place)

    async def stop_producers(self, within_secs: float) -> None:
        for member in self.producers:
            member.hang_up()
        await self._await_end(self.producers, within_secs)

    async def stop_workers(self, within_secs: float) -> None:
        """Stop all workers with SIGTERM."""
        for member in self.workers:
            member.is_expected_to_end = True
            member.signal(signal.SIGTERM)
        await self._await_end(self.workers, within_secs)
        for member in self.workers:
            code = member.process.returncode
            # A worker that is still starting has no signal handler yet, and no job.
            if code != 0 and not (code == -signal.SIGTERM and self._has_run_nothing(member)):
                self.unexpected.append(f"{member.name} ended with {code}: {tail(member.log)}")

    def _has_run_nothing(self, member: Member) -> bool:
        return not any(path.stat().st_size for path in (self.folder / "records").glob(f"{member.name}~*.rec"))

    async def _await_end(self, members: list[Member], within_secs: float) -> None:
        deadline = time.monotonic() + within_secs
        for member in members:
            if not await member.end(deadline - time.monotonic()):
                self.unexpected.append(f"{member.name} did not end within {within_secs:g} s: {tail(member.log)}")
                self.records.write("death", member.name)

    def kill_all(self) -> None:
        """Kill all processes that still run."""
        for member in self.members:
            if member.is_alive:
                member.signal(signal.SIGKILL)
            member.process.wait()
            member.hang_up()


def tail(log: Path) -> str:
    """Return the last lines of a log."""
    return " | ".join(log.read_text(errors="replace").splitlines()[-3:])
