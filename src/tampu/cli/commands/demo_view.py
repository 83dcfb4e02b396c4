"""What `tampu demo` shows: the clock, the queues, the story, the latest events, and a summary at the end.

Without a terminal, the story is printed line by line. `Tally` counts the events and takes snapshots of the queues.
"""

from __future__ import annotations

import asyncio
import shlex
import shutil
import statistics
import sys
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import ROUNDED
from rich.console import Group
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tampu.base.units import duration, number, plural
from tampu.cli.commands.demo_shop import CLOSES_AT, OPENS_AT, clock_text
from tampu.cli.output import cell, write_line
from tampu.cli.tables import FittingTable
from tampu.inspect.timeline import details

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

    from tampu.cli.commands.demo_shop import DayClock
    from tampu.inspect.snapshot import QueueSnapshot
    from tampu.queue import Queue
    from tampu.wire.events import QueueEvent

#: Number of events kept for the view, and their names: `active` is left out, because every job has one.
LATEST = 12
SHOWN = frozenset({"failed", "retry-scheduled", "dlq", "waiting", "completed"})
#: Number of snapshots over which rates are computed.
RATE_SNAPSHOTS = 8
#: Maximum lines of the story and of the events, and the lines needed for everything else: a small screen shows less.
MAX_LINES = 9
OTHER_LINES = 17
#: Columns of the table of queues; the last one is a bar. A narrower terminal shows fewer columns, none truncated.
QUEUE_COLUMNS = ("queue", "waiting", "pending", "delayed", "retries", "dead", "done", "done/s", "")
NARROW = 84
_COLOURS = {
    "completed": "green",
    "failed": "red",
    "retry-scheduled": "yellow",
    "dlq": "bold red",
    "waiting": "cyan",
    "active": "blue",
}


@dataclass
class TaskTally:
    """Event counts of one task."""

    counts: Counter[str] = field(default_factory=Counter)
    durations_us: list[int] = field(default_factory=list)

    @property
    def typical_ms(self) -> float | None:
        """Return the median duration of a run, in milliseconds."""
        return statistics.median(self.durations_us) / 1000 if self.durations_us else None


class Tally:
    """Follows the events of several queues."""

    def __init__(self, queues: list[Queue]) -> None:
        self._queues = queues
        self.tasks: dict[str, TaskTally] = {}
        self.by_queue: dict[str, Counter[str]] = {queue.name: Counter() for queue in queues}
        #: Queue, event, and the number of equal events in a row.
        self.latest: deque[tuple[str, QueueEvent, int]] = deque(maxlen=LATEST)
        self.snapshots: dict[str, QueueSnapshot] = {}
        self.done_history: dict[str, deque[tuple[int, int]]] = {
            queue.name: deque(maxlen=RATE_SNAPSHOTS) for queue in queues
        }
        #: ID of a job that was dead-lettered, replayed and completed.
        self.example_job: str | None = None

    async def follow(self) -> None:
        """Count until cancelled."""
        async with asyncio.TaskGroup() as group:
            for queue in self._queues:
                group.create_task(self._follow(queue))

    async def _follow(self, queue: Queue) -> None:
        async with queue.events(last_event_id="0-0") as events:
            async for event in events:
                self._count(queue.name, event)

    def _count(self, queue_name: str, event: QueueEvent) -> None:
        self.by_queue[queue_name][event.name] += 1
        if not event.job_id:
            return
        task = self.tasks.setdefault(event.job_name, TaskTally())
        task.counts[event.name] += 1
        duration_us = event.fields.get("duration_us")
        if isinstance(duration_us, int):
            task.durations_us.append(duration_us)
        if event.name in SHOWN:
            self._show(queue_name, event)

    def _show(self, queue_name: str, event: QueueEvent) -> None:
        count = 0
        if self.latest and (self.latest[-1][1].name, self.latest[-1][1].job_name) == (event.name, event.job_name):
            _, _, count = self.latest.pop()
        self.latest.append((queue_name, event, count + 1))

    async def take_snapshots(self) -> None:
        """Take a snapshot of each queue."""
        for queue in self._queues:
            snapshot = await queue.producer.admin.snapshot(sizes=False)
            self.snapshots[queue.name] = snapshot
            done = self.by_queue[queue.name]["completed"]
            self.done_history[queue.name].append((snapshot.taken_at_ms, done))

    @property
    def is_quiet(self) -> bool:
        """Return whether no job is waiting, running or delayed, and all events are counted."""
        return len(self.snapshots) == len(self._queues) and all(
            not (one.length or one.delayed) and self.by_queue[name].total() >= one.events
            for name, one in self.snapshots.items()
        )

    def done_per_sec(self, queue_name: str) -> float:
        """Return the recent number of jobs completed per second."""
        history = self.done_history[queue_name]
        if len(history) < 2 or history[-1][0] <= history[0][0]:
            return 0.0
        return (history[-1][1] - history[0][1]) * 1000 / (history[-1][0] - history[0][0])

    def total(self, event: str) -> int:
        """Return the number of events with that name in all queues."""
        return sum(counts[event] for counts in self.by_queue.values())


