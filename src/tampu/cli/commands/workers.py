"""`tampu workers`, also `tampu worker list`: the workers of all queues, or of one, and what they are running."""

from dataclasses import asdict
from typing import Annotated

import typer
from rich.text import Text

from tampu.cli.options import OptionalQueueName
from tampu.cli.output import cell, say, show, write_json
from tampu.cli.session import CommonOptions, Session, skip_if_broken
from tampu.cli.tables import FittingTable
from tampu.cli.units import duration, number
from tampu.inspect.workers import WorkerInfo, list_workers

Dead = Annotated[
    bool, typer.Option("--dead", help="Also list workers that have stopped sending heartbeats, with their last jobs.")
]


def workers(common: CommonOptions, queue: OptionalQueueName = None, dead: Dead = False) -> None:
    """List the workers of all queues, or of one, with host, process, version and running jobs."""
    found = common.run(_workers, queue, dead)
    if common.as_json:
        write_json([{"queue": name, **asdict(worker)} for name, worker in found])
        return
    if not found:
        say(f"no worker serves {queue}" if queue else "no workers")
        return
    spare = ("heartbeat", "version", "pending", "longest", "process", "host")
    numbers = ("process", "slots", "running", "pending")
    columns = ("host", "process", "version", "slots", "running", "pending", "longest", "heartbeat")
    rows = FittingTable("queue", "worker", *columns, numbers=numbers, spare=spare)
    for name, worker in found:
        rows.add_row(*_row(name, worker))
    show(rows)


def _row(queue: str, worker: WorkerInfo) -> tuple[Text, ...]:
    style = "" if worker.is_alive else "dim"
    longest = worker.running[0] if worker.running else None
    return (
        cell(queue, "bold"),
        cell(worker.name if worker.is_alive else f"{worker.name} (dead)", style),
        cell(worker.host or "-", style),
        cell("-" if worker.pid is None else worker.pid, style),
        cell(worker.version or "-", style),
        cell(number(worker.concurrency) if worker.concurrency is not None else "-", style),
        cell(number(worker.running_count) if worker.running_count is not None else "-", style),
        cell(number(worker.pending), style),
        cell("-" if longest is None else f"{longest.name or longest.id} {duration(longest.running_ms)}", style),
        cell("-" if worker.heartbeat_ms is None else f"{duration(worker.heartbeat_ms)} ago", style),
    )


async def _workers(session: Session, queue: str | None, dead: bool) -> list[tuple[str, WorkerInfo]]:
    found: list[tuple[str, WorkerInfo]] = []
    for client, keys in await session.views(queue):
        with skip_if_broken(keys.queue_name, is_one_of_many=queue is None):
            found += [(keys.queue_name, worker) for worker in await list_workers(client, keys, dead=dead)]
    return found
