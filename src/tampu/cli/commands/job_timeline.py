"""A job's life from the events stream: every step with how long it took to come, and why the job is where it is."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from tampu.cli.commands.events import details, event_ms
from tampu.cli.units import duration, iso, plural
from tampu.errors import DecodeError
from tampu.wire.events import EventName, QueueEvent, decode_event_fields
from tampu.wire.ulid import decode_ulid_time

if TYPE_CHECKING:
    from collections.abc import Callable

    from tampu.inspect.job_state import JobState
    from tampu.inspect.snapshot import QueueSnapshot
    from tampu.redis.client import Client
    from tampu.wire.keys import QueueKeys

#: Events read in one step.
PAGE = 1000
#: Steps of progress in a row that are shown each.
MOST_PROGRESS = 5
#: Clocks of producers and servers differ by less, it is hoped, in milliseconds.
CLOCK_SLACK_MS = 60_000


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that happened to the job."""

    at_ms: int
    what: str
    note: str = ""
    #: Since the step before.
    after_ms: int = 0
    worker: str = ""

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "at": iso(self.at_ms),
            "at_ms": self.at_ms,
            "what": self.what,
            "note": self.note,
            "after_ms": self.after_ms,
            "worker": self.worker or None,
        }


async def read_events(
    client: Client, keys: QueueKeys, job_id: str, on_progress: Callable[[int], None]
) -> list[tuple[str, QueueEvent]]:
    """The job's events, oldest first: from the time its id carries on, or all that are kept."""
    found: list[tuple[str, QueueEvent]] = []
    needle = job_id.encode(errors="replace")
    start = _start(job_id)
    looked_at = 0
    while True:
        entries = await client.call("XRANGE", keys.events, start, "+", "COUNT", PAGE)
        for entry_id, fields in entries:
            if needle in fields:
                event = decode_event_fields(fields)
                if event.job_id == job_id:
                    found.append((entry_id.decode(), event))
        looked_at += len(entries)
        on_progress(looked_at)
        if len(entries) < PAGE:
            return found
        start = "(" + entries[-1][0].decode()


def _start(job_id: str) -> str:
    try:
        return str(max(decode_ulid_time(job_id) - CLOCK_SLACK_MS, 0))
    except DecodeError:
        return "-"


def steps_of(state: JobState, entries: list[tuple[str, QueueEvent]]) -> list[Step]:
    """The life of the job, beginning with its adding; what events do not tell, its id does."""
    raw: list[Step] = []
    created_ms = _created_ms(state, entries)
    if created_ms is not None:
        raw.append(Step(created_ms, "added"))
    for entry_id, event in entries:
        raw.append(
            Step(event_ms(entry_id, event), event.name, details(event), worker=str(event.fields.get("worker", "")))
        )
    # `active` is written a little later than it happened: by time, and what was written first first.
    raw.sort(key=lambda step: step.at_ms)
    _put_starts_before_their_progress(raw)
    steps: list[Step] = []
    for step in raw:
        after_ms = max(step.at_ms - steps[-1].at_ms, 0) if steps else 0
        steps.append(Step(step.at_ms, step.what, step.note, after_ms, step.worker))
    return steps


def _put_starts_before_their_progress(steps: list[Step]) -> None:
    """Progress that was told within the start's millisecond was written before the start; it came after it."""
    for place, step in enumerate(steps):
        first = place
        while first and steps[first - 1].what == EventName.PROGRESS and steps[first - 1].at_ms == step.at_ms:
            first -= 1
        if step.what == EventName.ACTIVE and first < place:
            steps.insert(first, steps.pop(place))


def condensed(steps: list[Step]) -> list[Step]:
    """For people: of a long row of progress the first and the last, and how many there were in between."""
    found: list[Step] = []
    for what, row in groupby(steps, key=lambda step: step.what):
        same = list(row)
        if what == EventName.PROGRESS and len(same) > MOST_PROGRESS:
            between = same[1:-1]
            after_ms = sum(step.after_ms for step in between)
            note = f"{len(between):,} more in between"
            same = [same[0], replace(between[-1], note=note, after_ms=after_ms), same[-1]]
        found += same
    return found


