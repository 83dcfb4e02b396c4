"""Checks of one queue: lag, overdue jobs, stalled jobs, undecodable entries, keys without a TTL, extra groups.

`workers.py` checks its workers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tampu.cli.commands.doctor.findings import Finding, note, ok, wrong
from tampu.cli.commands.doctor.workers import check_workers
from tampu.cli.output import command
from tampu.cli.session import literal_glob, scan_keys
from tampu.cli.units import duration, plural
from tampu.config import DEFAULT_DLQ_MAX_STREAM_LEN, DEFAULT_MAX_STREAM_LEN
from tampu.errors import DecodeError
from tampu.inspect.snapshot import QueueSnapshot, as_dict, ask_each, take_snapshot, text
from tampu.redis.faults import ServerError
from tampu.wire.entry import decode_delayed_member, score_ms
from tampu.wire.envelope import decode_job

if TYPE_CHECKING:
    from tampu.redis.client import Client
    from tampu.wire.keys import QueueKeys

#: Maximum number of delayed jobs decoded (soonest first), and of keys whose TTL is checked.
MOST_MEMBERS = 1000
MOST_KEYS = 20_000
#: Delayed jobs and schedules that are overdue by this much are not being processed, in milliseconds.
OVERDUE_MS = 10_000
#: Share of a limit above which it counts as nearly reached.
NEAR_SHARE = 0.8
#: The highest ID of an entry. A stream that holds it refuses XADD.
MAX_ENTRY_ID = b"18446744073709551615-18446744073709551615"
#: Kinds of keys that must have a TTL.
EXPIRING = ("dlid", "didx", "result", "pseq", "progress")


@dataclass(frozen=True, slots=True)
class Limits:
    """Ages above which a job counts as late or stalled."""

    max_age_ms: float
    claim_min_idle_ms: float


async def check_queue(client: Client, keys: QueueKeys, limits: Limits) -> list[Finding]:
    """Run all checks of one queue; if all pass, return a single ok finding."""
    findings = await _wrong_types(client, keys)
    if not findings:
        snapshot = await take_snapshot(client, keys, sizes=False)
        findings = [
            *lag(snapshot, limits),
            *await check_workers(client, keys, snapshot, is_late=bool(lag(snapshot, limits))),
            *paused_tasks(snapshot),
            *overdue(snapshot),
            *caps(snapshot),
            *groups(snapshot),
            *await stalled(client, keys, snapshot, limits),
            *await overdue_repeatables(client, keys, snapshot),
            *await exhausted_ids(client, keys),
            *await poison(client, keys),
            *await immortal_keys(client, keys),
            *await peers(client, keys, snapshot),
        ]
        if not findings:
            findings = [ok("queue", f"{snapshot.waiting:,} waiting, {plural(snapshot.workers, 'worker')}")]
    return [replace(finding, about=keys.queue_name) for finding in findings]


async def _wrong_types(client: Client, keys: QueueKeys) -> list[Finding]:
    wanted = {
        keys.stream: "stream",
        keys.delayed: "zset",
        keys.dlq: "stream",
        keys.events: "stream",
        keys.repeat: "zset",
    }
    kinds = await ask_each(client, [("TYPE", key) for key in wanted])
    return [
        wrong("type of keys", f"{key} is a {text(kind)}, not a {right}", f"rename the key: RENAME {key} NEWNAME")
        for (key, right), kind in zip(wanted.items(), kinds, strict=True)
        if isinstance(kind, bytes) and text(kind) not in (right, "none")
    ]


def lag(one: QueueSnapshot, limits: Limits) -> list[Finding]:
    """Find jobs that have waited too long, and the reason."""
    if one.is_paused:
        why = f" ({one.pause_reason})" if one.pause_reason else ""
        resume = command("queue", "resume", one.queue)
        return [note("paused", f"paused{why}, {plural(one.waiting, 'job')} waiting", f"run {resume} to continue")]
    oldest = one.oldest_waiting_ms
    if oldest is None or oldest <= limits.max_age_ms:
        return []
    found = f"{plural(one.waiting, 'job')} waiting, the oldest for {duration(oldest)}"
    if not one.workers:
        return [wrong("lag", f"{found}; no worker serves this queue", "start one with `tampu worker app:queue`")]
    return [wrong("lag", found, "add workers (--processes, --concurrency) or speed up the handlers")]


def paused_tasks(one: QueueSnapshot) -> list[Finding]:
    """Find paused tasks."""
    return [
        note(
            "paused",
            f"task {name} is paused" + (f" ({reason})" if reason else ""),
            f"run {command('queue', 'resume', one.queue, '--task', name)} to continue",
        )
        for name, reason in sorted(one.paused_tasks.items())
    ]


def overdue(one: QueueSnapshot) -> list[Finding]:
    """Find delayed jobs that should have been moved into the stream."""
    late = -(one.next_due_in_ms or 0)
    if not one.due or late < OVERDUE_MS:
        return []
    found = f"{plural(one.due, 'delayed job')} overdue, the oldest by {duration(late)}"
    if one.promoter is None:
        remedy = f"start a worker or {command('promoter', one.queue)}"
        return [wrong("delayed", f"{found}; no promoter is running", remedy)]
    return [wrong("delayed", found, "the stream may be full or the promoter stuck: check the promoter's log")]


async def overdue_repeatables(client: Client, keys: QueueKeys, one: QueueSnapshot) -> list[Finding]:
    """Find schedules that should have fired."""
    first = await client.call("ZRANGE", keys.repeat, 0, 0, "WITHSCORES")
    late = one.taken_at_ms - score_ms(first[1]) if first else 0
    if late < OVERDUE_MS:
        return []
    found = f"a schedule is overdue by {duration(late)}"
    if one.scheduler is None:
        remedy = f"start a worker or {command('scheduler', one.queue)}"
        return [wrong("repeatables", f"{found}; no scheduler is running", remedy)]
    return [wrong("repeatables", found, "check the scheduler's log")]


def caps(one: QueueSnapshot) -> list[Finding]:
    """Find streams close to the length at which adds are refused or dead letters dropped."""
    found = []
    if one.length > DEFAULT_MAX_STREAM_LEN * NEAR_SHARE:
        entries = f"{one.length:,} entries, and adds are refused at {DEFAULT_MAX_STREAM_LEN:,} (default max_stream_len)"
        found.append(wrong("stream", entries, "add workers or raise max_stream_len"))
    if one.dlq > DEFAULT_DLQ_MAX_STREAM_LEN * NEAR_SHARE:
        limit = f"{DEFAULT_DLQ_MAX_STREAM_LEN:,}"
        letters = f"{one.dlq:,} dead letters; above about {limit} the oldest are deleted"
        remedy = f"run {command('dlq', 'replay', one.queue)} or {command('dlq', 'remove', one.queue)}"
        found.append(wrong("dead letters", letters, remedy))
    elif one.dlq:
        found.append(
            note("dead letters", plural(one.dlq, "dead letter"), f"run {command('dlq', 'peek', one.queue)} for details")
        )
    return found


def groups(one: QueueSnapshot) -> list[Finding]:
    """Find a second consumer group: each group would get only some of the jobs, as settled jobs are deleted."""
    if len(one.groups) < 2:
        return []
    names = ", ".join(group.name for group in one.groups)
    return [
        wrong(
            "groups",
            f"{len(one.groups)} groups ({names}): a job settled by one group is deleted for the others",
            f"use one group for all workers; delete others with XGROUP DESTROY {{chasqui:{one.queue}}}:stream NAME",
        )
    ]


async def stalled(client: Client, keys: QueueKeys, one: QueueSnapshot, limits: Limits) -> list[Finding]:
    """Find jobs whose leases are not renewed and that no other worker has taken over."""
    found = []
    idle_ms = int(limits.claim_min_idle_ms * 2)
    for group in one.groups:
        [pending] = await ask_each(client, [("XPENDING", keys.stream, group.name, "IDLE", idle_ms, "-", "+", 100)])
        if pending and not isinstance(pending, ServerError):  # a group whose name is not UTF-8 cannot be queried
            consumers = sorted({text(entry[1]) for entry in pending})
            longest = max(entry[2] for entry in pending)
            count = plural(len(pending), "job") if len(pending) < 100 else "100 or more jobs"
            found.append(
                wrong(
                    "stalled",
                    f"{count} held by {', '.join(consumers[:3])}; leases last renewed {duration(longest)} ago",
                    "start a worker to take them over; if workers are running, check their logs",
                )
            )
    return found


async def poison(client: Client, keys: QueueKeys) -> list[Finding]:
    """Find members of the delayed set that cannot be decoded: they stop the promoters of other implementations."""
    members = await client.call("ZRANGE", keys.delayed, 0, MOST_MEMBERS - 1)
    bad = 0
    for member in members:
        try:
            decode_job(decode_delayed_member(member)[1])
        except DecodeError:
            bad += 1
    if not bad:
        return []
    found = f"{plural(bad, 'member')} of the delayed set cannot be decoded"
    return [
        wrong("poison", found, "tampu workers dead-letter them when they are due; find the producer that wrote them")
    ]


async def exhausted_ids(client: Client, keys: QueueKeys) -> list[Finding]:
    """Find streams that accept no more entries, because one was added with the highest possible ID."""
    found = []
    # XSETID cannot go back: the server refuses IDs below the highest one that was ever deleted.
    remedies = {
        keys.stream: f"let the workers finish its jobs, then DEL {keys.stream}: they create it again",
        keys.dlq: f"replay or remove the dead letters, then DEL {keys.dlq}",
        keys.events: f"DEL {keys.events}, which deletes the history",
    }
    for key, remedy in remedies.items():
        [reply] = await ask_each(client, [("XINFO", "STREAM", key)])
        stream = {} if isinstance(reply, ServerError) else as_dict(reply)
        if stream.get("last-generated-id") == MAX_ENTRY_ID:
            found.append(
                wrong("entry IDs", f"{key} has an entry with the highest ID, so the server refuses to add any", remedy)
            )
    return found


async def immortal_keys(client: Client, keys: QueueKeys) -> list[Finding]:
    """Find keys that should expire but have no TTL: they fill the memory, or keep a lock taken forever."""
    found: list[bytes] = []
    looked_at = 0
    for kind in EXPIRING:
        batch: list[bytes] = []
        async for key in scan_keys(client, f"{literal_glob(keys.tag)}:{kind}:*"):
            batch.append(key)
            looked_at += 1
            if len(batch) >= 500:
                found += await _without_ttl(client, batch)
                batch = []
            if looked_at >= MOST_KEYS:
                break
        found += await _without_ttl(client, batch)
    found += await _without_ttl(client, [key.encode() for key in (keys.promoter_lock, keys.scheduler_lock, keys.due)])
    if not found:
        return []
    examples = ", ".join(text(key) for key in found[:2])
    return [
        wrong("keys without TTL", f"{plural(len(found), 'key')} without a TTL: {examples} ...", "EXPIRE or DEL them")
    ]


async def _without_ttl(client: Client, found: list[bytes]) -> list[bytes]:
    ttls = await ask_each(client, [("TTL", key) for key in found])
    return [key for key, ttl in zip(found, ttls, strict=True) if ttl == -1]


async def peers(client: Client, keys: QueueKeys, one: QueueSnapshot) -> list[Finding]:
    """Find ChasquiMQ producers on this queue: they trim the stream to their own limit, including waiting jobs."""
    if not one.length and one.added_in_all is None:
        return []
    try:
        stream = as_dict(await client.call("XINFO", "STREAM", keys.stream))
    except ServerError:
        return []
    if not stream.get("pids-tracked"):
        return []
    found = f"trimmed at the MAXLEN of {plural(stream['pids-tracked'], 'ChasquiMQ producer')} (XADD IDMP)"
    remedy = "keep the queue well below their max_stream_len (default 1,000,000), or move them to tampu"
    near = one.length > DEFAULT_MAX_STREAM_LEN * NEAR_SHARE
    return [wrong("peers", f"{found}, which deletes waiting jobs", remedy) if near else note("peers", found, remedy)]
