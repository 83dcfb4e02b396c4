"""One entry of the stream in our hands, from the read to its settlement."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from tampu.wire.job import Job


class Delivery:
    """An entry that was delivered to us, decoded."""

    __slots__ = ("earlier_deliveries", "entry_id", "has_outcome", "is_lost", "is_running", "job", "when_done")

    def __init__(self, entry_id: bytes, job: Job[Any], earlier_deliveries: int) -> None:
        self.entry_id = entry_id
        #: Its `attempt` counts the runs before this one: the envelope's, plus earlier deliveries of this entry.
        self.job = job
        self.earlier_deliveries = earlier_deliveries
        self.is_running = False
        #: What became of it is known and only has to be written.
        self.has_outcome = False
        #: Somebody else owns it by now: not started if it has not been, and its failure no longer counts.
        self.is_lost = False
        #: Set for a suspect: called once when nothing of it can be lost any more by what runs next.
        self.when_done: Callable[[], None] | None = None

    @property
    def is_suspect(self) -> bool:
        """Whether it was delivered before: perhaps it kills those who run it."""
        return self.earlier_deliveries > 0

    def done(self) -> None:
        """Say that it is settled, or somebody else's, or that the server was asked and refused."""
        if self.when_done is not None:
            self.when_done()
            self.when_done = None


def entry_order(entry_id: bytes) -> tuple[int, int]:
    """Sorts entry ids as the stream does."""
    ms, _, number = entry_id.partition(b"-")
    return int(ms), int(number)
