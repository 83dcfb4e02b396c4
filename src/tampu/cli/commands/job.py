"""`tampu job list|show|why`: lists of jobs, and the state and the history of one job."""

import dataclasses
from dataclasses import replace
from typing import Annotated, Any, cast

import typer
from rich.console import Group
from rich.text import Text

from tampu.base.clock import wall_clock_ms
from tampu.cli.commands.dlq import letter_to_json
from tampu.cli.commands.job_timeline import Step, condensed, explain, read_events, steps_of
from tampu.cli.errors import CliError, check_choice
from tampu.cli.options import QueueName, QueueOption, Raw
from tampu.cli.output import cell, command, progress_bar, say, show, write_json
from tampu.cli.payloads import envelope_of, one_line, payload_of, queue_codec, shown_value
from tampu.cli.redact import redacted_state
from tampu.cli.session import CommonOptions, Session, skip_if_broken
from tampu.cli.tables import FittingTable, fact_table
from tampu.cli.units import duration, instant, iso, parse_duration, plural, time_of_day
from tampu.inspect.job_state import JobState, find_job
from tampu.inspect.jobs import LISTED_STATES, ListedState
from tampu.inspect.snapshot import take_snapshot
from tampu.redis.client import Client
from tampu.wire.dlq import DlqEntry
from tampu.wire.entry import read_job_fields
from tampu.wire.events import EventName, QueueEvent
from tampu.wire.keys import QueueKeys

app = typer.Typer(help="List jobs, or inspect one: its state and its history.", no_args_is_help=True)

JobId = Annotated[str, typer.Argument(metavar="ID", help="Job ID.")]

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
        str, typer.Option("--state", "-s", metavar="|".join(LISTED_STATES), help="List jobs in this state.")
    ] = "running",
    name: Annotated[str | None, typer.Option("--name", help="Only jobs with this name.")] = None,
    older_than: Annotated[
        str | None,
        typer.Option(
            "--older-than",
            metavar="DURATION",
            help="Only jobs that started, failed or were added at least this long ago (15m).",
        ),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="Maximum number of jobs, oldest first.")] = 50,
) -> None:
    """List running, waiting, delayed or dead jobs, oldest first."""
    check_choice("--state", state, LISTED_STATES)
    older_than_secs = None if older_than is None else parse_duration(older_than)

    async def work(session: Session) -> list[JobState]:
        jobs = await session.queue(queue)
        found = await jobs.jobs(cast("ListedState", state), name=name, older_than=older_than_secs, limit=limit)
        return list(map(redacted_state, found))

    found = common.run(work)
    if common.as_json:
        write_json([_state_to_json(queue, job, raw=False) for job in found])
        return
    if not found:
        say(f"no {state} jobs" if name is None and older_than is None else f"no matching {state} jobs")
        return
    show(_jobs_table(state, found))
    if len(found) == limit:
        say(f"showing the first {limit:,}; raise --limit to see more")


def _jobs_table(state: str, found: list[JobState]) -> FittingTable:
    age = {"running": "running for", "dead": "died", "delayed": "added", "waiting": "added"}[state]
    last = {"running": "worker", "dead": "error", "delayed": "due", "waiting": "worker"}[state]
    spare = {"running": ("attempts", last), "waiting": ("attempts", last)}.get(state, ("attempts", age))
    cut = last if state == "dead" else None
    rows = FittingTable("id", "name", age, "attempts", last, numbers=("attempts",), whole=("id",), spare=spare, cut=cut)
    for job in found:
        letter = job.dead_letter
        value = {
            "worker": job.worker or "",
            "due": instant(job.run_at_ms) if job.run_at_ms is not None else "",
            "error": "" if letter is None else _error_of(letter),
        }[last]
        when = duration(job.age_ms) if job.age_ms is not None else "-"
        attempts = job.attempt if letter is None else letter.attempts
        rows.add_row(
            cell(job.id or "(cannot be decoded)", "bold"),
            cell(job.name),
            cell(when if state == "running" else f"{when} ago"),
            cell("-" if attempts is None else attempts),
            cell(value, "dim"),
        )
    return rows


def _error_of(letter: DlqEntry) -> str:
    return f"{letter.error_type}: {letter.error}" if letter.error_type else letter.detail or letter.reason


@app.command("show")
def show_(common: CommonOptions, job_id: JobId, queue: QueueOption = None, raw: Raw = False) -> None:
    """Show the state of a job: waiting, delayed, running, done, dead or cancelled."""

    async def work(session: Session) -> tuple[str, JobState, dict[str, Any]]:
        client, keys, state = await _find(session, queue, job_id)
        if state.state == "unknown":
            _, keys, events = await _find_events(session, queue, job_id)
            return keys.queue_name, _state_by_events(state, events), {}
        return keys.queue_name, state, await _payload(client, keys, state, raw=raw)

    name, state, payload = common.run(work)
    told = _state_to_json(name, state, raw=raw) | payload
    if common.as_json:
        write_json(told)
    else:
        show(_state_view(name, state, told))


