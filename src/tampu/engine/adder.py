"""Gathers adds into windows and tells each caller what became of its jobs.

What is added in one turn of the event loop leaves as one window; a bulk leaves as windows of up to 256 jobs, the next
one packed while the server works on the last.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec

from tampu.engine.answers import BulkWindow, Collector, LoneWindow, SharedWindow
from tampu.engine.window import (
    DELAYED,
    DELAYED_WITH_ID,
    MAX_BYTES,
    MAX_JOBS,
    NOW,
    NOW_WITH_ID,
    pack_part,
)
from tampu.errors import EncodeError
from tampu.wire.envelope import fresh_envelope, fresh_envelopes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from tampu.engine.chain import Chain
    from tampu.engine.minter import Minter
    from tampu.engine.options import AddOptions
    from tampu.wire.job import JobId
    from tampu.wire.keys import QueueKeys

#: About what an envelope adds to the bytes of its payload.
ENVELOPE_BYTES = 64


class Due:
    """When a delayed job is due, packed for the script: so long from the server's now, or an instant."""

    __slots__ = ("packed",)

    def __init__(self, packed: bytes) -> None:
        self.packed = packed

    @classmethod
    def after_ms(cls, delay_ms: int) -> Due:
        """So many milliseconds from now, by the server's clock."""
        return cls(pack_part(b"+%d" % delay_ms))

    @classmethod
    def at_ms(cls, instant_ms: int) -> Due:
        """At this epoch time."""
        return cls(pack_part(b"%d" % instant_ms))


