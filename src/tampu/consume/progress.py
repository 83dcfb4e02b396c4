"""Publishes the progress of running jobs: an event, and a key that can be read later. At most four times per second.

Of the reports within one interval the latest is sent when the interval ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any

from tampu.base.checks import check_text
from tampu.base.clock import wall_clock_ms
from tampu.wire.events import EventName

if TYPE_CHECKING:
    from collections.abc import Callable

    from tampu.redis.client import Client
    from tampu.wire.job import Job
    from tampu.wire.keys import QueueKeys

#: Shortest time between two events of one job, in seconds. Progress of 1.0 is sent at once.
INTERVAL_SECS = 0.25
#: Longest note, in characters.
MAX_NOTE = 200
#: How long the progress of a job can be read after its last report, in seconds.
KEPT_SECS = 3600


class _Told:
    """The progress events of one run of a job."""

    __slots__ = ("at", "is_finished", "is_scheduled", "latest")

    def __init__(self) -> None:
        self.at = float("-inf")
        self.latest: tuple[Job[Any], float, str, int] | None = None
        self.is_scheduled = False
        self.is_finished = False


class ProgressReporter:
    """Reports the progress of running jobs. `events_kept` is the stream's approximate length; 0 writes no events."""

    def __init__(
        self,
        client: Client,
        keys: QueueKeys,
        *,
        worker: str,
        events_kept: int,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keys = keys
        self._worker = worker
        self._events_kept = events_kept
        self._now = now
        self._loop = asyncio.get_running_loop()
        self._client = client
        #: Guards `_told`: handlers report from threads too.
        self._guard = threading.Lock()
        self._told: dict[tuple[str, int], _Told] = {}
        self._sending: set[asyncio.Task[Any]] = set()

    async def wait_for_result(self, job_id: str, timeout_secs: float) -> Any:
        """Raise `RuntimeError`: a handler cannot wait for the job that it runs."""
        raise RuntimeError("a handler cannot wait for its own job: call result() on a job that Queue.add returned")

    async def get_job(self, job_id: str) -> Any:
        """Raise `RuntimeError`: the job that a handler gets cannot read its state."""
        raise RuntimeError("a running handler cannot call state() on its job: call queue.get_job(job.id) instead")

    def report_progress(self, job: Job[Any], fraction: float, note: str) -> None:
        """Report a job's progress. May be called from any thread, at any rate. Raises `ConfigError` for a bad note."""
        check_text("note", note, blank_ok=True)
        with self._guard:
            told = self._told.setdefault((job.id, job.attempt), _Told())
            if told.is_finished:
                return
            told.is_finished = fraction >= 1
            told.latest = (job, fraction, note[:MAX_NOTE], wall_clock_ms())
            wait_secs = 0.0 if told.is_finished else told.at + INTERVAL_SECS - self._now()
            if told.is_scheduled and not told.is_finished:
                return
            told.is_scheduled = True
        with contextlib.suppress(RuntimeError):  # a thread has outlived its worker, whose loop is closed
            self._loop.call_soon_threadsafe(self._schedule, told, wait_secs)

    def forget(self, job: Job[Any]) -> None:
        """Drop what was not sent yet: the run is over."""
        if self._told:
            with self._guard:
                told = self._told.pop((job.id, job.attempt), None)
                if told is not None and not told.is_finished:
                    told.latest = None

    async def close(self) -> None:
        """Wait up to 1 s for events being sent."""
        if self._sending:
            await asyncio.wait(self._sending, timeout=1)

    def _schedule(self, told: _Told, wait_secs: float) -> None:
        if wait_secs > 0:
            self._loop.call_later(wait_secs, self._send, told)
        else:
            self._send(told)

    def _send(self, told: _Told) -> None:
        with self._guard:
            latest, told.latest = told.latest, None
            told.is_scheduled = False
            told.at = self._now()
        if latest is not None:
            task = self._loop.create_task(self._write(*latest))
            self._sending.add(task)
            task.add_done_callback(self._sent)

    def _sent(self, task: asyncio.Task[Any]) -> None:
        self._sending.discard(task)
        if not task.cancelled():
            task.exception()  # progress is best-effort: an event that could not be sent is dropped

    async def _write(self, job: Job[Any], fraction: float, note: str, at_ms: int) -> None:
        shown = f"{fraction:.4g}"
        # The attempt tells the progress of this run from that of an earlier one.
        state = f"{job.attempt} {shown} {note}"
        writes = [self._client.call("SET", self._keys.progress(job.id), state, "EX", KEPT_SECS, resend=False)]
        if self._events_kept:
            fields: list[Any] = ["e", EventName.PROGRESS.value, "id", job.id, "ts", at_ms]
            if job.name:
                fields += ("n", job.name)
            fields += ("progress", shown, "note", note, "worker", self._worker)
            limit = ("MAXLEN", "~", self._events_kept, "*")
            writes.append(self._client.call("XADD", self._keys.events, *limit, *fields, resend=False))
        await asyncio.gather(*writes)
