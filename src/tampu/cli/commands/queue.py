"""`tampu queue pause|resume|purge`: operations on a whole queue."""

import asyncio
from typing import Annotated

import typer

from tampu.cli.options import DryRun, QueueName, Yes, confirm
from tampu.cli.output import progress_bar, say, show, write_json
from tampu.cli.session import CommonOptions, Session
from tampu.cli.units import plural
from tampu.inspect.snapshot import QueueSnapshot, take_snapshot

#: Refresh interval of the purge progress bar, in seconds.
PROGRESS_SECS = 0.2

app = typer.Typer(help="Pause, resume or purge a queue.", no_args_is_help=True)


@app.command()
def pause(common: CommonOptions, queue: QueueName) -> None:
    """Stop all workers from taking new jobs, within about a second. Running jobs finish."""

    async def work(session: Session) -> None:
        await (await session.queue(queue)).pause()

    common.run(work)
    if common.as_json:
        write_json({"queue": queue, "is_paused": True})
    else:
        show(f"paused {queue}; run `tampu queue resume {queue}` to continue")


@app.command()
def resume(common: CommonOptions, queue: QueueName) -> None:
    """Resume a paused queue."""

    async def work(session: Session) -> bool:
        return await (await session.queue(queue)).resume()

    was_paused = common.run(work)
    if common.as_json:
        write_json({"queue": queue, "is_paused": False, "was_paused": was_paused})
    else:
        show(f"resumed {queue}" if was_paused else f"{queue} was not paused")


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