def _created_ms(state: JobState, entries: list[tuple[str, QueueEvent]]) -> int | None:
    if state.created_at_ms:
        return state.created_at_ms
    for _, event in entries:
        created = event.fields.get("created_at_ms")
        if isinstance(created, int) and created:
            return created
    try:
        return decode_ulid_time(state.id)
    except DecodeError:
        return None


def explain(state: JobState, entries: list[tuple[str, QueueEvent]], queue: QueueSnapshot) -> list[str]:
    """Why the job is where it is, and what to do about it."""
    if state.state == "waiting":
        return _why_waiting(queue)
    if state.state == "delayed":
        return _why_delayed(state, entries, queue)
    if state.state == "running":
        lines = [f"it is with {state.worker} of group {state.group}"]
        if state.idle_ms is not None and state.idle_ms > 60_000:
            lines.append(f"that worker has not renewed it for {duration(state.idle_ms)}: another one takes it over")
        return lines
    if state.state == "dead":
        return _why_dead(state, entries, queue)
    if state.state == "done":
        stored = "its result is stored" if state.result is not None else "no result is stored, or it is None or expired"
        return [f"it is done; {stored}"]
    names = [event.name for _, event in entries]
    if names:
        return [f"the last that is known of it is {names[-1]!r}: it was purged, replayed lately, or runs this moment"]
    return ["nothing is known of it: it never was here, or all its traces have expired"]


def _why_waiting(queue: QueueSnapshot) -> list[str]:
    if queue.is_paused:
        return [f"the queue is paused: tampu queue resume {queue.queue}"]
    if not queue.workers:
        return ["no worker serves this queue: tampu worker app:queue starts one"]
    lines = [f"{plural(queue.waiting, 'job')} wait for {plural(queue.workers, 'worker')}"]
    done = queue.event_rates.get("completed", 0.0)
    if done:
        lines.append(f"{done:.3g} jobs a second are done: it takes up to {duration(queue.waiting / done * 1000)}")
    return lines


def _why_delayed(state: JobState, entries: list[tuple[str, QueueEvent]], queue: QueueSnapshot) -> list[str]:
    left = (state.run_at_ms or 0) - queue.taken_at_ms
    failed = [event for _, event in entries if event.name == "failed"]
    why = f"it waits for retry {len(failed)}" if failed else "it waits for its time"
    lines = [f"{why}, in {duration(left)}" if left > 0 else f"{why}, overdue by {duration(-left)}"]
    if failed:
        reason = str(failed[-1].fields.get("reason", ""))
        lines.append(f"last error: {reason}")
        if reason.startswith("no handler named "):
            lines.append(
                "it waits for a worker whose app has a task of that name, for an hour; then it is a dead letter"
            )
    if left < -2000 and queue.promoter is None:
        lines.append(f"no promoter runs: start a worker, or tampu promoter {queue.queue}")
    return lines


def _why_dead(state: JobState, entries: list[tuple[str, QueueEvent]], queue: QueueSnapshot) -> list[str]:
    letter = state.dead_letter
    if letter is None:
        return ["it is a dead letter"]
    error = f"{letter.error_type}: {letter.error}" if letter.error_type else letter.error or letter.detail or ""
    lines = [f"it became a dead letter: {letter.reason}" + (f" ({error})" if error else "")]
    reasons = {str(event.fields.get("reason", "")) for _, event in entries if event.name == "failed"}
    if len(reasons) > 1:
        lines.append(f"it failed in {len(reasons)} different ways")
    lines.append(f"once the cause is gone: tampu dlq replay {queue.queue} --id {letter.dlq_id}")
    return lines
