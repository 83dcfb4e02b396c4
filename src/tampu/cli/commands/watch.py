"""`tampu watch QUEUE` and `tampu top`: live versions of `inspect`."""

import asyncio
import contextlib
import signal
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from tampu.cli.commands.events import Entry, newest_events, to_line
from tampu.cli.commands.inspect import Look, flow_between, queue_view, queues_table
from tampu.cli.errors import TERMINATED
from tampu.cli.options import QueueName
from tampu.cli.output import cell, is_terminal, stdout_console, while_read, write_json_line, write_line
from tampu.cli.session import CommonOptions, Session, run
from tampu.cli.units import duration, instant, rate, time_of_day
from tampu.inspect.snapshot import QueueSnapshot, take_snapshot
from tampu.redis.faults import ServerError

#: Number of rates in a sparkline.
HISTORY = 60
#: Number of events shown below a queue.
EVENTS_SHOWN = 12
#: How often `top` looks for new queues, in seconds.
FIND_SECS = 5.0
_BARS = " ▁▂▃▄▅▆▇█"

T = TypeVar("T")

Interval = Annotated[
    float, typer.Option("--interval", "-i", min=0.05, max=3600, metavar="SECONDS", help="Refresh interval.")
]
Rounds = Annotated[int | None, typer.Option("--rounds", min=1, help="Exit after this many refreshes.")]


@dataclass(slots=True)
class Round:
    """One refresh of one queue, with recent rates and events."""

    look: Look
    settled: deque[float] = field(default_factory=deque)
    added: deque[float] = field(default_factory=deque)
    events: list[Entry] = field(default_factory=list)


def watch(common: CommonOptions, queue: QueueName, interval: Interval = 1.0, rounds: Rounds = None) -> None:
    """Watch one queue live: depths, rates, workers and events. Press Ctrl-C to exit."""
    _run_live(
        _watch(common, queue, interval, rounds),
        view=_watch_view,
        lines=lambda one: [_line(one.look)],
        to_json=lambda one: one.look.to_json(),
        as_json=common.as_json,
    )


async def _watch(common: CommonOptions, name: str, interval: float, rounds: int | None) -> AsyncIterator[Round]:
    async with Session(common.url, common.timeout) as session:
        [(client, keys)] = await session.views(name)
        before: QueueSnapshot | None = None
        settled: deque[float] = deque(maxlen=HISTORY)
        added: deque[float] = deque(maxlen=HISTORY)
        async for _ in _ticks(interval, rounds):
            snapshot = await take_snapshot(client, keys)
            flow = flow_between(before, snapshot)
            before = snapshot
            settled.append(flow.settled_per_sec or 0.0)
            added.append(flow.added_per_sec or 0.0)
            events = await newest_events(client, keys, "+", lambda event: True, EVENTS_SHOWN)
            yield Round(Look(snapshot, flow), settled, added, events)


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


def _watch_view(one: Round) -> Group:
    snapshot, flow = one.look.snapshot, one.look.flow
    parts: list[RenderableType] = [
        Text.assemble(
            ("tampu watch  ", "bold"), cell(instant(snapshot.taken_at_ms), "dim"), ("  Ctrl-C to exit", "dim")
        ),
        Text(""),
        queue_view(one.look),
        Text(""),
        Text.assemble(("added    ", "dim"), (sparkline(one.added), "cyan"), f" {rate(flow.added_per_sec)}"),
        Text.assemble(("settled  ", "dim"), (sparkline(one.settled), "green"), f" {rate(flow.settled_per_sec)}"),
        Text(""),
        *(_event_line(entry) for entry in one.events),
    ]
    return Group(*parts)


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


def top(common: CommonOptions, interval: Interval = 1.0, rounds: Rounds = None) -> None:
    """Watch all queues live, busiest first. Press Ctrl-C to exit."""
    _run_live(
        _top(common, interval, rounds),
        view=_top_view,
        lines=lambda looks: [_line(look) for look in looks],
        to_json=lambda looks: {"queues": [look.to_json() for look in looks]},
        as_json=common.as_json,
    )


async def _top(common: CommonOptions, interval: float, rounds: int | None) -> AsyncIterator[list[Look]]:
    before: dict[str, QueueSnapshot] = {}
    async with Session(common.url, common.timeout) as session:
        found_at = 0.0
        views: list[Any] = []
        async for _ in _ticks(interval, rounds):
            if not views or time.monotonic() - found_at > FIND_SECS:
                known = {keys.queue_name: (client, keys) for client, keys in views}
                names = (await session.find_queues()).names
                views = [known.get(name) or (await session.view(name)) for name in names]
                found_at = time.monotonic()
            looks = []
            for client, keys in views:
                try:
                    snapshot = await take_snapshot(client, keys)
                except ServerError:
                    continue  # a key of the wrong type: `doctor` reports it
                looks.append(Look(snapshot, flow_between(before.get(keys.queue_name), snapshot)))
                before[keys.queue_name] = snapshot
            looks.sort(key=lambda look: (-(look.flow.settled_per_sec or 0), -look.snapshot.length, look.snapshot.queue))
            yield looks


def _top_view(looks: list[Look]) -> Group:
    columns = ("waiting", "oldest", "pending", "delayed", "dead", "workers", "added", "settled", "bytes")
    made = queues_table(looks, columns, spare=("bytes", "oldest", "workers", "delayed", "added"))
    when = instant(looks[0].snapshot.taken_at_ms) if looks else ""
    head = Text.assemble(("tampu top  ", "bold"), (when, "dim"), ("  Ctrl-C to exit", "dim"))
    if not looks:
        return Group(head, Text(""), Text("no queues yet", style="dim"))
    return Group(head, Text(""), made, Text("added, settled: jobs per second since the last refresh", style="dim"))


def _line(look: Look) -> str:
    one = look.snapshot
    return (
        f"{time_of_day(one.taken_at_ms)} {one.queue}{' (paused)' if one.has_pause else ''} waiting={one.waiting} "
        f"oldest={duration(one.oldest_waiting_ms).replace(' ', '')} pending={one.pending} delayed={one.delayed} "
        f"dead={one.dlq} workers={one.workers} added={rate(look.flow.added_per_sec)} "
        f"settled={rate(look.flow.settled_per_sec)}"
    )


# --- live output


def _run_live(
    rounds: AsyncIterator[T],
    *,
    view: Callable[[T], RenderableType],
    lines: Callable[[T], list[str]],
    to_json: Callable[[T], Any],
    as_json: bool,
) -> None:
    """Show each round as it arrives. Ctrl-C is the normal way to exit and not an error."""
    with contextlib.suppress(KeyboardInterrupt):
        run(_until_terminated(_show(rounds, view, lines, to_json, as_json)))


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
    rounds: AsyncIterator[T],
    view: Callable[[T], RenderableType],
    lines: Callable[[T], list[str]],
    to_json: Callable[[T], Any],
    as_json: bool,
) -> None:
    if as_json:
        async for one in rounds:
            write_json_line(to_json(one))
    elif not is_terminal():
        async for one in rounds:
            for line in lines(one):
                write_line(line)
    else:
        with Live(console=stdout_console(), screen=True, auto_refresh=False) as live:
            async for one in rounds:
                live.update(view(one), refresh=True)
