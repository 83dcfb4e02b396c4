"""Lists the workers of a queue: the members of its consumer groups, with their heartbeats."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tampu.inspect.snapshot import as_dict, is_alive, text
from tampu.redis.faults import ServerError
from tampu.wire.heartbeat import KEPT_MS, QueueShare, RunningJob, decode_heartbeat

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tampu.redis.client import Client
    from tampu.wire.heartbeat import Heartbeat
    from tampu.wire.keys import QueueKeys


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerInfo:
    """A worker of one queue. Fields of its heartbeat are None for workers that publish none."""

    name: str
    group: str
    #: True if its last heartbeat is at most 5 s old, or, if it publishes none, it called the server within 30 s.
    is_alive: bool
    #: Age of its last heartbeat, in milliseconds.
    heartbeat_ms: int | None = None
    #: Jobs delivered to it and not settled.
    pending: int
    #: Time since it last called the server for jobs, in milliseconds.
    idle_ms: int
    host: str | None = None
    pid: int | None = None
    version: str | None = None
    #: Maximum number of jobs that run at the same time.
    concurrency: int | None = None
    started_at_ms: int | None = None
    running_count: int | None = None
    #: Its running jobs, at most 100, longest-running first.
    running: list[RunningJob] = field(default_factory=list)
    #: The queue's share of the worker's slots, and how many queues it serves.
    share: QueueShare | None = None


async def list_workers(client: Client, keys: QueueKeys, *, dead: bool = False) -> list[WorkerInfo]:
    """Return the workers of a queue by group and name; with `dead`, also consumers that are not alive."""
    try:
        groups = [as_dict(flat)["name"] for flat in await client.call("XINFO", "GROUPS", keys.stream)]
    except ServerError as error:
        if "no such key" in str(error):
            return []
        raise
    found: list[WorkerInfo] = []
    for group in sorted(groups):
        consumers = [as_dict(flat) for flat in await client.call("XINFO", "CONSUMERS", keys.stream, group)]
        if not consumers:
            continue
        beats = await read_heartbeats(client, keys, text(group), [text(one["name"]) for one in consumers])
        for consumer, (beat, ttl_ms) in zip(consumers, beats, strict=True):
            common = {
                "name": text(consumer["name"]),
                "group": text(group),
                "pending": consumer["pending"],
                "idle_ms": consumer["idle"],
            }
            if beat is None:
                found.append(WorkerInfo(**common, is_alive=is_alive(-1, consumer["idle"])))
            else:
                found.append(
                    WorkerInfo(
                        **common,
                        is_alive=is_alive(ttl_ms, consumer["idle"]),
                        heartbeat_ms=heartbeat_age_ms(ttl_ms),
                        host=beat.host,
                        pid=beat.pid,
                        version=beat.version,
                        concurrency=beat.concurrency,
                        started_at_ms=beat.started_at_ms,
                        running_count=beat.running_count,
                        running=beat.running,
                        share=beat.share,
                    )
                )
    return sorted((one for one in found if dead or one.is_alive), key=lambda one: (one.group, one.name))


async def read_heartbeats(
    client: Client, keys: QueueKeys, group: str, consumers: Sequence[str]
) -> list[tuple[Heartbeat | None, int]]:
    """Return the last heartbeat of each consumer, None if it has none, and the TTL of its key in milliseconds."""
    if not consumers:
        return []
    beat_keys = [keys.heartbeat(group, consumer) for consumer in consumers]
    beats, *ttls = await client.call_many([("MGET", *beat_keys), *(("PTTL", key) for key in beat_keys)])
    decoded = [None if packed is None else decode_heartbeat(packed) for packed in beats]
    return list(zip(decoded, ttls, strict=True))


def heartbeat_age_ms(ttl_ms: int) -> int:
    """Return how old a heartbeat is, from the TTL of its key; both in milliseconds."""
    return max(KEPT_MS - ttl_ms, 0)
