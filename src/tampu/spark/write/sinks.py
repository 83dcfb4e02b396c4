"""Writes the rows of one task: adds jobs, or replays dead letters. A task that runs again writes nothing twice.

Jobs are sent in chunks. Each chunk is one script call that leaves a marker for (query, micro-batch, partition, chunk);
a chunk that has its marker is skipped. This needs the same rows in the same order. If they differ, nothing is written
and the error says to use `dedupe=jobid`.

A dead letter is moved and counted in one script call; a letter that is gone is skipped. It is read from the server
first, for what a row does not have: retry settings and time of creation.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from tampu.base.checks import MAX_CALL_BYTES, MAX_CALL_ENTRIES, split_into_calls
from tampu.base.clock import wall_clock_ms
from tampu.errors import DecodeError, Error, QueueFullError, RedisError
from tampu.inspect.dead_letters import REPLAY_COUNTS_TTL_SECS
from tampu.produce.adder import Minter
from tampu.produce.window import ADD_WINDOW, Due, IdKeys, Window, WindowHeader, pack_part
from tampu.redis.scripts import AddCode, load_script
from tampu.spark.server import QueueServer
from tampu.wire.codec import queue_codec
from tampu.wire.dlq import decode_dlq_fields
from tampu.wire.envelope import decode_job, encode_envelope, fresh_envelope, fresh_envelopes, packed_envelopes
from tampu.wire.payload import wrap_bin
from tampu.wire.scan import bin_content
from tampu.wire.ulid import ulid_from_bits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tampu.spark.options import WriteOptions
    from tampu.spark.write.rows import JobRow, LetterRow
    from tampu.wire.codec import QueueCodec

#: Pauses while the queue is full, in seconds: doubling from the first to the last.
FIRST_PAUSE_SECS = 0.05
LAST_PAUSE_SECS = 1.0


class RowsDifferError(Error):
    """A task ran again with different rows, or in a different order."""

    code = "CMQ-031"


@dataclass(frozen=True, slots=True)
class TaskIdentity:
    """Identity of a task when it runs again: query, micro-batch and partition."""

    query: str
    batch: str
    partition: int

    def marker(self, tag: str) -> str:
        """Return the key of this task's marker in a queue."""
        return f"{tag}:sparkq:{self.query}:{self.batch}:{self.partition}"


@dataclass(slots=True)
class Written:
    """Counts of what happened to a task's rows."""

    added: int = 0
    #: Rows whose job ID had been added before.
    duplicates: int = 0
    #: Rows of chunks that an earlier run of this task added.
    repeated: int = 0
    #: Dead letters that are gone, or cannot be decoded.
    skipped: int = 0

    def add(self, other: Written) -> None:
        """Add the counts of another task."""
        self.added += other.added
        self.duplicates += other.duplicates
        self.repeated += other.repeated
        self.skipped += other.skipped


class _FullQueue:
    """Pauses while a queue is full; fails after `waitTimeout`."""

    def __init__(self, options: WriteOptions, queue: str, sleep: Callable[[float], None]) -> None:
        self._options = options
        self._queue = queue
        self._sleep = sleep
        self.reset()

    def reset(self) -> None:
        """Restart the timeout, because something was added."""
        self._paused, self._next_pause = 0.0, FIRST_PAUSE_SECS

    def pause(self) -> None:
        if self._paused >= self._options.wait_timeout_secs:
            raise QueueFullError(
                f"queue {self._queue!r} has been full for {self._paused:.0f} s (option maxWaiting="
                f"{self._options.max_waiting}, waitTimeout): is a worker running?"
            )
        self._sleep(self._next_pause)
        self._paused += self._next_pause
        self._next_pause = min(self._next_pause * 2, LAST_PAUSE_SECS)


# --- jobs


class JobSink:
    """Adds the jobs of one task. `write` takes (queue, row) pairs."""

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

    def write(self, rows: Iterable[tuple[str, JobRow]]) -> Written:
        """Add all rows; return when the server has them."""
        queues: dict[str, _QueueSink] = {}
        with contextlib.ExitStack() as stack:
            for queue, row in rows:
                sink = queues.get(queue)
                if sink is None:
                    server = stack.enter_context(QueueServer(self._options.url, queue, (ADD_WINDOW,)))
                    sink = queues[queue] = _QueueSink(self, server)
                # Cut by what is the same in every run: the payload's size, not that of generated IDs.
                size = sink.size + len(row.packed)
                if size > MAX_CALL_BYTES or len(sink.rows) == MAX_CALL_ENTRIES:
                    sink.send()
                    size = len(row.packed)
                sink.rows.append(row)
                sink.size = size + 64
            for sink in queues.values():
                sink.send()
            for sink in queues.values():
                sink.settle()
        return self._written


