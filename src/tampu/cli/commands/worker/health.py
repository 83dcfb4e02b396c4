"""The HTTP server behind `--health-port`: `GET /health` for orchestrators, `GET /metrics` for Prometheus.

A worker is healthy if every process is running, its server recently answered a read, leases are renewed, and no handler
blocks the event loop for too long.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from typing import TYPE_CHECKING, Any

from tampu.cli.errors import CliError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tampu.cli.commands.worker.supervisor import Slot, Supervisor

#: How long a read may exceed its BLOCK time before the server counts as unreachable, in seconds.
READ_MARGIN_SECS = 5.0
#: Maximum size of a request, and how long to wait for it in seconds.
MAX_REQUEST_BYTES = 8192
REQUEST_SECS = 5.0
#: Connections at the same time. A new one beyond them replaces the oldest that waits for its client.
MAX_CONNECTIONS = 32

_SAMPLE = re.compile(r"(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(?P<labels>.*)\})?(?P<value> .*)")
_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}


def health_of(supervisor: Supervisor, max_silence_secs: float | None) -> tuple[bool, dict[str, Any]]:
    """Return whether all processes are healthy, and the JSON answer."""
    processes = [_process(slot, max_silence_secs) for slot in supervisor.slots]
    problems = [f"worker-{one['number']}: {one['problem']}" for one in processes if one["problem"]]
    if supervisor.is_stopping:
        problems.append("draining")
    return not problems, {"status": "unhealthy" if problems else "ok", "problems": problems, "processes": processes}


def _process(slot: Slot, max_silence_secs: float | None) -> dict[str, Any]:
    child = slot.child
    report = None if child is None else child.report
    is_alive = child is not None and child.process.returncode is None
    silent_secs = None if child is None else child.silent_secs
    quiet_secs = 0.0 if child is None or not is_alive else time.monotonic() - child.reported_at
    problem = None
    if child is None or not is_alive:
        problem = f"not running: the last process {slot.last_exit}" if slot.last_exit else "not running"
    elif report is None:
        problem = "starting"
    elif quiet_secs > (limit := max_silence_secs or report.block_secs + READ_MARGIN_SECS):
        problem = f"the process has not reported for {quiet_secs:.1f} s: it is suspended, or C code holds the GIL"
    elif report.blocked_secs > limit:
        problem = f"{report.blocked_by} (limit {limit:g} s)"
    elif silent_secs is None:
        problem = "the server has not answered yet"
    elif silent_secs > limit and not report.blocked_secs:
        problem = f"the server has not answered a read for {silent_secs:.1f} s (limit {limit:g} s)"
    elif not report.is_healthy:
        problem = "a handler blocks the event loop, or leases cannot be renewed; see the log"
    return {
        "number": slot.number,
        "pid": child.process.pid if child is not None and is_alive else None,
        "state": report.state if report is not None and is_alive else "starting" if is_alive else "dead",
        "queues": report.queues if report is not None else [],
        "connections": report.connections if report is not None else 0,
        "slots": report.slots if report is not None else 0,
        "slots_used": report.slots_used if report is not None else {},
        "seconds_since_last_read": None if silent_secs is None else round(silent_secs, 3),
        "blocked": report.blocked_by or None if report is not None and is_alive else None,
        "restarts": slot.restarts,
        "problem": problem,
    }


class HealthServer:
    """A minimal HTTP server on the supervisor's event loop, one response per connection."""

    def __init__(self, supervisor: Supervisor, host: str, port: int, max_silence_secs: float | None) -> None:
        self._supervisor = supervisor
        self._host = host
        self._port = port
        self._max_silence_secs = max_silence_secs
        self._server: asyncio.Server | None = None
        self._open = 0
        #: Connections whose client has yet to send its request or to read the answer, oldest first.
        self._waiting: dict[asyncio.StreamWriter, None] = {}

    async def start(self) -> str:
        """Start listening and return the URL. Port 0 picks a free port."""
        try:
            self._server = await asyncio.start_server(self._answer, self._host, self._port, limit=MAX_REQUEST_BYTES)
        except OSError as error:
            why = error.strerror or error
            raise CliError(f"the health endpoint cannot listen on {self._host}:{self._port}: {why}") from error
        port = self._server.sockets[0].getsockname()[1]
        return f"http://{f'[{self._host}]' if ':' in self._host else self._host}:{port}/health"

    async def stop(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._open >= MAX_CONNECTIONS:
            # Clients that send or read nothing must not keep an orchestrator out: it would kill a healthy worker.
            oldest = next(iter(self._waiting), None)
            if oldest is None:
                writer.close()
                return
            del self._waiting[oldest]
            oldest.transport.abort()
        self._open += 1
        self._waiting[writer] = None
        try:
            await self._answer_one(reader, writer)
        finally:
            self._open -= 1
            self._waiting.pop(writer, None)
            if writer.transport.get_write_buffer_size():  # the client did not read the answer in time
                writer.transport.abort()
            else:
                writer.close()

    async def _answer_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, TimeoutError):
            try:
                async with asyncio.timeout(REQUEST_SECS):
                    head = await reader.readuntil(b"\r\n\r\n")
                self._waiting.pop(writer, None)
                status, kind, body = await self._respond(head)
            except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                status, kind, body = 400, "text/plain", b"invalid request, or larger than 8 KiB\n"
            is_head_only = status != 400 and head.startswith(b"HEAD ")
            writer.write(
                f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
                "Cache-Control: no-store\r\nConnection: close\r\n\r\n".encode()
            )
            if not is_head_only:
                writer.write(body)
            self._waiting[writer] = None
            writer.transport.set_write_buffer_limits(high=0)  # `drain` waits until the client has read all of it
            async with asyncio.timeout(REQUEST_SECS):
                await writer.drain()

    async def _respond(self, head: bytes) -> tuple[int, str, bytes]:
        method, _, rest = head.partition(b"\r\n")[0].partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        if method not in (b"GET", b"HEAD"):
            return 405, "text/plain", b"method not allowed: use GET or HEAD\n"
        if path in (b"/health", b"/"):
            is_well, answer = health_of(self._supervisor, self._max_silence_secs)
            return (200 if is_well else 503), "application/json", json.dumps(answer, indent=2).encode() + b"\n"
        if path == b"/metrics":
            children = {slot.number: slot.child for slot in self._supervisor.slots if slot.child is not None}
            pages = await asyncio.gather(*(child.metrics() for child in children.values()))
            texts = dict(zip(children, pages, strict=True))
            if not any(texts.values()):
                return 404, "text/plain", b"metrics are not available: pip install 'tampu[metrics]'\n"
            return 200, "text/plain; version=0.0.4; charset=utf-8", merge_metrics(texts).encode()
        return 404, "text/plain", b"not found: use /health or /metrics\n"


def merge_metrics(texts: Mapping[int, str]) -> str:
    """Merge the metrics pages of several processes into one; each sample gets a `process` label with its number.

    Samples of one metric family stay together, as the format requires.
    """
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for number, text in texts.items():
        family = ""
        for line in text.splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                family = line.split(" ", 3)[2]
                head = heads.setdefault(family, [])
                if line not in head:
                    head.append(line)
            elif found := _SAMPLE.fullmatch(line):
                labels = ",".join(filter(None, [f'process="{number}"', found["labels"]]))
                samples.setdefault(family, []).append(f"{found['name']}{{{labels}}}{found['value']}")
    lines: list[str] = []
    for family, found_samples in samples.items():
        lines += heads.get(family, [])
        lines += found_samples
    return "\n".join(lines) + "\n"
