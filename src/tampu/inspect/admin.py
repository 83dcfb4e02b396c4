"""The admin object of a queue: every look at it, and every change that an operator makes, with its audit event.

`Queue`, `Producer` and the command line use it. An audit event says who changed a queue from outside a worker, and how;
it is written to the events stream and logged.
"""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import logging
import math
import os
import socket
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from tampu.base.checks import CANCEL_TTL_SECS, check_delay_ms, check_job_id, check_text, split_into_calls
from tampu.base.clock import wall_clock_ms
from tampu.config import DEFAULT_MAX_STREAM_LEN
from tampu.errors import ConfigError, DecodeError, RedisError
from tampu.inspect.clusters import Causes
from tampu.inspect.dead_letters import (
    REPLAY_COUNTS_TTL_SECS,
    DlqFilter,
    ReplayCount,
    letter_pages,
)
from tampu.inspect.jobs import JobSearch, decoded_job, decoded_member
from tampu.inspect.limits import read_gate, why_held
from tampu.inspect.registry import REGISTRY
from tampu.inspect.snapshot import decode_pauses, list_workers, reason_of, take_snapshot
from tampu.inspect.streams import newest_id, scan_keys, stream_pages
from tampu.inspect.walk import Walk, Wanted
from tampu.redis import calls
from tampu.redis.acl import literal_glob
from tampu.redis.faults import ServerError
from tampu.redis.gate import set_limits
from tampu.wire.entry import read_job_fields, score_ms
from tampu.wire.envelope import encode_job
from tampu.wire.events import EventName, decode_event_fields, encode_event_fields
from tampu.wire.limits import decode_limits
from tampu.wire.repeat import decode_spec, encode_spec
from tampu.wire.ulid import decode_ulid_time

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from datetime import timedelta

    from tampu.inspect.dead_letters import LetterCluster
    from tampu.inspect.jobs import JobState, ListedState
    from tampu.inspect.limits import GateView
    from tampu.inspect.snapshot import QueueSnapshot, TaskPause, WorkerInfo
    from tampu.inspect.walk import Walked
    from tampu.redis.client import Client
    from tampu.wire.codec import QueueCodec
    from tampu.wire.dlq import DlqEntry
    from tampu.wire.events import QueueEvent
    from tampu.wire.job import Job
    from tampu.wire.keys import QueueKeys
    from tampu.wire.limits import Limits
    from tampu.wire.repeat import RepeatableMeta, StoredSpec

AuditAction = Literal[
    "cancel", "delete", "delete-schedule", "drain", "edit", "fire", "limit", "open", "pause", "purge", "remove",
    "replay", "resume", "run-now",
]  # fmt: skip
#: What became of a request to cancel a job; see `Queue.cancel`.
CancelOutcome = Literal["cancelled", "requested", "finished", "unknown"]

logger = logging.getLogger("tampu.audit")

#: The environment variable with the operator's name. Defaults to `user@host`.
OPERATOR_VARIABLE = "TAMPU_OPERATOR"
#: Longest operator's name, reason and detail that are stored, in characters.
MAX_TEXT = 500
#: Events kept, about: the default of workers (`events_max_stream_len`).
EVENTS_KEPT = 100_000
#: Waiting jobs, and delayed jobs, deleted in one step of `purge`; keys deleted in one step of `delete`.
PURGE_BATCH = 500
#: How often the state of a draining queue is read, in seconds.
DRAIN_POLL_SECS = 0.2
#: Assumed maximum difference between the clocks of producers and servers, in milliseconds.
CLOCK_SLACK_MS = 60_000


def operator_name(environ: Mapping[str, str] = os.environ) -> str:
    """Return the operator's name: `TAMPU_OPERATOR`, or `user@host`."""
    if name := environ.get(OPERATOR_VARIABLE, "").strip():
        return name
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container may have no name for its user
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def _ignore(count: int) -> None:
    pass


