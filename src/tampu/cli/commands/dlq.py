"""`tampu dlq summary|peek|replay|remove|repair`: works on all dead letters, or those selected by options.

`repair` changes the payloads of dead letters with SQL, tries a few first, and replays the rest.
"""

from __future__ import annotations

import math
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group
from rich.padding import Padding
from rich.text import Text
from typer import Option

from tampu.base.units import plural
from tampu.cli.errors import ERROR, UsageError
from tampu.cli.options import (
    AsJson,
    Confirmation,
    JobName,
    QueueName,
    Raw,
    Url,
    choice_option,
    duration_option,
    limit_option,
)
from tampu.cli.output import cell, command, progress_bar, say, show, write_json, write_line
from tampu.cli.session import CommonOptions  # noqa: TC001 - likewise
from tampu.cli.tables import FittingTable, fact_table
from tampu.cli.units import parse_duration, time_of_day
from tampu.inspect.clusters import MAX_LETTERS
from tampu.inspect.dead_letters import REASONS, DlqFilter, ReplayCount
from tampu.inspect.views import cluster_json, letter_json, one_line, redacted, redacted_cluster, redacted_letter
from tampu.redis.settings import resolve_url
from tampu.wire.entry import entry_ms

if TYPE_CHECKING:
    from tampu.inspect.admin import QueueAdmin
    from tampu.spark.lake.repair import Plan, Repair
    from tampu.wire.dlq import DlqEntry

app = typer.Typer(help="Summarize, show, repair, replay or remove dead letters.", no_args_is_help=True)

#: Changes that `repair` shows, unless --json asks for all.
MAX_SHOWN = 10

Limit = Annotated[int | None, limit_option(help="Maximum number of dead letters.")]


# --- repair


