"""What became of a window's jobs, told to those who wait: each caller of a single add, or the caller of a bulk."""

from __future__ import annotations

import asyncio
from collections import deque

from tampu.engine.window import Window
from tampu.errors import Error, QueueFullError, RedisError
from tampu.wire.job import DuplicateJobId, JobId

#: Windows of one bulk that are packed or under way; what is behind them waits in the caller's iterable.
BULK_WINDOWS_AHEAD = 4


class SharedWindow(Window):
    """The window of single adds: each job has a future of its own."""

    __slots__ = ("futures",)

    def __init__(self) -> None:
        super().__init__()
        self.futures: list[asyncio.Future[JobId]] = []

    def tell(self) -> None:
        codes = self.codes
        for position, (job_id, future) in enumerate(zip(self.ids, self.futures, strict=True)):
            if future.done():
                continue  # its caller went away
            error = _error_of(self, position, job_id)
            if error is not None:
                future.set_exception(error)
            else:
                is_duplicate = bool(codes) and codes[position] == "d"
                future.set_result(DuplicateJobId(job_id) if is_duplicate else JobId(job_id))


class BulkWindow(Window):
    """A window of one bulk: one future for all of it."""

    __slots__ = ("future",)

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self.future: asyncio.Future[None] = loop.create_future()

    def tell(self) -> None:
        if not self.future.done():
            self.future.set_result(None)


def _error_of(window: Window, position: int, job_id: str) -> Error | None:
    if window.error is not None:
        error = window.error
        if isinstance(error, QueueFullError) or not error.args:
            return error
        # A window's error goes to many callers: each gets one of its own, or their tracebacks would pile up in it.
        copy = error.__class__.__new__(error.__class__)
        copy.__dict__.update(error.__dict__)
        copy.args = error.args
        return copy
    code = window.codes[position] if window.codes else "a"
    if code == "f":
        return QueueFullError(f"the queue is full (max_stream_len): job {job_id} was refused", refused=[job_id])
    if code == "e":
        return RedisError(f"job {job_id} was not added: {window.failure}")
    return None


class Collector:
    """Waits for the windows of one bulk, in order, and puts their answers together."""

    def __init__(self) -> None:
        self._windows: deque[BulkWindow] = deque()
        self.accepted: list[JobId] = []
        self._refused: list[str] = []
        self._error: Error | None = None

    def expect(self, window: BulkWindow) -> None:
        self._windows.append(window)

    async def keep_ahead(self, window: BulkWindow) -> None:
        """Expect one more, and wait until few enough are under way; raises as soon as one has failed."""
        self._windows.append(window)
        await asyncio.sleep(0)  # lets what was just submitted leave before the next chunk is packed
        while len(self._windows) >= BULK_WINDOWS_AHEAD:
            await self._collect_one()
        self._raise_error()

    async def settle(self) -> None:
        """Wait for all that is under way."""
        while self._windows:
            await self._collect_one()

    async def finish(self) -> list[JobId]:
        """All ids, in order; raises if any job was refused or failed."""
        await self.settle()
        self._raise_error()
        return self.accepted

    async def _collect_one(self) -> None:
        window = self._windows[0]
        await window.future
        self._windows.popleft()
        codes = window.codes
        if window.error is not None:
            self._error = self._error or window.error
            return
        if not codes:
            self.accepted.extend(map(JobId, window.ids))
            return
        for code, job_id in zip(codes, window.ids, strict=True):
            if code == "a":
                self.accepted.append(JobId(job_id))
            elif code == "d":
                self.accepted.append(DuplicateJobId(job_id))
            else:
                self._refused.append(job_id)
                if code == "e":
                    self._error = self._error or RedisError(f"job {job_id} was not added: {window.failure}")

    def _raise_error(self) -> None:
        if self._error is None and self._refused:
            self._error = QueueFullError(
                f"the queue is full (max_stream_len): {len(self._refused)} of "
                f"{len(self._refused) + len(self.accepted)} jobs were refused; .accepted and .refused name them",
                refused=self._refused,
            )
        if self._error is not None:
            self._error.accepted = [*self.accepted]
            raise self._error
