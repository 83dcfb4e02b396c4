"""Limits the bytes of one read: XREADGROUP only takes a number of entries."""

from __future__ import annotations

#: Entries of the first read, before their size is known.
FIRST_COUNT = 8


class ReadBudget:
    """Turns the mean size of the entries seen last into the number of entries to ask for.

    A read asks for at most twice as many entries as the one before. If entries grow from one read to the next, it
    exceeds the budget: by up to `batch` entries, whose fields are limited only by the server's `proto-max-bulk-len`.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._most = FIRST_COUNT

    def count(self, wanted: int) -> int:
        """Return how many entries to ask for, out of `wanted`."""
        return min(wanted, self._most)

    def note(self, entries: int, size: int) -> None:
        """Note the reply to a read: the number of its entries and its size in bytes."""
        if entries:
            self._most = max(1, min(self._max_bytes * entries // max(size, 1), max(2 * self._most, FIRST_COUNT)))