class QueueAdmin(JobSearch):
    """Reads and changes one queue. `on_progress` of a method is called with the number of items done so far."""

    def __init__(
        self,
        client: Client,
        keys: QueueKeys,
        *,
        operator: str | None = None,
        max_stream_len: int = DEFAULT_MAX_STREAM_LEN,
        codec: QueueCodec | None = None,
    ) -> None:
        super().__init__(client, keys, codec)
        self._operator = operator
        self._max_stream_len = max_stream_len

    @property
    def name(self) -> str:
        """Name of the queue."""
        return self.keys.queue_name

    async def audit(self, action: AuditAction, *, count: int = 1, detail: str = "", create: bool = True) -> None:
        """Write an audit event for a change and log it. `create=False` writes it only if the queue already has events.

        An event that cannot be written is logged and raises nothing, so that it does not look like a failed change. A
        refusal by the server, for lack of memory or because of its ACL, is ignored.
        """
        operator, detail = (self._operator or operator_name())[:MAX_TEXT], detail[:MAX_TEXT]
        logger.info("queue %r: %s by %s (count %d)%s", self.name, action, operator, count, detail and f": {detail}")
        extra: dict[str, str | int] = {"action": action, "operator": operator, "count": count}
        if detail:
            extra["detail"] = detail
        fields = encode_event_fields(EventName.AUDIT, "", wall_clock_ms(), "", extra)
        options = () if create else ("NOMKSTREAM",)
        try:
            await self.client.call("XADD", self.keys.events, *options, "MAXLEN", "~", EVENTS_KEPT, "*", *fields)
        except RedisError as error:
            if not isinstance(error, ServerError) or error.kind not in ("OOM", "MISCONF", "NOPERM"):
                logger.warning("the audit event of %s in queue %r was not written: %s", action, self.name, error)

    # --- jobs

    async def jobs(
        self, state: ListedState, *, name: str | None = None, older_than_ms: int | None = None, limit: int = 100
    ) -> list[JobState]:
        """Return up to `limit` jobs in a state, oldest first, however many must be read to find them.

        `older_than_ms` is the minimum time since a running job started, a dead one failed, or any other was added.
        """
        return (await self.walk_jobs(state, Wanted(name, older_than_ms=older_than_ms), limit=limit)).jobs

    async def walk_jobs(self, state: ListedState, wanted: Wanted, *, limit: int, max_read: float = math.inf) -> Walked:
        """Return up to `limit` jobs, oldest first, that are among the first `max_read` entries or so."""
        found = await Walk(self, state, wanted, limit=limit, oldest_first=True).page()
        while found.cursor is not None and len(found.jobs) < limit and found.looked < max_read:
            rest = Walk(self, state, wanted, limit=limit - len(found.jobs), oldest_first=True)
            more = await rest.page(found.cursor)
            found.jobs += more.jobs
            found.looked, found.cursor = found.looked + more.looked, more.cursor
        del found.jobs[limit:]
        return found

    async def job_in_stream(self, entry_id: str) -> Job[Any] | None:
        """Return a waiting or running job by the ID of its entry; None if it has ended or cannot be decoded."""
        entries = await self.client.call("XRANGE", self.keys.stream, entry_id, entry_id)
        return decoded_job(*read_job_fields(entries[0][1])) if entries else None

    async def stored_job(self, state: JobState) -> Job[Any] | None:
        """Return the job with this state if it waits, runs or is dead; None if it has moved on."""
        if state.dead_letter is not None:
            return decoded_job(state.dead_letter.payload)
        if state.entry_id is not None:
            return await self.job_in_stream(state.entry_id)
        member = await self.delayed_member(state.id)
        return None if member is None else decoded_member(member)[1]

    async def replay_count(self, job_id: str) -> int:
        """Return how often a job was replayed in the last 30 days."""
        count = await self.client.call("HGET", self.keys.replays, job_id) or b"0"
        return int(count) if count.isdigit() and len(count) < 20 else 1

    async def result(self, job_id: str) -> bytes | None:
        """Return the stored result as MessagePack, or None. Raises `DecodeError` if the codec cannot open it."""
        result: bytes | None = await self.client.call("GET", self.keys.result(job_id))
        return result if result is None or self.codec is None else self.codec.open_result(result, job_id)

    async def cancel(self, job_id: str, reason: str = "") -> CancelOutcome:
        """Cancel a job, wherever it is; see `Queue.cancel`."""
        outcome = await self._cancel(check_job_id(job_id), reason)
        if outcome in ("cancelled", "requested"):
            await self.audit("cancel", detail=": ".join(filter(None, [job_id, reason])))
        return outcome

    async def cancel_all(
        self, job_ids: Sequence[str], reason: str, on_progress: Callable[[int], None] = _ignore
    ) -> dict[str, CancelOutcome]:
        """Cancel jobs one by one, with one audit event for all of them. Return the outcome of each."""
        outcomes: dict[str, CancelOutcome] = {}
        for number, job_id in enumerate(job_ids, 1):
            outcomes[job_id] = await self._cancel(check_job_id(job_id), reason)
            on_progress(number)
        affected = sum(outcome in ("cancelled", "requested") for outcome in outcomes.values())
        if affected:
            await self.audit("cancel", count=affected, detail=reason)
        return outcomes

    async def _cancel(self, job_id: str, reason: str) -> CancelOutcome:
        """Remove a delayed job at once; mark a waiting or running one for its worker to drop."""
        keys = self.keys
        used = (
            *(keys.delayed, keys.delayed_index(job_id), keys.dedup_marker(job_id)),
            *(keys.cancel_mark(job_id), keys.cancel_marks, keys.events, keys.due),
        )
        call = partial(
            calls.cancel_job, self.client, *used, job_id=job_id, reason=reason[:MAX_TEXT], ttl_secs=CANCEL_TTL_SECS
        )
        if await call() == 1:
            return "cancelled"
        state = (await self.job(job_id)).state
        if state in ("cancelled", "unknown"):
            return state
        if state in ("done", "dead"):
            return "finished"
        # It may have moved since: into the delayed set for a retry, or out of it. The script looks there first.
        member = await self.find_delayed_member(job_id) if state == "delayed" else None
        return "cancelled" if await call(member=member, is_in_stream=True) == 1 else "requested"

    async def cancel_delayed(self, job_ids: Sequence[str], detail: str = "") -> list[bool]:
        """Cancel jobs that wait for their due time or their retry. Return False for each that is not delayed."""
        done = await asyncio.gather(*map(self._cancel_delayed, job_ids))
        if any(done):
            await self.audit("cancel", count=sum(done), detail=detail)
        return list(done)

    async def _cancel_delayed(self, job_id: str) -> bool:
        keys = self.keys
        names = (keys.delayed, keys.delayed_index(job_id), keys.dedup_marker(job_id), keys.due)
        is_cancelled = await calls.cancel_delayed(self.client, *names, job_id=job_id)
        if is_cancelled is None:
            # Not found by its id: another implementation added the job, or too many are due in the same millisecond.
            member = await self.find_delayed_member(job_id)
            is_cancelled = member is not None and await calls.cancel_delayed(
                self.client, *names, job_id=job_id, member=member
            )
        return bool(is_cancelled)

    # --- dead letters

    async def peek_dlq(self, limit: int, query: DlqFilter) -> list[DlqEntry]:
        """Return up to `limit` dead letters, oldest first unless `query` says otherwise; so do the methods below."""
        return [letter async for page in letter_pages(self.client, self.keys, query, limit) for letter in page]

    async def count_dlq(self, query: DlqFilter) -> int:
        """Return the number of dead letters that match."""
        if query == DlqFilter():
            return int(await self.client.call("XLEN", self.keys.dlq))
        return sum([len(page) async for page in letter_pages(self.client, self.keys, query)])

    async def dlq_summary(self) -> list[LetterCluster]:
        """Return the dead letters grouped by task, reason and error, the largest group first."""
        return [*(await self.causes()).all]

    async def causes(self, max_letters: float = math.inf) -> Causes:
        """Return the causes of the newest dead letters. The stream is read in steps."""
        found = Causes(max_letters)
        await found.look(self.client, self.keys)
        while not found.is_complete and found.read < max_letters:
            await found.look(self.client, self.keys)
        return found

    async def replay_dlq(
        self, limit: int, query: DlqFilter, on_progress: Callable[[int], None] = _ignore
    ) -> ReplayCount:
        """Move up to `limit` dead letters back into the queue and reset their attempts. Unreadable ones are skipped."""
        moved = skipped = 0
        queue_is_full = False
        async for page in letter_pages(self.client, self.keys, query, first_page=limit):
            letters: list[tuple[str, bytes, str, str]] = []
            for entry in page:
                if moved + len(letters) >= limit:
                    break
                job = decoded_job(entry.payload)
                if job is None:
                    skipped += 1
                else:
                    letters.append((entry.dlq_id, encode_job(job.for_replay()), entry.name, job.id))
            for batch in split_into_calls((letter, len(letter[1])) for letter in letters):
                count, queue_is_full = await self._replay(batch)
                moved += count
                on_progress(moved)
                if queue_is_full:
                    break
            if queue_is_full or moved >= limit:
                break
        if moved:
            await self.audit("replay", count=moved)
        result = ReplayCount(moved)
        result.skipped, result.queue_is_full = skipped, queue_is_full
        return result

    async def _replay(self, letters: list[tuple[str, bytes, str, str]]) -> tuple[int, bool]:
        # A cancel that came too late, when the job had failed for good, must not cancel the replayed job.
        await self.client.call("DEL", *(self.keys.cancel_mark(job_id) for _, _, _, job_id in letters))
        return await calls.replay(
            self.client,
            *(self.keys.dlq, self.keys.stream, self.keys.replays),
            max_stream_len=self._max_stream_len,
            counts_ttl_secs=REPLAY_COUNTS_TTL_SECS,
            letters=letters,
        )

    async def remove_dlq(self, limit: int, query: DlqFilter, on_progress: Callable[[int], None] = _ignore) -> int:
        """Delete up to `limit` dead letters. Return how many were deleted."""
        removed = 0
        async for page in letter_pages(self.client, self.keys, query, limit):
            if page:
                removed += await self.client.call("XDEL", self.keys.dlq, *(letter.dlq_id for letter in page))
                on_progress(removed)
        if removed:
            await self.audit("remove", count=removed)
        return removed

    # --- schedules (repeatable jobs)

    async def upsert_repeatable(self, spec: StoredSpec, *, keep_identical: bool) -> bool:
        """Write a spec and its first fire. Return False if `keep_identical` left an identical one in place."""
        return await calls.upsert_repeatable(
            self.client,
            *(self.keys.repeat, self.keys.repeat_spec(spec.key)),
            next_ms=_first_fire_ms(spec, await self.client.server_time_ms()),
            spec_key=spec.key,
            spec=encode_spec(spec),
            keep_identical=keep_identical,
        )

    async def repeatables(self, limit: int) -> list[RepeatableMeta]:
        """Return up to `limit` repeatable jobs, the next to fire first. Unreadable ones are left out."""
        if limit <= 0:
            return []
        flat = await self.client.call("ZRANGE", self.keys.repeat, 0, limit - 1, "WITHSCORES")
        due = dict(zip(flat[::2], flat[1::2], strict=True))
        spec_keys = [self.keys.repeat_spec(key.decode(errors="surrogateescape")) for key in due]
        specs = await self.client.call_many(
            [("HGET", spec_key.encode(errors="surrogateescape"), "spec") for spec_key in spec_keys]
        )
        metas = []
        for score, packed in zip(due.values(), specs, strict=True):
            with contextlib.suppress(DecodeError):
                metas.append(decode_spec(packed or b"").meta(score_ms(score)))
        return metas

    async def fired_counts(self, metas: Sequence[RepeatableMeta]) -> list[int]:
        """Return how often each repeatable job has fired."""
        counts = await self.client.call_many([("HGET", self.keys.repeat_spec(meta.key), "fired") for meta in metas])
        return [int(count) if count and count.isdigit() else 0 for count in counts]

    async def packed_spec(self, spec_key: str) -> bytes | None:
        """Return the stored spec of a repeatable job, None if there is none with this key."""
        packed: bytes | None = await self.client.call("HGET", self.keys.repeat_spec(spec_key), "spec")
        return packed

    async def remove_repeatable(self, spec_key: str) -> bool:
        """Remove a repeatable job. Return False if there is none with this key."""
        keys = (self.keys.repeat, self.keys.repeat_spec(spec_key))
        is_removed = await calls.remove_repeatable(self.client, *keys, spec_key=spec_key)
        if is_removed:
            await self.audit("delete-schedule", detail=spec_key)
        return is_removed

    # --- the whole queue

    async def exists(self) -> bool:
        """Return True if the queue has any jobs, dead letters, events or schedules, or is paused."""
        keys = self.keys
        own = (keys.stream, keys.delayed, keys.dlq, keys.events, keys.repeat, keys.paused)
        return bool(await self.client.call("EXISTS", *own))

    async def snapshot(self, *, sizes: bool = True, rates: bool = True) -> QueueSnapshot:
        """Return the numbers of jobs and groups of the queue; with `rates`, events per second, with `sizes`, memory."""
        return await take_snapshot(self.client, self.keys, sizes=sizes, rates=rates)

    async def workers(self, *, dead: bool = False) -> list[WorkerInfo]:
        """Return the workers by group and name; with `dead`, also those that are not alive."""
        return await list_workers(self.client, self.keys, dead=dead)

    async def pause(self, task: str | None, reason: str, until: datetime | timedelta | float | None) -> None:
        """Pause the queue, or one task of it."""
        check_text("reason", reason, blank_ok=True)
        left_ms = None if until is None else _left_ms(until)
        if task is None:
            expiry = () if left_ms is None else ("PX", left_ms)
            await self.client.call("SET", self.keys.paused, reason or "1", *expiry)
        else:
            now_ms = await self.client.server_time_ms()
            pauses = decode_pauses(await self.client.call("HGETALL", self.keys.paused_tasks))
            if over := [name for name, found in pauses.items() if found.is_over(now_ms)]:
                await self.client.call("HDEL", self.keys.paused_tasks, *over)
            value = f"{now_ms} {0 if left_ms is None else now_ms + left_ms} {reason}"
            await self.client.call("HSET", self.keys.paused_tasks, check_text("task", task), value)
        await self.audit("pause", detail=": ".join(filter(None, [task and f"task {task}", reason])))

    async def resume(self, task: str | None) -> bool:
        """Resume the queue, or one task of it. Return False if it was not paused."""
        keys = self.keys
        command = ("DEL", keys.paused) if task is None else ("HDEL", keys.paused_tasks, check_text("task", task))
        was_paused = bool(await self.client.call(*command))
        if was_paused:
            await self.audit("resume", detail=f"task {task}" if task else "")
        return was_paused

    async def pause_reason(self, task: str | None = None) -> str | None:
        """Return why the queue or a task is paused: "" if no reason was given, None if it is not paused."""
        if task is not None:
            pause = (await self.paused_tasks()).get(task)
            return None if pause is None else pause.reason
        value = await self.client.call("GET", self.keys.paused)
        return None if value is None else reason_of(value)

    async def paused_tasks(self) -> dict[str, TaskPause]:
        """Return the tasks that are paused now, by name."""
        pauses = decode_pauses(await self.client.call("HGETALL", self.keys.paused_tasks))
        now_ms = await self.client.server_time_ms() if pauses else 0
        return {name: pause for name, pause in pauses.items() if not pause.is_over(now_ms)}

    async def limits(self) -> Limits:
        """Return the limits of the queue."""
        return decode_limits(await self.client.call("HGETALL", self.keys.limits))

    async def read_gate(self) -> GateView:
        """Return the numbers of a limited queue."""
        return await read_gate(self.client, self.keys)

    async def why_held(self, state: JobState) -> list[str]:
        """Return which limits keep a waiting job from running; nothing for a queue without limits."""
        job = None if state.entry_id is None else await self.job_in_stream(state.entry_id)
        return [] if job is None else await why_held(self.client, self.keys, key=job.key, task=job.name)

    async def limit(self, limits: Mapping[str, bytes], detail: str) -> None:
        """Change limits, by field, and apply them; an empty one is removed. Without any, remove all."""
        keys = self.keys
        await set_limits(self.client, keys.gate, keys.due, index_prefix=keys.delayed_index(""), limits=limits)
        await self.audit("limit", detail=detail)

    async def purge(self, *, waiting: bool, delayed: bool, on_progress: Callable[[int], None] = _ignore) -> int:
        """Delete waiting jobs, delayed jobs or both, with their dedup markers and indexes. Return how many.

        Jobs added meanwhile are kept. A long queue is purged in steps, each of which is atomic.
        """
        deleted, delayed_to_go, last = 0, -1 if delayed else 0, b"+" if waiting else b""
        while delayed_to_go or last:
            count, delayed_to_go, last = await calls.purge(
                self.client,
                *(self.keys.stream, self.keys.delayed, self.keys.due),
                tag=self.keys.tag,
                limit=PURGE_BATCH,
                delayed_to_go=delayed_to_go,
                last=last,
            )
            deleted += count
            on_progress(deleted)
        if deleted:
            await self.audit("purge", count=deleted)
        return deleted

    async def jobs_left(self) -> int:
        """Return how many jobs are waiting or running, or due."""
        found = await self.snapshot(sizes=False)
        return found.length + found.due

    async def drain(self, timeout_secs: float | None, on_progress: Callable[[int], None] = _ignore) -> None:
        """Wait until no job is waiting, running or due. Raises `TimeoutError`."""
        async with asyncio.timeout(timeout_secs):
            total = left = await self.jobs_left()
            while left:
                await asyncio.sleep(DRAIN_POLL_SECS)
                left = await self.jobs_left()
                on_progress(max(total - left, 0))
        if total:
            await self.audit("drain", count=total)

    async def delete(self, *, force: bool = False) -> int:
        """Delete every key of the queue and return how many there were.

        Raises `ConfigError` if it still has jobs, dead letters, schedules or live workers, unless `force`.
        """
        if not force:
            await self._check_unused()
        # Write it before the events are deleted, for programs that follow them, and only if there are events.
        await self.audit("delete", create=False)
        return await delete_keys(self.client, self.keys)

    async def _check_unused(self) -> None:
        found = await self.snapshot(sizes=False)
        counts = {
            "waiting": found.waiting,
            "running": found.pending,
            "delayed": found.delayed,
            "dead": found.dlq,
            "scheduled": found.repeatables,
        }
        held = [f"{count:,} {what}" for what, count in counts.items() if count]
        if held:
            raise ConfigError(
                f"queue {self.name!r} still has jobs ({', '.join(held)}): drain or purge it, or pass force=True"
            )
        workers = await self.workers()
        if workers:
            names = ", ".join(worker.name for worker in workers[:5])
            raise ConfigError(f"queue {self.name!r} has live workers ({names}): stop them, or pass force=True")

    # --- events

    async def newest_event_id(self) -> str:
        """Return the ID of the newest event, `0-0` if there is none."""
        return await newest_id(self.client, self.keys.events)

    async def newest_events(
        self, limit: int, matches: Callable[[QueueEvent], bool] | None = None, last_id: str = "+"
    ) -> list[tuple[str, QueueEvent]]:
        """Return the last `limit` events up to `last_id` that match, oldest first, each with its ID."""
        found: list[tuple[str, QueueEvent]] = []
        async for entries in stream_pages(self.client, self.keys.events, high=last_id, newest_first=True):
            for entry_id, fields in entries:
                event = decode_event_fields(fields)
                if matches is None or matches(event):
                    found.append((entry_id.decode(), event))
                    if len(found) >= limit:
                        return found[::-1]
        return found[::-1]

    async def job_events(
        self, job_id: str, on_progress: Callable[[int], None] = _ignore
    ) -> list[tuple[str, QueueEvent]]:
        """Return a job's events, oldest first, each with its ID.

        A ULID's timestamp says where to start; for other IDs all events are read.
        """
        try:
            start = str(max(decode_ulid_time(job_id) - CLOCK_SLACK_MS, 0))
        except DecodeError:
            start = "-"
        found: list[tuple[str, QueueEvent]] = []
        needle = job_id.encode(errors="replace")
        count = 0
        async for entries in stream_pages(self.client, self.keys.events, start):
            for entry_id, fields in entries:
                if needle in fields:
                    event = decode_event_fields(fields)
                    if event.job_id == job_id:
                        found.append((entry_id.decode(), event))
            count += len(entries)
            on_progress(count)
        return found


