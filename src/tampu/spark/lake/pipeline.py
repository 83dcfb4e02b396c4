"""The pipeline: lands what is new, then computes the partitions of silver and gold that it touches.

Each table says in its log up to which version of the table before it was computed. What changed since then is in that
table's log, so a run that is killed at any point is continued by the next one. Silver's partitions are functions of
bronze's, gold's minutes of the jobs that ended or failed in them.
"""

# ruff: noqa: E402 - a missing extra is named before it is imported

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from functools import partial, reduce
from typing import TYPE_CHECKING

from tampu.spark.session import require_lake, settings

require_lake()

from tampu.errors import ConfigError
from tampu.spark.lake import bronze, contracts, gold, silver, upkeep
from tampu.spark.lake.bronze import STREAMS, day_of, is_without_day
from tampu.spark.lake.folder import DEFINITIONS, LakeVersion, sole_writer, writable_lake
from tampu.spark.lake.gold import clusters_of
from tampu.spark.lake.incremental import (
    MAX_SPANS,
    OTHER_IDS,
    Touched,
    changed_spans,
    group_of,
    holds_any,
    holds_jobs_in,
    holds_only_rows_in,
    holds_rows_in,
    is_job_in,
    is_row_in,
)
from tampu.spark.lake.read import read_files
from tampu.spark.lake.rows import read_rows
from tampu.spark.lake.table import TABLES, Changes, File, Table, schema_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from tampu.spark.lake.contracts import Violation
    from tampu.spark.lake.files import Partition
    from tampu.spark.lake.incremental import Spans
    from tampu.spark.lake.store import Store

#: Name of the transaction that holds the version of a table's definition.
DEFINED = "tampu.definitions"
#: Tables that are computed from silver, in this order.
BY_DAY = ("gold/ends", "gold/failures", "gold/throughput", "gold/latency", "gold/slo")
#: Name of the transaction that holds the number of the round that computed a table.
ROUND = "tampu.round"
#: Session settings during a run. The session may be the user's own, with different settings.
SETTINGS = {
    # Days are UTC days, as in the file statistics that show which files contain a day.
    "spark.sql.session.timeZone": "UTC",
    # Spark takes the files that executors read for tiny, and would send a whole table to all of them.
    "spark.sql.autoBroadcastJoinThreshold": "-1",
}


@dataclass
class Summary:
    """Summary of one run."""

    landed: dict[str, int] = field(default_factory=dict)
    #: Per stream: entries that were gone before they could be landed, ever. They were trimmed, or replayed.
    trimmed: dict[str, int] = field(default_factory=dict)
    silver_partitions: int = 0
    gold_partitions: int = 0
    #: Payloads that break their contract, at this moment.
    violations: list[Violation] = field(default_factory=list)


