"""`tampu stats`: what workers counted: runs, failures and times of each task."""

from typing import Annotated, Any

import typer
from rich.console import RenderableType

from tampu.base.units import duration, number
from tampu.cli.options import QueueName
from tampu.cli.output import cell, say, show, write_json
from tampu.cli.session import CommonOptions
from tampu.cli.tables import FittingTable
from tampu.cli.units import parse_duration
from tampu.inspect.admin import QueueAdmin
from tampu.inspect.meters import Series, read_series, task_json
from tampu.inspect.views import iso
from tampu.wire.meter import Cell, Counts, sum_of


def stats(
    common: CommonOptions,
    queue: QueueName,
    since: Annotated[str, typer.Option("--since", metavar="DURATION", help="How far back to look: up to 24h.")] = "1h",
) -> None:
    """Show how often each task of a queue ran, failed and died, and how long runs and waits took.

    Workers keep counts by minute for an hour and by ten minutes for a day. Those of ChasquiMQ count nothing.
    """
    secs = parse_duration(since)

    async def work(admin: QueueAdmin) -> Series:
        return await read_series(admin.client, admin.keys, await admin.client.server_time_ms(), secs)

    series = common.read(queue, work)
    tasks = sorted(series.tasks.items(), key=lambda item: (-item[1].total, item[0]))
    if common.as_json:
        steps = [
            {"from": iso(start * 60_000), "minutes": series.step, "tasks": _json(cell)}
            for start, cell in zip(series.starts, series.cells, strict=True)
            if cell
        ]
        write_json({"queue": queue, "tasks": _json(dict(tasks)), "steps": steps})
        return
    if not tasks:
        say(f"no runs of {queue} in the last {since} were counted")
        return
    numbers = ("runs", "failed", "died", "run p50", "p95", "p99", "wait p95")
    rows = FittingTable("task", *numbers, numbers=numbers, spare=("wait p95", "p99", "died"))
    for name, counts in [*tasks, *([("all", sum_of(dict(tasks)))] if len(tasks) > 1 else [])]:
        rows.add_row(cell(name or "(no name)", "bold"), *_cells(counts))
    show(rows)


def _json(tasks: Cell) -> dict[str, Any]:
    return {name: task_json(counts) for name, counts in tasks.items()}


def _cells(counts: Counts) -> list[RenderableType]:
    failed = f"{counts.failed_share:.1%}".replace("%", " %")
    times = [duration(counts.run_ms(share)) for share in (0.5, 0.95, 0.99)]
    return [
        number(counts.total),
        cell(failed, "red" if counts.failed_share > 0.2 else ""),
        cell(number(counts.dead), "red" if counts.dead else ""),
        *times,
        duration(counts.wait_ms(0.95)),
    ]
