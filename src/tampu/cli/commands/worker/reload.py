"""Watches Python files for changes by their modification times, for `--reload` during development."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

#: Polling interval, in seconds.
POLL_SECS = 0.3
#: Folders that contain no files of the user.
SKIPPED = frozenset({"__pycache__", "node_modules", "site-packages", "venv"})
#: Maximum number of files watched.
MAX_FILES = 20_000


def python_files(folder: Path) -> Iterator[tuple[str, int]]:
    """Yield (path, modification time in ns) of the Python files below a folder, except in hidden folders."""
    waiting = [str(folder)]
    seen = 0
    while waiting and seen < MAX_FILES:
        try:
            entries = list(os.scandir(waiting.pop()))
        except OSError:  # deleted, or no permission
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
    """Yield the path of a file that was changed, created or deleted, once per poll with changes."""
    known = await asyncio.to_thread(lambda: dict(python_files(folder)))
    while True:
        await asyncio.sleep(POLL_SECS)
        now = await asyncio.to_thread(lambda: dict(python_files(folder)))
        if now != known:
            different = {*now.items()} ^ {*known.items()}
            known = now
            yield min(path for path, _ in different)
