"""Limits of script calls: a script must not block the server for more than a few milliseconds."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

T = TypeVar("T")

#: Maximum number of entries (jobs, messages, dead letters) per script call.
MAX_CALL_ENTRIES = 256
#: Maximum payload bytes per script call. A larger entry is sent alone.
MAX_CALL_BYTES = 256 * 1024
#: How long the mark of a cancelled job is kept, in seconds. A job that no worker has taken by then runs.
CANCEL_TTL_SECS = 86_400


def split_into_calls(items: Iterable[tuple[T, int]], max_entries: int = MAX_CALL_ENTRIES) -> Iterator[list[T]]:
    """Split (item, bytes) pairs into lists that each fit one script call, in order."""
    batch: list[T] = []
    total = 0
    for item, size in items:
        if batch and (len(batch) >= max_entries or total + size > MAX_CALL_BYTES):
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += size
    if batch:
        yield batch
