"""Text of errors that other libraries raise."""

from __future__ import annotations

import re

#: Escape sequences that color text in a terminal.
_COLORS = re.compile(r"\x1b\[[0-9;]*m")


def without_colors(text: str) -> str:
    """Return the text without colors: delta-rs writes them into its errors."""
    return _COLORS.sub("", text)


def one_line(text: object, most: int | None = None) -> str:
    """Return the text in one line of at most `most` characters, without colors."""
    return " ".join(without_colors(str(text)).split())[:most]
