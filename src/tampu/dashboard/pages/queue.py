"""Queue: six numbers, four charts, its tasks and its workers."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import TYPE_CHECKING

from tampu.dashboard.app import Page
from tampu.dashboard.charts import Line, bars, lines
from tampu.dashboard.html import compact
from tampu.dashboard.pages.queues import row_of
from tampu.inspect.glance import glance
from tampu.inspect.meters import read_series, task_json
from tampu.inspect.views import worker_json
from tampu.wire.meter import Counts, sum_of

if TYPE_CHECKING:
    from markupsafe import Markup

    from tampu.dashboard.app import Ask
    from tampu.inspect.meters import Series
    from tampu.wire.limits import Limit, Limits

SPANS = {"1h": 3600.0, "24h": 24 * 3600.0}
#: Tasks and workers that are listed.
MAX_ROWS = 100


async def page(ask: Ask) -> Page:
    """Return the page of one queue."""
    admin = await ask.admin()
    span = "24h" if ask.query.get("span") == "24h" else "1h"
    one = ask.watch.glances.get(admin.name)
    if one is None:
        one = (await glance({admin.name: admin.client}, [admin.keys], ask.watch.now_ms))[admin.name]
    series, workers, limits = await asyncio.gather(
        read_series(admin.client, admin.keys, ask.watch.now_ms, SPANS[span]), admin.workers(), admin.limits()
    )
    limited = rows_of(limits)
    gate = await admin.read_gate() if limited else None
    tasks = sorted(series.tasks.items(), key=lambda item: (-item[1].total, item[0]))
    known = {name for name, _ in tasks}
    tasks += [(name, Counts()) for name in sorted(one.paused_tasks.keys() - known)]
    row = row_of(ask.watch, one)
    row.workers = len(workers)
    total = sum_of(dict(tasks))
    added, delivered = ask.watch.flow(admin.name)
    if ask.wants_json:
        known_of = asdict(one) | {"added_per_sec": added, "delivered_per_sec": delivered}
        return Page("queue.html", admin.name, "queues", {
            **known_of,
            "span": span,
            "limits": limits.as_dict(),
            "gate": None if gate is None else gate._asdict(),
            "tasks": {name: task_json(counts) for name, counts in tasks},
            "workers": [worker_json(admin.name, worker) for worker in workers],
        })  # fmt: skip
    slots = sum(worker.concurrency or 0 for worker in workers)
    values = {"one": one, "span": span, "tasks": tasks[:MAX_ROWS], "overall": total, "workers": workers[:MAX_ROWS]}
    values |= {"slots": slots, "flow": (added, delivered), "figures": figures_of(series), "findings": row.findings}
    values |= {"limits": limited, "gate": gate}
    return Page("queue.html", admin.name, "queues", None, values)


def rows_of(limits: Limits) -> list[tuple[str, str, Limit]]:
    """Return the limits that are set: of what, its name, and the limit."""
    rows = [("queue", "", limits.queue), ("every key", "", limits.per_key)]
    rows += [("task", name, limit) for name, limit in limits.tasks.items()]
    rows += [("key", name, limit) for name, limit in limits.keys.items()]
    return [row for row in rows if row[2].is_set][:MAX_ROWS]


def figures_of(series: Series) -> list[Markup]:
    """Return the charts: runs, run times, waiting times, and what is waiting or dead."""
    totals = [sum_of(cell) for cell in series.cells]
    per = "minute" if series.step == 1 else "10 minutes"
    runs = [Line("ok", "succeeded", [one.ok for one in totals]), Line("bad", "failed", [one.failed for one in totals])]
    times = [
        Line(f"p{name}", f"p{name}", [one.run_ms(share) for one in totals])
        for name, share in (("50", 0.5), ("95", 0.95))
    ]
    waits = [
        Line(f"p{name}", f"p{name}", [one.wait_ms(share) for one in totals])
        for name, share in (("50", 0.5), ("95", 0.95))
    ]
    held = [
        Line("waiting", "waiting", [minute.waiting for minute in series.line]),
        Line("delayed", "delayed", [minute.delayed for minute in series.line]),
        Line("bad", "dead", [minute.letters for minute in series.line]),
    ]
    return [
        bars(f"Runs per {per}", series.starts, runs, per),
        lines("Run time", series.starts, times),
        lines("Waiting time", series.starts, waits),
        lines("Jobs, last hour", [minute.at for minute in series.line], held, compact),
    ]
