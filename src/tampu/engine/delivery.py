"""One entry of the stream in our hands, from the read to its settlement."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tampu.wire.job import Job


class Delivery:
    """An entry that was delivered to us, decoded."""

    __slots__ = ("earlier_deliveries", "entry_id", "is_lost", "is_running", "job", "job_done")

    def __init__(self, entry_id: bytes, job: Job[Any], earlier_deliveries: int) -> None:
        self.entry_id = entry_id
        #: Its `attempt` counts the runs before this one: the envelope's, plus earlier deliveries of this entry.
        self.job = job
        self.earlier_deliveries = earlier_deliveries
        self.is_running = False
        #: Somebody else owns it by now: not started if it has not been, and its failure no longer counts.
        self.is_lost = False
        #: Set for a suspect: called when it is done with.
        self.job_done: Any = None

    @property
    def is_suspect(self) -> bool:
        """Whether it was delivered before: perhaps it kills those who run it."""
        return self.earlier_deliveries > 0


def entry_order(entry_id: bytes) -> tuple[int, int]:
    """Sorts entry ids as the stream does."""
    ms, _, number = entry_id.partition(b"-")
    return int(ms), int(number)
