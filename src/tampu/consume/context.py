"""What a task can do with the job that it runs: find it, and publish its progress."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from tampu.base.checks import shown
from tampu.base.clock import wall_clock_ms

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tampu.redis.client import Client
    from tampu.wire.job import Job
    from tampu.wire.keys import QueueKeys

_current: ContextVar[Job[Any] | None] = ContextVar("tampu_current_job", default=None)


def current_job() -> Job[Any]:
    """Return the job that the calling task runs. Raises `RuntimeError` outside of a task.

    A thread that the task starts does not see it: pass the job as an argument.
    """
    job = _current.get()
    if job is None:
        raise RuntimeError("no job is running here: call current_job() inside a task that a worker runs")
    return job


def job_fields() -> dict[str, object]:
    """Return the fields that a log record has about the current job; none outside of jobs."""
    job = _current.get()
    if job is None:
        return {}
    queue = getattr(job._context, "queue_name", None)
    return {"queue": queue, "task": job.name, "job_id": job.id, "attempt": job.attempt + 1}


@contextlib.contextmanager
def context_of(job: Job[Any]) -> Iterator[None]:
    """Make `job` the current job inside a `with` block."""
    token = _current.set(job)
    try:
        yield
    finally:
        _current.reset(token)


#: Sets the current job of this context. Called before each run.
set_current_job: Callable[[Job[Any]], object] = _current.set


logger = logging.getLogger("tampu.worker")

#: Shortest time between two events of one job, in seconds. Progress of 1.0 is sent at once.
INTERVAL_SECS = 0.25
#: Longest note, in characters.
MAX_NOTE = 200
#: How long the progress of a job can be read after its last report, in seconds.
KEPT_SECS = 3600


class _Reports:
    """The progress events of one run of a job."""

    __slots__ = ("at", "is_finished", "is_scheduled", "latest")

    def __init__(self) -> None:
        self.at = float("-inf")
        self.latest: tuple[Job[Any], float, str, int] | None = None
        self.is_scheduled = False
        self.is_finished = False


class ProgressReporter:
    """Publishes the progress of running jobs: an event, and a key that can be read later. At most four times a second.

    Of the reports within one interval the latest is sent when the interval ends. `events_kept` is the approximate
    length of the events stream; 0 writes no events.
    """

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
        self.queue_name = keys.queue_name
        self._worker = worker
        self._events_kept = events_kept
        self._now = now
        self._loop = asyncio.get_running_loop()
        self._client = client
        #: Guards `reports`: handlers report from threads too.
        self._guard = threading.Lock()
        #: By ID and attempt of the job. Nearly always empty.
        self.reports: dict[tuple[str, int], _Reports] = {}
        self._has_complained = False
        #: Whether the worker stops; see `Job.stopping`.
        self.is_stopping: Callable[[], bool] = bool
        self._sending: set[asyncio.Task[Any]] = set()

    def report_progress(self, job: Job[Any], fraction: float, note: str) -> None:
        """Report a job's progress. May be called from any thread, at any rate.

        What cannot be sent is clamped, cleaned or left out, and logged once: it must not fail the work.
        """
        try:
            number, text = float(fraction), str(note or "").replace("\0", "").encode(errors="replace").decode()
        except Exception:
            number, text = math.nan, ""
        if not (0 <= number <= 1 and isinstance(note, str) and text == note) and not self._has_complained:
            self._has_complained = True
            said = "%s %s: progress() takes a number from 0 to 1 and a text; got %s and %s"
            logger.warning(said, job.name or "job", job.id, shown(fraction), shown(note))
        fraction = min(1.0, max(0.0, number))  # in this order, NaN becomes 0
        with self._guard:
            reports = self.reports.setdefault((job.id, job.attempt), _Reports())
            if reports.is_finished:
                return
            reports.is_finished = fraction >= 1
            reports.latest = (job, fraction, text[:MAX_NOTE], wall_clock_ms())
            wait_secs = 0.0 if reports.is_finished else reports.at + INTERVAL_SECS - self._now()
            if reports.is_scheduled and not reports.is_finished:
                return
            reports.is_scheduled = True
        with contextlib.suppress(RuntimeError):  # a thread has outlived its worker, whose loop is closed
            self._loop.call_soon_threadsafe(self._schedule, reports, wait_secs)

    def forget(self, job: Job[Any]) -> None:
        """Drop what was not sent yet: the run is over."""
        with self._guard:
            reports = self.reports.pop((job.id, job.attempt), None)
            if reports is not None and not reports.is_finished:
                reports.latest = None

    async def close(self) -> None:
        """Wait up to 1 s for events being sent."""
        if self._sending:
            await asyncio.wait(self._sending, timeout=1)

    def _schedule(self, reports: _Reports, wait_secs: float) -> None:
        if wait_secs > 0:
            self._loop.call_later(wait_secs, self._send, reports)
        else:
            self._send(reports)

    def _send(self, reports: _Reports) -> None:
        with self._guard:
            latest, reports.latest = reports.latest, None
            reports.is_scheduled = False
            reports.at = self._now()
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
            fields: list[Any] = ["e", "progress", "id", job.id, "ts", at_ms]
            if job.name:
                fields += ("n", job.name)
            fields += ("progress", shown, "note", note, "worker", self._worker)
            limit = ("MAXLEN", "~", self._events_kept, "*")
            writes.append(self._client.call("XADD", self._keys.events, *limit, *fields, resend=False))
        await asyncio.gather(*writes)
