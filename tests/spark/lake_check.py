"""Computes the tables of a lake in Polars from what the server has, to compare them row for row, in every column.

Entries are decoded here, by the wire format, and not with tampu's own code: a fault there would be on both sides.

| left out | why |
|---|---|
| text of `error` for letters whose envelope cannot be decoded | it is that of the MessagePack library |
| `changed_round`, and columns of silver that start with `_` | they follow from rounds, not from events |
| `gold/violations`: `checked_at`, and the samples of delayed jobs | the time of the run; their order is not defined |
| `gold/violations`: the sample of what cannot be decoded | the text of the MessagePack library |
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import msgpack
import polars as pl

from tampu.spark.lake.store import Store
from tampu.wire.keys import QueueKeys

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    Row = dict[str, Any]
    #: Job name to field to rules, as in a contract.
    Rules = Mapping[str, Mapping[str, Mapping[str, Any]]]

#: The last instant of Spark's calendar, in ms; later times are null.
MAX_MS = 253_402_300_799_999
MAX_BIGINT = 2**63 - 1
PAGE = 5_000
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
ULID = re.compile(f"[0-7][{CROCKFORD}]{{25}}")
YEAR_2000_MS, YEAR_2100_MS = 946_684_800_000, 4_102_444_800_000
#: Events that end a job.
ENDS = ["completed", "dlq", "cancelled"]
#: Relative difference of percentiles that are equal: engines interpolate in different orders.
TOLERANCE = 1e-12
#: What varies from one error to the next, and what stands for it.
VARYING = (
    (r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}", "<uuid>"),
    (rf"(?<![0-9A-Za-z_])[{CROCKFORD}]{{26}}(?![0-9A-Za-z_])", "<ulid>"),
    ("0x[0-9a-fA-F]+", "<hex>"),
    ("'[^']*'|\"[^\"]*\"", "<text>"),
    ("[0-9]+", "<n>"),
)

TIME = pl.Datetime("us", "UTC")
TEXT, NUMBER, BYTES = pl.String, pl.Int64, pl.Binary
ENTRY: dict[str, Any] = {
    "queue": TEXT,
    "entry_id": TEXT,
    "entry_ms": NUMBER,
    "entry_seq": NUMBER,
    "job_id": TEXT,
    "name": TEXT,
}
ENTRY |= {"attempt": NUMBER, "created_at": TIME}
TROUBLE = {"raw": BYTES, "error": TEXT, "date": TEXT}
EVENTS: dict[str, Any] = {
    **ENTRY,
    "payload": BYTES,
    "event": TEXT,
    "ts": TIME,
    "duration_us": NUMBER,
    "reason": TEXT,
    "backoff_ms": NUMBER,
    "delay_ms": NUMBER,
    "worker": TEXT,
    "extra": TEXT,
    **TROUBLE,
}
LETTERS: dict[str, Any] = {
    **ENTRY,
    "payload": TEXT,
    "payload_raw": BYTES,
    "source_id": TEXT,
    "reason": TEXT,
    "detail": TEXT,
    "error_type": TEXT,
    "last_error": TEXT,
    "traceback": TEXT,
    "attempts": NUMBER,
    "worker": TEXT,
    "failed_at": TIME,
    **TROUBLE,
}
REPAIRS: dict[str, Any] = {
    "repair": TEXT,
    "queue": TEXT,
    "cluster": TEXT,
    "sql": TEXT,
    "entry_id": TEXT,
    "job_id": TEXT,
    "name": TEXT,
    "is_canary": pl.Boolean,
    "before": TEXT,
    "after": TEXT,
    "repaired_ms": NUMBER,
    "repaired_at": TIME,
}
VIOLATIONS: dict[str, Any] = {
    "queue": TEXT,
    "stream": TEXT,
    "name": TEXT,
    "field": TEXT,
    "rule": TEXT,
    "jobs": NUMBER,
    "sample_job_id": TEXT,
    "sample": TEXT,
}
#: Field of an event, its column and whether it is a number, in the order in which the first fault is reported.
EVENT_FIELDS = (
    *(("e", "event", False), ("id", "job_id", False), ("n", "name", False), ("ts", "ts", True)),
    *(("attempt", "attempt", True), ("created_at_ms", "created_at", True), ("duration_us", "duration_us", True)),
    *(("reason", "reason", False), ("backoff_ms", "backoff_ms", True), ("delay_ms", "delay_ms", True)),
    ("worker", "worker", False),
)
#: Columns that identify a row.
KEYS = {
    "bronze/events": ("queue", "entry_id"),
    "bronze/dlq": ("queue", "entry_id"),
    "bronze/repairs": ("repair", "queue", "entry_id"),
    "silver/jobs": ("queue", "job_id"),
    "silver/jobs end_log": ("queue", "job_id", "entry_ms", "entry_seq"),
    "silver/jobs failure_log": ("queue", "job_id", "entry_ms", "entry_seq"),
    "gold/ends": ("queue", "job_id", "entry_ms", "entry_seq"),
    "gold/failures": ("queue", "name", "minute", "fingerprint"),
    "gold/throughput": ("queue", "name", "minute"),
    "gold/latency": ("queue", "name", "minute"),
    "gold/slo": ("queue", "name", "day"),
    "gold/undecodable": ("queue", "day", "stream", "kind"),
    "gold/dlq_clusters": ("queue", "name", "reason", "error_type", "fingerprint"),
    "gold/repairs": ("repair", "queue", "entry_id"),
    "gold/violations": ("queue", "stream", "name", "field", "rule"),
}


# --- entries


def entries(client: Any, key: str) -> Iterator[tuple[bytes, list[bytes]]]:
    """Yield the entries of a stream, with fields and values in turn."""
    # In a script: for the command itself the client returns a mapping, which has each field once.
    script = "return redis.call('XRANGE', KEYS[1], ARGV[1], '+', 'COUNT', ARGV[2])"
    start = b"-"
    while page := client.eval(script, 1, key, start, PAGE):
        yield from page
        if len(page) < PAGE:
            return
        start = b"(" + page[-1][0]


def first_of_each(fields: Sequence[bytes]) -> dict[bytes, bytes]:
    """Return the values by field; of a field that appears twice, the first one."""
    found: dict[bytes, bytes] = {}
    for field, value in zip(fields[::2], fields[1::2], strict=True):
        found.setdefault(field, value)
    return found


def text(value: bytes | None) -> str | None:
    return None if value is None else value.decode(errors="replace")


def number(value: bytes | None) -> int | None:
    """Return the number of a field; None if it is not one that a BIGINT column holds."""
    is_number = value is not None and value.isdigit() and len(value) < 20 and int(value) <= MAX_BIGINT
    return int(value or 0) if is_number else None


def entry_of(queue: str, entry_id: bytes) -> Row:
    ms, seq = (min(int(part), MAX_BIGINT) for part in entry_id.split(b"-"))
    return {"queue": queue, "entry_id": entry_id.decode(), "entry_ms": ms, "entry_seq": seq, "raw": None, "error": None}


def fail(row: Row, error: str, raw: bytes) -> None:
    """Note what is wrong with an entry; the first fault counts."""
    if row["error"] is None:
        row |= {"error": error, "raw": raw}


def instant(row: Row, column: str, ms: int | None) -> datetime | None:
    """Return a time; one that is outside of Spark's calendar is a fault of its entry."""
    if ms is None or 0 <= ms <= MAX_MS:
        return None if ms is None else EPOCH + timedelta(milliseconds=ms)
    fail(row, f"{column} of {ms} ms is beyond the year 9999", b"")
    return None


