"""The socket pair between a supervisor and one child: reports go up, questions go down, and its end says "gone"."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import msgspec

from tampu.cli.worker.plan import Report

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator

#: The one question a supervisor asks.
ASK_METRICS = b"metrics\n"
#: Longest line; metrics of many tasks are long.
LIMIT_BYTES = 16 * 1024 * 1024


class Link:
    """One end of the pair, on an event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def over(cls, end: socket.socket) -> Link:
        """Take over one end."""
        return cls(*await asyncio.open_connection(sock=end, limit=LIMIT_BYTES))

    def send(self, report: Report) -> None:
        """Tell the other side; whether it is still there does not matter."""
        self.send_line(msgspec.json.encode(report) + b"\n")

    def send_line(self, line: bytes) -> None:
        """The same with a line that is packed already."""
        with contextlib.suppress(OSError, RuntimeError):
            self._writer.write(line)

    async def lines(self) -> AsyncIterator[bytes]:
        """What the other side says, until it is gone."""
        with contextlib.suppress(OSError, ValueError):
            while line := await self._reader.readline():
                yield line

    async def reports(self) -> AsyncIterator[Report]:
        """The same as reports; what is none is passed over."""
        async for line in self.lines():
            with contextlib.suppress(msgspec.MsgspecError):
                yield msgspec.json.decode(line, type=Report)

    def close(self) -> None:
        """Let go of it."""
        self._writer.close()
