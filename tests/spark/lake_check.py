"""Computes silver and gold from a server's raw events in Polars, to compare the lake's tables with row for row."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import polars as pl

from tampu.wire.dlq import decode_dlq_fields
from tampu.wire.envelope import decode_job
from tampu.wire.fingerprint import cluster_id, fingerprint
from tampu.wire.keys import QueueKeys

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: The last instant of Spark's calendar, in ms; later times are null.
MAX_MS = 253_402_300_799_999
PAGE = 5_000
CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
ULID = re.compile(f"[0-7][{CROCKFORD}]{{25}}")
YEAR_2000_MS, YEAR_2100_MS = 946_684_800_000, 4_102_444_800_000
#: Events that end a job.
ENDS = ["completed", "dlq", "cancelled"]
TEXTS = {"e": "event", "id": "job_id", "n": "name", "reason": "reason", "worker": "worker"}
ALL_NUMBERS = ("ts", "attempt", "created_at_ms", "duration_us", "backoff_ms", "delay_ms")
NUMBERS = {"ts": "ts", "attempt": "attempt", "created_at_ms": "created_at", "duration_us": "duration_us"}


def entries(client: Any, key: str) -> Iterator[tuple[bytes, list[bytes]]]:
    """Yield the entries of a stream, with fields and values in turn."""
    start = b"-"
    while page := client.execute_command("XRANGE", key, start, "+", "COUNT", PAGE, NEVER_DECODE=[]):
        for entry_id, fields in page:
            flat = [part for pair in fields.items() for part in pair] if isinstance(fields, dict) else fields
            yield entry_id, flat
        if len(page) < PAGE:
            return
        start = b"(" + page[-1][0]


def raw_events(client: Any, queues: list[str]) -> pl.DataFrame:
    """Return the events of queues as the server has them."""
    rows: list[dict[str, Any]] = []
    for queue in queues:
        for entry_id, fields in entries(client, QueueKeys(queue).events):
            flat = dict(zip(fields[::2], fields[1::2], strict=True))
            ms, seq = (min(int(part), 2**63 - 1) for part in entry_id.split(b"-"))
            row: dict[str, Any] = {"queue": queue, "entry_ms": ms, "entry_seq": seq}
            for field, column in TEXTS.items():
                value = flat.get(field.encode())
                row[column] = None if value is None else value.decode(errors="replace")
            for field, column in NUMBERS.items():
                row[column] = number(flat.get(field.encode()))
            row["is_broken"] = b"e" not in flat or any(
                field.encode() in flat and not is_valid(field, flat[field.encode()]) for field in ALL_NUMBERS
            )
            row["date"] = date_of(row)
            rows.append(row)
    kinds: dict[str, Any] = {"queue": pl.String, "entry_ms": pl.Int64, "entry_seq": pl.Int64, "is_broken": pl.Boolean}
    kinds["date"] = pl.String
    kinds |= dict.fromkeys(TEXTS.values(), pl.String) | dict.fromkeys(NUMBERS.values(), pl.Int64)
    events = pl.DataFrame(rows, schema=kinds).with_columns(name=pl.col("name").fill_null(""))
    for column in ("ts", "created_at"):
        in_range = pl.when(pl.col(column).is_between(0, MAX_MS)).then(pl.col(column) * 1000)
        events = events.with_columns(in_range.cast(pl.Datetime("us", "UTC")).alias(column))
    return events


def date_of(event: dict[str, Any]) -> str:
    """Return the partition of an event, by the table in docs/spark.md."""
    job_id = event["job_id"]
    if not job_id or event["event"] == "progress":
        return day(event["entry_ms"]) or "none"
    if ULID.fullmatch(job_id):
        ms = sum(CROCKFORD.index(letter) * 32 ** (9 - place) for place, letter in enumerate(job_id[:10]))
        if YEAR_2000_MS <= ms <= YEAR_2100_MS:
            return day(ms)
    created = day(event["created_at"])
    return f"c{created}" if created else "h00"


def day(ms: int | None) -> str:
    """Return the day of a time; an empty string if it is outside of Spark's calendar."""
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d") if ms is not None and 0 <= ms <= MAX_MS else ""


def number(value: bytes | None) -> int | None:
    """Return the number of a field; None if it is not one that a BIGINT column holds."""
    is_number = value is not None and value.isdigit() and int(value) < 2**63
    return int(value or 0) if is_number else None


def is_valid(field: str, value: bytes) -> bool:
    """Return whether a number is one, and a time within Spark's calendar."""
    found = number(value)
    return found is not None and (field not in ("ts", "created_at_ms") or found <= MAX_MS)


