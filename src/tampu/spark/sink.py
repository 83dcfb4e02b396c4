"""Writes jobs without duplicates: rows in chunks, each chunk one script call that remembers that it ran.

A marker is kept per (query, micro-batch, partition, chunk). A task that is run again sends the same chunks again, and
those that were added before are passed over. That needs the same rows in the same order: when they differ, nothing is
written and the error says so (use `dedupe=jobid` behind a shuffle).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tampu.clock import wall_clock_ms
from tampu.engine.minter import Minter
from tampu.engine.window import MAX_BYTES, MAX_JOBS
from tampu.errors import Error, QueueFullError
from tampu.redis.scripts import load_script
from tampu.spark.server import QueueServer
from tampu.wire.envelope import encode_envelope, fresh_envelopes
from tampu.wire.payload import wrap_bin
from tampu.wire.ulid import ulid_from_bits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tampu.redis.connection import Part
    from tampu.redis.pipe import Pipe
    from tampu.spark.options import WriteOptions
    from tampu.spark.rows import JobRow

logger = logging.getLogger("tampu.spark")

ADD = load_script("spark_add")

#: Waits while the queue is full, in seconds: doubling from the first to the last.
FIRST_PAUSE_SECS = 0.05
LAST_PAUSE_SECS = 1.0


class RowsDifferError(Error):
    """A task was run again with other rows, or in another order, than the first time."""

    code = "CMQ-031"


@dataclass(frozen=True, slots=True)
class TaskIdentity:
    """What stays the same when a task is run again: the query, its micro-batch and the partition."""

    query: str
    batch: str
    partition: int

    def marker(self, tag: str) -> str:
        """The key of this task's marker in a queue."""
        return f"{tag}:sparkq:{self.query}:{self.batch}:{self.partition}"


@dataclass(slots=True)
class Written:
    """What came of a task's rows."""

    added: int = 0
    #: Rows whose job id was there already.
    duplicates: int = 0
    #: Rows of chunks that an earlier run of this task had added.
    repeated: int = 0
    #: Dead letters that were not there any more, or cannot be read.
    skipped: int = 0

    def add(self, other: Written) -> None:
        """Count these too."""
        self.added += other.added
        self.duplicates += other.duplicates
        self.repeated += other.repeated
        self.skipped += other.skipped


@dataclass(slots=True)
class _Chunk:
    rows: list[JobRow] = field(default_factory=list)
    size: int = 0


