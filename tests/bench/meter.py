"""Counts the cost of a job: requests and bytes sent, commands the server runs, Python calls and instructions in tampu.

It counts instead of measuring time, so that a busy machine does not matter. Work driven by a clock (leases, promoter,
scheduler) does not depend on the number of jobs, and becomes negligible when divided by it.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from support.tracing import traced_by
from tampu.redis.connection import Connection

if TYPE_CHECKING:
    from types import FrameType

    import pytest
    import redis


@dataclass
class Meter:
    """Meter one block: `with Meter(client, monkeypatch) as meter: ...`, then `meter.per_job(jobs)`."""

    client: redis.Redis
    monkeypatch: pytest.MonkeyPatch
    requests: int = 0
    sent_bytes: int = 0
    calls: int = 0
    instructions: int = 0
    commands: dict[str, int] = field(default_factory=dict)
    _tracing: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Self:
        plain, plain_pieces = Connection.request, Connection.request_pieces

        def request(connection: Connection, packed: bytes, *arguments: Any) -> None:
            self.requests += 1
            self.sent_bytes += len(packed)
            plain(connection, packed, *arguments)

        def request_pieces(connection: Connection, pieces: list[bytes], *arguments: Any) -> None:
            self.sent_bytes += sum(map(len, pieces))
            plain_pieces(connection, pieces, *arguments)

        self.monkeypatch.setattr(Connection, "request", request)
        self.monkeypatch.setattr(Connection, "request_pieces", request_pieces)
        self.client.config_resetstat()
        self._tracing.enter_context(traced_by(self._trace))
        # Frames that are already waiting, such as a consumer's loops, are traced when they resume.
        return self

    def __exit__(self, *_: object) -> None:
        self._tracing.close()
        self.monkeypatch.undo()
        self.commands = {
            name.removeprefix("cmdstat_"): stats["calls"]
            for name, stats in self.client.info("commandstats").items()
            if name not in ("cmdstat_config|resetstat", "cmdstat_info")
        }

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_globals.get("__name__", "").startswith("tampu."):
            return None
        self.calls += 1
        frame.f_trace_lines = False
        frame.f_trace_opcodes = True
        return self._count

    def _count(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "opcode":
            self.instructions += 1
        return self._count

    def per_job(self, jobs: int) -> dict[str, Any]:
        """Return the figures per job, and the commands that the server runs for every job."""
        rounded = {name: round(calls / jobs) for name, calls in sorted(self.commands.items())}
        return {
            "requests": round(self.requests / jobs, 2),
            "bytes": round(self.sent_bytes / jobs),
            "calls": round(self.calls / jobs, 1),
            "instructions": round(self.instructions / jobs),
            "commands": {name: count for name, count in rounded.items() if count},
        }
