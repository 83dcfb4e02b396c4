"""Defines the gold tables: figures per queue, name and minute or day. Percentiles are exact, so runs agree.

Every table counts what happened on a day, not what became of a job later: a job that died on Monday and completed after
a replay on Tuesday is a dead job of Monday and a completed one of Tuesday.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tampu.wire.dlq import BLANKS, MAX_FINGERPRINT, RULES

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_DAY = "date_format(ts, 'yyyy-MM-dd') AS day"
_MINUTE = "date_trunc('MINUTE', ts) AS minute"
_BY_MINUTE = ("queue", "name", "minute", "day")
#: Columns of dead letters that `clusters_of` needs.
OF_LETTERS = (
    *("queue", "entry_id", "entry_ms", "entry_seq", "job_id", "name"),
    *("reason", "detail", "error_type", "last_error", "failed_at"),
)


def ends(jobs: DataFrame) -> DataFrame:
    """Return one row per end of a job: completed, dead or cancelled. A replayed job has several."""
    rows = jobs.selectExpr(
        "queue", "job_id", "name", "created_at", "wait_ms", "failures", "changed_round", "inline(end_log)"
    )
    return rows.where("ts IS NOT NULL").selectExpr(
        "queue",
        "job_id",
        "name",
        "ts AS ended_at",
        "replace(event, 'dlq', 'dead') AS outcome",
        "attempt",
        "reason",
        "created_at",
        "wait_ms",
        "duration_us AS run_us",
        "timestampdiff(MILLISECOND, created_at, ts) AS total_ms",
        "event = 'completed' AND failures = 0 AS is_first_try",
        "entry_ms",
        "entry_seq",
        "changed_round",
        _DAY,
        _MINUTE,
    )


def failed_runs(jobs: DataFrame) -> DataFrame:
    """Return one row per run that failed."""
    rows = jobs.selectExpr("queue", "name", "inline(failure_log)").where("ts IS NOT NULL")
    return rows.selectExpr("queue", "name", _MINUTE, _DAY, f"{fingerprint_sql('reason')} AS fingerprint", "reason")


def throughput(ended: DataFrame, failed: DataFrame) -> DataFrame:
    """Return the jobs that ended and the runs that failed, per minute."""
    rows = ended.selectExpr(*_BY_MINUTE, "outcome").unionByName(failed.selectExpr(*_BY_MINUTE, "'failed' AS outcome"))
    return rows.groupBy(*_BY_MINUTE).agg(
        *named(
            completed="count_if(outcome = 'completed')",
            dead="count_if(outcome = 'dead')",
            cancelled="count_if(outcome = 'cancelled')",
            failures="count_if(outcome = 'failed')",
        )
    )


def latency(ended: DataFrame) -> DataFrame:
    """Return how long jobs waited, ran and took in total, per minute, in milliseconds.

    Cancelled jobs do not count: their times say when they were cancelled, not how fast the workers are.
    """
    times = {"wait": "wait_ms", "run": "run_us / 1000", "total": "total_ms"}
    # All percentiles of a column in one call: each call collects and sorts its values.
    columns = {name: f"percentile({value}, array(0.5, 0.95, 0.99))" for name, value in times.items()}
    counted = ended.where("outcome <> 'cancelled'").groupBy(*_BY_MINUTE).agg(*named(jobs="count(*)", **columns))
    percentiles = [f"{name}[{place}] AS {name}_p{p}_ms" for name in times for place, p in enumerate((50, 95, 99))]
    return counted.selectExpr(*_BY_MINUTE, "jobs", *percentiles)


def failures(failed: DataFrame) -> DataFrame:
    """Return the runs that failed, per minute and kind of error."""
    return failed.groupBy(*_BY_MINUTE, "fingerprint").agg(*named(failures="count(*)", sample="min(reason)"))


def slo(ended: DataFrame) -> DataFrame:
    """Return per day how many jobs completed, and how many within 1, 10 and 60 seconds."""
    columns = {
        "jobs": "count(*)",
        "completed": "count_if(outcome = 'completed')",
        "dead": "count_if(outcome = 'dead')",
        "cancelled": "count_if(outcome = 'cancelled')",
        "first_try": "count_if(is_first_try)",
    }
    for seconds in (1, 10, 60):
        columns[f"within_{seconds}s"] = f"count_if(outcome = 'completed' AND total_ms <= {seconds * 1000})"
    return ended.groupBy("queue", "name", "day").agg(*named(**columns))


def undecodable(rows: DataFrame) -> DataFrame:
    """Return the entries that could not be decoded, wholly or in part, per partition of bronze and kind of error.

    The rows need a column `stream`.
    """
    broken = rows.where("error IS NOT NULL").dropDuplicates(["queue", "stream", "entry_id"])
    kinds = broken.selectExpr(
        "queue", "date AS day", "stream", f"{fingerprint_sql('error')} AS kind", "error", "entry_id"
    )
    return kinds.groupBy("queue", "day", "stream", "kind").agg(
        *named(entries="count(*)", sample="min(error)", sample_entry_id="min(entry_id)")
    )


def repairs(repaired: DataFrame, ended: DataFrame) -> DataFrame:
    """Return one row per repaired letter with the first end of its job after the repair; `pending` if there is none.

    Times are compared by entry IDs and the server's clock: those of workers may differ.
    """
    ends_after = ended.selectExpr(
        "queue",
        "job_id",
        "struct(entry_ms, entry_seq, outcome, ended_at, reason, attempt, run_us) AS end",
    )
    keys = ("repair", "queue", "entry_id", "job_id")
    rows = repaired.join(ends_after, ["queue", "job_id"], "left")
    first = rows.groupBy(*keys).agg(
        *named(
            end="min(end) FILTER (WHERE end.entry_ms >= repaired_ms)",
            **{name: f"first({name})" for name in ("cluster", "name", "is_canary", "sql", "before", "after")},
            repaired_at="max(repaired_at)",
        )
    )
    return first.selectExpr(
        *keys,
        *("cluster", "name", "is_canary", "sql", "before", "after", "repaired_at"),
        "coalesce(end.outcome, 'pending') AS outcome",
        *("end.ended_at", "end.reason", "end.attempt", "end.run_us"),
    )


def fingerprint_sql(column: str) -> str:
    """Return a Spark expression for the text of a column without the parts that vary."""
    text = f"coalesce({column}, '')"
    for pattern, replacement in RULES:
        literal = pattern.replace("\\", "\\\\").replace("'", "\\'")
        text = f"regexp_replace({text}, '{literal}', '{replacement}')"
    blanks = "".join(f"\\u{ord(character):04x}" for character in BLANKS)
    return f"trim(BOTH '{blanks}' FROM substring({text}, 1, {MAX_FINGERPRINT}))"


def with_fingerprints(letters: DataFrame) -> DataFrame:
    """Add `fingerprint`, and `cluster`, its short name, to dead letters."""
    shape = fingerprint_sql("coalesce(last_error, detail)")
    return letters.selectExpr("*", f"{shape} AS fingerprint").selectExpr(
        "*",
        "substring(sha2(concat_ws('|', reason, error_type, fingerprint), 256), 1, 8) AS cluster",
    )


def clusters_of(letters: DataFrame, jobs: DataFrame | None = None) -> DataFrame:
    """Group dead letters by queue, name and cluster.

    With silver's `jobs` the column `dead` counts the letters whose job is still dead: it has neither completed after a
    replay, nor died again and left a newer letter.
    """
    rows = with_fingerprints(letters.dropDuplicates(["queue", "entry_id"]))
    aggregates = {
        "letters": "count(*)",
        "first_seen": "min(failed_at)",
        "last_seen": "max(failed_at)",
        "sample_job_id": "min_by(job_id, struct(entry_ms, entry_seq))",
        "sample_error": "min_by(last_error, struct(entry_ms, entry_seq))",
    }
    if jobs is not None:
        newest = "row_number() OVER (PARTITION BY queue, job_id ORDER BY entry_ms DESC, entry_seq DESC) = 1"
        rows = rows.selectExpr("*", f"job_id IS NULL OR {newest} AS is_newest")
        rows = rows.join(jobs.select("queue", "job_id", "outcome"), ["queue", "job_id"], "left")
        aggregates["dead"] = "count_if(is_newest AND coalesce(outcome, 'dead') = 'dead')"
    return rows.groupBy("queue", "name", "cluster", "reason", "error_type", "fingerprint").agg(*named(**aggregates))


def named(**expressions: str) -> list[Column]:
    """Return columns by their names."""
    from pyspark.sql import functions as fn

    return [fn.expr(expression).alias(name) for name, expression in expressions.items()]
