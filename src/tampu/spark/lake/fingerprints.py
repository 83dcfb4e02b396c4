"""Clusters of dead letters: groups letters in Spark by the fingerprint of their error (`wire/fingerprint.py`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tampu.wire.fingerprint import BLANKS, MAX_FINGERPRINT, RULES

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


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
