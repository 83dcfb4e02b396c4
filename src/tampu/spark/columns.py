"""The columns of each stream: their Spark types and the Arrow types Spark expects for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

if TYPE_CHECKING:
    from tampu.spark.options import Payload, Stream

#: Spark's name of a type to Arrow's. Timestamps travel in UTC.
ARROW_TYPES: dict[str, pa.DataType] = {
    "STRING": pa.string(),
    "BINARY": pa.binary(),
    "BIGINT": pa.int64(),
    "TIMESTAMP": pa.timestamp("us", tz="UTC"),
}

_EVERYWHERE = {
    "queue": "STRING",
    "entry_id": "STRING",
    "entry_ms": "BIGINT",
    "entry_seq": "BIGINT",
    "job_id": "STRING",
    "name": "STRING",
    "attempt": "BIGINT",
    "created_at": "TIMESTAMP",
    "payload": "BINARY",
}
_OF_STREAM: dict[Stream, dict[str, str]] = {
    "events": {
        "event": "STRING",
        "ts": "TIMESTAMP",
        "duration_us": "BIGINT",
        "reason": "STRING",
        "backoff_ms": "BIGINT",
        "delay_ms": "BIGINT",
        "worker": "STRING",
        "extra": "STRING",
    },
    "dlq": {
        "source_id": "STRING",
        "reason": "STRING",
        "detail": "STRING",
        "error_type": "STRING",
        "last_error": "STRING",
        "traceback": "STRING",
        "attempts": "BIGINT",
        "worker": "STRING",
        "failed_at": "TIMESTAMP",
    },
    "jobs": {"max_attempts": "BIGINT", "backoff": "STRING"},
    "delayed": {"run_at": "TIMESTAMP", "max_attempts": "BIGINT", "backoff": "STRING"},
    "repeat": {
        "spec_key": "STRING",
        "pattern": "STRING",
        "tz": "STRING",
        "next_fire_at": "TIMESTAMP",
        "fired": "BIGINT",
        "fire_limit": "BIGINT",
        "start_after": "TIMESTAMP",
        "end_before": "TIMESTAMP",
        "missed_fires": "STRING",
    },
    "results": {"expires_at": "TIMESTAMP"},
}
#: What cannot be decoded keeps its bytes, and says why.
_TROUBLE = {"raw": "BINARY", "error": "STRING"}


def columns_of(stream: Stream, payload: Payload = "binary") -> dict[str, str]:
    """Name to Spark type, in order."""
    columns = {**_EVERYWHERE, **_OF_STREAM[stream], **_TROUBLE}
    if payload == "binary":
        return columns
    as_text: dict[str, str] = {}
    for name, kind in columns.items():
        as_text[name] = "STRING" if name == "payload" else kind
        if name == "payload":
            as_text["payload_raw"] = "BINARY"
    return as_text


def spark_schema(stream: Stream, payload: Payload = "binary") -> str:
    """The schema as DDL."""
    return ", ".join(f"`{name}` {kind}" for name, kind in columns_of(stream, payload).items())


def arrow_schema(stream: Stream, payload: Payload = "binary") -> pa.Schema:
    """The schema of the record batches."""
    return pa.schema([(name, ARROW_TYPES[kind]) for name, kind in columns_of(stream, payload).items()])
