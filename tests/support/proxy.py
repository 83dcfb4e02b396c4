"""A TCP proxy on the test's own event loop that breaks a connection at an exact byte, or answers for the server.

| you need                                     | call                                    |
|----------------------------------------------|-----------------------------------------|
| the connection cut inside a request          | `cut_requests_after(bytes)`             |
| the connection cut inside a reply            | `cut_replies_after(bytes)`              |
| a request refused before the server sees it  | `refuse(error, skip=0)`                 |
| requests or replies held back for a while    | `hold_requests()`, `hold_replies()`     |
| requests that arrive after the client is gone | `hold_requests()`, `link.strand()`, `link.deliver()` |

| you want to check                            | look at                                 |
|----------------------------------------------|-----------------------------------------|
| the script calls a client has sent           | `calls`: also those held back, not the openings of chains |
| the number of calls in flight at once        | `most_unanswered`                       |
| whether a refusal was given                  | `refusals_left`                         |
| what a connection is used for                | `link.commands`                         |

The server executes a request that has passed completely before a cut: its end of the connection is closed only after it
has answered. Faults apply to the newest connection, and to requests sent on it from then on.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from typing import TYPE_CHECKING, Self, cast

from support.resp import command_name, parse_request, reply_end, request_end

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

HOST = "127.0.0.1"

#: Small, so that slow requests cause backpressure in the client.
RECEIVE_BUFFER_BYTES = 64 * 1024


class Link:
    """One connection through the proxy, with a client side and a server side."""

    def __init__(self, proxy: Proxy) -> None:
        self.proxy = proxy
        self.client: asyncio.Transport | None = None
        self.server: asyncio.Transport | None = None
        #: Number of bytes passed on.
        self.request_bytes = 0
        self.reply_bytes = 0
        #: Number of bytes that may still pass; None = unlimited.
        self.request_budget: int | None = None
        self.reply_budget: int | None = None
        self.requests_held = False
        self.replies_held = False
        #: Script calls received, encoded and in order, including those held back or refused.
        self.calls: list[bytes] = []
        #: Names of the commands received, in order.
        self.commands: list[bytes] = []
        #: Maximum number of script calls in flight at the same time.
        self.most_unanswered = 0
        self.is_cut = False
        self.is_stranded = False
        #: Set when the server has received everything that was passed on.
        self.server_is_done = asyncio.Event()
        self._early = bytearray()  # requests received before the server side is connected, or while held back
        self._late = bytearray()  # replies received while held back
        self._refusals: deque[tuple[int, bytes]] = deque()
        self._arriving = bytearray()  # a request that has not arrived completely
        self._answered_calls = 0
        self._unread_requests = bytearray()
        #: Number of bytes of the first unread request that were already passed on.
        self._sent_ahead = 0
        self._unread_replies = bytearray()
        #: One item per request in flight: whether it is a script call, and the proxy's own answer, if any.
        self._expected: deque[tuple[bool, bytes | None]] = deque()

    @property
    def unanswered(self) -> int:
        """Requests that were passed on and whose replies have not come back."""
        return len(self._expected)

    @property
    def has_held_requests(self) -> bool:
        """True while requests are held back."""
        return bool(self._early)

    @property
    def refusals_left(self) -> int:
        """Number of refusals not given yet."""
        return len(self._refusals)

    # --- client side

    def on_request(self, data: bytes) -> None:
        if self.is_cut:
            return
        self._count(data)
        self._handle(data)

    def _count(self, data: bytes) -> None:
        self._arriving += data
        for request in whole(self._arriving, request_end):
            self.commands.append(command_name(request))
            if _is_call(request):
                self.calls.append(request)
        self.most_unanswered = max(self.most_unanswered, len(self.calls) - self._answered_calls)

    def _handle(self, data: bytes) -> None:
        if self.server is None or self.requests_held:
            self._early += data
            return
        self._unread_requests += data
        passing = bytearray()
        for request in whole(self._unread_requests, request_end):
            # A request that was partly passed on can no longer be refused.
            answer = None if self._sent_ahead else self._refusal_of(request)
            self._expected.append((_is_call(request), answer))
            if answer is None:
                passing += request[self._sent_ahead :]
            self._sent_ahead = 0
        if not self._refusals:
            passing += self._unread_requests[self._sent_ahead :]
            self._sent_ahead = len(self._unread_requests)
        self._answer()
        self._pass_on(bytes(passing))

    def _pass_on(self, data: bytes) -> None:
        if self.is_cut:
            return
        if self.request_budget is not None and len(data) >= self.request_budget:
            passing, self.request_budget = data[: self.request_budget], None
            self._to_server(passing)
            self.cut()
            return
        if self.request_budget is not None:
            self.request_budget -= len(data)
        self._to_server(data)

    def _to_server(self, data: bytes) -> None:
        self.request_bytes += len(data)
        if data and self.server is not None:
            self.server.write(data)

    def _refusal_of(self, request: bytes) -> bytes | None:
        if not self._refusals or not _is_call(request):
            return None
        skip, answer = self._refusals[0]
        if skip:
            self._refusals[0] = skip - 1, answer
            return None
        self._refusals.popleft()
        return answer

    # --- server side

    def on_reply(self, data: bytes) -> None:
        if self.is_cut or self.is_stranded:
            return
        if self.replies_held:
            self._late += data
            return
        self._unread_replies += data
        self._answer()

    def _answer(self) -> None:
        """Pass replies on in the order of the requests, including the proxy's own answers."""
        while self._expected and not self.is_cut and not self.replies_held:
            is_call, own = self._expected[0]
            if own is None:
                end = reply_end(self._unread_replies) if self._unread_replies else None
                if end is None:
                    return
                own = bytes(self._unread_replies[:end])
                del self._unread_replies[:end]
            self._expected.popleft()
            self._answered_calls += is_call
            self._to_client(own)

    def _to_client(self, data: bytes) -> None:
        if self.reply_budget is not None and len(data) >= self.reply_budget:
            data, self.reply_budget = data[: self.reply_budget], None
            self._write_to_client(data)
            self.cut(gently=True)
            return
        if self.reply_budget is not None:
            self.reply_budget -= len(data)
        self._write_to_client(data)

    def _write_to_client(self, data: bytes) -> None:
        self.reply_bytes += len(data)
        if self.client is not None:
            self.client.write(data)

    # --- faults

    def refuse(self, answer: bytes, skip: int) -> None:
        self._refusals.append((skip, answer))

    def forget_faults(self) -> None:
        """Let everything pass from now on."""
        self.request_budget = self.reply_budget = None
        self._refusals.clear()

    def resume(self) -> None:
        self.requests_held = self.replies_held = False
        early, self._early = bytes(self._early), bytearray()
        late, self._late = bytes(self._late), bytearray()
        if early:
            self._handle(early)
        self.on_reply(late)

    def cut(self, *, gently: bool = False) -> None:
        """Cut both sides. `gently` lets the client read what was already passed on to it."""
        if self.is_cut or self.is_stranded:
            return
        self.is_cut = True
        if self.client is not None:
            self.client.close() if gently else self.client.abort()
        if self.server is not None and self.server.can_write_eof():
            self.server.write_eof()  # the server reads what was passed on, answers, and closes

    def strand(self) -> None:
        """Cut the client side only: held-back requests are still in flight to the server."""
        self.is_stranded = not self.is_cut
        if self.client is not None:
            self.client.abort()

    def deliver(self) -> None:
        """Deliver the requests that are still in flight."""
        if self.is_cut:
            return
        early, self._early = bytes(self._early), bytearray()
        self._to_server(early)
        if self.server is not None and self.server.can_write_eof():
            self.server.write_eof()

    def server_opened(self, transport: asyncio.Transport) -> None:
        self.server = transport
        if self.is_cut or self.is_stranded:
            transport.abort()
        elif self._early and not self.requests_held:
            early, self._early = bytes(self._early), bytearray()
            self._handle(early)

    def side_closed(self, *, server: bool) -> None:
        if server:
            self.server_is_done.set()
        if not self.is_cut and (server or not self.is_stranded):
            self.cut(gently=server)


