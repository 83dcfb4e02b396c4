"""`tampu inspect [QUEUE]`: shows what is in the queues and compares it with thresholds."""

import asyncio
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tampu.cli.errors import BREACHED
from tampu.cli.options import OptionalQueueName
from tampu.cli.output import cell, is_terminal, say, show, write_json
from tampu.cli.session import CommonOptions, Session
from tampu.cli.tables import Facts, FittingTable, table
from tampu.cli.units import duration, number, parse_duration, plural, rate, size
from tampu.inspect.snapshot import RATE_EVENTS, RATE_WINDOW_MS, GroupView, QueueSnapshot, take_snapshot
from tampu.redis.faults import ServerError

#: Characters shown of a lock holder's random name.
HOLDER_SHOWN = 10

MaxWaiting = Annotated[
    int | None,
    typer.Option("--max-waiting", min=0, metavar="N", help="Exit with 3 if more jobs than this are waiting."),
]
MaxAge = Annotated[
    str | None,
    typer.Option(
        "--max-age", metavar="DURATION", help="Exit with 3 if a job has waited longer than this (90s, 15m, 2h)."
    ),
]
MaxDlq = Annotated[
    int | None,
    typer.Option("--max-dlq", min=0, metavar="N", help="Exit with 3 if there are more dead letters than this."),
]
Sample = Annotated[
    float,
    typer.Option(
        "--sample", min=0, max=60, metavar="SECONDS", help="Take two samples this far apart and show exact rates."
    ),
]


@dataclass(frozen=True, slots=True)
class Flow:
    """Entries per second; None where the server does not count (before Redis 7)."""

    added_per_sec: float | None
    #: Settled jobs: completed, retried or dead-lettered.
    settled_per_sec: float | None


UNKNOWN_FLOW = Flow(None, None)


def flow_between(before: QueueSnapshot | None, after: QueueSnapshot) -> Flow:
    """Return the rates between two snapshots; an entry leaves the stream only when it is settled."""
    if before is None or before.added_in_all is None or after.added_in_all is None:
        return UNKNOWN_FLOW
    secs = (after.taken_at_ms - before.taken_at_ms) / 1000
    added = after.added_in_all - before.added_in_all
    if secs <= 0 or added < 0:  # a flush, or a failover to a server with older data
        return UNKNOWN_FLOW
    settled = max(added - (after.length - before.length), 0)
    return Flow(round(added / secs, 3), round(settled / secs, 3))


@dataclass(frozen=True, slots=True)
class Look:
    """A snapshot of one queue and its rates."""

    snapshot: QueueSnapshot
    flow: Flow = UNKNOWN_FLOW

    def to_json(self) -> dict[str, Any]:
        """Return all fields for JSON output."""
        fields = asdict(self.snapshot)
        return fields | {
            "workers": self.snapshot.workers,
            "bytes": self.snapshot.bytes,
            "added_per_sec": self.flow.added_per_sec,
            "settled_per_sec": self.flow.settled_per_sec,
        }


def inspect(
    common: CommonOptions,
    queue: OptionalQueueName = None,
    max_waiting: MaxWaiting = None,
    max_age: MaxAge = None,
    max_dlq: MaxDlq = None,
    sample: Sample = 0.0,
) -> None:
    """Show how many jobs are waiting, pending, delayed or dead in all queues, or in one queue with its workers."""
    max_age_secs = None if max_age is None else parse_duration(max_age)
    looks, unusable, faults = common.run(_look, queue, sample)
    breaches = [breach for look in looks for breach in breaches_of(look.snapshot, max_waiting, max_age_secs, max_dlq)]
    if common.as_json:
        found = [look.to_json() for look in looks]
        all_queues = {"queues": found, "unusable": unusable, "faults": faults}
        write_json((found[0] if queue else all_queues) | {"breaches": breaches})
    elif queue:
        show(queue_view(looks[0]))
    elif looks:
        columns = ("waiting", "oldest", "pending", "delayed", "due", "dead", "workers", "completed", "failed", "bytes")
        note = ("completed", window_note(looks)) if is_terminal() else None
        show(queues_table(looks, columns, ("bytes", "due", "failed", "completed", "oldest", "workers"), note))
    elif not faults:
        say('no queues yet; add a job to create one: tampu add emails welcome \'{"to": "ada@example.com"}\'')
    for name in () if common.as_json else unusable:
        say(f"note: tampu cannot open this queue, its name is not UTF-8 or contains braces: {name!r}", "yellow")
    for faulty, fault in () if common.as_json else faults.items():
        say(f"queue {faulty} cannot be read: {fault}; run `tampu doctor`", "yellow")
    for breach in breaches:
        say(f"threshold exceeded: {breach}", "bold red")
    if breaches:
        raise typer.Exit(BREACHED)