def day(at: datetime | None) -> str:
    return "" if at is None else at.date().isoformat()


def date_of(row: Row) -> str:
    """Return the partition of an entry, by the table in docs/spark.md."""
    job_id = row["job_id"]
    if job_id is None or row.get("event") == "progress":
        return day(EPOCH + timedelta(milliseconds=row["entry_ms"])) if row["entry_ms"] <= MAX_MS else "none"
    if ULID.fullmatch(job_id):
        ms = sum(CROCKFORD.index(letter) * 32 ** (9 - place) for place, letter in enumerate(job_id[:10]))
        if YEAR_2000_MS <= ms <= YEAR_2100_MS:
            return day(EPOCH + timedelta(milliseconds=ms))
    created = day(row["created_at"])
    return f"c{created}" if created else "h00"


def raw_events(client: Any, queues: Iterable[str]) -> pl.DataFrame:
    """Return the events of queues: `bronze/events`."""
    rows: list[Row] = []
    known = {field.encode() for field, _, _ in EVENT_FIELDS}
    for queue in queues:
        for entry_id, fields in entries(client, QueueKeys(queue).events):
            values, row = first_of_each(fields), entry_of(queue, entry_id)
            packed = msgpack.packb(fields)
            if b"e" not in values:
                fail(row, "no field e: not an event", packed)
            for field, column, is_number in EVENT_FIELDS:
                value = values.get(field.encode())
                row[column] = number(value) if is_number else text(value)
                if is_number and value is not None and row[column] is None:
                    fail(row, f"{column} is not a number: {value[:40]!r}", packed)
                if column in ("ts", "created_at"):
                    row[column] = instant(row, column, row[column])
            row |= {"job_id": row["job_id"] or None, "name": row["name"] or "", "payload": None}
            others = {text(field): text(value) for field, value in values.items() if field not in known}
            row["extra"] = json.dumps(others, ensure_ascii=False, separators=(",", ":")) if others else None
            row["date"] = date_of(row)
            rows.append(row)
    return pl.DataFrame(rows, schema=EVENTS)


