"""Cuts a stream into partitions of about the same size. Redis cannot return the middle of a stream.

Short ranges are walked over in steps, which counts them exactly. Long ones are estimated: the time between the ends is
halved where many entries seem to lie, and the density at both ends of a part gives its number of entries. If the sum
does not fit the length of the stream, the range is walked over after all. Either way partitions are contiguous, so each
entry is in exactly one of them.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tampu.base.checks import MAX_U64
from tampu.redis.scripts import load_script
from tampu.spark.read.offsets import EntryId, parse_entry_id

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tampu.redis.client import Client
    from tampu.spark.server import QueueServer

_SPLIT = load_script("spark_split")
_LOOK = load_script("spark_look")
SCRIPTS = (_SPLIT, _LOOK)

#: Entries in one step of a walk; a longer step would block the server for too long.
STEP = 1_000
#: Entries of one partition, unless `minPartitions` asks for smaller ones.
ROWS_PER_PARTITION = 50_000
#: Minimum number of partitions of a read of some size, so that all cores of a small machine have work.
FEW_PARTITIONS = 4

#: A range with fewer entries is walked over: that takes no longer than estimating.
WORTH_ESTIMATING = 20 * STEP
#: Entries looked at on either end of a part, and the number of initial parts.
LOOK = 32
FIRST_PARTS = 16
#: Steps and parts are this many times smaller than a partition, so that partitions come out about equal.
PARTS_PER_PARTITION = 4
#: At most one look per this many entries: with more looks, walking is as fast.
ENTRIES_PER_LOOK = 250
#: Range of (sum of estimates / true length) in which estimates are accepted.
LEAST_EXPLAINED, MOST_EXPLAINED = 0.8, 3.0


@dataclass(frozen=True, slots=True)
class Span:
    """A range of one queue's stream, both ends included, that one task reads. `rows` may be an estimate."""

    queue: str
    first: EntryId
    last: EntryId
    rows: int = 0


def split(
    server: QueueServer, key: str, first: EntryId, last: EntryId, rows: int | None, min_partitions: int
) -> list[Span]:
    """Return the partitions of a stream from `first` to `last`. `rows` is their number of entries, None if unknown."""
    steps = None
    if rows is not None and rows >= WORTH_ESTIMATING:
        steps = _estimate(server, key, first, last, rows, partitions_for(rows, min_partitions))
    if steps is None:
        steps = walk(server, key, first, last)
    return join(server, key, steps, min_partitions)


def walk(
    server: QueueServer, key: str, first: EntryId, last: EntryId, most: int | None = None, step: int | None = None
) -> list[Span]:
    """Return the stream from `first` to `last`, at most `most` entries, in counted steps of at most `step` entries."""
    step = step or STEP
    steps: list[Span] = []
    taken = 0
    while first <= last and (most is None or taken < most):
        size = step if most is None else min(step, most - taken)
        count, end = server.send(_SPLIT.packed_call((key,), (str(first), str(last), size)))
        if not count:
            break
        taken += count
        # The last step ends at `last`: nothing lies between, but spans must be contiguous.
        stop = parse_entry_id(end) if count == size else last
        steps.append(Span(server.keys.queue_name, first, stop, count))
        first = stop.next
    return steps


