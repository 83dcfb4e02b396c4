"""Pauses and resumes queues and single tasks, and reads their pauses."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from tampu.base.checks import check_delay_ms, check_text
from tampu.base.clock import wall_clock_ms

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

    from tampu.redis.client import Client
    from tampu.wire.keys import QueueKeys


class TaskPause(NamedTuple):
    """The pause of one task. Times are in epoch milliseconds, by the server's clock."""

    since_ms: int
    #: When it ends automatically; None if it does not.
    until_ms: int | None
    reason: str

    def is_over(self, now_ms: int) -> bool:
        """Return True if it has ended automatically."""
        return self.until_ms is not None and now_ms >= self.until_ms


async def pause(
    client: Client, keys: QueueKeys, task: str | None, reason: str, until: datetime | timedelta | float | None
) -> None:
    """Pause a queue, or one task of it."""
    check_text("reason", reason, blank_ok=True)
    left_ms = None if until is None else _left_ms(until)
    if task is None:
        command: tuple[Any, ...] = ("SET", keys.paused, reason or "1")
        await client.call(*command, *(() if left_ms is None else ("PX", left_ms)))
        return
    now_ms = await client.server_time_ms()
    ends_ms = 0 if left_ms is None else now_ms + left_ms
    over = [
        name
        for name, one in decode_pauses(await client.call("HGETALL", keys.paused_tasks)).items()
        if one.is_over(now_ms)
    ]
    if over:
        await client.call("HDEL", keys.paused_tasks, *over)
    await client.call("HSET", keys.paused_tasks, check_text("task", task), f"{now_ms} {ends_ms} {reason}")


async def resume(client: Client, keys: QueueKeys, task: str | None) -> bool:
    """Resume a queue, or one task of it. Return False if it was not paused."""
    if task is None:
        return bool(await client.call("DEL", keys.paused))
    return bool(await client.call("HDEL", keys.paused_tasks, check_text("task", task)))


async def pause_reason(client: Client, keys: QueueKeys, task: str | None = None) -> str | None:
    """Return why a queue or a task is paused: "" if no reason was given, None if it is not paused."""
    if task is not None:
        found = (await paused_tasks(client, keys)).get(task)
        return None if found is None else found.reason
    value = await client.call("GET", keys.paused)
    return None if value is None else reason_of(value)


async def paused_tasks(client: Client, keys: QueueKeys) -> dict[str, TaskPause]:
    """Return the tasks that are paused now, by name."""
    found = decode_pauses(await client.call("HGETALL", keys.paused_tasks))
    if not found:
        return {}
    now_ms = await client.server_time_ms()
    return {name: one for name, one in found.items() if not one.is_over(now_ms)}


def reason_of(value: bytes) -> str:
    """Return the reason in the value of the key that pauses a queue."""
    return "" if value == b"1" else value.decode(errors="replace")


def decode_pauses(flat: Sequence[bytes]) -> dict[str, TaskPause]:
    """Return the pauses in a reply of HGETALL. Unreadable ones are ignored."""
    found = {}
    for name, value in zip(flat[::2], flat[1::2], strict=True):
        since, _, rest = value.decode(errors="replace").partition(" ")
        until, _, reason = rest.partition(" ")
        if since.isascii() and since.isdigit() and until.isascii() and until.isdigit():
            found[name.decode(errors="replace")] = TaskPause(int(since), int(until) or None, reason)
    return found


def _left_ms(until: datetime | timedelta | float) -> int:
    """Return the milliseconds until a pause ends, at least 1."""
    if isinstance(until, datetime):
        instant = until if until.tzinfo is not None else until.replace(tzinfo=UTC)
        return max(int(instant.timestamp() * 1000) - wall_clock_ms(), 1)
    return max(check_delay_ms(until, "until"), 1)
