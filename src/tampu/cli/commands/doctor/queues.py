"""Checks of one queue: lag, overdue jobs, stalled workers, poison, keys that would stay for ever, strange groups."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tampu.cli.commands.doctor.findings import Finding, note, ok, wrong
from tampu.cli.session import literal_glob, scan_keys
from tampu.cli.units import duration, plural
from tampu.config import DEFAULT_DLQ_MAX_STREAM_LEN, DEFAULT_MAX_STREAM_LEN
from tampu.errors import DecodeError
from tampu.inspect.snapshot import QueueSnapshot, as_dict, ask_each, take_snapshot, text
from tampu.redis.faults import ServerError
from tampu.wire.entry import decode_delayed_member
from tampu.wire.envelope import decode_job

if TYPE_CHECKING:
    from tampu.redis.client import Client
    from tampu.wire.keys import QueueKeys

#: Members of the delayed set that are read, the first due; and keys that are looked at for their TTL.
MOST_MEMBERS = 1000
MOST_KEYS = 20_000
#: Delayed jobs and repeatables this late have nobody who moves them, in milliseconds.
OVERDUE_MS = 10_000
#: Share of a cap at which it is near.
NEAR_SHARE = 0.8
#: Kinds of keys that a queue leaves behind unless they expire.
EXPIRING = ("dlid", "didx", "result", "pseq")


@dataclass(frozen=True, slots=True)
class Limits:
    """When something is too late."""

    max_age_ms: float
    claim_min_idle_ms: float


async def check_queue(client: Client, keys: QueueKeys, limits: Limits) -> list[Finding]:
    """All checks of one queue; what is fine is one finding in all."""
    findings = await _wrong_types(client, keys)
    if not findings:
        snapshot = await take_snapshot(client, keys, sizes=False)
        findings = [
            *lag(snapshot, limits),
            *overdue(snapshot),
            *caps(snapshot),
            *groups(snapshot),
            *await stalled(client, keys, snapshot, limits),
            *await overdue_repeatables(client, keys, snapshot),
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
        wrong("type of keys", f"{key} is a {text(kind)}, not a {right}", f"RENAME {key} to something else")
        for (key, right), kind in zip(wanted.items(), kinds, strict=True)
        if isinstance(kind, bytes) and text(kind) not in (right, "none")
    ]


def lag(one: QueueSnapshot, limits: Limits) -> list[Finding]:
    """Jobs that wait too long, and why."""
    if one.is_paused:
        return [note("paused", f"paused, {plural(one.waiting, 'job')} waiting", f"tampu queue resume {one.queue}")]
    oldest = one.oldest_waiting_ms
    if oldest is None or oldest <= limits.max_age_ms:
        return []
    found = f"{plural(one.waiting, 'job')} waiting, the first for {duration(oldest)}"
    if not one.workers:
        return [wrong("lag", f"{found}; no worker serves this queue", "start one: tampu worker app:queue")]
    return [wrong("lag", found, "more workers (--processes, --concurrency), or faster handlers")]


def overdue(one: QueueSnapshot) -> list[Finding]:
    """Delayed jobs whose time has long come."""
    late = -(one.next_due_in_ms or 0)
    if not one.due or late < OVERDUE_MS:
        return []
    found = f"{plural(one.due, 'delayed job')} overdue, the first by {duration(late)}"
    if one.promoter is None:
        return [wrong("delayed", f"{found}; no promoter runs", f"start a worker, or tampu promoter {one.queue}")]
    return [wrong("delayed", found, "the stream may be full, or the promoter stuck: look at its log")]


async def overdue_repeatables(client: Client, keys: QueueKeys, one: QueueSnapshot) -> list[Finding]:
    """Repeatable jobs that should have fired."""
    first = await client.call("ZRANGE", keys.repeat, 0, 0, "WITHSCORES")
    late = one.taken_at_ms - float(first[1]) if first else 0.0
    if late < OVERDUE_MS:
        return []
    found = f"a repeatable job is overdue by {duration(late)}"
    if one.scheduler is None:
        return [wrong("repeatables", f"{found}; no scheduler runs", f"start a worker, or tampu scheduler {one.queue}")]
    return [wrong("repeatables", found, "look at the scheduler's log")]


def caps(one: QueueSnapshot) -> list[Finding]:
    """Streams near the length at which something is refused or lost."""
    found = []
    if one.length > DEFAULT_MAX_STREAM_LEN * NEAR_SHARE:
        entries = f"{one.length:,} entries, the default cap is {DEFAULT_MAX_STREAM_LEN:,}"
        found.append(wrong("stream", f"{entries}: adds are refused there", "more workers, or a higher max_stream_len"))
    if one.dlq > DEFAULT_DLQ_MAX_STREAM_LEN * NEAR_SHARE:
        letters = f"{one.dlq:,} of about {DEFAULT_DLQ_MAX_STREAM_LEN:,} dead letters: the oldest are dropped beyond"
        found.append(wrong("dead letters", letters, f"tampu dlq replay {one.queue}, or remove those of no use"))
    elif one.dlq:
        found.append(note("dead letters", plural(one.dlq, "dead letter"), f"tampu dlq peek {one.queue}"))
    return found


def groups(one: QueueSnapshot) -> list[Finding]:
    """A second group gets only part of the jobs: settled ones are deleted for all."""
    if len(one.groups) < 2:
        return []
    names = ", ".join(group.name for group in one.groups)
    return [
        wrong(
            "groups",
            f"{len(one.groups)} groups ({names}): a job that one has settled is gone for the others",
            f"one group for all workers; remove the other: XGROUP DESTROY {{chasqui:{one.queue}}}:stream NAME",
        )
    ]


async def stalled(client: Client, keys: QueueKeys, one: QueueSnapshot, limits: Limits) -> list[Finding]:
    """Jobs that somebody took and neither renews nor settles, and nobody takes over."""
    found = []
    idle_ms = int(limits.claim_min_idle_ms * 2)
    for group in one.groups:
        [pending] = await ask_each(client, [("XPENDING", keys.stream, group.name, "IDLE", idle_ms, "-", "+", 100)])
        if pending and not isinstance(pending, ServerError):  # a group whose name is no UTF-8 cannot be asked about
            consumers = sorted({text(entry[1]) for entry in pending})
            longest = max(entry[2] for entry in pending)
            count = f"{len(pending)}{' or more' if len(pending) >= 100 else ''}"
            found.append(
                wrong(
                    "stalled",
                    f"{count} jobs held by {', '.join(consumers[:3])} and not renewed for up to {duration(longest)}",
                    "a worker takes them over: start one, or look why the running ones do not",
                )
            )
    return found


async def poison(client: Client, keys: QueueKeys) -> list[Finding]:
    """Members of the delayed set that nobody can read: they stop other implementations' promoters."""
    members = await client.call("ZRANGE", keys.delayed, 0, MOST_MEMBERS - 1)
    bad = 0
    for member in members:
        try:
            decode_job(decode_delayed_member(member)[1])
        except DecodeError:
            bad += 1
    if not bad:
        return []
    found = f"{plural(bad, 'member')} of the delayed set cannot be read"
    return [
        wrong("poison", found, "a worker of tampu makes dead letters of them when they are due; see who wrote them")
    ]


