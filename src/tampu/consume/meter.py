"""Counts and times the runs of a worker, and writes them for `tampu stats` and the dashboard.

Every 10 s a worker overwrites its own cell of the current minute, so that sending it twice counts nothing twice. Once a
minute, one worker folds the cells of all into the queue's series, which grows neither with workers nor with jobs.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from operator import attrgetter
from typing import TYPE_CHECKING

from tampu.inspect.meters import last_minute, meter_key
from tampu.inspect.registry import REGISTER_SECS, register_command
from tampu.inspect.snapshot import read_depth
from tampu.redis.faults import ServerError
from tampu.wire.meter import (
    MAX_NAMES,
    MINUTES,
    OTHER,
    TENS,
    Counts,
    Minute,
    bucket,
    decode_cell,
    decode_line,
    encode_cell,
    encode_line,
    merge,
    percentile,
    sum_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tampu.consume.outcomes import Outcome
    from tampu.consume.runtime import ServedQueue
    from tampu.redis.client import Client
    from tampu.redis.connection import Part
    from tampu.wire.keys import QueueKeys

#: Of the runs between two cells the first 16 are timed, then every second of as many, every fourth, up to every 64th.
TIMED_EACH = 16
MAX_STRIDE = 64
#: How often cells are written, in seconds.
WRITE_SECS = 10.0
#: How long cells are kept, and so how many minutes a fold can make up for, and the series after its last fold.
CELL_SECS = 600
MISSED = 9
#: How often a queue without runs is folded, in minutes.
IDLE_MINUTES = 5
SERIES_SECS = 25 * 3600


_NAME = attrgetter("delivery.job.name")
_PLACE = attrgetter("place")


class Meter:
    """Counts the runs of one queue, by task, in the current minute."""

    def __init__(self) -> None:
        self._counts: dict[str, Counts] = {}
        self._minute = 0
        self._is_changed = False
        #: Runs since the last one that was timed, those timed since the last cell, and how many each stands for.
        self._untimed = self._timed = 0
        self._stride = 1
        #: Cells to write, by minute: the current one, and those that the server could not take.
        self.unsent: dict[int, bytes] = {}
        #: The last minute that this worker folded, or left to the others.
        self.folded = 0
        #: The last minute in which it counted something.
        self.counted = 0

    def count(self, outcomes: Sequence[Outcome]) -> None:
        """Count outcomes that were written: what was put back or snoozed has not ended. Runs for every window."""
        self._is_changed = True
        # In C: no line of Python runs for each job, unless a window has several tasks or failures.
        names, places = list(map(_NAME, outcomes)), list(map(_PLACE, outcomes))
        if names and names.count(names[0]) == places.count(0) == len(names):
            (self._counts.get(names[0]) or self._new(names[0])).kinds[0] += len(names)
        else:
            for (name, place), count in Counter(zip(names, places, strict=True)).items():
                if place is not None:
                    (self._counts.get(name) or self._new(name)).kinds[place] += count
        self._untimed += len(outcomes)
        if self._untimed >= self._stride:
            self._time(outcomes[self._timed % len(outcomes)] if outcomes else None)

    def _time(self, outcome: Outcome | None) -> None:
        """Record the times of one run for all runs since the last one: in a busy worker for one in 64 or more."""
        row = None if outcome is None else self._counts.get(outcome.delivery.job.name)
        if outcome is None or outcome.place is None or row is None:
            return
        weight, self._untimed = self._untimed, 0
        self._timed += 1
        if self._timed % TIMED_EACH == 0 and self._stride < MAX_STRIDE:
            self._stride *= 2
        duration_us = outcome.duration_us
        wait_ms = None
        if outcome.finished_at_ms:
            wait_ms = max(outcome.finished_at_ms - duration_us // 1000 - int(outcome.delivery.entry_id[:13]), 0)
        row.time(weight, duration_us, wait_ms)

    def _new(self, name: str) -> Counts:
        return self._counts.setdefault(name if len(self._counts) < MAX_NAMES else OTHER, Counts())

    def is_due(self, minute: int) -> bool:
        """Return True, once, if this worker is to fold a minute: it counted since the last one, or it is the turn.

        A queue without runs changes little: only every fifth minute is folded, so that idle queues cost nearly nothing.
        """
        last, self.folded = self.folded, minute
        return bool(last) and last < minute and (self.counted > last or minute % IDLE_MINUTES == 0)

    def pack(self, now_ms: int) -> None:
        """Add what was counted to `unsent`. The first counts of a minute may still go to the one before."""
        minute = now_ms // 60_000
        self._minute = self._minute or minute
        if self._is_changed:
            self._is_changed = False
            self.counted = self._minute
            self._stride, self._timed = 1, 0
            self.unsent[self._minute] = encode_cell(self._counts)
        if minute != self._minute:
            self._counts, self._minute = {}, minute
            self.unsent = {at: cell for at, cell in self.unsent.items() if at >= minute - MISSED}


class MeterLoop:
    """Writes the cells of a worker's queues on one server, and folds them."""

    def __init__(self, client: Client, queues: Sequence[ServedQueue], *, registers: bool) -> None:
        self._client = client
        self._queues = queues
        self._registers = registers
        self._registered: frozenset[str] = frozenset()
        self._registered_at_ms = 0

    async def write(self) -> int:
        """Write the cells that have changed, and return the server's time. An error is left to the next round."""
        now_ms = await self._client.server_time_ms()
        cells = []
        for queue in self._queues:
            queue.meter.pack(now_ms)
            cells += [(queue, minute, cell) for minute, cell in queue.meter.unsent.items()]
        commands: list[tuple[Part, ...]] = []
        for queue, minute, cell in cells:
            key = meter_key(queue.keys, minute)
            commands += (("HSET", key, queue.config.consumer_id, cell), ("EXPIRE", key, CELL_SECS))
        replies = await self._client.call_each(commands)
        for (queue, minute, cell), reply in zip(cells, replies[::2], strict=True):
            if not isinstance(reply, Exception) and queue.meter.unsent.get(minute) is cell:
                del queue.meter.unsent[minute]
        return now_ms

    async def run_once(self) -> None:
        """Write, fold the minutes that are over, and note which queues this worker serves."""
        now_ms = await self.write()
        minute = last_minute(now_ms)
        due = [queue for queue in self._queues if queue.meter.is_due(minute)]
        claims: list[tuple[Part, ...]] = [
            ("SET", f"{meter_key(queue.keys)}:fold:{minute}", "1", "NX", "EX", CELL_SECS) for queue in due
        ]
        replies = await self._client.call_each(claims)
        won = [queue for queue, reply in zip(due, replies, strict=True) if reply == b"OK"]
        # Together: their commands share requests. An error, such as a key of the wrong type, costs the charts of one.
        await asyncio.gather(*(fold(self._client, queue.keys, minute) for queue in won), return_exceptions=True)
        names = frozenset(queue.name for queue in self._queues)
        is_stale = now_ms - self._registered_at_ms > REGISTER_SECS * 1000
        if self._registers and names and (names != self._registered or is_stale):
            self._registered, self._registered_at_ms = names, now_ms
            with contextlib.suppress(ServerError):  # a user of one queue may not write it: readers scan, too
                await self._client.call(*register_command(sorted(names), now_ms))


