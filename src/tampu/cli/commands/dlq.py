"""`tampu dlq peek|replay|remove`: dead letters, all or those that options single out."""

from typing import Annotated, Any

import typer
from rich.console import Group
from rich.padding import Padding
from rich.text import Text

from tampu.cli.errors import ERROR, check_choice
from tampu.cli.options import DryRun, QueueName, Raw, Yes, confirm
from tampu.cli.output import cell, progress_bar, say, show, write_json
from tampu.cli.payloads import envelope_of, one_line, payload_of
from tampu.cli.session import CommonOptions, Session
from tampu.cli.tables import fact_table
from tampu.cli.units import iso, parse_duration, plural, time_of_day
from tampu.config import DEFAULT_MAX_STREAM_LEN
from tampu.inspect.dead_letters import DeadLetters, DlqFilter, ReplayCount
from tampu.inspect.snapshot import entry_ms
from tampu.wire.dlq import DlqEntry, DlqReason

app = typer.Typer(help="Dead letters: look at them, put them back, throw them away.", no_args_is_help=True)

Ids = Annotated[
    list[str] | None,
    typer.Option("--id", metavar="ID", help="A letter's id or its job's; may be given several times."),
]
Reason = Annotated[
    str | None, typer.Option("--reason", metavar="|".join(reason.value for reason in DlqReason), help="Why it died.")
]
Name = Annotated[str | None, typer.Option("--name", help="The name of the job.")]
OlderThan = Annotated[
    str | None, typer.Option("--older-than", metavar="DURATION", help="At least so old: 90s, 15m, 2h, 7d.")
]
Limit = Annotated[int | None, typer.Option("--limit", "-n", min=1, help="At most so many, oldest first.")]
Full = Annotated[bool, typer.Option("--full", help="Show tracebacks too.")]


def _filter(ids: list[str] | None, reason: str | None, name: str | None, older_than: str | None) -> DlqFilter:
    check_choice("--reason", reason, [one.value for one in DlqReason])
    older_than_ms = None if older_than is None else round(parse_duration(older_than) * 1000)
    return DlqFilter.by_any_id(ids or (), reason=reason, name=name, older_than_ms=older_than_ms)


async def _dead_letters(session: Session, queue: str) -> DeadLetters:
    [(client, keys)] = await session.views(queue)
    return DeadLetters(client, keys, DEFAULT_MAX_STREAM_LEN)


@app.command()
def peek(
    common: CommonOptions,
    queue: QueueName,
    ids: Ids = None,
    reason: Reason = None,
    name: Name = None,
    older_than: OlderThan = None,
    limit: Limit = 20,
    full: Full = False,
    raw: Raw = False,
) -> None:
    """Show dead letters, oldest first, with what killed them."""
    found, total = common.run(_peek, queue, _filter(ids, reason, name, older_than), limit or 20)
    if common.as_json:
        write_json([letter_to_json(letter, raw=raw) for letter in found])
        return
    if not found:
        say("no dead letters" + (" that fit" if total else ""))
        return
    for letter in found:
        show(_letter_view(letter, raw=raw, full=full))
    if len(found) < total:
        say(f"{plural(len(found), 'letter')} of {total:,}; --limit shows more")


async def _peek(session: Session, queue: str, wanted: DlqFilter, limit: int) -> tuple[list[DlqEntry], int]:
    dead_letters = await _dead_letters(session, queue)
    return await dead_letters.peek(limit, wanted), await dead_letters.count(DlqFilter())


def letter_to_json(letter: DlqEntry, *, raw: bool) -> dict[str, Any]:
    """A letter for programs. `payload` is what the job was given; None when the envelope cannot be read."""
    job = envelope_of(letter.payload, letter.name)
    return {
        "dlq_id": letter.dlq_id,
        "job_id": None if job is None else job.id,
        "name": letter.name,
        "reason": letter.reason,
        "detail": letter.detail,
        "error_type": letter.error_type,
        "error": letter.error,
        "attempts": letter.attempts,
        "worker": letter.worker,
        "died_at": iso(letter.failed_at_ms or entry_ms(letter.dlq_id.encode())),
        "created_at": None if job is None else iso(job.created_at_ms),
        "source_id": letter.source_id,
        "payload": None if job is None else payload_of(job, raw=raw),
        "envelope": letter.payload if job is None else None,
        "original": letter.original,
        "traceback": letter.traceback,
    }


