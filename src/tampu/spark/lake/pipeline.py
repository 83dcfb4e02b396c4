"""The pipeline: lands what is new, computes again what it touches, swaps it in. Killed at any point, it goes on.

Silver's partitions are functions of bronze's: those whose bronze files changed since the last swap are computed again
from all of their events. Gold's days are computed again when a job that counts there, or did, is among them.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import pyarrow.parquet as pq

from tampu.spark.lake import bronze, gold, silver
from tampu.spark.lake.manifest import Manifest, lake_folder, remove_unnamed, sole_writer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

logger = logging.getLogger("tampu.spark")

STREAMS = ("events", "dlq")
_HIVE_PARTS = 2


@dataclass
class Summary:
    """What one run did."""

    landed: dict[str, int] = field(default_factory=dict)
    #: Entries that were gone before they could be landed, ever, per stream: trimmed, or letters that were replayed.
    trimmed: dict[str, int] = field(default_factory=dict)
    silver_partitions: int = 0
    gold_partitions: int = 0


class Pipeline:
    """One lake and the queues that flow into it. `on_step` is told what comes next, and how far landing is."""

    def __init__(
        self,
        spark: SparkSession,
        url: str,
        queues: Iterable[str],
        lake: str | Path,
        *,
        max_per_batch: int = bronze.MAX_PER_BATCH,
        on_step: Callable[[str], None] = lambda step: None,
    ) -> None:
        self._spark = spark
        self._url = url
        self._queues = list(queues)
        self._lake = lake_folder(lake)
        self._max_per_batch = max_per_batch
        self._on_step = on_step

    def run(self) -> Summary:
        """Land, compute, swap."""
        with sole_writer(self._lake):
            manifest = Manifest.load(self._lake)
            before = {stream: _rows_of(manifest, stream) for stream in STREAMS}
            for stream in STREAMS:
                self._on_step(f"landing {stream}")
                frame = bronze.read_stream(self._spark, self._url, self._queues, stream, self._max_per_batch)
                reached = bronze.land(self._spark, frame, self._lake, stream, partial(self._on_rows, stream))
                self._note_offsets(manifest, stream, reached)
            touched = {stream: self._note_sources(manifest, stream) for stream in STREAMS}
            summary = Summary()
            for stream in STREAMS:
                rows = _rows_of(manifest, stream)
                summary.landed[stream] = sum(rows.values()) - sum(before[stream].values())
                added = manifest.added.get(stream, {})
                manifest.trimmed[stream] = {queue: max(added[queue] - rows.get(queue, 0), 0) for queue in added}
                summary.trimmed[stream] = sum(manifest.trimmed[stream].values())
            self._compute(manifest, touched, summary)
            self._on_step("swapping in")
            manifest.swap_in(self._lake)
            remove_unnamed(self._lake)
            return summary

    # --- bronze

    def _on_rows(self, stream: str, rows: int) -> None:
        self._on_step(f"landing {stream}: {rows:,} so far")

    def _note_offsets(self, manifest: Manifest, stream: str, offsets: dict[str, Any] | None) -> None:
        for queue, offset in (offsets or {}).items():
            if "added" in offset:
                manifest.added.setdefault(stream, {})[queue] = offset["added"]

    def _note_sources(self, manifest: Manifest, stream: str) -> list[str]:
        """Note what bronze holds now; the partitions that have changed since the last swap."""
        touched = []
        for partition, files in self._files(stream).items():
            digest = _digest(files)
            source = f"{stream}/{partition}"
            if manifest.sources.get(source, {}).get("digest") != digest:
                # Parquet's footers tell the number of rows.
                rows = sum(pq.read_metadata(file).num_rows for file in files)
                manifest.sources[source] = {"digest": digest, "rows": rows}
                touched.append(partition)
        return sorted(touched)

    def _files(self, stream: str) -> dict[str, list[str]]:
        """The committed files of bronze by partition."""
        if not bronze.has_landed(self._lake, stream):
            return {}
        files: dict[str, list[str]] = {}
        for url in bronze.read_bronze(self._spark, self._lake, stream).inputFiles():
            path = unquote(urlsplit(url).path)
            partition = "/".join(unquote(part) for part in path.split("/")[-_HIVE_PARTS - 1 : -1])
            files.setdefault(partition, []).append(path)
        return files

    # --- silver and gold

    def _compute(self, manifest: Manifest, touched: dict[str, list[str]], summary: Summary) -> None:
        run = f"{manifest.version + 1:08d}"
        if touched["events"]:
            self._on_step(f"computing {len(touched['events'])} partitions of silver")
            days = self._compute_silver(manifest, touched["events"], run)
            summary.silver_partitions = len(touched["events"])
            self._on_step(f"computing {len(days)} days of gold")
            summary.gold_partitions = self._compute_gold(manifest, days, run)
        if touched["dlq"]:
            self._on_step("grouping dead letters")
            clusters = gold.dlq_clusters(bronze.read_bronze(self._spark, self._lake, "dlq"))
            manifest.tables["gold/dlq_clusters"] = self._write(clusters, "gold/dlq_clusters", "day", run)

    def _compute_silver(self, manifest: Manifest, touched: list[str], run: str) -> list[tuple[str, str]]:
        events = bronze.read_bronze(self._spark, self._lake, "events").where(_is_in(touched, "date"))
        partitions = manifest.partitions("silver/jobs")
        old = [str(self._lake / partitions[name]) for name in touched if name in partitions]
        before = gold.days_of(self._read(old)) if old else []
        written = self._write(silver.jobs_of(events), "silver/jobs", "date", run)
        manifest.replace("silver/jobs", touched, written)
        after = gold.days_of(self._read([str(self._lake / folder) for folder in written.values()])) if written else []
        return sorted({*before, *after})

    def _compute_gold(self, manifest: Manifest, days: list[tuple[str, str]], run: str) -> int:
        if not days:
            return 0
        names = [f"queue={queue}/day={day}" for queue, day in days]
        jobs = self._read(manifest.folders(self._lake, "silver/jobs")).where(f"queue IN ({_list(q for q, _ in days)})")
        total = 0
        for table, compute in (
            ("gold/throughput", gold.throughput),
            ("gold/latency", gold.latency),
            ("gold/failures", gold.failures),
            ("gold/slo", gold.slo),
        ):
            written = self._write(compute(jobs).where(_is_in(names, "day")), table, "day", run)
            manifest.replace(table, names, written)
            total += len(written)
        return total

    def _read(self, folders: list[str]) -> DataFrame:
        return self._spark.read.parquet(*folders)

    def _write(self, frame: DataFrame, table: str, by: str, run: str) -> dict[str, str]:
        """Write a table beside what is there; partition to folder. A run that was killed may have left the folder."""
        folder = self._lake / table / f"run={run}"
        shutil.rmtree(folder, ignore_errors=True)
        # The columns stay in the files too: a folder can be read on its own.
        rows = frame.selectExpr("*", "queue AS p_queue", f"{by} AS p_{by}")
        rows.coalesce(4).write.partitionBy("p_queue", f"p_{by}").parquet(str(folder))
        found: dict[str, str] = {}
        for leaf in folder.glob("p_queue=*/p_*=*"):
            queue, value = (unquote(part.partition("=")[2]) for part in leaf.parts[-_HIVE_PARTS:])
            found[f"queue={queue}/{by}={value}"] = str(leaf.relative_to(self._lake))
        return found


def _digest(files: list[str]) -> str:
    names = sorted(file.rpartition("/")[2] for file in files)
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]


def _rows_of(manifest: Manifest, stream: str) -> dict[str, int]:
    """Rows of bronze per queue."""
    rows: dict[str, int] = {}
    for source, known in manifest.sources.items():
        if source.startswith(f"{stream}/queue="):
            queue = source.removeprefix(f"{stream}/queue=").rpartition("/date=")[0]
            rows[queue] = rows.get(queue, 0) + known["rows"]
    return rows


def _is_in(partitions: list[str], by: str) -> str:
    """A condition: the row is in one of these partitions (`queue=q/date=d`)."""
    by_queue: dict[str, list[str]] = {}
    for partition in partitions:
        queue, _, value = partition.removeprefix("queue=").partition(f"/{by}=")
        by_queue.setdefault(queue, []).append(value)
    return " OR ".join(f"(queue = {_literal(q)} AND {by} IN ({_list(values)}))" for q, values in by_queue.items())


def _literal(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def _list(values: Iterable[str]) -> str:
    return ", ".join(_literal(value) for value in sorted(set(values)))
