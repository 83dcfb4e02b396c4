"""Progress of running jobs, told to whoever follows the events; at most a few times a second and job."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from tampu.clock import wall_clock_ms
from tampu.wire.events import EventName

if TYPE_CHECKING:
    from tampu.engine.config import ConsumerConfig
    from tampu.queue import Queue
    from tampu.wire.job import Job

#: Shortest time between two events of one job, in seconds; the last one, at 1.0, is always told.
INTERVAL_SECS = 0.25
#: Longest note, in characters.
MAX_NOTE = 200
#: Jobs remembered for the interval.
MAX_REMEMBERED = 10_000


class ProgressReporter:
    """What a running job is connected to."""

    def __init__(self, queue: Queue, config: ConsumerConfig) -> None:
        self._queue = queue
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._told_at: dict[str, float] = {}
        self._sending: set[asyncio.Task[Any]] = set()

    async def wait_for_result(self, job_id: str, timeout_secs: float) -> Any:
        """A handler may wait for another job, not for its own."""
        raise RuntimeError("result() is for jobs that Queue.add gave back, not for the job a handler runs")

    def report_progress(self, job: Job[Any], fraction: float, note: str) -> None:
        """Tell how far a job is; from any thread."""
        now = time.monotonic()
        if not self._config.events_enabled or (fraction < 1 and now - self._told_at.get(job.id, -1e9) < INTERVAL_SECS):
            return
        if len(self._told_at) >= MAX_REMEMBERED:
            self._told_at.pop(next(iter(self._told_at)))
        self._told_at[job.id] = now
        fields: list[Any] = ["e", EventName.PROGRESS.value, "id", job.id, "ts", wall_clock_ms()]
        if job.name:
            fields += ("n", job.name)
        fields += ("progress", f"{fraction:.4g}", "note", note[:MAX_NOTE], "worker", self._config.consumer_id)
        self._loop.call_soon_threadsafe(self._send, fields)

    def _send(self, fields: list[Any]) -> None:
        task = self._loop.create_task(self._write(fields))
        self._sending.add(task)
        task.add_done_callback(self._sent)

    def _sent(self, task: asyncio.Task[Any]) -> None:
        self._sending.discard(task)
        if not task.cancelled():
            task.exception()  # progress is a courtesy: a server that is away costs nothing but the news

    async def _write(self, fields: list[Any]) -> None:
        limit = self._config.events_max_stream_len
        pipe = self._queue.producer.ready_pipe()
        await pipe.call("XADD", self._queue.keys.events, "MAXLEN", "~", limit, "*", *fields, resend=False)