def _is_call(request: bytes) -> bool:
    """Return True for a script call. The opening of a chain, a window without jobs, does not count."""
    is_opening = request.startswith(b"*15\r\n") and parse_request(request)[2::12] == [b"5", b"0"]
    return command_name(request) == b"EVALSHA" and not is_opening


def whole(buffer: bytearray, end_of: object) -> Iterator[bytes]:
    """Remove whole messages from the front of a buffer and yield them."""
    while buffer:
        end = end_of(buffer)  # type: ignore[operator]
        if end is None:
            return
        yield bytes(buffer[:end])
        del buffer[:end]


class _Side(asyncio.Protocol):
    def __init__(self, link: Link, *, server: bool) -> None:
        self.link = link
        self.is_server = server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if self.is_server:
            self.link.server_opened(cast("asyncio.Transport", transport))
        else:
            self.link.client = cast("asyncio.Transport", transport)
            self.link.proxy.accepted(self.link)

    def data_received(self, data: bytes) -> None:
        delay_secs = self.link.proxy.delay_secs
        if delay_secs:
            asyncio.get_running_loop().call_later(delay_secs, self._pass, data)
        else:
            self._pass(data)

    def _pass(self, data: bytes) -> None:
        rate = self.link.proxy.request_bytes_per_sec
        if rate is not None and not self.is_server and self.link.client is not None:
            self.link.client.pause_reading()
            asyncio.get_running_loop().call_later(len(data) / rate, self._resume_reading)
        self.link.on_reply(data) if self.is_server else self.link.on_request(data)

    def _resume_reading(self) -> None:
        if self.link.client is not None and not self.link.client.is_closing():
            self.link.client.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self.link.side_closed(server=self.is_server)


