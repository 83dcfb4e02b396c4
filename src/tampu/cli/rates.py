"""How fast a queue is filled and emptied, from two looks at it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tampu.cli.snapshot import QueueSnapshot


@dataclass(frozen=True, slots=True)
class Flow:
    """Entries per second; None where the server does not count (before Redis 7)."""

    added_per_sec: float | None
    #: Settled: done, retried or dead.
    settled_per_sec: float | None


UNKNOWN_FLOW = Flow(None, None)


def flow_between(before: QueueSnapshot | None, after: QueueSnapshot) -> Flow:
    """What flowed in and out between two looks; an entry leaves the stream only when it is settled."""
    if before is None or before.added_in_all is None or after.added_in_all is None:
        return UNKNOWN_FLOW
    secs = (after.taken_at_ms - before.taken_at_ms) / 1000
    added = after.added_in_all - before.added_in_all
    if secs <= 0 or added < 0:  # a flush, or a failover to a server that knows less
        return UNKNOWN_FLOW
    settled = max(added - (after.length - before.length), 0)
    return Flow(round(added / secs, 3), round(settled / secs, 3))
