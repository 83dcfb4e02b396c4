"""`tampu job list|show|why`: lists of jobs, and the state and the history of one job.

`inspect/timeline.py` builds the history from the events, and says why the job is in its state.
"""

import math
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.text import Text
from typer import Argument, Option

from tampu.base.clock import wall_clock_ms
from tampu.base.units import duration, plural
from tampu.cli.errors import CliError
from tampu.cli.options import JobName, QueueName, QueueOption, Raw, choice_option, duration_option, limit_option
from tampu.cli.output import cell, command, say, show, write_json
from tampu.cli.session import CommonOptions, Session, skip_if_broken
from tampu.cli.tables import FittingTable, fact_table
from tampu.cli.units import instant, time_of_day
from tampu.inspect.admin import QueueAdmin
from tampu.inspect.jobs import LISTED_STATES, JobState, ListedState
from tampu.inspect.timeline import (
    Around,
    Event,
    Step,
    condensed,
    explain,
    last_traceback,
    state_by_events,
    step_json,
    steps_of,
)
from tampu.inspect.views import one_line, payload_of, redacted_event, redacted_state, state_json
from tampu.inspect.walk import MAX_READ, Wanted, read_events

app = typer.Typer(help="List jobs, or inspect one: its state and its history.", no_args_is_help=True)

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
    every: Annotated[
        bool, Option("--all", help="Search all jobs for those that match, instead of the first 10,000.")
    ] = False,
) -> None:
    """List running, waiting, delayed or dead jobs, oldest first."""
    wanted = Wanted(name, older_than_ms=None if older_than is None else round(older_than * 1000))
    most = math.inf if every else MAX_READ
    walked = common.read(queue, lambda admin: admin.walk_jobs(state, wanted, limit=limit, max_read=most))
    found = list(map(redacted_state, walked.jobs))
    if walked.cursor is not None and len(found) < limit:
        say(f"only the first {walked.looked:,} {state} jobs were searched; --all searches all of them", "yellow")
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
            return admin.name, state_by_events(state, events), {}
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
        state = state_by_events(state, events)
        reasons = explain(state, events, Around.of(await admin.snapshot(sizes=False)), await admin.workers(dead=True))
        if state.state == "waiting":
            reasons += await admin.why_held(state)
        if count := await admin.replay_count(job_id):
            reasons.insert(0, f"it was a dead letter and was replayed {plural(count, 'time')}")
        return admin.name, state, steps_of(state, events), reasons, last_traceback(state, events)

    name, state, steps, reasons, traceback = common.run(work)
    if common.as_json:
        shown = {"queue": name, "id": job_id, "state": state.state, "why": reasons, "traceback": traceback or None}
        write_json(shown | {"steps": [step_json(step) for step in steps]})
    else:
        show(_timeline_view(name, state, steps, reasons))
        if traceback:
            show(Text("\nlast failure", style="dim"))
            for line in traceback.rstrip().splitlines():
                show(cell(line))


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
    found, is_whole = await read_events(admin.client, admin.keys, job_id)
    if not is_whole:
        say(f"{admin.name} has many events since then: only the first and the last 10,000 were searched", "yellow")
    return [(entry_id, redacted_event(event)) for entry_id, event in found]


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