def _letter_view(letter: DlqEntry, *, raw: bool, full: bool) -> Group:
    told: dict[str, Any] = letter_to_json(letter, raw=raw)
    died_ms = letter.failed_at_ms or int(letter.dlq_id.partition("-")[0])
    head = Text.assemble(
        cell(letter.name or "(no name)", "bold"),
        "  ",
        cell(letter.reason, "red"),
        cell(f" after {plural(letter.attempts, 'run')}" if letter.attempts is not None else ""),
        cell(f"  {time_of_day(died_ms)}", "dim"),
    )
    payload = told["payload"] if told["job_id"] is not None else told["envelope"]
    facts = [
        ("job", told["job_id"] or "(its envelope cannot be read)"),
        ("letter", letter.dlq_id),
        ("error", f"{letter.error_type}: {letter.error}" if letter.error_type else letter.error or letter.detail),
        ("payload", one_line(payload)),
        ("worker", letter.worker),
        ("fields", None if letter.original is None else repr(letter.original)),
    ]
    parts: list[Any] = [head, Padding(fact_table(facts), (0, 0, 0, 2))]
    if full and letter.traceback:
        lines = [cell(line, "dim") for line in letter.traceback.rstrip().splitlines()]
        parts.append(Padding(Group(*lines), (0, 0, 0, 4)))
    return Group(*parts)


@app.command()
def replay(
    common: CommonOptions,
    queue: QueueName,
    ids: Ids = None,
    reason: Reason = None,
    name: Name = None,
    older_than: OlderThan = None,
    limit: Limit = None,
    yes: Yes = False,
    dry_run: DryRun = False,
) -> None:
    """Put dead letters back into the queue, with their attempts at zero."""
    wanted = _filter(ids, reason, name, older_than)
    count = common.run(_count, queue, wanted, limit)
    moved = ReplayCount(0)
    if confirm(f"replay {plural(count, 'dead letter')} of {queue}", count, yes=yes, dry_run=dry_run):
        moved = common.run(_replay, queue, wanted, count)
    if common.as_json:
        told = {"matched": count, "replayed": int(moved), "unreadable": moved.skipped}
        write_json(told | {"queue_is_full": moved.queue_is_full, "dry_run": dry_run})
    elif moved:
        show(f"replayed {plural(moved, 'dead letter')}")
    if moved.skipped:
        say(f"{plural(moved.skipped, 'letter')} cannot be read and stay: tampu dlq peek {queue} shows them", "yellow")
    if moved.queue_is_full:
        say("the queue is full: the others stay until there is room", "red")
        raise typer.Exit(ERROR)


async def _count(session: Session, queue: str, wanted: DlqFilter, limit: int | None) -> int:
    count = await (await _dead_letters(session, queue)).count(wanted)
    return count if limit is None else min(count, limit)


async def _replay(session: Session, queue: str, wanted: DlqFilter, total: int) -> ReplayCount:
    found = await session.queue(queue)  # its client loads scripts, which a client for looking does not
    dead_letters = DeadLetters(found.producer.ready_client(), found.keys, DEFAULT_MAX_STREAM_LEN)
    with progress_bar("replaying", total) as done:
        return await dead_letters.replay(total, wanted, done)


@app.command()
def remove(
    common: CommonOptions,
    queue: QueueName,
    ids: Ids = None,
    reason: Reason = None,
    name: Name = None,
    older_than: OlderThan = None,
    limit: Limit = None,
    yes: Yes = False,
    dry_run: DryRun = False,
) -> None:
    """Throw dead letters away, for good."""
    wanted = _filter(ids, reason, name, older_than)
    count = common.run(_count, queue, wanted, limit)
    removed = 0
    if confirm(f"remove {plural(count, 'dead letter')} of {queue} for good", count, yes=yes, dry_run=dry_run):
        removed = common.run(_remove, queue, wanted, count)
    if common.as_json:
        write_json({"matched": count, "removed": removed, "dry_run": dry_run})
    elif removed:
        show(f"removed {plural(removed, 'dead letter')}")


async def _remove(session: Session, queue: str, wanted: DlqFilter, total: int) -> int:
    dead_letters = await _dead_letters(session, queue)
    with progress_bar("removing", total) as done:
        return await dead_letters.remove(total, wanted, done)
