"""Workers: who runs jobs, how many slots are in use, and what has been running for the longest time."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tampu.dashboard.app import Page
from tampu.inspect.views import worker_json
from tampu.redis.faults import ServerError

if TYPE_CHECKING:
    from tampu.dashboard.app import Ask
    from tampu.inspect.snapshot import WorkerInfo

#: Workers that are listed, and queues that are asked for theirs.
MAX_ROWS = 200
MAX_QUEUES = 100
_RANKS = {"blocked": 0, "dead": 1, "running": 2, "paused": 3, "idle": 4}


async def page(ask: Ask) -> Page:
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
        workers = [worker_json(queue, worker) for queue, worker in found]
        return Page("workers.html", "Workers", "workers", {"workers": workers})
    values = {"found": found[:MAX_ROWS], "total": len(found), "name": name, "names": ask.queue_names()}
    values["left_out"] = 0 if name else sum(bool(one.groups) for one in served) - len(names)
    return Page("workers.html", "Workers", "workers", None, values)


def _longest_ms(worker: WorkerInfo) -> int:
    return worker.running[0].running_ms if worker.running else 0