class JobSink:
    """Writes the rows of one task. `write` takes (queue, row) pairs."""

    def __init__(
        self,
        options: WriteOptions,
        task: TaskIdentity,
        *,
        now_ms: Callable[[], int] = wall_clock_ms,
        random_below: Callable[[int], int] = random.randrange,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._options = options
        self._task = task
        self._now_ms = now_ms
        self._random_below = random_below
        self._sleep = sleep
        self._written = Written()
        self._lanes: dict[str, _Lane] = {}

    def write(self, rows: Iterable[tuple[str, JobRow]]) -> Written:
        """Add all of them; returns when the server has them."""
        chunks: dict[str, _Chunk] = {}
        try:
            for queue, row in rows:
                chunk = chunks.get(queue)
                if chunk is None:
                    chunk = chunks[queue] = _Chunk()
                # Cut by what is the same in every run: the payload's size, not that of minted ids.
                size = chunk.size + len(row.packed)
                if size > MAX_BYTES or len(chunk.rows) == MAX_JOBS:
                    self._lane(queue).send(chunk.rows)
                    chunk = chunks[queue] = _Chunk()
                    size = len(row.packed)
                chunk.rows.append(row)
                chunk.size = size + 64
            for queue, chunk in chunks.items():
                self._lane(queue).send(chunk.rows)
            for lane in self._lanes.values():
                lane.settle()
        finally:
            for lane in self._lanes.values():
                lane.server.close()
        return self._written

    def _lane(self, queue: str) -> _Lane:
        if queue not in self._lanes:
            server = QueueServer(self._options.url, queue, (ADD,))
            self._lanes[queue] = _Lane(self, server)
        return self._lanes[queue]


class _Lane:
    """One queue of a sink: the next chunk is packed while the server works on the last."""

    def __init__(self, sink: JobSink, server: QueueServer) -> None:
        self._sink = sink
        self._options = sink._options
        self.server = server
        self._marker = sink._task.marker(server.keys.tag)
        self._minter = Minter(sink._now_ms)
        self._number = 0
        self._pending: tuple[Any, list[str], list[Part], int] | None = None

    def send(self, rows: list[JobRow]) -> None:
        """Send one chunk, once the one before is settled."""
        if not rows:
            return
        keys, arguments = self._packed(rows)
        self.settle()
        future = self.server.do(_starter(keys, arguments))
        self._pending = (future, keys, arguments, len(rows))
        self._number += 1

    def settle(self) -> None:
        """Wait for the chunk that is under way."""
        if self._pending is None:
            return
        future, keys, arguments, count = self._pending
        self._pending = None
        reply = self.server.do(_waiter(future))
        paused = 0.0
        pause = FIRST_PAUSE_SECS
        while reply[0] == b"full":
            if paused >= self._options.wait_timeout_secs:
                raise QueueFullError(
                    f"queue {self.server.keys.queue_name!r} has held {reply[1]} jobs or more for {paused:.0f} s "
                    f"(option maxWaiting={self._options.max_waiting}, waitTimeout): is a worker running?"
                )
            self._sink._sleep(pause)
            paused += pause
            pause = min(pause * 2, LAST_PAUSE_SECS)
            reply = self.server.run(ADD, keys, arguments)
        self._on_reply(reply, count)

    def _on_reply(self, reply: list[Any], count: int) -> None:
        written = self._sink._written
        if reply[0] == b"ok":
            written.added += reply[1]
            written.duplicates += reply[2]
        elif reply[0] == b"done":
            written.repeated += count
        elif reply[0] == b"differs":
            raise RowsDifferError(
                f"partition {self._sink._task.partition} was run again with other rows, or in another order, than the "
                "first time, and some of those are in the queue already. Nothing was added. Set option dedupe=jobid "
                "(with a column job_id, or ids from the rows' content), or write a table that does not change"
            )
        else:
            raise RowsDifferError(
                f"the markers of partition {self._sink._task.partition} are gone behind chunk {reply[1]} (their TTL is "
                f"option dedupeTtl, {self._options.dedupe_ttl_secs} s): what was added cannot be told any more"
            )

    def _packed(self, rows: list[JobRow]) -> tuple[list[str], list[Part]]:
        options, keys = self._options, self.server.keys
        ids, now_ms = self._minter.mint_many(len(rows))
        used: list[str] = [self._marker, keys.stream, keys.delayed]
        digest = hashlib.blake2b(digest_size=8)
        name = _name_of_all(rows)
        if name is not None and options.dedupe != "jobid" and not options.spread_ms:
            parts = self._same_parts(rows, ids, now_ms, name, digest)
        else:
            parts = self._each_parts(rows, ids, now_ms, used, digest)
        number = self._number if options.dedupe == "chunk" else -1
        head: list[Part] = [number, digest.hexdigest(), options.dedupe_ttl_secs, options.max_waiting, len(rows)]
        return used, head + parts

    def _same_parts(self, rows: list[JobRow], ids: list[str], now_ms: int, name: str, digest: Any) -> list[Part]:
        """Rows that are nothing but payloads, as most are."""
        payloads = [row.packed for row in rows]
        digest.update(b"".join(payloads))
        return [b"same", name, *fresh_envelopes(ids, payloads, now_ms)]

    def _each_parts(self, rows: list[JobRow], ids: list[str], now_ms: int, used: list[str], digest: Any) -> list[Part]:
        """Rows of any kind; the keys they need are put behind those in `used`."""
        options, keys = self._options, self.server.keys
        parts: list[Part] = [b"each"]
        for row, minted in zip(rows, ids, strict=True):
            digest.update(row.packed)
            job_id = row.job_id
            if job_id is None and options.dedupe == "jobid":
                job_id = content_id(row)
            due = row.run_at_ms
            if due is None and options.spread_ms:
                due = now_ms + self._sink._random_below(options.spread_ms)
            envelope = encode_envelope(job_id or minted, wrap_bin(row.packed), now_ms, 0, row.retry)
            if job_id is not None:
                digest.update(job_id.encode())
                used.append(keys.dedup_marker(job_id))
            if due is None:
                parts += (b"n" if job_id is None else b"i", row.name, envelope)
            else:
                used.append(keys.delayed_index(job_id or minted))
                parts += (b"d" if job_id is None else b"e", row.name, envelope, due)
        return parts


def _name_of_all(rows: list[JobRow]) -> str | None:
    """The name that all rows share; None when they do not, or say more than payload and name."""
    kinds = {row[1:] for row in rows}
    (name, *others) = kinds.pop()
    return name if not kinds and others == [None, None, None] else None


def content_id(row: JobRow) -> str:
    """An id that is the same for the same content: two rows that are alike are one job."""
    text = repr((row.packed, row.name, row.run_at_ms, row.retry)).encode()
    digest = hashlib.sha256(text).digest()
    return ulid_from_bits(0, int.from_bytes(digest[:10], "big"))


def _starter(keys: list[str], arguments: list[Part]) -> Callable[[Pipe], Any]:
    async def start(pipe: Pipe) -> Any:
        return asyncio.ensure_future(pipe.run(ADD, keys, arguments))

    return start


def _waiter(future: Any) -> Callable[[Pipe], Any]:
    async def wait(pipe: Pipe) -> Any:
        return await future

    return wait
