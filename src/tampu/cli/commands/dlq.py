"""`tampu dlq summary|peek|repair|replay|remove`: works on all dead letters, or those selected by options."""

from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.padding import Padding
from rich.text import Text

from tampu.cli.commands.dlq_repair import repair
from tampu.cli.errors import ERROR, check_choice
from tampu.cli.options import DryRun, QueueName, Raw, Yes, confirm
from tampu.cli.output import cell, command, progress_bar, say, show, write_json
from tampu.cli.payloads import envelope_of, one_line, payload_of
from tampu.cli.redact import redacted, redacted_cluster, redacted_letter
from tampu.cli.session import CommonOptions, Session
from tampu.cli.tables import FittingTable, fact_table
from tampu.cli.units import iso, parse_duration, plural, time_of_day
from tampu.config import DEFAULT_MAX_STREAM_LEN
from tampu.inspect.audit import operator_name, record
from tampu.inspect.dead_letters import DeadLetters, DlqFilter, ReplayCount
from tampu.inspect.dlq_summary import LetterCluster, summarize_letters
from tampu.inspect.snapshot import entry_ms
from tampu.wire.dlq import DlqEntry, DlqReason

app = typer.Typer(help="Summarize, show, repair, replay or remove dead letters.", no_args_is_help=True)
app.command()(repair)

Ids = Annotated[
    list[str] | None,
    typer.Option(
        "--id", metavar="ID", help="Only this dead letter, by its own ID or its job's ID. Can be given more than once."
    ),
]
Reason = Annotated[
    str | None,
    typer.Option("--reason", metavar="|".join(reason.value for reason in DlqReason), help="Only this reason."),
]
Name = Annotated[str | None, typer.Option("--name", help="Only jobs with this name.")]
ErrorType = Annotated[
    str | None, typer.Option("--error-type", metavar="TYPE", help="Only this type of error, such as ConnectionError.")
]
Match = Annotated[str | None, typer.Option("--match", metavar="TEXT", help="Only errors that contain this text.")]
OlderThan = Annotated[
    str | None,
    typer.Option("--older-than", metavar="DURATION", help="Only dead letters at least this old (90s, 15m, 2h, 7d)."),
]
Limit = Annotated[
    int | None, typer.Option("--limit", "-n", min=1, help="Maximum number of dead letters, oldest first.")
]
Full = Annotated[bool, typer.Option("--full", help="Show tracebacks.")]


def _filter(
    ids: list[str] | None,
    reason: str | None,
    name: str | None,
    error_type: str | None,
    match: str | None,
    older_than: str | None,
) -> DlqFilter:
    check_choice("--reason", reason, [one.value for one in DlqReason])
    older_than_ms = None if older_than is None else round(parse_duration(older_than) * 1000)
    compared = {"reason": reason, "name": name, "error_type": error_type, "match": match}
    return DlqFilter.by_any_id(ids or (), **compared, older_than_ms=older_than_ms)


async def _dead_letters(session: Session, queue: str) -> DeadLetters:
    [(client, keys)] = await session.views(queue)
    return DeadLetters(client, keys, DEFAULT_MAX_STREAM_LEN)


@app.command()
def summary(common: CommonOptions, queue: QueueName) -> None:
    """Group dead letters into clusters by task, reason and error, the largest cluster first."""
    clusters = common.run(_summary, queue)
    if common.as_json:
        found = [asdict(cluster) for cluster in clusters]
        for told, cluster in zip(found, clusters, strict=True):
            told["sample"] = letter_to_json(cluster.sample, queue, raw=False)
        write_json(found)
        return
    if not clusters:
        say("no dead letters")
        return
    rows = FittingTable(
        *("letters", "task", "reason", "error", "first", "last", "cluster"),
        numbers=("letters",),
        spare=("cluster", "first", "reason"),
    )
    for one in clusters:
        shape = f"{one.error_type}: {one.fingerprint}" if one.error_type else one.fingerprint
        rows.add_row(
            cell(f"{one.letters:,}", "red"),
            cell(one.name or "(no name)", "bold"),
            cell(one.reason),
            cell(shape),
            cell(time_of_day(one.first_seen_ms), "dim"),
            cell(time_of_day(one.last_seen_ms), "dim"),
            cell(one.cluster, "dim"),
        )
    show(rows)


async def _summary(session: Session, queue: str) -> list[LetterCluster]:
    [(client, keys)] = await session.views(queue)
    return list(map(redacted_cluster, await summarize_letters(client, keys)))


@app.command()
def peek(
    common: CommonOptions,
    queue: QueueName,
    ids: Ids = None,
    reason: Reason = None,
    name: Name = None,
    error_type: ErrorType = None,
    match: Match = None,
    older_than: OlderThan = None,
    limit: Limit = 20,
    full: Full = False,
    raw: Raw = False,
) -> None:
    """Show dead letters and their errors, oldest first."""
    wanted = _filter(ids, reason, name, error_type, match, older_than)
    found, total = common.run(_peek, queue, wanted, limit or 20)
    if common.as_json:
        write_json([letter_to_json(letter, queue, raw=raw) for letter in found])
        return
    if not found:
        say("no dead letters" if wanted == DlqFilter() else "no matching dead letters")
        return
    for letter in found:
        show(_letter_view(letter, queue, raw=raw, full=full))
    if len(found) < total:
        matching = "" if wanted == DlqFilter() else "matching "
        say(f"showing {len(found):,} of {plural(total, f'{matching}dead letter')}; raise --limit to see more")


