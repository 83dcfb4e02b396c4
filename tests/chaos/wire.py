"""A TCP proxy for a fleet: forwards bytes, and injects faults into all its connections at once.

`support.proxy` breaks one connection at an exact byte and keeps what was sent; this one only has to be quick.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import TracebackType

HOST = "127.0.0.1"


class Wire:
    """`async with Wire(("127.0.0.1", 6379)) as wire:`; clients connect to `wire.url`."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.target = target
        self.port = 0
        #: Delay of each piece of data, in seconds.
        self.delay_secs = 0.0
        #: Bytes per second of each connection; None: unlimited.
        self.bytes_per_sec: float | None = None
        self._open = asyncio.Event()
        self._open.set()
        self._links: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()
        self._serving: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        #: Bytes that each connection forwards before it is cut; None: any number.
        self._budget: int | None = None

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self.port}/0"

    # --- faults

    def cut(self, after_bytes: int = 0) -> None:
        """Cut every connection, after the next `after_bytes` bytes."""
        if after_bytes:
            self._budget = after_bytes
            return
        for client, server in list(self._links):
            client.transport.abort()
            server.transport.abort()

    def half_close(self) -> None:
        """Close the connections to the clients, and keep those to the server open for a while."""
        for client, _ in list(self._links):
            with contextlib.suppress(OSError, RuntimeError):
                client.write_eof()

    def swallow(self) -> None:
        """Forward nothing and close nothing: data waits."""
        self._open.clear()

    def heal(self) -> None:
        """Forward everything again, including data that waited."""
        self.delay_secs, self.bytes_per_sec, self._budget = 0.0, None, None
        self._open.set()

    # --- inner workings

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, HOST, 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        self.heal()
        self.cut()
        await asyncio.gather(*self._serving, return_exceptions=True)

    def _accept(self, from_client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        serving = asyncio.create_task(self._serve(from_client, to_client))
        self._serving.add(serving)
        serving.add_done_callback(self._serving.discard)

    async def _serve(self, from_client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        await self._open.wait()
        try:
            from_server, to_server = await asyncio.open_connection(*self.target)
        except OSError:
            to_client.transport.abort()
            return
        link = to_client, to_server
        self._links.add(link)
        try:
            await asyncio.gather(self._pump(from_client, to_server), self._pump(from_server, to_client))
        finally:
            self._links.discard(link)
            for writer in link:
                writer.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, RuntimeError):  # cut
            while data := await reader.read(65536):
                await self._open.wait()
                if self.delay_secs:
                    await asyncio.sleep(self.delay_secs)
                if self.bytes_per_sec:
                    await asyncio.sleep(len(data) / self.bytes_per_sec)
                if self._budget is not None and (budget := self._budget) < len(data):
                    writer.write(data[:budget])
                    self._budget = None
                    self.cut()
                    return
                writer.write(data)
                await writer.drain()
            writer.write_eof()
