"""Repairs dead letters with SQL: which letters change, how, and what became of them. Needs neither Spark nor Java.

1. `find_letters` reads the letters of one cluster, `repairs_of` runs the SQL over them: nothing has changed yet.
2. `Repairer.replay` puts repaired letters back into the queue; `Repairer.outcomes` waits for the jobs to end.
3. `record` notes the repairs in a lake. The pipeline joins them to the ends of their jobs: `gold/repairs`.
"""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder, Schema, write_deltalake

from tampu.base.checks import one_line
from tampu.errors import ConfigError, DecodeError
from tampu.inspect.admin import QueueAdmin
from tampu.inspect.streams import newest_id
from tampu.spark.lake.rows import check_reads, published
from tampu.spark.lake.table import Table
from tampu.spark.options import WriteOptions
from tampu.spark.server import QueueServer, span_pages
from tampu.spark.write.rows import LetterRow
from tampu.spark.write.sinks import REPLAY, ReplaySink, Written
from tampu.wire.codec import queue_codec
from tampu.wire.dlq import decode_dlq_fields
from tampu.wire.entry import first_values
from tampu.wire.envelope import decode_job
from tampu.wire.payload import decode_slot, encode_value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from tampu.spark.lake.store import Store
    from tampu.wire.job import Job

#: The table that the SQL reads.
LETTERS = "letters"
#: Columns of that table besides the fields of the payload.
META = ("_entry_id", "_job_id", "_name", "_error", "_attempts", "_payload")
#: Events that end a job, and what they say about it.
ENDS = {b"completed": "completed", b"dlq": "dead", b"cancelled": "cancelled"}
#: Pause between two looks at the events, in seconds.
POLL_SECS = 0.1
#: The table of a lake that repairs are noted in.
TABLE = "bronze/repairs"


@dataclass(frozen=True, slots=True)
class Letter:
    """A dead letter that can be decoded."""

    entry_id: str
    job: Job[Any]
    name: str
    error: str | None
    attempts: int | None
    payload: Any


@dataclass(frozen=True, slots=True)
class Repair:
    """A letter with its new payload and name."""

    letter: Letter
    payload: Any
    name: str
    #: Field to its old and new value; `(name)` for the job's name, `(payload)` for a payload without fields.
    changes: dict[str, tuple[Any, Any]]


@dataclass(slots=True)
class Plan:
    """The changes that the SQL makes to the letters of a cluster."""

    repairs: list[Repair] = field(default_factory=list)
    #: Letters in the result that the SQL left as they are.
    unchanged: int = 0
    #: Letters that the result does not have.
    left_out: int = 0


# --- what would change


def find_letters(url: str, queue: str, cluster: str, limit: int | None = None) -> list[Letter]:
    """Return the letters of a cluster, oldest first. Letters that cannot be decoded are left out."""
    found: list[Letter] = []
    codec = queue_codec(queue)
    with QueueServer(url, queue) as server:
        for entry_id, fields in (entry for page, _ in span_pages(server, server.keys.dlq) for entry in page):
            letter = decode_dlq_fields(entry_id.decode(), fields)
            if letter.cluster != cluster:
                continue
            try:
                job = decode_job(letter.payload, letter.name)
                slot = job.payload_slot
                payload = decode_slot(slot if codec is None else codec.open_slot(slot, letter.name))
            except DecodeError:
                continue
            found.append(Letter(letter.dlq_id, job, letter.name, letter.error, letter.attempts, payload))
            if len(found) == limit:
                break
    return found


