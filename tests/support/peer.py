"""A scripted server that speaks RESP, for replies that a real server cannot be made to give."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

from support.proxy import Listener, whole
from support.resp import parse_request, request_end

if TYPE_CHECKING:
    from collections.abc import Callable

    #: Takes a command and returns the reply; None = no reply.
    Answer = Callable[[list[bytes]], bytes | None]

OK = b"+OK\r\n"


class Peer(Listener):
    """Runs a scripted server: `async with Peer(answer) as peer:`. `commands` holds the commands after the handshake."""

    GREETINGS = frozenset({b"AUTH", b"SELECT", b"CLIENT", b"SCRIPT"})

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self.answer = answer
        self.commands: list[list[bytes]] = []
        #: Number of connections accepted.
        self.connections = 0
        self.transports: set[asyncio.Transport] = set()

    def session(self) -> asyncio.Protocol:
        return _Session(self)

    async def close_sessions(self) -> None:
        for transport in list(self.transports):
            transport.abort()

    def reply_to(self, command: list[bytes]) -> bytes | None:
        if command[0].upper() in self.GREETINGS:
            return OK
        self.commands.append(command)
        return self.answer(command)


class _Session(asyncio.Protocol):
    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.buffer = bytearray()
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.peer.connections += 1
        self.peer.transports.add(self.transport)

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        assert self.transport is not None
        for packed in whole(self.buffer, request_end):
            reply = self.peer.reply_to(parse_request(packed))
            if reply is not None:
                self.transport.write(reply)

    def connection_lost(self, error: Exception | None) -> None:
        assert self.transport is not None
        self.peer.transports.discard(self.transport)
