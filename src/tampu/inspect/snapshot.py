"""Takes a snapshot of a queue: numbers of jobs by state, consumer groups, event rates and memory usage."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tampu.inspect.pauses import decode_pauses, reason_of
from tampu.metrics import QueueDepth
from tampu.redis.faults import ServerError
from tampu.wire.entry import first_values, score_ms
from tampu.wire.heartbeat import ALIVE_MS, KEPT_MS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tampu.redis.client import Client
    from tampu.redis.connection import Part, Reply
    from tampu.wire.keys import QueueKeys

#: Rates are computed from the events of the last minute (in milliseconds), and from at most this many events.
RATE_WINDOW_MS = 60_000
RATE_EVENTS = 5000
#: A consumer without a heartbeat (chasquimq, tampu before 0.2) counts as alive if it called within this time, in ms.
SILENT_MS = 30_000


@dataclass(frozen=True, slots=True)
class ConsumerView:
    """One consumer of a consumer group."""

    name: str
    pending: int
    idle_ms: int
    #: As in `WorkerInfo`: its last heartbeat is recent, or it publishes none and called the server within 30 s.
    is_alive: bool = True


@dataclass(frozen=True, slots=True)
class GroupView:
    """One consumer group of the stream."""

    name: str
    #: Entries that were delivered and not settled.
    pending: int
    #: How long ago the oldest of them was added to the stream.
    oldest_pending_ms: int | None
    last_delivered_id: str
    consumers: list[ConsumerView]


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueSnapshot:
    """The state of a queue at one moment. Times are by the server's clock."""

    queue: str
    taken_at_ms: int
    is_paused: bool
    #: Why it is paused; empty if no reason was given.
    pause_reason: str = ""
    #: Paused tasks, each with its reason.
    paused_tasks: dict[str, str] = field(default_factory=dict)
    #: Entries in the stream that were not delivered to a worker.
    waiting: int
    #: Entries that were delivered to a worker and not settled.
    pending: int
    delayed: int
    #: Delayed jobs that are due.
    due: int
    dlq: int
    events: int
    repeatables: int
    #: How long the oldest waiting job has been waiting.
    oldest_waiting_ms: int | None = None
    #: Time until the next delayed job is due; negative if it is overdue.
    next_due_in_ms: int | None = None
    #: Entries ever added to the stream; None before Redis 7.
    added_in_all: int | None = None
    bytes_by_key: dict[str, int] = field(default_factory=dict)
    groups: list[GroupView] = field(default_factory=list)
    #: Recent events per second by name, and the seconds over which they were counted.
    event_rates: dict[str, float] = field(default_factory=dict)
    rate_window_secs: float = 0.0
    promoter: str | None = None
    scheduler: str | None = None

    @property
    def has_pause(self) -> bool:
        """Return True if the queue or one of its tasks is paused."""
        return self.is_paused or bool(self.paused_tasks)

    @property
    def length(self) -> int:
        """Return the number of entries in the stream."""
        return self.waiting + self.pending

    @property
    def bytes(self) -> int:
        """Return the memory usage of the queue's four large keys, in bytes."""
        return sum(self.bytes_by_key.values())

    @property
    def workers(self) -> int:
        """Return the number of live workers in all groups."""
        return sum(consumer.is_alive for group in self.groups for consumer in group.consumers)


async def ask_each(client: Client, commands: Sequence[tuple[Part, ...]]) -> list[Reply | ServerError]:
    """Send several commands at once. Server errors are returned as values, so that one does not hide other replies."""
    replies = await asyncio.gather(*(client.call(*command) for command in commands), return_exceptions=True)
    for reply in replies:
        if isinstance(reply, BaseException) and not isinstance(reply, ServerError):
            raise reply
    return list(replies)


async def take_snapshot(client: Client, keys: QueueKeys, *, sizes: bool = True) -> QueueSnapshot:
    """Return a snapshot of a queue. `sizes=False` skips memory usage, the most expensive part for the server."""
    replies = await client.call_many(
        [
            ("TIME",),
            ("XLEN", keys.stream),
            ("EXISTS", keys.stream),
            ("ZCARD", keys.delayed),
            ("ZRANGE", keys.delayed, 0, 0, "WITHSCORES"),
            ("XLEN", keys.dlq),
            ("XLEN", keys.events),
            ("ZCARD", keys.repeat),
            ("GET", keys.paused),
            ("HGETALL", keys.paused_tasks),
            ("GET", keys.promoter_lock),
            ("GET", keys.scheduler_lock),
        ]
    )
    now, length, groups, delayed, first_due, dlq, events, repeatables, paused, tasks, promoter, scheduler = replies
    now_ms = int(now[0]) * 1000 + int(now[1]) // 1000
    views = await _groups(client, keys, now_ms) if groups else []
    added, oldest, due, recent = await asyncio.gather(
        _added_in_all(client, keys) if groups else _nothing(),
        _oldest_waiting_ms(client, keys, [view.last_delivered_id for view in views], now_ms) if length else _nothing(),
        client.call("ZCOUNT", keys.delayed, "-inf", now_ms),
        client.call("XREVRANGE", keys.events, "+", now_ms - RATE_WINDOW_MS, "COUNT", RATE_EVENTS),
    )
    pending = min(max((group.pending for group in views), default=0), length)
    rates, window_secs = event_rates(recent, now_ms)
    return QueueSnapshot(
        queue=keys.queue_name,
        taken_at_ms=now_ms,
        is_paused=paused is not None,
        pause_reason="" if paused is None else reason_of(paused),
        paused_tasks={name: one.reason for name, one in decode_pauses(tasks).items() if not one.is_over(now_ms)},
        waiting=length - pending,
        pending=pending,
        delayed=delayed,
        due=due,
        dlq=dlq,
        events=events,
        repeatables=repeatables,
        oldest_waiting_ms=oldest,
        next_due_in_ms=score_ms(first_due[1]) - now_ms if first_due else None,
        added_in_all=added,
        bytes_by_key=await _bytes_by_key(client, keys) if sizes else {},
        groups=views,
        event_rates=rates,
        rate_window_secs=window_secs,
        promoter=None if promoter is None else text(promoter),
        scheduler=None if scheduler is None else text(scheduler),
    )