def repairs_of(letters: Sequence[Letter], sql: str) -> Plan:
    """Run the SQL over the letters and return what it changes.

    The table `letters` has a column for each field of the payloads, and those of `META`. A column of the result with
    another value than before is the new value of that field. Fields that are not selected stay as they are.
    """
    check_reads(sql)
    if not letters:
        return Plan()
    before = _table_of(letters)
    with tempfile.TemporaryDirectory() as folder:
        write_deltalake(folder, before)
        try:
            after = pa.table(QueryBuilder().register(LETTERS, DeltaTable(folder)).execute(sql))
        except Exception as error:  # the query engine has no error classes
            raise ConfigError(f"the SQL failed: {one_line(error, 500)}") from error
    if "_entry_id" not in after.column_names:
        raise ConfigError(
            "the SQL must select _entry_id, which says which letter a row is: SELECT * REPLACE (...) does"
        )
    known = {letter.entry_id: (letter, row) for letter, row in zip(letters, before.to_pylist(), strict=True)}
    plan = Plan()
    seen: set[str] = set()
    for row in after.to_pylist():
        entry_id = row["_entry_id"]
        if entry_id not in known:
            raise ConfigError(f"the SQL changes _entry_id: there is no letter {entry_id!r}")
        if entry_id in seen:
            raise ConfigError(f"the SQL returns letter {entry_id} more than once")
        seen.add(entry_id)
        repair = _repair(*known[entry_id], row)
        if repair.changes:
            plan.repairs.append(repair)
        else:
            plan.unchanged += 1
    plan.left_out = len(known) - len(seen)
    return plan


def _repair(letter: Letter, before: dict[str, Any], after: dict[str, Any]) -> Repair:
    changes: dict[str, tuple[Any, Any]] = {}
    payload, name = letter.payload, letter.name
    for column, value in after.items():
        if column in before and _is_same(before[column], value):
            continue
        if column == "_name":
            name = value or ""
            changes["(name)"] = (letter.name, name)
        elif column == "_payload":
            try:
                payload = json.loads(value)
            except (TypeError, ValueError):
                raise ConfigError(f"_payload of letter {letter.entry_id} must be JSON; got {value!r}") from None
            changes["(payload)"] = (letter.payload, payload)
        elif column in META:
            raise ConfigError(f"the SQL changes {column}, which cannot be changed")
        elif not isinstance(letter.payload, dict):
            raise ConfigError(f"the payload of letter {letter.entry_id} has no fields: select a new _payload as JSON")
        else:
            changes[column] = (letter.payload.get(column), value)
    fields = {column: new for column, (_, new) in changes.items() if column not in ("(name)", "(payload)")}
    if fields:
        payload = {**payload, **fields}
    return Repair(letter, payload, name, changes)


def _is_same(one: Any, other: Any) -> bool:
    # A number that is not a number differs from itself.
    return type(one) is type(other) and (one == other or (one != one and other != other))


def _table_of(letters: Sequence[Letter]) -> pa.Table:
    columns: dict[str, pa.Array] = {
        "_entry_id": pa.array([letter.entry_id for letter in letters], pa.string()),
        "_job_id": pa.array([letter.job.id for letter in letters], pa.string()),
        "_name": pa.array([letter.name for letter in letters], pa.string()),
        "_error": pa.array([letter.error for letter in letters], pa.string()),
        "_attempts": pa.array([letter.attempts for letter in letters], pa.int64()),
        "_payload": pa.array([_json_text(letter.payload) for letter in letters], pa.string()),
    }
    used = set(columns)  # in lower case: Delta does not tell `ID` and `id` apart
    payloads = [letter.payload if isinstance(letter.payload, dict) else {} for letter in letters]
    for name in dict.fromkeys(key for payload in payloads for key in payload if isinstance(key, str) and key):
        if name.lower() not in used:
            used.add(name.lower())
            columns[name] = _column([payload.get(name) for payload in payloads])
    return pa.table(columns)


def _column(values: list[Any]) -> pa.Array:
    """Return the values of a field; as text if they are of several types, or of one that tables do not have."""
    try:
        found = pa.array(values)
        if _is_storable(found.type):
            return found
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError):
        pass
    return pa.array([value if value is None or isinstance(value, str) else _json_text(value) for value in values])