@app.command()
def why(common: CommonOptions, job_id: JobId, queue: QueueOption = None) -> None:
    """Show every step of a job's life, and explain its current state."""

    async def work(session: Session) -> tuple[str, JobState, list[Step], list[str], str]:
        client, keys, state = await _find(session, queue, job_id)
        if state.state == "unknown":
            client, keys, events = await _find_events(session, queue, job_id)
        else:
            events = await _events(client, keys, job_id)
        state = _state_by_events(state, events)
        reasons = explain(state, events, await take_snapshot(client, keys, sizes=False))
        if replays := await client.call("HGET", keys.replays, job_id):
            count = int(replays) if replays.isdigit() and len(replays) < 20 else 1
            reasons.insert(0, f"it was a dead letter and was replayed {plural(count, 'time')}")
        return keys.queue_name, state, steps_of(state, events), reasons, _last_traceback(state, events)

    name, state, steps, reasons, traceback = common.run(work)
    if common.as_json:
        told = {"queue": name, "id": job_id, "state": state.state, "why": reasons, "traceback": traceback or None}
        write_json(told | {"steps": [step.to_json() for step in steps]})
    else:
        show(_timeline_view(name, state, steps, reasons))
        if traceback:
            show(Text("\nlast failure", style="dim"))
            for line in traceback.rstrip().splitlines():
                show(cell(line))


def _last_traceback(state: JobState, events: list[tuple[str, QueueEvent]]) -> str:
    """Return the traceback of the last failure: the dead letter's, or the last `failed` event's."""
    if state.dead_letter is not None and state.dead_letter.traceback:
        return state.dead_letter.traceback
    return next((str(event.fields["traceback"]) for _, event in reversed(events) if "traceback" in event.fields), "")


async def _find(session: Session, name: str | None, job_id: str) -> tuple[Client, QueueKeys, JobState]:
    """Return the job's queue and state; without a queue name, search all queues."""
    views = await session.views(name)
    if not views:
        raise CliError(f"there are no queues at {session.place} yet")
    for client, keys in views:
        with skip_if_broken(keys.queue_name, is_one_of_many=name is None):
            state = redacted_state(await find_job(client, keys, job_id, queue_codec(keys.queue_name)))
            if state.state != "unknown":
                return client, keys, state
    return *views[0], JobState(id=job_id, state="unknown")


async def _find_events(
    session: Session, name: str | None, job_id: str
) -> tuple[Client, QueueKeys, list[tuple[str, QueueEvent]]]:
    """Find the queue whose events mention the job: a job that completed without a result leaves no other record."""
    for client, keys in await session.views(name):
        with skip_if_broken(keys.queue_name, is_one_of_many=name is None):
            if events := await _events(client, keys, job_id):
                return client, keys, events
    raise CliError(f"no such job: {job_id!r} never existed, or its records have expired")


async def _events(client: Client, keys: QueueKeys, job_id: str) -> list[tuple[str, QueueEvent]]:
    with progress_bar(f"reading the events of {keys.queue_name}", await client.call("XLEN", keys.events)) as done:
        return await read_events(client, keys, job_id, done)


def _state_by_events(state: JobState, events: list[tuple[str, QueueEvent]]) -> JobState:
    """Return the state completed from events: the job's name, and `done` for a job without a stored result."""
    name = state.name or next((event.job_name for _, event in events if event.job_name), "")
    ended = state.state == "unknown" and bool(events) and events[-1][1].name == EventName.COMPLETED
    return replace(state, name=name, state="done" if ended else state.state)


async def _payload(client: Client, keys: QueueKeys, state: JobState, *, raw: bool) -> dict[str, Any]:
    """Return the payload of a job that is still in the stream."""
    if state.entry_id is None:
        return {}
    entries = await client.call("XRANGE", keys.stream, state.entry_id, state.entry_id)
    for _, fields in entries:
        envelope, name = read_job_fields(fields)
        job = envelope_of(envelope or b"", name)
        if job is not None:
            return {"payload": payload_of(job, keys.queue_name, raw=raw)}
    return {}


def _state_to_json(queue: str, state: JobState, *, raw: bool) -> dict[str, Any]:
    # Not `asdict`, which copies a result level by level and fails if it is nested deeply.
    known = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    told: dict[str, Any] = {"queue": queue, **{name: value for name, value in known.items() if value is not None}}
    told.pop("dead_letter", None)
    told.pop("result", None)
    if state.state == "done":
        told["result"] = shown_value(state.result)
    if state.run_at_ms is not None:
        told["run_at"] = iso(state.run_at_ms)
    if state.dead_letter is not None:
        told["dead_letter"] = letter_to_json(state.dead_letter, queue, raw=raw)
        told["payload"] = told["dead_letter"]["payload"]
    return told


def _state_view(queue: str, state: JobState, told: dict[str, Any]) -> Group:
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
        ("error", letter and (f"{letter.error_type}: {letter.error}" if letter.error_type else letter.detail)),
        ("dead letter", letter and letter.dlq_id),
        ("payload", one_line(told["payload"]) if "payload" in told else None),
        ("result", one_line(told["result"]) if "result" in told else None),
    ]
    rows = fact_table(facts)
    if state.state == "unknown":
        rows.add_row(
            "", cell(f"not in the queue now; run {command('job', 'why', state.id)} to see what happened to it")
        )
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
    name = state.name
    head = Text.assemble(
        cell(state.id, "bold"),
        cell(f"  {name or ''}".rstrip()),
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
