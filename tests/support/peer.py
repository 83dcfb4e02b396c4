"""A scripted server: speaks RESP and answers as a test tells it. For replies a real server cannot be made to give."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Self, cast

from support.proxy import HOST, whole
from support.resp import parse_request, request_end

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    #: Gets a command and says what to answer; None = nothing at all.
    Answer = Callable[[list[bytes]], bytes | None]

OK = b"+OK\r\n"


class Peer:
    """`async with Peer(answer) as peer:`; keeps what it was asked in `commands`, greetings left out."""

    GREETINGS = frozenset({b"AUTH", b"SELECT", b"CLIENT", b"SCRIPT"})

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.port = 0
        self.commands: list[list[bytes]] = []
        #: How many connections were made.
        self.connections = 0
        self._open: set[asyncio.Transport] = set()
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self.port}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.get_running_loop().create_server(lambda: _Session(self), HOST, 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for transport in list(self._open):
            transport.abort()
        await asyncio.sleep(0)

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
        self.peer._open.add(self.transport)

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        assert self.transport is not None
        for packed in whole(self.buffer, request_end):
            reply = self.peer.reply_to(parse_request(packed))
            if reply is not None:
                self.transport.write(reply)

    def connection_lost(self, error: Exception | None) -> None:
        assert self.transport is not None
        self.peer._open.discard(self.transport)
