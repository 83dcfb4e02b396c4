"""What people and programs see of a queue: values redacted, as JSON, and as one line of text.

The redaction hook changes what is shown of payloads, results, errors and tracebacks. `TAMPU_REDACT=module:function`
names a function that takes the kind (`payload`, `result`, `error`, `traceback`) and the value, and returns what to
show. If it raises an exception, nothing of the value is shown.

MessagePack has types that JSON lacks: bytes become `{"$base64": "..."}`, extension types
`{"$ext": code, "$base64": ...}`; NaN, infinities and keys that are not strings become text.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import math
import os
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import asdict, replace
from datetime import UTC, date, datetime
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from tampu.base.targets import load_target
from tampu.errors import ConfigError, DecodeError
from tampu.inspect.jobs import decoded_job
from tampu.wire.codec import CODEC_VARIABLE, KEYS_VARIABLE, SEALED, describe_sealed, queue_codec
from tampu.wire.entry import entry_ms
from tampu.wire.payload import decode_slot

if TYPE_CHECKING:
    from tampu.inspect.dead_letters import LetterCluster
    from tampu.inspect.jobs import JobState
    from tampu.inspect.snapshot import Sample, WorkerInfo
    from tampu.wire.dlq import DlqEntry
    from tampu.wire.events import QueueEvent
    from tampu.wire.job import Job
    from tampu.wire.repeat import RepeatableMeta

REDACT_VARIABLE = "TAMPU_REDACT"
#: Maximum length of a payload shown in one line, in characters.
MAX_SHOWN = 120
#: Maximum nesting depth shown; deeper values are replaced by the name of their type.
MAX_LEVELS = 200

Kind = Literal["payload", "result", "error", "traceback"]

#: Fields of an event that hold text of an application.
_EVENT_FIELDS: dict[str, Kind] = {"reason": "error", "detail": "error", "traceback": "traceback", "note": "error"}


#: A hook that is called after that of the environment: of the requests of one dashboard.
redact_also: ContextVar[Callable[[str, Any], Any] | None] = ContextVar("redact_also", default=None)

#: False: the dashboard describes sealed payloads, even if the codec is there.
opens_sealed: ContextVar[bool] = ContextVar("opens_sealed", default=True)


def redacts() -> bool:
    """Return True if there is a hook."""
    return bool(os.environ.get(REDACT_VARIABLE)) or redact_also.get() is not None


def redacted(kind: Kind, value: Any) -> Any:
    """Return what to show of a value: itself without a hook."""
    if value is None or not redacts():
        return value
    if target := os.environ.get(REDACT_VARIABLE):
        hook = load_target(target)
        if not callable(hook):
            raise ConfigError(
                f"{REDACT_VARIABLE} must name a function (kind, value), as module:function; got {target!r}"
            )
        value = _through(hook, kind, value)
    also = redact_also.get()
    return value if also is None else _through(also, kind, value)


def _through(hook: Callable[[str, Any], Any], kind: Kind, value: Any) -> Any:
    try:
        return hook(kind, value)
    except Exception as error:
        return f"(redaction failed: {type(error).__name__})"


def redacted_letter(letter: DlqEntry) -> DlqEntry:
    """Return a dead letter with its error texts redacted. Its payload is redacted where it is decoded."""
    error, detail = redacted("error", letter.error), redacted("error", letter.detail)
    return replace(letter, error=error, detail=detail, traceback=redacted("traceback", letter.traceback))


def redacted_cluster(cluster: LetterCluster) -> LetterCluster:
    """Return a group of dead letters with its error and its sample redacted."""
    fingerprint = redacted("error", cluster.fingerprint)
    return replace(cluster, fingerprint=fingerprint, sample=redacted_letter(cluster.sample))


def redacted_state(state: JobState) -> JobState:
    """Return the state of a job with its result, dead letter, progress note and reason redacted."""
    return replace(
        state,
        result=redacted("result", state.result),
        dead_letter=None if state.dead_letter is None else redacted_letter(state.dead_letter),
        progress_note=redacted("error", state.progress_note),
        reason=redacted("error", state.reason),
    )


def redacted_event(event: QueueEvent) -> QueueEvent:
    """Return an event with its text fields redacted."""
    if not redacts():
        return event
    fields = {name: redacted(_EVENT_FIELDS[name], value) if name in _EVENT_FIELDS else value
              for name, value in event.fields.items()}  # fmt: skip
    return replace(event, fields=fields)


# --- values


def jsonable(value: Any, level: int = 0) -> Any:
    """Return a value that JSON can represent. Never raises."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, Enum):
        return jsonable(value.value, level)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return {"$base64": base64.b64encode(bytes(value)).decode()}
    if isinstance(value, datetime | date):
        return value.isoformat()
    if isinstance(value, msgspec.msgpack.Ext):
        return {"$ext": value.code, "$base64": base64.b64encode(bytes(value.data)).decode()}
    if level >= MAX_LEVELS:
        return {"$deeper": type(value).__name__}
    if isinstance(value, Mapping):
        return {_key(key): jsonable(item, level + 1) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [jsonable(item, level + 1) for item in value]
    return str(value)


def _key(key: Any) -> str:
    return key if isinstance(key, str) else json.dumps(jsonable(key))


def payload_of(job: Job[Any], queue: str, *, raw: bool) -> Any:
    """Return a job's payload, its bytes if `raw`, or a description of the error if it cannot be decoded.

    An encrypted or signed payload is opened with the codec of the environment; without one, it is described.
    """
    if raw:
        return redacted("payload", job.payload_slot)
    try:
        codec = queue_codec(queue) if opens_sealed.get() else None
        if codec is not None:
            return redacted("payload", decode_slot(codec.open_slot(job.payload_slot, job.name)))
        return redacted("payload", shown_value(job.payload))
    except DecodeError as error:
        content = redacted("payload", job.payload_slot)
        return {"$undecodable": str(error), **(jsonable(content) if isinstance(content, bytes) else {})}


def shown_value(value: Any) -> Any:
    """Return a decoded payload or result; a sealed one is described."""
    if isinstance(value, bytes) and value.startswith(SEALED):
        return {"$sealed": describe_sealed(value[len(SEALED) :]), "$base64": base64.b64encode(value).decode()}
    return value


def one_line(value: Any, limit: int = MAX_SHOWN) -> str:
    """Return a value as one line of text, cut to `limit` characters."""
    if isinstance(value, bytes):
        text = repr(value)
    elif isinstance(value, dict) and "$undecodable" in value:
        text = f"cannot be decoded: {value['$undecodable']}"
    elif isinstance(value, dict) and "$sealed" in value:
        text = f"({value['$sealed']}; set {CODEC_VARIABLE} and {KEYS_VARIABLE} to read it)"
    else:
        text = json.dumps(jsonable(value), ensure_ascii=False)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def iso(ms: float | None) -> str | None:
    """Format an epoch time as ISO 8601 in UTC, for JSON output."""
    if ms is None:
        return None
    try:
        return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    except (OverflowError, ValueError, OSError):
        return None


# --- JSON


def letter_json(letter: DlqEntry, queue: str, *, raw: bool) -> dict[str, Any]:
    """Return a dead letter for JSON output. `payload` is the job's payload, or None if it cannot be decoded."""
    job = decoded_job(letter.payload, letter.name)
    return {
        "dlq_id": letter.dlq_id,
        "job_id": None if job is None else job.id,
        "name": letter.name,
        "reason": letter.reason,
        "detail": letter.detail,
        "error_type": letter.error_type,
        "error": letter.error,
        "attempts": letter.attempts,
        "worker": letter.worker,
        "died_at": iso(letter.failed_at_ms or entry_ms(letter.dlq_id)),
        "created_at": None if job is None else iso(job.created_at_ms),
        "source_id": letter.source_id,
        "payload": None if job is None else payload_of(job, queue, raw=raw),
        "envelope": redacted("payload", letter.payload) if job is None else None,
        "original": redacted("payload", letter.original),
        "traceback": letter.traceback,
    }


def cluster_json(cluster: LetterCluster, queue: str) -> dict[str, Any]:
    """Return a group of dead letters for JSON output."""
    known = asdict(cluster)
    known.pop("minutes", None)
    return known | {"sample": letter_json(cluster.sample, queue, raw=False)}


def state_json(queue: str, state: JobState, *, raw: bool) -> dict[str, Any]:
    """Return the state of a job for JSON output, without fields that are None."""
    # Not `asdict`, which copies a result level by level and fails if it is nested deeply.
    known = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    shown: dict[str, Any] = {"queue": queue, **{name: value for name, value in known.items() if value is not None}}
    shown.pop("dead_letter", None)
    shown.pop("result", None)
    if state.state == "done":
        shown["result"] = shown_value(state.result)
    if state.run_at_ms is not None:
        shown["run_at"] = iso(state.run_at_ms)
    if state.dead_letter is not None:
        shown["dead_letter"] = letter_json(state.dead_letter, queue, raw=raw)
        shown["payload"] = shown["dead_letter"]["payload"]
    return shown


def event_json(queue: str, entry_id: str, event: QueueEvent) -> dict[str, Any]:
    """Return an event for JSON output."""
    return {
        "queue": queue,
        "id": entry_id,
        "at": iso(event_ms(entry_id, event)),
        "event": event.name,
        "job_id": event.job_id,
        "job_name": event.job_name,
        **{name: value for name, value in event.fields.items() if name not in ("queue", "id", "at", "event")},
    }


def event_ms(entry_id: str, event: QueueEvent) -> int:
    """Return when the event happened: its own timestamp, or else the time it was written."""
    stamp = event.fields.get("ts")
    return stamp if isinstance(stamp, int) else entry_ms(entry_id)


def schedule_json(meta: RepeatableMeta, fired: int) -> dict[str, Any]:
    """Return a schedule for JSON output; `fired` is the number of its fires."""
    return asdict(meta) | {
        "pattern": meta.pattern.to_dict(),
        "next_fire": iso(meta.next_fire_ms),
        "fired": fired,
        "missed_fires": meta.missed_fires.to_dict(),
    }


def sample_json(sample: Sample) -> dict[str, Any]:
    """Return a snapshot of a queue and its rates for JSON output."""
    snapshot = sample.snapshot
    return asdict(snapshot) | {"workers": snapshot.workers, "bytes": snapshot.bytes} | asdict(sample.flow)


def worker_json(queue: str, worker: WorkerInfo) -> dict[str, Any]:
    """Return a worker for JSON output."""
    return {"queue": queue, "state": worker.state, **asdict(worker)}
