"""A worker's heartbeat as bytes: a MessagePack array, to which later versions may append."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgpack
import msgspec

#: How long a heartbeat is kept, in milliseconds: a dead worker's last one says what it was running.
KEPT_MS = 600_000
#: A worker whose last heartbeat is older than this is dead, or cannot reach the server, in milliseconds.
ALIVE_MS = 5_000
#: `share` and `blocked` of heartbeats without them.
_NOT_SENT: tuple[Any, ...] = (None, "")
#: Jobs listed in one heartbeat, those that run for the longest time first.
MAX_LISTED = 100


class RunningJob(NamedTuple):
    """A job that a worker runs."""

    id: str
    name: str
    #: For how long its handler has been running, in milliseconds, when the heartbeat was published.
    running_ms: int
    #: The number of this attempt, from 1.
    attempt: int


class QueueShare(NamedTuple):
    """A queue's share of the slots of a worker."""

    #: Queues that the worker serves, and its slots that jobs of all of them occupy.
    queues: int
    used_by_all: int
    #: Slots that jobs of this queue occupy.
    used: int
    weight: int
    reserve: int
    #: The most slots that it may have; 0 = all.
    limit: int
    #: 1 while the worker cannot read the queue, otherwise 0; always 0 from older workers.
    is_failing: int = 0


class Heartbeat(NamedTuple):
    """A worker's state, as it publishes it every two seconds."""

    host: str
    pid: int
    version: str
    #: Maximum number of jobs that run at the same time.
    concurrency: int
    started_at_ms: int
    #: Jobs delivered to the worker and not settled, running ones included.
    held: int
    running_count: int
    #: The first `MAX_LISTED` running jobs.
    running: list[RunningJob]
    #: How the worker's queues share its slots; None from older workers.
    share: QueueShare | None = None
    #: What blocks the worker's event loop, and where; empty if nothing does.
    blocked: str = ""

    def find_running(self, job_id: str) -> RunningJob | None:
        """Return the running job with this ID, or None if it is not listed."""
        return next((job for job in self.running if job.id == job_id), None)

    def keeps_waiting(self, job_id: str) -> bool:
        """Return True if a job that was delivered to the worker had not started.

        A job that the worker fetched after this heartbeat counts as started if every job it held then was running: a
        slot was free. A job also counts as started if more jobs were running than a heartbeat lists.
        """
        is_complete = self.running_count <= len(self.running)
        return is_complete and self.held > self.running_count and self.find_running(job_id) is None

    def encode(self) -> bytes:
        """Return the heartbeat as bytes."""
        running = [list(job) for job in self.running]
        later = () if self.share is None else (list(self.share), self.blocked)
        packed: bytes = msgpack.packb([*self[:7], running, *later])
        return packed


def decode_heartbeat(packed: bytes) -> Heartbeat | None:
    """Return a heartbeat; None for bytes that are not one, so that one bad key does not hide the others."""
    try:
        values: list[Any] = msgpack.unpackb(packed)
        # Earlier versions leave out the last two, later ones may append to each array.
        *state, running, share, blocked = [*values[:10], *_NOT_SENT[len(values) - 8 :]]
        jobs = [job[:4] for job in running]
        return msgspec.convert([*state, jobs, share and share[:7], blocked], Heartbeat)
    except (ValueError, TypeError, msgspec.MsgspecError, msgpack.UnpackException):
        return None
