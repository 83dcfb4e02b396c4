"""Reads files that other processes append lines to."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def whole_lines(path: Path) -> list[str]:
    """Return the complete lines of a file, or none if it does not exist.

    A `write` of a line is atomic only for other writers: a reader can see the first part of a line that crosses a page.
    """
    text = path.read_text() if path.exists() else ""
    return text[: text.rfind("\n") + 1].splitlines()
