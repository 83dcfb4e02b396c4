"""One connection to a server: packed requests out, replies in, in order. It never reconnects; the Pipe does that."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any

import hiredis

from tampu.redis.faults import ConnectionLost, ServerError

if TYPE_CHECKING:
    from collections.abc import Callable

#: What comes back for a request: a value, or an error as a value. Never raised inside the protocol.
Reply = Any

#: One argument of a command.
Part = bytes | str | float


def pack_command(parts: tuple[Part, ...]) -> bytes:
    """A command as RESP."""
    packed: bytes = hiredis.pack_command(parts)  # type: ignore[arg-type]  # its stub allows tuples of one only
    return packed


class Connection(asyncio.Protocol):
    """The protocol object of one connection.

    A request is bytes and a function that is called once with its reply: a value, a `ServerError` or `ConnectionLost`.
    Requests written in one turn of the event loop leave in one write.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, response_timeout_secs: float) -> None:
        self.is_up = False
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._reader = hiredis.Reader(replyError=ServerError)
        self._waiting: deque[Callable[[Reply], None]] = deque()
        self._outgoing: list[bytes] = []
        self._response_timeout = response_timeout_secs
        self._last_heard = 0.0
        self._watchdog: asyncio.TimerHandle | None = None
        self._lost_callbacks: list[Callable[[], None]] = []
        self.loss: ConnectionLost | None = None

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # TCP, TLS and unix transports all are
        self.is_up = True

    def data_received(self, data: bytes) -> None:
        self._last_heard = self._loop.time()
        reader = self._reader
        waiting = self._waiting
        reader.feed(data)
        try:
            while (reply := reader.gets()) is not False:
                waiting.popleft()(reply)
        except hiredis.ProtocolError as error:
            self._lose(f"the server sent something that is not RESP: {error}")
        except IndexError:
            self._lose("the server sent a reply nobody asked for")

    def connection_lost(self, error: Exception | None) -> None:
        self._lose(str(error) if error else "the server closed the connection")

    # --- requests

    def request(self, packed: bytes, on_reply: Callable[[Reply], None]) -> None:
        """Send one packed command and have its reply delivered."""
        if not self.is_up:
            on_reply(self.loss or ConnectionLost("the connection is closed"))
            return
        outgoing = self._outgoing
        if not outgoing:
            self._loop.call_soon(self._flush)
        outgoing.append(packed)
        if not self._waiting:
            self._last_heard = self._loop.time()
            if self._watchdog is None:
                self._watchdog = self._loop.call_later(self._response_timeout, self._watch)
        self._waiting.append(on_reply)

    def ask(self, *parts: Part) -> asyncio.Future[Reply]:
        """Send one command; the future gets its reply, or the error as an exception."""
        future: asyncio.Future[Reply] = self._loop.create_future()
        self.request(pack_command(parts), future_setter(future))
        return future

    def on_loss(self, callback: Callable[[], None]) -> None:
        """Have `callback` called when the connection breaks, after every waiting request has been told."""
        self._lost_callbacks.append(callback)

    def close(self) -> None:
        """Close it; requests under way are told that the connection is lost."""
        self._lose("closed by this side")

    def detach(self) -> None:
        """Let go of a connection that is somebody else's now, without a word to the server."""
        self.is_up = False
        self._waiting.clear()
        self._outgoing.clear()

    # --- inner workings

    def _flush(self) -> None:
        outgoing = self._outgoing
        if self.is_up and outgoing and self._transport is not None:
            self._transport.write(outgoing[0] if len(outgoing) == 1 else b"".join(outgoing))
        outgoing.clear()

    def _watch(self) -> None:
        """A peer that vanished without a word keeps a connection open for minutes: give up on it ourselves."""
        self._watchdog = None
        if not self.is_up or not self._waiting:
            return
        silent_for = self._loop.time() - self._last_heard
        if silent_for >= self._response_timeout:
            self._lose(f"no answer for {silent_for:.1f} s")
        else:
            self._watchdog = self._loop.call_later(self._response_timeout - silent_for, self._watch)

    def _lose(self, why: str) -> None:
        if self.loss is not None:
            return
        self.is_up = False
        self.loss = ConnectionLost(f"connection lost: {why}")
        if self._watchdog is not None:
            self._watchdog.cancel()
            self._watchdog = None
        if self._transport is not None:
            self._transport.abort()
        self._outgoing.clear()
        waiting, self._waiting = self._waiting, deque()
        for on_reply in waiting:
            on_reply(self.loss)
        for callback in self._lost_callbacks:
            callback()


def future_setter(future: asyncio.Future[Reply]) -> Callable[[Reply], None]:
    """A receiver of a reply that resolves a future; a waiter that went away is no trouble."""

    def set_reply(reply: Reply) -> None:
        if future.done():
            return
        if isinstance(reply, Exception):
            future.set_exception(reply)
        else:
            future.set_result(reply)

    return set_reply
