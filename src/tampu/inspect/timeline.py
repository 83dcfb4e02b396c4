"""The life of a job: its steps and attempts from its events, where its time went, and why it is in its state."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass, replace
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from tampu.base.units import duration, plural
from tampu.errors import DecodeError
from tampu.inspect.snapshot import UNBLOCK
from tampu.inspect.views import event_ms, iso
from tampu.wire.events import EventName, QueueEvent
from tampu.wire.ulid import decode_ulid_time

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tampu.inspect.jobs import JobState
    from tampu.inspect.snapshot import QueueSnapshot, WorkerInfo

#: Longest run of progress events that is shown in full.
MAX_PROGRESS = 5

#: An event of a job and the ID of its entry.
Event = tuple[str, QueueEvent]


class Around(NamedTuple):
    """What is known of the queue of a job that is explained. Times are by the server's clock."""

    queue: str
    at_ms: int
    waiting: int
    is_paused: bool
    pause_reason: str
    #: Paused tasks, each with its reason.
    paused_tasks: Mapping[str, str]
    #: Jobs that workers complete per second; 0 if it is not known.
    completed_per_sec: float
    has_promoter: bool

    @classmethod
    def of(cls, one: QueueSnapshot) -> Around:
        """Return what a snapshot says."""
        known = (one.is_paused, one.pause_reason, one.paused_tasks, one.event_rates.get("completed", 0.0))
        return cls(one.queue, one.taken_at_ms, one.waiting, *known, one.promoter is not None)


def command(*words: str) -> str:
    """Return a `tampu` command to suggest, quoted for a shell: a queue's name may be chosen to run another one."""
    return f"`tampu {shlex.join(words)}`"


@dataclass(frozen=True, slots=True)
class Step:
    """One event in the life of the job."""

    at_ms: int
    what: str
    note: str = ""
    #: Time since the previous step.
    after_ms: int = 0
    worker: str = ""


def steps_of(state: JobState, entries: list[Event]) -> list[Step]:
    """Return the steps in the life of the job, starting when it was added."""
    added_ms = created_ms(state, entries)
    steps = [] if added_ms is None else [Step(added_ms, "added")]
    for entry_id, event in entries:
        worker = str(event.fields.get("worker", ""))
        steps.append(Step(event_ms(entry_id, event), event.name, details(event), worker=worker))
    # `active` events are written a little later than they happened. The sort is stable, so ties keep their order.
    steps.sort(key=lambda step: step.at_ms)
    _put_starts_before_their_progress(steps)
    gaps = [later.at_ms - earlier.at_ms for earlier, later in pairwise(steps)]
    return [replace(step, after_ms=gap) for step, gap in zip(steps, [0, *gaps], strict=False)]


def _put_starts_before_their_progress(steps: list[Step]) -> None:
    """Move an `active` step before progress of the same millisecond, which was written first but happened later."""
    for place, step in enumerate(steps):
        first = place
        while first and steps[first - 1].what == EventName.PROGRESS and steps[first - 1].at_ms == step.at_ms:
            first -= 1
        if step.what == EventName.ACTIVE and first < place:
            steps.insert(first, steps.pop(place))


def step_json(step: Step) -> dict[str, Any]:
    """Return a step for JSON output."""
    return {"at": iso(step.at_ms), **asdict(step), "worker": step.worker or None}


def condensed(steps: list[Step]) -> list[Step]:
    """Shorten long runs of progress to the first, the last, and the number in between."""
    found: list[Step] = []
    for what, row in groupby(steps, key=lambda step: step.what):
        same = list(row)
        if what == EventName.PROGRESS and len(same) > MAX_PROGRESS:
            after_ms = sum(step.after_ms for step in same[1:-1])
            middle = replace(same[-2], note=f"{len(same) - 2:,} more", after_ms=after_ms)
            same = [same[0], middle, same[-1]]
        found += same
    return found


def created_ms(state: JobState, entries: Sequence[Event]) -> int | None:
    if state.created_at_ms:
        return state.created_at_ms
    stamps = [event.fields.get("created_at_ms") for _, event in entries]
    if known := next((stamp for stamp in stamps if isinstance(stamp, int) and stamp), None):
        return known
    try:
        return decode_ulid_time(state.id)
    except DecodeError:
        return None


