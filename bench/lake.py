"""What a round of the pipeline costs as the lake grows: seconds, CPU and files.

    .venv/bin/python -m bench.lake [--rounds 500] [--events 200] [--ids ulid|other] [--history 0]

Each round adds events of new jobs and runs the pipeline; upkeep runs every 50 rounds, as in `run --every`. `--history`
adds that many jobs of earlier days first. Prints the medians of the first and the last rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import redis

from bench.server import fresh_server
from tampu.spark.lake.pipeline import Pipeline
from tampu.spark.lake.upkeep import ROUNDS_BETWEEN, run_upkeep
from tampu.spark.session import spark_session
from tampu.wire.events import encode_event_fields
from tampu.wire.keys import QueueKeys
from tampu.wire.ulid import encode_ulid

DAY_MS = 86_400_000


class Feed:
    """Adds the events of jobs that wait, run and complete."""

    def __init__(self, client: redis.Redis, ids: str) -> None:
        self._client = client
        self._ids = ids
        self._number = 0

    def add(self, jobs: int, at_ms: int) -> None:
        pipe = self._client.pipeline(transaction=False)
        for _ in range(jobs):
            self._number += 1
            made = encode_ulid(at_ms, os.urandom(16)) if self._ids == "ulid" else f"order-{self._number}"
            for event, after in (("active", 5), ("completed", 20)):
                extra = {"attempt": 1, "created_at_ms": at_ms, "duration_us": 15_000, "worker": "w"}
                fields = encode_event_fields(event, made, at_ms + after, "work", extra)
                pipe.execute_command("XADD", QueueKeys("q").events, "*", *fields)
            if len(pipe.command_stack) >= 5_000:
                pipe.execute()
        pipe.execute()


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--events", type=int, default=200)
    parser.add_argument("--ids", choices=("ulid", "other"), default="ulid")
    parser.add_argument("--history", type=int, default=0)
    arguments = parser.parse_args()
    with fresh_server() as server, tempfile.TemporaryDirectory() as folder:
        feed = Feed(redis.Redis.from_url(server.url, protocol=2), arguments.ids)
        lake = Path(folder) / "lake"
        spark = spark_session("tampu-bench-lake", master="local[2,4]", conf={"spark.driver.memory": "1g"})
        pipeline = Pipeline(spark, server.url, ["q"], lake)
        now_ms = int(time.time() * 1000)
        for day in range(30 if arguments.history else 0):
            feed.add(arguments.history // 30, now_ms - (day + 2) * DAY_MS)
        seconds: list[float] = []
        cpu: list[float] = []
        files: list[int] = []
        pipeline.run()
        for number in range(arguments.rounds):
            feed.add(arguments.events // 2, now_ms + number * 10_000)
            used, started = cpu_secs(), time.perf_counter()
            pipeline.run()
            seconds.append(time.perf_counter() - started)
            cpu.append(cpu_secs() - used)
            if number % ROUNDS_BETWEEN == ROUNDS_BETWEEN - 1:
                run_upkeep(lake, keep_hours=0)
            files.append(files_of(lake))
        pipeline.close()
        spark.stop()
    window = min(10, len(seconds) // 2)
    early = slice(5, 5 + window)  # the first rounds also warm Java up
    late = slice(-window, None)
    for name, values in (("seconds", seconds), ("CPU seconds", cpu), ("files", files)):
        first, last = statistics.median(values[early]), statistics.median(values[late])
        print(f"{arguments.ids}: {name}: {first:.2f} -> {last:.2f} ({last / first:.2f} x)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