class Adder:
    """Packs jobs into windows for one queue and hands them to the chain."""

    def __init__(
        self,
        chain: Chain,
        keys: QueueKeys,
        minter: Minter,
        encode_payload: Callable[[Any], bytes],
        *,
        inline: bool,
    ) -> None:
        self._chain = chain
        self._minter = minter
        self.encode_payload = encode_payload
        #: How a payload stands in its envelope: `bytes` are wrapped in a bin, and `Raw` is written as it is.
        self._slot_of = msgspec.Raw if inline else bytes
        self._marker_prefix = f"{keys.tag}:dlid:".encode()
        self._index_prefix = f"{keys.tag}:didx:".encode()
        self._open: SharedWindow | None = None

    def now_ms(self) -> int:
        """This machine's clock, as jobs are stamped with it."""
        return self._minter.now_ms()

    # --- one job

    def add(self, payload: Any, options: AddOptions, due: Due | None = None) -> asyncio.Future[JobId]:
        """Put one job into the open window; the future tells its id or why it was refused."""
        body = self.encode_payload(payload)
        future: asyncio.Future[JobId] = asyncio.get_running_loop().create_future()
        explicit = options.id
        if explicit is None:
            job_id, now_ms = self._minter.mint()
        else:
            job_id = str(explicit)  # of a subclass too, such as the JobId of another add
            now_ms = self._minter.now_ms()
        name = options.name.encode()
        envelope = fresh_envelope(job_id, self._slot_of(body), now_ms, options.retry)
        # When nothing is under way there is nothing to wait for: the first job of a turn leaves at once, alone.
        if (
            self._open is None
            and explicit is None
            and due is None
            and self._chain.send_lone(LoneWindow(job_id, name, envelope, future))
        ):
            return future
        leaves_at_once = self._open is None and self._chain.is_idle()
        packed = pack_part(envelope)
        kind, due_packed, keys = self._kind(job_id, explicit is not None, due)
        window = SharedWindow() if leaves_at_once else self._window_for(len(packed))
        window.put(job_id, kind, name, packed, due_packed, keys)
        window.futures.append(future)
        if leaves_at_once:
            self._chain.submit(window)
        return future

    def _kind(self, job_id: str, is_explicit: bool, due: Due | None) -> tuple[bytes, bytes, tuple[bytes, ...]]:
        """(kind, due time, keys) of a job, all but the kind packed."""
        if due is None:
            if not is_explicit:
                return NOW, b"", ()
            return NOW_WITH_ID, b"", (pack_part(self._marker_prefix + job_id.encode()),)
        index = pack_part(self._index_prefix + job_id.encode())
        if not is_explicit:
            return DELAYED, due.packed, (index,)
        return DELAYED_WITH_ID, due.packed, (pack_part(self._marker_prefix + job_id.encode()), index)

    def _window_for(self, size: int) -> SharedWindow:
        window = self._open
        if window is None or not window.has_room(size):
            self.flush()
            window = self._open = SharedWindow()
            asyncio.get_running_loop().call_soon(self._flush_window, window)
        return window

    def flush(self) -> None:
        """Send the open window now."""
        if self._open is not None:
            window, self._open = self._open, None
            self._chain.submit(window)

    def _flush_window(self, window: SharedWindow) -> None:
        if self._open is window:
            self.flush()

    def abandon(self) -> None:
        """Forget the open window: it belongs to the parent of a fork, or to a loop that has ended."""
        self._open = None

    # --- many jobs

    async def add_list(self, payloads: Sequence[Any], options: AddOptions, due: Due | None = None) -> list[JobId]:
        """Add all of these. All are encoded before anything is sent, so a payload that cannot be sends nothing."""
        bodies = self._encode_many(payloads)
        collector = Collector()
        for window in self._windows_of(bodies, options, due):
            # The server works on the first while the next one is packed.
            self._submit(window)
            collector.expect(window)
        return await collector.finish()

    async def add_each(self, items: Iterable[tuple[Any, AddOptions]], due: Due | None = None) -> list[JobId]:
        """Add jobs that each have options of their own; all are encoded before anything is sent."""
        collector = Collector()
        window: BulkWindow | None = None
        windows: list[BulkWindow] = []
        for payload, options in items:
            body = self.encode_payload(payload)
            job_id, now_ms = self._minter.mint() if options.id is None else (str(options.id), self._minter.now_ms())
            envelope = pack_part(fresh_envelope(job_id, self._slot_of(body), now_ms, options.retry))
            kind, due_packed, keys = self._kind(job_id, options.id is not None, due)
            if window is None or not window.has_room(len(envelope)):
                window = BulkWindow(asyncio.get_running_loop())
                windows.append(window)
            window.put(job_id, kind, options.name.encode(), envelope, due_packed, keys)
        for window in windows:
            self._submit(window)
            collector.expect(window)
        return await collector.finish()

    async def add_stream(self, payloads: Iterator[Any] | AsyncIterator[Any], options: AddOptions) -> list[JobId]:
        """Add what an iterator gives, window by window, in bounded memory.

        What was confirmed before a payload that cannot be encoded, or before any other error, is in its `accepted`.
        """
        collector = Collector()
        position = 0
        try:
            while chunk := await _next_chunk(payloads):
                bodies = self._encode_many(chunk, position)
                position += len(chunk)
                for window in self._windows_of(bodies, options):
                    self._submit(window)
                    if not await collector.keep_ahead(window):
                        return await collector.finish()
        except EncodeError as error:
            error.accepted = await collector.finish()
            raise
        return await collector.finish()

    def _submit(self, window: BulkWindow) -> None:
        self.flush()  # what was added before goes first
        self._chain.submit(window)

    def _encode_many(self, payloads: Sequence[Any], position: int = 0) -> list[bytes]:
        """The payloads as MessagePack; the error names the place of one that cannot be, counted from `position`."""
        bodies: list[bytes] = []
        try:
            bodies.extend(map(self.encode_payload, payloads))
        except EncodeError as error:
            raise EncodeError(f"payload {position + len(bodies)} of this bulk: {error}") from error
        return bodies

    def _windows_of(self, bodies: list[bytes], options: AddOptions, due: Due | None = None) -> Iterator[BulkWindow]:
        """Windows of fresh jobs with minted ids, each packed when it is asked for."""
        name = options.name.encode()
        for start, end in _slices(bodies):
            window = BulkWindow(asyncio.get_running_loop())
            ids, now_ms = self._minter.mint_many(end - start)
            envelopes = fresh_envelopes(ids, map(self._slot_of, bodies[start:end]), now_ms, options.retry)
            packed = [b"$%d\r\n%b\r\n" % (len(envelope), envelope) for envelope in envelopes]
            if due is None:
                window.put_many(ids, name, packed)
            else:
                for job_id, envelope in zip(ids, packed, strict=True):
                    kind, due_packed, keys = self._kind(job_id, False, due)
                    window.put(job_id, kind, name, envelope, due_packed, keys)
            yield window


def _slices(bodies: list[bytes]) -> Iterator[tuple[int, int]]:
    """Cuts that keep every window within its bounds."""
    start = 0
    total = len(bodies)
    while start < total:
        end = min(start + MAX_JOBS, total)
        if sum(map(len, bodies[start:end])) + (end - start) * ENVELOPE_BYTES > MAX_BYTES:
            size, end = len(bodies[start]) + ENVELOPE_BYTES, start + 1
            while end < total and size + len(bodies[end]) + ENVELOPE_BYTES <= MAX_BYTES:
                size += len(bodies[end]) + ENVELOPE_BYTES
                end += 1
        yield start, end
        start = end


async def _next_chunk(payloads: Iterator[Any] | AsyncIterator[Any]) -> list[Any]:
    if isinstance(payloads, AsyncIterator):
        chunk: list[Any] = []
        async for payload in payloads:
            chunk.append(payload)
            if len(chunk) == MAX_JOBS:
                break
        return chunk
    return list(islice(payloads, MAX_JOBS))