async def fold(client: Client, keys: QueueKeys, minute: int) -> None:
    """Add a minute, and those before it that nobody folded, to the series of a queue."""
    key = meter_key(keys)
    line = decode_line(await client.call("HGET", key, "line"))
    newest = max(line, default=0)
    missed = range(max(newest + 1, minute - MISSED), minute + 1)
    cells = dict(zip(missed, await _read_cells(client, keys, missed), strict=True))
    depth = await read_depth(client, keys, running=0, concurrency=0)
    for at, cell in cells.items():
        total = sum_of(cell)
        p95 = percentile(total.runs, 0.95)
        line[at] = Minute(at, total.ok, total.failed, total.dead, 0 if p95 is None else bucket(round(p95)))
    state = (depth.waiting, depth.oldest_waiting_ms, depth.delayed, depth.dead)
    line[minute] = Minute(*line[minute][:5], *state)
    # A ten is computed from its minutes each time: adding to it could count a minute twice.
    tens: dict[int, list[dict[str, Counts]]] = {}
    for ten in sorted({at // 10 for at in missed}):
        minutes = [at for at in range(ten * 10, ten * 10 + 10) if at not in cells]
        known = await client.call("HMGET", key, *(f"m{at}" for at in minutes)) if minutes else []
        tens[ten] = [*map(decode_cell, known), *(cell for at, cell in cells.items() if at // 10 == ten)]
    written: list[Part] = ["line", encode_line(line[at] for at in sorted(line) if at > minute - MINUTES)]
    written += [part for at, cell in cells.items() if cell for part in (f"m{at}", encode_cell(cell))]
    written += [part for ten, some in tens.items() if any(some) for part in (f"t{ten}", encode_cell(merge(some)))]
    old = [f"m{at}" for at in range(minute - MINUTES - MISSED, minute - MINUTES + 1)]
    old += [f"t{ten}" for ten in range(minute // 10 - TENS - 1, minute // 10 - TENS + 1)]
    if newest < minute - MISSED:  # nobody folded for a while: what is older than that may be left over
        fields = (await client.call("HGETALL", key))[::2]
        old += [name for name in map(bytes.decode, fields) if _is_old(name, minute)]
    await client.call_many([("HSET", key, *written), ("HDEL", key, *old), ("EXPIRE", key, SERIES_SECS)])


def _is_old(name: str, minute: int) -> bool:
    number = int(name[1:]) if name[1:].isdecimal() else minute
    return number <= (minute - MINUTES if name[0] == "m" else minute // 10 - TENS)


async def _read_cells(client: Client, keys: QueueKeys, minutes: Iterable[int]) -> list[dict[str, Counts]]:
    flat = await client.call_many([("HGETALL", meter_key(keys, minute)) for minute in minutes])
    return [merge(map(decode_cell, cells[1::2])) for cells in flat]
