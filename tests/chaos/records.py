"""Records: what producers, handlers and the injector saw, each process in a file of its own.

A record is one line, written with one `write` to a file opened with O_APPEND: it survives a SIGKILL of its process.
Times are nanoseconds of the monotonic clock, which all processes of a machine share.

| line                                            | written by                                                        |
|-------------------------------------------------|-------------------------------------------------------------------|
| `T ask ATTEMPTS DO UNIQUE TOKEN...`             | a producer before it adds; UNIQUE is the explicit id, or -        |
| `T ok TOKEN...`                                 | a producer: the add was confirmed                                 |
| `T known TOKEN`                                 | a producer: the ID had been added before                          |
| `T refused TOKEN...`                            | a producer: the error says that nothing was added                 |
| `T unknown TOKEN...`                            | a producer: the error says that the outcome is unknown            |
| `T cancel TOKEN`                                | a producer before it cancels a job                                |
| `T cancelled TOKEN`                             | a producer: the job is cancelled                                  |
| `T requested TOKEN`                             | a producer: the job's worker will drop or cancel it               |
| `T start TOKEN ATTEMPT`                         | a handler, as its first step                                      |
| `T end TOKEN ATTEMPT ok` or `fail`              | a handler, as its last step                                       |
| `T stalled MS`                                  | a worker that noticed it had not run for that long                |
| `T fault KIND TARGET BEGIN END`                 | the injector; TARGET is a process, or * for all                   |
| `T death PROCESS`                               | the injector, when a process is gone                              |
| `T schedule SPEC INTERVAL_MS FIRST NEXT`        | the run: due times from FIRST up to, but not including, NEXT      |
| `T dead TOKEN REASON RUNS ERROR_TYPE`           | the run, from the dead letters                                    |
| `T result TOKEN VALUE`                          | the run, from the stored results                                  |
| `T left TOKEN WHERE`                            | the run: a job still on the server after the queue was drained    |
"""

from __future__ import annotations

import math
import os
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

#: How much of a file's end is read to find out which jobs are in flight.
TAIL_BYTES = 32_768
#: The end of a run that was cut short.
NEVER = math.inf


class Recorder:
    """Appends records to the file of this process. A forked child that records gets its own file."""

    def __init__(self, folder: Path, process: str) -> None:
        self._folder = folder
        self._process = process
        self._open()

    def _open(self) -> None:
        self._pid = os.getpid()
        path = self._folder / f"{self._process}~{self._pid}.rec"
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(self, *words: object) -> None:
        """Append one record."""
        if self._pid != os.getpid():
            self._open()
        os.write(self._file, f"{time.monotonic_ns()} {' '.join(map(str, words))}\n".encode())


@dataclass(slots=True)
class Run:
    """One run of a handler."""

    token: str
    process: str
    attempt: int
    start: float
    end: float = NEVER
    #: "ok", "fail", or "" when the run was cut short.
    outcome: str = ""


@dataclass(slots=True)
class Asked:
    """One job as its producer asked for it."""

    token: str
    #: What its handler does; see `worker.py`.
    do: str = "ok"
    attempts: int = 3
    unique: str = "-"
    process: str = "producer"
    at: float = 0
    #: "ok", "known", "refused", "unknown", or "" when the producer died before it knew.
    answer: str = ""
    answered_at: float = NEVER


@dataclass(slots=True)
class DeadLetter:
    """One dead letter, as it was found on the server."""

    token: str
    reason: str
    runs: int
    error_type: str = "-"


@dataclass(slots=True)
class Fault:
    """One injected fault, or a stall that a worker noticed itself."""

    kind: str
    target: str
    begin: float
    end: float


@dataclass(slots=True)
class Schedule:
    """One schedule: its due times are `first`, `first + interval_ms`, ... before `following`."""

    spec: str
    interval_ms: int
    first: int
    following: int

    @property
    def due_times(self) -> range:
        return range(self.first, self.following, self.interval_ms)


