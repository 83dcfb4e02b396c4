"""What a worker publishes about itself: where it runs, which jobs it runs, and which of them blocks its event loop."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from tampu.base.clock import boot_clock_ns, wall_clock_ms
from tampu.inspect.snapshot import UNBLOCK
from tampu.wire.heartbeat import ALIVE_MS, KEPT_MS, MAX_LISTED, Heartbeat, QueueShare, RunningJob

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tampu.consume.inflight import Delivery
    from tampu.consume.pool import Pool
    from tampu.consume.runtime import ServedQueue

#: How often a worker publishes its heartbeat, in seconds.
INTERVAL_SECS = 2.0


class Heartbeats:
    """The heartbeats of this worker for one queue."""

    def __init__(self, queue: ServedQueue, pool: Pool, watch: LoopWatch) -> None:
        from tampu import version  # here: the package's own module imports this one

        self._queue = queue
        self._pool = pool
        self._watch = watch
        self._key = queue.keys.heartbeat(queue.config.group, queue.config.consumer_id)
        self._version = version()
        self._host = socket.gethostname()
        self._started_at_ms = wall_clock_ms()

    @property
    def command(self) -> tuple[str | bytes | int, ...]:
        """The command that publishes the current state."""
        return ("SET", self._key, self._heartbeat().encode(), "PX", KEPT_MS)

    @property
    def last_command(self) -> tuple[str | int, ...]:
        """The command that ends it with the worker: removes it, or makes it too old for a live worker.

        A worker that abandons jobs stays in the group. Without a heartbeat it would count as a live worker of a version
        that publishes none.
        """
        if len(self._queue.inflight):
            return ("PEXPIRE", self._key, KEPT_MS - ALIVE_MS - 1)
        return ("DEL", self._key)

    def _heartbeat(self) -> Heartbeat:
        now_ns = boot_clock_ns()
        queue, share = self._queue, self._queue.share
        running = queue.inflight.running_deliveries()
        # The longest first: a handler that hangs is listed, however many others run.
        running.sort(key=lambda delivery: delivery.started_ns)
        return Heartbeat(
            host=self._host,
            pid=os.getpid(),
            version=self._version,
            concurrency=queue.config.concurrency,
            started_at_ms=self._started_at_ms,
            held=len(queue.inflight),
            running_count=len(running),
            running=[
                RunningJob(each.job.id, each.job.name, (now_ns - each.started_ns) // 1_000_000, each.job.attempt + 1)
                for each in running[:MAX_LISTED]
            ],
            share=QueueShare(
                queues=self._pool.shares.queues,
                used_by_all=self._pool.occupied,
                used=share.occupied,
                weight=share.weight,
                reserve=share.reserve,
                limit=share.limit or 0,
                is_failing=int(queue.is_failing),
            ),
            blocked=str(self._watch.blocked or ""),
        )


logger = logging.getLogger("tampu.worker")

#: How often the event loop shows that it runs, and the thread checks that, in seconds.
BEAT_SECS = 0.25
#: An event loop that has not run for this long counts as blocked, in seconds.
BLOCKED_SECS = 1.0
#: A block is logged once it lasts this long, in seconds.
LOG_SECS = 5.0
#: Frames of these modules run handlers, and are not part of one.
_LOOP_MODULES = ("asyncio.", "uvloop.", "concurrent.", "threading", "contextlib")


class Blocked(NamedTuple):
    """The cause of a blocked event loop."""

    #: For how long it has been blocked.
    secs: float
    #: The job whose handler blocks it, as `name id`; empty if it is not a handler.
    job: str
    #: Where the handler is, as `app.py:12 in charge`; empty if it is unknown.
    place: str

    def __str__(self) -> str:
        what = f"job {self.job}" if self.job else "code outside of a handler"
        where = f" at {self.place}" if self.place else ""
        return f"{what} has blocked the event loop for {self.secs:.1f} s{where}"


class LoopWatch:
    """Finds the handler that blocks the event loop, for the log and health checks; called by the lease thread.

    `deliveries` returns what runs on the event loop of the thread that makes this object.
    """

    def __init__(self, deliveries: Callable[[], Iterable[Delivery]]) -> None:
        self._deliveries = deliveries
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._has_logged = False
        #: What blocks the event loop now; None if nothing does.
        self.blocked: Blocked | None = None

    def check(self, secs: float) -> None:
        """Record that the event loop has not run for this long."""
        if secs < BLOCKED_SECS:
            self.blocked = None
            self._has_logged = False
            return
        self.blocked = blocked = Blocked(secs, self._blocking_job(), self._place())
        if secs >= LOG_SECS and not self._has_logged:
            self._has_logged = True
            logger.warning("%s; %s", blocked, UNBLOCK)

    def _blocking_job(self) -> str:
        task = asyncio.current_task(self._loop)
        for delivery in self._deliveries():
            if getattr(delivery, "task", None) is task and task is not None:
                return f"{delivery.job.name or '(unnamed)'} {delivery.job.id}"
        return ""

    def _place(self) -> str:
        """Return where the handler is: the frame that tampu called, which may have called libraries."""
        frame: Any = sys._current_frames().get(self._thread_id)
        found = None
        while frame is not None:
            module = str(frame.f_globals.get("__name__", ""))
            if module.startswith("tampu."):
                break
            if not module.startswith(_LOOP_MODULES):
                found = frame
            frame = frame.f_back
        if found is None:
            return ""
        return f"{os.path.basename(found.f_code.co_filename)}:{found.f_lineno} in {found.f_code.co_name}"