async def immortal_keys(client: Client, keys: QueueKeys) -> list[Finding]:
    """Keys that should expire and do not: they fill the memory, or a lock that nobody holds is never free."""
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
    found += await _without_ttl(client, [keys.promoter_lock.encode(), keys.scheduler_lock.encode()])
    if not found:
        return []
    examples = ", ".join(text(key) for key in found[:2])
    return [
        wrong(
            "keys without TTL", f"{plural(len(found), 'key')} that should expire: {examples} ...", "EXPIRE or DEL them"
        )
    ]


async def _without_ttl(client: Client, found: list[bytes]) -> list[bytes]:
    ttls = await ask_each(client, [("TTL", key) for key in found])
    return [key for key, ttl in zip(found, ttls, strict=True) if ttl == -1]


async def peers(client: Client, keys: QueueKeys, one: QueueSnapshot) -> list[Finding]:
    """Producers of ChasquiMQ on the same queue: they trim the stream at a length of their own, waiting jobs or not."""
    if not one.length and one.added_in_all is None:
        return []
    try:
        stream = as_dict(await client.call("XINFO", "STREAM", keys.stream))
    except ServerError:
        return []
    if not stream.get("pids-tracked"):
        return []
    found = (
        f"{plural(stream['pids-tracked'], 'producer')} of ChasquiMQ (XADD IDMP) add here and trim at their own MAXLEN"
    )
    remedy = "keep the queue far below their max_stream_len (default 1,000,000), or move them to tampu"
    near = one.length > DEFAULT_MAX_STREAM_LEN * NEAR_SHARE
    return [wrong("peers", f"{found}: they delete waiting jobs", remedy) if near else note("peers", found, remedy)]