class Listener:
    """Base of `Proxy` and `Peer`: listens on a free loopback port, on the test's own event loop."""

    def __init__(self) -> None:
        self.port = 0
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self.port}"

    def session(self) -> asyncio.Protocol:
        """Return the protocol for one connection."""
        raise NotImplementedError

    async def close_sessions(self) -> None:
        """Close all connections."""
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        # With its protocol named, asyncio turns Nagle's algorithm off on accepted connections; with it on, each pair of
        # small answers would take 40 ms.
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
        listener.bind((HOST, 0))
        self._server = await asyncio.get_running_loop().create_server(self.session, sock=listener)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        await self.close_sessions()
        await asyncio.sleep(0)
        await asyncio.sleep(0)


class Proxy(Listener):
    """A proxy in front of a server: `async with Proxy(server.address) as proxy:`; clients connect to `proxy.url`."""

    def __init__(self, address: tuple[str, int], *, delay_secs: float = 0.0) -> None:
        super().__init__()
        self.target = address
        #: Latency of requests and of replies, in seconds.
        self.delay_secs = delay_secs
        #: Throughput of requests; None = unlimited. Set it before clients connect.
        self.request_bytes_per_sec: float | None = None
        self.links: list[Link] = []
        #: While False, connections are accepted and closed at once.
        self.is_open = True
        #: Faults for future connections: (bytes of requests, bytes of replies).
        self.next_budgets: deque[tuple[int | None, int | None]] = deque()
        #: Refusals for future connections: for each script call the error, or None to let it pass.
        self.next_refusals: deque[list[str | None]] = deque()
        self._dials: set[asyncio.Task[None]] = set()

    @property
    def link(self) -> Link:
        """The newest connection."""
        return self.links[-1]

    @property
    def calls(self) -> list[bytes]:
        """Script calls received over all connections, encoded."""
        return [call for link in self.links for call in link.calls]

    @property
    def most_unanswered(self) -> int:
        """Maximum number of script calls in flight at the same time on one connection."""
        return max((link.most_unanswered for link in self.links), default=0)

    def session(self) -> asyncio.Protocol:
        return _Side(Link(self), server=False)

    async def close_sessions(self) -> None:
        for link in self.links:
            link.cut()
            if link.server is not None:
                link.server.abort()
        await asyncio.gather(*self._dials, return_exceptions=True)

    # --- faults

    def cut_requests_after(self, size: int) -> None:
        """Let `size` more bytes of requests pass, then cut."""
        self.link.request_budget = size

    def cut_replies_after(self, size: int) -> None:
        """Let `size` more bytes of replies pass, then cut."""
        self.link.reply_budget = size

    def refuse(self, error: str, *, skip: int = 0) -> None:
        """Answer the next script call, or the one `skip` after it, with this error; the server never sees it."""
        self.link.refuse(b"-%b\r\n" % error.encode(), skip)

    def hold_requests(self) -> None:
        self.link.requests_held = True

    def hold_replies(self) -> None:
        self.link.replies_held = True

    def resume(self) -> None:
        """Pass on what was held back."""
        self.link.resume()

    def cut(self) -> None:
        """Cut the newest connection now."""
        self.link.cut()

    def shut(self) -> None:
        """Accept no more connections, and cut the existing ones."""
        self.is_open = False
        for link in self.links:
            link.cut()

    def reopen(self) -> None:
        self.is_open = True

    def forget_faults(self) -> None:
        """Let everything pass, on this and on future connections."""
        self.is_open = True
        self.next_budgets.clear()
        self.next_refusals.clear()
        self.link.forget_faults()

    # --- internals

    def accepted(self, link: Link) -> None:
        if not self.is_open:
            link.is_cut = True
            assert link.client is not None
            link.client.abort()
            return
        if self.next_budgets:
            link.request_budget, link.reply_budget = self.next_budgets.popleft()
        skip = 0
        for error in self.next_refusals.popleft() if self.next_refusals else ():
            if error is None:
                skip += 1
            else:
                link.refuse(b"-%b\r\n" % error.encode(), skip)
                skip = 0
        self.links.append(link)
        dial = asyncio.get_running_loop().create_task(self._dial(link))
        self._dials.add(dial)
        dial.add_done_callback(self._dials.discard)

    async def _dial(self, link: Link) -> None:
        try:
            await asyncio.get_running_loop().create_connection(lambda: _Side(link, server=True), *self.target)
        except OSError:
            link.cut()