async def delete_keys(client: Client, keys: QueueKeys) -> int:
    """Delete every key of a queue, and its name in the list of queues. Return how many keys there were."""
    deleted = 0
    if client._settings.kind != "cluster":  # there the list is not written
        with contextlib.suppress(ServerError):  # a user of one queue may not write it
            await client.call("HDEL", REGISTRY, keys.queue_name)
    batch: list[bytes] = []
    async for key in scan_keys(client, literal_glob(keys.tag) + ":*"):
        batch.append(key)
        if len(batch) >= PURGE_BATCH:
            deleted += await client.call("UNLINK", *batch)
            batch = []
    return deleted + (await client.call("UNLINK", *batch) if batch else 0)


def _first_fire_ms(spec: StoredSpec, now_ms: int) -> int:
    """Return the first fire of a spec registered now, in epoch milliseconds. Raises `ConfigError` if it never fires."""
    first = spec.pattern.next_fire_ms(max(now_ms, spec.start_after_ms or 0))
    if first is None:
        raise ConfigError(f"pattern {spec.pattern.signature()!r} never fires again: it has no time in the future")
    if spec.end_before_ms is not None and first > spec.end_before_ms:
        raise ConfigError(f"end_before_ms must not be before the first fire ({first}); got {spec.end_before_ms}")
    return first


def _left_ms(until: datetime | timedelta | float) -> int:
    """Return the milliseconds until a pause ends, at least 1."""
    if isinstance(until, datetime):
        instant = until if until.tzinfo is not None else until.replace(tzinfo=UTC)
        return max(int(instant.timestamp() * 1000) - wall_clock_ms(), 1)
    return max(check_delay_ms(until, "until"), 1)