def raw_letters(client: Any, queues: Iterable[str]) -> pl.DataFrame:
    """Return the dead letters of queues: `bronze/dlq`. None of them may have been removed."""
    rows: list[Row] = []
    texts = {"detail": "detail", "error_type": "error_type", "error": "last_error", "traceback": "traceback"}
    texts["worker"] = "worker"
    for queue in queues:
        for entry_id, fields in entries(client, QueueKeys(queue).dlq):
            values, row = first_of_each(fields), entry_of(queue, entry_id)
            envelope = values.get(b"d", b"")
            row |= decoded(envelope)
            if "job_id" not in row:
                fail(row, "", envelope or msgpack.packb(fields))
                row["job_id"] = None
            row["created_at"] = instant(row, "created_at", row.get("created_at"))
            row |= {column: text(values.get(field.encode())) for field, column in texts.items()}
            row |= {column: text(values.get(column.encode(), b"")) for column in ("source_id", "reason")}
            row["name"] = exact_text(values.get(b"n", b"")) or ""
            row["attempts"] = number(values.get(b"attempts"))
            failed_at = values.get(b"ts", b"")
            is_number = failed_at.isdigit() and len(failed_at) <= 20
            row["failed_at"] = instant(row, "failed_at", int(failed_at) if is_number else None)
            row["date"] = date_of(row)
            rows.append({column: row.get(column) for column in LETTERS})
    return pl.DataFrame(rows, schema=LETTERS)


def exact_text(value: bytes) -> str | None:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return None


def decoded(envelope: bytes) -> Row:
    """Return the columns of a job: `[id, payload, created_at_ms, attempt]` and perhaps its retry settings."""
    try:
        found = msgpack.unpackb(envelope)
    except ValueError:
        return {}
    if not isinstance(found, list) or len(found) not in (4, 5) or not isinstance(found[0], str):
        return {}
    job_id, packed, created_at, attempt = found[:4]
    if not isinstance(packed, bytes) or not 0 <= attempt < 2**32:
        return {}
    as_text = json_of(packed)
    return {
        "job_id": job_id,
        "created_at": created_at,
        "attempt": attempt,
        "payload": as_text,
        "payload_raw": packed if as_text is None else None,
    }