async def _peek(session: Session, queue: str, wanted: DlqFilter, limit: int) -> tuple[list[DlqEntry], int]:
    dead_letters = await _dead_letters(session, queue)
    found = await dead_letters.peek(limit, wanted)
    return list(map(redacted_letter, found)), await dead_letters.count(wanted)


def letter_to_json(letter: DlqEntry, queue: str, *, raw: bool) -> dict[str, Any]:
    """Return a dead letter for JSON output. `payload` is the job's payload, or None if it cannot be decoded."""
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
        "payload": None if job is None else payload_of(job, queue, raw=raw),
        "envelope": redacted("payload", letter.payload) if job is None else None,
        "original": redacted("payload", letter.original),
        "traceback": letter.traceback,
    }


def _letter_view(letter: DlqEntry, queue: str, *, raw: bool, full: bool) -> Group:
    told: dict[str, Any] = letter_to_json(letter, queue, raw=raw)
    died_ms = letter.failed_at_ms or int(letter.dlq_id.partition("-")[0])
    head = Text.assemble(
        cell(letter.name or "(no name)", "bold"),
        "  ",
        cell(letter.reason, "red"),
        cell(f" after {plural(letter.attempts, 'attempt')}" if letter.attempts is not None else ""),
        cell(f"  {time_of_day(died_ms)}", "dim"),
    )
    payload = told["payload"] if told["job_id"] is not None else told["envelope"]
    facts = [
        ("job", told["job_id"] or "(cannot be decoded)"),
        ("letter", letter.dlq_id),
        ("error", f"{letter.error_type}: {letter.error}" if letter.error_type else letter.error or letter.detail),
        ("payload", one_line(payload)),
        ("worker", letter.worker),
        ("fields", None if letter.original is None else repr(told["original"])),
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
    error_type: ErrorType = None,
    match: Match = None,
    older_than: OlderThan = None,
    limit: Limit = None,
    yes: Yes = False,
    dry_run: DryRun = False,
) -> None:
    """Move dead letters back into the queue, with their attempts reset to zero."""
    wanted = _filter(ids, reason, name, error_type, match, older_than)
    count = common.run(_count, queue, wanted, limit)
    moved = ReplayCount(0)
    if confirm(f"replay {plural(count, 'dead letter')} in {queue}", count, yes=yes, dry_run=dry_run):
        moved = common.run(_replay, queue, wanted, count)
    if common.as_json:
        told = {"matched": count, "replayed": int(moved), "unreadable": moved.skipped}
        write_json(told | {"queue_is_full": moved.queue_is_full, "dry_run": dry_run})
    elif moved:
        show(f"replayed {plural(moved, 'dead letter')}")
    if moved.skipped:
        skipped = plural(moved.skipped, "dead letter")
        say(f"skipped {skipped} that cannot be decoded; run {command('dlq', 'peek', queue)} to see them", "yellow")
    if moved.queue_is_full:
        say("the queue is full; run the command again when there is room to replay the rest", "red")
        raise typer.Exit(ERROR)


async def _count(session: Session, queue: str, wanted: DlqFilter, limit: int | None) -> int:
    count = await (await _dead_letters(session, queue)).count(wanted)
    return count if limit is None else min(count, limit)


async def _replay(session: Session, queue: str, wanted: DlqFilter, total: int) -> ReplayCount:
    found = await session.queue(queue)  # its client loads scripts; a client for reading does not
    dead_letters = DeadLetters(found.producer.ready_client(), found.keys, DEFAULT_MAX_STREAM_LEN)
    with progress_bar("replaying", total) as done:
        moved = await dead_letters.replay(total, wanted, done)
    if moved:
        await record(found.producer.ready_client(), found.keys, "replay", operator_name(), count=int(moved))
    return moved


@app.command()
def remove(
    common: CommonOptions,
    queue: QueueName,
    ids: Ids = None,
    reason: Reason = None,
    name: Name = None,
    error_type: ErrorType = None,
    match: Match = None,
    older_than: OlderThan = None,
    limit: Limit = None,
    yes: Yes = False,
    dry_run: DryRun = False,
) -> None:
    """Delete dead letters. This cannot be undone."""
    wanted = _filter(ids, reason, name, error_type, match, older_than)
    count = common.run(_count, queue, wanted, limit)
    removed = 0
    if confirm(f"delete {plural(count, 'dead letter')} of {queue} permanently", count, yes=yes, dry_run=dry_run):
        removed = common.run(_remove, queue, wanted, count)
    if common.as_json:
        write_json({"matched": count, "removed": removed, "dry_run": dry_run})
    elif removed:
        show(f"removed {plural(removed, 'dead letter')}")


async def _remove(session: Session, queue: str, wanted: DlqFilter, total: int) -> int:
    dead_letters = await _dead_letters(session, queue)
    with progress_bar("removing", total) as done:
        removed = await dead_letters.remove(total, wanted, done)
    if removed:
        await record(*await session.view(queue), "remove", operator_name(), count=removed)
    return removed
