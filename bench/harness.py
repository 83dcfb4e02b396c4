"""What every benchmark here needs: a server of its own, peers in their own processes, rounds that take turns, bars.

All figures are compared within one run: machines differ and drift, ratios hold. Rounds are interleaved and medians
reported, so that a slow second hits everybody alike.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "scripts"), str(ROOT / "bench")]


@contextlib.contextmanager
def fresh_server(kind: str = "redis86") -> Iterator[Any]:
    """A server without persistence on a free port; ended with the block."""
    from servers.shared import make_server

    with tempfile.TemporaryDirectory() as folder:
        server = make_server(kind, Path(folder) / kind)
        server.start()
        try:
            yield server
        finally:
            server.stop()


class Peer:
    """A program in another virtual environment that runs one scenario after the other: JSON lines in and out."""

    def __init__(self, python: str, script: Path, url: str) -> None:
        self._process = subprocess.Popen(
            [python, str(script), url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def run(self, scenario: str, **arguments: Any) -> float:
        """Jobs per second."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"scenario": scenario, **arguments}) + "\n")
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the peer died in {scenario}: exit code {self._process.wait()}")
        return float(json.loads(line)["rate"])

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(10)


@dataclass
class Bar:
    """A ratio that must hold."""

    name: str
    needs: float
    ours: str
    theirs: str
    #: Whether smaller is better: a time, not a rate.
    is_at_most: bool = False


@dataclass
class Table:
    """Samples by name, and the bars over their medians."""

    samples: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, value: float) -> None:
        self.samples.setdefault(name, []).append(value)

    def median(self, name: str) -> float:
        return statistics.median(self.samples[name])

    def report(self, bars: list[Bar]) -> bool:
        """Print medians and spreads, then one line a bar; whether all hold."""
        for name, values in self.samples.items():
            print(f"  {name:<44} {statistics.median(values):>12,.1f}   {min(values):>12,.1f} .. {max(values):,.1f}")
        all_hold = True
        for bar in bars:
            ratio = self.median(bar.ours) / self.median(bar.theirs)
            holds = ratio <= bar.needs if bar.is_at_most else ratio >= bar.needs
            all_hold &= holds
            print(f"bar {bar.name} ratio {ratio:.2f} needs {bar.needs:g} {'ok' if holds else 'short'}")
        return all_hold

    def save(self, path: Path) -> None:
        path.write_text(json.dumps({"at": time.time(), "samples": self.samples}, indent=1))


def interleave(
    rounds: int, contestants: dict[str, Callable[[], float] | Callable[[], dict[str, float]]], table: Table
) -> None:
    """Each contestant once a round, in an order that rotates. One that takes several measures names them."""
    names = [*contestants]
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            found = contestants[name]()
            for measure, value in found.items() if isinstance(found, dict) else [(name, found)]:
                table.add(measure, value)
                print(f"  round {number + 1}/{rounds}  {measure:<44} {value:>12,.1f}", file=sys.stderr)


def peers_python() -> str:
    """The Python of the virtual environment with chasquimq in it."""
    from install_peers import chasquimq_python

    return str(chasquimq_python())