class _QueueSink:
    """One queue of a sink: packs the next chunk while the server processes the current one."""

    def __init__(self, sink: JobSink, server: QueueServer) -> None:
        #: The next chunk, and its approximate size in bytes.
        self.rows: list[JobRow] = []
        self.size = 0
        self._sink = sink
        self._options = sink._options
        self._server = server
        self._header = WindowHeader(
            server.keys,
            sink._task.marker(server.keys.tag),
            cap=self._options.max_waiting,
            overflow="hold",
            dedup_ttl_secs=self._options.dedupe_ttl_secs,
        )
        self._id_keys = IdKeys(server.keys)
        self._minter = Minter(sink._now_ms)
        self._number = 0
        self._pending: tuple[Any, bytes, int] | None = None

    def send(self) -> None:
        """Send the chunk after the previous one is acknowledged."""
        rows, self.rows, self.size = self.rows, [], 0
        if rows:
            packed = self._packed(rows)
            self.settle()
            task = self._server.start(lambda client: client.send(packed))
            self._pending = (task, packed, len(rows))
            self._number += 1

    def settle(self) -> None:
        """Wait for the reply to the chunk in flight."""
        if self._pending is None:
            return
        task, packed, count = self._pending
        self._pending = None
        reply = self._server.result_of(task)
        full = _FullQueue(self._options, self._server.keys.queue_name, self._sink._sleep)
        while reply[0] == b"full":
            full.pause()
            reply = self._server.send(packed)
        self._on_reply(reply, count)

    def _on_reply(self, reply: list[Any], count: int) -> None:
        written = self._sink._written
        if reply[0] == b"ok":
            codes = reply[1].decode()
            if AddCode.ERROR in codes:
                raise RedisError(f"the server refused some of these jobs: {reply[2].decode(errors='replace')}")
            duplicates = codes.count(AddCode.DUPLICATE)
            written.added += count - duplicates
            written.duplicates += duplicates
        elif reply[0] == b"done":
            written.repeated += count
        elif reply[0] == b"differs":
            raise RowsDifferError(
                f"partition {self._sink._task.partition} ran again with different rows, or in a different order, and "
                "some rows of the first run are in the queue already. Nothing was added. Set option dedupe=jobid "
                "(IDs from a column job_id, or from the rows' content), or write a table that does not change"
            )
        else:
            raise RowsDifferError(
                f"the marker of partition {self._sink._task.partition} is gone (it expires after option dedupeTtl, "
                f"{self._options.dedupe_ttl_secs} s): it is unknown if its rows were added"
            )

    def _packed(self, rows: list[JobRow]) -> bytes:
        options = self._options
        ids, now_ms = self._minter.mint_many(len(rows))
        name = _name_of_all(rows)
        codec = queue_codec(self._server.keys.queue_name)
        if name is not None and options.dedupe != "jobid" and not options.spread_ms:
            payloads = [row.packed for row in rows]
            window = self._window([name.encode(), *payloads])  # of the plain payloads: sealed ones differ in every run
            if codec is not None:
                payloads = codec.seal_payloads(payloads, name)
            joined = packed_envelopes(ids, payloads, now_ms)
            packed = [*map(pack_part, fresh_envelopes(ids, payloads, now_ms))] if joined is None else [joined]
            window.put_many(ids, name.encode(), packed)
            return window.packed(self._header)
        digested: list[bytes] = []
        jobs: list[tuple[str, bytes, bytes, Due | None, tuple[bytes, ...]]] = []
        for row, minted in zip(rows, ids, strict=True):
            digested += (row.packed, repr(row[1:]).encode())
            job_id = row.job_id
            if job_id is None and options.dedupe == "jobid":
                job_id = content_id(row)
            due_ms = row.run_at_ms
            if due_ms is None and options.spread_ms:
                due_ms = now_ms + self._sink._random_below(options.spread_ms)
            due = None if due_ms is None else Due("at", due_ms)
            id_keys = () if job_id is None else self._id_keys.packed(job_id, due)
            payload = row.packed if codec is None else codec.seal_payload(row.packed, row.name)
            envelope = fresh_envelope(job_id or minted, payload, now_ms, row.retry)
            jobs.append((job_id or minted, row.name.encode(), pack_part(envelope), due, id_keys))
        window = self._window(digested)
        for job in jobs:
            window.put(*job)
        return window.packed(self._header)

    def _window(self, content: list[bytes]) -> Window:
        """Return an empty window; with `dedupe=chunk` it is added only once."""
        window = Window()
        if self._options.dedupe == "chunk":
            window.number = self._number + 1
            window.chain_ttl_secs = self._options.dedupe_ttl_secs
            window.digest = hashlib.blake2b(b"".join(content), digest_size=8).hexdigest().encode()
        return window


