"""How a supervisor and its child processes talk: the plan on the child's command line, and a socket pair.

Reports go up the socket, questions go down, and its end tells a child that the supervisor is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator

#: The one question a supervisor asks.
ASK_METRICS = b"metrics\n"
#: Longest line; metrics of many tasks are long.
LIMIT_BYTES = 16 * 1024 * 1024


class WorkerPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a child needs. Secrets are not in it: the URL travels as the variable TAMPU_URL."""

    #: `module:attribute`, once or more.
    targets: list[str]
    #: Settings of the Worker that were given on the command line.
    settings: dict[str, Any] = {}
    log_format: str = "text"
    log_level: str = "info"
    #: Which jobs are logged: none, failed or all.
    log_jobs: str = "failed"
    #: Whether to gather metrics.
    metrics: bool = False
    #: How many processes work by this plan.
    processes: int = 1

    def to_argument(self) -> str:
        """As one argument of a command line."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_argument(cls, text: str) -> WorkerPlan:
        """The plan in such an argument."""
        return msgspec.json.decode(text, type=WorkerPlan)


class Report(msgspec.Struct, kw_only=True):
    """What a child tells of itself, a few times a second."""

    #: imported, running or draining.
    state: str
    #: Seconds since a server last answered a read; None before the first.
    silent_secs: float | None = None
    #: False while a handler blocks the event loop for too long, or leases cannot be renewed.
    is_healthy: bool = True
    #: Of its Worker: how long a read may take, and how long it may take to drain.
    block_secs: float = 5.0
    deadline_secs: float = 30.0
    queues: list[str] = []
    #: The answer to a request for metrics, in Prometheus' text form.
    metrics: str | None = None


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
