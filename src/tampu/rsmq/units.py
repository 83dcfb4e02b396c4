"""Tells a queue whose `vt` and `delay` are in milliseconds, as Rust writes them, from one in seconds.

Rust's rsmq_async has stored milliseconds since 8.0 where everybody else stores seconds (finding 41). Nothing in the
hash says which; only the numbers give a hint.
"""

from __future__ import annotations

import logging

from tampu.rsmq.validate import MAX_DURATION_SECS

logger = logging.getLogger("tampu.rsmq")


def looks_like_milliseconds(*durations: float) -> bool:
    """Whether one of these, read as seconds, is out of range or a multiple of 1000.

    Nobody asks for 30000 seconds, but 30 s are 30000 ms. Five hours (18000 s) look the same: it is a hint, no proof.
    """
    return any(value > MAX_DURATION_SECS or (value >= 1000 and value % 1000 == 0) for value in durations)


class UnitWatch:
    """Warns once for each queue whose own `vt` or `delay`, when it is used, looks like milliseconds."""

    def __init__(self) -> None:
        self._seen: dict[str, bytes] = {}

    def look(self, qname: str, item: str, raw: bytes) -> None:
        """Note the value that a queue's hash holds."""
        key = f"{item} {qname}"
        if self._seen.get(key) == raw:
            return
        self._seen[key] = raw
        if raw.isdigit() and looks_like_milliseconds(int(raw)):
            logger.warning(
                "RSMQ queue %s has %s = %s in its hash, taken for seconds. That looks like milliseconds: the unit of "
                "Rust's rsmq_async. If so, use RsmqOptions(duration_unit='ms'), or set_queue_attributes(%r, %s=...)",
                qname,
                item,
                raw.decode(),
                qname,
                item,
            )
