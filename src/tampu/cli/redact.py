"""The redaction hook: changes what commands show of payloads, results, errors and tracebacks.

`TAMPU_REDACT=module:function` names a function that takes the kind (`payload`, `result`, `error`, `traceback`) and the
value, and returns what to show. If it raises an exception, nothing of the value is shown.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from tampu.base.targets import load_target
from tampu.cli.errors import UsageError

if TYPE_CHECKING:
    from tampu.inspect.dlq_summary import LetterCluster
    from tampu.inspect.job_state import JobState
    from tampu.wire.dlq import DlqEntry
    from tampu.wire.events import QueueEvent

REDACT_VARIABLE = "TAMPU_REDACT"

Kind = Literal["payload", "result", "error", "traceback"]

#: Fields of an event that hold text of an application.
_EVENT_FIELDS: dict[str, Kind] = {"reason": "error", "detail": "error", "traceback": "traceback", "note": "error"}


def redacted(kind: Kind, value: Any) -> Any:
    """Return what to show of a value: itself without a hook."""
    target = os.environ.get(REDACT_VARIABLE)
    if not target or value is None:
        return value
    hook = load_target(target)
    if not callable(hook):
        raise UsageError(f"{REDACT_VARIABLE} must name a function (kind, value), as module:function; got {target!r}")
    try:
        return hook(kind, value)
    except Exception as error:
        return f"(redaction failed: {type(error).__name__})"


def redacted_letter(letter: DlqEntry) -> DlqEntry:
    """Return a dead letter with its error texts redacted. Its payload is redacted where it is decoded."""
    return replace(
        letter,
        error=redacted("error", letter.error),
        detail=redacted("error", letter.detail),
        traceback=redacted("traceback", letter.traceback),
    )


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
    if not os.environ.get(REDACT_VARIABLE):
        return event
    fields = {name: redacted(_EVENT_FIELDS[name], value) if name in _EVENT_FIELDS else value
              for name, value in event.fields.items()}  # fmt: skip
    return replace(event, fields=fields)
