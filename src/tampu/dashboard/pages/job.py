"""Job: why it is in its state, where its time went, its attempts, its last error, its payload and its result."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from tampu.dashboard.app import NotFound, Page
from tampu.dashboard.html import pretty
from tampu.inspect.jobs import JobState, decoded_job, decoded_member
from tampu.inspect.timeline import (
    Around,
    Phase,
    attempts_of,
    condensed,
    explain,
    last_traceback,
    phases_of,
    state_by_events,
    step_json,
    steps_of,
)
from tampu.inspect.views import payload_of, redacted_event, redacted_state, shown_value, state_json
from tampu.inspect.walk import read_events
from tampu.wire.dlq import decode_dlq_fields
from tampu.wire.entry import entry_ms

if TYPE_CHECKING:
    from tampu.dashboard.app import Ask
    from tampu.inspect.admin import QueueAdmin
    from tampu.inspect.timeline import Event
    from tampu.wire.dlq import DlqEntry
    from tampu.wire.job import Job

#: Width of the bar that shows where the time went, and shortest part of it, in its own units.
BAR_WIDTH, SHORTEST = 1000.0, 4.0
#: How far the ID of a dead letter may be from the time of its event, in milliseconds.
LETTER_SLACK_MS = 2000


class Segment(NamedTuple):
    """A phase of a job as part of the bar."""

    kind: str
    x: float
    width: float
    ms: float


async def find(admin: QueueAdmin, job_id: str, letter_id: str, events: list[Event]) -> tuple[JobState, Job[Any] | None]:
    """Return the state of a job and the job itself, None if it is no longer stored. Links and events say where to look.

    A search without them reads the streams around the time in the job's ID.
    """
    letter = None if not letter_id else await read_letter(admin, letter_id, letter_id, job_id)
    last = events[-1][1].name if events else ""
    if letter is None and last == "dlq":
        at_ms = entry_ms(events[-1][0])
        letter = await read_letter(admin, str(max(at_ms - LETTER_SLACK_MS, 0)), str(at_ms + LETTER_SLACK_MS), job_id)
    if letter is not None:
        state = JobState(id=job_id, state="dead", name=letter.name, attempt=letter.attempts, dead_letter=letter)
        return state, decoded_job(letter.payload, letter.name)
    if last == "completed" and await admin.client.call("GET", admin.keys.result(job_id)) is None:
        return JobState(id=job_id, state="done", name=events[-1][1].job_name), None
    state = await admin.job(job_id)
    if state.entry_id is not None:
        return state, await admin.job_in_stream(state.entry_id)
    if state.dead_letter is not None:
        return state, decoded_job(state.dead_letter.payload, state.name)
    if state.state == "delayed" and (member := await admin.delayed_member(job_id)) is not None:
        return state, decoded_member(member)[1]
    return state, None


async def read_letter(admin: QueueAdmin, first: str, last: str, job_id: str) -> DlqEntry | None:
    """Return the dead letter of a job between two IDs."""
    try:
        entries = await admin.client.call("XRANGE", admin.keys.dlq, first, last, "COUNT", 500)
    except Exception as error:
        if "Invalid stream ID" in str(error):
            raise NotFound(f"no dead letter {first!r}") from None
        raise
    for entry_id, fields in entries:
        letter = decode_dlq_fields(entry_id.decode(), fields)
        job = decoded_job(letter.payload)
        if job is not None and job.id == job_id:
            return letter
    return None


async def page(ask: Ask) -> Page:
    """Return the page of one job."""
    admin = await ask.admin()
    job_id = ask.query.get("id", "")
    if not job_id or len(job_id) > 1024:
        raise NotFound("no job without an ID")
    raw_events, is_whole = await read_events(admin.client, admin.keys, job_id)
    events = [(entry_id, redacted_event(event)) for entry_id, event in raw_events]
    found, job = await find(admin, job_id, ask.query.get("letter", ""), raw_events)
    if found.state == "unknown" and not events:
        raise NotFound(f"no job {job_id!r} in queue {admin.name!r}: it never existed, or its records have expired")
    state = redacted_state(state_by_events(found, events))
    if job is not None:
        state = replace(state, created_at_ms=job.created_at_ms or None)
    now_ms = ask.watch.now_ms
    attempts = attempts_of(state, events)
    phases = phases_of(state, events, attempts, now_ms)
    why = explain(state, events, await _around(ask, admin), await admin.workers(dead=True))
    if state.state == "waiting" and state.worker is None:
        why += await admin.why_held(state)
    steps = steps_of(state, events)
    trace = last_traceback(state, events)
    payload = None if job is None else payload_of(job, admin.name, raw=False)
    if ask.wants_json:
        shown = state_json(admin.name, state, raw=False)
        if job is not None:
            shown["payload"] = payload
        totals = _totals(phases)
        shown |= {
            "why": why,
            "steps": [step_json(step) for step in steps],
            "time_ms": totals,
            "traceback": trace or None,
        }
        return Page("job.html", state.name, "jobs", shown)
    pretty_payload, left_out = (None, 0) if job is None else pretty(payload)
    letter = state.dead_letter
    failed = [attempt for attempt in attempts if attempt.end == "failed"]
    headers = {} if job is None else dict(job.headers or {})
    values = {
        "name": admin.name,
        "state": state,
        "why": [_with_command(line) for line in why],
        "bar": _bar(phases),
        "totals": _totals(phases),
        "attempts": attempts,
        "most": None if job is None or job.retry is None else job.retry.max_attempts,
        "steps": condensed(steps),
        "is_whole": is_whole,
        "trace": trace,
        "error": letter.error_text or letter.reason if letter else failed[-1].error if failed else "",
        "payload": pretty_payload,
        "left_out": left_out,
        "is_sealed": isinstance(payload, dict) and "$sealed" in payload and ask.board.open_payloads,
        "is_editable": letter is not None and job is not None,
        "result": pretty(shown_value(state.result))[0] if state.state == "done" and state.result is not None else None,
        "headers": {key: value for key, value in headers.items() if key != "traceparent"},
        "trace_id": _trace_id(headers.get("traceparent", "")),
    }
    return Page("job.html", state.name or "(no name)", "jobs", None, values)


async def _around(ask: Ask, admin: QueueAdmin) -> Around:
    one = ask.watch.glances.get(admin.name)
    _, delivered = ask.watch.flow(admin.name)
    has_promoter = bool(await admin.client.call("EXISTS", admin.keys.promoter_lock))
    if one is None:
        return Around(admin.name, ask.watch.now_ms, 0, False, "", {}, 0.0, has_promoter)
    known = (one.waiting, one.is_paused, one.pause_reason, one.paused_tasks)
    return Around(admin.name, ask.watch.now_ms, *known, delivered or 0.0, has_promoter)


def _with_command(line: str) -> tuple[str, str]:
    """Divide a sentence into its text and the command at its end or in it."""
    before, mark, rest = line.partition("`")
    words, _, after = rest.partition("`")
    return (before + after, words) if mark else (line, "")


def _totals(phases: list[Phase]) -> dict[str, float]:
    totals: dict[str, float] = {}
    for phase in phases:
        totals[phase.kind] = totals.get(phase.kind, 0.0) + phase.end_ms - phase.start_ms
    return totals


def _bar(phases: list[Phase]) -> list[Segment]:
    """Return the phases in proportion; a short one stays visible."""
    whole = sum(phase.end_ms - phase.start_ms for phase in phases)
    widths = [max((phase.end_ms - phase.start_ms) / whole * BAR_WIDTH, SHORTEST) for phase in phases]
    scale = BAR_WIDTH / sum(widths) if widths else 1.0
    found, x = [], 0.0
    for phase, width in zip(phases, widths, strict=True):
        found.append(Segment(phase.kind, x, width * scale, phase.end_ms - phase.start_ms))
        x += width * scale
    return found


def _trace_id(traceparent: object) -> str:
    parts = str(traceparent).split("-")
    return parts[1] if len(parts) == 4 and len(parts[1]) == 32 else ""
