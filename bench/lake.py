"""What a round of the pipeline costs as the lake grows: seconds, CPU and files.

    .venv/bin/python -m bench.lake [--rounds 500] [--events 200] [--ids ulid other unknown] [--history 0]

Each round adds events of new jobs, of which one in ten ends in the next round, and runs the pipeline; upkeep is part of
the rounds, as in `run --every`, and keeps no replaced files. Each kind of ID has its own queue: IDs that are `other`
hold no day; of `unknown` ones the time of creation is not known either. `--history` adds that many jobs of the last 30
days first. Prints the medians of rounds 11 to 20 and of the last ten, and ends with exit code 1 if seconds, CPU seconds
or files are more than 1.5 x of what they were.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import redis

from bench.server import fresh_server
from tampu.spark.lake.pipeline import Pipeline
from tampu.spark.lake.table import TABLES, Table
from tampu.spark.session import SHORT_LIVED, spark_session
from tampu.wire.events import encode_event_fields
from tampu.wire.keys import QueueKeys
from tampu.wire.ulid import encode_ulid

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

DAY_MS = 86_400_000
#: Rounds that are compared: these many at the end with these many after the first ones, which also warm Java up.
WINDOW = 10
WARM_UP = 10
#: Fewest rounds with two windows that do not overlap.
MIN_ROUNDS = WARM_UP + 2 * WINDOW
#: How much more than early rounds the late ones may cost.
MAX_RATIO = 1.5
#: Figures with that limit. Files of tables are part of all files.
LIMITED = ("seconds", "CPU seconds", "files")


class Feed:
    """Adds the events of jobs that wait, run and complete."""

    def __init__(self, client: redis.Redis, ids: str) -> None:
        self._client = client
        self._ids = ids
        self._random = random.Random(1)
        #: Jobs that run, and when they were created.
        self._running: list[tuple[str, int]] = []

    def add(self, jobs: int, at_ms: int) -> None:
        pipe = self._client.pipeline(transaction=False)
        for job_id, created in self._running:
            self._write(pipe, "completed", job_id, at_ms, created)
        self._running = []
        for number in range(jobs):
            made = f"order-{self._random.getrandbits(60)}"
            if self._ids == "ulid":
                made = encode_ulid(at_ms, self._random.randbytes(16))
            self._write(pipe, "active", made, at_ms + 5, at_ms)
            if number % 10:
                self._write(pipe, "completed", made, at_ms + 20, at_ms)
            else:
                self._running.append((made, at_ms))
            if len(pipe.command_stack) >= 5_000:
                pipe.execute()
        pipe.execute()

    def _write(self, pipe: Any, event: str, job_id: str, at_ms: int, created: int) -> None:
        extra: dict[str, Any] = {"attempt": 1, "duration_us": 15_000, "worker": "w"}
        if self._ids != "unknown":
            extra["created_at_ms"] = created
        fields = encode_event_fields(event, job_id, at_ms, "work", extra)
        pipe.execute_command("XADD", QueueKeys(self._ids).events, "*", *fields)


def cpu_secs() -> float:
    """Return the CPU time of this process and its descendants, which are Java and Python workers."""
    parents: dict[int, int] = {}
    used: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(entry.name)] = int(fields[1])
            used[int(entry.name)] = sum(map(int, fields[11:15]))
    ours = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
        ours |= more
    return sum(used[pid] for pid in ours) / os.sysconf("SC_CLK_TCK")


def files_of(lake: Path) -> int:
    return sum(1 for path in lake.rglob("*") if path.is_file())


def folders_of(lake: Path) -> dict[str, int]:
    """Count the files of each table's data, its log and each checkpoint folder."""
    counts: Counter[str] = Counter()
    for path in lake.rglob("*"):
        if path.is_file():
            parts = [part for part in path.relative_to(lake).parts[:-1] if "=" not in part]
            counts["/".join(parts)] += 1
    return dict(sorted(counts.items()))


