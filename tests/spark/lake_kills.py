"""Evidence at scale: `lake_kills.py [--events 300000]` fills three hostile queues round by round, kills the pipeline at
a chosen moment of each round, opens the tables with all readers meanwhile, and compares them with an independent
computation in Polars. `make chaos-lake` runs it.

`lake_kills.py run URL LAKE MOMENT` is the pipeline that is killed: it sends SIGKILL to itself at that moment.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import redis

from spark.filling import Filled
from spark.lake_check import differences
from tampu.spark.lake import upkeep
from tampu.spark.lake.bronze import OffsetLog
from tampu.spark.lake.pipeline import Pipeline
from tampu.spark.lake.report import write_report
from tampu.spark.lake.rows import query, read_rows
from tampu.spark.lake.table import TABLES, Table
from tampu.wire.events import encode_event_fields
from tampu.wire.ulid import encode_ulid

QUEUES = ["plain", "odd: name/50%", "007"]
DAY_MS = 86_400_000
#: 2026-03-01 at 23:00, so that jobs run over midnight.
START_MS = 1_772_406_000_000
#: Where the pipeline of each round is killed.
MOMENTS = (
    *("offsets events", "stage bronze/events", "commit bronze/events", "commit bronze/dlq", "stage silver/jobs"),
    *("commit silver/jobs", "stage gold/ends", "commit gold/latency", "stage gold/dlq_clusters", "merge"),
    *("compact", "vacuum"),
)
#: Rounds that delete replaced files at once.
WITHOUT_READERS = ("vacuum", "never")
EXTREMES = (0, 2**31, 2**63 - 1, 2**63, 10**30, -1, "", "x", "0x10", b"\xff")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def run(url: str, lake: str, moment: str) -> None:
    """Run the pipeline and upkeep once; end at the moment."""
    from tampu.spark.session import SHORT_LIVED, spark_session

    stage, commit = Table.stage, Table.commit

    def staged(self: Table, *arguments: Any, **options: Any) -> Any:
        adds = stage(self, *arguments, **options)
        if moment == f"stage {self.name}":
            die()
        return adds

    def committed(self: Table, *arguments: Any, **options: Any) -> bool:
        done = commit(self, *arguments, **options)
        if moment == f"commit {self.name}":
            die()
        return done

    write, merge = OffsetLog.write, upkeep.merge_small_files

    def written(self: OffsetLog, *arguments: Any) -> None:
        write(self, *arguments)
        if moment == f"offsets {self._folder.name}":
            die()

    def merged(*arguments: Any, **options: Any) -> Any:
        if moment == "merge":
            options["min_files"] = 2  # there may not be many yet
            _soon()
        return merge(*arguments, **options)

    Table.stage, Table.commit = staged, committed  # type: ignore[method-assign]
    OffsetLog.write = written  # type: ignore[method-assign, assignment]
    vars(upkeep)["merge_small_files"] = merged
    spark = spark_session("tampu-kills", master="local[2,4]", conf=SHORT_LIVED)
    Pipeline(spark, url, QUEUES, lake, max_per_batch=50_000).run()
    if moment == "compact":
        real = vars(upkeep)["published"]

        def published_soon(lake: Path) -> object:
            state = real(lake)
            _soon()
            return state

        vars(upkeep)["published"] = published_soon
    upkeep.compact(Path(lake))
    if moment == "vacuum":
        _soon()
    # Readers need a while: only where none run are files deleted at once.
    upkeep.vacuum(Path(lake), keep_hours=0 if moment in WITHOUT_READERS else 1)
    if moment in ("merge", "compact", "vacuum"):
        die()


def _soon() -> None:
    """Die a little later, in the middle of what comes next."""
    import threading

    threading.Timer(random.uniform(0.01, 0.1), die).start()


def fill(filled: Filled, queue: str, first: int, jobs: int, rng: random.Random) -> int:
    """Write the events of jobs: ids of every kind, retries, deaths, replays, late and extreme events."""
    key = filled.keys(queue).events
    pipe = filled.client.pipeline(transaction=False)
    count = 0
    letters: list[tuple[str, int]] = []

    def tell(event: str, job_id: Any, at: Any, created: Any, **extra: Any) -> None:
        nonlocal count
        fields = encode_event_fields(event, job_id, at, rng.choice(("work", "mail", "")), {})
        more = {} if created is None else {"created_at_ms": created}
        pipe.execute_command("XADD", key, "*", *fields, *(part for pair in (more | extra).items() for part in pair))
        count += 1

    for number in range(first, first + jobs):
        created = START_MS + rng.randrange(3 * DAY_MS)
        kind = number % 10
        job_id = encode_ulid(created, rng.randbytes(16)) if kind < 6 else f"order-{queue}-{number}"
        # Every tenth job was run by a worker that does not say when the job was created.
        known = None if kind == 9 and queue == "007" else created
        at = created + rng.randrange(5_000)
        for attempt in range(1, rng.choice((1, 1, 1, 2, 3)) + 1):
            tell("active", job_id, at, known, attempt=attempt, worker="w")
            if rng.random() < 0.2:
                tell("progress", job_id, at, None)
            at += rng.randrange(1, 90_000)
            if rng.random() < 0.3:
                tell("failed", job_id, at, known, attempt=attempt, reason=f"ValueError: {number}", duration_us=5)
        if rng.random() < 0.1:
            tell("dlq", job_id, at, known, attempt=3, reason="retries_exhausted")
            if rng.random() < 0.5:  # replayed a day later
                tell("completed", job_id, at + DAY_MS, known, attempt=1, duration_us=rng.randrange(10**6))
        elif rng.random() < 0.05:  # with the fields of a delayed job, and with those of a running one
            tell("cancelled", job_id, at, rng.choice((None, known)), reason="by request")
        elif rng.random() < 0.95:
            tell("completed", job_id, at, known, attempt=1, duration_us=rng.randrange(10**6), worker="w")
        if number % 500 == 0:
            extreme = rng.choice(EXTREMES)
            for field in ("ts", "attempt", "created_at_ms", "duration_us", "reason"):
                pipe.execute_command("XADD", key, "*", "e", "failed", "id", f"bad-{queue}-{number}", field, extreme)
                count += 1
        if number % 37 == 0:
            letters.append((job_id, created))
        if len(pipe.command_stack) > 2_000:
            pipe.execute()
    pipe.execute()
    for job_id, created in letters:
        for _ in range(rng.choice((1, 1, 2))):  # some died again
            error = rng.choice((f"bad {created}", "no customer", None))
            filled.letter(job_id, {"n": job_id}, queue, error=error, created_ms=created)
    return count


def read_with_all(lake: Path, number: int) -> None:
    """Open the lake with one reader after the other; raises if one cannot."""
    import duckdb
    import polars as pl
    from deltalake import DeltaTable

    path = str(lake / "silver/jobs")
    if number % 5 == 0:
        pl.scan_delta(path).group_by("outcome").len().collect()
    elif number % 5 == 1:
        DeltaTable(path).to_pandas(columns=["job_id", "outcome"])
    elif number % 5 == 2:
        jobs = DeltaTable(path).to_pyarrow_dataset()
        duckdb.query("SELECT outcome, count(*) FROM jobs GROUP BY outcome").fetchall()  # type: ignore[union-attr]
        del jobs
    elif (lake / "lake_versions/_delta_log").is_dir():
        if number % 5 == 3:
            query(lake, "SELECT j.outcome, count(*) FROM silver_jobs j JOIN gold_ends e USING (job_id) GROUP BY 1")
        else:
            write_report(lake, lake.parent / "report.html")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=300_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--moments", nargs="*", choices=MOMENTS, default=MOMENTS, help="where to kill; default: all")
    arguments = parser.parse_args()
    from tampu.embedded.server import EmbeddedServer

    rng = random.Random(arguments.seed)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, EmbeddedServer(folder) as server:
        filled = Filled(SimpleNamespace(url=server.url, client=lambda: redis.Redis.from_url(server.url, protocol=2)))
        lake, events, readable = Path(folder) / "lake", 0, 0
        moments = tuple(arguments.moments)
        jobs_per_round = max(arguments.events * 10 // (len(moments) * len(QUEUES) * 34), 1)
        kills = 0
        for round_number, moment in enumerate((*moments, "never")):
            for queue in QUEUES if moment != "never" else ():
                events += fill(filled, queue, round_number * jobs_per_round, jobs_per_round, rng)
            command = [sys.executable, __file__, "run", server.url, str(lake), moment]
            program = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            while program.poll() is None:  # readers open what is there at any moment
                if (lake / "gold/dlq_clusters/_delta_log").is_dir() and moment not in WITHOUT_READERS:
                    read_with_all(lake, readable)
                    readable += 1
                time.sleep(0.2)
            kills += program.returncode == -signal.SIGKILL
            print(f"round {round_number}: {moment}: exit code {program.returncode}, {events:,} events", flush=True)
        found = differences(filled.client, QUEUES, lake)
        orphans = 0
        for name in TABLES:
            on_disk = {str(path.relative_to(lake / name)) for path in (lake / name).rglob("queue=*/**/*.parquet")}
            on_disk |= {str(path.relative_to(lake / name)) for path in (lake / name).glob("queue=*/*.parquet")}
            orphans += len(on_disk - {file.path for file in Table(lake, name).files()})
        jobs = len(read_rows(lake, "silver/jobs"))
        print(
            f"{events:,} events, {jobs:,} jobs, {kills} kills, {readable} reads meanwhile: "
            f"differences {found or 'none'}, orphans {orphans}, {time.monotonic() - started:.0f} s"
        )
        sys.exit(1 if found or orphans or kills != len(moments) else 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        run(*sys.argv[2:])
    else:
        main()
