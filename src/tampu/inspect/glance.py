"""The cheap look at many queues: ten O(1) or O(log n) commands for each, in few requests, whatever they hold.

`inspect/snapshot.py` looks closer at one queue: it also reads events and the groups one by one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tampu.inspect.snapshot import decode_pauses, is_alive, reason_of
from tampu.inspect.streams import as_dict, text
from tampu.wire.entry import entry_ms
from tampu.wire.limits import CLOSED

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tampu.redis.client import Client
    from tampu.redis.connection import Part, Reply
    from tampu.wire.keys import QueueKeys

#: Queues that are asked for in one request: its replies stay below 100 KB.
CHUNK = 50
#: Delayed jobs that have been due for longer than this count as overdue, in milliseconds.
OVERDUE_MS = 10_000


@dataclass(slots=True)
class Glance:
    """The numbers of one queue. If it cannot be read, `fault` says why, and the numbers are zero."""

    queue: str
    #: When it was taken, by the server's clock, in epoch milliseconds.
    at_ms: int
    waiting: int = 0
    #: Delivered to a worker and not settled.
    running: int = 0
    delayed: int = 0
    #: Delayed jobs that are due, and those that have been due for over 10 s.
    due: int = 0
    overdue: int = 0
    dead: int = 0
    #: How long the oldest waiting job has been waiting, in milliseconds; None if none waits.
    oldest_ms: int | None = None
    is_paused: bool = False
    pause_reason: str = ""
    #: Paused tasks, each with its reason.
    paused_tasks: dict[str, str] = field(default_factory=dict)
    #: The consumer groups, as the server describes them.
    groups: list[dict[str, Any]] = field(default_factory=list)
    fault: str = ""

    @property
    def read_in_all(self) -> int | None:
        """Return the entries ever delivered; None before Redis 7, or if the server has lost count."""
        counts = [group.get("entries-read") for group in self.groups]
        return max((count for count in counts if count is not None), default=None)


async def glance(clients: Mapping[str, Client], queues: Sequence[QueueKeys], now_ms: int) -> dict[str, Glance]:
    """Return a glance at each queue, by name. `clients` has the client of each."""
    found: dict[str, Glance] = {}
    for some in chunks(queues, clients):
        client = clients[some[0].queue_name]
        replies = await client.call_each([command for keys in some for command in _commands(keys, now_ms)])
        width = len(replies) // len(some)
        for number, keys in enumerate(some):
            found[keys.queue_name] = _glance(keys, now_ms, replies[number * width : (number + 1) * width])
        late = [(keys, one) for keys in some if (one := found[keys.queue_name]).waiting and not one.fault]
        starts = [("XRANGE", keys.stream, _start(one), "+", "COUNT", 1) for keys, one in late]
        for (_, one), entries in zip(late, await client.call_each(starts), strict=True):
            if isinstance(entries, list) and entries:
                one.oldest_ms = max(now_ms - entry_ms(entries[0][0]), 0)
    return found


def chunks(queues: Sequence[QueueKeys], clients: Mapping[str, Client]) -> list[list[QueueKeys]]:
    """Divide queues into lists that one request asks for: those of one client, at most `CHUNK`."""
    by_client: dict[int, list[QueueKeys]] = {}
    for keys in queues:
        by_client.setdefault(id(clients[keys.queue_name]), []).append(keys)
    return [some[at : at + CHUNK] for some in by_client.values() for at in range(0, len(some), CHUNK)]


def _commands(keys: QueueKeys, now_ms: int) -> tuple[tuple[Part, ...], ...]:
    return (
        ("XLEN", keys.stream),
        ("XINFO", "GROUPS", keys.stream),
        ("ZCARD", keys.delayed),
        ("ZCOUNT", keys.delayed, "-inf", now_ms),
        ("ZCOUNT", keys.delayed, "-inf", now_ms - OVERDUE_MS),
        ("XLEN", keys.dlq),
        ("GET", keys.paused),
        ("HGETALL", keys.paused_tasks),
    )


def _start(one: Glance) -> str:
    """Return where the oldest waiting entry is looked for: behind the last one that was delivered."""
    last = text(one.groups[0]["last-delivered-id"]) if one.groups else CLOSED
    return "-" if last == CLOSED else f"({last}"  # of a limited queue, the oldest entry counts: it may be running


def _glance(keys: QueueKeys, now_ms: int, replies: Sequence[Reply]) -> Glance:
    length, groups, delayed, due, overdue, dead, paused, tasks = replies
    one = Glance(keys.queue_name, now_ms)
    faults = [str(reply) for reply in replies if isinstance(reply, Exception) and "no such key" not in str(reply)]
    if faults:
        one.fault = faults[0]
        return one
    one.groups = [as_dict(flat) for flat in groups] if isinstance(groups, list) else []
    one.running = min(max((group["pending"] for group in one.groups), default=0), length)
    one.waiting = length - one.running
    one.delayed, one.due, one.overdue, one.dead = delayed, due, overdue, dead
    one.is_paused = paused is not None
    one.pause_reason = "" if paused is None else reason_of(paused)
    one.paused_tasks = {name: pause.reason for name, pause in decode_pauses(tasks).items() if not pause.is_over(now_ms)}
    return one


async def count_workers(
    clients: Mapping[str, Client], queues: Sequence[QueueKeys], glances: Mapping[str, Glance]
) -> dict[str, int]:
    """Return the number of live workers of each queue, by name."""
    counts: dict[str, int] = {keys.queue_name: 0 for keys in queues}
    for some in chunks(queues, clients):
        client = clients[some[0].queue_name]
        asked = [(keys, group["name"]) for keys in some for group in glances[keys.queue_name].groups]
        consumers = await client.call_each([("XINFO", "CONSUMERS", keys.stream, group) for keys, group in asked])
        probes: list[tuple[str, int, str]] = []
        for (keys, group), reply in zip(asked, consumers, strict=True):
            for flat in reply if isinstance(reply, list) else ():
                known = as_dict(flat)
                probes.append((keys.queue_name, known["idle"], keys.heartbeat(text(group), text(known["name"]))))
        ttls = await client.call_each([("PTTL", key) for _, _, key in probes])
        for (name, idle_ms, _), ttl_ms in zip(probes, ttls, strict=True):
            counts[name] += isinstance(ttl_ms, int) and is_alive(ttl_ms, idle_ms)
    return counts
