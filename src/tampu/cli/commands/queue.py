"""`tampu queue pause|resume|purge`: a queue as a whole."""

import asyncio
from typing import Annotated

import typer

from tampu.cli.options import DryRun, QueueName, Yes, confirm
from tampu.cli.output import progress_bar, say, show, write_json
from tampu.cli.session import CommonOptions, Session
from tampu.cli.units import plural
from tampu.inspect.snapshot import QueueSnapshot, take_snapshot

#: How often the progress bar of a purge moves, in seconds.
PROGRESS_SECS = 0.2

app = typer.Typer(help="A queue as a whole: pause it, resume it, empty it.", no_args_is_help=True)


@app.command()
def pause(common: CommonOptions, queue: QueueName) -> None:
    """Have all workers stop taking jobs, within about a second; what runs goes on."""

    async def work(session: Session) -> None:
        await (await session.queue(queue)).pause()

    common.run(work)
    if common.as_json:
        write_json({"queue": queue, "is_paused": True})
    else:
        show(f"{queue} is paused; tampu queue resume {queue} ends that")


@app.command()
def resume(common: CommonOptions, queue: QueueName) -> None:
    """Have the workers go on."""

    async def work(session: Session) -> bool:
        return await (await session.queue(queue)).resume()

    was_paused = common.run(work)
    if common.as_json:
        write_json({"queue": queue, "is_paused": False, "was_paused": was_paused})
    else:
        show(f"{queue} goes on" if was_paused else f"{queue} was not paused")


@app.command()
def purge(
    common: CommonOptions,
    queue: QueueName,
    waiting: Annotated[bool, typer.Option("--waiting/--no-waiting", help="Jobs that wait to be run.")] = True,
    delayed: Annotated[bool, typer.Option("--delayed/--no-delayed", help="Jobs that wait for their time.")] = True,
    yes: Yes = False,
    dry_run: DryRun = False,
) -> None:
    """Delete jobs that wait. Running ones, dead letters and repeatables stay."""
    before = common.run(_snapshot, queue)
    count = before.waiting * waiting + before.delayed * delayed
    parts = [f"{before.waiting:,} waiting"] * waiting + [f"{before.delayed:,} delayed"] * delayed
    deleted = 0
    question = f"delete {plural(count, 'job')} of {queue} for good ({' and '.join(parts) or 'none asked for'})"
    if confirm(question, count, yes=yes, dry_run=dry_run):
        deleted = common.run(_purge, queue, waiting, delayed, count)
    if common.as_json:
        write_json({"queue": queue, "matched": count, "deleted": deleted, "dry_run": dry_run})
    elif deleted:
        show(f"deleted {plural(deleted, 'job')}")
    if before.pending and not common.as_json and deleted:
        say(f"{plural(before.pending, 'job')} that workers hold were left alone")


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
