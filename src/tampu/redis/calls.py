"""Call the Lua scripts: one function each, with the script's KEYS and ARGV as parameters and its reply as the result.

The header of each file in `lua/` documents the script and its reply. The scripts that run for every window of jobs are
packed where the windows are built, in `tampu.produce.window` and `tampu.consume.settle`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tampu.errors import RedisError
from tampu.redis.faults import ServerError
from tampu.redis.scripts import load_script

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tampu.redis.client import Client
    from tampu.redis.connection import Part

LEAD = load_script("lead")
RESIGN = load_script("resign")
PROMOTE = load_script("promote")
FIRE = load_script("fire")
SET_ASIDE = load_script("set_aside")
UPSERT_REPEATABLE = load_script("upsert_repeatable")
REMOVE_REPEATABLE = load_script("remove_repeatable")
REPLAY = load_script("replay")
CANCEL_DELAYED = load_script("cancel_delayed")
CANCEL_JOB = load_script("cancel_job")
PURGE = load_script("purge")
RENEW_LEASES = load_script("renew_leases")
RECLAIM = load_script("reclaim")
MARK_STARTED = load_script("mark_started")
HAND_BACK = load_script("hand_back")
FORGET_CONSUMER = load_script("forget_consumer")
SWEEP = load_script("sweep")
DEBOUNCE = load_script("debounce")

#: Added to the delivery count of an entry when its last attempt starts.
START_MARK = 1_000_000_000

#: The scripts that each of these parts needs.
PROMOTER_SCRIPTS = (LEAD, RESIGN, PROMOTE)
SCHEDULER_SCRIPTS = (LEAD, RESIGN, FIRE, SET_ASIDE)
INSPECT_SCRIPTS = (CANCEL_DELAYED, CANCEL_JOB, PURGE, REPLAY, UPSERT_REPEATABLE, REMOVE_REPEATABLE)
CONSUMER_SCRIPTS = (RENEW_LEASES, RECLAIM, MARK_STARTED, HAND_BACK, FORGET_CONSUMER)


async def existing(client: Client, keys: Sequence[str]) -> list[bool | RedisError]:
    """Return whether each key exists, in order; an error for a key that an ACL forbids.

    One command if all of them exist or none does, however many there are.
    """
    if not keys:
        return []
    try:
        found = await client.call("EXISTS", *keys)
    except ServerError as error:
        if len(keys) == 1:
            return [error]
    else:
        if found in (0, len(keys)):
            return [bool(found)] * len(keys)
    replies = await client.call_each([("EXISTS", key) for key in keys])
    return [reply if isinstance(reply, RedisError) else bool(reply) for reply in replies]


# --- the lock of a promoter or a scheduler


async def lead(client: Client, lock: str, *, holder: str, ttl_secs: int) -> int:
    """Acquire or renew a lock. Return 0 if `holder` has it, else the ms until it expires; -1 if it has no TTL."""
    others_for_ms: int = await client.run(LEAD, (lock,), (holder, ttl_secs), patience_secs=ttl_secs)
    return others_for_ms


async def resign(client: Client, lock: str, *, holder: str, patience_secs: float) -> None:
    """Release a lock if `holder` has it."""
    await client.run(RESIGN, (lock,), (holder,), patience_secs=patience_secs)


# --- promoting


class Promoted(NamedTuple):
    """The result of one call, and what it left in the delayed set."""

    now_ms: int
    #: Number of members left.
    depth: int
    #: When the first of them is due, in epoch ms; infinity if there is none.
    earliest_ms: float
    promoted: int
    #: Unreadable members that were dead-lettered.
    buried: int
    is_full: bool
    #: Why an unreadable member could not be dead-lettered; '' if none failed.
    failure: str

    @property
    def lag_ms(self) -> float:
        """Return how long the earliest member has been due."""
        return max(self.now_ms - self.earliest_ms, 0.0)


async def promote(
    client: Client,
    delayed: str,
    stream: str,
    dlq: str,
    events: str,
    due: str,
    *,
    max_members: int,
    max_bytes: int,
    max_stream_len: int,
    keep_events: int,
    keep_letters: int,
    index_prefix: str,
) -> Promoted:
    """Move due members into the stream."""
    now, depth, earliest, promoted, buried, is_full, failure = await client.run(
        PROMOTE,
        (delayed, stream, dlq, events, due),
        (max_members, max_bytes, max_stream_len, keep_events, keep_letters, index_prefix),
    )
    # Other clients can store any double as a score, including negative ones.
    earliest_ms = max(float(earliest), 0.0) if earliest else float("inf")
    return Promoted(
        *(int(now), depth, earliest_ms, promoted, buried, bool(is_full)), failure=failure.decode(errors="replace")
    )


# --- debounced and throttled jobs


async def debounce(
    client: Client,
    keys: Sequence[str],
    *,
    job_id: str,
    member: bytes,
    quiet_ms: int,
    at_most_ms: int | None,
    ttl_secs: int,
) -> bool:
    """Add or replace a delayed job. Without `at_most_ms`, it is throttled to one in `quiet_ms`.

    `keys` are those of the script. Return True if a delayed job was replaced.
    """
    kind, most = ("t", 0) if at_most_ms is None else ("d", at_most_ms)
    return bool(await client.run(DEBOUNCE, keys, (kind, quiet_ms, most, member, job_id, ttl_secs)))


# --- repeatable jobs


async def fire(
    client: Client,
    stream: str,
    delayed: str,
    repeat: str,
    spec_hash: bytes | str,
    wake: str,
    *,
    score: Part,
    next_ms: int | None,
    max_stream_len: int,
    spec_key: bytes | str,
    limit: int,
    spec: bytes,
    job_name: str,
    fires: Iterable[tuple[int, bytes]],
) -> tuple[int, str]:
    """Write the jobs of a repeatable, each with its fire time (ms), and its next fire (None = it does not fire again).

    `score` and `spec` are those that were read; `limit` 0 means no limit. Return the number of jobs written, -1 if the
    spec has changed since it was read, and the error of the first job that could not be written, '' if none failed.
    """
    count, _, failure = await client.run(
        FIRE,
        (stream, delayed, repeat, spec_hash, wake),
        (score, _or_empty(next_ms), max_stream_len, spec_key, limit, spec, job_name, *_flat(fires)),
    )
    return count, failure.decode(errors="replace")


async def set_aside(
    client: Client, repeat: str, spec_hash: bytes, *, spec_key: bytes, score: bytes, spec: bytes
) -> bool:
    """Remove an unreadable repeatable from the schedule. Return False if it was replaced since it was read."""
    return bool(await client.run(SET_ASIDE, (repeat, spec_hash), (spec_key, score, spec)))


async def upsert_repeatable(
    client: Client, repeat: str, spec_hash: str, *, next_ms: int, spec_key: str, spec: bytes, keep_identical: bool
) -> bool:
    """Register a repeatable. Return False if an identical one existed and was kept."""
    arguments = (next_ms, spec_key, spec, "1" if keep_identical else "0")
    return bool(await client.run(UPSERT_REPEATABLE, (repeat, spec_hash), arguments))


async def remove_repeatable(client: Client, repeat: str, spec_hash: str, *, spec_key: str) -> bool:
    """Remove a repeatable. Return False if it did not exist."""
    return bool(await client.run(REMOVE_REPEATABLE, (repeat, spec_hash), (spec_key,)))


# --- waiting jobs and dead letters


async def replay(
    client: Client,
    dlq: str,
    stream: str,
    replays: str,
    *,
    max_stream_len: int,
    counts_ttl_secs: int,
    letters: Iterable[tuple[str, bytes, str, str]],
) -> tuple[int, bool]:
    """Move dead letters back into the stream. `letters` has the id, envelope, job name and job id of each.

    Return how many were moved, and whether the stream is full. A resend after a lost reply finds the letters gone and
    moves nothing twice, but its count is then too low.
    """
    arguments = (max_stream_len, counts_ttl_secs, *_flat(letters))
    moved, is_full = await client.run(REPLAY, (dlq, stream, replays), arguments)
    return moved, bool(is_full)


async def cancel_delayed(
    client: Client, delayed: str, index: str, marker: str, due: str, *, job_id: str, member: bytes | None = None
) -> bool | None:
    """Cancel a delayed job and return whether it was still delayed; None if its `member` must be searched for.

    Not resent after a lost connection: a second call could not know whether the first one cancelled the job.
    """
    reply = await client.run(CANCEL_DELAYED, (delayed, index, marker, due), (_or_empty(member), job_id), resend=False)
    return None if reply == -1 else bool(reply)


async def cancel_job(
    client: Client,
    delayed: str,
    index: str,
    marker: str,
    mark: str,
    marks: str,
    events: str,
    due: str,
    *,
    job_id: str,
    reason: str,
    ttl_secs: int,
    member: bytes | None = None,
    is_in_stream: bool = False,
) -> int:
    """Cancel a delayed job, or mark one that `is_in_stream`. Return 1 if it is cancelled, 2 if marked, else 0."""
    keys = (delayed, index, marker, mark, marks, events, due)
    arguments = (_or_empty(member), job_id, reason, "1" if is_in_stream else "0", ttl_secs)
    done: int = await client.run(CANCEL_JOB, keys, arguments)
    return done


async def purge(
    client: Client, stream: str, delayed: str, due: str, *, tag: str, limit: int, delayed_to_go: int, last: bytes
) -> tuple[int, int, bytes]:
    """Delete up to `limit` waiting and `limit` delayed jobs.

    Return how many were deleted, and `delayed_to_go` and `last` for the next call. The first call passes -1 and b"+".
    """
    deleted, delayed_to_go, last = await client.run(PURGE, (stream, delayed, due), (tag, limit, delayed_to_go, last))
    return deleted, delayed_to_go, last


# --- entries of a consumer group


class Membership(NamedTuple):
    """A consumer of a group, and the durations with which the group detects a stall of the server."""

    stream: str
    alive: str
    grace: str
    takeovers: str
    leases: str
    group: str
    consumer: str
    #: How long its leases last without a renewal.
    lease_ms: int
    #: If no worker renewed a lease for this long, the server has stalled.
    stall_ms: int
    #: How long live workers have to renew their leases after a stall.
    grace_ms: int

    @property
    def _keys(self) -> tuple[str, str, str]:
        return self.stream, self.alive, self.grace

    @property
    def _arguments(self) -> tuple[Part, ...]:
        return self.group, self.consumer, self.stall_ms, self.grace_ms


async def renew_leases(
    client: Client,
    member: Membership,
    *,
    ids: Sequence[bytes],
    everything: bool = False,
    patience_secs: float,
) -> list[bytes]:
    """Renew the leases of `ids` (oldest first), or of `everything` that is pending. Return the ids it does not own."""
    keys = (*member._keys, member.leases)
    arguments = (*member._arguments, "1" if everything else "0", member.lease_ms, *ids)
    lost: list[bytes] = await client.run(RENEW_LEASES, keys, arguments, patience_secs=patience_secs)
    return lost


def packed_start_mark(stream: str, *, group: str, consumer: str, entry_id: bytes) -> bytes:
    """Return the packed call that marks the start of an entry's last attempt."""
    return MARK_STARTED.packed_call((stream,), (group, consumer, START_MARK, entry_id))


