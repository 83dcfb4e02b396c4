"""Follows the events of a queue: as an async iterator, and for callers that wait for results.

async for event in QueueEvents("emails"):
    print(event.name, event.job_id, event.fields)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Self

from tampu.base.checks import check_int
from tampu.errors import DecodeError, Error, JobFailed, RedisError, ResultNotStored, ShutdownError
from tampu.inspect.jobs import decoded_job
from tampu.inspect.streams import newest_id, stream_entries
from tampu.maintain.supervise import logger
from tampu.redis.client import Client, backoff_secs
from tampu.redis.faults import Remedy, ServerError
from tampu.redis.settings import parse_url, resolve_url
from tampu.wire.dlq import DlqEntry, decode_dlq_fields
from tampu.wire.events import EventName, QueueEvent, decode_event_fields
from tampu.wire.job import cancelled_error
from tampu.wire.keys import QueueKeys
from tampu.wire.payload import decode_result

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

    from tampu.inspect.admin import QueueAdmin
    from tampu.inspect.jobs import JobState

queue_logger = logging.getLogger("tampu.queue")

#: How long a read may exceed its BLOCK time before the connection counts as lost, in seconds.
READ_MARGIN_SECS = 5.0
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


class QueueEvents:
    """Follows the events of one queue, and reconnects after a lost connection.

        async with QueueEvents("emails") as events:
            async for event in events:
                print(event.name, event.job_id, event.fields)

    Args:
        queue_name: Name of the queue.
        url: Server URL. Defaults to `TAMPU_URL`, then to `redis://127.0.0.1:6379`.
        redis_url: Another name for `url`.
        tls: Connect with TLS.
        last_event_id: Start after this event. `"$"` (default) starts now, `"0-0"` at the oldest event that is kept.
        block_ms: How long one read waits for events, in milliseconds.
        count: Maximum number of events per read.
        credential_provider: Callable or redis-py `CredentialProvider` that returns the credentials.
    """

    def __init__(
        self,
        queue_name: str,
        *,
        url: str | None = None,
        redis_url: str | None = None,
        tls: bool = False,
        last_event_id: str = "$",
        block_ms: int = 5000,
        count: int = 100,
        credential_provider: Any = None,
    ) -> None:
        self._keys = QueueKeys(queue_name)
        self._settings = parse_url(resolve_url(url, redis_url, tls=tls), credential_provider=credential_provider)
        self._last_id = last_event_id
        self._block_ms = check_int("block_ms", block_ms, low=1)
        self._count = check_int("count", count, low=1)
        self._client: Client | None = None
        self._closed = False

    @property
    def name(self) -> str:
        """Name of the queue."""
        return self._keys.queue_name

    @property
    def last_event_id(self) -> str:
        """ID of the last event seen. Pass it to another `QueueEvents` to continue from there."""
        return self._last_id

    async def __aiter__(self) -> AsyncIterator[QueueEvent]:
        async for _, event in self.entries():
            yield event

    async def entries(self) -> AsyncIterator[tuple[str, QueueEvent]]:
        """Yield (ID, event) pairs, for callers that store their position."""
        while not self._is_closed():
            for entry_id, fields in await self._read():
                self._last_id = entry_id.decode()
                yield self._last_id, decode_event_fields(fields)
                if self._is_closed():
                    return

    async def _read(self) -> list[Any]:
        """Return the next entries; reconnect after a lost connection."""
        attempt = 0
        while not self._is_closed():
            try:
                await self.pin()
                reply = await self._opened().call(
                    *("XREAD", "COUNT", self._count, "BLOCK", self._block_ms),
                    *("STREAMS", self._keys.events, self._last_id),
                )
            except (RedisError, ShutdownError) as error:
                if self._is_closed():
                    break
                if isinstance(error, ServerError) and error.remedy is Remedy.NONE:
                    raise  # a wrong password or missing permission: retrying does not help
                if attempt == 0:
                    logger.warning("events of queue %r: waiting for the server: %s", self.name, error)
                attempt += 1
                await asyncio.sleep(backoff_secs(attempt))
                continue
            if reply:
                return list(reply[0][1])
            attempt = 0
        return []

    async def pin(self) -> None:
        """Fix the start position now, so that an iteration that starts later misses no event from here on."""
        if self._last_id == "$":
            # Resolve `$` only once: sent again after a reconnect, it would skip the events in between.
            newest = await newest_id(self._opened(), self._keys.events)
            if self._last_id == "$":
                self._last_id = newest

    def abandon(self) -> None:
        """Drop the connection without closing it: its event loop has ended, or a parent process still uses it."""
        self._closed = True
        if self._client is not None:
            self._client.abandon()

    def _opened(self) -> Client:
        if self._client is None:
            timeout = self._block_ms / 1000 + READ_MARGIN_SECS
            self._client = Client(self._settings, self._keys.tag.encode(), response_timeout_secs=timeout)
        return self._client

    def _is_closed(self) -> bool:
        return self._closed

    async def close(self) -> None:
        """End the iteration and close the connection."""
        self._closed = True
        if self._client is not None:
            await self._client.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()


class Waiters:
    """The callers in one event loop that wait for results of one queue: one `QueueEvents` serves all of them.

    A result is looked up when a caller starts to wait, when an event announces it, and every second for all callers,
    because an event may have been trimmed or events may be disabled. A dead letter is looked up for callers that have
    waited for a moment: most results arrive sooner.
    """

    def __init__(self, admin: QueueAdmin, follow: Callable[[], QueueEvents]) -> None:
        self._admin = admin
        self._client = admin.client
        self._keys = admin.keys
        self._follow = follow
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: dict[str, list[asyncio.Future[Any]]] = {}
        self._completed: set[str] = set()
        self._events: QueueEvents | None = None
        self._starting: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._last_letter = "0-0"

    async def wait(self, job_id: str, timeout_secs: float) -> Any:
        """Wait for a job's result and return it. Raises `JobFailed`, `ResultNotStored` or `TimeoutError`."""
        self._bind_to_loop()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._waiting.setdefault(job_id, []).append(future)
        try:
            async with asyncio.timeout(timeout_secs) as limit:
                try:
                    # Subscribe before the lookup: whatever happens after the lookup then comes as an event.
                    await self._started()
                    if not await self._poll_one(job_id):
                        loop.call_later(LETTER_PATIENCE_SECS, self._find_old_letter, job_id, future)
                except Error:
                    if not future.done():  # otherwise its own error explains more: the queue was closed
                        raise
                return await future
        except TimeoutError:
            if not limit.expired():
                raise
            raise TimeoutError(await self._timeout_text(job_id, timeout_secs)) from None
        finally:
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
                return f"{text}: {await describe_job(self._admin, job_id)}"
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
            self._finish(job_id, partial(self._result_of, job_id, packed))
        elif mark is not None and mark.startswith(b"c"):
            self._finish(job_id, partial(cancelled_error, job_id, mark[1:].decode(errors="replace")))
        else:
            return False
        return True

    def _finish(self, job_id: str, outcome: Callable[[], Any]) -> None:
        """Give each caller its own result or error: a raised error collects the traceback of its caller."""
        for future in self._waiting.get(job_id, ()):
            if not future.done():
                value = outcome()
                if isinstance(value, Error):
                    future.set_exception(value)
                else:
                    future.set_result(value)

    def _find_old_letter(self, job_id: str, future: asyncio.Future[Any]) -> None:
        async def find() -> None:
            try:
                await self._find_letter(job_id)
            except Error as error:
                if not future.done():
                    future.set_exception(error)

        if not future.done():
            self._spawn(find(), "tampu-waiters-letter")

    async def _find_letter(self, job_id: str) -> None:
        letter = await self._admin.find_dead_letter(job_id)
        if letter is not None:
            self._fail(job_id, letter)

    def _result_of(self, job_id: str, packed: bytes) -> Any:
        try:
            if self._admin.codec is not None:
                packed = self._admin.codec.open_result(packed, job_id)
        except DecodeError as error:
            return DecodeError(f"the result of job {job_id} is refused: {error}")
        try:
            return decode_result(packed)
        except ResultNotStored as error:
            return error
        except DecodeError:
            return packed  # a `Consumer` stores its handler's bytes, MessagePack or not

    def _fail(self, job_id: str, letter: DlqEntry) -> None:
        detail = letter.error_text
        text = f"job {job_id} became a dead letter: {letter.reason}" + (f" ({detail})" if detail else "")
        self._finish(job_id, partial(JobFailed, text, job_id=job_id, reason=letter.reason, detail=detail or None))

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
            queue_logger.warning("the reader of results failed: %s: %s", type(error).__name__, error)

    async def _read(self, events: QueueEvents) -> None:
        async for event in events:
            if event.job_id in self._waiting:
                if event.name == EventName.COMPLETED:
                    self._spawn(self._on_completed(event.job_id), "tampu-waiters-completed")
                elif event.name == EventName.CANCELLED:
                    reason = str(event.fields.get("reason", ""))
                    self._finish(event.job_id, partial(cancelled_error, event.job_id, reason))
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
            page = ids[start : start + MAX_KEYS]
            keys = [(self._keys.result(job_id), self._keys.cancel_mark(job_id)) for job_id in page]
            found = await self._client.call("MGET", *chain.from_iterable(keys))
            for job_id, packed, mark in zip(page, found[::2], found[1::2], strict=True):
                self._on_values(job_id, packed, mark)
        async for dlq_id, fields in stream_entries(self._client, self._keys.dlq, f"({self._last_letter}"):
            self._last_letter = dlq_id.decode()
            letter = decode_dlq_fields(self._last_letter, fields)
            job = decoded_job(letter.payload)
            if job is not None:
                self._fail(job.id, letter)


