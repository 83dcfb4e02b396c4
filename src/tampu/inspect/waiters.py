"""Waiting for results: one reader of the events stream wakes all who wait at a queue.

A result is looked for when somebody begins to wait, when an event tells that it is there, and every second for all who
wait: an event may have been trimmed, or events be switched off.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any, Protocol

from tampu.errors import DecodeError, Error, JobFailed, ShutdownError
from tampu.inspect.job_state import find_dead_letter
from tampu.wire.dlq import DlqEntry, decode_dlq_fields
from tampu.wire.envelope import decode_job
from tampu.wire.events import EventName, QueueEvent
from tampu.wire.job import cancelled_error
from tampu.wire.payload import decode_result

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

    from tampu.redis.client import Client
    from tampu.wire.keys import QueueKeys

logger = logging.getLogger("tampu.queue")

#: How often the keys of all awaited results are looked at, in seconds.
SAFETY_NET_SECS = 1.0
#: Keys of one look.
MAX_KEYS = 500
#: Other implementations tell `completed` before they write the result: so long after it is looked for, in seconds.
LOOKS_AFTER_COMPLETED_SECS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4)
#: How long the reader goes on when nobody waits, in seconds: busy queues tell much.
IDLE_SECS = 10.0


class EventFeed(Protocol):
    """The queue's events as they happen; `tampu.QueueEvents` is one."""

    def __aiter__(self) -> AsyncIterator[QueueEvent]: ...
    async def pin(self) -> None: ...
    async def close(self) -> None: ...
    def abandon(self) -> None: ...


