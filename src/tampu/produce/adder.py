"""Collects jobs into windows and returns each caller the ids of its jobs.

Jobs added in one turn of the event loop form one window. A bulk is sent in windows of up to 256 jobs; the next one is
packed while the server works on the last.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec

from tampu.base.checks import MAX_CALL_BYTES, MAX_CALL_ENTRIES
from tampu.base.clock import random_bytes, wall_clock_ms
from tampu.errors import ConfigError, EncodeError
from tampu.produce.window import (
    LARGE_ALONE_BYTES,
    LARGE_BYTES,
    BulkResults,
    BulkWindow,
    IdKeys,
    LargeJobs,
    SharedWindow,
    SingleWindow,
    Window,
    pack_part,
)
from tampu.wire.entry import encode_delayed_member
from tampu.wire.envelope import fresh_envelope, fresh_envelope_ends, fresh_envelopes, packed_envelopes
from tampu.wire.ulid import RANDOM_BYTES, encode_time, encode_ulids, random_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from tampu.produce.chain import Chain
    from tampu.produce.options import AddOptions
    from tampu.produce.window import Due
    from tampu.wire.job import JobId
    from tampu.wire.keys import QueueKeys
    from tampu.wire.retry import JobRetryOverride

#: Approximate size of an envelope without its payload, in bytes.
ENVELOPE_BYTES = 64
#: Upper bound of that size if the id is generated: a payload this far below the limit needs no exact check.
MAX_ENVELOPE_BYTES = 512

_ANY_ULID = "0" * 26


#: Ids per block of random bits.
BLOCK = 256

#: Identifies this process; replaced after a fork. `os.getpid()` would be a system call for every id.
_process = object()


def _after_fork_in_child() -> None:
    global _process
    _process = object()


os.register_at_fork(after_in_child=_after_fork_in_child)


class Minter:
    """Generates ids. Random bits are drawn in blocks, because a system call per id costs more."""

    __slots__ = ("_drawn_in", "_now_ms", "_random_bytes", "_random_parts", "_time_ms", "_time_text")

    def __init__(
        self, now_ms: Callable[[], int] = wall_clock_ms, random_bytes: Callable[[int], bytes] = random_bytes
    ) -> None:
        self._now_ms = now_ms
        self._random_bytes = random_bytes
        self._random_parts: list[str] = []
        self._drawn_in = _process
        self._time_ms = -1
        self._time_text = ""

    def now_ms(self) -> int:
        """Return the time that a job created now is stamped with, in milliseconds."""
        return self._now_ms()

    def mint(self) -> tuple[str, int]:
        """Return (a new id, its time in milliseconds)."""
        now_ms = self._now_ms()
        if now_ms != self._time_ms:
            self._time_text = encode_time(now_ms)
            self._time_ms = now_ms
        if not self._random_parts or self._drawn_in is not _process:
            # After a fork, parent and child hold the same block: the child must draw a new one.
            text = random_text(self._random_bytes(RANDOM_BYTES * BLOCK))
            self._random_parts = [text[at : at + RANDOM_BYTES] for at in range(0, len(text), RANDOM_BYTES)]
            self._drawn_in = _process
        return self._time_text + self._random_parts.pop(), now_ms

    def mint_many(self, count: int) -> tuple[list[str], int]:
        """Return (`count` new ids, their time in milliseconds)."""
        now_ms = self._now_ms()
        return encode_ulids(now_ms, self._random_bytes(RANDOM_BYTES * count)), now_ms


class Adder:
    """Packs jobs of one queue into windows and submits them to the chain."""

    def __init__(
        self,
        chain: Chain,
        keys: QueueKeys,
        minter: Minter,
        *,
        inline: bool,
        max_payload_bytes: int = 0,
    ) -> None:
        self._chain = chain
        self._minter = minter
        #: How a payload is written into its envelope: `bytes` as a MessagePack bin, `Raw` inline.
        self._slot_of = msgspec.Raw if inline else bytes
        self._id_keys = IdKeys(keys)
        self._open: SharedWindow | None = None
        self._max_bytes = max_payload_bytes or sys.maxsize

    def now_ms(self) -> int:
        """Return the time that a job created now is stamped with, in milliseconds, by the local clock."""
        return self._minter.now_ms()

    # --- one job

    def add(self, body: bytes, options: AddOptions, due: Due | None = None) -> asyncio.Future[JobId]:
        """Add one job to the open window. The future resolves to its id, or raises the error of the add."""
        future: asyncio.Future[JobId] = asyncio.get_running_loop().create_future()
        explicit = options.id
        if explicit is None:
            job_id, now_ms = self._minter.mint()
        else:
            job_id = str(explicit)  # a plain str, also from a subclass such as JobId
            now_ms = self._minter.now_ms()
        if len(body) >= LARGE_ALONE_BYTES and explicit is None and due is None:
            self._add_large(job_id, body, now_ms, options, future)
            return future
        name = options.name.encode()
        envelope = fresh_envelope(job_id, self._slot_of(body), now_ms, options.retry)
        if options._tail:
            envelope += options._tail
        if len(envelope) > self._max_bytes:
            raise _too_large(len(envelope), self._max_bytes)
        # With nothing in flight there is no reason to wait: the first job of a turn is sent at once, alone.
        if (
            self._open is None
            and explicit is None
            and due is None
            and self._chain.send_single(SingleWindow(job_id, name, envelope, future))
        ):
            return future
        sends_at_once = self._open is None and self._chain.is_idle()
        packed = pack_part(envelope)
        keys = () if explicit is None else self._id_keys.packed(job_id, due)
        window = SharedWindow() if sends_at_once else self._window_for(len(packed))
        window.put(job_id, name, packed, due, keys)
        window.futures.append(future)
        if sends_at_once:
            self._chain.submit(window)
        return future

    def delayed_member(self, body: bytes, options: AddOptions) -> bytes:
        """Return a job with an explicit ID as a member of the delayed set."""
        envelope = fresh_envelope(str(options.id), self._slot_of(body), self._minter.now_ms(), options.retry)
        envelope += options._tail
        if len(envelope) > self._max_bytes:
            raise _too_large(len(envelope), self._max_bytes)
        return encode_delayed_member(options.name, envelope)

    def _add_large(
        self, job_id: str, body: bytes, now_ms: int, options: AddOptions, future: asyncio.Future[JobId]
    ) -> None:
        jobs = self._large_jobs([job_id], [body], now_ms, options)
        size = len(jobs.heads[0]) + len(body) + len(jobs.tail)
        if size > self._max_bytes:
            raise _too_large(size, self._max_bytes)
        window = SharedWindow()
        window.put_large([job_id], jobs)
        window.futures.append(future)
        self._submit(window)

    def _window_for(self, size: int) -> SharedWindow:
        window = self._open
        if window is None or not window.has_room(size):
            self.flush()
            window = self._open = SharedWindow()
            asyncio.get_running_loop().call_soon(self._flush_window, window)
        return window

    def flush(self) -> None:
        """Send the open window now, if there is one."""
        if self._open is not None:
            window, self._open = self._open, None
            self._chain.submit(window)

    def _flush_window(self, window: SharedWindow) -> None:
        if self._open is window:
            self.flush()

    def abandon(self) -> None:
        """Drop the open window: it belongs to the parent of a fork, or to an event loop that has ended."""
        self._open = None

    # --- many jobs

    async def add_list(self, bodies: Sequence[bytes], options: AddOptions, due: Due | None = None) -> list[JobId]:
        """Add jobs that share their options. Return their ids in order."""
        self._check_sizes(bodies, options)
        windows: list[BulkWindow] = []
        for window in self._windows_of(bodies, options, due):
            # The server works on this window while the next one is packed.
            self._submit(window)
            windows.append(window)
        if len(windows) == 1:
            added = await windows[0].all_added()
            if added is not None:
                return added
        return await BulkResults(windows).finish()

    async def add_each(self, items: Iterable[tuple[bytes, AddOptions]], due: Due | None = None) -> list[JobId]:
        """Add jobs that each have their own options. All are packed before any is sent."""
        window: BulkWindow | None = None
        windows: list[BulkWindow] = []
        for position, (body, options) in enumerate(items):
            job_id, now_ms = self._minter.mint() if options.id is None else (str(options.id), self._minter.now_ms())
            envelope = fresh_envelope(job_id, self._slot_of(body), now_ms, options.retry) + options._tail
            if len(envelope) > self._max_bytes:
                raise _too_large(len(envelope), self._max_bytes, f" {position} of this bulk")
            packed = pack_part(envelope)
            keys = () if options.id is None else self._id_keys.packed(job_id, due)
            if window is None or not window.has_room(len(packed)):
                window = BulkWindow(asyncio.get_running_loop())
                windows.append(window)
            window.put(job_id, options.name.encode(), packed, due, keys)
        for window in windows:
            self._submit(window)
        return await BulkResults(windows).finish()

    async def add_stream(
        self,
        payloads: Iterator[Any] | AsyncIterator[Any],
        encode_many: Callable[[Sequence[Any], int], list[bytes]],
        options: AddOptions,
    ) -> list[JobId]:
        """Add the payloads that an iterator yields, window by window, in bounded memory.

        `encode_many(payloads, position)` encodes one chunk. On any error, such as a payload that cannot be encoded or
        is too large, the error's `accepted` holds the ids confirmed before it.
        """
        results = BulkResults()
        position = 0
        try:
            while chunk := await _next_chunk(payloads):
                bodies = encode_many(chunk, position)
                self._check_sizes(bodies, options, position)
                position += len(chunk)
                for window in self._windows_of(bodies, options):
                    self._submit(window)
                    if not await results.keep_ahead(window):
                        return await results.finish()
        except (EncodeError, ConfigError) as error:
            error.accepted = await results.finish()
            raise
        return await results.finish()

    def check_size(self, body: bytes, retry: JobRetryOverride | None = None, which: str = "") -> None:
        """Raise `ConfigError` if a job with this payload and a generated id would exceed `max_payload_bytes`."""
        size = len(fresh_envelope(_ANY_ULID, self._slot_of(body), self.now_ms(), retry))
        if size > self._max_bytes:
            raise _too_large(size, self._max_bytes, which)

    def _check_sizes(self, bodies: Sequence[bytes], options: AddOptions, position: int = 0) -> None:
        """Raise `ConfigError` if a payload is too large, before any is sent. The error counts them from `position`."""
        if max(map(len, bodies), default=0) + MAX_ENVELOPE_BYTES > self._max_bytes:
            for number, body in enumerate(bodies, position):
                self.check_size(body, options.retry, f" {number} of this bulk")

    def _submit(self, window: Window) -> None:
        self.flush()  # jobs added before it go first
        self._chain.submit(window)

    def _windows_of(self, bodies: Sequence[bytes], options: AddOptions, due: Due | None = None) -> Iterator[BulkWindow]:
        """Yield windows of new jobs with generated ids, each packed only when it is requested."""
        name = options.name.encode()
        for start, end in _slices(bodies):
            chunk = bodies if end - start == len(bodies) else bodies[start:end]
            window = BulkWindow(asyncio.get_running_loop())
            ids, now_ms = self._minter.mint_many(len(chunk))
            if due is None and len(chunk[0]) >= LARGE_BYTES and min(map(len, chunk)) >= LARGE_BYTES:
                window.put_large(ids, self._large_jobs(ids, chunk, now_ms, options))
                yield window
                continue
            if options.retry is None and not options._tail and self._slot_of is bytes:
                joined = packed_envelopes(ids, chunk, now_ms)
                if joined is not None:
                    window.put_many(ids, name, [joined], due)
                    yield window
                    continue
            envelopes = fresh_envelopes(ids, map(self._slot_of, chunk), now_ms, options.retry)
            if options._tail:
                envelopes = [envelope + options._tail for envelope in envelopes]
            packed = [b"$%d\r\n%b\r\n" % (len(envelope), envelope) for envelope in envelopes]
            window.put_many(ids, name, packed, due)
            yield window

    def _large_jobs(self, ids: list[str], bodies: Sequence[bytes], now_ms: int, options: AddOptions) -> LargeJobs:
        inline = self._slot_of is msgspec.Raw
        ends = [
            fresh_envelope_ends(job_id, len(body), now_ms, options.retry, inline=inline)
            for job_id, body in zip(ids, bodies, strict=True)
        ]
        return LargeJobs(options.name.encode(), [head for head, _ in ends], [*bodies], ends[0][1] + options._tail)


def _too_large(size: int, limit: int, which: str = "") -> ConfigError:
    return ConfigError(
        f"payload{which} makes a job of {size:,} bytes, over max_payload_bytes ({limit:,}): workers would dead-letter "
        "it. Store the data elsewhere and add a reference to it, or raise max_payload_bytes here and in the workers"
    )


def _slices(bodies: Sequence[bytes]) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of slices that each fit into one window."""
    start = 0
    total = len(bodies)
    while start < total:
        end = min(start + MAX_CALL_ENTRIES, total)
        if sum(map(len, bodies[start:end])) + (end - start) * ENVELOPE_BYTES > MAX_CALL_BYTES:
            size, end = len(bodies[start]) + ENVELOPE_BYTES, start + 1
            while end < total and size + len(bodies[end]) + ENVELOPE_BYTES <= MAX_CALL_BYTES:
                size += len(bodies[end]) + ENVELOPE_BYTES
                end += 1
        yield start, end
        start = end


async def _next_chunk(payloads: Iterator[Any] | AsyncIterator[Any]) -> list[Any]:
    if isinstance(payloads, AsyncIterator):
        chunk: list[Any] = []
        async for payload in payloads:
            chunk.append(payload)
            if len(chunk) == MAX_CALL_ENTRIES:
                break
        return chunk
    return list(islice(payloads, MAX_CALL_ENTRIES))
