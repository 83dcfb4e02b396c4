"""`tampu add`, `tampu cancel` and `tampu schedule list|run|remove`: changes of jobs and schedules."""

import json
import sys
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from typing import Annotated, Any

import typer
from typer import Argument, Option

from tampu.base.checks import check_delay_ms
from tampu.base.units import duration, plural
from tampu.cli.errors import CliError, UsageError
from tampu.cli.options import Confirmation, JobName, QueueName, choice_option, duration_option, limit_option
from tampu.cli.output import cell, progress_bar, say, show, write_json
from tampu.cli.session import CommonOptions, Session
from tampu.cli.tables import FittingTable
from tampu.cli.units import instant
from tampu.errors import Error, JobCancelled, JobFailed
from tampu.inspect.admin import CancelOutcome, QueueAdmin
from tampu.inspect.changes import fire as fire_now
from tampu.inspect.jobs import ListedState
from tampu.inspect.views import one_line, redacted, schedule_json
from tampu.queue import Queue
from tampu.wire.repeat import RepeatableMeta

app = typer.Typer(help="List, run or remove schedules.", no_args_is_help=True)

#: Maximum number of jobs that one call cancels by filter; call it again for the rest.
MAX_JOBS = 10_000
CANCELLABLE: tuple[ListedState, ...] = ("waiting", "running", "delayed")

Key = Annotated[str, Argument(metavar="KEY", help="Key of the schedule, as shown by `list`.")]


def add(
    common: CommonOptions,
    queue: QueueName,
    name: Annotated[str, Argument(metavar="NAME", help="Job name, which is the name of its task.")],
    payload: Annotated[
        str, Argument(metavar="JSON", help="Payload: the task's arguments as JSON; - reads stdin.")
    ] = "{}",
    delay: Annotated[float | None, duration_option(help="Run the job after this long (90s, 15m, 2h).")] = None,
    job_id: Annotated[
        str | None,
        Option("--id", metavar="ID", help="Job ID. A second add with the same ID within an hour is ignored."),
    ] = None,
    attempts: Annotated[int | None, Option(min=1, help="Maximum number of attempts.")] = None,
    app: Annotated[
        str | None,
        Option(
            metavar="APP:QUEUE",
            help="Check the arguments against the task in this module, and use its options and the queue's server.",
        ),
    ] = None,
    wait: Annotated[float | None, duration_option(help="Wait up to this long for the result and print it.")] = None,
) -> None:
    """Add a job and print its ID.

    With --app, the arguments are checked and the task's options apply, as if the app had added the job:
    `tampu add emails welcome '{"to": "ada@example.com"}' --app app:queue`.
    """
    value = parse_json(sys.stdin.read() if payload == "-" else payload)
    options: dict[str, Any] = {"job_id": job_id, "attempts": attempts}
    if delay is not None:
        options["delay"] = timedelta(seconds=delay)
    known = None if app is None else _app_queue(app, queue)
    if known is not None and common.url is None:
        common = replace(common, url=known.url)

    async def work(session: Session) -> dict[str, Any]:
        target = await session.new_queue(queue, strict=known is not None)
        if known is not None:
            target.tasks = known.tasks
        job = await target.add(name, value, **options)
        added = {"id": str(job.id), "is_new": getattr(job.id, "is_new", True), "queue": queue, "name": name}
        if wait is not None:
            try:
                added["result"] = redacted("result", await job.result(wait))
            except (JobFailed, JobCancelled) as error:
                error.args = (str(redacted("error", str(error))),)
                raise
            except TimeoutError as error:
                raise CliError(str(error)) from error
        return added

    try:
        added = common.run(work)
    except TypeError as error:  # the payload does not fit the task
        if isinstance(error, Error):
            raise
        raise UsageError(str(error)) from error
    result = [one_line(added["result"], limit=10_000)] if "result" in added else []
    common.report(added, "\n".join([added["id"], *result]))
    if not added["is_new"]:
        say(f"a job with the ID {added['id']} was added before; nothing was added", "yellow")


def _app_queue(app: str, name: str) -> Queue:
    """Return the queue of this name in an app."""
    from tampu.cli.commands.worker.child import load  # imported here: only --app needs them
    from tampu.worker import Worker

    found = load([app])
    queues = found.queues if isinstance(found, Worker) else found
    for queue in queues:
        if queue.name == name:
            return queue
    raise UsageError(f"{app} has no queue {name!r}; it has {', '.join(queue.name for queue in queues)}")