def json_of(packed: bytes) -> str | None:
    """Return a payload as JSON; None if JSON cannot represent it."""

    def is_exact(value: Any) -> bool:
        if isinstance(value, dict):
            return all(isinstance(key, str) and is_exact(item) for key, item in value.items())
        if isinstance(value, list):
            return all(map(is_exact, value))
        if isinstance(value, float):
            return math.isfinite(value)
        return value is None or isinstance(value, str | int)

    try:
        value = msgpack.unpackb(packed, strict_map_key=False)
    except ValueError:
        return None
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")) if is_exact(value) else None


# --- silver


def counted(events: pl.DataFrame) -> pl.DataFrame:
    """Return the events that say something about a job, in order."""
    is_counted = pl.col("job_id").is_not_null() & (pl.col("event") != "progress")
    return events.filter(is_counted).sort("queue", "entry_ms", "entry_seq")


def expected_jobs(events: pl.DataFrame) -> pl.DataFrame:
    """Return silver: one row per job, without its logs."""
    is_end, failed, dead = pl.col("event").is_in(ENDS), pl.col("event") == "failed", pl.col("event") == "dlq"
    ran = pl.col("event").is_in(["completed", "failed"])
    total = pl.col("duration_us").cast(pl.Int128).sum()
    found = events.group_by("queue", "job_id", maintain_order=True).agg(
        date=pl.col("date").min(),
        name=pl.col("name").max(),
        created_at=pl.col("created_at").min(),
        first_active_at=pl.col("ts").filter(pl.col("event") == "active").min(),
        first_ended_at=pl.col("ts").filter(is_end).min(),
        done_at=pl.col("ts").filter(is_end).max(),
        first_failed_at=pl.col("ts").filter(failed).min(),
        last_failed_at=pl.col("ts").filter(failed).max(),
        last_end=pl.col("event").filter(is_end).last(),
        last_event=pl.col("event").last(),
        attempts=pl.col("attempt").filter(is_end | failed).max(),
        failures=failed.sum().cast(pl.Int64),
        run_us=pl.col("duration_us").filter(ran).last(),
        # Null if no event has a duration, and if their sum is more than the column holds.
        total_run_us=pl.when(pl.col("duration_us").count() > 0, total <= MAX_BIGINT).then(total),
        last_error=pl.col("reason").filter(failed).last(),
        dlq_reason=pl.col("reason").filter(dead).last(),
        worker=pl.col("worker").drop_nulls().last(),
        events=pl.len().cast(pl.Int64),
        last_entry_ms=pl.col("entry_ms").max(),
    )
    outcome = pl.coalesce(pl.col("last_end").replace({"dlq": "dead"}), pl.col("last_event"))
    return found.with_columns(
        pl.col("total_run_us").cast(pl.Int64),
        outcome=outcome,
        wait_ms=(pl.col("first_active_at") - pl.col("created_at")).dt.total_milliseconds(),
        total_ms=(pl.col("done_at") - pl.col("created_at")).dt.total_milliseconds(),
    ).drop("last_end", "last_event")


def expected_log(events: pl.DataFrame, kinds: Sequence[str], columns: Sequence[str]) -> pl.DataFrame:
    """Return a log of silver, one row per entry."""
    of_kind = events.filter(pl.col("event").is_in(kinds))
    return of_kind.select("queue", "job_id", "ts", *columns, "entry_ms", "entry_seq")


# --- gold


def with_minute(rows: pl.DataFrame, jobs: pl.DataFrame) -> pl.DataFrame:
    """Add what is known about the jobs of events, and the minute and the day; events without a time do not count."""
    known = jobs.select(
        *("queue", "job_id", "failures", "wait_ms"),
        job_name=pl.col("name"),
        born=pl.col("created_at"),
    )
    return (
        rows.filter(pl.col("ts").is_not_null())
        .join(known, on=["queue", "job_id"])
        .with_columns(
            name=pl.col("job_name"), minute=pl.col("ts").dt.truncate("1m"), day=pl.col("ts").dt.strftime("%Y-%m-%d")
        )
    )