def explain(state: JobState, entries: list[Event], queue: Around, workers: Sequence[WorkerInfo]) -> list[str]:
    """Return sentences that explain the job's state and say what to do about it. `workers` includes dead ones."""
    if state.state == "waiting":
        return _why_waiting(state, queue, workers)
    if state.state == "delayed":
        return _why_delayed(state, entries, queue)
    if state.state == "running":
        worker = next((found for found in workers if (found.group, found.name) == (state.group, state.worker)), None)
        if worker is not None and not worker.is_alive:
            return [f"its worker {state.worker} is dead; another worker will run it again once its lease has expired"]
        lines = [f"it is running on worker {state.worker} of group {state.group}"]
        if worker is not None and worker.blocked:
            lines.append(f"{worker.blocked}; {UNBLOCK}")
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


def _why_waiting(state: JobState, queue: Around, workers: Sequence[WorkerInfo]) -> list[str]:
    if state.worker is not None:
        return [f"worker {state.worker} of group {state.group} has fetched it and will start it when a slot is free"]
    if queue.is_paused:
        return [_paused("the queue", queue.pause_reason, command("queue", "resume", queue.queue))]
    live = [worker for worker in workers if worker.is_alive]
    if not live:
        return ["no worker serves this queue; start one with `tampu worker app:queue`"]
    lines = [f"{plural(queue.waiting, 'job')} waiting for {plural(len(live), 'worker')}"]
    lines += [f"worker {worker.name}: {worker.blocked}; {UNBLOCK}" for worker in live if worker.blocked]
    done = queue.completed_per_sec
    if done:
        wait = duration(queue.waiting / done * 1000)
        lines.append(f"workers complete {done:.3g} jobs per second: it should start within {wait}")
    return lines


def _paused(what: str, reason: str, resume: str) -> str:
    return f"{what} is paused{f': {reason}' if reason else ''}; run {resume} to continue"


def _why_delayed(state: JobState, entries: list[Event], queue: Around) -> list[str]:
    left = (state.run_at_ms or 0) - queue.at_ms
    failed = [event for _, event in entries if event.name == "failed"]
    why = f"it is waiting for retry {len(failed)}" if failed else "it is delayed"
    lines = [f"{why}, due in {duration(left)}" if left > 0 else f"{why}, overdue by {duration(-left)}"]
    if state.name in queue.paused_tasks:
        resume = command("queue", "resume", queue.queue, "--task", state.name)
        lines.append(_paused(f"task {state.name}", queue.paused_tasks[state.name], resume))
    if failed:
        reason = str(failed[-1].fields.get("reason", ""))
        lines.append(f"last error: {reason}")
        if reason.startswith("no handler named "):
            until = "until a worker with a task of that name runs it"
            lines.append(f"it is retried for an hour, {until}; then it is dead-lettered")
    if left < -2000 and not queue.has_promoter:
        lines.append(f"no promoter is running; start a worker or {command('promoter', queue.queue)}")
    return lines


def _why_dead(state: JobState, entries: list[Event], queue: Around) -> list[str]:
    letter = state.dead_letter
    if letter is None:
        return ["it is a dead letter"]
    lines = [f"it is a dead letter: {letter.reason}" + (f" ({letter.error_text})" if letter.error_text else "")]
    if len(reasons := {str(event.fields.get("reason", "")) for _, event in entries if event.name == "failed"}) > 1:
        lines.append(f"its attempts failed with {len(reasons)} different errors")
    replay = command("dlq", "replay", queue.queue, "--id", letter.dlq_id)
    lines.append(f"to retry it once the cause is fixed: {replay}")
    return lines


# --- attempts, and where the time went


@dataclass(slots=True)
class Attempt:
    """One run of a job. Times are in epoch milliseconds or milliseconds."""

    number: int
    started_ms: int
    #: `completed`, `failed`, `cancelled`, `running`, or `lost`: its worker died, or was stopped.
    end: str = "running"
    ran_ms: float | None = None
    worker: str = ""
    error: str = ""
    #: Backoff until the next attempt.
    backoff_ms: int | None = None


class Phase(NamedTuple):
    """A part of a job's life: `waiting`, `delayed` (a delay or a backoff), `ok`, `bad` or `run` (a run)."""

    kind: str
    start_ms: float
    end_ms: float


_ENDS = {"completed": "completed", "failed": "failed", "cancelled": "cancelled"}