def _is_storable(kind: pa.DataType) -> bool:
    if pa.types.is_null(kind):
        return False
    if pa.types.is_struct(kind):
        return kind.num_fields > 0 and all(_is_storable(kind.field(at).type) for at in range(kind.num_fields))
    return _is_storable(kind.value_type) if pa.types.is_list(kind) else True


def _json_text(value: Any) -> str | None:
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return None


# --- replaying


class Repairer:
    """Replays repaired letters of one queue, and watches what becomes of them."""

    def __init__(self, url: str, queue: str) -> None:
        self._queue = queue
        self._options = WriteOptions.parse({"url": url, "queue": queue, "stream": "dlq"})
        with QueueServer(url, queue, (REPLAY,)) as server:
            #: Events up to this ID were there before the repair.
            self._cursor = server.do(lambda client: newest_id(client, server.keys.events)).encode()
            self.started_ms: int = server.do(lambda client: client.server_time_ms())

    def replay(self, repairs: Iterable[Repair], detail: str = "") -> Written:
        """Put the letters back into the queue and write an audit event. Skip letters removed in the meantime."""
        rows = (LetterRow(one.letter.entry_id, encode_value(one.payload), one.name) for one in repairs)
        written = ReplaySink(self._options).write((self._queue, row) for row in rows)
        if count := written.added:
            with QueueServer(self._options.url, self._queue) as server:
                keys = server.keys
                server.do(lambda client: QueueAdmin(client, keys).audit("replay", count=count, detail=detail))
        return written

    def outcomes(
        self,
        repairs: Sequence[Repair],
        patience_secs: float,
        on_outcome: Callable[[str, str], None] = lambda job_id, outcome: None,
    ) -> dict[str, str]:
        """Return the outcome of the replayed jobs by ID, as far as they end within `patience_secs`."""
        waiting = {one.letter.job.id.encode(): one.letter.job.id for one in repairs}
        found: dict[str, str] = {}
        deadline = time.monotonic() + patience_secs
        with QueueServer(self._options.url, self._queue) as server:
            while waiting:
                page = server.call("XRANGE", server.keys.events, b"(" + self._cursor, "+", "COUNT", 1_000)
                for entry_id, fields in page:
                    self._cursor = entry_id
                    values = first_values(fields)
                    outcome = ENDS.get(values.get(b"e", b""))
                    job_id = waiting.pop(values.get(b"id", b""), None) if outcome else None
                    if outcome is not None and job_id is not None:
                        found[job_id] = outcome
                        on_outcome(job_id, outcome)
                if not page:
                    if time.monotonic() >= deadline:
                        break
                    time.sleep(POLL_SECS)
        return found


# --- keeping a record

_SCHEMA = pa.schema(
    [
        *((name, pa.string()) for name in ("repair", "queue", "cluster", "sql", "entry_id", "job_id", "name")),
        ("is_canary", pa.bool_()),
        *((name, pa.string()) for name in ("before", "after")),
        ("repaired_ms", pa.int64()),
        ("repaired_at", pa.timestamp("us", "UTC")),
    ]
)


def record(
    lake: Store | Path,
    repair: str,
    queue: str,
    cluster: str,
    sql: str,
    repairs: Sequence[Repair],
    at_ms: int,
    *,
    canary: bool,
) -> None:
    """Append repairs to the lake's table. No lock is needed: appending does not conflict with the pipeline."""
    published(lake)
    common = {
        "repair": repair,
        "queue": queue,
        "cluster": cluster,
        "sql": sql,
        "is_canary": canary,
        "repaired_ms": at_ms,
        "repaired_at": datetime.fromtimestamp(at_ms / 1000, UTC),
    }
    rows = [
        common
        | {
            "entry_id": one.letter.entry_id,
            "job_id": one.letter.job.id,
            "name": one.name,
            "before": _json_text(one.letter.payload),
            "after": _json_text(one.payload),
        }
        for one in repairs
    ]
    table = Table(lake, TABLE)
    adds = table.write(pa.Table.from_pylist(rows, schema=_SCHEMA))
    table.commit(adds, Schema.from_arrow(_SCHEMA), {})
