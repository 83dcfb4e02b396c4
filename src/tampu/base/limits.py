"""Limits that several parts share.

A script must not keep the server busy for more than a few milliseconds, so one call carries a bounded number of bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

T = TypeVar("T")

#: Most entries (jobs, messages, dead letters) in one script call.
MAX_CALL_ENTRIES = 256
#: Most bytes of payload in one script call. A larger entry travels alone.
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
