"""Checks of one queue and its workers, for `tampu doctor`.

Of the queue: lag, overdue jobs, stalled jobs, undecodable entries, keys without a TTL, extra groups. Of its workers:
none, no free slots, failing reads, blocked or long-running ones, other versions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any

from tampu.base.units import duration, plural
from tampu.cli.output import command
from tampu.config import DEFAULT_DLQ_MAX_STREAM_LEN, DEFAULT_MAX_STREAM_LEN
from tampu.inspect.jobs import decoded_member
from tampu.inspect.snapshot import UNBLOCK, is_alive
from tampu.inspect.streams import as_dict, ask_each, scan_keys, text
from tampu.redis.acl import literal_glob
from tampu.redis.faults import ServerError
from tampu.wire.entry import score_ms
from tampu.wire.heartbeat import decode_heartbeat

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tampu.inspect.admin import QueueAdmin
    from tampu.inspect.snapshot import QueueSnapshot, WorkerInfo

#: Maximum number of delayed jobs decoded (soonest first), and of keys whose TTL is checked.
MAX_MEMBERS = 1000
MAX_KEYS = 20_000
#: Delayed jobs and schedules that are overdue by this much are not being processed, in milliseconds.
OVERDUE_MS = 10_000
#: Share of a limit above which it counts as nearly reached.
NEAR_SHARE = 0.8
#: Kinds of keys that must have a TTL.
EXPIRING = ("dlid", "didx", "result", "pseq", "progress")
#: Jobs that have been running for at least this long are reported, in milliseconds.
LONG_RUNNING_MS = 600_000


class Level(StrEnum):
    """Severity of a finding."""

    OK = "ok"
    #: Worth knowing; no action needed.
    NOTE = "note"
    #: Jobs are, or will be, lost, stuck or late: `doctor` exits with 3.
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check."""

    level: Level
    check: str
    text: str
    remedy: str = ""
    #: The server or queue that was checked.
    about: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the finding for JSON output."""
        shown = {"check": self.check, "about": self.about, "level": self.level.value, "text": self.text}
        return shown | {"remedy": self.remedy or None}


#: `ok(check, text)`, `note(check, text, remedy="")` and `wrong(check, text, remedy)` return findings.
ok = partial(Finding, Level.OK)
note = partial(Finding, Level.NOTE)
wrong = partial(Finding, Level.WRONG)


# --- the queue


@dataclass(frozen=True, slots=True)
class Limits:
    """Ages above which a job counts as late or stalled."""

    max_age_ms: float
    claim_min_idle_ms: float


async def check_queue(admin: QueueAdmin, limits: Limits) -> list[Finding]:
    """Run all checks of one queue; if all pass, return a single ok finding."""
    findings = await _wrong_types(admin)
    if not findings:
        snapshot = await admin.snapshot(sizes=False)
        findings = await _Checks(admin, snapshot, limits).run()
        if not findings:
            findings = [ok("queue", f"{snapshot.waiting:,} waiting, {plural(snapshot.workers, 'worker')}")]
    return [replace(finding, about=admin.name) for finding in findings]


async def _wrong_types(admin: QueueAdmin) -> list[Finding]:
    keys = admin.keys
    types = dict.fromkeys((keys.stream, keys.delayed, keys.dlq, keys.events, keys.repeat), "stream")
    types |= {keys.delayed: "zset", keys.repeat: "zset"}
    kinds = await ask_each(admin.client, [("TYPE", key) for key in types])
    return [
        wrong("type of keys", f"{key} is a {text(kind)}, not a {right}", f"rename the key: RENAME {key} NEWNAME")
        for (key, right), kind in zip(types.items(), kinds, strict=True)
        if isinstance(kind, bytes) and text(kind) not in (right, "none")
    ]


class _Checks:
    """The checks of one queue; each adds what it finds."""

    def __init__(self, admin: QueueAdmin, snapshot: QueueSnapshot, limits: Limits) -> None:
        self._admin = admin
        self._client, self._keys = admin.client, admin.keys
        self._queue = snapshot
        self._limits = limits
        self._findings: list[Finding] = []

    async def run(self) -> list[Finding]:
        """Run all checks and return the findings."""
        self._lag()
        await self._workers(is_late=bool(self._findings))
        self._paused_tasks()
        self._overdue()
        self._lengths()
        self._groups()
        await self._stalled()
        await self._overdue_schedules()
        await self._undecodable()
        await self._without_ttl()
        await self._peers()
        return self._findings

    def _note(self, *finding: str) -> None:
        self._findings.append(note(*finding))

    def _wrong(self, *finding: str) -> None:
        self._findings.append(wrong(*finding))

    def _lag(self) -> None:
        """Find jobs that have waited too long, and the reason."""
        queue = self._queue
        oldest = queue.oldest_waiting_ms
        if queue.is_paused:
            why = f" ({queue.pause_reason})" if queue.pause_reason else ""
            resume = command("queue", "resume", queue.queue)
            self._note("paused", f"paused{why}, {plural(queue.waiting, 'job')} waiting", f"run {resume} to continue")
        elif oldest is not None and oldest > self._limits.max_age_ms:
            found = f"{plural(queue.waiting, 'job')} waiting, the oldest for {duration(oldest)}"
            if queue.workers:
                self._wrong("lag", found, "add workers (--processes, --concurrency) or speed up the handlers")
            else:
                self._wrong("lag", f"{found}; no worker serves this queue", "start one with `tampu worker app:queue`")

    def _paused_tasks(self) -> None:
        for name, reason in sorted(self._queue.paused_tasks.items()):
            found = f"task {name} is paused" + (f" ({reason})" if reason else "")
            resume = command("queue", "resume", self._queue.queue, "--task", name)
            self._note("paused", found, f"run {resume} to continue")

    def _overdue(self) -> None:
        """Find delayed jobs that should have been moved into the stream."""
        late = -(self._queue.next_due_in_ms or 0)
        if self._queue.due and late >= OVERDUE_MS:
            found = f"{plural(self._queue.due, 'delayed job')} overdue, the oldest by {duration(late)}"
            why = "the stream may be full or the promoter stuck: "
            self._not_served("delayed", found, "promoter", self._queue.promoter, why)

    async def _overdue_schedules(self) -> None:
        """Find schedules that should have fired."""
        first = await self._client.call("ZRANGE", self._keys.repeat, 0, 0, "WITHSCORES")
        late = self._queue.taken_at_ms - score_ms(first[1]) if first else 0
        if late >= OVERDUE_MS:
            found = f"a schedule is overdue by {duration(late)}"
            self._not_served("repeatables", found, "scheduler", self._queue.scheduler)

    def _not_served(self, check: str, found: str, role: str, holder: str | None, why: str = "") -> None:
        if holder is None:
            remedy = f"start a worker or {command(role, self._queue.queue)}"
            self._wrong(check, f"{found}; no {role} is running", remedy)
        else:
            self._wrong(check, found, f"{why}check the {role}'s log")

    def _lengths(self) -> None:
        """Find streams close to the length at which adds are refused or dead letters dropped."""
        queue, length, letters = self._queue.queue, self._queue.length, self._queue.dlq
        if length > DEFAULT_MAX_STREAM_LEN * NEAR_SHARE:
            entries = f"{length:,} entries, and adds are refused at {DEFAULT_MAX_STREAM_LEN:,} (default max_stream_len)"
            self._wrong("stream", entries, "add workers or raise max_stream_len")
        if letters > DEFAULT_DLQ_MAX_STREAM_LEN * NEAR_SHARE:
            found = f"{letters:,} dead letters; above about {DEFAULT_DLQ_MAX_STREAM_LEN:,} the oldest are deleted"
            remedy = f"run {command('dlq', 'replay', queue)} or {command('dlq', 'remove', queue)}"
            self._wrong("dead letters", found, remedy)
        elif letters:
            remedy = f"run {command('dlq', 'peek', queue)} for details"
            self._note("dead letters", plural(letters, "dead letter"), remedy)

    def _groups(self) -> None:
        """Find a second consumer group: each group would get only some of the jobs, as settled jobs are deleted."""
        if len(names := [group.name for group in self._queue.groups]) > 1:
            found = f"{len(names)} groups ({', '.join(names)}): a job settled by one group is deleted for the others"
            destroy = f"XGROUP DESTROY {self._keys.stream} NAME"
            self._wrong("groups", found, f"use one group for all workers; delete others with {destroy}")

    async def _stalled(self) -> None:
        """Find jobs whose leases are not renewed and that no other worker has taken over."""
        span = ("IDLE", int(self._limits.claim_min_idle_ms * 2), "-", "+", 100)
        for group in self._queue.groups:
            [pending] = await ask_each(self._client, [("XPENDING", self._keys.stream, group.name, *span)])
            if pending and not isinstance(pending, ServerError):  # a group whose name is not UTF-8 cannot be queried
                consumers = sorted({text(entry[1]) for entry in pending})
                longest = max(entry[2] for entry in pending)
                count = plural(len(pending), "job") if len(pending) < 100 else "100 or more jobs"
                found = f"{count} held by {', '.join(consumers[:3])}; leases last renewed {duration(longest)} ago"
                remedy = "start a worker to take them over; if workers are running, check their logs"
                self._wrong("stalled", found, remedy)

    async def _undecodable(self) -> None:
        """Find members of the delayed set that cannot be decoded: they stop the promoters of other implementations."""
        members = await self._client.call("ZRANGE", self._keys.delayed, 0, MAX_MEMBERS - 1)
        bad = sum(decoded_member(member)[1] is None for member in members)
        if bad:
            remedy = "tampu workers dead-letter them when they are due; find the producer that wrote them"
            self._wrong("poison", f"{plural(bad, 'member')} of the delayed set cannot be decoded", remedy)

    async def _without_ttl(self) -> None:
        """Find keys that should expire but have no TTL: they fill the memory, or keep a lock taken forever."""
        keys = self._keys
        found: list[bytes] = []
        checked = 0
        batch = [key.encode() for key in (keys.promoter_lock, keys.scheduler_lock, keys.due)]
        for kind in EXPIRING:
            async for key in scan_keys(self._client, f"{literal_glob(keys.tag)}:{kind}:*"):
                batch.append(key)
                checked += 1
                if len(batch) >= 500:
                    found += await self._immortal(batch)
                    batch = []
                if checked >= MAX_KEYS:
                    break
        found += await self._immortal(batch)
        if found:
            examples = ", ".join(text(key) for key in found[:2])
            about = f"{plural(len(found), 'key')} without a TTL: {examples} ..."
            self._wrong("keys without TTL", about, "EXPIRE or DEL them")

    async def _immortal(self, found: list[bytes]) -> list[bytes]:
        ttls = await ask_each(self._client, [("TTL", key) for key in found])
        return [key for key, ttl in zip(found, ttls, strict=True) if ttl == -1]

    async def _peers(self) -> None:
        """Find ChasquiMQ producers on this queue: they trim the stream to their own limit, including waiting jobs."""
        if not self._queue.length and self._queue.added_in_all is None:
            return
        [reply] = await ask_each(self._client, [("XINFO", "STREAM", self._keys.stream)])
        if count := None if isinstance(reply, ServerError) else as_dict(reply).get("pids-tracked"):
            found = f"trimmed at the MAXLEN of {plural(count, 'ChasquiMQ producer')} (XADD IDMP)"
            remedy = "keep the queue well below their max_stream_len (default 1,000,000), or move them to tampu"
            if self._queue.length > DEFAULT_MAX_STREAM_LEN * NEAR_SHARE:
                self._wrong("peers", f"{found}, which deletes waiting jobs", remedy)
            else:
                self._note("peers", found, remedy)

    # --- workers

    async def _workers(self, *, is_late: bool) -> None:
        """Check the workers. `is_late`: jobs that wait too long are already reported."""
        workers = await self._admin.workers()
        before = len(self._findings)
        await self._failing_reads()
        is_failing = len(self._findings) > before
        self._no_slots(workers)
        for worker in workers:
            if worker.blocked:
                # It starts no job and reports no result until its event loop runs again.
                self._wrong("blocked", f"worker {worker.name}: {worker.blocked}", UNBLOCK)
        self._long_running(workers)
        self._other_versions(workers)
        await self._without_limits(workers)
        if not workers and not is_failing and not is_late and self._queue.length + self._queue.due:
            what = plural(self._queue.length + self._queue.due, "job")
            remedy = "start a worker: tampu worker APP; check the queue's name and the server's address"
            self._wrong("workers", f"{what} and no live worker", remedy)

    async def _failing_reads(self) -> None:
        """Find workers that serve the queue but cannot read it. They may not be in its group: search by heartbeat."""
        prefix = self._keys.heartbeat("", "").removesuffix(":")
        found = [key async for key in scan_keys(self._client, f"{literal_glob(prefix)}*")]
        beats = await ask_each(self._client, [("GET", key) for key in found])
        ttls = await ask_each(self._client, [("PTTL", key) for key in found])
        for key, packed, ttl_ms in zip(found, beats, ttls, strict=True):
            beat = decode_heartbeat(packed) if isinstance(packed, bytes) else None
            is_failing = beat is not None and beat.share is not None and beat.share.is_failing
            if is_failing and isinstance(ttl_ms, int) and is_alive(ttl_ms, 0):
                _, _, worker = text(key).removeprefix(prefix).partition(":")
                remedy = "see its log; check its ACL user (`tampu acl --role worker`) and the types of the queue's keys"
                self._wrong("reads", f"worker {worker} cannot read this queue", remedy)

    def _no_slots(self, workers: Sequence[WorkerInfo]) -> None:
        """Find jobs that wait because their workers have no slot for them, and the reason."""
        queue = self._queue
        if not queue.waiting or queue.is_paused or not workers:
            return
        used = others = 0
        are_limited = True
        for worker in workers:
            share, slots = worker.share, worker.concurrency
            if share is None or slots is None:
                return  # an older worker or a ChasquiMQ worker, which does not report its slots
            is_limited = 0 < share.limit <= share.used
            if share.used_by_all < slots and not is_limited:
                return
            are_limited = are_limited and is_limited
            used += share.used
            others += share.used_by_all - share.used
        found = f"{plural(queue.waiting, 'job')} waiting and no free slot in {plural(len(workers), 'worker')}"
        if are_limited:
            self._note("slots", f"{found}: the queue uses its limit of {plural(used, 'slot')}", "raise its --limit")
        elif not others:
            self._note("slots", f"{found}: its own jobs use all {used}", "raise --concurrency or add workers")
        else:
            remedy = f"keep slots for it (--reserve {queue.queue}=N), raise --concurrency or give it its own worker"
            self._note("slots", f"{found}: its jobs use {used}, jobs of other queues {others}", remedy)

    def _long_running(self, workers: Sequence[WorkerInfo]) -> None:
        """Find the longest-running job of each worker, if it has been running for `LONG_RUNNING_MS`."""
        for worker in workers:
            job = next((job for job in worker.running if job.running_ms >= LONG_RUNNING_MS), None)
            if job is not None:
                label = f"{job.name or '(no name)'} {job.id}"
                cancel = command("cancel", self._queue.queue, job.id)
                found = f"{label} has been running for {duration(job.running_ms)} on {worker.name}"
                self._note("long-running", found, f"if it hangs, run {cancel}; a timeout on the task would end it")

    async def _without_limits(self, workers: Sequence[WorkerInfo]) -> None:
        """Find workers that do not know of limits: while the queue has some, they get none of its jobs."""
        if not self._queue.is_limited:
            return
        groups = sorted({worker.group for worker in workers})
        replies = await ask_each(self._client, [("XINFO", "CONSUMERS", self._keys.bell, group) for group in groups])
        flat = [one for reply in replies if isinstance(reply, list) for one in reply]
        known = {text(as_dict(consumer)["name"]) for consumer in flat}
        if names := sorted(worker.name for worker in workers if worker.name not in known):
            found = f"{plural(len(names), 'worker')} without limits: {', '.join(names[:3])}"
            clear = command("limit", "clear", self._keys.queue_name)
            self._wrong("limits", f"{found}; they get no jobs of this queue", f"upgrade them, or run {clear}")

    def _other_versions(self, workers: Sequence[WorkerInfo]) -> None:
        """Find workers without a heartbeat (ChasquiMQ, tampu 0.1.0): they do not wait for others after an outage."""
        names = sorted(worker.name for worker in workers if worker.heartbeat_ms is None)
        if names:
            found = f"{plural(len(names), 'worker')} of ChasquiMQ or tampu 0.1.0: {', '.join(names[:3])}"
            why = "after a server outage, they run jobs that live workers are still running"
            self._note("peers", found, f"replace them with this version: {why}")