def expected_ends(events: pl.DataFrame, jobs: pl.DataFrame) -> pl.DataFrame:
    """Return one row per end of a job."""
    return with_minute(events.filter(pl.col("event").is_in(ENDS)), jobs).select(
        *("queue", "job_id", "name", "attempt", "reason", "wait_ms", "entry_ms", "entry_seq", "day", "minute"),
        ended_at="ts",
        outcome=pl.col("event").replace({"dlq": "dead"}),
        created_at="born",
        run_us="duration_us",
        total_ms=(pl.col("ts") - pl.col("born")).dt.total_milliseconds(),
        is_first_try=(pl.col("event") == "completed") & (pl.col("failures") == 0),
    )


def count_of(condition: pl.Expr) -> pl.Expr:
    return condition.fill_null(value=False).sum().cast(pl.Int64)


def of_outcome(outcome: str) -> pl.Expr:
    return count_of(pl.col("outcome") == outcome)


def expected_slo(ends: pl.DataFrame) -> pl.DataFrame:
    done = pl.col("outcome") == "completed"
    return ends.group_by("queue", "name", "day").agg(
        jobs=pl.len().cast(pl.Int64),
        completed=of_outcome("completed"),
        dead=of_outcome("dead"),
        cancelled=of_outcome("cancelled"),
        first_try=count_of(pl.col("is_first_try")),
        **{f"within_{s}s": count_of(done & (pl.col("total_ms") <= s * 1000)) for s in (1, 10, 60)},
    )


def expected_throughput(ends: pl.DataFrame, failed: pl.DataFrame) -> pl.DataFrame:
    columns = ["queue", "name", "minute", "day"]
    rows = pl.concat([ends.select(*columns, "outcome"), failed.select(*columns, outcome=pl.lit("failed"))])
    return rows.group_by(columns).agg(
        completed=of_outcome("completed"),
        dead=of_outcome("dead"),
        cancelled=of_outcome("cancelled"),
        failures=of_outcome("failed"),
    )


def expected_latency(ends: pl.DataFrame) -> pl.DataFrame:
    """Return the percentiles of waits, runs and totals, interpolated between the two nearest ranks."""
    ends = ends.filter(pl.col("outcome") != "cancelled").with_columns(run_ms=pl.col("run_us") / 1000)
    columns = {
        f"{what}_p{p}_ms": pl.col(f"{what}_ms").quantile(p / 100, "linear")
        for what in ("wait", "run", "total")
        for p in (50, 95, 99)
    }
    return ends.group_by("queue", "name", "minute", "day").agg(jobs=pl.len().cast(pl.Int64), **columns)


def fingerprint(error: str | None) -> str:
    """Return an error without what varies."""
    shape = error or ""
    for pattern, replacement in VARYING:
        shape = re.sub(pattern, replacement, shape, flags=re.ASCII)
    return shape[:200].strip(" \t\n\v\f\r")


def with_fingerprint(rows: pl.DataFrame, column: str | pl.Expr, name: str) -> pl.DataFrame:
    """Add the fingerprints of a column."""
    texts = rows.select(column).to_series() if isinstance(column, pl.Expr) else rows[column]
    shapes = {error: fingerprint(error) for error in texts.unique()}
    return rows.with_columns(pl.Series(name, [shapes[error] for error in texts], TEXT))


def expected_failures(failed: pl.DataFrame) -> pl.DataFrame:
    """Return the runs that failed per minute and kind of error."""
    rows = with_fingerprint(failed, "reason", "fingerprint")
    return rows.group_by("queue", "name", "minute", "day", "fingerprint").agg(
        failures=pl.len().cast(pl.Int64), sample=pl.col("reason").min()
    )


def cluster_of(reason: str | None, error_type: str | None, shape: str) -> str:
    parts = [part for part in (reason, error_type, shape) if part is not None]
    return hashlib.sha256("|".join(parts).encode()).hexdigest()[:8]