async def describe_job(admin: QueueAdmin, job_id: str) -> str:
    """Return what a job is doing, such as `it is waiting, and no worker serves queue 'emails'`."""
    state = await admin.job(job_id)
    if state.state == "waiting":
        return await _waiting(admin, state)
    if state.state == "running":
        done = "" if state.progress is None else f" ({state.progress:.0%})"
        return f"it is running on worker {state.worker}{done}"
    if state.state == "delayed":
        return _delayed(state, await admin.client.server_time_ms())
    if state.state == "done":
        return "its result has just been stored"
    if state.state == "unknown":
        return "it is not in the queue: its worker does not store results, or there is no such job"
    return f"it is {state.state}"


async def _waiting(admin: QueueAdmin, state: JobState) -> str:
    if state.worker is not None:
        return f"it is waiting for a free slot on worker {state.worker}"
    reason = await admin.pause_reason()
    if reason is not None:
        return f"queue {admin.name!r} is paused" + (f": {reason}" if reason else "")
    workers = await admin.workers()
    if not workers:
        return f"it is waiting, and no worker serves queue {admin.name!r}"
    length = await admin.client.call("XLEN", admin.keys.stream)
    return f"it is waiting; jobs in the queue: {length:,}, workers: {len(workers):,}"


def _delayed(state: JobState, now_ms: int) -> str:
    left_secs = ((state.run_at_ms or 0) - now_ms) / 1000
    when = f"is due in {left_secs:.1f} s" if left_secs > 0 else f"is overdue by {-left_secs:.1f} s; no worker runs"
    if state.attempt:
        return f"attempt {state.attempt} failed, and the next one {when}"
    return f"it is delayed and {when}"
