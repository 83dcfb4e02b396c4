"""`tampu limit show|set|clear`: how many jobs of a queue, a task or a key may run."""

import math
from typing import Annotated

import typer

from tampu.base.units import plural
from tampu.cli.errors import UsageError
from tampu.cli.options import QueueName
from tampu.cli.output import cell, say, show, write_json
from tampu.cli.session import CommonOptions
from tampu.cli.tables import FittingTable
from tampu.errors import ConfigError
from tampu.inspect.admin import QueueAdmin
from tampu.inspect.limits import GateView
from tampu.wire.limits import Limit, Limits, limit_fields, own_field

app = typer.Typer(help="Show, set or clear the limits of a queue, its tasks and its keys.", no_args_is_help=True)

Key = Annotated[str | None, typer.Option("--key", metavar="KEY", help="Only this key, such as a tenant.")]
Task = Annotated[str | None, typer.Option("--task", metavar="NAME", help="Only this task.")]


@app.command("show")
def show_(common: CommonOptions, queue: QueueName) -> None:
    """Show the limits of a queue, and how many of its jobs and keys wait for them."""

    async def work(admin: QueueAdmin) -> tuple[Limits, GateView]:
        return await admin.limits(), await admin.read_gate()

    limits, gate = common.read(queue, work)
    rows: list[tuple[str, Limit]] = [("queue", limits.queue), ("every key", limits.per_key)]
    rows += [(f"task {name}", limit) for name, limit in limits.tasks.items()]
    rows += [(f"key {name}", limit) for name, limit in limits.keys.items()]
    rows = [(name, limit) for name, limit in rows if limit.is_set]
    if common.as_json:
        write_json({"queue_name": queue, **limits.as_dict(), "gate": gate._asdict() if rows else None})
        return
    if not rows:
        say(f"{queue} has no limits")
        return
    table = FittingTable("limit of", "concurrency", "rate", "burst", "weight", "ordered", numbers=("concurrency",))
    for name, limit in rows:
        values = (limit.concurrency, limit.rate, limit.burst, limit.weight, limit.ordered)
        table.add_row(cell(name, "bold"), *(cell(_shown(value)) for value in values))
    show(table)
    say(
        f"{plural(gate.running, 'job')} running, {gate.waiting:,} waiting; {plural(gate.in_turn, 'key')} in turn, "
        f"{gate.cooling:,} cooling, {gate.parked:,} at the limit of their task"
    )


@app.command("set")
def set_(
    common: CommonOptions,
    queue: QueueName,
    key: Key = None,
    task: Task = None,
    per_key: Annotated[bool, typer.Option("--per-key", help="Every key without a dedicated limit.")] = False,
    concurrency: Annotated[
        str | None,
        typer.Option("--concurrency", metavar="N", help="Jobs that run at the same time; 0 pauses; or `unlimited`."),
    ] = None,
    rate: Annotated[
        str | None, typer.Option("--rate", metavar="RATE", help="Starts per time: 10/s, 100/m, 5/2h; `off` undoes.")
    ] = None,
    burst: Annotated[
        int | None, typer.Option("--burst", metavar="N", help="Starts that may follow each other at once.")
    ] = None,
    weight: Annotated[
        float | None, typer.Option("--weight", metavar="W", help="Share of a key beside others. Defaults to 1.")
    ] = None,
    ordered: Annotated[
        bool | None, typer.Option("--ordered/--not-ordered", help="Run the jobs of a key one at a time, in order.")
    ] = None,
) -> None:
    """Limit how many jobs of a queue run, or of one task or key. It takes effect at once, in all workers.

    The limit replaces the one that the queue, task or key had.
    """
    if per_key and (key is not None or task is not None):
        raise UsageError("--per-key is for every key: leave --key and --task out")
    limit = Limit(concurrency=_concurrency(concurrency), rate=rate, burst=burst, weight=weight, ordered=ordered)
    if not limit.is_set:
        raise UsageError("give at least one of --concurrency, --rate, --burst, --weight and --ordered")
    try:
        own = Limit() if per_key else limit
        fields = limit_fields(own, key=key, task=task, per_key=limit if per_key else None)
    except ConfigError as error:
        raise UsageError(str(error).replace("per_key=Limit(...)", "--per-key").replace("key=...", "--key")) from error
    what = "every key" if per_key else _named(key, task)
    shown = ", ".join(f"{name} {_shown(value)}" for name, value in limit.as_dict().items())
    common.change(queue, lambda admin: admin.limit(fields, f"{what}: {shown}"))
    report = {"queue": queue, "key": key, "task": task, "per_key": per_key, "limit": limit.as_dict()}
    common.report(report, f"limited {what} of {queue}: {shown}" if what != "the queue" else f"limited {queue}: {shown}")


@app.command()
def clear(common: CommonOptions, queue: QueueName, key: Key = None, task: Task = None) -> None:
    """Remove the limit of a task or a key; without either, remove all limits of the queue."""
    if key is not None and task is not None:
        raise UsageError("give --key or --task, not both")
    field = own_field(key, task)
    common.change(queue, lambda admin: admin.limit({field: b""} if field else {}, f"clear {_named(key, task)}"))
    report = {"queue": queue, "key": key, "task": task, "cleared": True}
    common.report(report, f"cleared the limit of {_named(key, task)} of {queue}" if field else f"cleared {queue}")


def _named(key: str | None, task: str | None) -> str:
    return f"key {key}" if key is not None else f"task {task}" if task is not None else "the queue"


def _concurrency(text: str | None) -> float | None:
    if text is None or text == "unlimited":
        return None if text is None else math.inf
    if not text.isascii() or not text.isdigit():
        raise UsageError(f"--concurrency must be a whole number or `unlimited`, got {text!r}")
    return int(text)


def _shown(value: object) -> str:
    if value is None:
        return ""
    return "unlimited" if value == math.inf else f"{value:g}" if isinstance(value, float) else str(value).lower()