async def _look(
    session: Session, name: str | None, sample_secs: float
) -> tuple[list[Look], list[bytes], dict[str, str]]:
    """Return the queues, the names that tampu cannot open, and the error of each queue that cannot be read."""
    views = await session.views(name)
    faults: dict[str, str] = {}

    async def snapshots(*, sizes: bool) -> dict[str, QueueSnapshot]:
        found = {}
        for client, keys in views:
            try:
                found[keys.queue_name] = await take_snapshot(client, keys, sizes=sizes)
            except ServerError as error:
                if name is not None:
                    raise
                faults[keys.queue_name] = str(error)
        return found

    before: dict[str, QueueSnapshot] = {}
    if sample_secs:
        before = await snapshots(sizes=False)
        await asyncio.sleep(sample_secs)
    looks = [Look(one, flow_between(before.get(one.queue), one)) for one in (await snapshots(sizes=True)).values()]
    return looks, [] if name else (await session.find_queues()).unusable, faults


def breaches_of(
    snapshot: QueueSnapshot, max_waiting: int | None, max_age_secs: float | None, max_dlq: int | None
) -> list[str]:
    """Return a sentence for each threshold that a queue exceeds."""
    found = []
    if max_waiting is not None and snapshot.waiting > max_waiting:
        found.append(f"{snapshot.queue}: {snapshot.waiting:,} jobs waiting, --max-waiting is {max_waiting:,}")
    oldest = snapshot.oldest_waiting_ms
    if max_age_secs is not None and oldest is not None and oldest > max_age_secs * 1000:
        found.append(
            f"{snapshot.queue}: a job has waited {duration(oldest)}, --max-age is {duration(max_age_secs * 1000)}"
        )
    if max_dlq is not None and snapshot.dlq > max_dlq:
        found.append(f"{snapshot.queue}: {snapshot.dlq:,} dead letters, --max-dlq is {max_dlq:,}")
    return found


_COLUMNS: dict[str, Callable[[Look], RenderableType]] = {
    "waiting": lambda look: number(look.snapshot.waiting),
    "oldest": lambda look: duration(look.snapshot.oldest_waiting_ms),
    "pending": lambda look: number(look.snapshot.pending),
    "delayed": lambda look: number(look.snapshot.delayed),
    "due": lambda look: cell(number(look.snapshot.due), "yellow" if look.snapshot.due else ""),
    "dead": lambda look: cell(number(look.snapshot.dlq), "red" if look.snapshot.dlq else ""),
    "workers": lambda look: number(look.snapshot.workers),
    "completed": lambda look: rate(look.snapshot.event_rates.get("completed", 0.0)),
    "failed": lambda look: rate(look.snapshot.event_rates.get("failed", 0.0)),
    "added": lambda look: rate(look.flow.added_per_sec),
    "settled": lambda look: rate(look.flow.settled_per_sec),
    "bytes": lambda look: size(look.snapshot.bytes),
}


def queues_table(
    looks: list[Look], columns: tuple[str, ...], spare: tuple[str, ...], note: tuple[str, str] | None = None
) -> FittingTable:
    """Return a table with one row per queue; a narrow terminal gets it without the columns in `spare`."""
    made = FittingTable("queue", *columns, numbers=columns, spare=spare, note=note)
    for look in looks:
        one = look.snapshot
        name = Text.assemble(cell(one.queue, "bold"), (_pause_mark(one), "yellow"))
        made.add_row(name, *(_COLUMNS[column](look) for column in columns))
    return made


def _pause_mark(one: QueueSnapshot) -> str:
    if one.is_paused:
        return " paused"
    return f" {plural(len(one.paused_tasks), 'task')} paused" if one.paused_tasks else ""


