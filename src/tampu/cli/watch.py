"""`tampu watch QUEUE` and `tampu top`: the same as `inspect`, live."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from tampu.cli.events import Entry, newest_events, to_line
from tampu.cli.fitting import FittingTable
from tampu.cli.inspect import Look, queue_view
from tampu.cli.live import run_live
from tampu.cli.options import DEFAULT_TIMEOUT_SECS, AsJson, QueueName, Timeout, Url
from tampu.cli.output import cell
from tampu.cli.rates import flow_between
from tampu.cli.session import Session
from tampu.cli.snapshot import QueueSnapshot, take_snapshot
from tampu.cli.units import duration, instant, number, rate, size, time_of_day
from tampu.redis.faults import ServerError

#: Rates shown in a sparkline.
HISTORY = 60
#: Events shown below a queue.
EVENTS_SHOWN = 12
#: How often `top` looks for new queues, in seconds.
FIND_SECS = 5.0
_BARS = " ▁▂▃▄▅▆▇█"

Interval = Annotated[
    float, typer.Option("--interval", "-i", min=0.05, max=3600, metavar="SECONDS", help="Time between two looks.")
]
Rounds = Annotated[int | None, typer.Option("--rounds", min=1, help="End after so many looks.")]


@dataclass(slots=True)
class Round:
    """One look at one queue, with what came before it."""

    look: Look
    settled: deque[float] = field(default_factory=deque)
    added: deque[float] = field(default_factory=deque)
    events: list[Entry] = field(default_factory=list)


def watch(
    queue: QueueName,
    interval: Interval = 1.0,
    rounds: Rounds = None,
    as_json: AsJson = False,
    url: Url = None,
    timeout: Timeout = DEFAULT_TIMEOUT_SECS,
) -> None:
    """Watch one queue live: depths, rates, workers, events. Ctrl-C ends it."""
    run_live(
        _watch(url, timeout, queue, interval, rounds),
        view=_watch_view,
        lines=lambda one: [_line(one.look)],
        to_json=lambda one: one.look.to_json(),
        as_json=as_json,
    )


async def _watch(
    url: str | None, timeout_secs: float, name: str, interval: float, rounds: int | None
) -> AsyncIterator[Round]:
    async with Session(url, timeout_secs) as session:
        [(pipe, keys)] = await session.views(name)
        before: QueueSnapshot | None = None
        settled: deque[float] = deque(maxlen=HISTORY)
        added: deque[float] = deque(maxlen=HISTORY)
        async for _ in _ticks(interval, rounds):
            snapshot = await take_snapshot(pipe, keys)
            flow = flow_between(before, snapshot)
            before = snapshot
            settled.append(flow.settled_per_sec or 0.0)
            added.append(flow.added_per_sec or 0.0)
            events = await newest_events(pipe, keys, "+", lambda event: True, EVENTS_SHOWN)
            yield Round(Look(snapshot, flow), settled, added, events)


async def _ticks(interval: float, rounds: int | None) -> AsyncIterator[int]:
    """Numbers at even times: what a look takes is not added to the interval."""
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
        Text.assemble(("tampu watch  ", "bold"), cell(instant(snapshot.taken_at_ms), "dim"), ("  Ctrl-C ends", "dim")),
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
    """One line, whatever its length: events that wrap would push each other off the screen."""
    line = cell(to_line(entry, with_queue=False, when=time_of_day), "dim")
    line.no_wrap, line.overflow = True, "ellipsis"
    return line


def sparkline(values: deque[float]) -> str:
    """Values as bars, the largest the highest."""
    highest = max(values, default=0.0)
    if not highest:
        return _BARS[1] * len(values)
    return "".join(_BARS[1 + round(value / highest * (len(_BARS) - 2))] for value in values)


def top(
    interval: Interval = 1.0,
    rounds: Rounds = None,
    as_json: AsJson = False,
    url: Url = None,
    timeout: Timeout = DEFAULT_TIMEOUT_SECS,
) -> None:
    """Watch all queues live, the busiest first. Ctrl-C ends it."""
    run_live(
        _top(url, timeout, interval, rounds),
        view=_top_view,
        lines=lambda looks: [_line(look) for look in looks],
        to_json=lambda looks: {"queues": [look.to_json() for look in looks]},
        as_json=as_json,
    )


async def _top(url: str | None, timeout_secs: float, interval: float, rounds: int | None) -> AsyncIterator[list[Look]]:
    before: dict[str, QueueSnapshot] = {}
    async with Session(url, timeout_secs) as session:
        found_at = 0.0
        views: list[Any] = []
        async for _ in _ticks(interval, rounds):
            if not views or time.monotonic() - found_at > FIND_SECS:
                known = {keys.queue_name: (pipe, keys) for pipe, keys in views}
                names = (await session.find_queues()).names
                views = [known.get(name) or (await session.view(name)) for name in names]
                found_at = time.monotonic()
            looks = []
            for pipe, keys in views:
                try:
                    snapshot = await take_snapshot(pipe, keys)
                except ServerError:
                    continue  # a key of another type: `doctor` says so
                looks.append(Look(snapshot, flow_between(before.get(keys.queue_name), snapshot)))
                before[keys.queue_name] = snapshot
            looks.sort(key=lambda look: (-(look.flow.settled_per_sec or 0), -look.snapshot.length, look.snapshot.queue))
            yield looks


def _top_view(looks: list[Look]) -> Group:
    counts = ("waiting", "oldest", "running", "delayed", "dead", "workers", "added", "settled", "bytes")
    made = FittingTable("queue", *counts, numbers=counts, spare=("bytes", "oldest", "workers", "delayed", "added"))
    for look in looks:
        one = look.snapshot
        made.add_row(
            Text.assemble(cell(one.queue, "bold"), (" paused", "yellow") if one.is_paused else ""),
            number(one.waiting),
            duration(one.oldest_waiting_ms),
            number(one.pending),
            number(one.delayed),
            cell(number(one.dlq), "red" if one.dlq else ""),
            number(one.workers),
            rate(look.flow.added_per_sec),
            rate(look.flow.settled_per_sec),
            size(one.bytes),
        )
    when = instant(looks[0].snapshot.taken_at_ms) if looks else ""
    head = Text.assemble(("tampu top  ", "bold"), (when, "dim"), ("  Ctrl-C ends", "dim"))
    return Group(head, Text(""), made if looks else Text("no queue yet", style="dim"))


def _line(look: Look) -> str:
    one = look.snapshot
    return (
        f"{time_of_day(one.taken_at_ms)} {one.queue}{' (paused)' if one.is_paused else ''} waiting={one.waiting} "
        f"oldest={duration(one.oldest_waiting_ms).replace(' ', '')} running={one.pending} delayed={one.delayed} "
        f"dead={one.dlq} workers={one.workers} added={rate(look.flow.added_per_sec)} "
        f"settled={rate(look.flow.settled_per_sec)}"
    )
