"""What became of a window's jobs, told to those who wait: each caller of a single add, or the caller of a bulk."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from tampu.engine.window import NOW, Window, pack_part
from tampu.errors import Error, OutcomeUnknownError, QueueFullError, RedisError
from tampu.redis.faults import ServerError
from tampu.wire.job import DuplicateJobId, JobId

if TYPE_CHECKING:
    from tampu.engine.window import WindowHeader

#: Windows of one bulk that are packed or under way; what is behind them waits in the caller's iterable.
BULK_WINDOWS_AHEAD = 4


class SharedWindow(Window):
    """The window of single adds: each job has a future of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.futures: list[asyncio.Future[JobId]] = []

    def tell(self) -> None:
        if not self.codes and self.error is None:
            for job_id, future in zip(self.ids, self.futures, strict=True):
                if not future.done():  # if it is, its caller went away
                    future.set_result(JobId(job_id))
            return
        for position, (job_id, future) in enumerate(zip(self.ids, self.futures, strict=True)):
            if future.done():
                continue
            error = _error_of(self, position, job_id)
            if error is not None:
                future.set_exception(error)
            else:
                is_duplicate = _code_of(self, position) == "d"
                future.set_result(DuplicateJobId(job_id) if is_duplicate else JobId(job_id))


class LoneWindow(Window):
    """The window of one job that is to run now and leaves at once. Its way to the server is the shortest there is."""

    def __init__(self, job_id: str, name: bytes, envelope: bytes, future: asyncio.Future[JobId]) -> None:
        self.job_id = job_id
        self.name = name
        self.envelope = envelope
        self._future = future

    @property
    def ids(self) -> list[str]:  # type: ignore[override]  # a list of its own for each, made when somebody asks
        return [self.job_id]

    def packed(self, header: WindowHeader) -> bytes:
        """When it is sent again; the first time `WindowHeader.packed_lone` is quicker."""
        window = Window()
        window.number, window.chain_ttl_secs = self.number, self.chain_ttl_secs
        window.put(self.job_id, NOW, self.name, pack_part(self.envelope))
        return window.packed(header)

    def tell_added(self) -> None:
        """Tell that all went well."""
        if not self._future.done():  # if it is, its caller went away
            self._future.set_result(JobId(self.job_id))

    def tell(self) -> None:
        error = _error_of(self, 0, self.job_id) if self.codes or self.error is not None else None
        if error is None:
            self.tell_added()
        elif not self._future.done():
            self._future.set_exception(error)


class BulkWindow(Window):
    """A window of one bulk: one future for all of it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self.future: asyncio.Future[None] = loop.create_future()

    def tell(self) -> None:
        if not self.future.done():
            self.future.set_result(None)


def _code_of(window: Window, position: int) -> str:
    """What became of one job: a added, d duplicate, f full, e error, u what the window's error says."""
    if position < len(window.codes):
        return window.codes[position]
    return "a" if window.error is None else "u"


def _error_of(window: Window, position: int, job_id: str) -> Error | None:
    code = _code_of(window, position)
    if code == "f":
        return QueueFullError(f"the queue is full (max_stream_len): job {job_id} was refused", refused=[job_id])
    if code == "e":
        reason = ServerError(window.failure) if window.failure else "the reason was lost with the connection"
        return RedisError(f"job {job_id} was not added: {reason}")
    if code == "u" and window.error is not None:
        return _own_copy(window.error, [job_id])
    return None


def _own_copy(error: Error, ids: list[str]) -> Error:
    """A window's error goes to many callers: each gets one of its own, about its own jobs."""
    copy = error.__class__.__new__(error.__class__)
    copy.args = error.args
    copy.__dict__.update(error.__dict__)
    copy.__cause__ = error.__cause__
    if isinstance(copy, OutcomeUnknownError):
        copy.ids = ids
    return copy


class Collector:
    """Waits for the windows of one bulk, in order, and puts their answers together."""

    def __init__(self) -> None:
        self._windows: deque[BulkWindow] = deque()
        self.accepted: list[JobId] = []
        self._refused: list[str] = []
        self._unknown: list[str] = []
        self._unknown_because: OutcomeUnknownError | None = None
        self._failure: Error | None = None

    def expect(self, window: BulkWindow) -> None:
        self._windows.append(window)

    async def keep_ahead(self, window: BulkWindow) -> bool:
        """Expect one more, and wait until few enough are under way; False as soon as one was not wholly added."""
        self._windows.append(window)
        await asyncio.sleep(0)  # lets what was just submitted leave before the next chunk is packed
        while len(self._windows) >= BULK_WINDOWS_AHEAD:
            await self._collect_one()
        return self.error() is None

    async def settle(self) -> None:
        """Wait for all that is under way."""
        while self._windows:
            await self._collect_one()

    async def finish(self) -> list[JobId]:
        """All ids, in order; raises if any job was refused or failed, once all are answered."""
        await self.settle()
        error = self.error()
        if error is not None:
            raise error
        return self.accepted

    def error(self) -> Error | None:
        """What is wrong so far: what is unknown before what failed, and that before what was refused."""
        error: Error | None = None
        if self._unknown_because is not None:
            error = _own_copy(self._unknown_because, [*self._unknown])
        elif self._failure is not None:
            error = self._failure
        elif self._refused:
            error = QueueFullError(
                f"the queue is full (max_stream_len): {len(self._refused)} of "
                f"{len(self._refused) + len(self.accepted)} jobs were refused; .accepted and .refused name them",
                refused=self._refused,
            )
        if error is not None:
            error.accepted = [*self.accepted]
        return error

    async def _collect_one(self) -> None:
        window = self._windows[0]
        job_ids = [*map(JobId, window.ids)]  # made while the server works on them; nearly always all are added
        await window.future
        self._windows.popleft()
        if not window.codes and window.error is None:
            self.accepted.extend(job_ids)
            return
        for position, job_id in enumerate(window.ids):
            code = _code_of(window, position)
            if code == "a":
                self.accepted.append(JobId(job_id))
            elif code == "d":
                self.accepted.append(DuplicateJobId(job_id))
            elif code == "f":
                self._refused.append(job_id)
            elif code == "u" and isinstance(window.error, OutcomeUnknownError):
                self._unknown.append(job_id)
                self._unknown_because = window.error
            elif self._failure is None:
                self._failure = _error_of(window, position, job_id)
