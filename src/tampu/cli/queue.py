"""`tampu queue pause|resume|purge`: a queue as a whole."""

import asyncio
from typing import Annotated

import typer

from tampu.cli.confirm import may_go_on
from tampu.cli.options import DEFAULT_TIMEOUT_SECS, AsJson, DryRun, QueueName, Timeout, Url, Yes
from tampu.cli.output import say, show, write_json
from tampu.cli.progress import progress_bar
from tampu.cli.session import Session, run
from tampu.cli.snapshot import QueueSnapshot, take_snapshot
from tampu.cli.units import plural

#: How often the progress bar of a purge moves, in seconds.
PROGRESS_SECS = 0.2

app = typer.Typer(help="A queue as a whole: pause it, resume it, empty it.", no_args_is_help=True)


@app.command()
def pause(queue: QueueName, as_json: AsJson = False, url: Url = None, timeout: Timeout = DEFAULT_TIMEOUT_SECS) -> None:
    """Have all workers stop taking jobs, within about a second; what runs goes on."""

    async def work() -> None:
        async with Session(url, timeout) as session:
            await (await session.queue(queue)).pause()

    run(work())
    if as_json:
        write_json({"queue": queue, "is_paused": True})
    else:
        show(f"{queue} is paused; tampu queue resume {queue} ends that")


@app.command()
def resume(queue: QueueName, as_json: AsJson = False, url: Url = None, timeout: Timeout = DEFAULT_TIMEOUT_SECS) -> None:
    """Have the workers go on."""

    async def work() -> bool:
        async with Session(url, timeout) as session:
            return await (await session.queue(queue)).resume()

    was_paused = run(work())
    if as_json:
        write_json({"queue": queue, "is_paused": False, "was_paused": was_paused})
    else:
        show(f"{queue} goes on" if was_paused else f"{queue} was not paused")


@app.command()
def purge(
    queue: QueueName,
    waiting: Annotated[bool, typer.Option("--waiting/--no-waiting", help="Jobs that wait to be run.")] = True,
    delayed: Annotated[bool, typer.Option("--delayed/--no-delayed", help="Jobs that wait for their time.")] = True,
    yes: Yes = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    url: Url = None,
    timeout: Timeout = DEFAULT_TIMEOUT_SECS,
) -> None:
    """Delete jobs that wait. Running ones, dead letters and repeatables stay."""
    before = run(_snapshot(url, timeout, queue))
    count = before.waiting * waiting + before.delayed * delayed
    parts = [f"{before.waiting:,} waiting"] * waiting + [f"{before.delayed:,} delayed"] * delayed
    deleted = 0
    question = f"delete {plural(count, 'job')} of {queue} for good ({' and '.join(parts) or 'none asked for'})"
    if may_go_on(question, count, yes=yes, dry_run=dry_run):
        deleted = run(_purge(url, timeout, queue, waiting, delayed, count))
    if as_json:
        write_json({"queue": queue, "matched": count, "deleted": deleted, "dry_run": dry_run})
    elif deleted:
        show(f"deleted {plural(deleted, 'job')}")
    if before.pending and not as_json and deleted:
        say(f"{plural(before.pending, 'job')} that workers hold were left alone")


async def _snapshot(url: str | None, timeout_secs: float, name: str) -> QueueSnapshot:
    async with Session(url, timeout_secs) as session:
        [(pipe, keys)] = await session.views(name)
        return await take_snapshot(pipe, keys, sizes=False)


async def _purge(url: str | None, timeout_secs: float, name: str, waiting: bool, delayed: bool, total: int) -> int:
    async with Session(url, timeout_secs) as session:
        queue = await session.queue(name)
        purging = asyncio.ensure_future(queue.purge(waiting=waiting, delayed=delayed))
        pipe, keys = queue.producer.ready_pipe(), queue.keys
        with progress_bar("deleting", total) as done:
            while not (await asyncio.wait([purging], timeout=PROGRESS_SECS))[0]:
                left, later = await pipe.call_many([("XLEN", keys.stream), ("ZCARD", keys.delayed)])
                done(max(total - left * waiting - later * delayed, 0))
        return await purging