@dataclass
class History:
    """All records of one run."""

    asked: dict[str, Asked] = field(default_factory=dict)
    runs: dict[str, list[Run]] = field(default_factory=lambda: defaultdict(list))
    dead: dict[str, list[DeadLetter]] = field(default_factory=lambda: defaultdict(list))
    results: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    #: For each cancel: when it was requested, when the job was cancelled, and when the request reached its worker.
    cancels: dict[str, float] = field(default_factory=dict)
    cancelled: dict[str, float] = field(default_factory=dict)
    requested: dict[str, float] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    deaths: dict[str, float] = field(default_factory=dict)
    schedules: list[Schedule] = field(default_factory=list)
    #: Ends without a start in the same process, and their jobs.
    strays: list[tuple[str, str]] = field(default_factory=list)
    lease_secs: float = 4.0
    #: How many runs beyond its attempts a job that kills its workers may have.
    extra_runs: int = 3

    def add_file(self, process: str, lines: Iterable[str]) -> None:
        """Take in the records of one process."""
        running: dict[tuple[str, str], list[Run]] = defaultdict(list)
        for line in lines:
            if not line.endswith("\n"):
                continue  # cut by a SIGKILL in the middle of the write: ignored
            at_text, kind, *words = line.split()
            at = float(at_text)
            if kind == "start":
                token, attempt = words
                run = Run(token, process, int(attempt), at)
                self.runs[token].append(run)
                running[token, attempt].append(run)
            elif kind == "end":
                token, attempt, outcome = words
                if not running[token, attempt]:
                    self.strays.append((process, token))
                    continue
                run = running[token, attempt].pop()
                run.end, run.outcome = at, outcome
            else:
                self._add_other(process, at, kind, words)

    def _add_other(self, process: str, at: float, kind: str, words: list[str]) -> None:
        match kind, words:
            case "ask", [attempts, do, unique, *tokens]:
                for token in tokens:
                    self.asked[token] = Asked(token, do, int(attempts), unique, process, at)
            case (("ok" | "known" | "refused" | "unknown"), tokens):
                for token in tokens:
                    asked = self.asked[token]
                    asked.answer, asked.answered_at = kind, at
            case "cancel", [token]:
                self.cancels[token] = at
            case "cancelled", [token]:
                self.cancelled[token] = at
            case "requested", [token]:
                self.requested[token] = at
            case "stalled", [ms]:
                self.faults.append(Fault("stalled", process, at - float(ms) * 1e6, at))
            case "fault", [name, target, begin, end]:
                self.faults.append(Fault(name, target, float(begin), float(end)))
            case "death", [name]:
                self.deaths[name] = at
            case "schedule", [spec, interval_ms, first, following]:
                self.schedules.append(Schedule(spec, int(interval_ms), int(first), int(following)))
            case "dead", [token, reason, runs, error_type]:
                self.dead[token].append(DeadLetter(token, reason, int(runs), error_type))
            case "result", [token, value]:
                self.results[token] = value
            case "left", [token, where]:
                self.left[token] = where
            case _:
                raise ValueError(f"{process}: not a record: {kind} {words}")

    def all_runs(self) -> Iterator[Run]:
        """Every run of every job."""
        for runs in self.runs.values():
            yield from runs


def in_flight(folder: Path, process: str) -> set[str]:
    """Return the jobs that a process has recently started or added, and not finished, from the end of its records."""
    tokens: set[str] = set()
    for path in folder.glob(f"{process}~*.rec"):
        with path.open("rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - TAIL_BYTES, 0))
            for line in file.read().decode().splitlines()[1:]:
                _, kind, *words = [*line.split(), "", ""]
                if kind == "start":
                    tokens.add(words[0])
                elif kind == "ask":
                    tokens.update(words[3:])
                else:
                    tokens.difference_update(words)
    return tokens


def read_history(folder: Path, lease_secs: float) -> History:
    """Return the history of a run, from all files in its folder."""
    history = History(lease_secs=lease_secs)
    # Producers first: an answer is always in the file of the process that asked.
    for path in sorted(folder.glob("*.rec")):
        with path.open() as lines:
            history.add_file(path.name.rpartition("~")[0], lines)
    for runs in history.runs.values():
        if len(runs) > 1:
            runs.sort(key=lambda run: run.start)
    return history