def attempts_of(state: JobState, entries: Sequence[Event]) -> list[Attempt]:
    """Return the runs of a job, oldest first. A run whose end was not written is known by its start."""
    runs: list[Attempt] = []
    for entry_id, event in sorted(entries, key=lambda entry: event_ms(*entry)):
        at_ms, fields = event_ms(entry_id, event), event.fields
        open_run = runs[-1] if runs and runs[-1].end == "running" else None
        if event.name == EventName.ACTIVE:
            if open_run is not None:
                open_run.end = "lost"
            runs.append(Attempt(_number(fields.get("attempt")), at_ms, worker=str(fields.get("worker", ""))))
        elif event.name in _ENDS:
            took_ms = _number(fields.get("duration_us")) / 1000
            if event.name == EventName.CANCELLED and open_run is None:
                continue  # it was cancelled before it started
            run = open_run or Attempt(_number(fields.get("attempt")), at_ms - round(took_ms))
            if open_run is None:
                runs.append(run)
            run.end, run.error = _ENDS[event.name], str(fields.get("reason", ""))
            run.ran_ms = took_ms or max(at_ms - run.started_ms, 0)
            run.worker = run.worker or str(fields.get("worker", ""))
        elif event.name == EventName.RETRY_SCHEDULED and runs:
            runs[-1].backoff_ms = _number(fields.get("backoff_ms"))
    if runs and runs[-1].end == "running" and state.state != "running":
        runs[-1].end = "lost"
    return runs


def phases_of(state: JobState, entries: Sequence[Event], runs: Sequence[Attempt], now_ms: int) -> list[Phase]:
    """Return how a job spent its time, from when it was added until now or until it ended."""
    position = float(created_ms(state, entries) or (runs[0].started_ms if runs else 0))
    if not position:
        return []
    found: list[Phase] = []
    entered = sorted(event_ms(*entry) for entry in entries if entry[1].name == EventName.WAITING)

    def wait_until(end_ms: float) -> None:
        """Divide the time before a run: delayed until the job entered the queue, then waiting."""
        nonlocal position
        into = next((at for at in entered if position <= at <= end_ms), None)
        if into is not None:
            found.append(Phase("delayed", position, into))
            position = float(into)
        found.append(Phase("waiting", position, max(end_ms, position)))
        position = max(end_ms, position)

    for run in runs:
        wait_until(run.started_ms)
        end_ms = now_ms if run.end == "running" else run.started_ms + (run.ran_ms or 0)
        kind = {"completed": "ok", "running": "run"}.get(run.end, "bad")
        found.append(Phase(kind, position, max(end_ms, position)))
        position = max(end_ms, position)
    if state.state == "waiting":
        wait_until(now_ms)
    elif state.state == "delayed":
        found.append(Phase("delayed", position, max(float(now_ms), position)))
    return [phase for phase in found if phase.end_ms > phase.start_ms]


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0


def last_traceback(state: JobState, events: Sequence[Event]) -> str:
    """Return the traceback of the last failure: the dead letter's, or the last `failed` event's."""
    if state.dead_letter is not None and state.dead_letter.traceback:
        return state.dead_letter.traceback
    return next((str(event.fields["traceback"]) for _, event in reversed(events) if "traceback" in event.fields), "")


def state_by_events(state: JobState, events: Sequence[Event]) -> JobState:
    """Return the state completed from events: the job's name, and `done` for a job without a stored result."""
    name = state.name or next((event.job_name for _, event in events if event.job_name), "")
    ended = state.state == "unknown" and bool(events) and events[-1][1].name == EventName.COMPLETED
    return replace(state, name=name, state="done" if ended else state.state)


def _percent(progress: object) -> str:
    """Return progress as a percentage; values that are not numbers are shown as they are."""
    try:
        return f"{float(str(progress)) * 100:.0f} %"
    except ValueError:
        return f"progress {progress}"


def details(event: QueueEvent) -> str:
    """Return the fields of an event as text."""
    fields = event.fields
    found: list[str] = []
    if "attempt" in fields:
        found.append(f"attempt {fields['attempt']}")
    if "progress" in fields:
        found.append(_percent(fields["progress"]))
    if event.name == EventName.AUDIT:
        count = f" of {fields['count']}" if fields.get("count", 1) != 1 else ""
        found.append(f"{fields.get('action', '')}{count} by {fields.get('operator', '')}")
    found += [str(fields[name]) for name in ("reason", "note", "detail") if fields.get(name)]
    if isinstance(duration_us := fields.get("duration_us"), int):
        found.append(f"took {duration(duration_us / 1000)}")
    if isinstance(backoff_ms := fields.get("backoff_ms"), int):
        found.append(f"in {duration(backoff_ms)}")
    return ", ".join(found)
