"""`tampu cancel`: removes delayed jobs from their queue."""

from typing import Annotated

import typer

from tampu.cli.errors import CliError
from tampu.cli.options import DryRun, QueueName, Yes, confirm
from tampu.cli.output import show, write_json
from tampu.cli.session import CommonOptions, Session
from tampu.cli.units import plural


def cancel(
    common: CommonOptions,
    queue: QueueName,
    ids: Annotated[list[str], typer.Argument(metavar="ID...", help="IDs of delayed jobs.")],
    yes: Yes = False,
    dry_run: DryRun = False,
) -> None:
    """Cancel delayed jobs, including those waiting for a retry."""
    states = common.run(_states, queue, ids)
    delayed = [job_id for job_id in ids if states[job_id] == "delayed"]
    cancelled: list[str] = []
    if confirm(f"cancel {plural(len(delayed), 'delayed job')} in {queue}", len(delayed), yes=yes, dry_run=dry_run):
        cancelled = common.run(_cancel, queue, delayed)
    if common.as_json:
        write_json({"matched": len(delayed), "cancelled": cancelled, "states": states, "dry_run": dry_run})
    elif cancelled:
        show(f"cancelled {plural(len(cancelled), 'job')}")
    missed = [job_id for job_id in ids if job_id not in (delayed if dry_run else cancelled)]
    if missed and (dry_run or not delayed or cancelled):
        others = ", ".join(f"{job_id} {_said(states[job_id])}" for job_id in missed)
        raise CliError(f"cannot cancel: {others} (only delayed jobs can be cancelled)")


def _said(state: str) -> str:
    return {
        "unknown": "does not exist",
        "delayed": "is no longer delayed",
        "waiting": "is already waiting to run",
    }.get(state, f"is {state}")


async def _states(session: Session, name: str, ids: list[str]) -> dict[str, str]:
    queue = await session.queue(name)
    return {job_id: (await queue.get_job(job_id)).state for job_id in ids}


async def _cancel(session: Session, name: str, ids: list[str]) -> list[str]:
    queue = await session.queue(name)
    return [job_id for job_id in ids if await queue.cancel_delayed(job_id)]
