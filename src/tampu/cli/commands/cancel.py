"""`tampu cancel`: cancels jobs by ID, or all that match a filter."""

from collections import Counter
from typing import Annotated

import typer

from tampu.base.checks import check_job_id
from tampu.cli.errors import CliError, UsageError, check_choice
from tampu.cli.options import DryRun, QueueName, Yes, confirm
from tampu.cli.output import progress_bar, show, write_json
from tampu.cli.session import CommonOptions, Session
from tampu.cli.units import parse_duration, plural
from tampu.inspect.cancel import CancelOutcome, cancel_job
from tampu.inspect.jobs import ListedState

#: Maximum number of jobs that one call cancels by filter; call it again for the rest.
MOST_JOBS = 10_000
CANCELLABLE: tuple[ListedState, ...] = ("waiting", "running", "delayed")


def cancel(
    common: CommonOptions,
    queue: QueueName,
    ids: Annotated[list[str] | None, typer.Argument(metavar="ID...", help="Job IDs.")] = None,
    name: Annotated[str | None, typer.Option("--name", help="Only jobs with this name.")] = None,
    older_than: Annotated[
        str | None,
        typer.Option("--older-than", metavar="DURATION", help="Only jobs at least this old (90s, 15m, 2h, 7d)."),
    ] = None,
    state: Annotated[
        str | None, typer.Option("--state", metavar="|".join(CANCELLABLE), help="Only jobs in this state.")
    ] = None,
    reason: Annotated[
        str, typer.Option("--reason", help="Reason, shown in events and to callers that wait for the job.")
    ] = "",
    yes: Yes = False,
    dry_run: DryRun = False,
) -> None:
    """Cancel jobs by ID, or all that match --name, --older-than and --state, up to 10,000 per call.

    Delayed jobs are removed at once, running jobs cancelled within about 2 s, and waiting jobs dropped when fetched.
    """
    check_choice("--state", state, CANCELLABLE)
    has_filter = name is not None or older_than is not None or state is not None
    if bool(ids) == has_filter:
        raise UsageError("pass either job IDs or a filter: --name, --older-than or --state")
    older_than_secs = None if older_than is None else parse_duration(older_than)
    states = [] if ids else [one for one in CANCELLABLE if state in (None, one)]
    found = [*(ids or ()), *common.run(_matching, queue, states, name, older_than_secs)]
    outcomes: dict[str, CancelOutcome] = {}
    if confirm(f"cancel {plural(len(found), 'job')} of {queue}", len(found), yes=yes, dry_run=dry_run):
        outcomes = common.run(_cancel, queue, found, reason)
    if common.as_json:
        write_json({"queue": queue, "matched": len(found), "outcomes": outcomes, "dry_run": dry_run})
    elif outcomes:
        show(_summary(outcomes))
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


async def _matching(
    session: Session, queue: str, states: list[ListedState], name: str | None, older_than: float | None
) -> list[str]:
    jobs = await session.queue(queue)
    found: list[str] = []
    for state in states:
        room = MOST_JOBS - len(found)
        if room > 0:
            found += [job.id for job in await jobs.jobs(state, name=name, older_than=older_than, limit=room) if job.id]
    return found


async def _cancel(session: Session, queue: str, ids: list[str], reason: str) -> dict[str, CancelOutcome]:
    jobs = await session.queue(queue)
    outcomes: dict[str, CancelOutcome] = {}
    client = jobs.producer.ready_client()
    with progress_bar("cancelling", len(ids)) as done:
        for number, job_id in enumerate(ids, 1):  # not `Queue.cancel`: one audit event for all of them
            outcomes[job_id] = await cancel_job(client, jobs.keys, check_job_id(job_id), reason)
            done(number)
    affected = sum(outcome in ("cancelled", "requested") for outcome in outcomes.values())
    if affected:
        await jobs.producer.audit("cancel", count=affected, detail=reason)
    return outcomes
