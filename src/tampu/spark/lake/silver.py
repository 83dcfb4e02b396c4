"""Silver: one row per job. JVM aggregates only, none that depends on the order.

Rows can be merged: a round aggregates the new events and merges the result with the former rows of their jobs, whatever
the number of older events. `_last` and the like are hidden columns that only this needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from pyspark.sql import DataFrame

_AT = "struct(entry_ms, entry_seq)"
_ENDS = "event IN ('completed', 'dlq', 'cancelled')"
_FAILURE = "named_struct('ts', ts, 'attempt', attempt, 'reason', reason, 'entry_ms', entry_ms, 'entry_seq', entry_seq)"
_END = (
    "named_struct('ts', ts, 'event', event, 'attempt', attempt, 'reason', reason, 'duration_us', duration_us, "
    "'entry_ms', entry_ms, 'entry_seq', entry_seq)"
)

#: Column to its expression over events of a job, and the function that merges two such values.
COLUMNS = {
    "name": ("max(name)", "max"),
    "created_at": ("min(created_at)", "min"),
    "first_active_at": ("min(ts) FILTER (WHERE event = 'active')", "min"),
    "first_ended_at": (f"min(ts) FILTER (WHERE {_ENDS})", "min"),
    "done_at": (f"max(ts) FILTER (WHERE {_ENDS})", "max"),
    "first_failed_at": ("min(ts) FILTER (WHERE event = 'failed')", "min"),
    "last_failed_at": ("max(ts) FILTER (WHERE event = 'failed')", "max"),
    "attempts": ("max(attempt) FILTER (WHERE event IN ('completed', 'failed', 'dlq', 'cancelled'))", "max"),
    "failures": ("count(*) FILTER (WHERE event = 'failed')", "sum"),
    "failure_log": (f"array_sort(collect_list({_FAILURE}) FILTER (WHERE event = 'failed'))", "log"),
    "end_log": (f"array_sort(collect_list({_END}) FILTER (WHERE {_ENDS}))", "log"),
    "events": ("count(*)", "sum"),
    "last_entry_ms": ("max(entry_ms)", "max"),
    # Hidden: values with the positions that they came from, the last of which counts.
    "_last": ("max(struct(entry_ms, entry_seq, event))", "max"),
    "_run": ("max(struct(entry_ms, entry_seq, duration_us)) FILTER (WHERE event IN ('completed', 'failed'))", "max"),
    "_worker": ("max(struct(entry_ms, entry_seq, worker)) FILTER (WHERE worker IS NOT NULL)", "max"),
    "_total_run_us": ("CAST(sum(CAST(duration_us AS DECIMAL(38, 0))) AS DECIMAL(38, 0))", "sum"),
}
_LAST = "array_max(transform({log}, entry -> struct(entry.entry_ms, entry.entry_seq, entry.{field}))).{field}"
#: Column to its expression over the others.
DERIVED = {
    # The last end counts, even if an event that was written late follows it.
    "outcome": f"coalesce(replace({_LAST.format(log='end_log', field='event')}, 'dlq', 'dead'), _last.event)",
    "run_us": "_run.duration_us",
    # Null instead of an overflow: one absurd duration must not stop the pipeline.
    "total_run_us": "TRY_CAST(_total_run_us AS BIGINT)",
    "last_error": _LAST.format(log="failure_log", field="reason"),
    "dlq_reason": _LAST.format(log="filter(end_log, entry -> entry.event = 'dlq')", field="reason"),
    "worker": "_worker.worker",
    "wait_ms": "timestampdiff(MILLISECOND, created_at, first_active_at)",
    "total_ms": "timestampdiff(MILLISECOND, created_at, done_at)",
}
#: Columns of events that silver is computed from.
SOURCES = (
    *("queue", "date", "entry_ms", "entry_seq", "job_id", "name", "attempt", "created_at"),
    *("event", "ts", "duration_us", "reason", "worker"),
)


def job_group(mixed: Collection[str] = ()) -> str:
    """Return an expression for the group of partitions that holds all events of a job: `touched.group_of` in SQL."""
    if not mixed:
        return "date"
    queues = ", ".join(literal(queue) for queue in sorted(mixed))
    return f"if(queue IN ({queues}) AND date RLIKE '^[ch]', 'other', date)"


def jobs_of(events: DataFrame, mixed: Collection[str] = (), round_number: int = 0) -> DataFrame:
    """Return one row per job. The frame must hold all events of each; progress reports are not counted.

    `mixed` are the queues where the creation of some jobs is unknown: events of one job may have several dates there.
    """
    return _finished(_aggregated(events, mixed), round_number)


def merged(jobs: DataFrame, events: DataFrame, mixed: Collection[str], round_number: int) -> DataFrame:
    """Return one row per job, from former rows and the events that came since then."""
    columns = ("queue", "job_id", "date", *COLUMNS)
    rows = _aggregated(events, mixed).unionByName(jobs.select(*columns))
    merges = {"log": "array_sort(flatten(collect_list({0})))", "sum": "CAST(sum({0}) AS {1})"}
    types = dict(rows.dtypes)
    of_jobs = {
        name: merges.get(merge, f"{merge}({{0}})").format(name, types[name]) for name, (_, merge) in COLUMNS.items()
    }
    return _finished(_by_job(rows, of_jobs, mixed), round_number)


def _aggregated(events: DataFrame, mixed: Collection[str]) -> DataFrame:
    rows = events.select(*SOURCES).where("job_id IS NOT NULL AND event <> 'progress'")
    return _by_job(rows, {name: expression for name, (expression, _) in COLUMNS.items()}, mixed)


def _by_job(rows: DataFrame, columns: Mapping[str, str], mixed: Collection[str]) -> DataFrame:
    from pyspark.sql import functions as fn

    jobs = rows.groupBy("queue", "job_id", fn.expr(job_group(mixed)).alias("job_group")).agg(
        fn.min("date").alias("date"), *(fn.expr(expression).alias(name) for name, expression in columns.items())
    )
    # Not with `drop`: Spark Connect analyses its input at once, before a declarative pipeline has the table.
    return jobs.select("queue", "job_id", "date", *columns)


def _finished(jobs: DataFrame, round_number: int) -> DataFrame:
    # Spark would compile a number into its code, and compile it again in every round: see `incremental`.
    changed = f"CAST(concat('{round_number}', left(queue, 0)) AS BIGINT) AS changed_round"
    derived = (f"{expression} AS {name}" for name, expression in DERIVED.items())
    return jobs.selectExpr("queue", "job_id", "date", *COLUMNS, *derived, changed)


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
