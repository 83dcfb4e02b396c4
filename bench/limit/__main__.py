"""The limit for Python: the same XREADGROUP and XACKDEL from a blocking socket with hiredis, and nothing else.

Uses the same protocol as all contestants. Nothing is decoded, no handler runs, and no lease is renewed.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any
from urllib.parse import urlsplit

import hiredis

from bench.limit.redis_benchmark import STREAM
from bench.ours.working import fill
from bench.program.driver import serve
from bench.program.stopwatch import Stopwatch


class BareConnection:
    """A connection that runs one command after the other."""

    def __init__(self, url: str) -> None:
        where = urlsplit(url)
        self._socket = socket.create_connection((where.hostname, where.port))
        self._reader = hiredis.Reader()

    def call(self, *parts: Any) -> Any:
        self._socket.sendall(hiredis.pack_command(parts))
        while (reply := self._reader.gets()) is False:
            self._reader.feed(self._socket.recv(1 << 20))
        if isinstance(reply, Exception):
            raise reply
        return reply

    def close(self) -> None:
        self._socket.close()


def worker(url: str, total: int, batch: int = 256) -> dict[str, float]:
    """Read and acknowledge all jobs."""
    asyncio.run(fill(url, total))
    connection = BareConnection(url)
    connection.call("XGROUP", "CREATE", STREAM, "default", "0")
    left = total
    watch = Stopwatch()
    while left:
        read = ("XREADGROUP", "GROUP", "default", "c", "COUNT", batch, "STREAMS", STREAM, ">")
        entries = connection.call(*read)[0][1]
        connection.call("XACKDEL", STREAM, "default", "IDS", len(entries), *[entry[0] for entry in entries])
        left -= len(entries)
    figures = watch.stop(total)
    connection.close()
    return figures


def queue_add(url: str, total: int) -> dict[str, float]:
    """Run one XADD after the other."""
    connection = BareConnection(url)
    watch = Stopwatch()
    for _ in range(total):
        connection.call("XADD", STREAM, "*", "d", "x" * 148)
    figures = watch.stop(total)
    connection.close()
    return figures


if __name__ == "__main__":
    serve(
        "bare loop",
        {"worker": worker, "queue-add": queue_add},
        packages=(),
        settings={"adding": "XADD from a blocking socket", "working": "XREADGROUP COUNT 256, then XACKDEL"},
    )
