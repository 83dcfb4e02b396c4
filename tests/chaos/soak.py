"""`make soak`: a fleet under steady load, without faults; nothing may grow.

Two kinds of measurements:

- *Under load*, every few seconds: resident memory, file descriptors and threads of each worker and producer. After a
  warm-up of a quarter of the time, the middle of the run is compared with its end.
- *At rest*: the load runs in four parts. After each, the producer pauses until all jobs are done and their results and
  ID markers have expired. What the server still holds then does not depend on the rate of jobs or on how busy the
  machine is: the keys after the second part and after the last must be the same, and so must their sizes. (The first
  part warms up the server, which allocates statistics for each command.) Two things grow as documented: dead letters,
  and the marks of cancelled jobs, which are kept for a day. The marks are counted, compared with the cancels on record,
  and deleted.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chaos.checker import check
from chaos.fleet import Fleet
from chaos.records import Recorder, read_history
from chaos.run import KEYS, QUEUE, collect, drain
from chaos.servers import fast_folder, persistent_server
from servers.require import require_server
from tampu import Queue
from tampu.base.checks import CANCEL_TTL_SECS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from redis import Redis

    from chaos.fleet import Member
    from chaos.servers import ClockedServer

#: Growth that is allowed, as a share and as a number: allocators and reconnects are not leaks.
TOLERANCE = {
    "memory in kB": (0.05, 3000.0),
    "descriptors": (0.0, 3.0),
    "threads": (0.0, 2.0),
    "keys at rest": (0.0, 5.0),  # locks come and go; keys that no earlier part has left are listed by name
    "kB at rest": (0.05, 100.0),
    "bytes at rest": (0.05, 8192.0),  # two nodes of a stream
    "bytes per entry": (0.05, 20.0),
}
LOOK_SECS = 3.0
#: Results and ID markers are kept this long, so that a rest is short, in seconds.
KEPT_SECS = 20
#: Parts of the run, with a rest after each.
PARTS = 4
#: Share of the requested rate that must be reached: a fleet that is held up proves less than the report says.
LEAST_RATE = 0.95
#: Keys that have no TTL.
LASTING = ("stream", "dlq", "events")


@dataclass(frozen=True)
class Growth:
    """The change of one number between two times of a run."""

    what: str
    middle: float
    end: float

    @property
    def is_too_much(self) -> bool:
        share, number = TOLERANCE[self.what.rpartition(": ")[2]]
        return self.end > self.middle + max(self.middle * share, number)

    def __str__(self) -> str:
        return f"{self.what:60} {self.middle:12,.0f} {self.end:12,.0f}{'   GROWS' if self.is_too_much else ''}"


@dataclass(frozen=True)
class Rest:
    """What the server holds when nothing is left to do."""

    #: The memory of each key, in bytes.
    sizes: dict[str, int]
    letters: int
    #: The server's memory in bytes, without the buffers of clients and of the append-only file.
    used_memory: int
    #: Marks of cancelled jobs, and those without the TTL that they should have.
    marks: int
    lasting_marks: int

    @property
    def other_memory(self) -> int:
        """Return the server's memory without that of its keys, in bytes."""
        return self.used_memory - sum(self.sizes.values())


@dataclass
class Soaked:
    """The result of a run."""

    growths: list[Growth] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    jobs: int = 0
    #: Time under load, in seconds.
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        return self.jobs / self.seconds

    @property
    def has_failed(self) -> bool:
        return bool(self.wrong) or any(growth.is_too_much for growth in self.growths)


def look(member: Member) -> dict[str, float]:
    """Return the numbers of one process."""
    status = Path(f"/proc/{member.process.pid}/status").read_text()
    lines = dict(line.split(":", 1) for line in status.splitlines())
    return {
        "memory in kB": float(lines["VmRSS"].split()[0]),
        "threads": float(lines["Threads"]),
        "descriptors": float(len(os.listdir(f"/proc/{member.process.pid}/fd"))),
    }


async def soak(minutes: float, rate: float, folder: Path) -> Soaked:
    """Run, and compare."""
    records_folder = folder / "records"
    records_folder.mkdir(parents=True)
    records = Recorder(records_folder, "injector")
    fleet = Fleet(folder, records)
    samples: dict[str, list[float]] = defaultdict(list)
    rests: list[Rest] = []
    soaked = Soaked()
    async with contextlib.AsyncExitStack() as stack:
        server = persistent_server(Path(require_server("redis86")), folder / "server")
        stack.callback(server.stop)
        await asyncio.to_thread(server.start)
        stack.callback(fleet.kill_all)
        queue = await stack.enter_async_context(Queue(QUEUE, url=server.url))
        start(fleet, server, minutes * 60, rate)
        for _ in range(PARTS):
            await load(fleet, minutes * 60 / PARTS, samples)
            rests.append(await rest(fleet, queue, server.client()))
        await fleet.stop_producers(30)
        await fleet.stop_workers(40)
        await collect(queue, records)
        lasting = [key for key in rests[-1].sizes if server.client().ttl(key) == -1]
    history = read_history(records_folder, 30.0)
    # Results are not kept long enough to be found.
    violations = [violation for violation in check(history) if violation.rule != "result"]
    soaked.jobs, soaked.seconds = len(history.runs), minutes * 60
    soaked.growths = [growth(what, values) for what, values in sorted(samples.items())]
    soaked.growths += compared(rests[1], rests[-1])
    soaked.wrong += [*fleet.unexpected, *map(str, violations)]
    soaked.wrong += [f"a key without a TTL: {key}" for key in lasting if key.rpartition(":")[2] not in LASTING]
    soaked.wrong += left_over(rests, len(history.cancels))
    if soaked.rate < LEAST_RATE * rate:
        soaked.wrong.append(f"{soaked.rate:.0f} jobs a second instead of {rate:g}: the machine is too busy")
    return soaked


