"""`tampu queue list|pause|resume|drain|purge|delete`: operations on whole queues."""

import asyncio
from typing import Annotated

import typer

from tampu.cli.errors import CliError, UsageError
from tampu.cli.options import DryRun, QueueName, Yes, confirm
from tampu.cli.output import command, progress_bar, say, show, write_json
from tampu.cli.session import CommonOptions, Session
from tampu.cli.units import duration, parse_duration, plural
from tampu.errors import ConfigError
from tampu.inspect.audit import operator_name, record
from tampu.inspect.life_cycle import drain_queue, jobs_left
from tampu.inspect.snapshot import QueueSnapshot, take_snapshot

#: Refresh interval of the purge progress bar, in seconds.
PROGRESS_SECS = 0.2

app = typer.Typer(help="List, pause, resume, drain, purge or delete queues.", no_args_is_help=True)

Task = Annotated[str | None, typer.Option("--task", metavar="NAME", help="Only this task.")]
DrainTimeout = Annotated[
    str | None, typer.Option("--within", metavar="DURATION", help="Give up after this time (90s, 15m, 2h).")
]


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
    reason: Annotated[str, typer.Option("--reason", help="Reason, shown by other commands.")] = "",
    for_: Annotated[
        str | None, typer.Option("--for", metavar="DURATION", help="Resume automatically after this time (15m, 2h).")
    ] = None,
) -> None:
    """Stop all workers from taking new jobs, within about a second. Running jobs finish."""
    until = None if for_ is None else parse_duration(for_)

    async def work(session: Session) -> None:
        await (await session.queue(queue)).pause(task=task, reason=reason, until=until)

    common.run(work)
    what, option = (queue, ()) if task is None else (f"task {task} of {queue}", ("--task", task))
    if common.as_json:
        write_json({"queue": queue, "task": task, "is_paused": True, "reason": reason, "for_secs": until})
    elif until is None:
        show(f"paused {what}; run {command('queue', 'resume', queue, *option)} to continue")
    else:
        show(f"paused {what} for {duration(until * 1000)}")


@app.command()
def drain(common: CommonOptions, queue: QueueName, within: DrainTimeout = None) -> None:
    """Wait until no job is waiting, running or due. Does not wait for jobs that are due later."""
    within_secs = None if within is None else parse_duration(within)
    try:
        common.run(_drain, queue, within_secs)
    except TimeoutError:
        raise CliError(f"{queue} still has jobs after {within}; run {command('inspect', queue)} to see them") from None
    if common.as_json:
        write_json({"queue": queue, "is_drained": True})
    else:
        show(f"{queue} is drained")


async def _drain(session: Session, name: str, within_secs: float | None) -> None:
    [(client, keys)] = await session.views(name)
    total = await jobs_left(client, keys)
    draining = asyncio.ensure_future(drain_queue(client, keys, within_secs))
    with progress_bar("draining", total) as done:
        while not (await asyncio.wait([draining], timeout=PROGRESS_SECS))[0]:
            done(max(total - await jobs_left(client, keys), 0))
    if drained := await draining:
        await record(client, keys, "drain", operator_name(), count=drained)


@app.command()
def delete(
    common: CommonOptions,
    queue: QueueName,
    force: Annotated[
        bool, typer.Option("--force", help="Delete the queue even if it has jobs, dead letters, schedules or workers.")
    ] = False,
    yes: Yes = False,
    dry_run: DryRun = False,
) -> None:
    """Delete a queue with everything in it: jobs, dead letters, schedules, results and events."""
    before = common.run(_snapshot, queue)
    held = {"job": before.length + before.delayed, "dead letter": before.dlq, "schedule": before.repeatables}
    contents = ", ".join(plural(count, what) for what, count in held.items() if count) or "results and events only"
    question = f"delete queue {queue} permanently, with everything in it ({contents})"
    deleted = 0
    if confirm(question, 1, yes=yes, dry_run=dry_run):

        async def work(session: Session) -> int:
            try:
                return await (await session.queue(queue)).delete(force=force)
            except ConfigError as error:  # it names the parameter of the Python method
                raise UsageError(str(error).replace("force=True", "--force")) from error

        deleted = common.run(work)
    if common.as_json:
        write_json({"queue": queue, "deleted_keys": deleted, "dry_run": dry_run})
    elif deleted:
        show(f"deleted {queue}")


@app.command()
def resume(common: CommonOptions, queue: QueueName, task: Task = None) -> None:
    """Resume a paused queue, or a paused task."""

    async def work(session: Session) -> bool:
        return await (await session.queue(queue)).resume(task=task)

    was_paused = common.run(work)
    what = queue if task is None else f"task {task} of {queue}"
    if common.as_json:
        write_json({"queue": queue, "task": task, "is_paused": False, "was_paused": was_paused})
    else:
        show(f"resumed {what}" if was_paused else f"{what} was not paused")


@app.command()
def purge(
    common: CommonOptions,
    queue: QueueName,
    waiting: Annotated[bool, typer.Option("--waiting/--no-waiting", help="Delete waiting jobs.")] = True,
    delayed: Annotated[bool, typer.Option("--delayed/--no-delayed", help="Delete delayed jobs.")] = True,
    yes: Yes = False,
    dry_run: DryRun = False,
) -> None:
    """Delete waiting and delayed jobs. Running jobs, dead letters and schedules are kept."""
    before = common.run(_snapshot, queue)
    count = before.waiting * waiting + before.delayed * delayed
    parts = [f"{before.waiting:,} waiting"] * waiting + [f"{before.delayed:,} delayed"] * delayed
    deleted = 0
    question = f"delete {plural(count, 'job')} of {queue} permanently ({' and '.join(parts) or 'none selected'})"
    if confirm(question, count, yes=yes, dry_run=dry_run):
        deleted = common.run(_purge, queue, waiting, delayed, count)
    if common.as_json:
        write_json({"queue": queue, "matched": count, "deleted": deleted, "dry_run": dry_run})
    elif deleted:
        show(f"deleted {plural(deleted, 'job')}")
    if before.pending and not common.as_json and deleted:
        say(f"{plural(before.pending, 'job')} held by workers {'was' if before.pending == 1 else 'were'} kept")


async def _snapshot(session: Session, name: str) -> QueueSnapshot:
    [(client, keys)] = await session.views(name)
    return await take_snapshot(client, keys, sizes=False)


async def _purge(session: Session, name: str, waiting: bool, delayed: bool, total: int) -> int:
    queue = await session.queue(name)
    purging = asyncio.ensure_future(queue.purge(waiting=waiting, delayed=delayed))
    client, keys = queue.producer.ready_client(), queue.keys
    with progress_bar("deleting", total) as done:
        while not (await asyncio.wait([purging], timeout=PROGRESS_SECS))[0]:
            left, later = await client.call_many([("XLEN", keys.stream), ("ZCARD", keys.delayed)])
            done(max(total - left * waiting - later * delayed, 0))
    return await purging
