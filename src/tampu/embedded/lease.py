"""One user's hold on an embedded server: started when needed, started again if it crashed, let go of in the end."""

from __future__ import annotations

import asyncio
import threading

from tampu.embedded.server import EmbeddedServer, acquire, release
from tampu.errors import ShutdownError


class EmbeddedLease:
    """Starting and ending a server blocks, so both are done in a thread.

    Whoever is cancelled meanwhile leaves that thread behind: the guard makes `release` wait for it, so that the server
    is let go of exactly once.
    """

    def __init__(self, data_dir: str | None) -> None:
        self._data_dir = data_dir
        self._server: EmbeddedServer | None = None
        self._is_released = False
        self._guard = threading.Lock()

    async def running(self) -> EmbeddedServer:
        """Return the server, started if need be."""
        return await asyncio.to_thread(self._acquire)

    async def release(self) -> None:
        """Let go of the server, for good."""
        await asyncio.to_thread(self._release)

    def _acquire(self) -> EmbeddedServer:
        with self._guard:
            if self._is_released:
                raise ShutdownError("the embedded server was let go of")
            held, self._server = self._server, acquire(self._data_dir)
            if held is not None:
                release(held)
            return self._server

    def _release(self) -> None:
        with self._guard:
            self._is_released = True
            if self._server is not None:
                release(self._server)
                self._server = None
