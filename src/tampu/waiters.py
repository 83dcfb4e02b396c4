"""Waiting for results: one reader of the events stream wakes all who wait at a queue.

The result's key is looked at first, and once a second as a safety net, should an event have been trimmed or events be
switched off.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from tampu.errors import DecodeError, Error, JobFailed
from tampu.job_state import find_job
from tampu.wire.results import decode_result

if TYPE_CHECKING:
    from collections.abc import Callable

    from tampu.queue_events import QueueEvents
    from tampu.redis.pipe import Pipe
    from tampu.wire.keys import QueueKeys

#: How often a waiter looks at the key itself, in seconds.
SAFETY_NET_SECS = 1.0


class Waiters:
    """All who wait for results of one queue."""

    def __init__(self, pipe: Pipe, keys: QueueKeys, follow: Callable[[], QueueEvents]) -> None:
        self._pipe = pipe
        self._keys = keys
        self._follow = follow
        self._events: QueueEvents | None = None
        self._reading: asyncio.Task[None] | None = None
        self._wakers: dict[str, list[asyncio.Event]] = {}
        self._failures: dict[str, tuple[str, str]] = {}
        self._last_errors: dict[str, str] = {}

    async def wait(self, job_id: str, timeout_secs: float) -> Any:
        """What the job's handler returned; `JobFailed` when it became a dead letter."""
        waker = asyncio.Event()
        self._wakers.setdefault(job_id, []).append(waker)
        self._start_reading()
        try:
            async with asyncio.timeout(timeout_secs):
                await self._raise_if_dead(job_id)
                while True:
                    found, result = await self._look(job_id)
                    if found:
                        return result
                    self._raise_if_failed(job_id)
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(SAFETY_NET_SECS):
                            await waker.wait()
                    waker.clear()
        except TimeoutError:
            raise TimeoutError(
                f"no result of job {job_id} within {timeout_secs:g} s; is a worker running, and does it store results?"
            ) from None
        finally:
            self._leave(job_id, waker)

    async def close(self) -> None:
        """Stop reading events."""
        if self._events is not None:
            await self._events.close()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        self._events = self._reading = None

    def abandon(self) -> None:
        """Forget a reader that belongs to an event loop that has ended."""
        self._events = self._reading = None
        self._wakers.clear()

    async def _look(self, job_id: str) -> tuple[bool, Any]:
        packed = await self._pipe.call("GET", self._keys.result(job_id))
        if packed is None:
            return False, None
        try:
            return True, decode_result(packed)
        except DecodeError:
            return True, packed  # a worker of the seeds' level stores bytes of its own making

    async def _raise_if_dead(self, job_id: str) -> None:
        """A job that was dead before we came tells no event any more."""
        state = await find_job(self._pipe, self._keys, job_id)
        letter = state.dead_letter
        if letter is not None:
            raise _failed(job_id, letter.reason, letter.error or letter.detail or "")

    def _raise_if_failed(self, job_id: str) -> None:
        if job_id in self._failures:
            raise _failed(job_id, *self._failures[job_id])

    def _leave(self, job_id: str, waker: asyncio.Event) -> None:
        wakers = self._wakers.get(job_id, [])
        if waker in wakers:
            wakers.remove(waker)
        if not wakers:
            self._wakers.pop(job_id, None)
            self._failures.pop(job_id, None)
            self._last_errors.pop(job_id, None)

    def _start_reading(self) -> None:
        if self._reading is None or self._reading.done():
            self._events = self._follow()
            self._reading = asyncio.get_running_loop().create_task(self._read(self._events), name="tampu-waiters")

    async def _read(self, events: QueueEvents) -> None:
        with contextlib.suppress(Error):  # the safety net goes on
            async for event in events:
                if event.job_id not in self._wakers:
                    continue
                if event.name == "failed":
                    self._last_errors[event.job_id] = str(event.fields.get("reason", ""))
                elif event.name == "dlq":
                    reason = str(event.fields.get("reason", ""))
                    self._failures[event.job_id] = (reason, self._last_errors.get(event.job_id, ""))
                elif event.name != "completed":
                    continue
                for waker in self._wakers[event.job_id]:
                    waker.set()


def _failed(job_id: str, reason: str, detail: str) -> JobFailed:
    text = f"job {job_id} became a dead letter: {reason}" + (f" ({detail})" if detail else "")
    return JobFailed(text, job_id=job_id, reason=reason, detail=detail or None)
