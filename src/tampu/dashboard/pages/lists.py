"""Workers, schedules and events: the lists of one queue or of all."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

from tampu.dashboard.app import NotFound, Page
from tampu.inspect.streams import text
from tampu.inspect.timeline import details
from tampu.inspect.views import event_json, event_ms, redacted_event, schedule_json, worker_json
from tampu.redis.faults import ServerError
from tampu.wire.events import EventName, decode_event_fields

if TYPE_CHECKING:
    from tampu.dashboard.app import Ask
    from tampu.inspect.snapshot import WorkerInfo
    from tampu.wire.events import QueueEvent
    from tampu.wire.repeat import RepeatableMeta

#: Workers and schedules that are listed, and queues that are asked for their workers.
MAX_ROWS = 200
MAX_QUEUES = 100
#: Fires of each schedule.
FIRES = 5
#: Events on one page, most that are read for one, and in one call.
EVENTS = 50
MAX_EVENTS_READ = 5000
STEP = 500
_RANKS = {"blocked": 0, "dead": 1, "running": 2, "paused": 3, "idle": 4}


async def workers(ask: Ask) -> Page:
    """Return the workers of one queue or of all: those in trouble first, then those whose jobs run longest."""
    name = ask.query.get("q", "")
    served = sorted(ask.watch.glances.values(), key=lambda one: (not ask.watch.workers.get(one.queue), one.queue))
    names = [name] if name else [one.queue for one in served if one.groups][:MAX_QUEUES]

    async def of(queue: str) -> list[tuple[str, WorkerInfo]]:
        admin = await ask.admin(queue)
        try:
            return [(queue, worker) for worker in await admin.workers(dead=True)]
        except ServerError:
            return []

    found = [pair for pairs in await asyncio.gather(*map(of, names)) for pair in pairs]
    # A dead worker matters while it holds jobs; its name stays in the group for ten minutes.
    found = [(queue, worker) for queue, worker in found if worker.is_alive or worker.pending]
    found.sort(key=lambda pair: (_RANKS[pair[1].state], -_longest_ms(pair[1]), pair[0], pair[1].name))
    if ask.wants_json:
        return Page(
            "workers.html", "Workers", "workers", {"workers": [worker_json(queue, worker) for queue, worker in found]}
        )
    values = {"found": found[:MAX_ROWS], "total": len(found), "name": name, "names": ask.queue_names()}
    values["left_out"] = 0 if name else sum(bool(one.groups) for one in served) - len(names)
    return Page("workers.html", "Workers", "workers", None, values)


def _longest_ms(worker: WorkerInfo) -> int:
    return worker.running[0].running_ms if worker.running else 0


async def schedules(ask: Ask) -> Page:
    """Return the schedules of one queue or of all."""
    name = ask.query.get("q", "")
    names = [name] if name else ask.queue_names()

    async def of(queue: str) -> list[tuple[str, RepeatableMeta, int]]:
        try:
            admin = await ask.admin(queue)
            metas = await admin.repeatables(MAX_ROWS)
            return [(queue, meta, fired) for meta, fired in zip(metas, await admin.fired_counts(metas), strict=True)]
        except ServerError:
            return []

    found = sorted((row for rows in await asyncio.gather(*map(of, names)) for row in rows), key=_next_ms)
    if ask.wants_json:
        listed = [{"queue": queue} | schedule_json(meta, fired) for queue, meta, fired in found]
        return Page("schedules.html", "Schedules", "schedules", {"schedules": listed})
    rows = [(queue, meta, fired, next_fires(meta)) for queue, meta, fired in found[:MAX_ROWS]]
    values = {"rows": rows, "total": len(found), "name": name, "names": ask.queue_names()}
    return Page("schedules.html", "Schedules", "schedules", None, values)


def _next_ms(row: tuple[str, RepeatableMeta, int]) -> int:
    return row[1].next_fire_ms


def next_fires(meta: RepeatableMeta) -> list[int]:
    """Return the next fires of a schedule, in epoch milliseconds."""
    fires = [meta.next_fire_ms]
    while len(fires) < FIRES:
        following = meta.pattern.next_fire_ms(fires[-1])
        if following is None or (meta.end_before_ms is not None and following > meta.end_before_ms):
            break
        fires.append(following)
    return fires


async def events(ask: Ask) -> Page:
    """Return the events of one queue, newest first."""
    names = ask.queue_names()
    name = ask.query.get("q") or (names[0] if names else "")
    if not name:
        return Page("events.html", "Events", "events", {"events": []}, {"name": "", "names": [], "kinds": []})
    admin = await ask.admin(name)
    kind, cursor = ask.query.get("kind", ""), ask.query.get("after", "")
    if (kind and kind not in set(EventName)) or not re.fullmatch(r"(\([0-9]{1,20}-[0-9]{1,20})?", cursor):
        raise NotFound(f"no events {kind!r} after {cursor!r}")
    found: list[tuple[str, QueueEvent]] = []
    start, looked, following = cursor or "+", 0, None
    while len(found) < EVENTS and looked < MAX_EVENTS_READ:
        entries = await admin.client.call("XREVRANGE", admin.keys.events, start, "-", "COUNT", STEP if kind else EVENTS)
        for entry_id, fields in entries:
            event = decode_event_fields(fields)
            start = f"({text(entry_id)}"
            looked += 1
            if not kind or event.name == kind:
                found.append((text(entry_id), redacted_event(event)))
                if len(found) >= EVENTS:
                    break
        following = start if entries else None
        if len(entries) < (STEP if kind else EVENTS) and len(found) < EVENTS:
            following = None
            break
    if ask.wants_json:
        listed = [event_json(name, entry_id, event) for entry_id, event in found]
        return Page("events.html", "Events", "events", {"queue": name, "next": following, "events": listed})
    rows = [(entry_id, event_ms(entry_id, event), event, details(event)) for entry_id, event in found]
    values: dict[str, object] = {"name": name, "names": names, "kinds": list(EventName), "kind": kind, "rows": rows}
    values |= {"cursor": following, "looked": looked, "after": cursor}
    return Page("events.html", f"Events of {name}", "events", None, values)