def expected_jobs(events: pl.DataFrame) -> pl.DataFrame:
    """Return silver: one row per job."""
    jobs = events.filter(pl.col("job_id").is_not_null() & (pl.col("job_id") != "") & (pl.col("event") != "progress"))
    jobs = jobs.sort("entry_ms", "entry_seq")
    is_end, failed = pl.col("event").is_in(ENDS), pl.col("event") == "failed"
    found = jobs.group_by("queue", "job_id", maintain_order=True).agg(
        name=pl.col("name").max(),
        created_at=pl.col("created_at").min(),
        first_active_at=pl.col("ts").filter(pl.col("event") == "active").min(),
        done_at=pl.col("ts").filter(is_end).max(),
        last_end=pl.col("event").filter(is_end).last(),
        last_event=pl.col("event").last(),
        failures=failed.sum().cast(pl.Int64),
        events=pl.len().cast(pl.Int64),
        last_error=pl.col("reason").filter(failed).last(),
        last_entry_ms=pl.col("entry_ms").max(),
    )
    outcome = pl.coalesce(pl.col("last_end").replace({"dlq": "dead"}), pl.col("last_event"))
    return found.with_columns(
        outcome=outcome,
        wait_ms=(pl.col("first_active_at") - pl.col("created_at")).dt.total_milliseconds(),
        total_ms=(pl.col("done_at") - pl.col("created_at")).dt.total_milliseconds(),
    ).drop("last_end", "last_event")


def expected_ends(events: pl.DataFrame, jobs: pl.DataFrame) -> pl.DataFrame:
    """Return one row per end of a job."""
    ends = events.filter(pl.col("event").is_in(ENDS) & pl.col("ts").is_not_null() & (pl.col("job_id") != ""))
    known = jobs.select(
        "queue", "job_id", "failures", "wait_ms", pl.col("name").alias("job_name"), pl.col("created_at").alias("born")
    )
    return ends.join(known, on=["queue", "job_id"]).select(
        "queue",
        "job_id",
        pl.col("job_name").alias("name"),
        "ts",
        outcome=pl.col("event").replace({"dlq": "dead"}),
        day=pl.col("ts").dt.strftime("%Y-%m-%d"),
        minute=pl.col("ts").dt.truncate("1m"),
        first_try=(pl.col("event") == "completed") & (pl.col("failures") == 0),
        total_ms=(pl.col("ts") - pl.col("born")).dt.total_milliseconds(),
        wait_ms="wait_ms",
    )


def expected_slo(ends: pl.DataFrame) -> pl.DataFrame:
    done = pl.col("outcome") == "completed"
    return ends.group_by("queue", "name", "day").agg(
        jobs=pl.len().cast(pl.Int64),
        completed=done.sum().cast(pl.Int64),
        dead=(pl.col("outcome") == "dead").sum().cast(pl.Int64),
        cancelled=(pl.col("outcome") == "cancelled").sum().cast(pl.Int64),
        first_try=pl.col("first_try").sum().cast(pl.Int64),
        **{
            f"within_{s}s": (done & (pl.col("total_ms") <= s * 1000)).fill_null(False).sum().cast(pl.Int64)
            for s in (1, 10, 60)
        },
    )


def expected_throughput(events: pl.DataFrame, ends: pl.DataFrame, jobs: pl.DataFrame) -> pl.DataFrame:
    names = jobs.select("queue", "job_id", pl.col("name").alias("job_name"))
    failed = events.filter((pl.col("event") == "failed") & pl.col("ts").is_not_null() & (pl.col("job_id") != "")).join(
        names, on=["queue", "job_id"]
    )
    failed = failed.select(
        "queue",
        pl.col("job_name").alias("name"),
        minute=pl.col("ts").dt.truncate("1m"),
        day=pl.col("ts").dt.strftime("%Y-%m-%d"),
        outcome=pl.lit("failed"),
    )
    rows = pl.concat([ends.select("queue", "name", "minute", "day", "outcome"), failed])
    return rows.group_by("queue", "name", "minute", "day").agg(
        completed=(pl.col("outcome") == "completed").sum().cast(pl.Int64),
        dead=(pl.col("outcome") == "dead").sum().cast(pl.Int64),
        cancelled=(pl.col("outcome") == "cancelled").sum().cast(pl.Int64),
        failures=(pl.col("outcome") == "failed").sum().cast(pl.Int64),
    )


def expected_latency(ends: pl.DataFrame) -> pl.DataFrame:
    """Return the percentiles of waits and totals; Spark interpolates between ranks as Polars does with `linear`."""
    ends = ends.filter(pl.col("outcome") != "cancelled")
    columns = {
        f"{what}_p{p}_ms": pl.col(f"{what}_ms").quantile(p / 100, "linear")
        for what in ("wait", "total")
        for p in (50, 95, 99)
    }
    return ends.group_by("queue", "name", "minute", "day").agg(jobs=pl.len().cast(pl.Int64), **columns)


