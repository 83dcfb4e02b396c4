"""Watches Python files for changes, by their times: for `--reload`, while one develops."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

#: How often the files are looked at, in seconds.
POLL_SECS = 0.3
#: Folders whose files are not the user's.
SKIPPED = frozenset({"__pycache__", "node_modules", "site-packages", "venv"})
#: Files watched at the most.
MAX_FILES = 20_000


def python_files(folder: Path) -> Iterator[tuple[str, int]]:
    """(path, time of change in ns) of the Python files below a folder; hidden folders are passed over."""
    waiting = [str(folder)]
    seen = 0
    while waiting and seen < MAX_FILES:
        try:
            entries = list(os.scandir(waiting.pop()))
        except OSError:  # gone, or not ours to read
            continue
        for entry in entries:
            if entry.name.startswith(".") or entry.name in SKIPPED:
                continue
            try:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                elif entry.name.endswith(".py"):
                    seen += 1
                    yield entry.path, entry.stat().st_mtime_ns
            except OSError:
                continue


async def changes(folder: Path) -> AsyncIterator[str]:
    """The path of a file that changed, came or went, each time some did."""
    known = await asyncio.to_thread(lambda: dict(python_files(folder)))
    while True:
        await asyncio.sleep(POLL_SECS)
        now = await asyncio.to_thread(lambda: dict(python_files(folder)))
        if now != known:
            different = {*now.items()} ^ {*known.items()}
            known = now
            yield min(path for path, _ in different)