class Waiters:
    """All who wait for results of one queue, in one event loop."""

    def __init__(self, client: Client, keys: QueueKeys, follow: Callable[[], EventFeed]) -> None:
        self._client = client
        self._keys = keys
        self._follow = follow
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: dict[str, list[asyncio.Future[Any]]] = {}
        self._completed: set[str] = set()
        self._events: EventFeed | None = None
        self._starting: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._last_letter = "0-0"

    async def wait(self, job_id: str, timeout_secs: float) -> Any:
        """What the job's handler returned; `JobFailed` when it became a dead letter."""
        self._bind_to_loop()
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(job_id, []).append(future)
        try:
            async with asyncio.timeout(timeout_secs) as limit:
                try:
                    # First take position, then look: what happens after the look is told by an event.
                    await self._started()
                    await self._look(job_id)
                    if not future.done():
                        await self._look_for_letter(job_id)
                except Error:
                    if not future.done():  # otherwise it knows better: the queue was closed, say
                        raise
                return await future
        except TimeoutError:
            if not limit.expired():
                raise
            raise TimeoutError(self._excuse(job_id, timeout_secs)) from None
        finally:
            self._leave(job_id, future)

    async def close(self) -> None:
        """Stop reading events; whoever waits is told."""
        self._bind_to_loop()
        waiting = [future for futures in self._waiting.values() for future in futures]
        for future in waiting:
            if not future.done():
                future.set_exception(ShutdownError("the queue was closed while somebody waited for a result"))
        await self._stop()

    def _bind_to_loop(self) -> None:
        """The first wait on another event loop, or in the child of a fork, begins anew."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            if self._events is not None:
                self._events.abandon()
            self._loop, self._events, self._starting = loop, None, None
            self._waiting, self._tasks = {}, set()

    def _excuse(self, job_id: str, timeout_secs: float) -> str:
        text = f"no result of job {job_id} within {timeout_secs:g} s"
        if job_id in self._completed:
            return f"{text}: it has completed, but its worker stores no results; Worker(..., store_results=True) does"
        return f"{text}; is a worker running, and does it store results?"

    def _leave(self, job_id: str, future: asyncio.Future[Any]) -> None:
        future.cancel()
        futures = self._waiting.get(job_id, [])
        if future in futures:
            futures.remove(future)
        if not futures:
            self._waiting.pop(job_id, None)
            self._completed.discard(job_id)

    # --- looking

    async def _look(self, job_id: str) -> bool:
        packed, mark = await self._client.call("MGET", self._keys.result(job_id), self._keys.cancel_mark(job_id))
        return self._on_look(job_id, packed, mark)

    def _on_look(self, job_id: str, packed: bytes | None, mark: bytes | None) -> bool:
        if packed is not None:
            self._resolve(job_id, packed)
        elif mark is not None and mark.startswith(b"c"):
            self._cancel(job_id, mark[1:].decode(errors="replace"))
        else:
            return False
        return True

    def _cancel(self, job_id: str, reason: str) -> None:
        for future in self._waiting.get(job_id, ()):
            if not future.done():
                future.set_exception(cancelled_error(job_id, reason))

    async def _look_for_letter(self, job_id: str) -> None:
        letter = await find_dead_letter(self._client, self._keys, job_id)
        if letter is not None:
            self._fail(job_id, letter)

    def _resolve(self, job_id: str, packed: bytes) -> None:
        try:
            result = decode_result(packed)
        except DecodeError:
            result = packed  # a `Consumer` stores the bytes its handler returns, whatever they are
        for future in self._waiting.get(job_id, ()):
            if not future.done():
                future.set_result(result)

    def _fail(self, job_id: str, letter: DlqEntry) -> None:
        said = letter.error or letter.detail or ""
        detail = f"{letter.error_type}: {said}" if letter.error_type and said else said or letter.error_type or ""
        text = f"job {job_id} became a dead letter: {letter.reason}" + (f" ({detail})" if detail else "")
        for future in self._waiting.get(job_id, ()):
            if not future.done():
                # An error of its own for each: a raised one collects the traceback of whoever raises it.
                future.set_exception(JobFailed(text, job_id=job_id, reason=letter.reason, detail=detail or None))

    # --- the reader and the net

    async def _started(self) -> None:
        """Returns when the reader has taken its position at the end of the stream."""
        if self._starting is None or (self._starting.done() and self._events is None):
            self._starting = asyncio.get_running_loop().create_task(self._start(), name="tampu-waiters-start")
            # Whoever waits for it may have gone: either way its error has been seen.
            self._starting.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(self._starting)

    async def _start(self) -> None:
        newest = await self._client.call("XREVRANGE", self._keys.dlq, "+", "-", "COUNT", 1)
        self._last_letter = newest[0][0].decode() if newest else "0-0"
        self._events = events = self._follow()
        with contextlib.suppress(Error):  # then the net has to do
            await events.pin()
        self._spawn(self._read(events), "tampu-waiters-read")
        self._spawn(self._cast_net(), "tampu-waiters-net")

    async def _stop(self) -> None:
        events, self._events, self._starting = self._events, None, None
        if events is not None:
            await events.close()
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.warning("waiting for results is in trouble: %s: %s", type(error).__name__, error)

    async def _read(self, events: EventFeed) -> None:
        async for event in events:
            if event.job_id in self._waiting:
                if event.name == EventName.COMPLETED:
                    self._spawn(self._on_completed(event.job_id), "tampu-waiters-completed")
                elif event.name == EventName.CANCELLED:
                    self._cancel(event.job_id, str(event.fields.get("reason", "")))
                elif event.name == EventName.DLQ:
                    self._spawn(self._on_dlq(event.job_id, event), "tampu-waiters-dlq")

    async def _on_completed(self, job_id: str) -> None:
        for pause in LOOKS_AFTER_COMPLETED_SECS:
            if pause:
                await asyncio.sleep(pause)
            if job_id not in self._waiting or await self._look(job_id):
                return
        if job_id in self._waiting:
            self._completed.add(job_id)

    async def _on_dlq(self, job_id: str, event: QueueEvent) -> None:
        await self._look_for_letter(job_id)
        # Somebody may have removed or replayed it at once: the event is enough.
        self._fail(job_id, DlqEntry(dlq_id="", source_id="", reason=str(event.fields.get("reason", ""))))

    async def _cast_net(self) -> None:
        """Once a second: all awaited results, and the dead letters that have come since."""
        idle_since: float | None = None
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(SAFETY_NET_SECS)
            if self._waiting:
                idle_since = None
                with contextlib.suppress(Error):  # a server that is away is looked at again in a second
                    await self._look_at_all()
                continue
            idle_since = loop.time() if idle_since is None else idle_since
            if loop.time() - idle_since >= IDLE_SECS:
                await self._stop()
                return

    async def _look_at_all(self) -> None:
        ids = list(self._waiting)
        for start in range(0, len(ids), MAX_KEYS):
            some = ids[start : start + MAX_KEYS]
            results = (self._keys.result(job_id) for job_id in some)
            marks = (self._keys.cancel_mark(job_id) for job_id in some)
            found = await self._client.call("MGET", *results, *marks)
            for job_id, packed, mark in zip(some, found[: len(some)], found[len(some) :], strict=True):
                self._on_look(job_id, packed, mark)
        while True:
            letters = await self._client.call("XRANGE", self._keys.dlq, f"({self._last_letter}", "+", "COUNT", MAX_KEYS)
            for dlq_id, fields in letters:
                self._last_letter = dlq_id.decode()
                letter = decode_dlq_fields(self._last_letter, fields)
                with contextlib.suppress(DecodeError):
                    self._fail(decode_job(letter.payload).id, letter)
            if len(letters) < MAX_KEYS:
                return