def expected_clusters(letters: pl.DataFrame, jobs: pl.DataFrame) -> pl.DataFrame:
    """Return dead letters by what they have in common."""
    rows = with_fingerprint(letters, pl.coalesce("last_error", "detail"), "fingerprint")
    shapes = rows.select("reason", "error_type", "fingerprint").rows()
    rows = rows.with_columns(pl.Series("cluster", [cluster_of(*shape) for shape in shapes], TEXT))
    # Later letters of a job replace earlier ones.
    is_newest = pl.col("job_id").is_null() | pl.col("job_id").is_last_distinct().over("queue")
    rows = rows.sort("queue", "entry_ms", "entry_seq").with_columns(is_newest=is_newest)
    rows = rows.join(
        jobs.select("queue", "job_id", "outcome"), on=["queue", "job_id"], how="left", maintain_order="left"
    )
    is_dead = pl.col("is_newest") & (pl.col("outcome").fill_null("dead") == "dead")
    return rows.group_by("queue", "name", "cluster", "reason", "error_type", "fingerprint", maintain_order=True).agg(
        letters=pl.len().cast(pl.Int64),
        first_seen=pl.col("failed_at").min(),
        last_seen=pl.col("failed_at").max(),
        sample_job_id=pl.col("job_id").first(),
        sample_error=pl.col("last_error").first(),
        dead=is_dead.sum().cast(pl.Int64),
    )


def expected_undecodable(streams: Mapping[str, pl.DataFrame]) -> pl.DataFrame:
    """Return the entries that could not be decoded, by kind of error."""
    columns = ("queue", "date", "entry_id", "error")
    rows = pl.concat([frame.select(*columns, stream=pl.lit(stream)) for stream, frame in streams.items()])
    rows = with_fingerprint(rows.filter(pl.col("error").is_not_null()), "error", "kind")
    return rows.group_by("queue", "stream", "kind", day="date").agg(
        entries=pl.len().cast(pl.Int64), sample=pl.col("error").min(), sample_entry_id=pl.col("entry_id").min()
    )


def expected_repairs(repaired: pl.DataFrame, ends: pl.DataFrame) -> pl.DataFrame:
    """Return repaired letters with the first end of their jobs since the repair."""
    columns = ["outcome", "ended_at", "reason", "attempt", "run_us"]
    after = ends.select("queue", "job_id", "entry_ms", "entry_seq", *columns).sort("entry_ms", "entry_seq")
    keys = ["repair", "queue", "entry_id"]
    first = (
        repaired.select(*keys, "job_id", "repaired_ms")
        .join(after, on=["queue", "job_id"], maintain_order="right")
        .filter(pl.col("entry_ms") >= pl.col("repaired_ms"))
        .unique(keys, keep="first", maintain_order=True)
    )
    rows = repaired.drop("repaired_ms").join(first.select(*keys, *columns), on=keys, how="left")
    return rows.with_columns(pl.col("outcome").fill_null("pending"))


def expected_violations(client: Any, queues: Iterable[str], rules: Rules) -> pl.DataFrame:
    """Return the payloads on the server that break a contract, or that cannot be decoded.

    Knows the rules `required`, `type`, `min` and `max`.
    """
    found: dict[tuple[str, ...], Row] = {}
    for queue in queues:
        keys = QueueKeys(queue)
        jobs: list[tuple[str, str, bytes]] = []
        for stream, key in (("jobs", keys.stream), ("dlq", keys.dlq)):
            for _, fields in entries(client, key):
                values = first_of_each(fields)
                jobs.append((stream, exact_text(values.get(b"n", b"")) or "", values.get(b"d", b"")))
        for member in client.zrange(keys.delayed, 0, -1):
            end = 4 + int.from_bytes(member[:4], "little")
            jobs.append(("delayed", member[4:end].decode(), member[end:]))
        for stream, name, envelope in jobs:
            if name not in rules:
                continue
            job_id = decoded(envelope).get("job_id")
            payload: Any = None
            broken = [("", "undecodable")]
            if job_id is not None:
                with contextlib.suppress(ValueError):
                    payload = msgpack.unpackb(msgpack.unpackb(envelope)[1], strict_map_key=False)
                    broken = [*broken_rules(rules[name], payload)]
            for field, rule in broken:
                row = found.setdefault(
                    (queue, stream, name, field, rule),
                    {
                        "queue": queue,
                        "stream": stream,
                        "name": name,
                        "field": field,
                        "rule": rule,
                        "jobs": 0,
                        "sample_job_id": job_id or "",
                        "sample": repr(payload.get(field) if isinstance(payload, dict) else payload)[:200],
                    },
                )
                row["jobs"] += 1
    return pl.DataFrame(list(found.values()), schema=VIOLATIONS)


