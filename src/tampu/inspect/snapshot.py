"""The state of a queue as a whole: a snapshot with numbers of jobs, groups and rates; its pauses; its workers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from tampu.inspect.streams import as_dict, ask_each, stream_groups, text
from tampu.metrics import QueueDepth
from tampu.wire.entry import entry_ms, first_values, score_ms
from tampu.wire.heartbeat import ALIVE_MS, KEPT_MS, QueueShare, RunningJob, decode_heartbeat
from tampu.wire.limits import CLOSED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tampu.redis.client import Client
    from tampu.wire.heartbeat import Heartbeat
    from tampu.wire.keys import QueueKeys

#: Rates are computed from the events of the last minute (in milliseconds), and from at most this many events.
RATE_WINDOW_MS = 60_000
RATE_EVENTS = 5000
#: A consumer without a heartbeat (chasquimq, tampu before 0.2) counts as alive if it called within this time, in ms.
SILENT_MS = 30_000
#: The remedy for a blocked event loop.
UNBLOCK = "use def instead of async def, or process=True"


@dataclass(frozen=True, slots=True)
class ConsumerView:
    """One consumer of a consumer group."""

    name: str
    pending: int
    idle_ms: int
    #: As in `WorkerInfo`: its last heartbeat is recent, or it publishes none and called the server within 30 s.
    is_alive: bool = True
    #: As in `WorkerInfo`: what blocks its event loop; empty if nothing does, or it is not alive.
    blocked: str = ""


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
    def is_limited(self) -> bool:
        """Return True if the queue has limits: its group is closed."""
        return any(group.last_delivered_id == CLOSED for group in self.groups)

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

    @property
    def blocked_workers(self) -> int:
        """Return how many of them have a blocked event loop."""
        return sum(bool(consumer.blocked) for group in self.groups for consumer in group.consumers)


@dataclass(frozen=True, slots=True)
class Flow:
    """Entries per second; None where the server does not count (before Redis 7)."""

    added_per_sec: float | None
    #: Settled jobs: completed, retried or dead-lettered.
    settled_per_sec: float | None


UNKNOWN_FLOW = Flow(None, None)


def flow_between(before: QueueSnapshot | None, after: QueueSnapshot) -> Flow:
    """Return the rates between two snapshots; an entry leaves the stream only when it is settled."""
    if before is None or before.added_in_all is None or after.added_in_all is None:
        return UNKNOWN_FLOW
    secs = (after.taken_at_ms - before.taken_at_ms) / 1000
    added = after.added_in_all - before.added_in_all
    if secs <= 0 or added < 0:  # a flush, or a failover to a server with older data
        return UNKNOWN_FLOW
    settled = max(added - (after.length - before.length), 0)
    return Flow(round(added / secs, 3), round(settled / secs, 3))


@dataclass(frozen=True, slots=True)
class Sample:
    """A snapshot of one queue and its rates."""

    snapshot: QueueSnapshot
    flow: Flow = UNKNOWN_FLOW


async def take_snapshot(client: Client, keys: QueueKeys, *, sizes: bool = True, rates: bool = True) -> QueueSnapshot:
    """Return a snapshot of a queue. Memory usage and, of a busy queue, the events of a minute cost the server most."""
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
    stream = as_dict(await client.call("XINFO", "STREAM", keys.stream)) if groups else {}
    delivered = [view.last_delivered_id for view in views]
    due, recent = await client.call_many(
        [
            ("ZCOUNT", keys.delayed, "-inf", now_ms),
            ("XREVRANGE", keys.events, "+", now_ms - RATE_WINDOW_MS, "COUNT", RATE_EVENTS if rates else 1),
        ]
    )
    pending = min(max((group.pending for group in views), default=0), length)
    per_sec, window_secs = event_rates(recent if rates else [], now_ms)
    return QueueSnapshot(
        queue=keys.queue_name,
        taken_at_ms=now_ms,
        is_paused=paused is not None,
        pause_reason="" if paused is None else reason_of(paused),
        paused_tasks={name: found.reason for name, found in decode_pauses(tasks).items() if not found.is_over(now_ms)},
        waiting=length - pending,
        pending=pending,
        delayed=delayed,
        due=due,
        dlq=dlq,
        events=events,
        repeatables=repeatables,
        oldest_waiting_ms=await _oldest_waiting_ms(client, keys, delivered, now_ms) if length else None,
        next_due_in_ms=score_ms(first_due[1]) - now_ms if first_due else None,
        added_in_all=stream.get("entries-added"),
        bytes_by_key=await _bytes_by_key(client, keys) if sizes else {},
        groups=views,
        event_rates=per_sec,
        rate_window_secs=window_secs,
        promoter=None if promoter is None else text(promoter),
        scheduler=None if scheduler is None else text(scheduler),
    )


async def _groups(client: Client, keys: QueueKeys, now_ms: int) -> list[GroupView]:
    views = []
    for fields in await stream_groups(client, keys.stream):
        name = fields["name"]
        flat, summary = await client.call_many(
            [("XINFO", "CONSUMERS", keys.stream, name), ("XPENDING", keys.stream, name)]
        )
        known = [(text(consumer["name"]), consumer["pending"], consumer["idle"]) for consumer in map(as_dict, flat)]
        heartbeats = await read_heartbeats(client, keys, text(name), [consumer for consumer, _, _ in known])
        consumers = []
        for consumer, (beat, ttl_ms) in zip(known, heartbeats, strict=True):
            alive = is_alive(ttl_ms, consumer[-1])
            consumers.append(ConsumerView(*consumer, alive, beat.blocked if beat and alive else ""))
        oldest_ms = None if summary[1] is None else max(now_ms - entry_ms(summary[1]), 0)
        delivered = text(fields["last-delivered-id"])
        views.append(GroupView(text(name), fields["pending"], oldest_ms, delivered, consumers))
    return views


def is_alive(heartbeat_ttl_ms: int, idle_ms: int) -> bool:
    """Return True if a consumer's heartbeat is recent. One without heartbeats counts for `SILENT_MS` after a call."""
    if heartbeat_ttl_ms < 0:
        return idle_ms < SILENT_MS
    return KEPT_MS - heartbeat_ttl_ms <= ALIVE_MS


