"""Counts and times of runs, as workers write them: cells of counts by task, and the line of a queue's last hour.

A cell is a MessagePack map: task -> [[succeeded, retried, dead, cancelled], run times, waiting times]. Times are
histograms with two buckets for each power of two, as flat lists of bucket and count: runs in microseconds, waits in
milliseconds. Later versions may append to these arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgpack

#: Largest bucket: 2**45 us is more than a year.
LAST_BUCKET = 91
#: Task names in one cell; further tasks are counted together, as `OTHER`.
MAX_NAMES = 50
OTHER = "(other)"
#: Minutes, and tens of minutes, that a series keeps.
MINUTES, TENS = 60, 144


def bucket(value: int) -> int:
    """Return the bucket of a whole number that is not negative."""
    bits = value.bit_length()
    return min(2 * bits + (value >> (bits - 2) & 1), LAST_BUCKET) if bits > 1 else bits


def bounds(index: int) -> tuple[float, float]:
    """Return the ends of a bucket."""
    if index < 2:
        return (0.0, float(index))
    bits, half = divmod(index, 2)
    size = 2.0 ** (bits - 2)
    return 2.0 ** (bits - 1) + size * half, 2.0 ** (bits - 1) + size * (half + 1)


class Counts:
    """What is counted of the runs of one task."""

    __slots__ = ("kinds", "runs", "waits")

    def __init__(self) -> None:
        #: Runs that succeeded, failed and are retried, failed for good, and were cancelled.
        self.kinds = [0, 0, 0, 0]
        #: Run times in microseconds and waiting times in milliseconds: count by bucket.
        self.runs: dict[int, int] = {}
        self.waits: dict[int, int] = {}

    def time(self, weight: int, run_us: int, wait_ms: int | None) -> None:
        """Record the times of one run, which stand for those of `weight` runs."""
        index = bucket(run_us)
        self.runs[index] = self.runs.get(index, 0) + weight
        if wait_ms is not None:
            index = bucket(wait_ms)
            self.waits[index] = self.waits.get(index, 0) + weight

    @property
    def ok(self) -> int:
        """Return the runs that succeeded."""
        return self.kinds[0]

    @property
    def dead(self) -> int:
        """Return the runs that failed for good."""
        return self.kinds[2]

    @property
    def failed(self) -> int:
        """Return the runs that failed."""
        return self.kinds[1] + self.kinds[2]

    @property
    def total(self) -> int:
        """Return the runs that succeeded or failed."""
        return self.kinds[0] + self.failed

    @property
    def failed_share(self) -> float:
        """Return the share of runs that failed."""
        return self.failed / self.total if self.total else 0.0

    def run_ms(self, share: float) -> float | None:
        """Return a percentile of the run times in milliseconds; None without any."""
        found = percentile(self.runs, share)
        return None if found is None else found / 1000

    def wait_ms(self, share: float) -> float | None:
        """Return a percentile of the waiting times in milliseconds; None without any."""
        return percentile(self.waits, share)

    def add(self, other: Counts) -> None:
        """Add other counts to these."""
        self.kinds = [mine + theirs for mine, theirs in zip(self.kinds, other.kinds, strict=True)]
        for mine, theirs in ((self.runs, other.runs), (self.waits, other.waits)):
            for index, count in theirs.items():
                mine[index] = mine.get(index, 0) + count


Cell = Mapping[str, Counts]


def percentile(counts: Mapping[int, int], share: float) -> float | None:
    """Return a percentile, interpolated inside its bucket."""
    rank, seen = share * sum(counts.values()), 0
    for index in sorted(counts):
        count = counts[index]
        if count and seen + count >= rank:
            low, high = bounds(index)
            return low + (high - low) * (rank - seen) / count
        seen += count
    return None


def merge(cells: Iterable[Cell]) -> dict[str, Counts]:
    """Return the sum of cells."""
    total: dict[str, Counts] = {}
    for cell in cells:
        for name, counts in cell.items():
            if name not in total and len(total) >= MAX_NAMES:
                name = OTHER
            total.setdefault(name, Counts()).add(counts)
    return total


def sum_of(cell: Cell) -> Counts:
    """Return the counts of all tasks of a cell together."""
    total = Counts()
    for counts in cell.values():
        total.add(counts)
    return total


def encode_cell(cell: Cell) -> bytes:
    """Return a cell as bytes."""
    packed: bytes = msgpack.packb({name: [one.kinds, _flat(one.runs), _flat(one.waits)] for name, one in cell.items()})
    return packed


def decode_cell(packed: bytes | None) -> dict[str, Counts]:
    """Return a cell; an empty one for bytes that are not one: a bad cell must not hide the others."""
    cell: dict[str, Counts] = {}
    try:
        for name, (kinds, runs, waits, *_) in msgpack.unpackb(packed).items() if packed else ():
            one = cell[_text(name)] = Counts()
            one.kinds = [_number(count) for count in kinds[:4]] + [0] * (4 - len(kinds[:4]))
            one.runs, one.waits = _histogram(runs), _histogram(waits)
    except (ValueError, TypeError, AttributeError, RecursionError, msgpack.UnpackException):
        return {}
    return cell


class Minute(NamedTuple):
    """One minute of a queue. The state of the queue is None if it was not noted."""

    #: In minutes since the epoch.
    at: int
    ok: int = 0
    failed: int = 0
    dead: int = 0
    #: Bucket of the 95th percentile of the run times; 0 if no run was timed.
    p95: int = 0
    waiting: int | None = None
    oldest_ms: int | None = None
    delayed: int | None = None
    letters: int | None = None


def encode_line(line: Iterable[Minute]) -> bytes:
    """Return the line of a queue as bytes."""
    packed: bytes = msgpack.packb([list(minute) for minute in line])
    return packed


def decode_line(packed: bytes | None) -> dict[int, Minute]:
    """Return the minutes of a line by their number; none for bytes that are not a line."""
    try:
        rows = [Minute(*map(_number, row[:5]), *row[5:9]) for row in (msgpack.unpackb(packed) if packed else ())]
        return {row.at: row for row in rows if all(value is None or _number(value) >= 0 for value in row)}
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException):
        return {}


def _flat(counts: Mapping[int, int]) -> list[int]:
    return [part for index in sorted(counts) for part in (index, counts[index])]


def _histogram(flat: Any) -> dict[int, int]:
    pairs = zip(flat[::2], flat[1::2], strict=True)
    return {min(_number(index), LAST_BUCKET): _number(count) for index, count in pairs}


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("not text")
    return value


def _number(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**53:
        raise TypeError("not a whole number")
    return value
