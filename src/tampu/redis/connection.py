"""One connection to a server: sends packed requests and receives replies in order. The `Client` does reconnects."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections import deque
from typing import TYPE_CHECKING, Any, cast

import hiredis

from tampu.redis.faults import ConnectionLost, ServerError

if TYPE_CHECKING:
    from collections.abc import Callable

#: How often a connection that waits for a reply is checked, per response timeout.
CHECKS_PER_TIMEOUT = 4

#: The reply to a request: a value, or an error as a value. The protocol itself never raises it.
Reply = Any

#: One argument of a command.
Part = bytes | str | float


def pack_command(parts: tuple[Part, ...]) -> bytes:
    """Encode a command as RESP."""
    packed: bytes = hiredis.pack_command(parts)  # type: ignore[arg-type]  # its stub allows tuples of one only
    return packed


class Connection(asyncio.Protocol):
    """The protocol object of one connection.

    A request is bytes and a function that is called once with the reply: a value, a `ServerError` or `ConnectionLost`.
    The requests of one event loop iteration are sent in two writes: the first at once, the rest together.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, response_timeout_secs: float, peer: str = "the server") -> None:
        self.is_up = False
        self._peer = peer
        self._made_in = os.getpid()
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._reader = hiredis.Reader(replyError=ServerError)
        self._waiting: deque[Callable[[Reply], None]] = deque()
        self._outgoing: list[bytes] = []
        self._gathers = False
        self._response_timeout = response_timeout_secs
        self._last_heard = 0.0
        #: Bytes received so far.
        self.bytes_received = 0
        #: Bytes passed to the transport, and how many of them had been sent at the last check.
        self._written = 0
        self._left = 0
        self._watchdog: asyncio.TimerHandle | None = None
        self._lost_callbacks: list[Callable[[], None]] = []
        self.loss: ConnectionLost | None = None
        #: How long the server had been silent when the connection timed out, in seconds; 0 if it broke otherwise.
        self.silent_secs = 0.0
        #: Receives replies without a request, such as messages of a subscription. By default one closes the connection.
        self.on_push: Callable[[Reply], None] = self._refuse_push

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # true for TCP, TLS and unix transports
        self.is_up = True

    def data_received(self, data: bytes) -> None:
        self._last_heard = self._loop.time()
        self.bytes_received += len(data)
        reader = self._reader
        waiting = self._waiting
        reader.feed(data)
        try:
            while (reply := reader.gets()) is not False:
                on_reply = waiting.popleft() if waiting else self.on_push
                on_reply(reply)
        except hiredis.ProtocolError as error:
            self._lose(f"the server sent invalid RESP: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        transport = self._transport
        if error is not None and self.loss is None and transport is not None and sys.platform == "linux":
            # A write failed, and the reason may not be read yet: a server with too many clients sends it and closes.
            with contextlib.suppress(AttributeError, OSError):
                if transport.get_extra_info("sslcontext") is None:
                    self.data_received(os.read(transport.get_extra_info("socket").fileno(), 4096))
        self._lose(str(error) if error else "the server closed the connection")

    # --- requests

    def request(self, packed: bytes, on_reply: Callable[[Reply], None]) -> None:
        """Send one packed command; `on_reply` is called once with its reply."""
        if not self.is_up:
            on_reply(self.loss or ConnectionLost("the connection is closed"))
            return
        if self._gathers:
            self._outgoing.append(packed)
        elif self._transport is not None:
            # The first request of an iteration is sent at once; later ones of the same iteration are gathered.
            self._transport.write(packed)
            self._written += len(packed)
            self._gathers = True
            self._loop.call_soon(self._flush)
        if not self._waiting:
            self._last_heard = self._loop.time()
            if self._watchdog is None:
                self._watchdog = self._loop.call_later(self._response_timeout / CHECKS_PER_TIMEOUT, self._watch)
        self._waiting.append(on_reply)

    def request_pieces(self, pieces: list[bytes], count: int, on_replies: Callable[[list[Reply]], None]) -> None:
        """Send `count` packed commands given in pieces, without joining them; `on_replies` gets all replies at once."""
        replies: list[Reply] = []

        def last(reply: Reply) -> None:
            replies.append(reply)
            on_replies(replies)

        if not self.is_up or self._transport is None:
            last(self.loss or ConnectionLost("the connection is closed"))
            return
        self._flush()  # requests that were gathered before go first
        self._transport.writelines(pieces)
        self._written += sum(map(len, pieces))
        self.request(b"", replies.append)  # all is sent; only the replies are to come
        self._waiting.extend([replies.append] * (count - 2))
        self._waiting.append(last)

    def request_now(self, packed: bytes, on_reply: Callable[[Reply], None]) -> bool:
        """As `request`, but hand the bytes to the kernel before returning, so that they outlive this process.

        Return False, and send nothing, if that cannot be done now: others wait before them, or TLS is in between.
        """
        transport = self._transport
        if not self.is_up or self._outgoing or transport is None or transport.get_write_buffer_size():
            return False
        if transport.get_extra_info("sslcontext") is not None:
            return False
        try:
            sent = os.write(transport.get_extra_info("socket").fileno(), packed)
        except OSError:  # its buffer is full, or it is about to be lost
            return False
        self._written += sent
        self.request(packed[sent:], on_reply)  # what is left, nearly always nothing
        return True

    def ask(self, *parts: Part) -> asyncio.Future[Reply]:
        """Send one command and return a future of its reply, or of the error as an exception."""
        future: asyncio.Future[Reply] = self._loop.create_future()
        self.request(pack_command(parts), future_setter(future))
        return future

    def on_loss(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the connection breaks, after every request in flight has failed."""
        self._lost_callbacks.append(callback)

    def forget_loss(self, callback: Callable[[], None]) -> None:
        """Do not call `callback` when the connection breaks."""
        with contextlib.suppress(ValueError):
            self._lost_callbacks.remove(callback)

    def close(self) -> None:
        """Close the connection; requests in flight fail with `ConnectionLost`."""
        self._lose("closed by this side")

    def detach(self) -> bool:
        """Drop a connection whose event loop has ended, or that belongs to the parent of a fork.

        Return whether its socket is closed. If not, keep a reference: garbage collection would touch the other owner's
        socket and loop.
        """
        self.is_up = False
        if self._made_in == os.getpid() and self._transport is not None:
            # Not shared with another process: release the server's end. (The loop that could close this end is gone.)
            with contextlib.suppress(Exception):  # uvloop has closed it together with the loop
                self._transport.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
        self._waiting.clear()
        self._outgoing.clear()
        return self._made_in == os.getpid() and self._loop.is_closed() and _close_socket(self._transport)

    # --- internals

    def _flush(self) -> None:
        self._gathers = False
        outgoing = self._outgoing
        if self.is_up and outgoing and self._transport is not None:
            packed = outgoing[0] if len(outgoing) == 1 else b"".join(outgoing)
            self._transport.write(packed)
            self._written += len(packed)
        outgoing.clear()

    def _watch(self) -> None:
        """Give up on a server that vanished without closing the connection: TCP would keep it open for minutes.

        A large request over a slow link counts as progress while its bytes are being sent.
        """
        self._watchdog = None
        if not self.is_up or not self._waiting or self._transport is None:
            return
        now = self._loop.time()
        left = self._written - self._transport.get_write_buffer_size() - _unsent_bytes(self._transport)
        if left > self._left:
            self._left = left
            self._last_heard = max(self._last_heard, now - self._response_timeout / CHECKS_PER_TIMEOUT)
        silent_for = now - self._last_heard
        if silent_for >= self._response_timeout:
            self.silent_secs = silent_for
            self._lose(f"no reply from {self._peer} for {silent_for:.1f} s")
            return
        wait_secs = min(self._response_timeout - silent_for, self._response_timeout / CHECKS_PER_TIMEOUT)
        self._watchdog = self._loop.call_later(wait_secs, self._watch)

    def _refuse_push(self, reply: Reply) -> None:
        self._lose(str(reply) if isinstance(reply, ServerError) else "the server sent a reply without a request")

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
        for callback in self._lost_callbacks.copy():
            callback()


class AskingConnection(Connection):
    """A connection to a Cluster node that imports a slot: sends ASKING before each request."""

    def request(self, packed: bytes, on_reply: Callable[[Reply], None]) -> None:
        super().request(_ASKING, lambda reply: None)
        super().request(packed, on_reply)


_ASKING = pack_command(("ASKING",))


def _unsent_bytes(transport: asyncio.Transport) -> int:
    """Return the bytes in the kernel's send buffer that the peer has not acknowledged; 0 if not available."""
    if sys.platform != "linux":
        return 0
    import fcntl  # not available on Windows
    import termios

    found = transport.get_extra_info("socket")
    try:
        return int.from_bytes(fcntl.ioctl(found.fileno(), termios.TIOCOUTQ, b"\0" * 4), sys.byteorder)
    except (AttributeError, OSError):  # closed
        return 0


def _close_socket(transport: Any) -> bool:
    """Close the socket of a transport whose event loop is closed and can no longer do it.

    Without this a program that runs one event loop after another (a synchronous view that calls asyncio.run) runs out
    of file descriptors. uvloop closes them with the loop.
    """
    protocol = getattr(transport, "_ssl_protocol", None)
    if protocol is not None:
        transport._closed = True  # avoids its ResourceWarning
        transport = protocol._transport
    found = getattr(transport, "_sock", None)
    if found is not None:
        found.close()
        transport._sock = None
    return found is not None


def future_setter(future: asyncio.Future[Reply]) -> Callable[[Reply], None]:
    """Return a callback that resolves a future with a reply; ignores it if the waiter was cancelled."""

    def set_reply(reply: Reply) -> None:
        if future.done():
            return
        if isinstance(reply, Exception):
            future.set_exception(reply)
        else:
            future.set_result(reply)

    return set_reply
