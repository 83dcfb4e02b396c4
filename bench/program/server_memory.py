"""Reads how much memory the server uses, with a socket: not every peer has a Redis client to ask with."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit


def used_memory(url: str) -> int:
    """Return the bytes that the server has allocated."""
    where = urlsplit(url)
    with socket.create_connection((where.hostname, where.port)) as connection:
        connection.sendall(b"*2\r\n$4\r\nINFO\r\n$6\r\nmemory\r\n")
        reply = b""
        while b"used_memory_human" not in reply:
            reply += connection.recv(65_536)
    return int(reply.split(b"used_memory:")[1].split()[0])