def join(server: QueueServer, key: str, steps: list[Span], min_partitions: int) -> list[Span]:
    """Return partitions made of these steps; walk again in smaller steps if there are too few for `min_partitions`."""
    if 0 < len(steps) < min_partitions:
        total = sum(step.rows for step in steps)
        size = max(total // (PARTS_PER_PARTITION * min_partitions), 1)
        steps = walk(server, key, steps[0].first, steps[-1].last, step=size)
    return cut(steps, min_partitions)


def partitions_for(rows: int, min_partitions: int) -> int:
    """Return the number of partitions for this many entries."""
    return max(min_partitions, -(-rows // ROWS_PER_PARTITION))


def cut(steps: Sequence[Span], min_partitions: int) -> list[Span]:
    """Join the steps of one queue into partitions of about the same size."""
    if not steps:
        return []
    total = sum(step.rows for step in steps)
    wanted = max(partitions_for(total, min_partitions), min(FEW_PARTITIONS, len(steps)))
    parts: list[Span] = []
    start, rows, seen = steps[0].first, 0, 0
    for number, step in enumerate(steps, 1):
        rows += step.rows
        seen += step.rows
        # By the sum of all rows so far, not of this partition: rounding up each one would leave too few partitions.
        if seen * wanted >= total * (len(parts) + 1) or number == len(steps):
            parts.append(Span(step.queue, start, step.last, rows))
            start, rows = step.last.next, 0
    return parts


@dataclass(frozen=True, slots=True)
class _Part:
    """A range of time, narrowed to its entries. `is_known`: counted, or within one millisecond."""

    first: EntryId
    last: EntryId
    rows: float
    is_known: bool

    def pieces(self, count: int = 2) -> list[tuple[EntryId, EntryId]]:
        """Cut into ranges of the same length; fewer if there are fewer milliseconds."""
        start = self.first.ms
        width = self.last.ms - start + 1
        count = min(count, width)
        edges = [start + width * number // count for number in range(count + 1)]
        found = [(EntryId(low, 0), EntryId(high - 1, MAX_U64)) for low, high in itertools.pairwise(edges)]
        found[0] = (self.first, found[0][1])
        found[-1] = (found[-1][0], self.last)
        return found


def _estimate(
    server: QueueServer, key: str, first: EntryId, last: EntryId, rows: int, partitions: int
) -> list[Span] | None:
    """Return parts with estimated numbers of entries; None if the estimates do not fit the length of the stream."""
    looks_left = rows // ENTRIES_PER_LOOK
    largest = rows / (PARTS_PER_PARTITION * partitions)
    parts: list[_Part] = []
    pieces = _Part(first, last, rows, is_known=False).pieces(FIRST_PARTS)
    while pieces:
        looks_left -= len(pieces)
        if looks_left < 0:
            return None
        pieces_now, pieces = pieces, []
        for part in server.do(lambda client, wanted=pieces_now: _look(client, key, wanted)):  # type: ignore[misc]
            if part.is_known or part.rows <= largest:
                parts.append(part)
            else:
                pieces += part.pieces()
        if not pieces and sum(part.rows for part in parts) < LEAST_EXPLAINED * rows:
            # There are entries where no look saw any: look everywhere once more.
            pieces = [piece for part in parts if not part.is_known for piece in part.pieces()]
            parts = [part for part in parts if part.is_known]
            if not pieces:
                return None
    if sum(part.rows for part in parts) > MOST_EXPLAINED * rows:
        return None
    if max(part.rows for part in parts) > PARTS_PER_PARTITION * largest:
        return None  # more than a partition within one millisecond, which time cannot cut
    parts.sort(key=lambda part: part.first)
    queue = server.keys.queue_name
    ends = [part.last for part in parts[:-1]] + [last]
    starts = [first] + [end.next for end in ends[:-1]]
    return [Span(queue, start, end, round(part.rows)) for start, end, part in zip(starts, ends, parts, strict=True)]


async def _look(client: Client, key: str, pieces: list[tuple[EntryId, EntryId]]) -> list[_Part]:
    """Look at all pieces concurrently."""
    calls = (_LOOK.packed_call((key,), (str(first), str(last), LOOK)) for first, last in pieces)
    replies = await asyncio.gather(*map(client.send, calls))
    return [_part(first, last, reply) for (first, last), reply in zip(pieces, replies, strict=True)]


def _part(first: EntryId, last: EntryId, reply: list[Any]) -> _Part:
    if len(reply) == 1:
        return _Part(first, last, reply[0], is_known=True)
    first, last = parse_entry_id(reply[0]), parse_entry_id(reply[1])
    head_rows, head_width, tail_rows, tail_width = reply[2:]
    width = last.ms - first.ms + 1
    # The larger estimate: a part with fewer entries than estimated is only cut once more.
    rows = width * max(head_rows / max(1, head_width), tail_rows / max(1, tail_width))
    return _Part(first, last, rows, is_known=width == 1)
