"""One run: every sample, the machine, the versions and the settings, stored as one JSON file."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


@dataclass
class Record:
    """The result of a run; `Record.load(path)` reads one back."""

    mode: str
    server: str
    machine: dict[str, Any] = field(default_factory=dict)
    at: str = ""
    seconds: float = 0.0
    rounds: int = 0
    #: Versions and settings of each contestant, or the reason why it is missing.
    contestants: dict[str, dict[str, Any]] = field(default_factory=dict)
    #: Each with scenario, contestant, round, arguments, and figures or an error.
    samples: list[dict[str, Any]] = field(default_factory=list)
    #: Each with name, ratio, needs, is_at_most, holds.
    bars: list[dict[str, Any]] = field(default_factory=list)

    def add(
        self,
        scenario: str,
        contestant: str,
        number: int,
        arguments: dict[str, Any],
        found: dict[str, Any],
        took: float = 0.0,
    ) -> None:
        sample: dict[str, Any] = {"scenario": scenario, "contestant": contestant, "round": number}
        sample |= {"arguments": arguments, "took_secs": round(took, 3)}
        self.samples.append({**sample, **({"error": found["error"]} if "error" in found else {"figures": found})})

    def values(self, scenario: str, contestant: str, figure: str = "rate") -> list[float]:
        """Return all samples of one figure."""
        return [
            sample["figures"][figure]
            for sample in self.samples
            if sample["scenario"] == scenario
            and sample["contestant"] == contestant
            and figure in sample.get("figures", {})
        ]

    def median(self, scenario: str, contestant: str, figure: str = "rate") -> float | None:
        values = self.values(scenario, contestant, figure)
        return statistics.median(values) if values else None

    def error(self, scenario: str, contestant: str) -> str | None:
        """Return why there is no figure, or None."""
        for sample in self.samples:
            if sample["scenario"] == scenario and sample["contestant"] == contestant and "error" in sample:
                return str(sample["error"])
        return None

    def scenarios(self) -> list[str]:
        """Return the scenarios in the order of the run."""
        return [*dict.fromkeys(sample["scenario"] for sample in self.samples)]

    def contestants_of(self, scenario: str) -> list[str]:
        return [*dict.fromkeys(sample["contestant"] for sample in self.samples if sample["scenario"] == scenario)]

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.__dict__, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Record:
        return cls(**json.loads(path.read_text()))


def new_record(mode: str, server: str) -> Record:
    return Record(mode, server, machine(), datetime.now(UTC).isoformat(timespec="seconds"))


def machine() -> dict[str, Any]:
    """Return what the figures depend on, without anything that identifies the machine."""
    cpu = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
        memory_gb = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9)
    except (OSError, StopIteration, ValueError):
        memory_gb = 0
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_gb": memory_gb,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "load_before": os.getloadavg()[0],
        "clock": time.get_clock_info("perf_counter").implementation,
    }
