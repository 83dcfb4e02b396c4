"""`tampu inspect`, `tampu watch`, `tampu top` and `tampu workers`: what is in the queues, once or live.

`inspect` also compares it with thresholds.
"""

import asyncio
import contextlib
import re
import signal
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from functools import partial
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text
from typer import Option

from tampu.base.units import duration, number, plural, rate, size
from tampu.cli.commands.events import Entry, newest_events, to_line
from tampu.cli.errors import BREACHED, TERMINATED
from tampu.cli.options import OptionalQueueName, QueueName, duration_option
from tampu.cli.output import (
    cell,
    command,
    console_of,
    is_terminal,
    say,
    show,
    while_read,
    write_json,
    write_json_line,
    write_line,
)
from tampu.cli.session import CommonOptions, Session, run, skip_if_broken
from tampu.cli.tables import Facts, FittingTable, table
from tampu.cli.units import instant, time_of_day
from tampu.inspect.admin import QueueAdmin
from tampu.inspect.registry import SCAN_FACTOR
from tampu.inspect.snapshot import (
    RATE_EVENTS,
    RATE_WINDOW_MS,
    UNBLOCK,
    UNKNOWN_FLOW,
    GroupView,
    QueueSnapshot,
    Sample,
    WorkerInfo,
    flow_between,
)
from tampu.inspect.views import sample_json, worker_json
from tampu.redis.faults import ServerError

#: Characters shown of a lock holder's random name.
HOLDER_SHOWN = 10
#: Number of rates in a sparkline.
HISTORY = 60
#: Number of events shown below a queue.
EVENTS_SHOWN = 12
#: How often `top` looks for new queues, in seconds.
FIND_SECS = 5.0
_BARS = " ▁▂▃▄▅▆▇█"

_limit = partial(Option, min=0, metavar="N")


def inspect(
    common: CommonOptions,
    queue: OptionalQueueName = None,
    max_waiting: Annotated[int | None, _limit(help="Exit with 3 if more jobs than this are waiting.")] = None,
    max_age: Annotated[
        float | None, duration_option(help="Exit with 3 if a job has waited longer than this (90s, 15m, 2h).")
    ] = None,
    max_dlq: Annotated[int | None, _limit(help="Exit with 3 if there are more dead letters than this.")] = None,
    sample: Annotated[
        float, Option(min=0, max=60, metavar="SECONDS", help="Take two samples this far apart for exact rates.")
    ] = 0.0,
) -> None:
    """Show how many jobs are waiting, pending, delayed or dead in all queues, or in one queue with its workers."""
    samples, unusable, faults = common.run(_take_samples, queue, sample)
    breaches = [breach for each in samples for breach in breaches_of(each.snapshot, max_waiting, max_age, max_dlq)]
    if common.as_json:
        found = list(map(sample_json, samples))
        all_queues = {"queues": found, "unusable": unusable, "faults": faults}
        write_json((found[0] if queue else all_queues) | {"breaches": breaches})
    elif queue:
        show(queue_view(samples[0]))
    elif samples:
        columns = ("waiting", "oldest", "pending", "delayed", "due", "dead", "workers", "completed", "failed", "bytes")
        note = ("completed", window_note(samples)) if is_terminal() else None
        show(queues_table(samples, columns, ("bytes", "due", "failed", "completed", "oldest", "workers"), note))
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


async def _take_samples(
    session: Session, name: str | None, sample_secs: float
) -> tuple[list[Sample], list[bytes], dict[str, str]]:
    """Return the queues, the names that tampu cannot open, and the error of each queue that cannot be read."""
    admins = await session.admins(name)
    before: dict[str, QueueSnapshot] = {}
    if sample_secs:
        before, _ = await _snapshots(admins, name, sizes=False)
        await asyncio.sleep(sample_secs)
    after, faults = await _snapshots(admins, name)
    return _samples_of(before, after), [] if name else (await session.find_queues()).unusable, faults


async def _snapshots(
    admins: list[QueueAdmin], name: str | None, *, sizes: bool = True, rates: bool = True
) -> tuple[dict[str, QueueSnapshot], dict[str, str]]:
    """Return a snapshot of each queue, and the error of each that cannot be read; raise that of the queue `name`."""
    found: dict[str, QueueSnapshot] = {}
    faults: dict[str, str] = {}
    for admin in admins:
        try:
            found[admin.name] = await admin.snapshot(sizes=sizes, rates=rates)
        except ServerError as error:
            if name is not None:
                raise
            faults[admin.name] = str(error)
    return found, faults


def _samples_of(before: dict[str, QueueSnapshot], after: dict[str, QueueSnapshot]) -> list[Sample]:
    return [Sample(found, flow_between(before.get(queue), found)) for queue, found in after.items()]


