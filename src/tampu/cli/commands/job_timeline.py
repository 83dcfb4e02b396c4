"""Builds a job's timeline from the events stream, and explains why the job is in its current state."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from tampu.cli.commands.events import details, event_ms
from tampu.cli.output import command
from tampu.cli.redact import redacted_event
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

#: Events per read.
PAGE = 1000
#: Longest run of progress events that is shown in full.
MOST_PROGRESS = 5
#: Assumed maximum difference between the clocks of producers and servers, in milliseconds.
CLOCK_SLACK_MS = 60_000


@dataclass(frozen=True, slots=True)
class Step:
    """One event in the life of the job."""

    at_ms: int
    what: str
    note: str = ""
    #: Time since the previous step.
    after_ms: int = 0
    worker: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the step for JSON output."""
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
    """Return the job's events, oldest first. A ULID's timestamp says where to start; otherwise read all events."""
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
                    found.append((entry_id.decode(), redacted_event(event)))
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
    """Return the steps in the life of the job, starting when it was added."""
    raw: list[Step] = []
    created_ms = _created_ms(state, entries)
    if created_ms is not None:
        raw.append(Step(created_ms, "added"))
    for entry_id, event in entries:
        raw.append(
            Step(event_ms(entry_id, event), event.name, details(event), worker=str(event.fields.get("worker", "")))
        )
    # `active` events are written a little later than they happened. The sort is stable, so ties keep their order.
    raw.sort(key=lambda step: step.at_ms)
    _put_starts_before_their_progress(raw)
    steps: list[Step] = []
    for step in raw:
        after_ms = max(step.at_ms - steps[-1].at_ms, 0) if steps else 0
        steps.append(Step(step.at_ms, step.what, step.note, after_ms, step.worker))
    return steps


def _put_starts_before_their_progress(steps: list[Step]) -> None:
    """Move an `active` step before progress of the same millisecond, which was written first but happened later."""
    for place, step in enumerate(steps):
        first = place
        while first and steps[first - 1].what == EventName.PROGRESS and steps[first - 1].at_ms == step.at_ms:
            first -= 1
        if step.what == EventName.ACTIVE and first < place:
            steps.insert(first, steps.pop(place))


def condensed(steps: list[Step]) -> list[Step]:
    """Shorten long runs of progress to the first, the last, and the number in between."""
    found: list[Step] = []
    for what, row in groupby(steps, key=lambda step: step.what):
        same = list(row)
        if what == EventName.PROGRESS and len(same) > MOST_PROGRESS:
            between = same[1:-1]
            after_ms = sum(step.after_ms for step in between)
            note = f"{len(between):,} more"
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
    """Return sentences that explain the job's state and say what to do about it."""
    if state.state == "waiting":
        return _why_waiting(state, queue)
    if state.state == "delayed":
        return _why_delayed(state, entries, queue)
    if state.state == "running":
        dead = {(group.name, one.name) for group in queue.groups for one in group.consumers if not one.is_alive}
        if (state.group, state.worker) in dead:
            return [f"its worker {state.worker} is dead; another worker will run it again once its lease has expired"]
        lines = [f"it is running on worker {state.worker} of group {state.group}"]
        if state.idle_ms is not None and state.idle_ms > 60_000:
            lines.append(f"its lease was last renewed {duration(state.idle_ms)} ago; another worker will take it over")
        return lines
    if state.state == "dead":
        return _why_dead(state, entries, queue)
    if state.state == "done":
        stored = "its result is stored" if state.result is not None else "no result is stored (none, or expired)"
        return [f"it completed; {stored}"]
    names = [event.name for _, event in entries]
    if names:
        return [f"its last event is {names[-1]!r}: it was purged, has just been replayed, or is about to run"]
    return ["no such job: it never existed, or its records have expired"]


def _why_waiting(state: JobState, queue: QueueSnapshot) -> list[str]:
    if state.worker is not None:
        return [f"worker {state.worker} of group {state.group} has fetched it and will start it when a slot is free"]
    if queue.is_paused:
        why = f": {queue.pause_reason}" if queue.pause_reason else ""
        return [f"the queue is paused{why}; run {command('queue', 'resume', queue.queue)} to continue"]
    if not queue.workers:
        return ["no worker serves this queue; start one with `tampu worker app:queue`"]
    lines = [f"{plural(queue.waiting, 'job')} waiting for {plural(queue.workers, 'worker')}"]
    done = queue.event_rates.get("completed", 0.0)
    if done:
        wait = duration(queue.waiting / done * 1000)
        lines.append(f"workers complete {done:.3g} jobs per second: it should start within {wait}")
    return lines


def _why_delayed(state: JobState, entries: list[tuple[str, QueueEvent]], queue: QueueSnapshot) -> list[str]:
    left = (state.run_at_ms or 0) - queue.taken_at_ms
    failed = [event for _, event in entries if event.name == "failed"]
    why = f"it is waiting for retry {len(failed)}" if failed else "it is delayed"
    lines = [f"{why}, due in {duration(left)}" if left > 0 else f"{why}, overdue by {duration(-left)}"]
    if state.name in queue.paused_tasks:
        reason = queue.paused_tasks[state.name]
        paused = f"task {state.name} is paused" + (f": {reason}" if reason else "")
        lines.append(f"{paused}; run {command('queue', 'resume', queue.queue, '--task', state.name)} to continue")
    if failed:
        reason = str(failed[-1].fields.get("reason", ""))
        lines.append(f"last error: {reason}")
        if reason.startswith("no handler named "):
            lines.append(
                "it is retried for an hour, until a worker with a task of that name runs it; then it is dead-lettered"
            )
    if left < -2000 and queue.promoter is None:
        lines.append(f"no promoter is running; start a worker or {command('promoter', queue.queue)}")
    return lines


def _why_dead(state: JobState, entries: list[tuple[str, QueueEvent]], queue: QueueSnapshot) -> list[str]:
    letter = state.dead_letter
    if letter is None:
        return ["it is a dead letter"]
    error = f"{letter.error_type}: {letter.error}" if letter.error_type else letter.error or letter.detail or ""
    lines = [f"it is a dead letter: {letter.reason}" + (f" ({error})" if error else "")]
    reasons = {str(event.fields.get("reason", "")) for _, event in entries if event.name == "failed"}
    if len(reasons) > 1:
        lines.append(f"its attempts failed with {len(reasons)} different errors")
    replay = command("dlq", "replay", queue.queue, "--id", letter.dlq_id)
    lines.append(f"to retry it once the cause is fixed: {replay}")
    return lines
