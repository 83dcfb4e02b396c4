"""The Lua scripts of the connector as functions: the signature is the contract, the result is the packed call.

The scripts and their replies are documented in `redis/lua/`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tampu.inspect.dead_letters import REPLAY_COUNTS_TTL_SECS
from tampu.redis.scripts import load_script

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tampu.spark.read.offsets import EntryId
    from tampu.wire.keys import QueueKeys

STEP = load_script("spark_split")
LOOK = load_script("spark_look")
REPLAY = load_script("replay")


# --- reading


def step(key: str, first: EntryId, last: EntryId, max_entries: int) -> bytes:
    """Count a step. Reply: [entries, ID of the last one]; [0, ""] if there are none."""
    return STEP.packed_call((key,), (str(first), str(last), max_entries))


def look(key: str, first: EntryId, last: EntryId, max_entries: int) -> bytes:
    """Look at both ends. Reply: [entries] up to `max_entries`; else [first ID, last ID, per end: entries, their ms]."""
    return LOOK.packed_call((key,), (str(first), str(last), max_entries))


# --- writing


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