def text(value: bytes) -> str:
    """Decode a name from the server. Bytes that are not UTF-8 are escaped."""
    return value.decode(errors="backslashreplace")


def as_dict(flat: Sequence[Any]) -> dict[str, Any]:
    """Return a flat reply of names and values as a dict."""
    return {text(name): value for name, value in zip(flat[::2], flat[1::2], strict=True)}


def entry_ms(entry_id: bytes) -> int:
    """Return when an entry was added, in epoch milliseconds."""
    return int(entry_id.partition(b"-")[0])


async def _nothing() -> None:
    return None


async def _groups(client: Client, keys: QueueKeys, now_ms: int) -> list[GroupView]:
    views = []
    for flat in await client.call("XINFO", "GROUPS", keys.stream):
        fields = as_dict(flat)
        name = fields["name"]
        consumers, summary = await client.call_many(
            [("XINFO", "CONSUMERS", keys.stream, name), ("XPENDING", keys.stream, name)]
        )
        known = [as_dict(consumer) for consumer in consumers]
        heartbeats = [keys.heartbeat(text(name), text(consumer["name"])) for consumer in known]
        ttls = await client.call_many([("PTTL", key) for key in heartbeats])
        views.append(
            GroupView(
                text(name),
                fields["pending"],
                None if summary[1] is None else max(now_ms - entry_ms(summary[1]), 0),
                text(fields["last-delivered-id"]),
                [
                    ConsumerView(text(one["name"]), one["pending"], one["idle"], is_alive(ttl_ms, one["idle"]))
                    for one, ttl_ms in zip(known, ttls, strict=True)
                ],
            )
        )
    return views


def is_alive(heartbeat_ttl_ms: int, idle_ms: int) -> bool:
    """Return True if a consumer's heartbeat is recent. One without heartbeats counts for `SILENT_MS` after a call."""
    if heartbeat_ttl_ms < 0:
        return idle_ms < SILENT_MS
    return KEPT_MS - heartbeat_ttl_ms <= ALIVE_MS


async def _added_in_all(client: Client, keys: QueueKeys) -> int | None:
    fields = as_dict(await client.call("XINFO", "STREAM", keys.stream))
    return fields.get("entries-added")


async def read_depth(client: Client, keys: QueueKeys, *, running: int, concurrency: int) -> QueueDepth:
    """Return the length of a queue, for metrics: a few commands, whatever its length."""
    now_ms = await client.server_time_ms()
    length, delayed, dead = await client.call_many([("XLEN", keys.stream), ("ZCARD", keys.delayed), ("XLEN", keys.dlq)])
    [groups] = await ask_each(client, [("XINFO", "GROUPS", keys.stream)])
    # An error means that the stream does not exist, for example after a flush.
    known = [] if isinstance(groups, ServerError) else [as_dict(flat) for flat in groups]
    pending = min(max((group["pending"] for group in known), default=0), length)
    oldest_ms = None
    if length > pending:
        delivered = [text(group["last-delivered-id"]) for group in known]
        oldest_ms = await _oldest_waiting_ms(client, keys, delivered, now_ms)
    return QueueDepth(length - pending, oldest_ms or 0, pending, delayed, dead, running, concurrency)


async def _oldest_waiting_ms(client: Client, keys: QueueKeys, delivered: list[str], now_ms: int) -> int | None:
    """Return the age of the oldest entry behind the last delivered ones (without groups, of the oldest), or None."""
    starts = [f"({last}" for last in delivered] or ["-"]
    ages = []
    for start in starts:
        found = await client.call("XRANGE", keys.stream, start, "+", "COUNT", 1)
        if found:
            ages.append(max(now_ms - entry_ms(found[0][0]), 0))
    return max(ages, default=None)


async def _bytes_by_key(client: Client, keys: QueueKeys) -> dict[str, int]:
    names = {"stream": keys.stream, "delayed": keys.delayed, "dlq": keys.dlq, "events": keys.events}
    sizes = await ask_each(client, [("MEMORY", "USAGE", key) for key in names.values()])
    return {name: size for name, size in zip(names, sizes, strict=True) if isinstance(size, int)}


def event_rates(newest_first: Sequence[tuple[bytes, list[bytes]]], now_ms: int) -> tuple[dict[str, float], float]:
    """Return events per second by name, and the seconds they cover: a minute, or less if `RATE_EVENTS` were read."""
    if not newest_first:
        return {}, RATE_WINDOW_MS / 1000
    window_ms = RATE_WINDOW_MS
    if len(newest_first) >= RATE_EVENTS:
        window_ms = max(now_ms - entry_ms(newest_first[-1][0]), 1)
    counts = Counter(text(first_values(fields).get(b"e", b"")) for _, fields in newest_first)
    return {name: round(count * 1000 / window_ms, 3) for name, count in counts.items()}, window_ms / 1000
