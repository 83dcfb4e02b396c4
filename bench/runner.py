"""Interleaved rounds: each scenario once per round, its contestants one after the other in rotating order.

The speed of a machine drifts; this way a slow second affects all contestants alike. Compare figures only within a run.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bench.contestants import PeerFailed

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.record import Record


@dataclass(frozen=True)
class Measure:
    """One contestant in one scenario."""

    scenario: str
    contestant: str
    #: Returns the figures. A measure that interleaves several contestants has no name and returns figures for each.
    run: Callable[[], dict[str, float]] | Callable[[], dict[str, dict[str, float]]]
    arguments: dict[str, Any] = field(default_factory=dict)
    #: Number of rounds in which it takes part; slow contestants take part in fewer.
    rounds: int = 99


def interleave(
    measures: list[Measure], rounds: int, record: Record, reset: Callable[[], object], deadline: float = float("inf")
) -> None:
    """Run all measures; `reset` empties the server before each. After the deadline and three rounds, start no more."""
    by_scenario: dict[str, list[Measure]] = {}
    for measure in measures:
        by_scenario.setdefault(measure.scenario, []).append(measure)
    failed: set[tuple[str, str]] = set()
    for number in range(rounds):
        if number >= 3 and time.monotonic() > deadline:
            print(f"  stopped after {number} rounds: time limit reached", file=sys.stderr)
            return
        record.rounds = number + 1
        for scenario, contestants in by_scenario.items():
            turn = number % len(contestants)
            for measure in contestants[turn:] + contestants[:turn]:
                if number >= measure.rounds or (scenario, measure.contestant) in failed:
                    continue
                reset()
                found: dict[str, Any]
                began = time.monotonic()
                try:
                    found = measure.run()
                except PeerFailed as error:
                    failed.add((scenario, measure.contestant))  # do not try again
                    found = {"error": str(error)}
                each = {measure.contestant: found} if measure.contestant or "error" in found else found
                for contestant, figures in each.items():
                    record.add(scenario, contestant, number, measure.arguments, figures, time.monotonic() - began)
                    _tell(f"round {number + 1}/{rounds}", scenario, contestant, figures)
    reset()


def _tell(where: str, scenario: str, contestant: str, found: dict[str, Any]) -> None:
    if "error" in found:
        said = f"failed: {found['error']}"
    else:
        said = "  ".join(f"{name} {value:,.1f}" for name, value in found.items())
    print(f"  {where}  {scenario:<28} {contestant:<22} {said}", file=sys.stderr, flush=True)