class Reclaimed(NamedTuple):
    """The entries that one call reclaimed."""

    #: The server's time.
    now_ms: int
    #: Entry id, fields and earlier deliveries of each. Deliveries include `START_MARK` if the last attempt had started.
    entries: list[tuple[bytes, list[bytes], int]]
    #: Number of pending ids whose entries no longer exist.
    swept: int


async def reclaim(
    client: Client,
    member: Membership,
    *,
    not_after_ms: int,
    exclusive_ms: int,
    wanted_class: int,
    room: tuple[int, int, int],
    except_ids: Iterable[bytes],
) -> Reclaimed:
    """Reclaim entries whose leases have expired, unless the server's time is later than `not_after_ms`.

    `room` is the maximum number of entries of each class; `wanted_class` 0 takes the class of the first entry.
    """
    times = (not_after_ms, member.lease_ms, START_MARK, exclusive_ms)
    arguments = (*member._arguments, *times, wanted_class, *room, *except_ids)
    return Reclaimed(*await client.run(RECLAIM, (*member._keys, member.takeovers, member.leases), arguments))


def packed_sweep(streams: Sequence[str], *, group: str, consumer: str, room: int, most: Sequence[int]) -> bytes:
    """Return the packed call that reads new entries, up to `most` of each stream and `room` in total."""
    return SWEEP.packed_call(streams, (group, consumer, room, *most))


async def hand_back(
    client: Client,
    stream: str,
    *,
    group: str,
    consumer: str,
    has_xackdel: bool,
    most_deliveries: int,
    min_idle_ms: int,
    entry_ids: Iterable[bytes],
) -> None:
    """Hand back entries that were not started.

    Those that were taken over keep the count of their worker deaths and can be reclaimed at once. Entries delivered
    more than `most_deliveries` times by now are kept; 0 means any number. Not resent after a lost connection: if the
    call was not executed, the entries are reclaimed when their leases expire.
    """
    xackdel = "1" if has_xackdel else "0"
    arguments: tuple[Part, ...] = (group, consumer, xackdel, most_deliveries, START_MARK, min_idle_ms, *entry_ids)
    await client.run(HAND_BACK, (stream,), arguments, resend=False)


async def forget_consumer(client: Client, stream: str, leases: str, *, group: str, consumer: str) -> None:
    """Delete a consumer's name if it has no pending entries."""
    await client.run(FORGET_CONSUMER, (stream, leases), (group, consumer))


def _flat(rows: Iterable[tuple[Part, ...]]) -> list[Part]:
    return [part for row in rows for part in row]


def _or_empty(value: int | bytes | None) -> Part:
    return "" if value is None else value
