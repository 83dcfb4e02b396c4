"""Ids of stream entries, `ms-seq`, as values that can be compared and counted on. Pure functions."""

from __future__ import annotations

from typing import NamedTuple

from tampu.errors import ConfigError

#: Largest number of either half.
MAX_HALF = 2**64 - 1


class EntryId(NamedTuple):
    """An id; compares as the stream orders."""

    ms: int
    seq: int

    def __str__(self) -> str:
        return f"{self.ms}-{self.seq}"

    @property
    def next(self) -> EntryId:
        """The smallest id behind this one."""
        return EntryId(self.ms, self.seq + 1) if self.seq < MAX_HALF else EntryId(self.ms + 1, 0)

    @property
    def previous(self) -> EntryId:
        """The largest id before this one; of the first it is the first."""
        if self.seq:
            return EntryId(self.ms, self.seq - 1)
        return EntryId(self.ms - 1, MAX_HALF) if self.ms else self


#: Before every entry: no entry has this id.
BEFORE_ALL = EntryId(0, 0)
#: Behind every entry.
BEHIND_ALL = EntryId(MAX_HALF, MAX_HALF)


def parse_entry_id(text: str | bytes, where: str = "entry id") -> EntryId:
    """`1700000000000-3`, or `1700000000000` for its first; `ConfigError` names `where`."""
    shown = text.decode(errors="replace") if isinstance(text, bytes) else text
    ms, dash, seq = shown.partition("-")
    if not (ms.isascii() and ms.isdigit() and (not dash or (seq.isascii() and seq.isdigit()))):
        raise ConfigError(f"{where} must be a stream id such as 1700000000000-0; got {shown!r}")
    found = EntryId(int(ms), int(seq or 0))
    if max(found) > MAX_HALF:
        raise ConfigError(f"{where} must be a stream id of two numbers of 64 bits; got {shown!r}")
    return found
