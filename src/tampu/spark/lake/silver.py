"""Silver: one row per job, computed from all of its events. JVM aggregates only, none that depends on the order."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from pyspark.sql import DataFrame

_AT = "struct(entry_ms, entry_seq)"
_ENDS = "event IN ('completed', 'dlq', 'cancelled')"
_FAILURE = "named_struct('ts', ts, 'attempt', attempt, 'reason', reason, 'entry_ms', entry_ms, 'entry_seq', entry_seq)"
_END = (
    "named_struct('ts', ts, 'event', event, 'attempt', attempt, 'reason', reason, 'duration_us', duration_us, "
    "'entry_ms', entry_ms, 'entry_seq', entry_seq)"
)

#: Column to its expression over all events of a job.
COLUMNS = {
    "name": "max(name)",
    "created_at": "min(created_at)",
    "first_active_at": "min(ts) FILTER (WHERE event = 'active')",
    "first_ended_at": f"min(ts) FILTER (WHERE {_ENDS})",
    "done_at": f"max(ts) FILTER (WHERE {_ENDS})",
    "first_failed_at": "min(ts) FILTER (WHERE event = 'failed')",
    "last_failed_at": "max(ts) FILTER (WHERE event = 'failed')",
    # The last end counts, even if an event that was written late follows it.
    "outcome": f"""coalesce(
        replace(max_by(event, {_AT}) FILTER (WHERE {_ENDS}), 'dlq', 'dead'),
        max_by(event, {_AT})
    )""",
    "attempts": "max(attempt) FILTER (WHERE event IN ('completed', 'failed', 'dlq', 'cancelled'))",
    "failures": "count(*) FILTER (WHERE event = 'failed')",
    "run_us": f"max_by(duration_us, {_AT}) FILTER (WHERE event IN ('completed', 'failed'))",
    # Null instead of an overflow: one absurd duration must not stop the pipeline.
    "total_run_us": "try_sum(duration_us)",
    "last_error": f"max_by(reason, {_AT}) FILTER (WHERE event = 'failed')",
    "dlq_reason": f"max_by(reason, {_AT}) FILTER (WHERE event = 'dlq')",
    "worker": f"max_by(worker, {_AT}) FILTER (WHERE worker IS NOT NULL)",
    "failure_log": f"array_sort(collect_list({_FAILURE}) FILTER (WHERE event = 'failed'))",
    "end_log": f"array_sort(collect_list({_END}) FILTER (WHERE {_ENDS}))",
    "events": "count(*)",
    "last_entry_ms": "max(entry_ms)",
}
#: Columns of events that silver is computed from.
SOURCES = (
    *("queue", "date", "entry_id", "entry_ms", "entry_seq", "job_id", "name", "attempt", "created_at"),
    *("event", "ts", "duration_us", "reason", "worker"),
)


def job_group(mixed: Collection[str] = ()) -> str:
    """Return an expression for the group of partitions that holds all events of a job: `touched.group_of` in SQL."""
    if not mixed:
        return "date"
    queues = ", ".join(literal(queue) for queue in sorted(mixed))
    return f"if(queue IN ({queues}) AND date RLIKE '^[ch]', 'other', date)"


def jobs_of(events: DataFrame, mixed: Collection[str] = ()) -> DataFrame:
    """Return one row per job. The frame must hold all events of each; progress reports are not counted.

    `mixed` are the queues where the creation of some jobs is unknown: events of one job may have several dates there.
    """
    from pyspark.sql import functions as fn

    rows = events.select(*SOURCES).where("job_id IS NOT NULL AND event <> 'progress'")
    # An event that was landed twice, by a version that could do that, counts once.
    rows = rows.dropDuplicates(["queue", "entry_id"])
    jobs = rows.groupBy("queue", "job_id", fn.expr(job_group(mixed)).alias("job_group")).agg(
        fn.min("date").alias("date"), *(fn.expr(expression).alias(name) for name, expression in COLUMNS.items())
    )
    # Not with `drop`: Spark Connect analyses its input at once, before a declarative pipeline has the table.
    return jobs.selectExpr(
        *("queue", "job_id", "date", *COLUMNS),
        "timestampdiff(MILLISECOND, created_at, first_active_at) AS wait_ms",
        "timestampdiff(MILLISECOND, created_at, done_at) AS total_ms",
    )


def only(rows: DataFrame, jobs: DataFrame, mixed: Collection[str]) -> DataFrame:
    """Return the rows of these jobs. The second frame has the columns queue, job_group and job_id."""
    return _joined(rows, jobs, mixed, "left_semi")


def without(rows: DataFrame, jobs: DataFrame, mixed: Collection[str]) -> DataFrame:
    """Return the rows of all other jobs."""
    return _joined(rows, jobs, mixed, "left_anti")


def _joined(rows: DataFrame, jobs: DataFrame, mixed: Collection[str], how: str) -> DataFrame:
    grouped = rows.selectExpr("*", f"{job_group(mixed)} AS job_group")
    return grouped.join(jobs.hint("broadcast"), ["queue", "job_group", "job_id"], how).drop("job_group")


def literal(text: str) -> str:
    """Return text as a literal of Spark SQL."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