def broken_rules(fields: Mapping[str, Mapping[str, Any]], payload: Any) -> Iterator[tuple[str, str]]:
    """Yield field and rule, the first that is broken of each field."""
    types: dict[str, Any] = {"string": str, "integer": int, "number": (int, float)}
    if not isinstance(payload, dict):
        yield "", "type"
        return
    for field, rules in fields.items():
        if field not in payload:
            if rules.get("required", True):
                yield field, "required"
            continue
        value = payload[field]
        measure = len(value) if isinstance(value, str | bytes | list) else value
        if "type" in rules and (isinstance(value, bool) or not isinstance(value, types[rules["type"]])):
            yield field, "type"
        elif "min" in rules and measure < rules["min"]:
            yield field, "min"
        elif "max" in rules and measure > rules["max"]:
            yield field, "max"


# --- comparing

#: Logs of silver: the events in them, and their columns besides the time and the entry.
LOGS = {
    "end_log": (ENDS, ("event", "attempt", "reason", "duration_us")),
    "failure_log": (["failed"], ("attempt", "reason")),
}


def differences(
    client: Any,
    queues: Sequence[str],
    lake: Path | Store,
    *,
    repairs: Sequence[Row] | None = None,
    rules: Rules | None = None,
) -> dict[str, str]:
    """Return per table how it differs from the one computed here; an empty mapping if none does.

    `repairs` are the rows of `bronze/repairs`, which no stream holds; without them the table is taken as it is.
    `rules` are the contracts of the pipeline.
    """
    stored = stored_tables(lake)
    expected = expected_tables(client, queues, stored, repairs=repairs, rules=rules)
    found = {table: difference(rows, stored.get(table), KEYS[table]) for table, rows in expected.items()}
    return {table: said for table, said in found.items() if said}


def stored_tables(lake: Path | Store) -> dict[str, pl.DataFrame]:
    """Return the tables of a lake at their latest versions, without what is not compared. Each log is a table."""
    stores = {table: Store.of(lake) / table for table in KEYS}
    found = {
        table: pl.read_delta(store.uri, storage_options=store.delta_options)
        for table, store in stores.items()
        if any(store.list("_delta_log"))
    }
    if (jobs := found.get("silver/jobs")) is not None:
        for log in LOGS:
            rows = jobs.filter(pl.col(log).list.len() > 0).select("queue", "job_id", log)
            found[f"silver/jobs {log}"] = rows.explode(log).unnest(log)
        found["silver/jobs"] = jobs.drop(*LOGS, *(name for name in jobs.columns if name.startswith("_")))
    for table in ("silver/jobs", "gold/ends"):
        if table in found:
            found[table] = found[table].drop("changed_round")
    if "gold/violations" in found:
        found["gold/violations"] = without_samples(found["gold/violations"].drop("checked_at"))
    return found


