"""Collects jobs into windows and returns each caller the ids of its jobs.

Jobs added in one turn of the event loop form one window. A bulk is sent in windows of up to 256 jobs; the next one is
packed while the server works on the last.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec

from tampu.base.limits import MAX_CALL_BYTES, MAX_CALL_ENTRIES
from tampu.errors import ConfigError, EncodeError
from tampu.produce.window import (
    LARGE_ALONE_BYTES,
    LARGE_BYTES,
    BulkResults,
    BulkWindow,
    LargeJobs,
    SharedWindow,
    SingleWindow,
    Window,
    pack_part,
)
from tampu.redis.codes import AddKind
from tampu.wire.envelope import fresh_envelope, fresh_envelope_ends, fresh_envelopes, packed_envelopes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from tampu.produce.chain import Chain
    from tampu.produce.ids import Minter
    from tampu.produce.options import AddOptions
    from tampu.wire.job import JobId
    from tampu.wire.keys import QueueKeys
    from tampu.wire.retry import JobRetryOverride

#: Approximate size of an envelope without its payload, in bytes.
ENVELOPE_BYTES = 64
#: Upper bound of that size if the id is generated: a payload this far below the limit needs no exact check.
MAX_ENVELOPE_BYTES = 512

_ANY_ULID = "0" * 26


class Due:
    """The due time of a delayed job, packed for the script: relative to the server's clock, or absolute."""

    __slots__ = ("packed",)

    def __init__(self, packed: bytes) -> None:
        self.packed = packed

    @classmethod
    def after_ms(cls, delay_ms: int) -> Due:
        """Return the due time `delay_ms` milliseconds from now, by the server's clock."""
        return cls(pack_part(b"+%d" % delay_ms))

    @classmethod
    def at_ms(cls, instant_ms: int) -> Due:
        """Return the due time at this epoch time, in milliseconds."""
        return cls(pack_part(b"%d" % instant_ms))


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
        self._marker_prefix = keys.dedup_marker("").encode()
        self._cancel_prefix = keys.cancel_mark("").encode()
        self._index_prefix = keys.delayed_index("").encode()
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
        if options.tail:
            envelope += options.tail
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
        kind, due_packed, keys = self._kind(job_id, explicit is not None, due)
        window = SharedWindow() if sends_at_once else self._window_for(len(packed))
        window.put(job_id, kind, name, packed, due_packed, keys)
        window.futures.append(future)
        if sends_at_once:
            self._chain.submit(window)
        return future

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

    def _kind(self, job_id: str, is_explicit: bool, due: Due | None) -> tuple[bytes, bytes, tuple[bytes, ...]]:
        """Return (kind, due time, keys) of a job; due time and keys are packed."""
        if due is None:
            if not is_explicit:
                return AddKind.NOW, b"", ()
            return AddKind.NOW_WITH_ID, b"", self._id_keys(job_id)
        if not is_explicit:
            return AddKind.DELAYED, due.packed, ()
        index = pack_part(self._index_prefix + job_id.encode())
        return AddKind.DELAYED_WITH_ID, due.packed, (*self._id_keys(job_id), index)

    def _id_keys(self, job_id: str) -> tuple[bytes, bytes]:
        """Return the keys of an explicit id: its dedup marker, and its cancel mark, which a new add removes."""
        encoded = job_id.encode()
        return pack_part(self._marker_prefix + encoded), pack_part(self._cancel_prefix + encoded)

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
            envelope = fresh_envelope(job_id, self._slot_of(body), now_ms, options.retry) + options.tail
            if len(envelope) > self._max_bytes:
                raise _too_large(len(envelope), self._max_bytes, f" {position} of this bulk")
            packed = pack_part(envelope)
            kind, due_packed, keys = self._kind(job_id, options.id is not None, due)
            if window is None or not window.has_room(len(packed)):
                window = BulkWindow(asyncio.get_running_loop())
                windows.append(window)
            window.put(job_id, kind, options.name.encode(), packed, due_packed, keys)
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
            some = bodies if end - start == len(bodies) else bodies[start:end]
            window = BulkWindow(asyncio.get_running_loop())
            ids, now_ms = self._minter.mint_many(len(some))
            if due is None and len(some[0]) >= LARGE_BYTES and min(map(len, some)) >= LARGE_BYTES:
                window.put_large(ids, self._large_jobs(ids, some, now_ms, options))
                yield window
                continue
            due_packed = b"" if due is None else due.packed
            if options.retry is None and not options.tail and self._slot_of is bytes:
                joined = packed_envelopes(ids, some, now_ms)
                if joined is not None:
                    window.put_many(ids, name, [joined], due_packed)
                    yield window
                    continue
            envelopes = fresh_envelopes(ids, map(self._slot_of, some), now_ms, options.retry)
            if options.tail:
                envelopes = [envelope + options.tail for envelope in envelopes]
            packed = [b"$%d\r\n%b\r\n" % (len(envelope), envelope) for envelope in envelopes]
            window.put_many(ids, name, packed, due_packed)
            yield window

    def _large_jobs(self, ids: list[str], bodies: Sequence[bytes], now_ms: int, options: AddOptions) -> LargeJobs:
        inline = self._slot_of is msgspec.Raw
        ends = [
            fresh_envelope_ends(job_id, len(body), now_ms, options.retry, inline=inline)
            for job_id, body in zip(ids, bodies, strict=True)
        ]
        return LargeJobs(options.name.encode(), [head for head, _ in ends], [*bodies], ends[0][1] + options.tail)


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
