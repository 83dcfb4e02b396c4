"""Builds one Arrow batch: the columns of each stream, undecodable rows, payloads as bytes or JSON text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tampu.wire.payload import decode_value
from tampu.wire.scan import REFUSALS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tampu.spark.options import Payload, Stream

#: Spark's type name to Arrow's type. Timestamps are in UTC.
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
#: Bytes of entries that cannot be decoded, and the reason.
_TROUBLE = {"raw": "BINARY", "error": "STRING"}


def columns_of(stream: Stream, payload: Payload = "binary") -> dict[str, str]:
    """Return the columns in order: name to Spark type."""
    columns = {**_EVERYWHERE, **_OF_STREAM[stream], **_TROUBLE}
    if payload == "binary":
        return columns
    if payload == "none":
        del columns["payload"]
        return columns
    as_text: dict[str, str] = {}
    for name, kind in columns.items():
        as_text[name] = "STRING" if name == "payload" else kind
        if name == "payload":
            as_text["payload_raw"] = "BINARY"
    return as_text


def spark_schema(stream: Stream, payload: Payload = "binary") -> str:
    """Return the schema as DDL."""
    return ", ".join(f"`{name}` {kind}" for name, kind in columns_of(stream, payload).items())


def arrow_schema(stream: Stream, payload: Payload = "binary") -> pa.Schema:
    """Return the schema of the record batches."""
    return pa.schema([(name, ARROW_TYPES[kind]) for name, kind in columns_of(stream, payload).items()])


# --- one batch

#: Last instant of Spark's calendar, in epoch milliseconds: the end of the year 9999.
MAX_TIMESTAMP_MS = 253_402_300_799_999

#: The largest number of a BIGINT column.
MAX_I64 = np.uint64(2**63 - 1)

_bin_slot = msgspec.msgpack.Decoder(bytes).decode
_to_json = msgspec.json.Encoder().encode
_BIN_LEADS = (b"\xc4", b"\xc5", b"\xc6")


class Batch:
    """The columns of a batch under construction. A column that is not set is null."""

    def __init__(self, stream: Stream, payload: Payload, queue: str, rows: int) -> None:
        self._kinds = columns_of(stream, payload)
        self._schema = arrow_schema(stream, payload)
        self._rows = rows
        self._columns: dict[str, pa.Array] = {"queue": pa.repeat(pa.scalar(queue, pa.string()), rows)}
        self.queue = queue
        self.payload = payload
        self.errors: list[str | None] = [None] * rows
        self.raws: list[bytes | None] = [None] * rows

    def set(self, name: str, values: Sequence[Any]) -> None:
        """Set a column from Python values; timestamps are epoch milliseconds."""
        kind = self._kinds[name]
        if kind != "TIMESTAMP":
            try:
                self._columns[name] = pa.array(values, ARROW_TYPES[kind])
            except OverflowError:
                self._columns[name] = self._numbers(name, values)
            return
        try:
            self.set_array(name, pa.array(values, pa.int64()))
        except OverflowError:
            self._columns[name] = self._instants(name, values)

    def set_array(self, name: str, values: pa.Array) -> None:
        """Set a column from an Arrow array; timestamps are epoch milliseconds."""
        if self._kinds[name] == "TIMESTAMP":
            is_out = pc.or_(pc.greater(values, MAX_TIMESTAMP_MS), pc.less(values, 0))
            if pc.any(is_out).as_py():
                self._columns[name] = self._instants(name, values.to_pylist())
                return
            values = values.cast(pa.timestamp("ms", tz="UTC")).cast(ARROW_TYPES["TIMESTAMP"])
        self._columns[name] = values

    def set_ids(self, ids: Sequence[bytes]) -> None:
        """Set the three columns of an entry's ID. Numbers beyond 2^63 - 1 become that, the text stays exact."""
        texts = pa.array(ids, pa.binary()).cast(pa.string())
        halves = pc.split_pattern(texts, "-").flatten().cast(pa.uint64())
        numbers = np.minimum(halves.to_numpy(), MAX_I64).astype(np.int64)
        self._columns["entry_id"] = texts
        self._columns["entry_ms"] = pa.array(numbers[::2])
        self._columns["entry_seq"] = pa.array(numbers[1::2])

    def fail(self, row: int, error: object, raw: bytes) -> None:
        """Record that a row could not be decoded, or only in part."""
        if self.errors[row] is None:
            self.errors[row] = str(error)
            self.raws[row] = raw

    def arrow(self) -> pa.RecordBatch:
        """Return the batch, with exactly the columns of the schema."""
        if any(self.errors):
            self.set("error", self.errors)
            self.set("raw", self.raws)
        columns = [self._columns.get(field.name) for field in self._schema]
        arrays = [
            pa.nulls(self._rows, field.type) if column is None else column
            for field, column in zip(self._schema, columns, strict=True)
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _numbers(self, name: str, values: Sequence[int | None]) -> pa.Array:
        numbers: list[int | None] = []
        for row, value in enumerate(values):
            is_out = value is not None and value > MAX_I64
            if is_out:
                self.fail(row, f"{name} of {value} is beyond a BIGINT", b"")
            numbers.append(None if is_out else value)
        return pa.array(numbers, pa.int64())

    def _instants(self, name: str, values: Sequence[int | None]) -> pa.Array:
        micros: list[int | None] = []
        for row, value in enumerate(values):
            if value is not None and not 0 <= value <= MAX_TIMESTAMP_MS:
                self.fail(row, f"{name} of {value} ms is beyond the year 9999", b"")
                value = None
            micros.append(None if value is None else value * 1000)
        return pa.array(micros, pa.int64()).cast(ARROW_TYPES["TIMESTAMP"])


# --- payloads


class Payloads:
    """Builds the payload columns from the slots of envelopes."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._as_text = batch.payload == "json"
        self._is_wanted = batch.payload != "none"
        self._values: list[Any] = []
        self._raws: list[bytes | None] = []

    def slot(self, slot: bytes) -> None:
        """Add the next row's payload from its slot."""
        if not self._as_text:
            self._values.append(_bin_slot(slot) if slot[:1] in _BIN_LEADS else slot)
            return
        try:
            packed = _bin_slot(slot) if slot[:1] in _BIN_LEADS else slot
            self.packed(packed)
        except REFUSALS:
            self._values.append(None)
            self._raws.append(slot)

    def packed(self, packed: bytes | None) -> None:
        """Add the next row's payload from MessagePack."""
        if not self._as_text:
            self._values.append(packed)
            return
        text, raw = (None, None) if packed is None else json_text(packed)
        self._values.append(text)
        self._raws.append(raw)

    def all_packed(self, values: Sequence[bytes]) -> None:
        """Set the payloads of all rows from MessagePack."""
        if self._as_text:
            for packed in values:
                self.packed(packed)
        else:
            self._values = list(values)

    def finish(self) -> None:
        """Set the columns of the batch."""
        if not self._is_wanted:
            return
        self._batch.set("payload", self._values)
        if self._as_text:
            self._batch.set("payload_raw", self._raws)


def json_text(packed: bytes) -> tuple[str | None, bytes | None]:
    """Return (JSON text, None) for a MessagePack value, or (None, its bytes) if JSON cannot represent it exactly."""
    try:
        value = decode_value(packed)
        if not _is_json(value):
            return None, packed
        return _to_json(value).decode(), None
    except (*REFUSALS, ValueError, TypeError):
        return None, packed


def _is_json(value: Any) -> bool:
    """Return whether JSON can represent the value: no bytes, no datetimes, text as keys, finite numbers."""
    kind = type(value)
    if kind is str or kind is bool or kind is int or value is None:
        return True
    if kind is float:
        return bool(value - value == 0)
    if kind is dict:
        return all(type(key) is str and _is_json(item) for key, item in value.items())
    return kind is list and all(map(_is_json, value))