def start(fleet: Fleet, server: ClockedServer, seconds: float, rate: float) -> None:
    plan: dict[str, Any] = {"url": server.url, "queue": QUEUE, "seed": 1, "lease_ms": 30_000, "kept_secs": KEPT_SECS}
    for _ in range(2):
        fleet.start("chaos.worker", plan | {"role": "w", "concurrency": 50})
    fleet.start(
        "chaos.producer",
        plan
        | {
            "role": "p",
            "jobs": 1e9 * rate,  # until it is stopped
            "seconds": 1e9,
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


async def load(fleet: Fleet, seconds: float, samples: dict[str, list[float]]) -> None:
    """Let the producer add jobs for a while, and look at all processes meanwhile."""
    for producer in fleet.producers:
        producer.say("resume")
    ends_at = time.monotonic() + seconds
    while time.monotonic() < ends_at:
        await asyncio.sleep(min(LOOK_SECS, max(ends_at - time.monotonic(), 0)))
        for member in fleet.members:
            if member.is_alive:
                for what, value in look(member).items():
                    samples[f"{member.name}: {what}"].append(value)


async def rest(fleet: Fleet, queue: Queue, client: Redis) -> Rest:
    """Pause the producer until all jobs are done and their results have expired, then look at the server."""
    for producer in fleet.producers:
        producer.say("pause")
    await asyncio.sleep(LOOK_SECS)  # its last adds arrive
    await drain(queue, 120)
    await asyncio.sleep(KEPT_SECS + LOOK_SECS)
    marks = list(client.scan_iter(KEYS.cancel_mark("*"), count=1000))
    lasting_marks = sum(not 0 < client.ttl(mark) <= CANCEL_TTL_SECS for mark in marks)
    client.delete(KEYS.cancel_marks, *marks)
    await asyncio.sleep(LOOK_SECS)  # the server resizes its tables
    keys = [key.decode() for key in client.scan_iter(count=1000)]
    sizes = {key: client.execute_command("MEMORY", "USAGE", key, "SAMPLES", 0) for key in keys}
    memory = client.info("memory")
    return Rest(
        {key: size for key, size in sizes.items() if size is not None},
        client.xlen(KEYS.dlq),
        memory["used_memory"] - memory["mem_clients_normal"] - memory["mem_aof_buffer"],
        len(marks),
        lasting_marks,
    )


def growth(what: str, values: list[float]) -> Growth:
    """Compare the second quarter of the samples with the last."""
    quarter = max(len(values) // 4, 1)
    return Growth(what, statistics.median(values[quarter : 2 * quarter]), statistics.median(values[-quarter:]))


def compared(first: Rest, last: Rest) -> Iterator[Growth]:
    """Compare keys and memory after two parts of the load. Keys whose size is the same are not listed."""
    yield Growth("server: keys at rest", len(first.sizes), len(last.sizes))
    yield Growth("server without its keys: kB at rest", first.other_memory / 1024, last.other_memory / 1024)
    for key in sorted(first.sizes.keys() & last.sizes.keys()):
        if key == KEYS.dlq:
            per_letter = [one.sizes[key] / max(one.letters, 1) for one in (first, last)]
            yield Growth(f"{key}: bytes per entry", *per_letter)
        elif first.sizes[key] != last.sizes[key]:
            yield Growth(f"{key}: bytes at rest", first.sizes[key], last.sizes[key])


def left_over(rests: list[Rest], cancels: int) -> Iterator[str]:
    """Yield what the load has left on the server: keys that earlier parts have not left, and marks without a cancel."""
    known: set[str] = set().union(*(rest.sizes for rest in rests[:-1]))
    yield from (f"a key that is left over: {key}" for key in sorted(rests[-1].sizes.keys() - known))
    marks = sum(rest.marks for rest in rests)
    if marks > cancels:
        yield f"{marks} marks of cancelled jobs, after {cancels} cancels"
    if lasting := sum(rest.lasting_marks for rest in rests):
        yield f"{lasting} marks of cancelled jobs without a TTL of at most a day"


def main() -> int:
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="time under load; the rests are extra")
    parser.add_argument("--rate", type=float, default=800.0, help="jobs a second")
    options = parser.parse_args()
    parent = fast_folder(Path(tempfile.gettempdir()))
    parent.mkdir(parents=True, exist_ok=True)
    print(f"soak: {options.minutes:g} minutes, {options.rate:g} jobs a second", flush=True)
    try:
        soaked = asyncio.run(soak(options.minutes, options.rate, Path(tempfile.mkdtemp(dir=parent))))
    finally:
        shutil.rmtree(parent, ignore_errors=True)
    print(f"{'':60} {'before':>12} {'after':>12}")
    for one in soaked.growths:
        print(one)
    for line in soaked.wrong[:20]:
        print(f"WRONG {line}")
    if len(soaked.wrong) > 20:
        print(f"... and {len(soaked.wrong) - 20} more")
    result = "FAILED" if soaked.has_failed else "nothing grows"
    print(f"soak: {soaked.jobs:,} jobs, {soaked.rate:.0f} a second; {result}", flush=True)
    return int(soaked.has_failed)


if __name__ == "__main__":
    sys.exit(main())
