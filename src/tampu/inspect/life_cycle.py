"""Ends a queue: waits until its jobs are done, and deletes all its keys."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

from tampu.errors import ConfigError
from tampu.inspect.snapshot import take_snapshot
from tampu.inspect.workers import list_workers

if TYPE_CHECKING:
    from tampu.redis.client import Client
    from tampu.wire.keys import QueueKeys

#: How often the state of a draining queue is read, in seconds.
DRAIN_POLL_SECS = 0.2
#: Keys examined by one SCAN call.
SCAN_COUNT = 1000


async def jobs_left(client: Client, keys: QueueKeys) -> int:
    """Return how many jobs are waiting or running, or due."""
    snapshot = await take_snapshot(client, keys, sizes=False)
    return snapshot.length + snapshot.due


async def drain_queue(client: Client, keys: QueueKeys, timeout_secs: float | None) -> int:
    """Wait until no job is waiting, running or due. Return how many there were. Raises `TimeoutError`."""
    async with asyncio.timeout(timeout_secs):
        total = left = await jobs_left(client, keys)
        while left:
            await asyncio.sleep(DRAIN_POLL_SECS)
            left = await jobs_left(client, keys)
    return total


async def delete_queue(client: Client, keys: QueueKeys) -> int:
    """Delete every key of a queue and return how many there were."""
    deleted, cursor = 0, b"0"
    pattern = re.sub(r"([\[\]*?\\^])", r"\\\1", keys.tag) + ":*"
    while True:
        cursor, found = await client.call("SCAN", cursor, "MATCH", pattern, "COUNT", SCAN_COUNT)
        if found:
            deleted += await client.call("UNLINK", *found)
        if cursor == b"0":
            return deleted


async def check_unused(client: Client, keys: QueueKeys) -> None:
    """Raise `ConfigError` if a queue still has jobs, dead letters, schedules or live workers."""
    snapshot = await take_snapshot(client, keys, sizes=False)
    counts = {
        "waiting": snapshot.waiting,
        "running": snapshot.pending,
        "delayed": snapshot.delayed,
        "dead": snapshot.dlq,
        "scheduled": snapshot.repeatables,
    }
    held = [f"{count:,} {what}" for what, count in counts.items() if count]
    if held:
        raise ConfigError(
            f"queue {keys.queue_name!r} still has jobs ({', '.join(held)}): drain or purge it, or pass force=True"
        )
    workers = await list_workers(client, keys)
    if workers:
        names = ", ".join(worker.name for worker in workers[:5])
        raise ConfigError(f"queue {keys.queue_name!r} has live workers ({names}): stop them, or pass force=True")
