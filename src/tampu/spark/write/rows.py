"""Encodes rows of a DataFrame as jobs: allowed columns, their types, and the encoding of a row.

Columns and types are checked before any row is read. Errors name the column and what is allowed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from tampu.base.checks import check_job_id, check_job_name, check_queue_name
from tampu.errors import ConfigError, EncodeError, Error
from tampu.spark.options import STREAMS
from tampu.spark.read.batch import columns_of
from tampu.wire.payload import encode_value
from tampu.wire.retry import BackoffSpec, JobRetryOverride
from tampu.wire.scan import REFUSALS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pyarrow as pa

    #: Column name to Spark's simple string of its type.
    ColumnTypes = dict[str, str]

#: Columns of a write to jobs and their types; `payload` has its own rules.
_JOB_COLUMNS = {
    "queue": ("string",),
    "name": ("string",),
    "job_id": ("string",),
    "run_at": ("timestamp",),
    "max_attempts": ("tinyint", "smallint", "int", "bigint"),
    "backoff": ("string",),
}
_LETTER_COLUMNS: dict[str, tuple[str, ...]] = {"queue": ("string",), "entry_id": ("string",), "name": ("string",)}
#: Columns that reads return and writes ignore: a table can be written back as it was read.
_OF_READS = frozenset(name for stream in STREAMS for name in columns_of(stream, "json"))
#: Types that MessagePack cannot represent exactly.
_UNFAITHFUL = ("decimal", "date", "interval", "timestamp_ntz", "variant", "void", "time(", "geometry", "geography")

_from_json = msgspec.json.Decoder().decode
_skip = msgspec.msgpack.Decoder(msgspec.Raw).decode


class JobRow(NamedTuple):
    """A job to add: its payload as MessagePack, and its other columns."""

    packed: bytes
    name: str = ""
    job_id: str | None = None
    run_at_ms: int | None = None
    retry: JobRetryOverride | None = None


@dataclass(frozen=True, slots=True)
class LetterRow:
    """A dead letter to replay; a payload or name of None keeps the original."""

    entry_id: str
    packed: bytes | None = None
    name: str | None = None


def check_job_columns(columns: ColumnTypes, *, has_queue_option: bool) -> None:
    """Check the columns of a write to jobs; `ConfigError` names the wrong one."""
    _check(columns, _JOB_COLUMNS, has_queue_option=has_queue_option)
    if "payload" not in columns:
        raise ConfigError(
            "column payload is missing: it holds the payload as JSON text (string), as MessagePack (binary), or as "
            f"a struct, map or array; the columns are {', '.join(columns) or 'none'}"
        )
    check_payload_type("payload", columns["payload"])


def check_letter_columns(columns: ColumnTypes, *, has_queue_option: bool) -> None:
    """Check the columns of a replay of dead letters."""
    _check(columns, _LETTER_COLUMNS, has_queue_option=has_queue_option)
    if "entry_id" not in columns:
        raise ConfigError("column entry_id is missing: the ID of the dead letter, as in a read of stream=dlq")
    if "payload" in columns:
        check_payload_type("payload", columns["payload"])


def _check(columns: ColumnTypes, allowed: dict[str, tuple[str, ...]], *, has_queue_option: bool) -> None:
    for name, kind in columns.items():
        if name == "payload":
            continue
        if name not in allowed:
            if name in _OF_READS:
                continue
            raise ConfigError(
                f"unknown column {name!r}; allowed are payload, {', '.join(allowed)}. Put the job's data into "
                "its payload: to_json(struct(...)) AS payload"
            )
        if kind not in allowed[name]:
            raise ConfigError(f"column {name} must be of type {' or '.join(allowed[name])}; got {kind}")
    if not has_queue_option and "queue" not in columns:
        raise ConfigError("there is neither an option queue nor a column queue: set the option or add the column")


def check_payload_type(name: str, kind: str) -> None:
    """Check that MessagePack can represent values of this type exactly."""
    for unfaithful in _UNFAITHFUL:
        if unfaithful in kind:
            raise ConfigError(
                f"column {name} is of type {kind}, and {unfaithful.rstrip('(')} has no faithful MessagePack form: cast "
                "it, or write to_json(...) AS payload"
            )
    if "map<" in kind and "map<string," not in kind:
        raise ConfigError(f"column {name} is of type {kind}: the keys of a map must be strings")


# --- encoding


def job_rows(
    batch: pa.RecordBatch, columns: ColumnTypes, default_name: str, default_queue: str | None
) -> Iterator[tuple[str, JobRow]]:
    """Yield (queue, job) of each row; `EncodeError` names the column and the row number."""
    lists = _lists(batch, ("queue", "name", "job_id", "run_at", "max_attempts", "backoff"))
    encode = payload_encoder(columns["payload"])
    queues, names, ids = lists["queue"], lists["name"], lists["job_id"]
    instants, limits, backoffs = lists["run_at"], lists["max_attempts"], lists["backoff"]
    payloads = batch.column("payload").to_pylist()
    if default_queue is not None and not any(lists.values()):  # nothing but payloads
        for row, value in enumerate(payloads):
            yield default_queue, JobRow(_encoded(encode, value, row), default_name)
        return
    for row, value in enumerate(payloads):
        packed = _encoded(encode, value, row)
        column = ""
        try:
            column = "queue"
            queue = (queues[row] if queues else None) or default_queue
            check_queue_name(queue, "it")
            column = "name"
            name = check_job_name((names[row] if names else None) or default_name, "it")
            column = "job_id"
            job_id = ids[row] if ids else None
            if job_id is not None:
                check_job_id(job_id, "it")
            column = "run_at"
            instant = instants[row] if instants else None
            column = "max_attempts"
            limit = limits[row] if limits else None
            retry = JobRetryOverride(limit) if limit is not None else None
            column = "backoff"
            if backoffs and backoffs[row] is not None:
                retry = JobRetryOverride(limit, BackoffSpec(**json.loads(backoffs[row])))
        except (Error, ValueError, TypeError) as error:
            raise EncodeError(f"column {column} of row {row}: {error}") from error
        due = None if instant is None else round(instant.timestamp() * 1000)
        yield queue or "", JobRow(packed, name, job_id, due, retry)


def letter_rows(
    batch: pa.RecordBatch, columns: ColumnTypes, default_queue: str | None
) -> Iterator[tuple[str, LetterRow]]:
    """Yield (queue, letter) of each row."""
    lists = _lists(batch, ("queue", "name", "payload", "entry_id"))
    encode = payload_encoder(columns.get("payload", "binary"))
    for row, entry_id in enumerate(lists["entry_id"]):
        if entry_id is None:
            raise EncodeError(f"column entry_id of row {row} is null")
        value = lists["payload"][row] if lists["payload"] else None
        packed = None if value is None else _encoded(encode, value, row)
        queue = (lists["queue"][row] if lists["queue"] else None) or default_queue
        yield (
            check_queue_name(queue, f"column queue of row {row}"),
            LetterRow(entry_id, packed, lists["name"][row] if lists["name"] else None),
        )


def payload_encoder(kind: str) -> Callable[[Any], bytes]:
    """Return the function that encodes values of this type as MessagePack."""
    if kind == "string":
        return lambda text: encode_value(None if text is None else _from_json(text))
    if kind == "binary":
        return _checked_msgpack
    return encode_value


def _checked_msgpack(packed: bytes | None) -> bytes:
    if packed is None:
        return b"\xc0"
    _skip(packed)
    return packed


def _encoded(encode: Callable[[Any], bytes], value: Any, row: int) -> bytes:
    try:
        return encode(value)
    except (Error, *REFUSALS) as error:
        raise EncodeError(
            f"column payload of row {row} cannot be encoded: {error} (a string must be JSON, a binary one MessagePack "
            "value)"
        ) from error


def _lists(batch: pa.RecordBatch, names: tuple[str, ...]) -> dict[str, list[Any]]:
    present = set(batch.schema.names)
    return {name: batch.column(name).to_pylist() if name in present else [] for name in names}
