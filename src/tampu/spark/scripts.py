"""The Lua scripts of the connector as functions: the signature is the contract, the result is the packed call.

The scripts and their replies are documented in `redis/lua/`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tampu.inspect.dead_letters import REPLAY_COUNTS_TTL_SECS
from tampu.redis.scripts import load_script

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tampu.redis.connection import Part
    from tampu.spark.read.offsets import EntryId
    from tampu.wire.keys import QueueKeys

STEP = load_script("spark_split")
LOOK = load_script("spark_look")
ADD = load_script("spark_add")
REPLAY = load_script("replay")


# --- reading


def step(key: str, first: EntryId, last: EntryId, max_entries: int) -> bytes:
    """Count a step. Reply: [entries, ID of the last one]; [0, ""] if there are none."""
    return STEP.packed_call((key,), (str(first), str(last), max_entries))


def look(key: str, first: EntryId, last: EntryId, max_entries: int) -> bytes:
    """Look at both ends. Reply: [entries] up to `max_entries`; else [first ID, last ID, per end: entries, their ms]."""
    return LOOK.packed_call((key,), (str(first), str(last), max_entries))


# --- writing


class Chunk(NamedTuple):
    """Identity of a chunk of jobs, and its limits."""

    marker: str
    #: Number of the chunk in its partition; -1 adds it without a marker.
    number: int
    digest: str
    marker_ttl_secs: int
    #: Length of the stream at which nothing is added.
    max_waiting: int


class NewJob(NamedTuple):
    """One job of a chunk."""

    id: str
    name: str
    envelope: bytes
    #: Whether a second job with this ID is skipped.
    is_id_explicit: bool
    #: Epoch milliseconds; None for a job that runs now.
    due_ms: int | None


def add_alike(keys: QueueKeys, chunk: Chunk, name: str, envelopes: Sequence[bytes]) -> bytes:
    """Add jobs that run now and share a name.

    Reply: [ok, added, duplicates], [done], [differs], [gap, number of the last chunk] or [full, length].
    """
    used = (chunk.marker, keys.stream, keys.delayed, keys.wake, keys.due)
    return ADD.packed_call(used, (*chunk[1:], len(envelopes), b"same", name, *envelopes))


def add_each(keys: QueueKeys, chunk: Chunk, jobs: Sequence[NewJob]) -> bytes:
    """Add jobs of any kind. Replies are those of `add_alike`."""
    used = [chunk.marker, keys.stream, keys.delayed, keys.wake, keys.due]
    parts: list[Part] = [*chunk[1:], len(jobs), b"each"]
    for job_id, name, envelope, is_id_explicit, due_ms in jobs:
        if is_id_explicit:
            used += (keys.dedup_marker(job_id), keys.cancel_mark(job_id))
        if due_ms is None:
            parts += (b"i" if is_id_explicit else b"n", name, envelope)
        else:
            if is_id_explicit:
                used.append(keys.delayed_index(job_id))
            parts += (b"e" if is_id_explicit else b"d", name, envelope, due_ms)
    return ADD.packed_call(used, parts)


class Replayed(NamedTuple):
    """A dead letter to replay, as the job it becomes."""

    entry_id: str
    envelope: bytes
    name: str
    job_id: str


def replay(keys: QueueKeys, max_waiting: int, letters: Sequence[Replayed]) -> bytes:
    """Replay letters. Reply: [letters moved, 1 if the stream is full]."""
    parts = [part for letter in letters for part in letter]
    return REPLAY.packed_call((keys.dlq, keys.stream, keys.replays), (max_waiting, REPLAY_COUNTS_TTL_SECS, *parts))
