"""Wakes callers that wait for results: one reader of the events stream serves all waiting callers of a queue.

A result is looked up when a caller starts to wait, when an event announces it, and every second for all callers,
because an event may have been trimmed or events may be disabled. A dead letter is looked up for callers that have
waited for a moment: most results arrive sooner.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from tampu.errors import DecodeError, Error, JobFailed, ResultNotStored, ShutdownError
from tampu.inspect.jobs import find_dead_letter, find_job
from tampu.inspect.snapshot import list_workers, pause_reason
from tampu.inspect.streams import newest_id, stream_pages
from tampu.wire.dlq import DlqEntry, decode_dlq_fields
from tampu.wire.envelope import decode_job
from tampu.wire.events import EventName, QueueEvent
from tampu.wire.job import cancelled_error
from tampu.wire.payload import decode_result

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

    from tampu.inspect.jobs import JobState
    from tampu.redis.client import Client
    from tampu.wire.codec import QueueCodec
    from tampu.wire.keys import QueueKeys

logger = logging.getLogger("tampu.queue")

#: How often all awaited results are polled, in seconds, in case an event was missed.
SAFETY_NET_SECS = 1.0
#: How long a caller waits before a dead letter from before its call is looked up, in seconds.
LETTER_PATIENCE_SECS = 0.02
#: How long a caller whose time is up may wait to learn what its job is doing, in seconds.
MAX_DESCRIBE_SECS = 0.5
#: Maximum number of results, or of dead letters, read in one call.
MAX_KEYS = 500
#: Delays between lookups after a `completed` event, in seconds: other implementations send it before the result.
POLLS_AFTER_COMPLETED_SECS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4)
#: The reader stops after this long without callers, in seconds: a busy queue has many events.
IDLE_SECS = 10.0


class EventFeed(Protocol):
    """The live events of a queue; implemented by `tampu.QueueEvents`."""

    def __aiter__(self) -> AsyncIterator[QueueEvent]: ...
    async def pin(self) -> None: ...
    async def close(self) -> None: ...
    def abandon(self) -> None: ...


class Waiters:
    """The callers in one event loop that wait for results of one queue."""

    def __init__(
        self, client: Client, keys: QueueKeys, follow: Callable[[], EventFeed], codec: QueueCodec | None = None
    ) -> None:
        self._client = client
        self._codec = codec
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
        """Wait for a job's result and return it. Raises `JobFailed`, `ResultNotStored` or `TimeoutError`."""
        self._bind_to_loop()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._waiting.setdefault(job_id, []).append(future)
        letter_timer: asyncio.TimerHandle | None = None
        try:
            async with asyncio.timeout(timeout_secs) as limit:
                try:
                    # Subscribe before the lookup: whatever happens after the lookup then comes as an event.
                    await self._started()
                    if not await self._poll_one(job_id):
                        letter_timer = loop.call_later(LETTER_PATIENCE_SECS, self._find_old_letter, job_id, future)
                except Error:
                    if not future.done():  # otherwise its own error explains more: the queue was closed
                        raise
                return await future
        except TimeoutError:
            if not limit.expired():
                raise
            raise TimeoutError(await self._timeout_text(job_id, timeout_secs)) from None
        finally:
            if letter_timer is not None:
                letter_timer.cancel()
            self._leave(job_id, future)

    async def close(self) -> None:
        """Stop reading events. Waiting callers raise `ShutdownError`."""
        self._bind_to_loop()
        waiting = [future for futures in self._waiting.values() for future in futures]
        for future in waiting:
            if not future.done():
                future.set_exception(ShutdownError("the queue was closed while this call waited for a result"))
        await self._stop()

    def _bind_to_loop(self) -> None:
        """Start over on first use in another event loop or in the child of a fork."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            if self._events is not None:
                self._events.abandon()
            self._loop, self._events, self._starting = loop, None, None
            self._waiting, self._tasks = {}, set()

    async def _timeout_text(self, job_id: str, timeout_secs: float) -> str:
        text = f"no result of job {job_id} within {timeout_secs:g} s"
        if job_id in self._completed:
            return f"{text}: it completed, but its worker does not store results; use Worker(..., store_results=True)"
        try:
            async with asyncio.timeout(MAX_DESCRIBE_SECS):
                return f"{text}: {await describe_job(self._client, self._keys, job_id)}"
        except (Error, TimeoutError):
            return f"{text}; is the server reachable and a worker running?"

    def _leave(self, job_id: str, future: asyncio.Future[Any]) -> None:
        future.cancel()
        futures = self._waiting.get(job_id, [])
        if future in futures:
            futures.remove(future)
        if not futures:
            self._waiting.pop(job_id, None)
            self._completed.discard(job_id)

    # --- lookups

    async def _poll_one(self, job_id: str) -> bool:
        packed, mark = await self._client.call("MGET", self._keys.result(job_id), self._keys.cancel_mark(job_id))
        return self._on_values(job_id, packed, mark)

    def _on_values(self, job_id: str, packed: bytes | None, mark: bytes | None) -> bool:
        if packed is not None:
            self._resolve(job_id, packed)
        elif mark is not None and mark.startswith(b"c"):
            self._cancel(job_id, mark[1:].decode(errors="replace"))
        else:
            return False
        return True

    def _cancel(self, job_id: str, reason: str) -> None:
        self._raise(job_id, partial(cancelled_error, job_id, reason))

    def _raise(self, job_id: str, make_error: Callable[[], Error]) -> None:
        for future in self._waiting.get(job_id, ()):
            if not future.done():
                # One error per caller: a raised error collects the traceback of its caller.
                future.set_exception(make_error())

    def _find_old_letter(self, job_id: str, future: asyncio.Future[Any]) -> None:
        async def find() -> None:
            try:
                await self._find_letter(job_id)
            except Error as error:
                if not future.done():
                    future.set_exception(error)

        self._spawn(find(), "tampu-waiters-letter")

    async def _find_letter(self, job_id: str) -> None:
        letter = await find_dead_letter(self._client, self._keys, job_id)
        if letter is not None:
            self._fail(job_id, letter)

    def _resolve(self, job_id: str, packed: bytes) -> None:
        try:
            if self._codec is not None:
                packed = self._codec.open_result(packed, job_id)
        except DecodeError as error:
            self._raise(job_id, partial(DecodeError, f"the result of job {job_id} is refused: {error}"))
            return
        try:
            result = decode_result(packed)
        except ResultNotStored as error:
            self._raise(job_id, partial(ResultNotStored, str(error)))
            return
        except DecodeError:
            result = packed  # a `Consumer` stores its handler's bytes, MessagePack or not
        for future in self._waiting.get(job_id, ()):
            if not future.done():
                future.set_result(result)

    def _fail(self, job_id: str, letter: DlqEntry) -> None:
        detail = letter.error_text
        text = f"job {job_id} became a dead letter: {letter.reason}" + (f" ({detail})" if detail else "")
        self._raise(job_id, partial(JobFailed, text, job_id=job_id, reason=letter.reason, detail=detail or None))

    # --- reading events and polling

    async def _started(self) -> None:
        """Wait until the reader is subscribed at the end of the events stream."""
        if self._starting is None or (self._starting.done() and self._events is None):
            self._starting = asyncio.get_running_loop().create_task(self._start(), name="tampu-waiters-start")
            # Retrieve its error even if the caller was cancelled, or asyncio would log it.
            self._starting.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(self._starting)

    async def _start(self) -> None:
        self._last_letter = await newest_id(self._client, self._keys.dlq)
        if self._starting is not asyncio.current_task():
            return  # closed meanwhile: a reader that starts now would never be stopped
        self._events = events = self._follow()
        with contextlib.suppress(Error):  # then polling has to find the results
            await events.pin()
        if self._starting is not asyncio.current_task():
            await events.close()
            return
        self._spawn(self._read(events), "tampu-waiters-read")
        self._spawn(self._poll(), "tampu-waiters-poll")

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
            logger.warning("the reader of results failed: %s: %s", type(error).__name__, error)

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
        for pause in POLLS_AFTER_COMPLETED_SECS:
            if pause:
                await asyncio.sleep(pause)
            if job_id not in self._waiting or await self._poll_one(job_id):
                return
        if job_id in self._waiting:
            self._completed.add(job_id)

    async def _on_dlq(self, job_id: str, event: QueueEvent) -> None:
        await self._find_letter(job_id)
        # The letter may be removed or replayed already: the event is enough.
        self._fail(job_id, DlqEntry(dlq_id="", source_id="", reason=str(event.fields.get("reason", ""))))

    async def _poll(self) -> None:
        """Read all awaited results and the new dead letters once a second, until no caller has waited for a while."""
        idle_since: float | None = None
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(SAFETY_NET_SECS)
            if self._waiting:
                idle_since = None
                with contextlib.suppress(Error):  # an unreachable server is polled again in a second
                    await self._poll_all()
                continue
            idle_since = loop.time() if idle_since is None else idle_since
            if loop.time() - idle_since >= IDLE_SECS:
                await self._stop()
                return

    async def _poll_all(self) -> None:
        ids = list(self._waiting)
        for start in range(0, len(ids), MAX_KEYS):
            some = ids[start : start + MAX_KEYS]
            results = (self._keys.result(job_id) for job_id in some)
            marks = (self._keys.cancel_mark(job_id) for job_id in some)
            found = await self._client.call("MGET", *results, *marks)
            for job_id, packed, mark in zip(some, found[: len(some)], found[len(some) :], strict=True):
                self._on_values(job_id, packed, mark)
        async for letters in stream_pages(self._client, self._keys.dlq, f"({self._last_letter}", page=MAX_KEYS):
            for dlq_id, fields in letters:
                self._last_letter = dlq_id.decode()
                letter = decode_dlq_fields(self._last_letter, fields)
                with contextlib.suppress(DecodeError):
                    self._fail(decode_job(letter.payload).id, letter)


async def describe_job(client: Client, keys: QueueKeys, job_id: str) -> str:
    """Return what a job is doing, such as `it is waiting, and no worker serves queue 'emails'`."""
    state = await find_job(client, keys, job_id)
    if state.state == "waiting":
        return await _waiting(client, keys, state)
    if state.state == "running":
        done = "" if state.progress is None else f" ({state.progress:.0%})"
        return f"it is running on worker {state.worker}{done}"
    if state.state == "delayed":
        return _delayed(state, await client.server_time_ms())
    if state.state == "done":
        return "its result has just been stored"
    if state.state == "unknown":
        return "it is not in the queue: its worker does not store results, or there is no such job"
    return f"it is {state.state}"


async def _waiting(client: Client, keys: QueueKeys, state: JobState) -> str:
    if state.worker is not None:
        return f"it is waiting for a free slot on worker {state.worker}"
    reason = await pause_reason(client, keys)
    if reason is not None:
        return f"queue {keys.queue_name!r} is paused" + (f": {reason}" if reason else "")
    workers = await list_workers(client, keys)
    if not workers:
        return f"it is waiting, and no worker serves queue {keys.queue_name!r}"
    length = await client.call("XLEN", keys.stream)
    return f"it is waiting; jobs in the queue: {length:,}, workers: {len(workers):,}"


def _delayed(state: JobState, now_ms: int) -> str:
    left_secs = ((state.run_at_ms or 0) - now_ms) / 1000
    when = f"is due in {left_secs:.1f} s" if left_secs > 0 else f"is overdue by {-left_secs:.1f} s; no worker runs"
    if state.attempt:
        return f"attempt {state.attempt} failed, and the next one {when}"
    return f"it is delayed and {when}"
