"""The protocol between a supervisor and its children: a plan on the command line, and a socket pair.

Children send reports, the supervisor sends requests. When the socket closes, a child knows that the supervisor died.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator

#: The requests that a supervisor sends.
ASK_METRICS = b"metrics\n"
ABANDON = b"abandon\n"
#: Maximum length of a line; metrics of many tasks are long.
LIMIT_BYTES = 16 * 1024 * 1024


class WorkerPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a child needs, without secrets: the URL is passed in the environment variable TAMPU_URL."""

    #: One or more `module:attribute`.
    targets: list[str]
    #: Worker settings given on the command line.
    settings: dict[str, Any] = {}
    log_format: str = "text"
    log_level: str = "info"
    #: Which jobs to log: none, failed or all.
    log_jobs: str = "failed"
    #: Whether to collect metrics.
    metrics: bool = False
    #: Number of processes with this plan.
    processes: int = 1


class Report(msgspec.Struct, kw_only=True):
    """Status of a child, sent a few times per second."""

    #: imported, running or draining.
    state: str
    #: Seconds since a server last answered a read; None before the first answer.
    silent_secs: float | None = None
    #: False while a handler blocks the event loop for too long, or leases cannot be renewed.
    is_healthy: bool = True
    #: For how long its event loop has been blocked, and by what; 0 and empty if it is not.
    blocked_secs: float = 0.0
    blocked_by: str = ""
    #: Settings of its Worker: how long a read may block, and how long stopping may take.
    block_secs: float = 5.0
    deadline_secs: float = 30.0
    queues: list[str] = []
    #: Its connections to servers, its slots, and those that jobs of each queue occupy.
    connections: int = 0
    slots: int = 0
    slots_used: dict[str, int] = {}
    #: Answer to a request for metrics, in the Prometheus text format.
    metrics: str | None = None


#: How long a thread may wait for room in the socket before a report is dropped, in seconds.
SEND_SECS = 5.0


class ThreadLink:
    """Sends reports over one end of the socket pair, from any thread."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end.dup()
        # A timeout instead of blocking mode, which an event loop changes for the copy that it reads from.
        self._socket.settimeout(SEND_SECS)
        self._guard = threading.Lock()

    def send(self, report: Report) -> None:
        """Send a report; do nothing if the other side is gone."""
        with self._guard, contextlib.suppress(OSError):
            self._socket.sendall(msgspec.json.encode(report) + b"\n")


class Link:
    """One end of the socket pair, on an event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def over(cls, end: socket.socket) -> Link:
        """Wrap one end of the socket pair."""
        return cls(*await asyncio.open_connection(sock=end, limit=LIMIT_BYTES))

    def send_line(self, line: bytes) -> None:
        """Send an encoded line; do nothing if the other side is gone."""
        with contextlib.suppress(OSError, RuntimeError):
            self._writer.write(line)

    async def lines(self) -> AsyncIterator[bytes]:
        """Yield lines from the other side until it closes the socket. A line over `LIMIT_BYTES` is skipped."""
        with contextlib.suppress(OSError):
            while True:
                try:
                    line = await self._reader.readline()
                except ValueError:  # its first part is gone; what follows is skipped as a line that is not a report
                    continue
                if not line:
                    return
                yield line

    async def reports(self) -> AsyncIterator[Report]:
        """Yield reports from the other side until it closes the socket; lines that are not reports are skipped."""
        async for line in self.lines():
            with contextlib.suppress(msgspec.MsgspecError):
                yield msgspec.json.decode(line, type=Report)

    def close(self) -> None:
        """Close this end of the socket."""
        self._writer.close()
