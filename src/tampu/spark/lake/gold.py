"""Gold: what people look at, per queue, name and minute. Exact percentiles, so that a run again gives the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tampu.spark.lake.fingerprints import clusters_of, fingerprint_sql

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_DAY_OF = "date_format({0}, 'yyyy-MM-dd')"
_BY_MINUTE = ("queue", "name", "minute", "day")


def throughput(jobs: DataFrame) -> DataFrame:
    """Jobs that ended, per minute."""
    return (
        _ended(jobs)
        .groupBy(*_BY_MINUTE)
        .agg(
            *_named(
                completed="count_if(outcome = 'completed')", dead="count_if(outcome = 'dead')", failures="sum(failures)"
            )
        )
    )


def latency(jobs: DataFrame) -> DataFrame:
    """How long jobs waited, ran and took in all, per minute, in milliseconds."""
    columns = {"jobs": "count(*)"}
    for name, value in (("wait", "wait_ms"), ("run", "run_us / 1000"), ("total", "total_ms")):
        columns |= {f"{name}_p{p}_ms": f"percentile({value}, {p / 100})" for p in (50, 95, 99)}
    return _ended(jobs).groupBy(*_BY_MINUTE).agg(*_named(**columns))


def failures(jobs: DataFrame) -> DataFrame:
    """Failed runs, per minute and kind of error."""
    rows = jobs.selectExpr("queue", "name", "inline(failure_log)").selectExpr(
        "queue",
        "name",
        "date_trunc('MINUTE', ts) AS minute",
        f"{_DAY_OF.format('ts')} AS day",
        f"{fingerprint_sql('reason')} AS fingerprint",
        "reason",
    )
    return rows.groupBy(*_BY_MINUTE, "fingerprint").agg(*_named(failures="count(*)", sample="min(reason)"))


def slo(jobs: DataFrame) -> DataFrame:
    """Per day: how many jobs ended well, and how many soon."""
    columns = {
        "jobs": "count(*)",
        "completed": "count_if(outcome = 'completed')",
        "dead": "count_if(outcome = 'dead')",
        "first_try": "count_if(failures = 0 AND outcome = 'completed')",
    }
    for seconds in (1, 10, 60):
        columns[f"within_{seconds}s"] = f"count_if(outcome = 'completed' AND total_ms <= {seconds * 1000})"
    return _ended(jobs).groupBy("queue", "name", "day").agg(*_named(**columns))


def dlq_clusters(letters: DataFrame) -> DataFrame:
    """Dead letters by what they have in common."""
    return clusters_of(letters).selectExpr("*", "'all' AS day")


def days_of(jobs: DataFrame) -> list[tuple[str, str]]:
    """(queue, day) of everything these jobs contribute to gold."""
    done = _ended(jobs).select("queue", "day")
    failed = jobs.selectExpr("queue", "inline(failure_log)").selectExpr("queue", f"{_DAY_OF.format('ts')} AS day")
    return sorted((row["queue"], row["day"]) for row in done.union(failed).distinct().collect() if row["day"])


def _ended(jobs: DataFrame) -> DataFrame:
    return jobs.where("done_at IS NOT NULL").selectExpr(
        "*", f"{_DAY_OF.format('done_at')} AS day", "date_trunc('MINUTE', done_at) AS minute"
    )


def _named(**expressions: str) -> list[Column]:
    from pyspark.sql import functions as fn

    return [fn.expr(expression).alias(name) for name, expression in expressions.items()]
