"""`tampu dlq peek|replay|remove`: dead letters, all or those that options single out."""

from typing import Annotated, Any

import typer
from rich.console import Group
from rich.padding import Padding
from rich.text import Text

from tampu.cli import letters
from tampu.cli.confirm import may_go_on
from tampu.cli.exits import ERROR
from tampu.cli.letters import Wanted
from tampu.cli.options import DEFAULT_TIMEOUT_SECS, AsJson, DryRun, QueueName, Raw, Timeout, Url, Yes
from tampu.cli.output import cell, say, show, table, write_json
from tampu.cli.payloads import one_line
from tampu.cli.progress import progress_bar
from tampu.cli.session import Session, run
from tampu.cli.units import parse_duration, plural, time_of_day
from tampu.engine.dead_letters import ReplayCount
from tampu.wire.dlq import DlqEntry, DlqReason

#: Letters moved or removed between two steps of the progress bar.
STEP = 500

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


def _wanted(ids: list[str] | None, reason: str | None, name: str | None, older_than: str | None) -> Wanted:
    return Wanted(tuple(ids or ()), reason, name, None if older_than is None else parse_duration(older_than))


@app.command()
def peek(
    queue: QueueName,
    ids: Ids = None,
    reason: Reason = None,
    name: Name = None,
    older_than: OlderThan = None,
    limit: Limit = 20,
    full: Full = False,
    raw: Raw = False,
    as_json: AsJson = False,
    url: Url = None,
    timeout: Timeout = DEFAULT_TIMEOUT_SECS,
) -> None:
    """Show dead letters, oldest first, with what killed them."""
    found, total = run(_peek(url, timeout, queue, _wanted(ids, reason, name, older_than), limit or 20))
    if as_json:
        write_json([letters.to_json(letter, raw=raw) for letter in found])
        return
    if not found:
        say("no dead letters" + (" that fit" if total else ""))
        return
    for letter in found:
        show(_letter_view(letter, raw=raw, full=full))
    if len(found) < total:
        say(f"{plural(len(found), 'letter')} of {total:,}; --limit shows more")


async def _peek(
    url: str | None, timeout_secs: float, name: str, wanted: Wanted, limit: int
) -> tuple[list[DlqEntry], int]:
    found: list[DlqEntry] = []
    async with Session(url, timeout_secs) as session:
        [(pipe, keys)] = await session.views(name)
        async for letter in letters.walk(pipe, keys, wanted):
            found.append(letter)
            if len(found) >= limit:
                break
        return found, int(await pipe.call("XLEN", keys.dlq))


def _letter_view(letter: DlqEntry, *, raw: bool, full: bool) -> Group:
    told: dict[str, Any] = letters.to_json(letter, raw=raw)
    died_ms = letter.failed_at_ms or int(letter.dlq_id.partition("-")[0])
    head = Text.assemble(
        cell(letter.name or "(no name)", "bold"),
        "  ",
        cell(letter.reason, "red"),
        cell(f" after {plural(letter.attempts, 'run')}" if letter.attempts is not None else ""),
        cell(f"  {time_of_day(died_ms)}", "dim"),
    )
    rows = table("", "")
    rows.show_header = False
    payload = told["payload"] if told["job_id"] is not None else told["envelope"]
    facts = [
        ("job", told["job_id"] or "(its envelope cannot be read)"),
        ("letter", letter.dlq_id),
        ("error", f"{letter.error_type}: {letter.error}" if letter.error_type else letter.error or letter.detail),
        ("payload", one_line(payload)),
        ("worker", letter.worker),
        ("fields", None if letter.original is None else repr(letter.original)),
    ]
    for label, value in facts:
        if value:
            rows.add_row(Text(label, style="dim"), cell(value))
    parts: list[Any] = [head, Padding(rows, (0, 0, 0, 2))]
    if full and letter.traceback:
        lines = [cell(line, "dim") for line in letter.traceback.rstrip().splitlines()]
        parts.append(Padding(Group(*lines), (0, 0, 0, 4)))
    return Group(*parts)


