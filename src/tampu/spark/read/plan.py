"""Plans reads on the driver: the partitions of a batch, and where each micro-batch of a stream ends.

An offset holds, per queue, the id last read and how many entries were ever added up to it: from that, entries that were
trimmed before they were read are counted exactly.
"""

from __future__ import annotations

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
from tampu.spark.read.partitions import SCRIPTS, Span, cut, split, walk
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
    """One query's view of its queues."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._servers = {queue: QueueServer(options.url, queue, SCRIPTS) for queue in options.queues}
        self._stop_at: dict[str, Position] = {}
        #: Steps of the walk that found an end, by (queue, start, end): planning that batch need not walk again.
        self._walked: dict[tuple[str, str, str], list[Span]] = {}

    def close(self) -> None:
        """Close the connections."""
        for server in self._servers.values():
            server.close()
        self._servers = {}

    def initial(self) -> Offsets:
        """Where a new query starts."""
        return {
            queue: starting_position(self._options, queue, self._extent(queue)).to_json()
            for queue in self._options.queues
        }

    def newest(self) -> Offsets:
        """Behind all that is there."""
        return {queue: self._extent(queue).end.to_json() for queue in self._options.queues}

    def stop_at_now(self) -> None:
        """Act from now on as if nothing more came."""
        self._stop_at = {queue: self._extent(queue).end for queue in self._options.queues}

    def latest(self, start: Offsets | None, most: int | None) -> Offsets:
        """Where the next micro-batch ends: `most` entries behind `start`, shared by the queues, or at the end."""
        found: Offsets = {}
        self._walked.clear()
        extents = {queue: self._extent(queue) for queue in self._options.queues}
        left = most
        # Those with the least to read first: what they leave of their share goes to the others.
        by_backlog = sorted(extents, key=lambda queue: self._backlog(start, queue, extents[queue]))
        for number, queue in enumerate(by_backlog):
            begin = self._position(start, queue)
            end = self._stop_at.get(queue, extents[queue].end)
            if begin is not None and end.id < begin.id:
                end = begin  # the stream was deleted and began anew: there is nothing behind what was read
            elif begin is not None and left is not None:
                share = -(-left // (len(extents) - number))
                end, taken = self._limited(queue, begin, end, extents[queue], share)
                left -= taken
            found[queue] = end.to_json()
        return found

    def plan(self, start: Offsets, end: Offsets) -> list[Span]:
        """The partitions of a micro-batch; what is missing of it is an error or a warning."""
        spans: list[Span] = []
        options = self._options
        for queue in options.queues:
            begin, stop = self._position(start, queue), self._position(end, queue)
            if stop is None or (begin is not None and begin.id >= stop.id):
                continue
            begin = begin or starting_position(options, queue, self._extent(queue))
            extent = self._extent(queue)
            report_gap(find_gap(queue, options.stream, begin, stop, extent), fail=options.fail_on_data_loss)
            least = -(-options.min_partitions // len(options.queues))
            steps = self._walked.pop((queue, str(begin.id), str(stop.id)), None)
            if steps is None:
                server = self._servers[queue]
                key = stream_key(server.keys, options.stream)
                rows = count_between(begin, stop, extent)
                spans += split(server, key, begin.id.next, stop.id, rows, least)
            else:
                spans += cut(steps, least)
        return spans

    def _position(self, offsets: Offsets | None, queue: str) -> Position | None:
        if offsets is None or queue not in offsets:
            return None  # a queue that was added to a query with a checkpoint
        return Position.from_json(offsets[queue])

    def _extent(self, queue: str) -> Extent:
        server = self._servers[queue]
        return extent_of(server, stream_key(server.keys, self._options.stream))

    def _limited(self, queue: str, begin: Position, end: Position, extent: Extent, most: int) -> tuple[Position, int]:
        if extent.length <= most:  # all of it is allowed, so nothing need be counted
            count = count_between(begin, end, extent)
            return end, extent.length if count is None else min(count, extent.length)
        server = self._servers[queue]
        steps = walk(server, stream_key(server.keys, self._options.stream), begin.id.next, end.id, most)
        taken = sum(step.rows for step in steps)
        if taken >= most and steps[-1].last < end.id:
            added = None
            if extent.added is not None and (begin.added is not None or begin.id == BEFORE_ALL):
                added = max(begin.added or 0, extent.added - extent.length) + taken
            end = Position(steps[-1].last, added)
        self._walked[queue, str(begin.id), str(end.id)] = steps
        return end, taken

    def _backlog(self, start: Offsets | None, queue: str, extent: Extent) -> int:
        begin = self._position(start, queue)
        count = None if begin is None else count_between(begin, extent.end, extent)
        return extent.length if count is None else count
