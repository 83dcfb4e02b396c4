"""Sentences about queues that need attention, from a glance at each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from tampu.base.units import duration, plural

if TYPE_CHECKING:
    from tampu.inspect.glance import Glance

#: A queue whose oldest job has waited for longer than this is late, in milliseconds.
LATE_MS = 60_000


class Finding(NamedTuple):
    """One thing that needs attention, the most urgent first by `rank`."""

    queue: str
    rank: int
    #: How it is marked: `dead` (something is wrong), `late` or `paused`.
    kind: Literal["dead", "late", "paused"]
    text: str
    #: The newest error.
    more: str = ""


def findings_of(one: Glance, workers: int | None, died: int = 0, error: str = "") -> list[Finding]:
    """Return what needs attention in a queue. `died` is the number of jobs that died in the last five minutes."""
    name = one.queue
    if one.fault:
        return [Finding(name, 0, "dead", f"cannot be read: {one.fault}")]
    found = []
    age = f", the oldest for {duration(one.oldest_ms)}" if one.oldest_ms is not None else ""
    if one.is_paused:
        why = f": {one.pause_reason}" if one.pause_reason else ""
        held = f"; {plural(one.waiting, 'job')} waiting{age}" if one.waiting else ""
        found.append(Finding(name, 4, "paused", f"paused{why}{held}"))
    elif workers == 0 and (one.waiting or one.running or one.due):
        count = one.waiting or one.running or one.due
        what = "waiting" if one.waiting else "taken by workers that are gone" if one.running else "due"
        found.append(Finding(name, 1, "dead", f"no worker serves this queue; {plural(count, 'job')} {what}{age}"))
    elif one.oldest_ms is not None and one.oldest_ms > LATE_MS:
        found.append(Finding(name, 3, "late", f"{plural(one.waiting, 'job')} waiting{age}"))
    if one.overdue and workers != 0 and not one.is_paused:
        found.append(Finding(name, 3, "late", f"{plural(one.overdue, 'delayed job')} overdue: is a promoter running?"))
    if died:
        found.append(Finding(name, 2, "dead", f"{plural(died, 'job')} died in the last 5 minutes", error))
    for task, reason in sorted(one.paused_tasks.items()):
        found.append(Finding(name, 5, "paused", f"task {task} paused{f': {reason}' if reason else ''}"))
    return found
