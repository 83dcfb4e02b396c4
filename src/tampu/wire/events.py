"""Encode and decode entries of the events stream: `e`, `id`, `ts`, `n` if the job has a name, then extra fields."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from tampu.wire.entry import any_text, exact_text, first_values

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

#: Fields whose values are integers.
INTEGER_FIELDS = frozenset({"attempt", "backoff_ms", "count", "created_at_ms", "delay_ms", "duration_us", "ts"})


class EventName(StrEnum):
    """The kinds of events."""

    WAITING = "waiting"
    ACTIVE = "active"
    COMPLETED = "completed"
    FAILED = "failed"
    RETRY_SCHEDULED = "retry-scheduled"
    DELAYED = "delayed"
    DLQ = "dlq"
    CANCELLED = "cancelled"
    DRAINED = "drained"
    PROGRESS = "progress"
    AUDIT = "audit"


@dataclass(frozen=True, slots=True)
class QueueEvent:
    """One event. `job_id` is None for queue-wide events (`drained`) and for entries without a readable ID."""

    name: str
    job_id: str | None
    job_name: str
    #: All other fields of the entry, numbers as int.
    fields: Mapping[str, str | int] = field(default_factory=dict)


def encode_event_fields(
    event: str, job_id: str, ts_ms: int, name: str = "", extra: Mapping[str, str | int] | None = None
) -> list[bytes]:
    """Return the fields of an event in the order of the wire format."""
    fields = [b"e", exact_text("event", event), b"id", exact_text("id", job_id), b"ts", b"%d" % ts_ms]
    if name:
        fields += (b"n", exact_text("name", name))
    for key, value in (extra or {}).items():
        fields += (exact_text("field", key), any_text(str(value)))
    return fields


def decode_event_fields(fields: Sequence[bytes]) -> QueueEvent:
    """Decode an event of any implementation. Never raises: an invalid number is kept as text."""
    texts = {
        key.decode(errors="replace"): value.decode(errors="replace") for key, value in first_values(fields).items()
    }
    name = texts.pop("e", "")
    job_id = texts.pop("id", "") or None
    job_name = texts.pop("n", "")
    return QueueEvent(name, job_id, job_name, {key: _number_or_text(key, value) for key, value in texts.items()})


def _number_or_text(key: str, value: str) -> str | int:
    is_number = key in INTEGER_FIELDS and value.isascii() and value.isdigit() and len(value) <= 20
    return int(value) if is_number else value
