"""Contracts: what the payloads of jobs must look like, by job name. Needs neither Spark nor Java.

A contract is declared in TOML or JSON, or as the same mapping in Python:

    [invoice]                                      # the name of the job
    amount = {type = "number", min = 0}
    customer = {type = "string", pattern = "C[0-9]+"}
    currency = {one_of = ["EUR", "USD"], required = false}

| rule | holds if |
|---|---|
| `type` | the value is of this type, or of one in a list: `string`, `number`, `integer`, `boolean`, `array`, ... |
| `min`, `max` | a number is within these limits; a string or array has a length within them |
| `pattern` | all of a string matches the regular expression |
| `one_of` | the value is in the list |
| `required` | the field is present; true by default. Fields of the payload that have no rule are allowed |
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from deltalake import Schema

from tampu.base.targets import load_target
from tampu.errors import ConfigError, DecodeError
from tampu.spark.lake.folder import sole_writer
from tampu.spark.lake.rows import published
from tampu.spark.lake.table import Table
from tampu.spark.server import FIRST_PAGE, QueueServer, next_count, span_pages
from tampu.wire.codec import SEALED, describe_sealed, queue_codec
from tampu.wire.dlq import decode_dlq_fields
from tampu.wire.entry import decode_delayed_member, read_job_fields
from tampu.wire.envelope import decode_job
from tampu.wire.payload import decode_slot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from tampu.spark.lake.store import Store

#: Types of MessagePack by the names of JSON.
TYPES: dict[str, Callable[[Any], bool]] = {
    "string": lambda value: isinstance(value, str),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "boolean": lambda value: isinstance(value, bool),
    "array": lambda value: isinstance(value, list | tuple),
    "object": lambda value: isinstance(value, Mapping),
    "bytes": lambda value: isinstance(value, bytes),
    "null": lambda value: value is None,
}
RULES = ("type", "min", "max", "pattern", "one_of", "required")
#: Longest sample of a value, in characters.
MAX_SAMPLE = 200
#: The rule that a payload breaks which cannot be decoded, or not with the keys of this process.
UNDECODABLE = "undecodable"
TABLE = "gold/violations"


@dataclass(frozen=True, slots=True)
class Rule:
    """The rules of one field."""

    field: str
    types: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    pattern: re.Pattern[str] | None = None
    one_of: tuple[Any, ...] | None = None
    is_required: bool = True

    @classmethod
    def parse(cls, where: str, name: str, given: object) -> Rule:
        """Return the rule of a field; `ConfigError` says what is wrong with it."""
        if not isinstance(given, Mapping):
            raise ConfigError(f'{where} must be rules such as {{type = "number"}}; got {given!r}')
        if unknown := [rule for rule in given if rule not in RULES]:
            raise ConfigError(f"{where} has an unknown rule {unknown[0]!r}; allowed are {', '.join(RULES)}")
        types = given.get("type", ())
        types = tuple(types) if isinstance(types, list | tuple) else (types,)
        if unknown := [kind for kind in types if not isinstance(kind, str) or kind not in TYPES]:
            raise ConfigError(
                f"type of {where} must be one of {', '.join(TYPES)}, or a list of them; got {unknown[0]!r}"
            )
        for limit in ("min", "max"):
            if limit in given and (not TYPES["number"](given[limit]) or given[limit] != given[limit]):  # NaN
                raise ConfigError(f"{limit} of {where} must be a number; got {given[limit]!r}")
        if "min" in given and "max" in given and given["min"] > given["max"]:
            raise ConfigError(f"min of {where} must not be above max; got {given['min']!r} and {given['max']!r}")
        if not isinstance(given.get("required", True), bool):
            raise ConfigError(f"required of {where} must be true or false; got {given['required']!r}")
        try:
            pattern = re.compile(given["pattern"]) if "pattern" in given else None
        except (re.error, TypeError) as error:
            raise ConfigError(f"pattern of {where} is not a regular expression: {error}") from error
        one_of = given.get("one_of")
        if one_of is not None and not isinstance(one_of, list | tuple):
            raise ConfigError(f"one_of of {where} must be a list; got {one_of!r}")
        return cls(
            name,
            types,
            given.get("min"),
            given.get("max"),
            pattern,
            None if one_of is None else tuple(one_of),
            given.get("required", True),
        )

    def violation(self, payload: Mapping[str, Any]) -> str | None:
        """Return which rule the payload breaks; None if it breaks none."""
        if self.field not in payload:
            return "required" if self.is_required else None
        value = payload[self.field]
        if self.types and not any(TYPES[kind](value) for kind in self.types):
            return "type"
        measure = len(value) if isinstance(value, str | bytes | list | tuple) else value
        if TYPES["number"](measure):
            if self.low is not None and measure < self.low:
                return "min"
            if self.high is not None and measure > self.high:
                return "max"
        if self.pattern is not None and isinstance(value, str) and not self.pattern.fullmatch(value):
            return "pattern"
        if self.one_of is not None and value not in self.one_of:
            return "one_of"
        return None


@dataclass(slots=True)
class Violation:
    """Jobs of one name that break the same rule in the same way."""

    queue: str
    #: Where the jobs are: `jobs` (waiting), `delayed` or `dlq`.
    stream: str
    name: str
    field: str
    rule: str
    jobs: int
    sample_job_id: str
    sample: str


@dataclass(frozen=True, slots=True)
class Contracts:
    """The rules of jobs by name."""

    rules: dict[str, list[Rule]] = field(default_factory=dict)

    @classmethod
    def of(cls, declared: Mapping[str, Any], where: str = "contracts") -> Contracts:
        """Return the contracts in a mapping of job names to fields to rules."""
        if not isinstance(declared, Mapping) or not declared:
            raise ConfigError(f"{where} must map names of jobs to the rules of their fields; got {declared!r}")
        found: dict[str, list[Rule]] = {}
        for name, fields in declared.items():
            if not isinstance(fields, Mapping):
                raise ConfigError(f"{where}: {name} must map fields to rules; got {fields!r}")
            found[name] = [Rule.parse(f"{where}: {name}.{key}", key, rule) for key, rule in fields.items()]
        return cls(found)

    @classmethod
    def load(cls, source: str | Path) -> Contracts:
        """Return the contracts of a TOML or JSON file, or of a mapping in Python, as `module:name`."""
        file = Path(source)
        if file.suffix not in (".toml", ".json") and ":" in str(source):
            return cls.of(load_target(str(source)), str(source))
        try:
            text = file.read_text(encoding="utf-8")
            declared = json.loads(text) if file.suffix == ".json" else tomllib.loads(text)
        except OSError as error:
            raise ConfigError(f"cannot read the contracts {file}: {error.strerror or error}") from error
        except ValueError as error:
            raise ConfigError(f"the contracts {file} are not valid: {error}") from error
        return cls.of(declared, str(file))

    def violations(self, name: str, payload: Any) -> list[tuple[str, str]]:
        """Return (field, rule) of each rule that a payload breaks. Names without a contract break none."""
        rules = self.rules.get(name)
        if rules is None:
            return []
        if not isinstance(payload, Mapping):
            return [("", "type")]
        return [(rule.field, broken) for rule in rules if (broken := rule.violation(payload)) is not None]


def check_queue(url: str, queue: str, contracts: Contracts) -> tuple[int, list[Violation]]:
    """Check payloads of waiting and delayed jobs and of dead letters. Return the number checked and the violations."""
    checked = 0
    codec = queue_codec(queue)
    found: dict[tuple[str, ...], Violation] = {}
    with QueueServer(url, queue) as server:
        for stream, name, envelope in _envelopes(server):
            if name not in contracts.rules:
                continue
            checked += 1
            job_id = ""
            payload: Any
            try:
                job = decode_job(envelope, name)
                job_id = job.id
                payload = decode_slot(job.payload_slot if codec is None else codec.open_slot(job.payload_slot, name))
                if codec is None and isinstance(payload, bytes) and payload.startswith(SEALED):
                    raise DecodeError(f"{describe_sealed(payload[len(SEALED) :])}: set TAMPU_CODEC and its keys")
                broken = contracts.violations(name, payload)
            except DecodeError as error:
                payload, broken = error, [("", UNDECODABLE)]
            for column, rule in broken:
                key = (stream, name, column, rule)
                if key in found:
                    found[key].jobs += 1
                    continue
                value = payload.get(column) if isinstance(payload, Mapping) else payload
                sample = str(value) if rule == UNDECODABLE else repr(value)
                found[key] = Violation(queue, *key, 1, job_id, sample[:MAX_SAMPLE])
    return checked, sorted(found.values(), key=lambda one: (-one.jobs, one.name, one.field, one.rule, one.stream))


def _envelopes(server: QueueServer) -> Iterator[tuple[str, str, bytes]]:
    keys = server.keys
    for page, _ in span_pages(server, keys.stream):
        for _, fields in page:
            envelope, name = read_job_fields(fields)
            yield "jobs", name, envelope or b""
    for page, _ in span_pages(server, keys.dlq):
        for entry_id, fields in page:
            letter = decode_dlq_fields(entry_id.decode(), fields)
            yield "dlq", letter.name, letter.payload
    cursor, count = b"0", FIRST_PAGE
    while True:  # ZSCAN: a job that is promoted meanwhile must not shift others out of sight
        cursor, flat = server.call("ZSCAN", keys.delayed, cursor, "COUNT", count)
        count = next_count(list(map(len, flat[::2])), count)
        for member in flat[::2]:
            try:
                name, envelope = decode_delayed_member(member)
            except DecodeError:
                continue
            yield "delayed", name, envelope
        if cursor == b"0":
            return


_SCHEMA = pa.schema(
    [
        *((name, pa.string()) for name in ("queue", "stream", "name", "field", "rule")),
        ("jobs", pa.int64()),
        *((name, pa.string()) for name in ("sample_job_id", "sample")),
        ("checked_at", pa.timestamp("us", "UTC")),
    ]
)


def store(table: Table, queues: Iterable[str], violations: Iterable[Violation]) -> None:
    """Put the violations of these queues in place of those that the lake has. The caller holds its lock."""
    now, of_queues = datetime.now(UTC), set(queues)
    rows = pa.Table.from_pylist([asdict(violation) | {"checked_at": now} for violation in violations], schema=_SCHEMA)
    replaced = {file.path for file in table.files() if file.partition[0] in of_queues}
    table.commit(table.write(rows), Schema.from_arrow(_SCHEMA), {}, replaces=replaced)


def comparable(rows: Iterable[Mapping[str, Any]], queues: Iterable[str]) -> set[tuple[Any, ...]]:
    """Return the violations of these queues without the time of the check."""
    columns = [name for name in _SCHEMA.names if name != "checked_at"]
    wanted = set(queues)
    return {tuple(row[name] for name in columns) for row in rows if row["queue"] in wanted}


def publish(lake: Store, queues: Iterable[str], violations: Iterable[Violation]) -> None:
    """Store the violations, and make them the published ones."""
    with sole_writer(lake):
        state = published(lake)
        table = Table(lake, TABLE)
        store(table, queues, violations)
        state.tables[TABLE] = table.version()
        state.publish(lake)
