"""A client's use of an embedded server: starts it when needed, restarts it after a crash, and releases it."""

from __future__ import annotations

import asyncio
import threading

from tampu.embedded.server import EmbeddedServer, acquire, release
from tampu.errors import ShutdownError


class EmbeddedLease:
    """Starts and releases a server in a thread, because both block.

    If the caller is cancelled, that thread keeps running. The guard makes `release` wait for it, so that the server is
    released exactly once.
    """

    def __init__(self, data_dir: str | None) -> None:
        self._data_dir = data_dir
        self._server: EmbeddedServer | None = None
        self._is_released = False
        self._guard = threading.Lock()

    async def running(self) -> EmbeddedServer:
        """Return the server, started if necessary."""
        return await asyncio.to_thread(self._acquire)

    async def release(self) -> None:
        """Release the server."""
        await asyncio.to_thread(self._release)

    def _acquire(self) -> EmbeddedServer:
        with self._guard:
            if self._is_released:
                raise ShutdownError("the embedded server has already been released")
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
