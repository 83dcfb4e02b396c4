"""`tampu job list|show|why`: lists of jobs, and the state and the history of one job.

The history is built from the events stream; `explain` says why the job is in its current state.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby, pairwise
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.text import Text
from typer import Argument

from tampu.base.clock import wall_clock_ms
from tampu.cli.commands.events import details
from tampu.cli.errors import CliError
from tampu.cli.options import JobName, QueueName, QueueOption, Raw, choice_option, duration_option, limit_option
from tampu.cli.output import cell, command, progress_bar, say, show, write_json
from tampu.cli.session import CommonOptions, Session, skip_if_broken
from tampu.cli.tables import FittingTable, fact_table
from tampu.cli.units import duration, instant, plural, time_of_day
from tampu.errors import DecodeError
from tampu.inspect.admin import QueueAdmin
from tampu.inspect.jobs import LISTED_STATES, JobState, ListedState
from tampu.inspect.snapshot import UNBLOCK, QueueSnapshot, WorkerInfo
from tampu.inspect.views import event_ms, iso, one_line, payload_of, redacted_event, redacted_state, state_json
from tampu.wire.events import EventName, QueueEvent
from tampu.wire.ulid import decode_ulid_time

app = typer.Typer(help="List jobs, or inspect one: its state and its history.", no_args_is_help=True)

#: Longest run of progress events that is shown in full.
MAX_PROGRESS = 5

#: An event of a job and the ID of its entry.
Event = tuple[str, QueueEvent]
JobId = Annotated[str, Argument(metavar="ID", help="Job ID.")]

_STYLES = {
    "done": "green",
    "dead": "red",
    "running": "cyan",
    "delayed": "yellow",
    "waiting": "yellow",
    "cancelled": "magenta",
    "unknown": "dim",
}
_STEP_STYLES = {"completed": "green", "failed": "red", "dlq": "bold red", "retry-scheduled": "yellow", "active": "cyan"}


# --- the timeline of a job


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
    created_ms = _created_ms(state, entries)
    steps = [] if created_ms is None else [Step(created_ms, "added")]
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


def _created_ms(state: JobState, entries: list[Event]) -> int | None:
    if state.created_at_ms:
        return state.created_at_ms
    stamps = [event.fields.get("created_at_ms") for _, event in entries]
    if known := next((stamp for stamp in stamps if isinstance(stamp, int) and stamp), None):
        return known
    try:
        return decode_ulid_time(state.id)
    except DecodeError:
        return None


def explain(state: JobState, entries: list[Event], queue: QueueSnapshot, workers: Sequence[WorkerInfo]) -> list[str]:
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


def _why_waiting(state: JobState, queue: QueueSnapshot, workers: Sequence[WorkerInfo]) -> list[str]:
    if state.worker is not None:
        return [f"worker {state.worker} of group {state.group} has fetched it and will start it when a slot is free"]
    if queue.is_paused:
        return [_paused("the queue", queue.pause_reason, command("queue", "resume", queue.queue))]
    live = [worker for worker in workers if worker.is_alive]
    if not live:
        return ["no worker serves this queue; start one with `tampu worker app:queue`"]
    lines = [f"{plural(queue.waiting, 'job')} waiting for {plural(len(live), 'worker')}"]
    lines += [f"worker {worker.name}: {worker.blocked}; {UNBLOCK}" for worker in live if worker.blocked]
    done = queue.event_rates.get("completed", 0.0)
    if done:
        wait = duration(queue.waiting / done * 1000)
        lines.append(f"workers complete {done:.3g} jobs per second: it should start within {wait}")
    return lines


def _paused(what: str, reason: str, resume: str) -> str:
    return f"{what} is paused{f': {reason}' if reason else ''}; run {resume} to continue"


def _why_delayed(state: JobState, entries: list[Event], queue: QueueSnapshot) -> list[str]:
    left = (state.run_at_ms or 0) - queue.taken_at_ms
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
    if left < -2000 and queue.promoter is None:
        lines.append(f"no promoter is running; start a worker or {command('promoter', queue.queue)}")
    return lines


def _why_dead(state: JobState, entries: list[Event], queue: QueueSnapshot) -> list[str]:
    letter = state.dead_letter
    if letter is None:
        return ["it is a dead letter"]
    lines = [f"it is a dead letter: {letter.reason}" + (f" ({letter.error_text})" if letter.error_text else "")]
    if len(reasons := {str(event.fields.get("reason", "")) for _, event in entries if event.name == "failed"}) > 1:
        lines.append(f"its attempts failed with {len(reasons)} different errors")
    replay = command("dlq", "replay", queue.queue, "--id", letter.dlq_id)
    lines.append(f"to retry it once the cause is fixed: {replay}")
    return lines


# --- commands


@app.command("list")
def list_(
    common: CommonOptions,
    queue: QueueName,
    state: Annotated[
        ListedState, choice_option(LISTED_STATES, "--state", "-s", help="List jobs in this state.")
    ] = "running",
    name: JobName = None,
    older_than: Annotated[
        float | None, duration_option(help="Only jobs that started, failed or were added at least this long ago (15m).")
    ] = None,
    limit: Annotated[int, limit_option(help="Maximum number of jobs, oldest first.")] = 50,
) -> None:
    """List running, waiting, delayed or dead jobs, oldest first."""
    age_ms = None if older_than is None else round(older_than * 1000)
    jobs = common.read(queue, lambda admin: admin.jobs(state, name=name, older_than_ms=age_ms, limit=limit))
    found = list(map(redacted_state, jobs))
    if common.as_json:
        write_json([state_json(queue, job, raw=False) for job in found])
        return
    if not found:
        say(f"no {state} jobs" if name is None and older_than is None else f"no matching {state} jobs")
        return
    show(_jobs_table(state, found))
    if len(found) == limit:
        say(f"showing the first {limit:,}; raise --limit to see more")


def _jobs_table(state: ListedState, found: list[JobState]) -> FittingTable:
    age = {"running": "running for", "dead": "died"}.get(state, "added")
    last = {"dead": "error", "delayed": "due"}.get(state, "worker")
    spare = ("attempts", last if last == "worker" else age)
    columns = ("id", "name", age, "attempts", last)
    rows = FittingTable(*columns, numbers=("attempts",), whole=("id",), spare=spare, cut="error")
    for job in found:
        letter = job.dead_letter
        due = instant(job.run_at_ms) if job.run_at_ms is not None else ""
        error = "" if letter is None else letter.error_text or letter.reason
        when = duration(job.age_ms) if job.age_ms is not None else "-"
        attempts = job.attempt if letter is None else letter.attempts
        rows.add_row(
            cell(job.id or "(cannot be decoded)", "bold"),
            cell(job.name),
            cell(when if state == "running" else f"{when} ago"),
            cell("-" if attempts is None else attempts),
            cell({"due": due, "error": error}.get(last, job.worker or ""), "dim"),
        )
    return rows


@app.command("show")
def show_(common: CommonOptions, job_id: JobId, queue: QueueOption = None, raw: Raw = False) -> None:
    """Show the state of a job: waiting, delayed, running, done, dead or cancelled."""

    async def work(session: Session) -> tuple[str, JobState, dict[str, Any]]:
        admin, state = await _find(session, queue, job_id)
        if state.state == "unknown":
            admin, events = await _find_events(session, queue, job_id)
            return admin.name, _state_by_events(state, events), {}
        job = None if state.entry_id is None else await admin.job_in_stream(state.entry_id)
        return admin.name, state, {} if job is None else {"payload": payload_of(job, admin.name, raw=raw)}

    name, state, payload = common.run(work)
    shown = state_json(name, state, raw=raw) | payload
    common.report(shown, _state_view(name, state, shown))


@app.command()
def why(common: CommonOptions, job_id: JobId, queue: QueueOption = None) -> None:
    """Show every step of a job's life, and explain its current state."""

    async def work(session: Session) -> tuple[str, JobState, list[Step], list[str], str]:
        admin, state = await _find(session, queue, job_id)
        if state.state == "unknown":
            admin, events = await _find_events(session, queue, job_id)
        else:
            events = await _events(admin, job_id)
        state = _state_by_events(state, events)
        reasons = explain(state, events, await admin.snapshot(sizes=False), await admin.workers(dead=True))
        if count := await admin.replay_count(job_id):
            reasons.insert(0, f"it was a dead letter and was replayed {plural(count, 'time')}")
        return admin.name, state, steps_of(state, events), reasons, _last_traceback(state, events)

    name, state, steps, reasons, traceback = common.run(work)
    if common.as_json:
        shown = {"queue": name, "id": job_id, "state": state.state, "why": reasons, "traceback": traceback or None}
        write_json(shown | {"steps": [_step_json(step) for step in steps]})
    else:
        show(_timeline_view(name, state, steps, reasons))
        if traceback:
            show(Text("\nlast failure", style="dim"))
            for line in traceback.rstrip().splitlines():
                show(cell(line))


