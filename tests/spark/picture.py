"""Reads a PNG without a library: how many pixels have a colour."""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

#: Bytes of a pixel by the kind of picture: RGB, RGBA.
_BYTES = {2: 3, 6: 4}


def pixels_of(path: Path) -> np.ndarray:
    """Height by width by (red, green, blue)."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    position, packed, header = 8, b"", b""
    while position < len(data):
        (length,) = struct.unpack(">I", data[position : position + 4])
        kind, body = data[position + 4 : position + 8], data[position + 8 : position + 8 + length]
        header, packed = (body if kind == b"IHDR" else header), packed + (body if kind == b"IDAT" else b"")
        position += 12 + length
    width, height, depth, kind_of_pixel, *_ = struct.unpack(">IIBBBBB", header)
    assert depth == 8
    size = _BYTES[kind_of_pixel]
    lines = np.frombuffer(zlib.decompress(packed), np.uint8).reshape(height, width * size + 1)
    picture = np.zeros((height, width * size), np.uint8)
    above = np.zeros(width * size, np.uint8)
    for number, line in enumerate(lines):
        above = picture[number] = _unfiltered(int(line[0]), line[1:], above, size)
    return picture.reshape(height, width, size)[:, :, :3]


def count_colour(pixels: np.ndarray, colour: str) -> int:
    """How many pixels are exactly `#rrggbb`."""
    wanted = np.frombuffer(bytes.fromhex(colour.removeprefix("#")), np.uint8)
    return int((pixels == wanted).all(axis=2).sum())


def _unfiltered(kind: int, line: np.ndarray, above: np.ndarray, size: int) -> np.ndarray:
    """A line as it was: PNG stores differences to the pixel before, above, or both."""
    if kind == 0:
        return line
    if kind == 2:
        return line + above
    found = bytearray(line.tobytes())
    up = above.tobytes()
    for at in range(len(found)):
        left = found[at - size] if at >= size else 0
        corner = up[at - size] if at >= size else 0
        if kind == 1:
            guess = left
        elif kind == 3:
            guess = (left + up[at]) // 2
        else:
            guess = min((left, up[at], corner), key=lambda value: abs(left + up[at] - corner - value))
        found[at] = (found[at] + guess) & 255
    return np.frombuffer(bytes(found), np.uint8)