def expected_tables(
    client: Any,
    queues: Sequence[str],
    stored: Mapping[str, pl.DataFrame],
    *,
    repairs: Sequence[Row] | None = None,
    rules: Rules | None = None,
) -> dict[str, pl.DataFrame]:
    """Return the tables by their names, see `differences`."""
    events, letters = raw_events(client, queues), raw_letters(client, queues)
    if "bronze/dlq" in stored:
        letters = with_errors_of(letters, stored["bronze/dlq"])
    told = counted(events)
    jobs = expected_jobs(told)
    ends = expected_ends(told, jobs)
    failed = with_minute(told.filter(pl.col("event") == "failed"), jobs)
    repaired = stored.get("bronze/repairs", pl.DataFrame(schema=REPAIRS))
    if repairs is not None:
        repaired = pl.DataFrame(repairs, schema=REPAIRS)
    found = {
        "bronze/events": events,
        "bronze/dlq": letters,
        "bronze/repairs": repaired,
        "silver/jobs": jobs,
        **{f"silver/jobs {log}": expected_log(told, *of_log) for log, of_log in LOGS.items()},
        "gold/ends": ends,
        "gold/failures": expected_failures(failed),
        "gold/throughput": expected_throughput(ends, failed),
        "gold/latency": expected_latency(ends),
        "gold/slo": expected_slo(ends),
        "gold/undecodable": expected_undecodable({"events": events, "dlq": letters}),
        "gold/dlq_clusters": expected_clusters(letters, jobs),
        "gold/repairs": expected_repairs(repaired, ends),
    }
    if rules is not None:
        found["gold/violations"] = without_samples(expected_violations(client, queues, rules))
    return found


def without_samples(violations: pl.DataFrame) -> pl.DataFrame:
    """Remove the samples of delayed jobs, which have no order, and errors with the text of the MessagePack library."""
    is_ordered = pl.col("stream") != "delayed"
    is_ours = is_ordered & (pl.col("rule") != "undecodable")
    return violations.with_columns(
        pl.when(is_ordered).then("sample_job_id").alias("sample_job_id"),
        pl.when(is_ours).then("sample").alias("sample"),
    )


def with_errors_of(letters: pl.DataFrame, stored: pl.DataFrame) -> pl.DataFrame:
    """Take the text of errors that depends on the MessagePack library from the lake, where there is one."""
    texts = stored.select("queue", "entry_id", said="error").unique(["queue", "entry_id"])
    joined = letters.join(texts, on=["queue", "entry_id"], how="left", maintain_order="left")
    error = pl.when(pl.col("error") == "").then(pl.coalesce("said", "error")).otherwise("error")
    return joined.with_columns(error=error).drop("said")


def difference(wanted: pl.DataFrame, actual: pl.DataFrame | None, keys: Sequence[str]) -> str:
    """Say how two frames differ: rows that one lacks, doubled rows, and columns with other values."""
    if actual is None:
        return f"missing table of rows: {wanted.height:,}" if wanted.height else ""
    if unlike := set(wanted.columns) ^ set(actual.columns):
        return f"columns of only one side: {', '.join(sorted(unlike))}"
    kinds = {name: (kind, actual.schema[name]) for name, kind in wanted.schema.items() if actual.schema[name] != kind}
    if kinds:
        return f"types: {kinds}"
    said: Counter[str] = Counter()
    for side, frame in (("expected", wanted), ("in the lake", actual)):
        said[f"doubled rows {side}"] = frame.height - frame.unique(keys).height
    wanted, actual = wanted.unique(keys), actual.unique(keys).select(wanted.columns)
    said["missing rows"] = wanted.join(actual, on=list(keys), how="anti", nulls_equal=True).height
    said["unexpected rows"] = actual.join(wanted, on=list(keys), how="anti", nulls_equal=True).height
    both = wanted.join(actual, on=list(keys), how="inner", nulls_equal=True, suffix=" in the lake")
    for name, kind in wanted.schema.items():
        if name in keys:
            continue
        one, other = pl.col(name), pl.col(f"{name} in the lake")
        is_other = one.ne_missing(other)
        if kind.is_float():
            is_other &= ((one - other).abs() > TOLERANCE * one.abs()).fill_null(value=True)
        unlike_rows = both.filter(is_other)
        if unlike_rows.height:
            example = unlike_rows.select(*keys, one, other).row(0)
            said[f"rows with another {name}, such as {example}"] = unlike_rows.height
    return "; ".join(f"{what}: {count:,}" for what, count in said.items() if count)