def parse_json(text: str) -> Any:
    """Parse strict JSON: NaN and Infinity are refused, because other JSON parsers reject them."""

    def refuse(constant: str) -> Any:
        raise UsageError(f"the payload contains {constant}, which is not valid JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except json.JSONDecodeError as error:
        shown = text if len(text) <= 40 else f"{text[:40]}..."
        where = f"character {error.pos + 1} of {shown!r}"
        raise UsageError(f"the payload is not valid JSON: {error.msg} at {where}") from error
    except RecursionError as error:
        raise UsageError("the payload is nested too deeply to parse") from error


# --- cancel


def cancel(
    common: CommonOptions,
    queue: QueueName,
    confirmation: Confirmation,
    ids: Annotated[list[str] | None, Argument(metavar="ID...", help="Job IDs.")] = None,
    name: JobName = None,
    older_than: Annotated[float | None, duration_option(help="Only jobs at least this old (90s, 15m, 2h, 7d).")] = None,
    state: Annotated[ListedState | None, choice_option(CANCELLABLE, "--state", help="Only jobs in this state.")] = None,
    reason: Annotated[str, Option(help="Reason, shown in events and to callers that wait for the job.")] = "",
) -> None:
    """Cancel jobs by ID, or all that match --name, --older-than and --state, up to 10,000 per call.

    Delayed jobs are removed at once, running jobs cancelled within about 2 s, and waiting jobs dropped when fetched.
    """
    has_filter = name is not None or older_than is not None or state is not None
    if bool(ids) == has_filter:
        raise UsageError("pass either job IDs or a filter: --name, --older-than or --state")
    older_than_ms = None if older_than is None else check_delay_ms(older_than, "older_than")

    async def matching(admin: QueueAdmin) -> list[str]:
        found = ids or []
        for each in () if ids else CANCELLABLE if state is None else (state,):
            if room := MAX_JOBS - len(found):
                jobs = await admin.jobs(each, name=name, older_than_ms=older_than_ms, limit=room)
                found += [job.id for job in jobs if job.id]
        return found

    found = common.change(queue, matching)
    outcomes: dict[str, CancelOutcome] = {}
    if confirmation.ask(f"cancel {plural(len(found), 'job')} of {queue}", len(found)):
        with progress_bar("cancelling", len(found)) as done:
            outcomes = common.change(queue, lambda admin: admin.cancel_all(found, reason, done))
    report = {"queue": queue, "matched": len(found), "outcomes": outcomes, "dry_run": confirmation.dry_run}
    common.report(report, _summary(outcomes) if outcomes else "")
    unknown = [job_id for job_id, outcome in outcomes.items() if outcome == "unknown"]
    if unknown:
        raise CliError(f"no such job: {', '.join(unknown)} (finished without a stored result, or never existed)")


def _summary(outcomes: dict[str, CancelOutcome]) -> str:
    counts = Counter(outcomes.values())
    them = "it" if counts["requested"] == 1 else "them"
    said: dict[CancelOutcome, str] = {
        "cancelled": "cancelled",
        "requested": f"marked; workers drop or cancel {them} within about two seconds",
        "finished": "had already finished",
    }
    return "\n".join(f"{plural(counts[key], 'job')} {text}" for key, text in said.items() if counts[key]) or "none"


# --- schedules


@app.command("list")
def list_(
    common: CommonOptions,
    queue: QueueName,
    limit: Annotated[int, limit_option(help="Maximum number of schedules.")] = 100,
) -> None:
    """List schedules, soonest first."""
    found, fired, now_ms, total = common.read(queue, lambda admin: _list(admin, limit))
    if common.as_json:
        write_json([schedule_json(meta, count) for meta, count in zip(found, fired, strict=True)])
        return
    if not found:
        say(f"{queue} has {total:,} schedules, but none can be decoded" if total else f"{queue} has no schedules")
        return
    columns = ("key", "job", "pattern", "next fire", "in", "fired", "limit")
    made = FittingTable(*columns, numbers=("in", "fired", "limit"), spare=("limit", "fired", "next fire", "job"))
    for meta, count in zip(found, fired, strict=True):
        made.add_row(
            cell(meta.key, "bold"),
            cell(meta.job_name),
            cell(_pattern(meta)),
            cell(instant(meta.next_fire_ms)),
            cell(duration(meta.next_fire_ms - now_ms), "yellow" if meta.next_fire_ms < now_ms else ""),
            cell(count),
            cell(meta.limit or "-"),
        )
    show(made)
    if total > len(found):
        say(f"{plural(total - len(found), 'more schedule')} not shown: over --limit, or not decodable")


async def _list(admin: QueueAdmin, limit: int) -> tuple[list[RepeatableMeta], list[int], int, int]:
    found = await admin.repeatables(limit)
    now_ms, total = await admin.client.server_time_ms(), await admin.client.call("ZCARD", admin.keys.repeat)
    return found, await admin.fired_counts(found), now_ms, int(total)


def _pattern(meta: RepeatableMeta) -> str:
    pattern = meta.pattern
    if pattern.kind == "every":
        return f"every {duration(pattern.interval_ms)}"
    return f"{pattern.expression} ({pattern.tz or 'UTC'})"


@app.command()
def remove(common: CommonOptions, queue: QueueName, key: Key, confirmation: Confirmation) -> None:
    """Remove a schedule: it will not fire again. Jobs it has already enqueued are kept."""
    common.change(queue, lambda admin: _packed_spec(admin, key))
    is_removed = False
    if confirmation.ask(f"remove the schedule {key} of {queue} permanently", 1):
        is_removed = common.change(queue, lambda admin: admin.remove_repeatable(key))
    report = {"key": key, "matched": 1, "removed": int(is_removed), "dry_run": confirmation.dry_run}
    common.report(report, f"removed {key}" if is_removed else "")


@app.command("run")
@app.command("fire", hidden=True)  # its name before 0.3
def run(common: CommonOptions, queue: QueueName, key: Key) -> None:
    """Enqueue the job of a schedule once, now. The schedule itself does not change."""

    async def work(admin: QueueAdmin) -> tuple[str, str]:
        await _packed_spec(admin, key)
        return await fire_now(admin, key)

    name, job_id = common.change(queue, work)
    common.report({"key": key, "name": name, "id": job_id}, f"added {name or 'a job'} {job_id}")


async def _packed_spec(admin: QueueAdmin, key: str) -> bytes:
    packed = await admin.packed_spec(key)
    if packed is None:
        known = [meta.key for meta in await admin.repeatables(10)]
        there = f"existing schedules: {', '.join(known)}" if known else "it has no schedules"
        raise CliError(f"{admin.name} has no schedule {key!r}; {there}")
    return packed
