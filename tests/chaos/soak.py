"""`make soak`: a fleet under steady load, without faults; nothing may grow.

Workers and producers are looked at every few seconds: resident memory, file descriptors and threads; so is the server:
keys and memory. After a warm-up of a quarter of the time, the middle of the run is compared with its end.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chaos.checker import check
from chaos.fleet import Fleet
from chaos.records import Recorder, read_history
from chaos.run import KEYS, QUEUE, collect, drain
from chaos.servers import fast_folder, persistent_server
from servers.require import require_server
from tampu import Queue

if TYPE_CHECKING:
    from chaos.fleet import Member

#: What may be different at the end, as a share and as a number: allocators and reconnects are not leaks.
TOLERANCE = {
    "memory in kB": (0.05, 3000.0),
    "descriptors": (0.0, 3.0),
    "threads": (0.0, 2.0),
    "keys": (0.1, 30.0),
    "server memory in kB": (0.1, 3000.0),
}
LOOK_SECS = 3.0
#: Results and the markers of ids are kept this long, so that their number settles early, in seconds.
KEPT_SECS = 20


@dataclass(frozen=True)
class Growth:
    """What one number did between the middle of the run and its end."""

    what: str
    middle: float
    end: float

    @property
    def is_too_much(self) -> bool:
        share, number = TOLERANCE[self.what.partition(": ")[2]]
        return self.end > self.middle + max(self.middle * share, number)

    def __str__(self) -> str:
        return f"{self.what:40} {self.middle:12,.0f} {self.end:12,.0f}{'   GROWS' if self.is_too_much else ''}"


def look(member: Member) -> dict[str, float]:
    """Return the numbers of one process."""
    status = Path(f"/proc/{member.process.pid}/status").read_text()
    lines = dict(line.split(":", 1) for line in status.splitlines())
    return {
        "memory in kB": float(lines["VmRSS"].split()[0]),
        "threads": float(lines["Threads"]),
        "descriptors": float(len(os.listdir(f"/proc/{member.process.pid}/fd"))),
    }


async def soak(minutes: float, rate: float, folder: Path) -> tuple[list[Growth], list[str], int]:
    """Run; return the growth of every number, what else went wrong, and the number of jobs."""
    records_folder = folder / "records"
    records_folder.mkdir(parents=True)
    records = Recorder(records_folder, "injector")
    fleet = Fleet(folder, records)
    samples: dict[str, list[float]] = defaultdict(list)
    seconds = minutes * 60
    async with contextlib.AsyncExitStack() as stack:
        server = persistent_server(Path(require_server("redis86")), folder / "server")
        stack.callback(server.stop)
        await asyncio.to_thread(server.start)
        stack.callback(fleet.kill_all)
        queue = await stack.enter_async_context(Queue(QUEUE, url=server.url))
        start(fleet, server.url, seconds, rate)
        watcher = server.client()
        ends_at = time.monotonic() + seconds
        while time.monotonic() < ends_at and any(member.is_alive for member in fleet.producers):
            await asyncio.sleep(LOOK_SECS)
            for member in fleet.members:
                if member.is_alive:
                    for what, value in look(member).items():
                        samples[f"{member.name}: {what}"].append(value)
            samples["server: keys"].append(float(watcher.dbsize()))
            samples["server: server memory in kB"].append(watcher.info("memory")["used_memory"] / 1024)
        await fleet.stop_producers(30)
        await drain(queue, 60)
        await fleet.stop_workers(40)
        await collect(queue, records)
        left = [key.decode() for key in watcher.scan_iter(f"{KEYS.tag}:*") if watcher.ttl(key) == -1]
    history = read_history(records_folder, 30.0)
    # Results are not kept long enough to be found.
    violations = [violation for violation in check(history) if violation.rule != "result"]
    wrong = [*fleet.unexpected, *map(str, violations)]
    wrong += [f"a key without an end: {key}" for key in left if key.rpartition(":")[2] not in LASTING]
    return [growth(what, values) for what, values in sorted(samples.items())], wrong, len(history.runs)


#: Keys that stay for ever.
LASTING = ("stream", "dlq", "events")


def start(fleet: Fleet, url: str, seconds: float, rate: float) -> None:
    plan: dict[str, Any] = {"url": url, "queue": QUEUE, "seed": 1, "lease_ms": 30_000, "kept_secs": KEPT_SECS}
    for _ in range(2):
        fleet.start("chaos.worker", plan | {"role": "w", "concurrency": 50})
    fleet.start(
        "chaos.producer",
        plan
        | {
            "role": "p",
            "jobs": seconds * rate,
            "seconds": seconds,
            "began": time.monotonic(),
            "rare": [],
            "rare_secs": 60,
            "long_secs": 0.1,
            "poison": False,
            "max_stream_len": 20_000,
            "overflow": "wait",
            "min_replicas": False,
        },
    )


def growth(what: str, values: list[float]) -> Growth:
    """Compare the second quarter of the samples with the last."""
    quarter = max(len(values) // 4, 1)
    return Growth(what, statistics.median(values[quarter : 2 * quarter]), statistics.median(values[-quarter:]))


def main() -> int:
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--rate", type=float, default=800.0, help="jobs a second")
    options = parser.parse_args()
    parent = fast_folder(Path(tempfile.gettempdir()))
    parent.mkdir(parents=True, exist_ok=True)
    print(f"soak: {options.minutes:g} minutes, {options.rate:g} jobs a second", flush=True)
    try:
        growths, wrong, jobs = asyncio.run(soak(options.minutes, options.rate, Path(tempfile.mkdtemp(dir=parent))))
    finally:
        shutil.rmtree(parent, ignore_errors=True)
    print(f"{'':40} {'middle':>12} {'end':>12}")
    for one in growths:
        print(one)
    for line in wrong[:20]:
        print(f"WRONG {line}")
    failed = bool(wrong) or any(one.is_too_much for one in growths)
    print(f"soak: {jobs:,} jobs; {'FAILED' if failed else 'nothing grows'}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
