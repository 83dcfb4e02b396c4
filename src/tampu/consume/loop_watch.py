"""Watches a worker's event loop from a thread: the handler that blocks it is logged, and named by health checks."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tampu.consume.inflight import Delivery

logger = logging.getLogger("tampu.worker")

#: How often the event loop shows that it runs, and the thread looks, in seconds.
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
    """Watches the running event loop until `stop`. `deliveries` returns what runs on it."""

    def __init__(self, deliveries: Callable[[], Iterable[Delivery]]) -> None:
        self._deliveries = deliveries
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._beat_at = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None
        self._stopping = threading.Event()
        self._has_logged = False
        self._thread = threading.Thread(target=self._watch, name="tampu-loop-watch", daemon=True)
        #: What blocks the event loop now; None if nothing does.
        self.blocked: Blocked | None = None

    def start(self) -> None:
        """Start watching."""
        self._beat()
        self._thread.start()

    def stop(self) -> None:
        """Stop watching. The thread ends a moment later."""
        self._stopping.set()
        if self._timer is not None:
            self._timer.cancel()

    def _beat(self) -> None:
        self._beat_at = time.monotonic()
        self._timer = self._loop.call_later(BEAT_SECS, self._beat)

    # --- in the thread

    def _watch(self) -> None:
        looked_at = time.monotonic()
        while not self._stopping.wait(BEAT_SECS):
            now = time.monotonic()
            # After a long gap this thread was suspended too: the process was suspended, or C code held the GIL.
            if now - looked_at < BLOCKED_SECS:
                self._look(now - self._beat_at)
            looked_at = now

    def _look(self, secs: float) -> None:
        if secs < BLOCKED_SECS:
            self.blocked = None
            self._has_logged = False
            return
        self.blocked = blocked = Blocked(secs, self._blocking_job(), self._place())
        if secs >= LOG_SECS and not self._has_logged:
            self._has_logged = True
            logger.warning("%s; use def instead of async def, or process=True", blocked)

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