def breaches_of(
    snapshot: QueueSnapshot, max_waiting: int | None, max_age_secs: float | None, max_dlq: int | None
) -> list[str]:
    """Return a sentence for each threshold that a queue exceeds."""
    found = []
    if max_waiting is not None and snapshot.waiting > max_waiting:
        found.append(f"{snapshot.waiting:,} jobs waiting, --max-waiting is {max_waiting:,}")
    oldest = snapshot.oldest_waiting_ms
    if max_age_secs is not None and oldest is not None and oldest > max_age_secs * 1000:
        found.append(f"a job has waited {duration(oldest)}, --max-age is {duration(max_age_secs * 1000)}")
    if max_dlq is not None and snapshot.dlq > max_dlq:
        found.append(f"{snapshot.dlq:,} dead letters, --max-dlq is {max_dlq:,}")
    return [f"{snapshot.queue}: {breach}" for breach in found]


_COLUMNS: dict[str, Callable[[Sample], str | Text]] = {
    "waiting": lambda sample: number(sample.snapshot.waiting),
    "oldest": lambda sample: duration(sample.snapshot.oldest_waiting_ms),
    "pending": lambda sample: number(sample.snapshot.pending),
    "delayed": lambda sample: number(sample.snapshot.delayed),
    "due": lambda sample: cell(number(sample.snapshot.due), "yellow" if sample.snapshot.due else ""),
    "dead": lambda sample: cell(number(sample.snapshot.dlq), "red" if sample.snapshot.dlq else ""),
    "workers": lambda sample: _workers_of(sample.snapshot),
    "completed": lambda sample: rate(sample.snapshot.event_rates.get("completed", 0.0)),
    "failed": lambda sample: rate(sample.snapshot.event_rates.get("failed", 0.0)),
    "added": lambda sample: rate(sample.flow.added_per_sec),
    "settled": lambda sample: rate(sample.flow.settled_per_sec),
    "bytes": lambda sample: size(sample.snapshot.bytes),
}


def queues_table(
    samples: list[Sample], columns: tuple[str, ...], spare: tuple[str, ...], note: tuple[str, str] | None = None
) -> FittingTable:
    """Return a table with one row per queue; a narrow terminal gets it without the columns in `spare`."""
    made = FittingTable("queue", *columns, numbers=columns, spare=spare, note=note)
    for sample in samples:
        name = Text.assemble(cell(sample.snapshot.queue, "bold"), (_pause_mark(sample.snapshot), "yellow"))
        made.add_row(name, *(_COLUMNS[column](sample) for column in columns))
    return made


def _workers_of(one: QueueSnapshot) -> Text | str:
    count = one.blocked_workers
    return cell(f"{one.workers:,}, {count:,} blocked", "red") if count else number(one.workers)


def _pause_mark(one: QueueSnapshot) -> str:
    if one.is_paused:
        return " paused"
    return f" {plural(len(one.paused_tasks), 'task')} paused" if one.paused_tasks else ""


def window_note(samples: list[Sample]) -> str:
    """Return the line that says over which time `completed` and `failed` are counted."""
    shortest = min(sample.snapshot.rate_window_secs for sample in samples)
    window = f"the last {duration(RATE_WINDOW_MS)}"
    if shortest * 1000 < RATE_WINDOW_MS:
        window += f", or the last {RATE_EVENTS:,} events of a busy queue"
    return f"completed, failed: runs per second over {window}"


def pause_lines(one: QueueSnapshot) -> list[Text]:
    """Return a line for the pause of the queue and for each paused task, with the reasons."""
    pauses = {"paused": one.pause_reason} if one.is_paused else {}
    pauses |= {f"task {name} paused": reason for name, reason in sorted(one.paused_tasks.items())}
    return [cell(f"{what}: {reason}" if reason else what, "yellow") for what, reason in pauses.items()]


def queue_view(sample: Sample) -> Group:
    """Return the full view of one queue."""
    one = sample.snapshot
    limited = [cell(f"limited: {command('limit', 'show', one.queue)} shows how", "dim")] if one.is_limited else []
    parts: list[Any] = [cell(one.queue, "bold"), *pause_lines(one), *limited, Facts(_depths(one), _movement(sample))]
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


def _movement(sample: Sample) -> list[tuple[str, Text]]:
    one, flow = sample.snapshot, sample.flow
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
        style = "red" if consumer.blocked else "" if consumer.is_alive else "dim"
        mark = " (blocked)" if consumer.blocked else "" if consumer.is_alive else " (dead)"
        name = consumer.name + mark
        made.add_row(cell(name, style), number(consumer.pending), cell(duration(consumer.idle_ms), style))
    if not group.consumers:
        made.add_row(cell("no worker connected", "yellow"), "", "")
    return made


