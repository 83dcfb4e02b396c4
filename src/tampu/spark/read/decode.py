"""Decodes server replies to Arrow batches, column by column. Pure functions that never reject an entry.

An entry that cannot be decoded becomes a row with its bytes in `raw` and the reason in `error`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tampu.errors import DecodeError, Error
from tampu.spark.read.batch import Batch, Payloads
from tampu.wire.codec import queue_codec
from tampu.wire.dlq import decode_dlq_fields
from tampu.wire.entry import decode_delayed_member, first_values, read_job_fields
from tampu.wire.envelope import decode_bin_envelopes, decode_job
from tampu.wire.payload import decode_value, encode_value
from tampu.wire.repeat import decode_spec
from tampu.wire.retry import from_wire_retry
from tampu.wire.scan import REFUSALS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tampu.spark.options import Payload, Stream
    from tampu.wire.job import Job
    from tampu.wire.repeat import RepeatPattern, StoredSpec

    #: An entry of a stream: its ID, then fields and values in turn.
    Entry = tuple[bytes, list[bytes]]

_to_json = msgspec.json.Encoder().encode

#: Fields of an event with their own column: field, column, whether it is a number.
_EVENT_FIELDS = (
    (b"e", "event", False),
    (b"id", "job_id", False),
    (b"n", "name", False),
    (b"ts", "ts", True),
    (b"attempt", "attempt", True),
    (b"created_at_ms", "created_at", True),
    (b"duration_us", "duration_us", True),
    (b"reason", "reason", False),
    (b"backoff_ms", "backoff_ms", True),
    (b"delay_ms", "delay_ms", True),
    (b"worker", "worker", False),
)
_EVENT_FIELD_NAMES = frozenset(field for field, _, _ in _EVENT_FIELDS)
#: Columns of a job and its attributes.
_JOB_ATTRIBUTES = (("job_id", "id"), ("name", "name"), ("attempt", "attempt"), ("created_at", "created_at_ms"))


# --- streams


def decode_jobs(queue: str, entries: Sequence[Entry], payload: Payload) -> pa.RecordBatch:
    """Decode entries of the jobs stream."""
    batch = Batch("jobs", payload, queue, len(entries))
    batch.set_ids([entry_id for entry_id, _ in entries])
    pairs = [read_job_fields(fields) for _, fields in entries]
    _set_jobs(batch, pairs, lambda row: pairs[row][0] or encode_value(list(entries[row][1])))
    return batch.arrow()


def _set_jobs(
    batch: Batch, pairs: Sequence[tuple[bytes | None, str]], raw_of: Callable[[int], bytes], *, retries: bool = True
) -> None:
    """Set the columns from the (envelope, name) of each row; `raw_of` returns the bytes of a row without a job."""
    payloads = Payloads(batch)
    codec = queue_codec(batch.queue)
    envelopes = None if codec is not None else decode_bin_envelopes([envelope for envelope, _ in pairs])
    overrides: list[Any]
    if envelopes is not None:
        payloads.all_packed([envelope.payload for envelope in envelopes])
        batch.set("job_id", [envelope.id for envelope in envelopes])
        batch.set("name", [name for _, name in pairs])
        batch.set("attempt", [envelope.attempt for envelope in envelopes])
        batch.set("created_at", [envelope.created_at_ms for envelope in envelopes])
        overrides = [None if envelope.retry is None else from_wire_retry(envelope.retry) for envelope in envelopes]
    else:
        jobs = [_job(batch, payloads, row, envelope, name, raw_of) for row, (envelope, name) in enumerate(pairs)]
        for column, attribute in _JOB_ATTRIBUTES:
            batch.set(column, _attributes(jobs, attribute))
        overrides = _attributes(jobs, "retry")
    payloads.finish()
    if retries and any(overrides):
        batch.set("max_attempts", [None if retry is None else retry.max_attempts for retry in overrides])
        specs = [None if retry is None else retry.backoff for retry in overrides]
        batch.set("backoff", [None if spec is None else _to_json(spec.to_dict()).decode() for spec in specs])


def _job(
    batch: Batch, payloads: Payloads, row: int, envelope: bytes | None, name: str, raw_of: Callable[[int], bytes]
) -> Job[Any] | None:
    """Return the job of one row and add its payload to `payloads`; None if it cannot be decoded."""
    job = None
    try:
        if envelope is None:
            raise DecodeError("no field d")
        job = decode_job(envelope, name)
        codec = queue_codec(batch.queue)
        payloads.slot(job._slot if codec is None else codec.open_slot(job._slot, name))
    except DecodeError as error:
        batch.fail(row, error, raw_of(row))
        payloads.packed(None)
    except REFUSALS as error:
        batch.fail(row, f"the payload slot is not MessagePack: {error}", job._slot if job else b"")
        payloads.packed(None)
    return job


def _attributes(rows: Sequence[Any], attribute: str) -> list[Any]:
    """Return an attribute of each row; None for rows that could not be decoded."""
    return [None if row is None else getattr(row, attribute) for row in rows]


def decode_events(queue: str, entries: Sequence[Entry], payload: Payload) -> pa.RecordBatch:
    """Decode entries of the events stream."""
    batch = Batch("events", payload, queue, len(entries))
    batch.set_ids([entry_id for entry_id, _ in entries])
    # Events of one kind have the same fields in the same order: grouped by that, each field is a column.
    layouts: dict[tuple[bytes, ...], list[int]] = {}
    for row, (_, fields) in enumerate(entries):
        layouts.setdefault(tuple(fields[::2]), []).append(row)
    groups: list[dict[bytes, Sequence[bytes]]] = []
    for names, rows in layouts.items():
        values = list(zip(*(entries[row][1][1::2] for row in rows), strict=True))
        # If a field appears twice the first one counts: it is set last.
        groups.append(dict(zip(reversed(names), reversed(values), strict=True)))
        if b"e" not in names:
            for row in rows:
                batch.fail(row, "no field e: not an event", encode_value(list(entries[row][1])))
    sizes = [len(rows) for rows in layouts.values()]
    order = None if len(sizes) == 1 else np.argsort(np.concatenate([*layouts.values()]))
    for field, column, is_number in _EVENT_FIELDS:
        found = _column([group.get(field) for group in groups], sizes, order)
        if is_number:
            batch.set_array(column, _numbers(batch, column, found, entries))
        else:
            batch.set_array(column, _texts(found))
    job_ids = batch._columns["job_id"]
    batch.set_array("job_id", pc.if_else(pc.equal(job_ids, ""), None, job_ids))
    batch.set_array("name", pc.fill_null(batch._columns["name"], ""))
    if any(not _EVENT_FIELD_NAMES.issuperset(names) for names in layouts):
        batch.set("extra", [_extra(first_values(fields)) for _, fields in entries])
    return batch.arrow()


def _column(groups: list[Sequence[bytes] | None], sizes: list[int], order: Any) -> pa.Array:
    """Return one field of all rows from its values in each layout; `order` restores the order of rows."""
    if order is None:
        return pa.nulls(sizes[0], pa.binary()) if groups[0] is None else pa.array(groups[0], pa.binary())
    parts = [
        pa.nulls(size, pa.binary()) if values is None else pa.array(values, pa.binary())
        for values, size in zip(groups, sizes, strict=True)
    ]
    return pa.concat_arrays(parts).take(pa.array(order))


def _extra(values: dict[bytes, bytes]) -> str | None:
    others = {
        key.decode(errors="replace"): value.decode(errors="replace")
        for key, value in values.items()
        if key not in _EVENT_FIELD_NAMES
    }
    return _to_json(others).decode() if others else None


def _texts(values: pa.Array) -> pa.Array:
    try:
        return values.cast(pa.string())
    except pa.ArrowInvalid:
        texts = [None if value is None else value.decode(errors="replace") for value in values.to_pylist()]
        return pa.array(texts, pa.string())


def _numbers(batch: Batch, column: str, values: pa.Array, entries: Sequence[Entry]) -> pa.Array:
    try:
        texts = values.cast(pa.string())
        # Arrow would also take -5 and 0x10: a value must not decode differently next to a malformed one.
        if pc.all(pc.ascii_is_decimal(texts)).as_py() is not False:
            return texts.cast(pa.int64())
    except pa.ArrowInvalid:
        pass
    numbers: list[int | None] = []
    for row, value in enumerate(values.to_pylist()):
        # Not int() at once: it refuses over 4300 digits.
        is_number = value is not None and value.isdigit() and len(value) < 20 and int(value) < 2**63
        numbers.append(int(value) if is_number else None)
        if value is not None and not is_number:
            batch.fail(row, f"{column} is not a number: {value[:40]!r}", encode_value(list(entries[row][1])))
    return pa.array(numbers, pa.int64())


def decode_dead_letters(queue: str, entries: Sequence[Entry], payload: Payload) -> pa.RecordBatch:
    """Decode entries of the dlq stream."""
    batch = Batch("dlq", payload, queue, len(entries))
    batch.set_ids([entry_id for entry_id, _ in entries])
    letters = [decode_dlq_fields(entry_id.decode(), fields) for entry_id, fields in entries]
    pairs = [(letter.payload or None, letter.name) for letter in letters]
    _set_jobs(batch, pairs, lambda row: pairs[row][0] or encode_value(list(entries[row][1])), retries=False)
    batch.set("name", [letter.name for letter in letters])
    for column in ("source_id", "reason", "detail", "error_type", "traceback", "worker"):
        batch.set(column, _attributes(letters, column))
    batch.set("last_error", _attributes(letters, "error"))
    batch.set("failed_at", _attributes(letters, "failed_at_ms"))
    attempts = [letter.attempts for letter in letters]
    batch.set("attempts", [None if count is None or count >= 2**63 else count for count in attempts])
    return batch.arrow()


# --- snapshots


def decode_delayed(queue: str, members: Sequence[tuple[bytes, int]], payload: Payload) -> pa.RecordBatch:
    """Decode members of the delayed set and their due times in ms."""
    batch = Batch("delayed", payload, queue, len(members))
    pairs: list[tuple[bytes | None, str]] = []
    for row, (member, _) in enumerate(members):
        try:
            name, envelope = decode_delayed_member(member)
            pairs.append((envelope, name))
        except DecodeError as error:
            batch.fail(row, error, member)
            pairs.append((None, ""))
    _set_jobs(batch, pairs, lambda row: members[row][0])
    batch.set("run_at", [due for _, due in members])
    return batch.arrow()


def decode_repeatables(
    queue: str, specs: Sequence[tuple[str, int, bytes | None, int]], payload: Payload
) -> pa.RecordBatch:
    """Decode repeatables: key, next fire in ms, stored spec, number of fires."""
    batch = Batch("repeat", payload, queue, len(specs))
    payloads = Payloads(batch)
    stored: list[StoredSpec | None] = []
    for row, (_, _, spec_bytes, _) in enumerate(specs):
        try:
            if spec_bytes is None:
                raise DecodeError("the repeatable has no spec")
            spec = decode_spec(spec_bytes)
            codec = queue_codec(queue)
            payloads.slot(spec.payload_slot if codec is None else codec.open_slot(spec.payload_slot, spec.job_name))
            stored.append(spec)
        except (Error, *REFUSALS) as error:
            batch.fail(row, error, spec_bytes or b"")
            payloads.packed(None)
            stored.append(None)
    payloads.finish()
    batch.set("spec_key", [key for key, _, _, _ in specs])
    batch.set("next_fire_at", [due for _, due, _, _ in specs])
    batch.set("fired", [fired for _, _, _, fired in specs])
    batch.set("name", _attributes(stored, "job_name"))
    batch.set("fire_limit", _attributes(stored, "limit"))
    batch.set("start_after", _attributes(stored, "start_after_ms"))
    batch.set("end_before", _attributes(stored, "end_before_ms"))
    batch.set("missed_fires", _attributes(_attributes(stored, "missed_fires"), "kind"))
    patterns = _attributes(stored, "pattern")
    batch.set("tz", _attributes(patterns, "tz"))
    batch.set("pattern", [None if pattern is None else _pattern_text(pattern) for pattern in patterns])
    return batch.arrow()


def _pattern_text(pattern: RepeatPattern) -> str:
    return f"every {pattern.interval_ms} ms" if pattern.kind == "every" else str(pattern.expression)


def decode_results(queue: str, results: Sequence[tuple[str, bytes, int | None]], payload: Payload) -> pa.RecordBatch:
    """Decode results: job ID, MessagePack, expiry in ms."""
    batch = Batch("results", payload, queue, len(results))
    payloads = Payloads(batch)
    codec = queue_codec(queue)
    for row, (job_id, packed, _) in enumerate(results):
        try:
            plain = packed if codec is None else codec.open_result(packed, job_id)
            decode_value(plain)
            payloads.packed(plain)
        except DecodeError as error:
            batch.fail(row, error, packed)
            payloads.packed(None)
    payloads.finish()
    batch.set("job_id", [job_id for job_id, _, _ in results])
    batch.set("expires_at", [expires for _, _, expires in results])
    return batch.arrow()


DECODERS: dict[Stream, Callable[[str, Sequence[Entry], Payload], pa.RecordBatch]] = {
    "events": decode_events,
    "dlq": decode_dead_letters,
    "jobs": decode_jobs,
}
