"""Evidence at scale: `lake_kills.py [--events 300000]` fills three hostile queues round by round, kills the pipeline at
a chosen moment of each round, opens every table with every reader meanwhile, and compares them with an independent
computation in Polars. `make chaos-lake` runs it. The first round is not killed, so that there is something to read.

`--lake s3` has the lake in SeaweedFS, behind a proxy that fails every twentieth request of the pipeline. There, every
third round has a second pipeline beside the first.

`lake_kills.py run URL LAKE MOMENT` is the pipeline that is killed: it sends SIGKILL to itself at that moment.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import redis

from servers.seaweed import SeaweedFS, failing, proxy
from spark.extremes import extreme_letters, job_id_of, tell_extremes, tell_highest_ids
from spark.filling import Filled
from spark.lake_check import cluster_of, differences
from spark.lake_readers import READERS, Readers
from tampu.spark.lake import upkeep
from tampu.spark.lake.contracts import Contracts
from tampu.spark.lake.pipeline import Pipeline
from tampu.spark.lake.repair import find_letters, record, repairs_of
from tampu.spark.lake.store import Store
from tampu.spark.lake.table import TABLES, Table

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Names that need escapes wherever they are part of a path.
QUEUES = ["média 日本", "odd: name/50%=%C3%A9", "007"]
DAY_MS = 86_400_000
#: 2026-03-01 at 23:00, so that jobs run over midnight.
START_MS = 1_772_406_000_000
#: Where the pipeline of each round is killed.
MOMENTS = (
    *("stage bronze/events", "commit bronze/events", "commit bronze/dlq", "stage silver/jobs"),
    *("commit silver/jobs", "stage gold/ends", "commit gold/latency", "stage gold/dlq_clusters", "merge"),
    *("compact", "vacuum"),
)
#: Rounds that delete replaced files at once.
KEEPING_NOTHING = ("vacuum", "never")
#: What payloads must look like; many do not.
RULES = {"work": {"n": {"type": "string", "max": 30}, "amount": {"type": "number", "min": 0, "max": 10}}}
#: Extremes are of many days, which all have their own partitions: in every round they would be most of the work.
ROUNDS_BETWEEN_EXTREMES = 4
#: Letters that are repaired after a round, per queue.
REPAIRED = 5
REPAIR_SQL = "SELECT * REPLACE (concat(n, '!') AS n) FROM letters"


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

    merge = upkeep.merge_small_files

    def merged(*arguments: Any, **options: Any) -> Any:
        if moment == "merge":
            options["min_files"] = 2  # there may not be many yet
            _soon()
        return merge(*arguments, **options)

    Table.stage, Table.commit = staged, committed  # type: ignore[method-assign]
    vars(upkeep)["merge_small_files"] = merged
    spark = spark_session("tampu-kills", master="local[2,4]", conf=SHORT_LIVED)
    store = Store.of(lake, json.loads(os.environ.get("LAKE_OPTIONS", "{}")))
    Pipeline(spark, url, QUEUES, store, max_per_batch=50_000, rules=Contracts.of(RULES)).run()
    if moment == "compact":
        real = vars(upkeep)["published"]

        def published_soon(lake: Store) -> object:
            state = real(lake)
            _soon()
            return state

        vars(upkeep)["published"] = published_soon
    upkeep.compact(store)
    if moment == "vacuum":
        _soon()
    upkeep.vacuum(store, keep_hours=0 if moment in KEEPING_NOTHING else 1)
    if moment in ("merge", "compact", "vacuum"):
        die()


def _soon() -> None:
    """Die a little later, in the middle of what comes next."""
    import threading

    threading.Timer(random.uniform(0.01, 0.1), die).start()


class Queues:
    """Writes the events, letters and jobs of all queues, and repairs letters."""

    def __init__(self, filled: Filled, lake: Store, seed: int) -> None:
        self._filled = filled
        self._lake = lake
        self._rng = random.Random(seed)
        self._pipe = filled.client.pipeline(transaction=False)
        self.events = 0
        #: Rows of `bronze/repairs`.
        self.repairs: list[dict[str, Any]] = []
        #: Queue and ID of jobs that were repaired since the last round.
        self._repaired: list[tuple[str, str]] = []

    def fill(self, queue: str, first: int, jobs: int) -> None:
        """Write the events of jobs: ids of every kind, retries, deaths, replays, late and extreme events."""
        rng = self._rng
        letters: list[tuple[str, int]] = []
        for number in range(first, first + jobs):
            created = START_MS + rng.randrange(3 * DAY_MS)
            kind = number % 20
            job_id = job_id_of(kind, number, created, queue, rng)
            # Every tenth job was run by a worker that does not say when the job was created.
            known = None if kind in (10, 15) and queue == "007" else created
            at = created + rng.randrange(5_000)
            for attempt in range(1, rng.choice((1, 1, 1, 2, 3)) + 1):
                self._tell(queue, "active", job_id, at, known, attempt=attempt, worker=f"w{number % 3}")
                if rng.random() < 0.2:
                    self._tell(queue, "progress", job_id, at, None, percent=50)
                at += rng.randrange(1, 90_000)
                if rng.random() < 0.3:
                    reason = f"ValueError: {number} in '{number}'"
                    self._tell(queue, "failed", job_id, at, known, attempt=attempt, reason=reason, duration_us=number)
                    if rng.random() < 0.3:
                        self._tell(queue, "retry-scheduled", job_id, at, known, attempt=attempt, backoff_ms=number)
            if rng.random() < 0.1:
                self._tell(queue, "dlq", job_id, at, known, attempt=3, reason="retries_exhausted")
                if rng.random() < 0.5:  # replayed a day later
                    run_us = rng.randrange(10**6)
                    self._tell(queue, "completed", job_id, at + DAY_MS, known, attempt=1, duration_us=run_us)
            elif rng.random() < 0.05:  # with the fields of a delayed job, and with those of a running one
                self._tell(queue, "cancelled", job_id, at, rng.choice((None, known)), reason="by request")
            elif rng.random() < 0.95:
                run_us = rng.randrange(10**6)
                self._tell(queue, "completed", job_id, at, known, attempt=1, duration_us=run_us, worker="w")
            if number % 100 == 0:
                self._tell(queue, "drained", b"", at, None)
                self._tell(queue, "completed", b"", at, known, attempt=1)  # of a job without an ID
            if number % 37 == 0 and kind != 19:  # an envelope holds only text
                letters.append((job_id.decode(), created))
            if len(self._pipe.command_stack) > 2_000:
                self._pipe.execute()
        self._pipe.execute()
        for job_id_text, created in letters:
            for _ in range(rng.choice((1, 1, 2))):  # some died again
                error = rng.choice((f"bad {created}", "no customer", None))
                amounts: dict[str, Any] = rng.choice(({}, {"amount": 5}, {"amount": "5 EUR"}, {"amount": -1}))
                self._filled.letter(job_id_text, {"n": job_id_text} | amounts, queue, error=error, created_ms=created)
        self._filled.jobs(3, queue, start=first)
        self._filled.delayed(3, queue)

    def fill_extremes(self, queue: str, label: str) -> None:
        """Write every extreme in every field of events and letters."""
        self.events += tell_extremes(self._filled, queue, label)
        extreme_letters(self._filled, queue, label)

    def fill_highest_ids(self, queue: str) -> None:
        """Write the entries that no other can follow."""
        self.events += tell_highest_ids(self._filled, queue)

    def end_repaired(self) -> None:
        """Write the ends of half of the repaired jobs."""
        for queue, job_id in self._repaired:
            if self._rng.random() < 0.5:
                event = self._rng.choice(("completed", "dlq"))
                self._tell(queue, event, job_id.encode(), START_MS + 5 * DAY_MS, None, attempt=1, duration_us=7)
        self._pipe.execute()
        self._repaired = []

    def repair(self, name: str) -> None:
        """Repair some letters of each queue, as `tampu dlq repair` does, but leave them on the server for the check."""
        cluster = cluster_of("retries_exhausted", "ValueError", "no customer")
        for queue in QUEUES:
            letters = find_letters(self._filled.url, queue, cluster)
            plan = repairs_of(self._rng.sample(letters, min(REPAIRED, len(letters))), REPAIR_SQL)
            seconds, micros = self._filled.client.time()
            at_ms = seconds * 1000 + micros // 1000
            record(self._lake, name, queue, cluster, REPAIR_SQL, plan.repairs, at_ms, canary=queue == "007")
            for one in plan.repairs:
                payload = one.letter.payload
                self._repaired.append((queue, one.letter.job.id))
                self.repairs.append(
                    {
                        "repair": name,
                        "queue": queue,
                        "cluster": cluster,
                        "sql": REPAIR_SQL,
                        "entry_id": one.letter.entry_id,
                        "job_id": payload["n"],
                        "name": "work",
                        "is_canary": queue == "007",
                        "before": json.dumps(payload),
                        "after": json.dumps(payload | {"n": payload["n"] + "!"}),
                        "repaired_ms": at_ms,
                        "repaired_at": datetime.fromtimestamp(at_ms / 1000, UTC),
                    }
                )

    def _tell(self, queue: str, event: str, job_id: bytes, at: int, created: int | None, **extra: Any) -> None:
        name = self._rng.choice(("work", "mail", ""))
        fields: dict[str, Any] = {"e": event, "id": job_id, "ts": at}
        fields |= ({"n": name} if name else {}) | ({} if created is None else {"created_at_ms": created}) | extra
        parts = (part for pair in fields.items() for part in pair)
        self._pipe.execute_command("XADD", self._filled.keys(queue).events, "*", *parts)
        self.events += 1


def orphans_of(lake: Store) -> list[str]:
    """Return the files of tables that are neither log nor part of the latest version."""
    found: list[str] = []
    for name in TABLES:  # not of lake_versions: a vacuum ends with a new version of it
        live = {file.path for file in Table(lake, name).files()}
        paths = [file["path"] for file in (lake / name).list()]
        found += [f"{name}/{path}" for path in paths if not path.startswith("_delta_log") and path not in live]
    return found


@contextmanager
def lake_in(place: str, folder: Path) -> Iterator[tuple[Store, dict[str, str]]]:
    """Yield an empty lake, and the storage options of the pipelines that are killed."""
    if place == "folder":
        yield Store.of(folder / "lake"), {}
        return
    (folder / "weed").mkdir()
    seaweed = SeaweedFS(folder / "weed")
    try:
        with proxy(seaweed, failing(0.05)) as url:
            yield Store.of("s3://lake/l", seaweed.options()), seaweed.options(url=url)
    finally:
        seaweed.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=300_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--moments", nargs="*", choices=MOMENTS, default=MOMENTS, help="where to kill; default: all")
    parser.add_argument("--lake", choices=("folder", "s3"), default="folder")
    parser.add_argument("--keep", type=Path, help="copy the lake to this folder, which must not exist")
    arguments = parser.parse_args()
    from tampu.embedded.server import EmbeddedServer

    started = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as folder,
        EmbeddedServer(folder) as server,
        lake_in(arguments.lake, Path(folder)) as (lake, options),
    ):
        filled = Filled(SimpleNamespace(url=server.url, client=lambda: redis.Redis.from_url(server.url, protocol=2)))
        queues, readers = Queues(filled, lake, arguments.seed), Readers(lake, Path(folder))
        moments = ("never", *arguments.moments, "never")
        jobs_per_round = max(arguments.events * 10 // ((len(moments) - 1) * len(QUEUES) * 36), 1)
        kills = 0
        for round_number, moment in enumerate(moments):
            is_last = round_number == len(moments) - 1
            if not is_last:
                for queue in QUEUES:
                    queues.fill(queue, round_number * jobs_per_round, jobs_per_round)
                if round_number % ROUNDS_BETWEEN_EXTREMES == 0:
                    queue = QUEUES[round_number // ROUNDS_BETWEEN_EXTREMES % len(QUEUES)]
                    queues.fill_extremes(queue, f"extreme-{round_number}-")
                queues.end_repaired()
                if round_number == len(moments) - 2:
                    queues.fill_highest_ids(QUEUES[0])
            command = [sys.executable, __file__, "run", server.url, lake.uri]
            environment = os.environ | {"LAKE_OPTIONS": json.dumps(options)}
            quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": environment}
            program = subprocess.Popen([*command, moment], **quiet)
            has_second = arguments.lake == "s3" and round_number % 3 == 1
            second = subprocess.Popen([*command, "never"], **quiet) if has_second else None
            while program.poll() is None:  # readers open what is there at any moment
                readers.read_next(is_overtaken=moment in KEEPING_NOTHING)
                time.sleep(0.5)
            kills += program.returncode == -signal.SIGKILL
            if second is not None:
                second.wait()  # it may have been refused: the log says who was first
            readers.read_next(is_overtaken=False)
            if not is_last:
                queues.repair(f"repair-{round_number}")
            print(
                f"round {round_number}: {moment}: exit code {program.returncode}, {queues.events:,} events, "
                f"{readers.reads} reads, {time.monotonic() - started:.0f} s",
                flush=True,
            )
        if arguments.keep:
            shutil.copytree(lake.uri, arguments.keep)
        found = differences(filled.client, QUEUES, lake, repairs=queues.repairs, rules=RULES)
        orphans = orphans_of(lake)
        during = len(readers.pairs)
        counts = readers.counts()
        readers.close()
        unlike = {
            table: rows for table, rows in counts.items() if len({*rows.values()}) > 1 or len(rows) < len(READERS)
        }
        print(
            f"{queues.events:,} events, {counts['silver/jobs']['Polars']:,} jobs, {len(queues.repairs)} repairs, "
            f"{kills} kills, {readers.reads} reads of {during} pairs of reader and table "
            f"({readers.overtaken} overtaken by a vacuum that keeps nothing): "
            f"differences {found or 'none'}, row counts that differ between readers {unlike or 'none'}, "
            f"orphans {len(orphans)} {orphans[:5] or ''}, {time.monotonic() - started:.0f} s"
        )
        is_complete = kills == len(arguments.moments) and len(counts) == len(TABLES)
        sys.exit(1 if found or orphans or unlike or not is_complete else 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        run(*sys.argv[2:])
    else:
        main()
