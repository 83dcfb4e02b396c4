"""`tampu dlq repair`: repair the payloads of dead letters with SQL, try a few first, replay the rest."""

from __future__ import annotations

import uuid
from pathlib import Path  # noqa: TC003 - Typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tampu.cli.errors import ERROR, UsageError
from tampu.cli.options import AsJson, DryRun, QueueName, Url, Yes, confirm
from tampu.cli.output import cell, command, say, show, write_json, write_line
from tampu.cli.payloads import one_line
from tampu.cli.redact import redacted
from tampu.cli.tables import FittingTable
from tampu.cli.units import parse_duration, plural
from tampu.redis.settings import resolve_url

if TYPE_CHECKING:
    from tampu.spark.lake.repair import Plan, Repair, Repairer

#: Changes that are shown, unless --json asks for all.
MAX_SHOWN = 10


def repair(
    queue: QueueName,
    cluster: Annotated[
        str,
        typer.Option("--cluster", metavar="ID", help="Dead letters to repair: a cluster shown by `tampu dlq summary`."),
    ],
    sql: Annotated[
        str,
        typer.Option(
            "--sql",
            metavar="SQL",
            help='SQL query: "SELECT * REPLACE (CAST(amount AS DOUBLE) AS amount) FROM letters". Each field of the '
            "payloads is a column.",
        ),
    ],
    canary: Annotated[
        int, typer.Option("--canary", min=0, metavar="N", help="Replay this many first; stop if one fails again.")
    ] = 10,
    wait: Annotated[
        str, typer.Option("--wait", metavar="DURATION", help="How long to wait for the --canary jobs to finish.")
    ] = "60s",
    lake: Annotated[
        Path | None,
        typer.Option("--lake", metavar="DIR", file_okay=False, help="Record the repair in this lake (gold_repairs)."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", "-n", min=1, help="Repair at most this many dead letters.")
    ] = None,
    yes: Yes = False,
    dry_run: DryRun = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Repair dead letters with SQL and replay them: first a few, then, if all of those complete, the rest.

    Needs the `lake` extra, but neither Spark nor Java.
    """
    from tampu.spark.session import require_lake

    require_lake()
    from tampu.spark.lake.folder import lake_folder
    from tampu.spark.lake.repair import Repairer, find_letters, repairs_of
    from tampu.spark.lake.rows import published
    from tampu.spark.options import check_shared_url

    patience_secs = parse_duration(wait)
    folder = None if lake is None else lake_folder(lake)
    if folder is not None:
        published(folder)
    checked_url = check_shared_url(resolve_url(url), "--url")
    letters = find_letters(checked_url, queue, cluster, limit)
    if not letters:
        summary = command("dlq", "summary", queue)
        raise UsageError(f"queue {queue!r} has no dead letters of cluster {cluster!r}: see {summary}")
    plan = repairs_of(letters, sql)
    if not as_json:
        _show_changes(plan)
    count = len(plan.repairs)
    told: dict[str, Any] = {
        "repair": None,
        "matched": len(letters),
        "changed": count,
        "unchanged": plan.unchanged,
        "left_out": plan.left_out,
        "changes": [_change_to_json(one) for one in plan.repairs],
        "canaries": {},
        "replayed": 0,
        "dry_run": dry_run,
    }
    failure = ""
    if confirm(f"repair and replay {plural(count, 'dead letter')} in {queue}", count, yes=yes, dry_run=dry_run):
        work = _Work(Repairer(checked_url, queue), queue, cluster, sql, folder)
        told["repair"] = work.id
        failure = work.run(plan.repairs, canary, patience_secs, wait)
        told |= {"canaries": work.outcomes, "replayed": work.replayed}
    if as_json:
        write_json(told)
    elif told["repair"]:
        write_line(f"repair {told['repair']}: replayed {plural(told['replayed'], 'letter')}")
    if failure:
        say(failure, "red")
        raise typer.Exit(ERROR)


class _Work:
    """One repair that has been confirmed."""

    def __init__(self, repairer: Repairer, queue: str, cluster: str, sql: str, lake: Path | None) -> None:
        self.id = uuid.uuid4().hex[:8]
        self.outcomes: dict[str, str] = {}
        self.replayed = 0
        self._repairer = repairer
        self._about = (queue, cluster, sql)
        self._lake = lake

    def run(self, repairs: list[Repair], canary: int, patience_secs: float, wait: str) -> str:
        """Replay the letters; return why it stopped, or nothing. `wait` is `patience_secs` as the user gave it."""
        first, rest = repairs[:canary], repairs[canary:]
        stays = "; the rest stays dead" if rest else ""
        if first:
            self._replay(first, canary=True)
            say(f"replayed {plural(len(first), 'letter')}; waiting for the outcome ...")
            self.outcomes = self._repairer.outcomes(first, patience_secs)
            bad = sorted(job_id for job_id, outcome in self.outcomes.items() if outcome != "completed")
            if bad:
                return f"{len(bad)} of the first {len(first)} did not complete ({', '.join(bad[:3])}){stays}"
            if missing := len(first) - len(self.outcomes):
                return (
                    f"{missing} of the first {len(first)} did not end within {wait}{stays}: is a worker running? "
                    "--wait waits longer, --canary 0 does not wait"
                )
            repairs = rest
        if repairs:
            self._replay(repairs, canary=False)
        return ""

    def _replay(self, repairs: list[Repair], *, canary: bool) -> None:
        from tampu.spark.lake.repair import record

        if self._lake is not None:  # before the replay: a repair that is not recorded could not be found later
            record(self._lake, self.id, *self._about, repairs, self._repairer.started_ms, canary=canary)
        self.replayed += self._repairer.replay(repairs, f"repair {self.id}").added


def _show_changes(plan: Plan) -> None:
    rows = FittingTable("letter", "job", "field", "before", "after", spare=("letter",))
    for one in plan.repairs[:MAX_SHOWN]:
        for field, (before, after) in _shown(one).items():
            rows.add_row(
                cell(one.letter.entry_id, "dim"),
                cell(one.letter.job.id),
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
