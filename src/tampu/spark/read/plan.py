"""Plans reads on the driver: the partitions of a batch, and where each micro-batch of a stream ends.

An offset holds, per queue, the id last read and how many entries were ever added up to it: from that, entries that were
trimmed before they were read are counted exactly.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tampu.spark.read.offsets import (
    BEFORE_ALL,
    Extent,
    Position,
    count_between,
    extent_of,
    find_gap,
    report_gap,
    starting_position,
    stream_key,
)
from tampu.spark.read.partitions import SCRIPTS, Span, join, split, walk
from tampu.spark.server import QueueServer

if TYPE_CHECKING:
    from tampu.spark.options import ReadOptions

    Offsets = dict[str, Any]


def plan_batch(options: ReadOptions) -> list[Span]:
    """The partitions of a batch read: all that is there now."""
    spans: list[Span] = []
    for queue in options.queues:
        with QueueServer(options.url, queue, SCRIPTS) as server:
            key = stream_key(server.keys, options.stream)
            extent = extent_of(server, key)
            start = starting_position(options, queue, extent)
            last = min(options.ending.get(queue, extent.last_generated), extent.last_generated)
            if options.stream != "jobs":  # where jobs are deleted when they are done
                report_gap(
                    find_gap(queue, options.stream, start, Position(last), extent), fail=options.fail_on_data_loss
                )
            rows = count_between(start, Position(last), extent)
            least = -(-options.min_partitions // len(options.queues))
            spans += split(server, key, start.id.next, last, rows, least)
    return spans


class StreamPlanner:
    """Plans the micro-batches of one streaming query."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._servers = {queue: QueueServer(options.url, queue, SCRIPTS) for queue in options.queues}
        self._stop_at: dict[str, Position] = {}
        #: The offset returned last, for versions of PySpark that do not pass the start of the next micro-batch.
        self._returned: Offsets = {}

    def close(self) -> None:
        """Close the connections."""
        for server in self._servers.values():
            server.close()
        self._servers = {}

    def initial(self) -> Offsets:
        """Return the offset at which a new query starts."""
        return {
            queue: starting_position(self._options, queue, self._extent(queue)).to_json()
            for queue in self._options.queues
        }

    def newest(self) -> Offsets:
        """Return the offset behind everything that is present."""
        return {queue: self._extent(queue).end.to_json() for queue in self._options.queues}

    def stop_at_now(self) -> None:
        """Ignore entries that are added from now on."""
        self._stop_at = {queue: self._extent(queue).end for queue in self._options.queues}

    def latest(self, start: Offsets | None, most: int | None) -> Offsets:
        """Return the end of the next micro-batch: at most `most` entries behind `start`, shared by the queues.

        The offset also holds where the micro-batch is cut into partitions. Spark logs it before it plans, so a
        micro-batch that is run again after a crash has the same partitions with the same rows.
        """
        start = self._returned if start is None else start
        # Queues of earlier runs that are not read now keep their offsets. Without them, a query on queue a, then b,
        # then a again would read all of a twice.
        found: Offsets = dict(start)
        extents = {queue: self._extent(queue) for queue in self._options.queues}
        begins = {queue: self._begin(start, queue, extent) for queue, extent in extents.items()}
        left = most
        # Shortest backlog first: what a queue leaves of its share goes to the others.
        by_backlog = sorted(extents, key=lambda queue: _backlog(begins[queue], extents[queue]))
        for number, queue in enumerate(by_backlog):
            begin, end = begins[queue], self._stop_at.get(queue, extents[queue].end)
            # An offset that differs from the start makes Spark run a micro-batch: without news it stays as it was.
            found.setdefault(queue, begin.to_json())
            if end.id > begin.id:
                share = None if left is None else -(-left // (len(extents) - number))
                end, taken = self._end(queue, begin, end, extents[queue], share)
                left = None if left is None else left - taken
                found[queue] = end.to_json()
        self._returned = found
        return found

    def plan(self, start: Offsets, end: Offsets) -> list[Span]:
        """Return the partitions of a micro-batch. Missing entries are an error, or a warning."""
        spans: list[Span] = []
        options = self._options
        for queue in options.queues:
            if queue not in end:
                continue
            extent = self._extent(queue)
            begin, stop = self._begin(start, queue, extent), Position.from_json(end[queue])
            if begin.id >= stop.id:
                continue
            report_gap(find_gap(queue, options.stream, begin, stop, extent), fail=options.fail_on_data_loss)
            if stop.cuts is None:  # a checkpoint from before cuts were stored
                rows = count_between(begin, stop, extent)
                server, key = self._stream(queue)
                spans += split(server, key, begin.id.next, stop.id, rows, self._least)
                continue
            ends = [cut for cut in stop.cuts if begin.id < cut < stop.id]
            starts = [begin.id, *ends]
            spans += [Span(queue, first.next, last) for first, last in zip(starts, [*ends, stop.id], strict=True)]
        return spans

    @property
    def _least(self) -> int:
        """The share of one queue in `minPartitions`."""
        return -(-self._options.min_partitions // len(self._options.queues))

    def _begin(self, offsets: Offsets, queue: str, extent: Extent) -> Position:
        if queue in offsets:
            return Position.from_json(offsets[queue])
        return starting_position(self._options, queue, extent)  # a queue that was added to a query with a checkpoint

    def _stream(self, queue: str) -> tuple[QueueServer, str]:
        server = self._servers[queue]
        return server, stream_key(server.keys, self._options.stream)

    def _extent(self, queue: str) -> Extent:
        return extent_of(*self._stream(queue))

    def _end(
        self, queue: str, begin: Position, end: Position, extent: Extent, most: int | None
    ) -> tuple[Position, int]:
        """Return the end of one queue's part of a micro-batch with its cuts, and the number of entries."""
        server, key = self._stream(queue)
        if most is None or extent.length <= most:  # no limit applies, so an estimate will do
            rows = count_between(begin, end, extent)
            spans = split(server, key, begin.id.next, end.id, rows, self._least)
            taken = min(sum(span.rows for span in spans) if rows is None else rows, extent.length)
        else:
            steps = walk(server, key, begin.id.next, end.id, most)
            taken = sum(step.rows for step in steps)
            if taken >= most and steps[-1].last < end.id:
                added = None
                if extent.added is not None and (begin.added is not None or begin.id == BEFORE_ALL):
                    added = max(begin.added or 0, extent.added - extent.length) + taken
                end = Position(steps[-1].last, added)
            spans = join(server, key, steps, self._least)
        return replace(end, cuts=tuple(span.last for span in spans[:-1])), taken


def _backlog(begin: Position, extent: Extent) -> int:
    count = count_between(begin, extent.end, extent)
    return extent.length if count is None else count