class Story:
    """The lines of the story; without a terminal, each line is printed at once."""

    def __init__(self, *, is_live: bool) -> None:
        self._is_live = is_live
        self.lines: list[tuple[float, str, str]] = []

    def __call__(self, at_hour: float, text: str, style: str = "") -> None:
        self.lines.append((at_hour, text, style))
        if not self._is_live:
            write_line(f"{clock_text(at_hour)}  {text}")


@dataclass
class DayView:
    """The screen, rendered again for each frame."""

    _clock: DayClock
    _tally: Tally
    _story: Story
    _place: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = console.size.height - OTHER_LINES
        story_lines = max(min(room - room // 2, MAX_LINES), 3)
        queues = self._queues(is_narrow=options.max_width < NARROW)
        yield Group(self._head(), queues, self._day(story_lines))
        event_lines = min(room - story_lines, MAX_LINES)
        if event_lines > 0:
            yield self._events(event_lines)

    def _head(self) -> RenderableType:
        hour = self._clock.hour
        grid = Table.grid(padding=(0, 2), expand=True)
        grid.add_column(no_wrap=True)
        grid.add_column(no_wrap=True)
        grid.add_column(ratio=1)
        grid.add_column(no_wrap=True, justify="right")
        grid.add_row(
            Text("tampu demo", style="bold"),
            Text(clock_text(hour), style="bold cyan"),
            ProgressBar(total=CLOSES_AT - OPENS_AT, completed=min(hour, CLOSES_AT) - OPENS_AT),
            Text(f"{self._tally.total('completed'):,} jobs done", style="green"),
        )
        return Group(grid, cell(f"one day of a shop on {self._place}", "dim"), Text(""))

    def _queues(self, *, is_narrow: bool) -> RenderableType:
        left_out = ("retries", "done/s", "") if is_narrow else ()
        made = Table(box=ROUNDED, expand=True, border_style="dim", header_style="dim")
        for column in [column for column in QUEUE_COLUMNS if column not in left_out]:
            if column:
                made.add_column(column, justify="left" if column == "queue" else "right")
            else:
                made.add_column(column, ratio=1, no_wrap=True, overflow="crop")
        for name, events in self._tally.by_queue.items():
            found = self._tally.snapshots.get(name)
            waiting, pending, delayed = (found.waiting, found.pending, found.delayed) if found else (0, 0, 0)
            cells = (
                cell(name, "bold"),
                _lit(waiting, "yellow"),
                _lit(pending, "blue"),
                _lit(delayed, "cyan"),
                _lit(events["retry-scheduled"], "yellow"),
                _lit(found.dlq if found else 0, "bold red"),
                _lit(events["completed"], "green"),
                _lit(round(self._tally.done_per_sec(name)), "green"),
                _bar(waiting + pending + delayed),
            )
            shown = zip(QUEUE_COLUMNS, cells, strict=True)
            made.add_row(*(content for column, content in shown if column not in left_out))
        return made

    def _day(self, count: int) -> RenderableType:
        lines = [
            Text.assemble((clock_text(hour), "dim"), "  ", cell(text, style))
            for hour, text, style in self._story.lines[-count:]
        ]
        lines += [Text("")] * (count - len(lines))
        return Panel(Group(*lines), title="the day", title_align="left", border_style="dim", box=ROUNDED)

    def _events(self, count: int) -> RenderableType:
        grid = Table.grid(padding=(0, 2))
        for _ in range(4):
            grid.add_column(no_wrap=True)
        lines = list(self._tally.latest)[-count:]
        for queue, event, times in lines:
            note = f"{times:,} times" if times > 1 else details(event)
            style = _COLOURS.get(event.name, "")
            grid.add_row(cell(event.name, style), cell(event.job_name), cell(queue, "dim"), cell(note, "dim"))
        for _ in range(count - len(lines)):
            grid.add_row("", "", "", "")
        return Panel(grid, title="events", title_align="left", border_style="dim", box=ROUNDED)


def _lit(count: int, style: str) -> Text:
    return Text(number(count), style=style if count else "dim")


def _bar(count: int) -> Text:
    """Return a bar for the number of jobs, on a scale that shows both ten and five thousand."""
    length = 0 if not count else min(2 + int(count**0.4), 40)
    return Text("▇" * length, style="cyan")


# --- summary


def summary(
    added: dict[str, int], tally: Tally, *, replayed: int, secs: float, url: str, is_live: bool
) -> RenderableType:
    """Return the summary at the end of the demo."""
    left = sum(one.dlq for one in tally.snapshots.values())
    done = tally.total("completed")
    lost = sum(added.values()) - done - left
    verdict = Text.assemble(
        (f"{sum(added.values()):,} jobs in {secs:.1f} s: ", "bold"),
        (f"{done:,} done", "green"),
        f", {plural(tally.total('retry-scheduled'), 'retry', 'retries')}, {replayed:,} replayed, ",
        (plural(left, "dead letter"), "red" if left else ""),
        " left, ",
        (f"{lost:,} lost", "green" if not lost else "bold red"),
        ".",
    )
    return Group(Text(""), _by_task(added, tally, is_live=is_live), Text(""), verdict, Text(""), *_next(tally, url))


def _by_task(added: dict[str, int], tally: Tally, *, is_live: bool) -> FittingTable:
    counted = ("added", "done", "failed attempts", "retries", "dead-lettered", "median run")
    spare = ("median run", "failed attempts")
    made = FittingTable("task", *counted, numbers=counted, whole=("task",), spare=spare, is_boxed=is_live)
    for name, count in added.items():
        task = tally.tasks.get(name)
        counts = task.counts if task else {}
        made.add_row(
            cell(name, "bold"),
            number(count),
            cell(number(counts.get("completed", 0)), "green"),
            number(counts.get("failed", 0)),
            cell(number(counts.get("retry-scheduled", 0)), "yellow" if counts.get("retry-scheduled") else ""),
            cell(number(counts.get("dlq", 0)), "red" if counts.get("dlq") else ""),
            duration(task.typical_ms if task else None),
        )
    return made


def _next(tally: Tally, url: str) -> list[Text]:
    commands = [
        ("tampu inspect", "what is in the queues"),
        ("tampu dlq peek images --full", "the corrupt photo, with its traceback"),
    ]
    if tally.example_job:
        commands.append((f"tampu job why {tally.example_job}", "a payment: failed, dead-lettered, replayed, done"))
    commands += [
        ("tampu schedule list reports", "the schedule of the evening report"),
        ("tampu doctor", "check the server and the queues"),
    ]
    width = max(len(command) for command, _ in commands)
    lines = [Text("The demo's data has been kept. To look at it:", style="bold")]
    lines += [Text(f"  {command}") for command in (*_activation(), f"export TAMPU_URL={shlex.quote(url)}")]
    lines += [
        Text.assemble(f"  {command:<{width}}  ", (f"# {about}", "dim"), no_wrap=True, overflow="ellipsis")
        for command, about in commands
    ]
    return lines


def _activation() -> list[str]:
    """Return the command that activates the virtual environment, if `tampu` is not on the PATH (after `make demo`)."""
    activate = Path(sys.executable).parent / "activate"
    if shutil.which("tampu") or not activate.exists():
        return []
    here = Path.cwd()
    return [f"source {shlex.quote(str(activate.relative_to(here) if activate.is_relative_to(here) else activate))}"]
