"""Reads how much memory the server uses, with a socket: not every peer has a Redis client to ask with."""

from __future__ import annotations

import socket
import time
from urllib.parse import urlsplit

#: The server grows its tables little by little, and frees the old ones in the background: this long without a change
#: means that it is done. Seconds, and how long to wait at most.
AT_REST_SECS = 0.5
WITHIN_SECS = 5.0


def used_memory(url: str) -> int:
    """Return the bytes that the server has allocated at rest, without the buffers of connections."""
    deadline = time.monotonic() + WITHIN_SECS
    found, since = _allocated(url), time.monotonic()
    while time.monotonic() < min(since + AT_REST_SECS, deadline):
        time.sleep(0.05)
        if (now := _allocated(url)) != found:
            found, since = now, time.monotonic()
    return found


def _allocated(url: str) -> int:
    where = urlsplit(url)
    with socket.create_connection((where.hostname, where.port)) as connection:
        connection.sendall(b"*2\r\n$4\r\nINFO\r\n$6\r\nmemory\r\n")
        reply = b""
        while b"lazyfree_pending_objects" not in reply:  # one of the last lines
            reply += connection.recv(65_536)
    found = dict(line.split(b":", 1) for line in reply.split() if b":" in line)
    return int(found[b"used_memory"]) - int(found[b"mem_clients_normal"]) - int(found[b"mem_aof_buffer"])