async def read_depth(client: Client, keys: QueueKeys, *, running: int, concurrency: int) -> QueueDepth:
    """Return the length of a queue, for metrics: a few commands, whatever its length."""
    now_ms = await client.server_time_ms()
    length, delayed, dead = await client.call_many([("XLEN", keys.stream), ("ZCARD", keys.delayed), ("XLEN", keys.dlq)])
    known = await stream_groups(client, keys.stream)  # none if the stream does not exist, such as after a flush
    pending = min(max((group["pending"] for group in known), default=0), length)
    oldest_ms = None
    if length > pending:
        delivered = [text(group["last-delivered-id"]) for group in known]
        oldest_ms = await _oldest_waiting_ms(client, keys, delivered, now_ms)
    return QueueDepth(length - pending, oldest_ms or 0, pending, delayed, dead, running, concurrency)


async def _oldest_waiting_ms(client: Client, keys: QueueKeys, delivered: list[str], now_ms: int) -> int | None:
    """Return the age of the oldest entry behind the last delivered ones (without groups, of the oldest), or None."""
    # Of a limited queue, whose group is closed, the oldest entry in the stream counts: it may be running.
    starts = ["-" if last == CLOSED else f"({last}" for last in delivered] or ["-"]
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


# --- pauses


class TaskPause(NamedTuple):
    """The pause of one task. Times are in epoch milliseconds, by the server's clock."""

    since_ms: int
    #: When it ends automatically; None if it does not.
    until_ms: int | None
    reason: str

    def is_over(self, now_ms: int) -> bool:
        """Return True if it has ended automatically."""
        return self.until_ms is not None and now_ms >= self.until_ms


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


# --- workers


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
    #: What blocks its event loop, and where, such as `job charge 01J… has blocked the event loop for 12.3 s at app.py:9
    #: in charge`; empty if nothing does. It runs no other job meanwhile.
    blocked: str = ""
    #: True if the queue is paused: the worker starts none of its jobs.
    is_paused: bool = False

    @property
    def state(self) -> Literal["dead", "blocked", "paused", "running", "idle"]:
        """Return what the worker does now."""
        if not self.is_alive:
            return "dead"
        return "blocked" if self.blocked else "paused" if self.is_paused else "running" if self.running else "idle"


async def list_workers(client: Client, keys: QueueKeys, *, dead: bool = False) -> list[WorkerInfo]:
    """Return the workers of a queue by group and name; with `dead`, also consumers that are not alive."""
    found: list[WorkerInfo] = []
    is_paused = bool(await client.call("EXISTS", keys.paused))
    for group in await stream_groups(client, keys.stream):
        group_name = text(group["name"])
        consumers = [as_dict(flat) for flat in await client.call("XINFO", "CONSUMERS", keys.stream, group["name"])]
        names = [text(consumer["name"]) for consumer in consumers]
        beats = await read_heartbeats(client, keys, group_name, names)
        for consumer, name, (beat, ttl_ms) in zip(consumers, names, beats, strict=True):
            published: dict[str, Any] = {}
            if beat is not None:
                published = beat._asdict() | {"heartbeat_ms": heartbeat_age_ms(ttl_ms)}
                del published["held"]
            worker = WorkerInfo(
                name=name,
                group=group_name,
                pending=consumer["pending"],
                idle_ms=consumer["idle"],
                is_paused=is_paused,
                is_alive=is_alive(ttl_ms, consumer["idle"]),
                **published,
            )
            if dead or worker.is_alive:
                found.append(worker)
    return sorted(found, key=lambda worker: (worker.group, worker.name))


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
