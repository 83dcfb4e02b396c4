"""Queues: totals, what needs attention, and a row for each queue."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from tampu.dashboard.app import Page
from tampu.dashboard.charts import Line, bars, spark
from tampu.inspect.findings import findings_of
from tampu.wire.meter import Minute, bounds

if TYPE_CHECKING:
    from markupsafe import Markup

    from tampu.dashboard.app import Ask
    from tampu.dashboard.watch import Watch
    from tampu.inspect.findings import Finding
    from tampu.inspect.glance import Glance

#: Rows on one page, and findings above them.
ROWS = 50
FINDINGS = 6
#: Minutes over which the rates of the table are computed.
RECENT = 5
ORDERS = {"trouble": "trouble first", "name": "name", "waiting": "waiting", "dead": "dead", "runs": "runs"}


@dataclass(slots=True)
class Row:
    """One queue of the table."""

    one: Glance
    workers: int | None
    findings: list[Finding]
    line: list[Minute]
    #: Runs, and failed ones, of the last five minutes.
    runs: int
    failed: int
    #: The 95th percentile of the run times, in milliseconds.
    p95_ms: float | None

    @property
    def rank(self) -> tuple[int, int, str]:
        """Return what sorts trouble first."""
        return min((finding.rank for finding in self.findings), default=9), -self.one.dead, self.one.queue

    @property
    def spark(self) -> Markup:
        """Return the runs of the last hour as small bars."""
        ok, failed = [minute.ok for minute in self.line], [minute.failed for minute in self.line]
        label = f"{sum(ok) + sum(failed):,} runs in the last hour, {sum(failed):,} failed"
        return spark(ok, failed, label)


def row_of(watch: Watch, one: Glance) -> Row:
    """Return the row of a queue."""
    name = one.queue
    line = watch.lines.get(name) or [Minute(0)]
    recent = line[-RECENT:]
    failed = sum(minute.failed for minute in recent)
    timed = [minute.p95 for minute in recent if minute.p95]
    p95_ms = sum(bounds(max(timed))) / 2000 if timed else None
    workers = watch.workers.get(name)
    found = findings_of(one, workers, watch.died(name), watch.errors.get(name, (0, ""))[1])
    return Row(one, workers, found, line, sum(minute.ok for minute in recent) + failed, failed, p95_ms)


_KEYS = {
    "trouble": lambda row: row.rank,
    "name": lambda row: row.one.queue,
    "waiting": lambda row: (-row.one.waiting, row.one.queue),
    "dead": lambda row: (-row.one.dead, row.one.queue),
    "runs": lambda row: (-row.runs, row.one.queue),
}


async def page(ask: Ask) -> Page:
    """Return the page of all queues."""
    watch, words = ask.watch, ask.query.get("find", "")
    order = ask.query.get("sort", "") if ask.query.get("sort") in ORDERS else "trouble"
    every = [row_of(watch, one) for one in watch.glances.values()]
    rows = sorted((row for row in every if words.lower() in row.one.queue.lower()), key=_KEYS[order])
    start = ask.query.get("from", "0")
    first = min(int(start), len(rows)) if start.isascii() and start.isdigit() and len(start) < 7 else 0
    attention = sorted((found for row in every for found in row.findings), key=lambda found: found[1::-1])
    states = ("waiting", "running", "delayed", "dead")
    totals = {state: sum(getattr(row.one, state) for row in every) for state in states}
    shown = rows[first : first + ROWS]
    if ask.wants_json:
        return Page("queues.html", "Queues", "queues", {
            "now_ms": watch.now_ms,
            "fault": watch.fault or None,
            "totals": totals,
            "attention": [found._asdict() for found in attention],
            "queues": [_json(row) for row in rows[first:]],
        })  # fmt: skip
    values = {
        "rows": shown,
        "total": len(every),
        "matching": len(rows),
        "first": first,
        "size": ROWS,
        "totals": totals,
        "attention": attention[:FINDINGS],
        "more": max(len(attention) - FINDINGS, 0),
        "chart": _chart(every),
        "words": words,
        "order": order,
        "orders": ORDERS,
    }
    return Page("queues.html", "Queues", "queues", None, values)


def _chart(rows: list[Row]) -> Markup | str:
    lines = [row.line for row in rows if len(row.line) > 1]
    if not lines:
        return ""
    ok = [sum(minute.ok for minute in minutes) for minutes in zip(*lines, strict=True)]
    failed = [sum(minute.failed for minute in minutes) for minutes in zip(*lines, strict=True)]
    minutes = [minute.at for minute in lines[0]]
    return bars("Runs per minute", minutes, [Line("ok", "succeeded", ok), Line("bad", "failed", failed)])


def _json(row: Row) -> dict[str, object]:
    counts = {"workers": row.workers, "runs_5m": row.runs, "failed_5m": row.failed, "p95_ms": row.p95_ms}
    known = asdict(row.one)
    known.pop("groups")
    return known | counts