@app.command()
def replay(
    queue: QueueName,
    ids: Ids = None,
    reason: Reason = None,
    name: Name = None,
    older_than: OlderThan = None,
    limit: Limit = None,
    yes: Yes = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    url: Url = None,
    timeout: Timeout = DEFAULT_TIMEOUT_SECS,
) -> None:
    """Put dead letters back into the queue, with their attempts at zero."""
    wanted = _wanted(ids, reason, name, older_than)
    count = run(_count(url, timeout, queue, wanted, limit))
    question = f"replay {plural(count, 'dead letter')} of {queue}"
    moved = ReplayCount(0)
    if may_go_on(question, count, yes=yes, dry_run=dry_run):
        moved = run(_replay(url, timeout, queue, wanted, count))
    if as_json:
        told = {"matched": count, "replayed": int(moved), "unreadable": moved.skipped}
        write_json(told | {"queue_is_full": moved.queue_is_full, "dry_run": dry_run})
    elif moved:
        show(f"replayed {plural(moved, 'dead letter')}")
    if moved.skipped:
        say(f"{plural(moved.skipped, 'letter')} cannot be read and stay: tampu dlq peek {queue} shows them", "yellow")
    if moved.queue_is_full:
        say("the queue is full: the others stay until there is room", "red")
        raise typer.Exit(ERROR)


async def _count(url: str | None, timeout_secs: float, name: str, wanted: Wanted, limit: int | None) -> int:
    async with Session(url, timeout_secs) as session:
        [(pipe, keys)] = await session.views(name)
        count = await letters.count(pipe, keys, wanted)
        return count if limit is None else min(count, limit)


async def _replay(url: str | None, timeout_secs: float, name: str, wanted: Wanted, total: int) -> ReplayCount:
    async with Session(url, timeout_secs) as session:
        queue = await session.queue(name)
        moved = skipped = 0
        is_full = False
        ids = await letters.letter_ids(queue.producer.ready_pipe(), queue.keys, wanted) if wanted.ids else None
        with progress_bar("replaying", total) as done:
            while moved < total and not is_full:
                step = min(STEP, total - moved)
                chosen: dict[str, Any] = wanted.filters() if ids is None else {"ids": ids[:step]}
                count = await queue.replay_dlq(step, **chosen)
                moved += count
                is_full = count.queue_is_full
                done(moved)
                if ids is not None:
                    skipped += count.skipped
                    ids = ids[step:]
                    if not ids:
                        break
                elif count < step:
                    skipped = count.skipped
                    break
        result = ReplayCount(moved)
        result.skipped, result.queue_is_full = skipped, is_full
        return result


@app.command()
def remove(
    queue: QueueName,
    ids: Ids = None,
    reason: Reason = None,
    name: Name = None,
    older_than: OlderThan = None,
    limit: Limit = None,
    yes: Yes = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    url: Url = None,
    timeout: Timeout = DEFAULT_TIMEOUT_SECS,
) -> None:
    """Throw dead letters away, for good."""
    wanted = _wanted(ids, reason, name, older_than)
    count = run(_count(url, timeout, queue, wanted, limit))
    removed = 0
    if may_go_on(f"remove {plural(count, 'dead letter')} of {queue} for good", count, yes=yes, dry_run=dry_run):
        removed = run(_remove(url, timeout, queue, wanted, count))
    if as_json:
        write_json({"matched": count, "removed": removed, "dry_run": dry_run})
    elif removed:
        show(f"removed {plural(removed, 'dead letter')}")


async def _remove(url: str | None, timeout_secs: float, name: str, wanted: Wanted, total: int) -> int:
    async with Session(url, timeout_secs) as session:
        queue = await session.queue(name)
        removed = 0
        ids = await letters.letter_ids(queue.producer.ready_pipe(), queue.keys, wanted) if wanted.ids else None
        with progress_bar("removing", total) as done:
            while removed < total:
                step = min(STEP, total - removed)
                chosen: dict[str, Any] = wanted.filters() if ids is None else {"ids": ids[:step]}
                count = await queue.remove_dlq(step, **chosen)
                ids = None if ids is None else ids[step:]
                removed += count
                done(removed)
                if not count:
                    break
        return removed