def _name_of_all(rows: list[JobRow]) -> str | None:
    """Return the name that all rows share; None if they do not, or have more than payload and name."""
    kinds = {row[1:] for row in rows}
    (name, *others) = kinds.pop()
    return name if not kinds and others == [None, None, None] else None


def content_id(row: JobRow) -> str:
    """Return an ID derived from the content: equal rows are one job."""
    text = repr((row.packed, row.name, row.run_at_ms, row.retry)).encode()
    digest = hashlib.sha256(text).digest()
    return ulid_from_bits(0, int.from_bytes(digest[:10], "big"))


# --- dead letters

REPLAY = load_script("replay")


class Replayed(NamedTuple):
    """A dead letter to replay, as the job it becomes."""

    entry_id: str
    envelope: bytes
    name: str
    job_id: str


class ReplaySink:
    """Replays the dead letters of one task. `write` takes (queue, letter) pairs."""

    def __init__(self, options: WriteOptions, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self._options = options
        self._sleep = sleep
        self._written = Written()

    def write(self, rows: Iterable[tuple[str, LetterRow]]) -> Written:
        """Move all letters; return when they are in the stream."""
        servers: dict[str, QueueServer] = {}
        waiting: dict[str, list[LetterRow]] = {}
        with contextlib.ExitStack() as stack:
            for queue, row in rows:
                if queue not in servers:
                    servers[queue] = stack.enter_context(QueueServer(self._options.url, queue, (REPLAY,)))
                waiting.setdefault(queue, []).append(row)
                if len(waiting[queue]) == MAX_CALL_ENTRIES:
                    self._move(servers[queue], waiting.pop(queue))
            for queue, letters in waiting.items():
                self._move(servers[queue], letters)
        return self._written

    def _move(self, server: QueueServer, rows: list[LetterRow]) -> None:
        found = server.call_many([("XRANGE", server.keys.dlq, row.entry_id, row.entry_id) for row in rows])
        codec = queue_codec(server.keys.queue_name)
        pairs = zip(rows, found, strict=True)
        letters = [_replayed(row, entries[0][1], codec) if entries else None for row, entries in pairs]
        self._written.skipped += letters.count(None)
        for batch in split_into_calls((letter, len(letter.envelope)) for letter in letters if letter is not None):
            self._move_batch(server, batch)

    def _move_batch(self, server: QueueServer, letters: list[Replayed]) -> None:
        full = _FullQueue(self._options, server.keys.queue_name, self._sleep)
        while letters:
            keys, parts = server.keys, [part for letter in letters for part in letter]
            call = (self._options.max_waiting, REPLAY_COUNTS_TTL_SECS, *parts)
            moved, is_full = server.send(REPLAY.packed_call((keys.dlq, keys.stream, keys.replays), call))
            self._written.added += moved
            if not is_full:
                self._written.skipped += len(letters) - moved  # another replay moved them meanwhile
                return
            letters = letters[moved:]
            if moved:
                full.reset()
            full.pause()


def _replayed(row: LetterRow, fields: list[bytes], codec: QueueCodec | None) -> Replayed | None:
    """Return the letter as the job it becomes; None if its envelope cannot be decoded, or its payload not opened."""
    letter = decode_dlq_fields(row.entry_id, fields)
    try:
        job = decode_job(letter.payload)
        slot = job.payload_slot
        if codec is not None and (row.packed is not None or row.name is not None):
            # A seal is bound to the job's name, which may change here.
            opened = codec.open_payload(bin_content(slot) or slot, letter.name) if row.packed is None else row.packed
            slot = wrap_bin(codec.seal_payload(opened, letter.name if row.name is None else row.name))
    except DecodeError:
        return None
    if row.packed is not None and codec is None:
        slot = row.packed if job.payload_format == "inline" else wrap_bin(row.packed)
    # Behind it: headers and timeouts.
    envelope = encode_envelope(job.id, slot, job.created_at_ms, 0, job.retry) + job.for_replay()._tail
    return Replayed(row.entry_id, envelope, letter.name if row.name is None else row.name, job.id)
