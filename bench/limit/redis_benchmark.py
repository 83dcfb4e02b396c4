"""Runs `redis-benchmark` with our exact commands: the limit of the server and one connection from C."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

from bench.program import stopwatch

STREAM = "{chasqui:bench}:stream"
#: Length of the envelope of our 100-byte payload.
ENVELOPE_BYTES = 148


def adding(server: Any, depth: int, total: int) -> dict[str, float]:
    """Measure XADD, `depth` at a time over one connection."""
    return _run(server, depth, total, "XADD", STREAM, "*", "d", "x" * ENVELOPE_BYTES)


def ping(server: Any, total: int) -> dict[str, float]:
    """Measure a bare round trip."""
    return _run(server, 1, total, "PING")


def _run(server: Any, depth: int, total: int, *command: str) -> dict[str, float]:
    tool = Path(server.binary).with_name("redis-benchmark")
    server_ns = stopwatch.cpu_ns([server.pid])
    output = subprocess.run(
        [str(tool), "-p", str(server.port), "-c", "1", "-P", str(depth), "-n", str(total), "-q", *command],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    used_us = (stopwatch.cpu_ns([server.pid]) - server_ns) / 1e3
    return {"rate": float(re.findall(r"([\d.]+) requests per second", output)[-1]), "server_us": used_us / total}
