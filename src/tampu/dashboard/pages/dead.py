"""Dead letters: grouped by cause, each with its newest letter and what to do about it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, NamedTuple

from tampu.dashboard.app import Page
from tampu.dashboard.charts import spark
from tampu.dashboard.html import pretty
from tampu.inspect.clusters import Causes
from tampu.inspect.jobs import decoded_job
from tampu.inspect.views import cluster_json, payload_of, redacted_cluster

if TYPE_CHECKING:
    from markupsafe import Markup

    from tampu.dashboard.app import Ask
    from tampu.inspect.clusters import Cause
    from tampu.wire.dlq import DlqEntry

#: Causes on one page, and queues whose letters are grouped for it.
MAX_CAUSES = 50
MAX_QUEUES = 40


class Shown(NamedTuple):
    """A cause as it is shown."""

    queue: str
    cause: Cause
    fingerprint: str
    sample: DlqEntry
    job_id: str
    payload: Markup | None
    spark: Markup


async def causes_of(ask: Ask, name: str) -> Causes:
    """Return the causes of a queue's dead letters, after one look."""
    admin = await ask.admin(name)
    causes = ask.board.causes.setdefault(name, Causes())
    await causes.look(admin.client, admin.keys)
    return causes


async def page(ask: Ask) -> Page:
    """Return the dead letters of one queue or of all."""
    name = ask.query.get("q", "")
    if name:
        await ask.admin(name)
    dead = {one.queue: one.dead for one in ask.watch.glances.values() if one.dead and not one.fault}
    queues = [name] if name else sorted(dead, key=lambda queue: -dead[queue])[:MAX_QUEUES]
    looks = await asyncio.gather(*(causes_of(ask, queue) for queue in queues))
    pairs = [(queue, cause) for queue, causes in zip(queues, looks, strict=True) for cause in causes.all]
    pairs.sort(key=lambda pair: -pair[1].letters)
    partial = [
        (queue, causes.read, causes.total)
        for queue, causes in zip(queues, looks, strict=True)
        if causes.read < causes.total and not causes.is_complete
    ]
    letters = sum(causes.total for causes in looks) + sum(
        dead[queue] for queue in dead if not name and queue not in queues
    )
    if ask.wants_json:
        shown: list[dict[str, Any]] = [_json(queue, cause) for queue, cause in pairs]
        return Page("dead.html", "Dead letters", "dead", {"letters": letters, "causes": shown})
    minute = ask.watch.now_ms // 60_000
    values = {
        "name": name,
        "names": sorted(dead.keys() | ({name} if name else set())),
        "causes": [_shown(queue, cause, minute) for queue, cause in pairs[:MAX_CAUSES]],
        "count": letters,
        "total": len(pairs),
        "partial": partial,
        "newest": {queue: causes.newest for queue, causes in zip(queues, looks, strict=True)},
    }
    return Page("dead.html", "Dead letters", "dead", None, values)


def _shown(queue: str, cause: Cause, minute: int) -> Shown:
    shown = redacted_cluster(cause)
    job = decoded_job(cause.sample.payload, cause.sample.name)
    counts = [cause.minutes.get(at, 0) for at in range(minute - 59, minute + 1)]
    trend = spark([0] * 60, counts, f"{sum(counts):,} in the last hour")
    payload = None if job is None else pretty(payload_of(job, queue, raw=False))[0]
    return Shown(queue, cause, str(shown.fingerprint), shown.sample, "" if job is None else job.id, payload, trend)


def _json(queue: str, cause: Cause) -> dict[str, Any]:
    return {"queue": queue} | cluster_json(redacted_cluster(cause), queue)