def _step_json(step: Step) -> dict[str, Any]:
    return {"at": iso(step.at_ms), **asdict(step), "worker": step.worker or None}


def _last_traceback(state: JobState, events: list[Event]) -> str:
    """Return the traceback of the last failure: the dead letter's, or the last `failed` event's."""
    if state.dead_letter is not None and state.dead_letter.traceback:
        return state.dead_letter.traceback
    return next((str(event.fields["traceback"]) for _, event in reversed(events) if "traceback" in event.fields), "")


async def _find(session: Session, name: str | None, job_id: str) -> tuple[QueueAdmin, JobState]:
    """Return the job's queue and state; without a queue name, search all queues."""
    admins = await session.admins(name, opens_results=True)
    if not admins:
        raise CliError(f"there are no queues at {session.place} yet")
    for admin in admins:
        with skip_if_broken(admin.name, is_one_of_many=name is None):
            state = redacted_state(await admin.job(job_id))
            if state.state != "unknown":
                return admin, state
    return admins[0], JobState(id=job_id, state="unknown")


async def _find_events(session: Session, name: str | None, job_id: str) -> tuple[QueueAdmin, list[Event]]:
    """Find the queue whose events mention the job: a job that completed without a result leaves no other record."""
    for admin in await session.admins(name):
        with skip_if_broken(admin.name, is_one_of_many=name is None):
            if events := await _events(admin, job_id):
                return admin, events
    raise CliError(f"no such job: {job_id!r} never existed, or its records have expired")


