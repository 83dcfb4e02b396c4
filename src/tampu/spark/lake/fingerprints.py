"""Fingerprints of errors: what is the same about errors that differ only in numbers, ids and quoted values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tampu.wire.fingerprint import MAX_FINGERPRINT, RULES

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


def fingerprint_sql(column: str) -> str:
    """An expression for Spark: the text of a column without what varies."""
    text = f"coalesce({column}, '')"
    for pattern, replacement in RULES:
        literal = pattern.replace("\\", "\\\\").replace("'", "\\'")
        text = f"regexp_replace({text}, '{literal}', '{replacement}')"
    return f"trim(substring({text}, 1, {MAX_FINGERPRINT}))"


def with_fingerprints(letters: DataFrame) -> DataFrame:
    """Dead letters and what each has in common with others: `fingerprint`, and `cluster`, its short name."""
    shape = fingerprint_sql("coalesce(last_error, detail)")
    return letters.selectExpr("*", f"{shape} AS fingerprint").selectExpr(
        "*",
        "substring(sha2(concat_ws('|', reason, error_type, fingerprint), 256), 1, 8) AS cluster",
    )


def clusters_of(letters: DataFrame) -> DataFrame:
    """Dead letters by what they have in common, per queue and name, the largest first when sorted by `letters`."""
    return (
        with_fingerprints(letters)
        .groupBy("queue", "name", "cluster", "reason", "error_type", "fingerprint")
        .agg(*_aggregates())
    )


def _aggregates() -> list[Column]:
    from pyspark.sql import functions as fn

    return [
        fn.count("*").alias("letters"),
        fn.min("failed_at").alias("first_seen"),
        fn.max("failed_at").alias("last_seen"),
        fn.expr("min_by(job_id, struct(entry_ms, entry_seq))").alias("sample_job_id"),
        fn.expr("min_by(last_error, struct(entry_ms, entry_seq))").alias("sample_error"),
    ]