def live_files(lake: Path) -> int:
    return sum(len(Table(lake, name).files()) for name in TABLES)


def compare(figures: Mapping[str, Sequence[float]], label: str = "") -> int:
    """Print the medians of early and late rounds; return the exit code."""
    too_high = []
    for name, values in figures.items():
        first = statistics.median(values[WARM_UP : WARM_UP + WINDOW])
        last = statistics.median(values[-WINDOW:])
        print(f"{label}: {name}: {first:.2f} -> {last:.2f} ({last / first:.2f} x)")
        if name in LIMITED and last > MAX_RATIO * first:
            too_high.append(name)
    if too_high:
        print(f"{label}: more than {MAX_RATIO} x: {', '.join(too_high)}", file=sys.stderr)
    return 1 if too_high else 0


def whole_number(lowest: int) -> Callable[[str], int]:
    """Return a parser of whole numbers from `lowest` on."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < lowest:
            raise argparse.ArgumentTypeError(f"must be a whole number >= {lowest}; got {text!r}")
        return int(text)

    return parse


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=whole_number(MIN_ROUNDS), default=500)
    parser.add_argument("--events", type=whole_number(2), default=200)
    parser.add_argument("--ids", nargs="+", choices=("ulid", "other", "unknown"), default=["ulid"])
    parser.add_argument("--history", type=whole_number(0), default=0)
    parser.add_argument("--verbose", action="store_true", help="print each 10th round, and the steps of the last one")
    arguments = parser.parse_args()
    steps: list[tuple[float, str]] = []
    with fresh_server() as server, tempfile.TemporaryDirectory() as folder:
        client = redis.Redis.from_url(server.url, protocol=2)
        feeds = [Feed(client, ids) for ids in arguments.ids]
        lake = Path(folder) / "lake"
        log_file = Path(folder) / "spark.log"
        # Java compiles quickly and no further: otherwise early rounds would mostly measure its compiler.
        conf = {"spark.driver.memory": "1g", **SHORT_LIVED}
        # The compiler's default is too small for hours: Java would remove compiled code and compile it again.
        conf["spark.driver.extraJavaOptions"] += " -XX:ReservedCodeCacheSize=240m"
        spark = spark_session("tampu-bench-lake", master="local[2,4]", conf=conf, log_file=log_file)
        pipeline = Pipeline(
            spark, server.url, arguments.ids, lake, keep_hours=0,
            on_step=lambda step: steps.append((time.perf_counter(), step)),
        )  # fmt: skip
        now_ms = int(time.time() * 1000)
        for day in range(30 if arguments.history else 0):
            for feed in feeds:
                feed.add(arguments.history // 30, now_ms - day * DAY_MS)
        figures: dict[str, list[float]] = {"seconds": [], "CPU seconds": [], "files": [], "files of tables": []}
        pipeline.run()
        for number in range(arguments.rounds):
            for feed in feeds:
                feed.add(arguments.events // 2, now_ms + number * 1_000)
            steps.clear()
            used, started = cpu_secs(), time.perf_counter()
            pipeline.run()
            ended = time.perf_counter()
            figures["seconds"].append(ended - started)
            figures["CPU seconds"].append(cpu_secs() - used)
            figures["files"].append(files_of(lake))
            figures["files of tables"].append(live_files(lake))
            if arguments.verbose and number % 10 == 9:
                now = {name: round(statistics.median(values[-10:]), 2) for name, values in figures.items()}
                print(f"round {number + 1}: {now} {folders_of(lake)}", flush=True)
        if arguments.verbose:
            times = [at for at, _ in steps] + [ended]
            for place, (at, step) in enumerate(steps):
                print(f"  {times[place + 1] - at:.2f} s {step}")
        pipeline.close()
        spark.stop()
    return compare(figures, " ".join(arguments.ids))


if __name__ == "__main__":
    sys.exit(main())
