"""Schedules: repeatable jobs of all queues, the next to fire first, each with its next five fires."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tampu.dashboard.app import Page
from tampu.inspect.views import schedule_json
from tampu.redis.faults import ServerError

if TYPE_CHECKING:
    from tampu.dashboard.app import Ask
    from tampu.wire.repeat import RepeatableMeta

#: Schedules that are listed, and fires of each.
MAX_ROWS = 200
FIRES = 5


async def page(ask: Ask) -> Page:
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