# --- watch and top


Interval = Annotated[float, Option("--interval", "-i", min=0.05, max=3600, metavar="SECONDS", help="Refresh interval.")]
Rounds = Annotated[int | None, Option("--rounds", min=1, help="Exit after this many refreshes.")]


def watch(common: CommonOptions, queue: QueueName, interval: Interval = 1.0, rounds: Rounds = None) -> None:
    """Watch one queue live: depths, rates, workers and events. Press Ctrl-C to exit."""
    added: deque[float] = deque(maxlen=HISTORY)
    settled: deque[float] = deque(maxlen=HISTORY)

    async def view(admins: list[QueueAdmin], samples: list[Sample]) -> Group:
        added.append(samples[0].flow.added_per_sec or 0.0)
        settled.append(samples[0].flow.settled_per_sec or 0.0)
        return _watch_view(samples[0], added, settled, await newest_events(admins[0], EVENTS_SHOWN))

    _run_live(_show(common, queue, interval, rounds, view))


def top(common: CommonOptions, interval: Interval = 1.0, rounds: Rounds = None) -> None:
    """Watch all queues live, busiest first. Press Ctrl-C to exit."""

    async def view(_: list[QueueAdmin], samples: list[Sample]) -> Group:
        return _top_view(samples)

    _run_live(_show(common, None, interval, rounds, view))


async def _samples(
    common: CommonOptions, name: str | None, interval: float, rounds: int | None
) -> AsyncIterator[tuple[list[QueueAdmin], list[Sample]]]:
    """Yield samples of one queue, or of all queues that can be read, the busiest first, at even intervals."""
    before: dict[str, QueueSnapshot] = {}
    async with Session(common.url, common.timeout) as session:
        admins = await session.admins(name)
        find_at = time.monotonic() + FIND_SECS
        async for _ in _ticks(interval, rounds):
            if name is None and (not admins or time.monotonic() > find_at):
                known = {admin.name: admin for admin in admins}
                started = time.monotonic()
                names = (await session.find_queues()).names
                admins = [known.get(each) or await session.new_admin(each) for each in names]
                # A scan of a million results takes a second: it is not repeated every few seconds.
                find_at = time.monotonic() + max(FIND_SECS, (time.monotonic() - started) * SCAN_FACTOR)
            found, _faults = await _snapshots(
                admins, name, rates=name is not None
            )  # `doctor` reports queues that cannot be read
            yield admins, sorted(_samples_of(before, found), key=_idleness)
            before |= found


def _idleness(sample: Sample) -> tuple[float, int, str]:
    return -(sample.flow.settled_per_sec or 0), -sample.snapshot.length, sample.snapshot.queue


async def _ticks(interval: float, rounds: int | None) -> AsyncIterator[int]:
    """Yield numbers at even intervals: the time that a refresh takes does not delay the next one."""
    due = time.monotonic()
    tick = 0
    while rounds is None or tick < rounds:
        yield tick
        tick += 1
        due = max(due + interval, time.monotonic())
        if rounds is None or tick < rounds:
            await asyncio.sleep(due - time.monotonic())


def _watch_view(sample: Sample, added: deque[float], settled: deque[float], events: list[Entry]) -> Group:
    when = cell(instant(sample.snapshot.taken_at_ms), "dim")
    return Group(
        Text.assemble(("tampu watch  ", "bold"), when, ("  Ctrl-C to exit", "dim")),
        Text(""),
        queue_view(sample),
        Text(""),
        Text.assemble(("added    ", "dim"), (sparkline(added), "cyan"), f" {rate(sample.flow.added_per_sec)}"),
        Text.assemble(("settled  ", "dim"), (sparkline(settled), "green"), f" {rate(sample.flow.settled_per_sec)}"),
        Text(""),
        *(_event_line(entry) for entry in events),
    )


def _event_line(entry: Entry) -> Text:
    """Return an event as one line that never wraps: a wrapped line would push other events off the screen."""
    line = cell(to_line(entry, with_queue=False, when=time_of_day), "dim")
    line.no_wrap, line.overflow = True, "ellipsis"
    return line


def sparkline(values: deque[float]) -> str:
    """Return the values as bars, scaled to the largest."""
    highest = max(values, default=0.0)
    if not highest:
        return _BARS[1] * len(values)
    return "".join(_BARS[1 + round(value / highest * (len(_BARS) - 2))] for value in values)


