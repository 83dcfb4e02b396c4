"""`tampu add` and `tampu cancel`: one job in, one job out again."""

import json
import sys
from datetime import timedelta
from typing import Annotated, Any

import typer

from tampu.cli.confirm import may_go_on
from tampu.cli.exits import CliError, UsageError
from tampu.cli.options import DEFAULT_TIMEOUT_SECS, AsJson, DryRun, QueueName, Timeout, Url, Yes
from tampu.cli.output import say, show, write_json
from tampu.cli.payloads import one_line
from tampu.cli.session import Session, run
from tampu.cli.units import parse_duration, plural


def add(
    queue: QueueName,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The job's name: the task's.")],
    payload: Annotated[
        str, typer.Argument(metavar="JSON", help="Its payload: a task's arguments; - reads stdin.")
    ] = "{}",
    delay: Annotated[str | None, typer.Option("--delay", metavar="DURATION", help="Run it after 90s, 15m, 2h.")] = None,
    job_id: Annotated[
        str | None, typer.Option("--id", metavar="ID", help="An id; the same is not added again for an hour.")
    ] = None,
    attempts: Annotated[int | None, typer.Option("--attempts", min=1, help="Runs in all, should it fail.")] = None,
    wait: Annotated[
        str | None, typer.Option("--wait", metavar="DURATION", help="Wait so long for its result, and print that.")
    ] = None,
    as_json: AsJson = False,
    url: Url = None,
    timeout: Timeout = DEFAULT_TIMEOUT_SECS,
) -> None:
    """Add a job; prints its id."""
    value = parse_json(sys.stdin.read() if payload == "-" else payload)
    options: dict[str, Any] = {"job_id": job_id, "attempts": attempts}
    if delay is not None:
        options["delay"] = timedelta(seconds=parse_duration(delay))
    wait_secs = None if wait is None else parse_duration(wait)
    told = run(_add(url, timeout, queue, name, value, options, wait_secs))
    if as_json:
        write_json(told)
    else:
        show(told["id"])
        if "result" in told:
            show(one_line(told["result"], limit=10_000))
    if not told["is_new"]:
        say(f"a job of the id {told['id']} was added before: nothing was added", "yellow")


async def _add(
    url: str | None,
    timeout_secs: float,
    queue_name: str,
    name: str,
    value: Any,
    options: dict[str, Any],
    wait_secs: float | None,
) -> dict[str, Any]:
    async with Session(url, timeout_secs) as session:
        queue = await session.new_queue(queue_name)
        job = await queue.add(name, value, **options)
        told = {"id": str(job.id), "is_new": getattr(job.id, "is_new", True), "queue": queue_name, "name": name}
        if wait_secs is not None:
            try:
                told["result"] = await job.result(wait_secs)
            except TimeoutError as error:
                raise CliError(str(error)) from error
        return told


def parse_json(text: str) -> Any:
    """JSON by the book: NaN and its like are refused, as no other reader would take them."""

    def refuse(constant: str) -> Any:
        raise UsageError(f"the payload has {constant}, which is no JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except json.JSONDecodeError as error:
        shown = text if len(text) <= 40 else f"{text[:40]}..."
        raise UsageError(f"the payload is no JSON: {error.msg} at character {error.pos + 1} of {shown!r}") from error
    except RecursionError as error:
        raise UsageError("the payload is nested too deeply") from error


def cancel(
    queue: QueueName,
    ids: Annotated[list[str], typer.Argument(metavar="ID...", help="The ids of jobs that wait for their time.")],
    yes: Yes = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    url: Url = None,
    timeout: Timeout = DEFAULT_TIMEOUT_SECS,
) -> None:
    """Cancel delayed jobs: those that wait for their time or their retry."""
    states = run(_states(url, timeout, queue, ids))
    delayed = [job_id for job_id in ids if states[job_id] == "delayed"]
    cancelled: list[str] = []
    if may_go_on(f"cancel {plural(len(delayed), 'delayed job')} of {queue}", len(delayed), yes=yes, dry_run=dry_run):
        cancelled = run(_cancel(url, timeout, queue, delayed))
    if as_json:
        write_json({"matched": len(delayed), "cancelled": cancelled, "states": states, "dry_run": dry_run})
    elif cancelled:
        show(f"cancelled {plural(len(cancelled), 'job')}")
    missed = [job_id for job_id in ids if job_id not in (delayed if dry_run else cancelled)]
    if missed and (dry_run or not delayed or cancelled):
        others = ", ".join(f"{job_id} is {_said(states[job_id])}" for job_id in missed)
        raise CliError(f"not waiting for their time: {others}")


def _said(state: str) -> str:
    return {"unknown": "not there", "delayed": "gone meanwhile"}.get(state, state)


async def _states(url: str | None, timeout_secs: float, name: str, ids: list[str]) -> dict[str, str]:
    async with Session(url, timeout_secs) as session:
        queue = await session.queue(name)
        return {job_id: (await queue.get_job(job_id)).state for job_id in ids}


async def _cancel(url: str | None, timeout_secs: float, name: str, ids: list[str]) -> list[str]:
    async with Session(url, timeout_secs) as session:
        queue = await session.queue(name)
        return [job_id for job_id in ids if await queue.cancel_delayed(job_id)]
