"""Checks of one queue's workers: none, no free slots, failing reads, long-running jobs, other versions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tampu.cli.commands.doctor.findings import Finding, note, wrong
from tampu.cli.output import command
from tampu.cli.session import literal_glob, scan_keys
from tampu.cli.units import duration, plural
from tampu.inspect.snapshot import ask_each, is_alive, text
from tampu.inspect.workers import list_workers
from tampu.wire.heartbeat import decode_heartbeat

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tampu.inspect.snapshot import QueueSnapshot
    from tampu.inspect.workers import WorkerInfo
    from tampu.redis.client import Client
    from tampu.wire.keys import QueueKeys

#: Jobs that have been running for at least this long are reported, in milliseconds.
LONG_RUNNING_MS = 600_000


async def check_workers(client: Client, keys: QueueKeys, snapshot: QueueSnapshot, *, is_late: bool) -> list[Finding]:
    """Run all checks of a queue's workers. `is_late`: jobs that wait too long are already reported."""
    workers = await list_workers(client, keys)
    failing = await unreadable(client, keys)
    findings = [
        *failing,
        *occupied(snapshot, workers),
        *long_running(snapshot.queue, workers),
        *other_versions(workers),
    ]
    if not workers and not failing and not is_late and snapshot.length + snapshot.due:
        what = plural(snapshot.length + snapshot.due, "job")
        remedy = "start a worker: tampu worker APP; check the queue's name and the server's address"
        findings.append(wrong("workers", f"{what} and no live worker", remedy))
    return findings


async def unreadable(client: Client, keys: QueueKeys) -> list[Finding]:
    """Find workers that serve the queue but cannot read it. They may not be in its group, so search by heartbeat."""
    prefix = keys.heartbeat("", "").removesuffix(":")
    found = [key async for key in scan_keys(client, f"{literal_glob(prefix)}*")]
    beats = await ask_each(client, [("GET", key) for key in found])
    ttls = await ask_each(client, [("PTTL", key) for key in found])
    findings = []
    for key, packed, ttl_ms in zip(found, beats, ttls, strict=True):
        beat = decode_heartbeat(packed) if isinstance(packed, bytes) else None
        is_failing = beat is not None and beat.share is not None and beat.share.is_failing
        if not is_failing or not isinstance(ttl_ms, int) or not is_alive(ttl_ms, 0):
            continue
        _, _, worker = text(key).removeprefix(prefix).partition(":")
        remedy = "see its log; check its ACL user (`tampu acl --role worker`) and the types of the queue's keys"
        findings.append(wrong("reads", f"worker {worker} cannot read this queue", remedy))
    return findings


def occupied(snapshot: QueueSnapshot, workers: Sequence[WorkerInfo]) -> list[Finding]:
    """Find jobs that wait because their workers have no slot for them, and the reason."""
    if not snapshot.waiting or snapshot.is_paused or not workers:
        return []
    used = others = 0
    are_limited = True
    for worker in workers:
        share, slots = worker.share, worker.concurrency
        if share is None or slots is None:
            return []  # an older worker or a ChasquiMQ worker, which does not report its slots
        is_limited = 0 < share.limit <= share.used
        if share.used_by_all < slots and not is_limited:
            return []
        are_limited = are_limited and is_limited
        used += share.used
        others += share.used_by_all - share.used
    found = f"{plural(snapshot.waiting, 'job')} waiting and no free slot in {plural(len(workers), 'worker')}"
    if are_limited:
        return [note("slots", f"{found}: the queue uses its limit of {plural(used, 'slot')}", "raise its --limit")]
    if not others:
        return [note("slots", f"{found}: its own jobs use all {used}", "raise --concurrency or add workers")]
    remedy = f"keep slots for it (--reserve {snapshot.queue}=N), raise --concurrency or give it its own worker"
    return [note("slots", f"{found}: its jobs use {used}, jobs of other queues {others}", remedy)]


def long_running(queue: str, workers: Sequence[WorkerInfo]) -> list[Finding]:
    """Find the longest-running job of each worker, if it has been running for `LONG_RUNNING_MS`."""
    findings = []
    for worker in workers:
        for job in worker.running:
            if job.running_ms >= LONG_RUNNING_MS:
                label = f"{job.name or '(no name)'} {job.id}"
                text_ = f"{label} has been running for {duration(job.running_ms)} on {worker.name}"
                remedy = f"if it hangs, run {command('cancel', queue, job.id)}; a timeout on the task would end it"
                findings.append(note("long-running", text_, remedy))
                break
    return findings


def other_versions(workers: Sequence[WorkerInfo]) -> list[Finding]:
    """Find workers without a heartbeat (ChasquiMQ, tampu 0.1.0): they do not wait for live workers after an outage."""
    names = sorted(worker.name for worker in workers if worker.heartbeat_ms is None)
    if not names:
        return []
    found = f"{plural(len(names), 'worker')} of ChasquiMQ or tampu 0.1.0: {', '.join(names[:3])}"
    remedy = "replace them with this version: after a server outage, they run jobs that live workers are still running"
    return [note("peers", found, remedy)]