class Pipeline:
    """One lake and the queues that are landed in it. `on_step` is called with what comes next."""

    def __init__(
        self,
        spark: SparkSession,
        url: str,
        queues: Iterable[str],
        lake: str | Path | Store,
        *,
        storage_options: Mapping[str, str] | None = None,
        max_per_batch: int = bronze.MAX_PER_BATCH,
        keep_hours: int = upkeep.DEFAULT_KEEP_HOURS,
        rules: contracts.Contracts | None = None,
        on_step: Callable[[str], None] = lambda step: None,
    ) -> None:
        self._spark = spark
        self._url = url
        self._queues = list(queues)
        self._keep_hours = keep_hours
        self._rules = rules
        self._lake = writable_lake(lake, storage_options)
        self._tables = {name: Table(self._lake, name) for name in TABLES}
        self._landings = {
            stream: bronze.Landing(
                spark, url, self._queues, self._tables[f"bronze/{stream}"], self._lake, max_per_batch
            )
            for stream in STREAMS
        }
        self._on_step = on_step
        #: The published round at the start.
        self._round = 0

    def run(self) -> Summary:
        """Land everything that is present, compute what it touches, publish."""
        with sole_writer(self._lake), settings(self._spark, SETTINGS):
            state, summary = self._begin()
            for stream, landing in self._landings.items():
                self._on_step(f"landing {stream}")
                summary.landed[stream] = landing.run(partial(self._on_rows, stream))
            self._compute(state, summary)
            summary.violations = self._check_contracts()
            is_vacuumed = sum(summary.landed.values()) > 0 and self._upkeep(state)
            self._publish(state)
            if is_vacuumed:
                upkeep.shorten_logs(self._lake, self._tables, self._keep_hours)
            summary.trimmed = {stream: sum(counts.values()) for stream, counts in state.trimmed.items()}
            return summary

    def rebuild(self, first_day: str = "") -> Summary:
        """Compute silver and gold again from bronze, for jobs from this day on; by default for all that bronze has."""
        with sole_writer(self._lake), settings(self._spark, SETTINGS):
            state, summary = self._begin()
            self._compute(state, summary, rebuild_from=first_day)
            self._publish(state)
            return summary

    def _begin(self) -> tuple[LakeVersion, Summary]:
        for table in self._tables.values():
            table.pin()
        state = LakeVersion.load(self._lake)
        self._round = state.round
        return state, Summary()

    def close(self) -> None:
        """Close the connections to the server."""
        for landing in self._landings.values():
            landing.close()

    def _on_rows(self, stream: str, rows: int) -> None:
        self._on_step(f"landing {stream}: {rows:,} so far")

    def _compute(self, state: LakeVersion, summary: Summary, rebuild_from: str | None = None) -> None:
        for name in (*BY_DAY, "silver/jobs", "gold/undecodable", "gold/dlq_clusters", "gold/repairs"):
            if self._tables[name].transaction(DEFINED) > DEFINITIONS:
                raise ConfigError(f"{self._tables[name].store} was computed by a newer version of tampu: upgrade tampu")
        if rebuild_from and self._tables["silver/jobs"].transaction(DEFINED) != DEFINITIONS:
            rebuild_from = ""  # a table has the definitions of one version, whatever the day
        summary.silver_partitions = self._compute_silver(state, rebuild_from)
        rebuild = rebuild_from is not None
        summary.gold_partitions = self._compute_gold(rebuild=rebuild)
        self._compute_undecodable(state, rebuild_from)
        self._compute_clusters(rebuild=rebuild)
        self._compute_repairs(rebuild=rebuild)

    def _check_contracts(self) -> list[Violation]:
        if self._rules is None:
            return []
        self._on_step("checking contracts")
        found = [one for queue in self._queues for one in contracts.check_queue(self._url, queue, self._rules)[1]]
        # An unchanged table is not written again: rounds without news leave no trace.
        former = read_rows(self._lake, contracts.TABLE)
        if contracts.comparable(former, self._queues) != contracts.comparable(map(asdict, found), self._queues):
            contracts.store(self._tables[contracts.TABLE], self._queues, found)
        return found

    def _upkeep(self, state: LakeVersion) -> bool:
        """Merge small files; every few rounds also delete files that no reader needs any more, and return True."""
        upkeep.merge_small_files(self._tables)
        is_due = state.round % upkeep.ROUNDS_BETWEEN == upkeep.ROUNDS_BETWEEN - 1
        if is_due:
            self._on_step("vacuuming")
            upkeep.delete_old_files(self._lake, self._tables, self._keep_hours)
        return is_due

    def _publish(self, state: LakeVersion) -> None:
        self._on_step("publishing")
        before = (dict(state.tables), dict(state.trimmed))
        state.trimmed = {stream: self._trimmed(state, stream) for stream in STREAMS}
        state.tables = {name: version for name, table in self._tables.items() if (version := table.version()) >= 0}
        if before != (state.tables, state.trimmed):
            if LakeVersion.load(self._lake).round != self._round:
                raise ConfigError(f"another pipeline writes to the lake {self._lake}: it has published its round first")
            # A run that was killed may have used up numbers of rounds.
            state.round = max(state.round, self._tables["silver/jobs"].transaction(ROUND) - 1)
            state.publish(self._lake)

    def _trimmed(self, state: LakeVersion, stream: str) -> dict[str, int]:
        """Return how many entries of each queue were never landed: added, but not in bronze."""
        table = self._tables[f"bronze/{stream}"]
        rows = dict(state.retired.get(stream, {}))
        for file in table.files():
            rows[file.partition[0]] = rows.get(file.partition[0], 0) + file.rows
        offsets = bronze.offsets_of(table, {*rows, *self._queues})
        return {
            queue: max(offset.get("former", 0) + offset["added"] - rows.get(queue, 0), 0)
            for queue, offset in offsets.items()
            if "added" in offset
        }

    # --- what has changed

    def _changes(self, target: Table, source: Table, *, rebuild: bool = False) -> Changes | None:
        """Return how `source` changed since `target` was computed; None if all of it has to be taken."""
        done = target.transaction(source.name)
        if rebuild or done < 0 or target.transaction(DEFINED) != DEFINITIONS:
            return None
        return source.changes(done, source.version())

    # --- silver

    def _compute_silver(self, state: LakeVersion, rebuild_from: str | None) -> int:
        """Merge new events into the rows of their jobs; compute jobs of which that is not known from all events."""
        source, target = self._tables["bronze/events"], self._tables["silver/jobs"]
        if (version := source.version()) < 0:
            return 0
        files = source.files()
        mixed = {file.partition[0] for file in files if is_without_day(file.partition[1])}
        changes = self._changes(target, source, rebuild=rebuild_from is not None)
        changed = {file.partition for file in files} if changes is None else changes.partitions
        # Of days that retention removed, bronze has only late events: jobs cannot be computed from those alone.
        first_day = max(state.retained_from, rebuild_from or "")

        def is_in_bronze(partition: Partition) -> bool:
            day = day_of(partition[1])
            return day is None or day >= first_day

        changed = {part for part in changed if is_in_bronze(part)}
        if not changed:
            return 0
        marks = {f"tampu.mixed.{queue}": 1 for queue in mixed}
        new_files = self._new_files(changed, changes, files, mixed)
        newly_mixed = {queue for queue in mixed if target.transaction(f"tampu.mixed.{queue}") < 0}
        # Where jobs of unknown age appear for the first time, those of other dates may have had several rows until now.
        whole = {
            group
            for group in (group_of(part, mixed) for part in changed)
            if group not in new_files or (group[0] in newly_mixed and group[1] == OTHER_IDS)
        }
        news = {group: new for group, new in new_files.items() if group not in whole}
        touched = Touched.read(source, news)
        self._on_step(f"computing silver, partitions: {len(changed):,}")
        number = max(state.round, target.transaction(ROUND)) + 1
        frames = []
        if of_whole := [file for file in files if group_of(file.partition, mixed) in whole]:
            frames.append(silver.jobs_of(self._read(source, of_whole, silver.SOURCES), mixed, number))
        rewritten = touched.files(target, target.files(), mixed)
        adds = []
        if news:
            ids = self._spark.createDataFrame(touched.table())
            events = self._read(source, [file for new in news.values() for file in new], silver.SOURCES)
            former = silver.only(self._read(target, rewritten), ids, mixed)
            frames.append(silver.merged(former, events, mixed, number))
        if rewritten:
            rest = silver.without(self._read(target, rewritten), ids, mixed)
            # Rows of large files are not mixed with those of new jobs: these change again soon.
            if max(file.size for file in rewritten) < upkeep.SMALL_JOBS_FILE:
                frames.append(rest)
            else:
                adds += target.stage(rest, sort_by="last_entry_ms")
        frame = reduce(lambda one, other: one.unionByName(other), frames)
        # Gold reads only the files with jobs of the days that it computes.
        adds += target.stage(frame, sort_by="last_entry_ms")
        paths = {file.path for file in rewritten}
        target.commit(
            adds,
            schema_of(frame),
            {source.name: version, DEFINED: DEFINITIONS, ROUND: number} | marks,
            # If everything is computed, also rows of queues that do not exist, whose names were read wrongly once.
            replaces={
                file.path
                for file in target.files()
                if file.path in paths
                or group_of(file.partition, mixed) in whole
                or (changes is None and is_in_bronze(file.partition))
            },
            again=rebuild_from is not None,
        )
        return len(changed)

    def _new_files(
        self, changed: set[Partition], changes: Changes | None, files: list[File], mixed: set[str]
    ) -> dict[Partition, list[File]]:
        """Return the new files by group of partitions, where they are all known."""
        if changes is None:
            return {}
        present = {file.path: file for file in files}
        found: dict[Partition, list[File]] = {}
        unclear: set[Partition] = set()
        for path, part in (changes.added | changes.removed).items():
            group = group_of(part, mixed)
            if part not in changed:
                continue
            if path in present:
                found.setdefault(group, []).append(present[path])
            else:  # compacted meanwhile, or gone
                unclear.add(group)
        return {group: new for group, new in found.items() if group not in unclear}

    # --- gold

    def _compute_gold(self, *, rebuild: bool) -> int:
        source = self._tables["silver/jobs"]
        if (version := source.version()) < 0:
            return 0
        stale = [
            name
            for name in BY_DAY
            if rebuild
            or self._tables[name].transaction(source.name) < version
            or self._tables[name].transaction(DEFINED) != DEFINITIONS
        ]
        if not stale:
            return 0
        files, number = source.files(), source.transaction(ROUND)
        spans = None if rebuild else self._changed_spans(source, files, stale)
        if spans is not None:
            if not spans:
                for name in stale:
                    self._tables[name].mark({source.name: version, ROUND: number})
                return 0
            files = [file for file in files if holds_jobs_in(file, spans)]
        self._on_step(f"computing gold, days: {'all' if spans is None else len(spans)}")
        jobs = self._read(source, files)
        is_wanted = "day IS NOT NULL"
        if spans is not None:
            jobs = jobs.where(is_job_in(spans))
            is_wanted = is_row_in(spans)
        transactions = {source.name: version, DEFINED: DEFINITIONS, ROUND: number}
        replace = partial(self._replace, transactions=transactions, rebuild=rebuild)
        ends_table = self._tables["gold/ends"]
        replace(ends_table, gold.ends(jobs).where(is_wanted), spans)
        of_days = [file for file in ends_table.files() if spans is None or file.partition in spans]
        of_minutes = [file for file in of_days if spans is None or holds_rows_in(file, spans[file.partition])]
        ended = self._read(ends_table, of_minutes).where(is_wanted)
        failed = gold.failed_runs(jobs).where(is_wanted)
        days = None if spans is None else dict.fromkeys(spans)
        return (
            replace(self._tables["gold/failures"], gold.failures(failed), spans)
            + replace(self._tables["gold/throughput"], gold.throughput(ended, failed), spans)
            + replace(self._tables["gold/latency"], gold.latency(ended), spans)
            + replace(self._tables["gold/slo"], gold.slo(self._read(ends_table, of_days)), days)
        )

    def _changed_spans(self, source: Table, files: list[File], stale: list[str]) -> Spans | None:
        """Return the days and minutes that changed jobs count on, before and after; None for all days."""
        if any(self._tables[name].transaction(DEFINED) != DEFINITIONS for name in stale):
            return None
        done, number = (min(self._tables[name].transaction(app) for name in stale) for app in (source.name, ROUND))
        changes = source.changes(done, source.version())
        if changes is None:
            return None
        spans = changed_spans(source, _changed_files(files, changes.added), number)
        return spans if len(spans) <= MAX_SPANS else dict.fromkeys(spans)

    def _replace(
        self,
        table: Table,
        frame: DataFrame,
        spans: Spans | None,
        transactions: dict[str, int],
        *,
        rebuild: bool,
    ) -> int:
        """Put the rows in place of those of these partitions and minutes (None: of all); return the number of files."""
        if not rebuild and all(table.transaction(app) >= number for app, number in transactions.items()):
            return 0
        files = table.files()
        if spans is None:
            spans = dict.fromkeys(file.partition for file in files)
        replaced = [file for file in files if file.partition in spans and holds_rows_in(file, spans[file.partition])]
        if partly := [file for file in replaced if not holds_only_rows_in(file, spans[file.partition])]:
            for file in partly:
                table.require(file)
            others = self._read(table, partly).where(f"NOT ({is_row_in(spans)})")
            frame = frame.unionByName(others.select(*frame.columns))
        # Ends are many: in files with few minutes each, later rounds replace only the last ones.
        adds = table.stage(frame, sort_by="ended_at" if table.name == "gold/ends" else "")
        paths = {file.path for file in replaced}
        table.commit(adds, schema_of(frame), transactions, replaces=paths, again=rebuild)
        return len(adds)

    # --- what could not be decoded, and dead letters

    def _compute_undecodable(self, state: LakeVersion, rebuild_from: str | None) -> None:
        target = self._tables["gold/undecodable"]
        sources = {stream: self._tables[f"bronze/{stream}"] for stream in STREAMS}
        transactions = {source.name: version for source in sources.values() if (version := source.version()) >= 0}
        rebuild = rebuild_from is not None
        if not transactions or (
            not rebuild
            and target.transaction(DEFINED) == DEFINITIONS
            and all(target.transaction(name) >= version for name, version in transactions.items())
        ):
            return
        pending: set[Partition] = set()
        for source in sources.values():
            if source.name in transactions:
                changes = self._changes(target, source, rebuild=rebuild)
                if changes is None:
                    pending |= {file.partition for file in (*source.files(), *target.files())}
                else:
                    pending |= changes.partitions
        # Of days that retention removed, bronze has only late entries.
        first_day = max(state.retained_from, rebuild_from or "")
        pending = {part for part in pending if (day_of(part[1]) or first_day) >= first_day}
        frames = []
        for stream, source in sources.items():
            broken = [
                file for file in source.files() if file.partition in pending and file.nulls.get("error") != file.rows
            ]
            rows = self._read(source, broken, ("queue", "date", "entry_id", "error"))
            frames.append((broken, rows.selectExpr("*", f"'{stream}' AS stream")))
        has_former = any(file.partition in pending for file in target.files())
        transactions |= {DEFINED: DEFINITIONS}
        if target.version() >= 0 and not has_former and not any(files for files, _ in frames):
            target.mark(transactions)
            return
        frame = gold.undecodable(reduce(lambda rows, others: rows.unionByName(others), (rows for _, rows in frames)))
        self._replace(target, frame, dict.fromkeys(pending), transactions, rebuild=rebuild)

    def _compute_clusters(self, *, rebuild: bool) -> None:
        letters_table, jobs_table = self._tables["bronze/dlq"], self._tables["silver/jobs"]
        if letters_table.version() < 0:
            return

        def clusters(letters: list[File]) -> DataFrame:
            dates = {file.partition for file in letters}
            jobs = [file for file in jobs_table.files() if file.partition in dates or is_without_day(file.partition[1])]
            outcomes = self._read(jobs_table, jobs, ("queue", "job_id", "outcome"))
            return clusters_of(self._read(letters_table, letters, gold.OF_LETTERS), outcomes)

        self._compute_by_queue(
            "gold/dlq_clusters", "grouping dead letters", letters_table, jobs_table, clusters, rebuild=rebuild
        )

    def _compute_repairs(self, *, rebuild: bool) -> None:
        repaired_table, ended_table = self._tables["bronze/repairs"], self._tables["gold/ends"]
        if min(repaired_table.version(), ended_table.version()) < 0:
            return

        def repairs(repaired: list[File]) -> DataFrame:
            queues = {file.partition[0] for file in repaired}
            ended = [file for file in ended_table.files() if file.partition[0] in queues]
            return gold.repairs(self._read(repaired_table, repaired), self._read(ended_table, ended))

        self._compute_by_queue(
            "gold/repairs", "joining repairs to outcomes", repaired_table, ended_table, repairs, rebuild=rebuild
        )

    def _compute_by_queue(
        self,
        name: str,
        step: str,
        table: Table,
        jobs_table: Table,
        compute: Callable[[list[File]], DataFrame],
        *,
        rebuild: bool,
    ) -> None:
        """Compute the queues of which `table` has new rows, or `jobs_table` new rows of its jobs."""
        target, files = self._tables[name], table.files()
        versions = {one.name: version for one in (table, jobs_table) if (version := one.version()) >= 0}
        changes = self._changes(target, table)
        changed_jobs = self._changes(target, jobs_table) if jobs_table.name in versions else Changes({}, {})
        queues: set[str] | None = None
        if rebuild and target.transaction(DEFINED) == DEFINITIONS:
            queues = {file.partition[0] for file in files}
        elif changes is not None and changed_jobs is not None:
            queues = {partition[0] for partition in changes.partitions}
            queues |= self._queues_with_changed_jobs(table, files, jobs_table, changed_jobs, queues)
            queues &= {file.partition[0] for file in files}
        if queues is not None and not queues:
            target.mark(versions)
            return
        self._on_step(step)
        frame = compute([file for file in files if queues is None or file.partition[0] in queues])
        replaced: Spans | None = None if queues is None else {(queue,): None for queue in queues}
        self._replace(target, frame, replaced, versions | {DEFINED: DEFINITIONS}, rebuild=rebuild)

    def _queues_with_changed_jobs(
        self, table: Table, files: list[File], changed_table: Table, changes: Changes, known: set[str]
    ) -> set[str]:
        """Return the queues, apart from the known ones, where changed files have a job of the files of `table`."""
        import pyarrow as pa

        found: set[str] = set()
        for queue in {partition[0] for partition in changes.partitions} - known:
            columns = [
                table.store.parquet(file.path, ["job_id"])["job_id"] for file in files if file.partition[0] == queue
            ]
            ids = pa.chunked_array([chunk for column in columns for chunk in column.chunks], pa.string())
            new = [path for path, partition in changes.added.items() if partition[0] == queue]
            try:
                if any(holds_any(changed_table, path, ids.combine_chunks()) for path in new):
                    found.add(queue)
            except FileNotFoundError:  # a vacuum has removed it
                found.add(queue)
        return found

    def _read(self, table: Table, files: list[File], columns: Sequence[str] = ()) -> DataFrame:
        return read_files(self._spark, table, files, columns)


def _changed_files(files: list[File], changed: dict[str, Partition]) -> list[File]:
    """Return the changed files; all of a partition if one of its changed files was compacted before or after."""
    unclear = {changed[path] for path in changed.keys() - {file.path for file in files}}
    return [file for file in files if file.path in changed or file.partition in unclear]