@app.command()
def repair(
    queue: QueueName,
    cluster: Annotated[str, Option(metavar="ID", help="Cluster to repair, as shown by `tampu dlq summary`.")],
    sql: Annotated[
        str,
        Option(
            metavar="SQL",
            help='SQL query: "SELECT * REPLACE (CAST(amount AS DOUBLE) AS amount) FROM letters". Each field of the '
            "payloads is a column.",
        ),
    ],
    confirmation: Confirmation,
    canary: Annotated[int, Option(min=0, metavar="N", help="Replay this many first; stop if one fails again.")] = 10,
    wait: Annotated[str, Option(metavar="DURATION", help="How long to wait for the --canary jobs to finish.")] = "60s",
    lake: Annotated[
        str | None, Option(metavar="DIR|URI", help="Record the repair in this lake (gold_repairs).")
    ] = None,
    limit: Limit = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Repair dead letters with SQL and replay them: first a few, then, if all of those complete, the rest.

    Needs the `lake` extra, but neither Spark nor Java.
    """
    from tampu.spark.session import require_lake

    require_lake()
    from tampu.spark.lake.repair import Repairer, find_letters, record, repairs_of
    from tampu.spark.lake.rows import published
    from tampu.spark.lake.store import Store
    from tampu.spark.options import check_shared_url

    patience_secs = parse_duration(wait)
    store = None if lake is None else Store.of(lake)
    if store is not None:
        published(store)
    checked_url = check_shared_url(resolve_url(url), "--url")
    letters = find_letters(checked_url, queue, cluster, limit)
    if not letters:
        summary = command("dlq", "summary", queue)
        raise UsageError(f"queue {queue!r} has no dead letters of cluster {cluster!r}: see {summary}")
    plan = repairs_of(letters, sql)
    if not as_json:
        _show_changes(plan)
    count = len(plan.repairs)
    report: dict[str, Any] = {
        "repair": None,
        "matched": len(letters),
        "changed": count,
        "unchanged": plan.unchanged,
        "left_out": plan.left_out,
        "changes": [_change_to_json(repair) for repair in plan.repairs],
        "canaries": {},
        "replayed": 0,
        "dry_run": confirmation.dry_run,
    }
    failure = ""
    if confirmation.ask(f"repair and replay {plural(count, 'dead letter')} in {queue}", count):
        repairer, repair_id = Repairer(checked_url, queue), uuid.uuid4().hex[:8]
        report["repair"] = repair_id

        def replay(repairs: list[Repair], *, canary: bool) -> None:
            if store is not None:  # before the replay: a repair that is not recorded could not be found later
                record(store, repair_id, queue, cluster, sql, repairs, repairer.started_ms, canary=canary)
            report["replayed"] += repairer.replay(repairs, f"repair {repair_id}").added

        first, rest = plan.repairs[:canary], plan.repairs[canary:]
        if first:
            replay(first, canary=True)
            say(f"replayed {plural(len(first), 'letter')}; waiting for the outcome ...")
            report["canaries"] = outcomes = repairer.outcomes(first, patience_secs)
            failure = _failure(len(first), outcomes, wait, "; the rest stays dead" if rest else "")
        if rest and not failure:
            replay(rest, canary=False)
    if as_json:
        write_json(report)
    elif report["repair"]:
        write_line(f"repair {report['repair']}: replayed {plural(report['replayed'], 'letter')}")
    if failure:
        say(failure, "red")
        raise typer.Exit(ERROR)


def _failure(count: int, outcomes: dict[str, str], wait: str, stays: str) -> str:
    """Return why the rest must not be replayed, or nothing. `wait` is how long the outcomes were waited for."""
    bad = sorted(job_id for job_id, outcome in outcomes.items() if outcome != "completed")
    if bad:
        return f"{len(bad)} of the first {count} did not complete ({', '.join(bad[:3])}){stays}"
    if missing := count - len(outcomes):
        return (
            f"{missing} of the first {count} did not end within {wait}{stays}: is a worker running? "
            "--wait waits longer, --canary 0 does not wait"
        )
    return ""


def _show_changes(plan: Plan) -> None:
    rows = FittingTable("letter", "job", "field", "before", "after", spare=("letter",))
    for repair in plan.repairs[:MAX_SHOWN]:
        for field, (before, after) in _shown(repair).items():
            rows.add_row(
                cell(repair.letter.entry_id, "dim"),
                cell(repair.letter.job.id),
                cell(field, "bold"),
                cell(one_line(before), "red"),
                cell(one_line(after), "green"),
            )
    if plan.repairs:
        show(rows)
    if (more := len(plan.repairs) - MAX_SHOWN) > 0:
        say(f"... and {plural(more, 'more letter')}; --json shows all")
    for number, what in ((plan.unchanged, "the SQL does not change"), (plan.left_out, "the SQL leaves out")):
        if number:
            say(f"{plural(number, 'letter')} that {what}: not replayed")


def _change_to_json(repair: Repair) -> dict[str, Any]:
    return {
        "dlq_id": repair.letter.entry_id,
        "job_id": repair.letter.job.id,
        "changes": {field: {"before": before, "after": after} for field, (before, after) in _shown(repair).items()},
    }


def _shown(repair: Repair) -> dict[str, tuple[Any, Any]]:
    """Return the old and new values by field, redacted as parts of the old and the new payload."""
    before = redacted("payload", {field: old for field, (old, _) in repair.changes.items()})
    after = redacted("payload", {field: new for field, (_, new) in repair.changes.items()})
    return {field: (_part(before, field), _part(after, field)) for field in repair.changes}


def _part(shown: Any, field: str) -> Any:
    return shown.get(field) if isinstance(shown, dict) else shown


# --- the other commands


@dataclass(frozen=True, slots=True)
class Selection:
    """Options that choose dead letters."""

    ids: Annotated[
        list[str] | None,
        Option("--id", metavar="ID", help="Only this dead letter: its ID or its job's. Can be repeated."),
    ] = None
    cluster: Annotated[str | None, Option(metavar="ID", help="Only this cluster of `tampu dlq summary`.")] = None
    reason: Annotated[str | None, choice_option(REASONS, "--reason", help="Only this reason.")] = None
    name: JobName = None
    error_type: Annotated[
        str | None, Option(metavar="TYPE", help="Only this type of error, such as ConnectionError.")
    ] = None
    match: Annotated[str | None, Option(metavar="TEXT", help="Only errors that contain this text.")] = None
    older_than: Annotated[float | None, duration_option(help="Only letters at least this old (90s, 2h, 7d).")] = None
    since: Annotated[float | None, duration_option(help="Only letters at most this old (90s, 2h, 7d).")] = None
    newest: Annotated[bool, Option("--newest", help="Newest first, instead of oldest first.")] = False

    def filter(self) -> DlqFilter:
        """Return what the options choose."""
        same = ("cluster", "reason", "name", "error_type", "match", "newest")
        ages = {"older_than_ms": self.older_than, "newer_than_ms": self.since}
        given = {option: getattr(self, option) for option in same}
        given |= {age: round(secs * 1000) for age, secs in ages.items() if secs is not None}
        return DlqFilter.by_any_id(self.ids or (), **given)


@app.command()
def summary(
    common: CommonOptions,
    queue: QueueName,
    every: Annotated[bool, typer.Option("--all", help="Group all dead letters, instead of the newest 10,000.")] = False,
) -> None:
    """Group dead letters into clusters by task, reason and error, the largest cluster first."""
    causes = common.read(queue, lambda admin: admin.causes(math.inf if every else MAX_LETTERS))
    clusters = list(map(redacted_cluster, causes.all))
    if not causes.is_complete:
        say(f"only the newest {causes.read:,} of {plural(causes.total, 'dead letter')} were grouped; --all groups all")
    if common.as_json:
        write_json([cluster_json(cluster, queue) for cluster in clusters])
        return
    if not clusters:
        say("no dead letters")
        return
    rows = FittingTable(
        *("letters", "task", "reason", "error", "first", "last", "cluster"),
        numbers=("letters", "cluster"),  # never wrapped or left out: other commands ask for the cluster
        spare=("first", "reason"),
    )
    for cluster in clusters:
        shape = f"{cluster.error_type}: {cluster.fingerprint}" if cluster.error_type else cluster.fingerprint
        rows.add_row(
            cell(f"{cluster.letters:,}", "red"),
            cell(cluster.name or "(no name)", "bold"),
            cell(cluster.reason),
            cell(shape),
            cell(time_of_day(cluster.first_seen_ms), "dim"),
            cell(time_of_day(cluster.last_seen_ms), "dim"),
            cell(cluster.cluster, "dim"),
        )
    show(rows)


@app.command()
def peek(
    common: CommonOptions,
    queue: QueueName,
    selection: Selection,
    limit: Limit = 20,
    full: Annotated[bool, Option("--full", help="Show tracebacks.")] = False,
    raw: Raw = False,
) -> None:
    """Show dead letters and their errors, oldest first unless --newest is given."""
    query = selection.filter()

    async def work(admin: QueueAdmin) -> tuple[list[DlqEntry], int]:
        return await admin.peek_dlq(limit or 20, query), await admin.count_dlq(query)

    letters, total = common.read(queue, work)
    found = list(map(redacted_letter, letters))
    if common.as_json:
        write_json([letter_json(letter, queue, raw=raw) for letter in found])
        return
    if not found:
        say("no dead letters" if query == DlqFilter() else "no matching dead letters")
        return
    for letter in found:
        show(_letter_view(letter, queue, raw=raw, full=full))
    if len(found) < total:
        matching = "" if query == DlqFilter() else "matching "
        say(f"showing {len(found):,} of {plural(total, f'{matching}dead letter')}; raise --limit to see more")


def _letter_view(letter: DlqEntry, queue: str, *, raw: bool, full: bool) -> Group:
    shown = letter_json(letter, queue, raw=raw)
    died_ms = letter.failed_at_ms or entry_ms(letter.dlq_id)
    head = Text.assemble(
        cell(letter.name or "(no name)", "bold"),
        "  ",
        cell(letter.reason, "red"),
        cell(f" after {plural(letter.attempts, 'attempt')}" if letter.attempts is not None else ""),
        cell(f"  {time_of_day(died_ms)}", "dim"),
    )
    payload = shown["payload"] if shown["job_id"] is not None else shown["envelope"]
    facts = [
        ("job", shown["job_id"] or "(cannot be decoded)"),
        ("letter", letter.dlq_id),
        ("error", letter.error_text),
        ("payload", one_line(payload)),
        ("worker", letter.worker),
        ("fields", None if letter.original is None else repr(shown["original"])),
    ]
    parts: list[Any] = [head, Padding(fact_table(facts), (0, 0, 0, 2))]
    if full and letter.traceback:
        lines = [cell(line, "dim") for line in letter.traceback.rstrip().splitlines()]
        parts.append(Padding(Group(*lines), (0, 0, 0, 4)))
    return Group(*parts)


def _count(common: CommonOptions, queue: str, query: DlqFilter, limit: int | None) -> int:
    count = common.read(queue, lambda admin: admin.count_dlq(query))
    return count if limit is None else min(count, limit)


@app.command()
def replay(
    common: CommonOptions, queue: QueueName, selection: Selection, confirmation: Confirmation, limit: Limit = None
) -> None:
    """Move dead letters back into the queue, with their attempts reset to zero."""
    query = selection.filter()
    count = _count(common, queue, query, limit)
    moved = ReplayCount(0)
    if confirmation.ask(f"replay {plural(count, 'dead letter')} in {queue}", count):
        with progress_bar("replaying", count) as done:
            moved = common.change(queue, lambda admin: admin.replay_dlq(count, query, done))
    counts = {"matched": count, "replayed": int(moved), "unreadable": moved.skipped}
    report = counts | {"queue_is_full": moved.queue_is_full, "dry_run": confirmation.dry_run}
    common.report(report, f"replayed {plural(moved, 'dead letter')}" if moved else "")
    if moved.skipped:
        skipped = plural(moved.skipped, "dead letter")
        say(f"skipped {skipped} that cannot be decoded; run {command('dlq', 'peek', queue)} to see them", "yellow")
    if moved.queue_is_full:
        say("the queue is full; run the command again when there is room to replay the rest", "red")
        raise typer.Exit(ERROR)


@app.command()
def remove(
    common: CommonOptions, queue: QueueName, selection: Selection, confirmation: Confirmation, limit: Limit = None
) -> None:
    """Delete dead letters. This cannot be undone."""
    query = selection.filter()
    count = _count(common, queue, query, limit)
    removed = 0
    if confirmation.ask(f"delete {plural(count, 'dead letter')} of {queue} permanently", count):
        with progress_bar("removing", count) as done:
            removed = common.change(queue, lambda admin: admin.remove_dlq(count, query, done))
    report = {"matched": count, "removed": removed, "dry_run": confirmation.dry_run}
    common.report(report, f"removed {plural(removed, 'dead letter')}" if removed else "")
