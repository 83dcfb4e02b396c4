"""Generates job ids: ULIDs, with random bits drawn in blocks."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from tampu.base.clock import random_bytes, wall_clock_ms
from tampu.wire.ulid import RANDOM_BYTES, encode_time, encode_ulids, random_text

if TYPE_CHECKING:
    from collections.abc import Callable

#: Ids per block of random bits.
BLOCK = 256

#: Identifies this process; replaced after a fork. `os.getpid()` would be a system call for every id.
_process = object()


def _after_fork_in_child() -> None:
    global _process
    _process = object()


os.register_at_fork(after_in_child=_after_fork_in_child)


class Minter:
    """Generates ids. Random bits are drawn in blocks, because a system call per id costs more."""

    __slots__ = ("_drawn_in", "_now_ms", "_random_bytes", "_random_parts", "_time_ms", "_time_text")

    def __init__(
        self, now_ms: Callable[[], int] = wall_clock_ms, random_bytes: Callable[[int], bytes] = random_bytes
    ) -> None:
        self._now_ms = now_ms
        self._random_bytes = random_bytes
        self._random_parts: list[str] = []
        self._drawn_in = _process
        self._time_ms = -1
        self._time_text = ""

    def now_ms(self) -> int:
        """Return the time that a job created now is stamped with, in milliseconds."""
        return self._now_ms()

    def mint(self) -> tuple[str, int]:
        """Return (a new id, its time in milliseconds)."""
        now_ms = self._now_ms()
        if now_ms != self._time_ms:
            self._time_text = encode_time(now_ms)
            self._time_ms = now_ms
        if not self._random_parts or self._drawn_in is not _process:
            # After a fork, parent and child hold the same block: the child must draw a new one.
            text = random_text(self._random_bytes(RANDOM_BYTES * BLOCK))
            self._random_parts = [text[at : at + RANDOM_BYTES] for at in range(0, len(text), RANDOM_BYTES)]
            self._drawn_in = _process
        return self._time_text + self._random_parts.pop(), now_ms

    def mint_many(self, count: int) -> tuple[list[str], int]:
        """Return (`count` new ids, their time in milliseconds)."""
        now_ms = self._now_ms()
        return encode_ulids(now_ms, self._random_bytes(RANDOM_BYTES * count)), now_ms
