"""`tampu queue list|pause|resume|drain|purge|delete`: operations on whole queues."""

from typing import Annotated

import typer
from typer import Option

from tampu.base.units import duration, plural
from tampu.cli.errors import CliError, UsageError
from tampu.cli.options import Confirmation, QueueName, duration_option
from tampu.cli.output import command, progress_bar, say, show, write_json
from tampu.cli.session import CommonOptions, Session
from tampu.cli.units import parse_duration
from tampu.errors import ConfigError

app = typer.Typer(help="List, pause, resume, drain, purge or delete queues.", no_args_is_help=True)

Task = Annotated[str | None, Option("--task", metavar="NAME", help="Only this task.")]


@app.command("list")
def list_(common: CommonOptions) -> None:
    """List the names of all queues, one per line."""
    found = common.run(Session.find_queues)
    if common.as_json:
        write_json(found.names)
        return
    for name in found.names:
        show(name)
    if not found.names:
        say("no queues yet")


@app.command()
def pause(
    common: CommonOptions,
    queue: QueueName,
    task: Task = None,
    reason: Annotated[str, Option(help="Reason, shown by other commands.")] = "",
    until: Annotated[
        float | None, duration_option("--for", help="Resume automatically after this time (15m, 2h).")
    ] = None,
) -> None:
    """Stop all workers from taking new jobs, within about a second. Running jobs finish."""
    common.change(queue, lambda admin: admin.pause(task, reason, until))
    what, option = (queue, ()) if task is None else (f"task {task} of {queue}", ("--task", task))
    resume = command("queue", "resume", queue, *option)
    common.report(
        {"queue": queue, "task": task, "is_paused": True, "reason": reason, "for_secs": until},
        f"paused {what}; run {resume} to continue" if until is None else f"paused {what} for {duration(until * 1000)}",
    )


@app.command()
def drain(
    common: CommonOptions,
    queue: QueueName,
    within: Annotated[str | None, Option(metavar="DURATION", help="Give up after this time (90s, 15m, 2h).")] = None,
) -> None:
    """Wait until no job is waiting, running or due. Does not wait for jobs that are due later."""
    within_secs = None if within is None else parse_duration(within)
    try:
        with progress_bar("draining", common.read(queue, lambda admin: admin.jobs_left())) as done:
            common.read(queue, lambda admin: admin.drain(within_secs, done))
    except TimeoutError:
        raise CliError(f"{queue} still has jobs after {within}; run {command('inspect', queue)} to see them") from None
    common.report({"queue": queue, "is_drained": True}, f"{queue} is drained")


@app.command()
def delete(
    common: CommonOptions,
    queue: QueueName,
    confirmation: Confirmation,
    force: Annotated[
        bool, Option("--force", help="Delete the queue even if it has jobs, dead letters, schedules or workers.")
    ] = False,
) -> None:
    """Delete a queue with everything in it: jobs, dead letters, schedules, results and events."""
    before = common.read(queue, lambda admin: admin.snapshot(sizes=False))
    held = {"job": before.length + before.delayed, "dead letter": before.dlq, "schedule": before.repeatables}
    contents = ", ".join(plural(count, what) for what, count in held.items() if count) or "results and events only"
    question = f"delete queue {queue} permanently, with everything in it ({contents})"
    deleted = 0
    if confirmation.ask(question, 1):
        try:
            deleted = common.change(queue, lambda admin: admin.delete(force=force))
        except ConfigError as error:  # it names the parameter of the Python method
            raise UsageError(str(error).replace("force=True", "--force")) from error
    report = {"queue": queue, "deleted_keys": deleted, "dry_run": confirmation.dry_run}
    common.report(report, f"deleted {queue}" if deleted else "")


@app.command()
def resume(common: CommonOptions, queue: QueueName, task: Task = None) -> None:
    """Resume a paused queue, or a paused task."""
    was_paused = common.change(queue, lambda admin: admin.resume(task))
    what = queue if task is None else f"task {task} of {queue}"
    report = {"queue": queue, "task": task, "is_paused": False, "was_paused": was_paused}
    common.report(report, f"resumed {what}" if was_paused else f"{what} was not paused")


@app.command()
def purge(
    common: CommonOptions,
    queue: QueueName,
    confirmation: Confirmation,
    waiting: Annotated[bool, Option(help="Delete waiting jobs.")] = True,
    delayed: Annotated[bool, Option(help="Delete delayed jobs.")] = True,
) -> None:
    """Delete waiting and delayed jobs. Running jobs, dead letters and schedules are kept."""
    before = common.read(queue, lambda admin: admin.snapshot(sizes=False))
    count = before.waiting * waiting + before.delayed * delayed
    parts = [f"{before.waiting:,} waiting"] * waiting + [f"{before.delayed:,} delayed"] * delayed
    deleted = 0
    question = f"delete {plural(count, 'job')} of {queue} permanently ({' and '.join(parts) or 'none selected'})"
    if confirmation.ask(question, count):
        with progress_bar("deleting", count) as done:
            which = {"waiting": waiting, "delayed": delayed}
            deleted = common.change(queue, lambda admin: admin.purge(**which, on_progress=done))
    report = {"queue": queue, "matched": count, "deleted": deleted, "dry_run": confirmation.dry_run}
    common.report(report, f"deleted {plural(deleted, 'job')}" if deleted else "")
    if before.pending and not common.as_json and deleted:
        say(f"{plural(before.pending, 'job')} held by workers {'was' if before.pending == 1 else 'were'} kept")