def expected_failures(events: pl.DataFrame, jobs: pl.DataFrame) -> pl.DataFrame:
    """Return the runs that failed per minute and kind of error."""
    names = jobs.select("queue", "job_id", pl.col("name").alias("job_name"))
    failed = events.filter((pl.col("event") == "failed") & pl.col("ts").is_not_null() & (pl.col("job_id") != ""))
    kinds = pl.col("reason").map_elements(fingerprint, return_dtype=pl.String, skip_nulls=False)
    rows = failed.join(names, on=["queue", "job_id"]).select(
        "queue",
        pl.col("job_name").alias("name"),
        "reason",
        minute=pl.col("ts").dt.truncate("1m"),
        day=pl.col("ts").dt.strftime("%Y-%m-%d"),
        fingerprint=kinds,
    )
    return rows.group_by("queue", "name", "minute", "day", "fingerprint").agg(
        failures=pl.len().cast(pl.Int64), sample=pl.col("reason").min()
    )


def expected_clusters(client: Any, queues: list[str], jobs: pl.DataFrame) -> pl.DataFrame:
    """Return dead letters by what they have in common; none of them may have been removed."""
    rows: list[dict[str, Any]] = []
    for queue in queues:
        for entry_id, fields in entries(client, QueueKeys(queue).dlq):
            letter = decode_dlq_fields(entry_id.decode(), fields)
            shape = fingerprint(letter.error if letter.error is not None else letter.detail)
            cluster = cluster_id(letter.reason, letter.error_type, shape)
            job_id = decode_job(letter.payload).id
            rows.append({"queue": queue, "name": letter.name, "cluster": cluster, "job_id": job_id})
    letters = pl.DataFrame(rows, schema=dict.fromkeys(("queue", "name", "cluster", "job_id"), pl.String))
    # Later letters of a job replace earlier ones.
    letters = letters.with_columns(is_newest=pl.col("job_id").is_last_distinct().over("queue"))
    known = letters.join(jobs.select("queue", "job_id", "outcome"), on=["queue", "job_id"], how="left")
    is_dead = pl.col("is_newest") & (pl.col("outcome").fill_null("dead") == "dead")
    return known.group_by("queue", "name", "cluster").agg(
        letters=pl.len().cast(pl.Int64), dead=is_dead.sum().cast(pl.Int64)
    )


def differences(client: Any, queues: list[str], lake: Path) -> dict[str, int]:
    """Return per table how many rows differ from those computed here; an empty mapping if none do."""
    events = raw_events(client, queues)
    jobs = expected_jobs(events)
    ends = expected_ends(events, jobs)
    expected = {
        "silver/jobs": jobs,
        "gold/slo": expected_slo(ends),
        "gold/throughput": expected_throughput(events, ends, jobs),
        "gold/latency": expected_latency(ends),
        "gold/ends": ends.select("queue", "job_id", "name", "outcome", "day", "minute", "total_ms"),
        "gold/failures": expected_failures(events, jobs),
        "gold/dlq_clusters": expected_clusters(client, queues, jobs),
    }
    found: dict[str, int] = {}
    for table, wanted in expected.items():
        if not (lake / table / "_delta_log").is_dir():
            if wanted.height:
                found[table] = wanted.height
            continue
        actual = pl.scan_delta(str(lake / table)).select(wanted.columns).collect()
        order = [
            name
            for name in ("queue", "job_id", "name", "day", "minute", "outcome", "total_ms", "fingerprint", "cluster")
            if name in wanted.columns
        ]
        rounded = [pl.col(name).round(6) for name, kind in wanted.schema.items() if kind.is_float()]
        one, other = (frame.with_columns(rounded).sort(order, nulls_last=True) for frame in (wanted, actual))
        if not one.equals(other):
            found[table] = max(abs(one.height - other.height), len(set(one.rows()) ^ set(other.rows())), 1)
    landed = pl.scan_delta(str(lake / "bronze/events")).select("queue", "entry_id").collect()
    if not landed.height == landed.unique().height == events.height:
        found["bronze/events"] = abs(landed.height - events.height) + landed.height - landed.unique().height
    broken = events.filter("is_broken").group_by("queue", day="date").agg(entries=pl.len().cast(pl.Int64))
    counted = pl.scan_delta(str(lake / "gold/undecodable")).filter(pl.col("stream") == "events")
    counted = counted.group_by("queue", "day").agg(pl.col("entries").sum())
    if differing := set(broken.rows()) ^ set(counted.select(broken.columns).collect().rows()):
        found["gold/undecodable"] = len(differing)
    return found
