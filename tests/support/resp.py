"""Just enough of RESP to find the end of a request or reply, and to act as a server."""

from __future__ import annotations


def request_end(data: bytes | bytearray, start: int = 0) -> int | None:
    """Return the end of the command that starts at `start`, or None while it is incomplete."""
    line_end = data.find(b"\r\n", start)
    if line_end < 0:
        return None
    position = line_end + 2
    for _ in range(int(data[start + 1 : line_end])):
        line_end = data.find(b"\r\n", position)
        if line_end < 0:
            return None
        position = line_end + 2 + int(data[position + 1 : line_end]) + 2
    return position if position <= len(data) else None


def reply_end(data: bytes | bytearray, start: int = 0) -> int | None:
    """Return the end of the reply that starts at `start`, or None while it is incomplete."""
    line_end = data.find(b"\r\n", start)
    if line_end < 0:
        return None
    kind, position = data[start : start + 1], line_end + 2
    if kind == b"$":
        size = int(data[start + 1 : line_end])
        position += size + 2 if size >= 0 else 0
    elif kind == b"*":
        for _ in range(max(int(data[start + 1 : line_end]), 0)):
            inner_end = reply_end(data, position)
            if inner_end is None:
                return None
            position = inner_end
    return position if position <= len(data) else None


def parse_request(packed: bytes) -> list[bytes]:
    """Return the arguments of one complete command."""
    parts: list[bytes] = []
    position = packed.index(b"\r\n") + 2
    while position < len(packed):
        line_end = packed.index(b"\r\n", position)
        size = int(packed[position + 1 : line_end])
        parts.append(packed[line_end + 2 : line_end + 2 + size])
        position = line_end + 2 + size + 2
    return parts


def command_name(packed: bytes | bytearray) -> bytes:
    """Return the first argument of a command, such as EVALSHA, in upper case."""
    start = packed.index(b"\r\n", packed.index(b"\r\n") + 2) + 2
    return bytes(packed[start : packed.index(b"\r\n", start)]).upper()