async def _events(admin: QueueAdmin, job_id: str) -> list[Event]:
    total = await admin.client.call("XLEN", admin.keys.events)
    with progress_bar(f"reading the events of {admin.name}", total) as done:
        return [(entry_id, redacted_event(event)) for entry_id, event in await admin.job_events(job_id, done)]


def _state_by_events(state: JobState, events: list[Event]) -> JobState:
    """Return the state completed from events: the job's name, and `done` for a job without a stored result."""
    name = state.name or next((event.job_name for _, event in events if event.job_name), "")
    ended = state.state == "unknown" and bool(events) and events[-1][1].name == EventName.COMPLETED
    return replace(state, name=name, state="done" if ended else state.state)


def _state_view(queue: str, state: JobState, shown: dict[str, Any]) -> Group:
    letter = state.dead_letter
    facts: list[tuple[str, Any]] = [
        ("queue", queue),
        ("name", state.name),
        ("added", instant(state.created_at_ms) if state.created_at_ms else None),
        ("failed attempts", state.attempt),
        ("due", instant(state.run_at_ms) if state.run_at_ms is not None else None),
        ("worker", f"{state.worker} (group {state.group})" if state.worker else None),
        ("progress", None if state.progress is None else f"{state.progress:.0%} {state.progress_note}".rstrip()),
        ("lease renewed", f"{duration(state.idle_ms)} ago" if state.idle_ms is not None else None),
        ("reason", state.reason if letter is None else letter.reason),
        ("error", letter and letter.error_text),
        ("dead letter", letter and letter.dlq_id),
        ("payload", one_line(shown["payload"]) if "payload" in shown else None),
        ("result", one_line(shown["result"]) if "result" in shown else None),
    ]
    rows = fact_table(facts)
    if state.state == "unknown":
        why = command("job", "why", state.id)
        rows.add_row("", cell(f"not in the queue now; run {why} to see what happened to it"))
    return Group(Text.assemble(cell(state.id, "bold"), "  ", cell(state.state, _STYLES[state.state])), rows)


def _how_long(state: JobState, steps: list[Step]) -> str:
    """Return how long a job has been running or, if it has ended, how long it took from when it was added."""
    started = [step.at_ms for step in steps if step.what == "active"]
    if state.state == "running" and started:
        return f" for {duration(max(wall_clock_ms() - started[-1], 0))}"
    if state.state in ("waiting", "delayed") or len(steps) < 2:
        return ""
    return f" after {duration(steps[-1].at_ms - steps[0].at_ms)}"


def _timeline_view(queue: str, state: JobState, steps: list[Step], reasons: list[str]) -> Group:
    head = Text.assemble(
        cell(state.id, "bold"),
        cell(f"  {state.name or ''}".rstrip()),
        cell(f"  in {queue}  ", "dim"),
        cell(state.state if state.state != "unknown" else "gone", _STYLES[state.state]),
        cell(_how_long(state, steps), "dim"),
    )
    rows = FittingTable("time", "after", "what", "", "worker", numbers=("after",), spare=("worker",))
    for number, step in enumerate(condensed(steps)):
        rows.add_row(
            cell(time_of_day(step.at_ms)),
            cell(f"+{duration(step.after_ms)}" if number else "", "yellow" if step.after_ms >= 1000 else "dim"),
            cell(step.what, _STEP_STYLES.get(step.what, "")),
            cell(step.note),
            cell(step.worker, "dim"),
        )
    return Group(head, rows, *(Text.assemble(("→ ", "bold"), cell(reason)) for reason in reasons))