def _top_view(samples: list[Sample]) -> Group:
    columns = ("waiting", "oldest", "pending", "delayed", "dead", "workers", "added", "settled", "bytes")
    made = queues_table(samples, columns, spare=("bytes", "oldest", "workers", "delayed", "added"))
    when = instant(samples[0].snapshot.taken_at_ms) if samples else ""
    head = Text.assemble(("tampu top  ", "bold"), (when, "dim"), ("  Ctrl-C to exit", "dim"))
    if not samples:
        return Group(head, Text(""), Text("no queues yet", style="dim"))
    return Group(head, Text(""), made, Text("added, settled: jobs per second since the last refresh", style="dim"))


def _line(sample: Sample) -> str:
    one = sample.snapshot
    return (
        f"{time_of_day(one.taken_at_ms)} {one.queue}{' (paused)' if one.has_pause else ''} waiting={one.waiting} "
        f"oldest={duration(one.oldest_waiting_ms).replace(' ', '')} pending={one.pending} delayed={one.delayed} "
        f"dead={one.dlq} workers={one.workers} blocked={one.blocked_workers} added={rate(sample.flow.added_per_sec)} "
        f"settled={rate(sample.flow.settled_per_sec)}"
    )


# --- live output


def _run_live(work: Coroutine[Any, Any, None]) -> None:
    """Run `work` until it ends. Ctrl-C is the normal way to exit and not an error."""
    with contextlib.suppress(KeyboardInterrupt):
        run(_until_terminated(work))


async def _until_terminated(work: Coroutine[Any, Any, None]) -> None:
    """Run `work` so that SIGTERM also restores the terminal."""
    loop = asyncio.get_running_loop()
    showing = asyncio.ensure_future(while_read(work))
    is_terminated = False

    def terminate() -> None:
        nonlocal is_terminated
        is_terminated = True
        showing.cancel()

    loop.add_signal_handler(signal.SIGTERM, terminate)
    try:
        await showing
    except asyncio.CancelledError:
        if not is_terminated:
            raise
        raise typer.Exit(TERMINATED) from None
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


async def _show(
    common: CommonOptions,
    name: str | None,
    interval: float,
    rounds: int | None,
    view: Callable[[list[QueueAdmin], list[Sample]], Awaitable[Group]],
) -> None:
    """Show each refresh of one queue, or of all, as it arrives."""
    with contextlib.ExitStack() as stack:
        live = None
        if is_terminal() and not common.as_json:
            live = stack.enter_context(Live(console=console_of(sys.stdout), screen=True, auto_refresh=False))
        async for admins, samples in _samples(common, name, interval, rounds):
            if live is not None:
                live.update(await view(admins, samples), refresh=True)
            elif common.as_json:
                found = list(map(sample_json, samples))
                write_json_line({"queues": found} if name is None else found[0])
            else:
                for sample in samples:
                    write_line(_line(sample))


# --- workers


def workers(
    common: CommonOptions,
    queue: OptionalQueueName = None,
    dead: Annotated[bool, Option("--dead", help="Also list workers without heartbeats, with their last jobs.")] = False,
) -> None:
    """List the workers of all queues, or of one, with host, process, version and running jobs."""
    found = common.run(_workers, queue, dead)
    if common.as_json:
        write_json([worker_json(name, worker) for name, worker in found])
        return
    if not found:
        say(f"no worker serves {queue}" if queue else "no workers")
        return
    spare = ("heartbeat", "version", "pending", "longest", "process", "host")
    numbers = ("process", "slots", "running", "pending")
    columns = ("state", "host", "process", "version", "slots", "running", "pending", "longest", "heartbeat")
    rows = FittingTable("queue", "worker", *columns, numbers=numbers, spare=spare)
    for name, worker in found:
        rows.add_row(*_row(name, worker))
    show(rows)
    for name, worker in found:
        if worker.state == "blocked":
            say(f"{name}: {worker.blocked}; {UNBLOCK}")


def _row(queue: str, worker: WorkerInfo) -> tuple[Text, ...]:
    style = "" if worker.is_alive else "dim"
    longest = worker.running[0] if worker.running else None
    values = (
        worker.host or "-",
        "-" if worker.pid is None else worker.pid,
        worker.version or "-",
        number(worker.concurrency),
        number(worker.running_count),
        number(worker.pending),
        "-" if longest is None else f"{longest.name or longest.id} {duration(longest.running_ms)}",
        "-" if worker.heartbeat_ms is None else f"{duration(worker.heartbeat_ms)} ago",
    )
    state = cell(worker.state, "red" if worker.state == "blocked" else style)
    return cell(queue, "bold"), cell(worker.name, style), state, *(cell(value, style) for value in values)


async def _workers(session: Session, queue: str | None, dead: bool) -> list[tuple[str, WorkerInfo]]:
    found: list[tuple[str, WorkerInfo]] = []
    for admin in await session.admins(queue):
        with skip_if_broken(admin.name, is_one_of_many=queue is None):
            found += [(admin.name, worker) for worker in await admin.workers(dead=dead)]
    return found
