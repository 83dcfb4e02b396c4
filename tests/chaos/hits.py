"""Hits: counts the jobs in flight at the target of each fault. A fault that hits no job proves nothing."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from chaos.records import History

#: What a handler does, and the kind of fault that it counts as.
HANDLER_FAULTS = {
    "die": "handler-exit",
    "die-once": "handler-exit",
    "hang": "handler-hang",
    "raise": "handler-raise",
    "block": "handler-block",
    "process-exit": "process-exit",
    "process-hang": "process-hang",
}


@dataclass
class Hits:
    """One kind of fault: how often it was injected, how often it hit a job, and how many jobs in total."""

    injected: int = 0
    hit: int = 0
    jobs: int = 0


class _Flights:
    """The jobs in flight of one process, or of all."""

    def __init__(self) -> None:
        self.begins: list[float] = []
        self.ends: list[float] = []

    def during(self, begin: float, end: float) -> int:
        return bisect_right(self.begins, end) - bisect_left(self.ends, begin)


def count_hits(history: History) -> dict[str, Hits]:
    """Return the hits of each kind of fault. A job is in flight while its handler runs or its add is unanswered."""
    flights: dict[str, _Flights] = defaultdict(_Flights)
    for run in history.all_runs():
        end = min(run.end, history.deaths.get(run.process, run.end))
        for flight in (flights[run.process], flights["*"]):
            flight.begins.append(run.start)
            flight.ends.append(end)
    for asked in history.asked.values():
        end = min(asked.answered_at, history.deaths.get(asked.process, asked.answered_at))
        for flight in (flights[asked.process], flights["*"]):
            flight.begins.append(asked.at)
            flight.ends.append(end)
    for flight in flights.values():
        flight.begins.sort()
        flight.ends.sort()
    hits: dict[str, Hits] = defaultdict(Hits)
    for fault in history.faults:
        jobs = flights[fault.target].during(fault.begin, fault.end)
        kind = hits[fault.kind]
        kind.injected += 1
        kind.hit += jobs > 0
        kind.jobs += jobs
    for token, runs in history.runs.items():
        request = history.asked.get(token)
        kind_of_handler = HANDLER_FAULTS.get(request.do.partition(":")[0]) if request else None
        if kind_of_handler:
            kind = hits[kind_of_handler]
            kind.injected += 1
            kind.hit += 1
            kind.jobs += len(runs)
    return dict(hits)