def window_note(looks: list[Look]) -> str:
    """Return the line that says over which time `completed` and `failed` are counted."""
    shortest = min(look.snapshot.rate_window_secs for look in looks)
    window = f"the last {duration(RATE_WINDOW_MS)}"
    if shortest * 1000 < RATE_WINDOW_MS:
        window += f", or the last {RATE_EVENTS:,} events of a busy queue"
    return f"completed, failed: runs per second over {window}"


def pause_lines(one: QueueSnapshot) -> list[Text]:
    """Return a line for the pause of the queue and for each paused task, with the reasons."""
    pauses = {"paused": one.pause_reason} if one.is_paused else {}
    pauses |= {f"task {name} paused": reason for name, reason in sorted(one.paused_tasks.items())}
    return [cell(f"{what}: {reason}" if reason else what, "yellow") for what, reason in pauses.items()]


def queue_view(look: Look) -> Group:
    """Return the full view of one queue."""
    one = look.snapshot
    parts: list[Any] = [cell(one.queue, "bold"), *pause_lines(one), Facts(_depths(one), _movement(look))]
    for group in one.groups:
        oldest = f", oldest {duration(group.oldest_pending_ms)}" if group.oldest_pending_ms is not None else ""
        parts += [Text(""), cell(f"group {group.name}: {group.pending:,} pending{oldest}", "bold"), _group_table(group)]
    if not one.groups:
        parts += [Text(""), Text("no worker has ever read this queue", style="yellow")]
    return Group(*parts)


def _depths(one: QueueSnapshot) -> list[tuple[str, Text]]:
    next_due = one.next_due_in_ms
    when = "" if next_due is None else f" (next in {duration(next_due)})" if next_due > 0 else ""
    return [
        ("waiting", cell(number(one.waiting))),
        ("oldest waiting", cell(duration(one.oldest_waiting_ms))),
        ("pending (running, or fetched)", cell(number(one.pending))),
        ("delayed", cell(number(one.delayed) + when)),
        ("due now", cell(number(one.due), "yellow" if one.due else "")),
        ("dead letters", cell(number(one.dlq), "red" if one.dlq else "")),
        ("events kept", cell(number(one.events))),
    ]


def _movement(look: Look) -> list[tuple[str, Text]]:
    one, flow = look.snapshot, look.flow
    rates = one.event_rates
    window = duration(one.rate_window_secs * 1000)
    added = rate(flow.added_per_sec) if flow is not UNKNOWN_FLOW else "- (use --sample 1)"
    largest = sorted(one.bytes_by_key.items(), key=lambda item: -item[1])[:2]
    by_event = {name: rate(rates.get(name, 0.0)) for name in ("completed", "failed", "retry-scheduled", "dlq")}
    return [
        ("added", cell(added)),
        (f"completed, failed ({window})", cell(f"{by_event['completed']}, {by_event['failed']}")),
        (f"retried, died ({window})", cell(f"{by_event['retry-scheduled']}, {by_event['dlq']}")),
        ("added in all", cell("-" if one.added_in_all is None else number(one.added_in_all))),
        ("schedules", cell(number(one.repeatables))),
        ("promoter, scheduler", cell(f"{_holder(one.promoter)}, {_holder(one.scheduler)}")),
        ("memory", cell(", ".join([size(one.bytes), *(f"{key} {size(count)}" for key, count in largest)]))),
    ]


def _holder(name: str | None) -> str:
    """Return the name of a lock holder, without the part that only makes it unique."""
    if name is None:
        return "none"
    host, _, rest = re.sub(r":[0-9a-f]{32}$", "", name).partition(":")
    return f"{host}:{rest.partition(':')[0]}" if rest else name[:HOLDER_SHOWN]


def _group_table(group: GroupView) -> Table:
    made = table("consumer", "pending", "idle", numbers=("pending", "idle"))
    for consumer in group.consumers:
        style = "" if consumer.is_alive else "dim"
        name = consumer.name if consumer.is_alive else f"{consumer.name} (dead)"
        made.add_row(cell(name, style), number(consumer.pending), cell(duration(consumer.idle_ms), style))
    if not group.consumers:
        made.add_row(cell("no worker connected", "yellow"), "", "")
    return made
