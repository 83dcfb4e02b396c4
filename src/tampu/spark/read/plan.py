"""Plans reads on the driver: the partitions of a batch, and the end of each micro-batch of a stream.

An offset holds, per queue, the ID read last, the number of entries ever added up to it, from which trimmed entries are
counted exactly, and where the micro-batch is cut into partitions.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tampu.base.checks import MAX_U64
from tampu.errors import ConfigError
from tampu.spark.read.offsets import (
    BEFORE_ALL,
    EntryId,
    Extent,
    Position,
    count_between,
    extent_of,
    find_gap,
    is_recreated,
    report_gap,
    starting_position,
    stream_key,
)
from tampu.spark.read.partitions import SCRIPTS, Span, join, split, walk
from tampu.spark.server import QueueServer, queues_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from tampu.spark.options import ReadOptions

    Offsets = dict[str, Any]


def plan_batch(options: ReadOptions) -> list[Span]:
    """Return the partitions of a batch read: everything that is present, within the given offsets."""
    spans: list[Span] = []
    queues = queues_of(options)
    for queue in queues:
        with QueueServer(options.url, queue, SCRIPTS) as server:
            key = stream_key(server.keys, options.stream)
            extent = extent_of(server, key)
            if extent.last_generated == BEFORE_ALL:
                require_queue(server)
            start = starting_position(options, queue, extent)
            end = options.ending.get(queue, extent.end)
            if end.id > extent.last_generated:
                end = extent.end
            if end.id < start.id:
                start = Position(BEFORE_ALL)  # planned by `StreamPlanner`: the stream was created again
            elif options.stream != "jobs":  # workers delete jobs when they are done
                report_gap(find_gap(queue, options.stream, start, end, extent), fail=options.fail_on_data_loss)
            start, end = _narrowed(options, start, end)
            if start.id >= end.id:
                continue
            if end.cuts is not None:
                spans += cut_spans(queue, start, end)
                continue
            rows = count_between(start, end, extent)
            least = -(-options.min_partitions // len(queues))
            spans += split(server, key, start.id.next, end.id, rows, least)
    return spans


def require_queue(server: QueueServer) -> None:
    """Raise `ConfigError` if the server has no key of the queue: its name is probably misspelled."""
    keys = server.keys
    if not server.call("EXISTS", keys.stream, keys.events, keys.dlq, keys.delayed, keys.repeat):
        raise ConfigError(
            f"queue {keys.queue_name!r} does not exist: the server has no key of it. Check the name; a queue exists "
            "once a job was added or a worker was started"
        )


def _narrowed(options: ReadOptions, start: Position, end: Position) -> tuple[Position, Position]:
    """Return the positions within the times that options and conditions of the query leave."""
    if options.first_ms is not None and options.first_ms > start.id.ms:
        start = Position(EntryId(min(options.first_ms, MAX_U64), 0).previous)
    lasts = [ms for ms in (options.last_ms, options.ending_timestamp_ms) if ms is not None]
    # Numbers beyond 2^63 - 1 are shown as that, so a limit there excludes nothing.
    if lasts and min(lasts) < min(end.id.ms, 2**63 - 1):
        end = Position(EntryId(max(min(lasts), 0), MAX_U64)) if min(lasts) >= 0 else Position(BEFORE_ALL)
    return start, end


def cut_spans(queue: str, start: Position, end: Position) -> list[Span]:
    """Return the partitions between two positions, by the cuts of the second."""
    if start.id >= end.id:
        return []
    lasts = [cut for cut in end.cuts or () if start.id < cut < end.id] + [end.id]
    firsts = [start.id, *lasts[:-1]]
    return [Span(queue, first.next, last) for first, last in zip(firsts, lasts, strict=True)]


#: Seconds between two searches for queues that match `subscribePattern`: listing the keys of a server is slow.
FIND_QUEUES_EVERY_SECS = 30.0


class StreamPlanner:
    """Plans the micro-batches of one streaming query."""

    def __init__(self, options: ReadOptions, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._options = options
        self._monotonic = monotonic
        self._servers: dict[str, QueueServer] = {}
        self._queues = queues_of(options)
        self._found_at = self._advanced_at = monotonic()
        self._stop_at: dict[str, Position] | None = None
        #: The offset returned last, for versions of PySpark that do not pass the start of the next micro-batch.
        self._returned: Offsets = {}

    def close(self) -> None:
        """Close the connections."""
        for server in self._servers.values():
            server.close()
        self._servers = {}

    def initial(self) -> Offsets:
        """Return the offset at which a new query starts."""
        return {queue: starting_position(self._options, queue, self._extent(queue)).to_json() for queue in self._queues}

    def newest(self) -> Offsets:
        """Return the offset behind everything that is present."""
        return {queue: self._extent(queue).end.to_json() for queue in self._queues}

    def stop_at_now(self) -> None:
        """Ignore entries that are added from now on, and queues that are created."""
        self._stop_at = {queue: self._extent(queue).end for queue in self._queues}

    def latest(self, start: Offsets | None, most: int | None) -> Offsets:
        """Return the end of the next micro-batch: at most `most` entries behind `start`, shared by the queues.

        The offset also holds where the micro-batch is cut into partitions. Spark logs it before it plans, so a
        micro-batch that is run again after a crash has the same partitions with the same rows.
        """
        start = self._returned if start is None else start
        # Queues of earlier runs that are not read now keep their offsets. Without them, a query on queue a, then b,
        # then a again would read all of a twice.
        found: Offsets = dict(start)
        self._find_queues()
        extents = {queue: self._extent(queue) for queue in self._queues}
        begins = {queue: self._begin(start, queue, extent) for queue, extent in extents.items()}
        if self._waits_for_more(begins, extents):
            return start
        left = most
        # Shortest backlog first: the unused part of a queue's share goes to the others.
        by_backlog = sorted(extents, key=lambda queue: _backlog(begins[queue], extents[queue]))
        for number, queue in enumerate(by_backlog):
            begin, end = begins[queue], (self._stop_at or {}).get(queue, extents[queue].end)
            # Spark runs a micro-batch if the offset differs from the start: without new entries it must be the same.
            found.setdefault(queue, begin.to_json())
            if is_recreated(begin, extents[queue]):  # of the new stream nothing has been read; `plan` reports it
                first = BEFORE_ALL if end.id < begin.id else begin.id
                begin = Position(first, 0, former=begin.former + (begin.added or 0))
            if end.id > begin.id:
                share = None if left is None else -(-left // (len(extents) - number))
                end, taken = self._end(queue, begin, end, extents[queue], share)
                left = None if left is None else left - taken
                found[queue] = end.to_json()
        if found != start:
            self._advanced_at = self._monotonic()
        self._returned = found
        return found

    def _find_queues(self) -> None:
        if self._options.queue_pattern is None or self._stop_at is not None:
            return
        if self._monotonic() - self._found_at >= FIND_QUEUES_EVERY_SECS:
            # A queue whose keys are gone may come back: its position is kept.
            self._queues = tuple(sorted({*self._queues, *queues_of(self._options)}))
            self._found_at = self._monotonic()

    def _waits_for_more(self, begins: dict[str, Position], extents: dict[str, Extent]) -> bool:
        """Return whether fewer entries are present than `minOffsetsPerTrigger`, and there is time to wait for more."""
        least = self._options.min_offsets_per_trigger
        if not least or self._stop_at is not None:  # with `availableNow` there is nothing to wait for
            return False
        if self._monotonic() - self._advanced_at >= self._options.max_trigger_delay_secs:
            return False
        return sum(_backlog(begins[queue], extent) for queue, extent in extents.items()) < least

    def plan(self, start: Offsets, end: Offsets) -> list[Span]:
        """Return the partitions of a micro-batch. Missing entries are an error, or a warning."""
        spans: list[Span] = []
        options = self._options
        for queue in sorted(end) if options.queue_pattern is not None else options.queues:
            if queue not in end:
                continue
            extent = self._extent(queue)
            begin, stop = self._begin(start, queue, extent), Position.from_json(end[queue])
            if begin.id == stop.id:
                continue
            report_gap(find_gap(queue, options.stream, begin, stop, extent), fail=options.fail_on_data_loss)
            if stop.id < begin.id:  # of a stream that was deleted and created again, with lower IDs
                begin = Position(BEFORE_ALL)
            if stop.cuts is None:  # a checkpoint from before cuts were stored
                rows = count_between(begin, stop, extent)
                server, key = self._stream(queue)
                spans += split(server, key, begin.id.next, stop.id, rows, self._least)
                continue
            spans += cut_spans(queue, begin, stop)
        return spans

    @property
    def _least(self) -> int:
        """The share of one queue in `minPartitions`."""
        return -(-self._options.min_partitions // max(len(self._queues), 1))

    def _begin(self, offsets: Offsets, queue: str, extent: Extent) -> Position:
        if queue in offsets:
            return Position.from_json(offsets[queue])
        if offsets and self._options.queue_pattern is not None:
            return Position(BEFORE_ALL)  # created after the query was started: all of its entries are new
        return starting_position(self._options, queue, extent)  # a queue that was added to a query with a checkpoint

    def _stream(self, queue: str) -> tuple[QueueServer, str]:
        server = self._servers.get(queue)
        if server is None:
            server = self._servers[queue] = QueueServer(self._options.url, queue, SCRIPTS)
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
        return replace(end, cuts=tuple(span.last for span in spans[:-1]), former=begin.former), taken


def _backlog(begin: Position, extent: Extent) -> int:
    count = count_between(begin, extent.end, extent)
    return extent.length if count is None else count
