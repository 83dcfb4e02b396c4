"""Helpers for tests of applications that use tampu: an embedded server, a queue, and `run_until_empty`.

    async def test_a_welcome_is_sent(tampu_queue):
        @tampu_queue.task
        async def welcome(to: str) -> None: ...

        await welcome.add("ada@example.com")
        assert await run_until_empty(tampu_queue) == 1

Installed as a pytest plugin. `run_until_empty` also works without pytest.

| fixture | scope | value |
|---|---|---|
| `tampu_server` | session | an embedded Valkey with temporary data; its URL is `tampu_server.url` |
| `tampu_queue` | function | an empty `Queue` on that server, with a unique name |
| `tampu_clean` | function | that server, emptied before the test: no job, dead letter, unique ID or schedule is left |
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from typing import TYPE_CHECKING, Any

from tampu.base.clock import wall_clock_ms
from tampu.consume.context import context_of
from tampu.consume.dependencies import OVERRIDES
from tampu.embedded.server import acquire, release
from tampu.errors import JobFailed
from tampu.inspect.admin import delete_keys
from tampu.inspect.jobs import decoded_job, decoded_member
from tampu.inspect.streams import newest_id, stream_entries
from tampu.queue import Queue
from tampu.redis.client import Client
from tampu.redis.settings import parse_url
from tampu.wire.dlq import decode_dlq_fields
from tampu.wire.extras import JobExtras, check_headers, encode_extras
from tampu.wire.job import Job
from tampu.worker import Worker

try:
    import pytest
except ImportError:  # pytest is optional
    pytest = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from tampu.embedded.server import EmbeddedServer
    from tampu.worker import Handler

#: Settings of the worker: short intervals, and no schedules.
QUICK: dict[str, Any] = {
    "concurrency": 10,
    "delayed_poll_interval_ms": 5,
    "run_scheduler": False,
    "shutdown_deadline_secs": 5,
}
#: How often schedules are checked, if they are fired, in milliseconds.
TICK_MS = 5
#: How often to check whether jobs are left, in seconds.
POLL_SECS = 0.005


@contextlib.contextmanager
def job_context(
    *, attempt: int = 0, headers: Mapping[str, str] | None = None, job_id: str = "test"
) -> Iterator[RecordingJob]:
    """Make `current_job()` work in a test that calls a task directly: `with job_context(): await welcome("ada")`.

    `job.progress(...)` is accepted and recorded in `job.reported`; `job.check_cancelled()` does nothing.
    """
    job = RecordingJob(job_id, "", None, attempt, wall_clock_ms())
    job._tail = encode_extras(JobExtras(check_headers(headers or {})))
    with context_of(job):
        yield job


@contextlib.contextmanager
def override(provider: Callable[..., Any], replacement: Callable[..., Any]) -> Iterator[None]:
    """Use another provider for a dependency inside a `with` block: `with override(session, fake_session): ...`.

    The replacement may be of any kind that `Depends` takes. Processes of `process=True` tasks do not see it.
    """
    before = OVERRIDES.get(provider, provider)
    OVERRIDES[provider] = replacement
    try:
        yield
    finally:
        OVERRIDES[provider] = before


class RecordingJob(Job[Any]):
    """A job that records its progress."""

    __slots__ = ("reported",)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        #: Fraction and note of every call of `progress`.
        self.reported: list[tuple[float, str]] = []

    def progress(self, fraction: float, note: str = "") -> None:
        self.reported.append((fraction, note))


async def run_until_empty(
    *queues: Queue,
    handler: Handler | None = None,
    include_delayed: bool = False,
    raise_errors: bool = True,
    timeout: float = 30.0,  # noqa: ASYNC109 - the error names the queues with jobs left
    **settings: Any,
) -> int:
    """Run the jobs of these queues until none is waiting, due or running. Return the number of runs.

    Retries run at once, without their backoff. Delayed jobs that are not due are left alone. In a test without an event
    loop, use `asyncio.run(run_until_empty(queue))`.

    Args:
        *queues: The queues. Paused queues are not waited for.
        handler: Handler for queues without tasks.
        include_delayed: Also run delayed jobs, at once.
        raise_errors: If a job is dead-lettered, raise its exception with its traceback. False leaves it in the
            dead-letter queue.
        timeout: Maximum duration in seconds.
        **settings: Any setting of `Worker`. With `run_scheduler=True`, schedules that are due are fired too; with
            `include_delayed` as well, every schedule is fired once, immediately.

    Raises:
        TimeoutError: Jobs are left after `timeout` seconds.
        JobFailed: A job was dead-lettered without an exception, for example because it cannot be decoded.
    """
    runs: list[str] = []
    errors: dict[str, BaseException] = {}
    letters = [await newest_id(queue.producer.ready_client(), queue.keys.dlq) for queue in queues]

    def record(job: Job[Any], error: BaseException | None) -> None:
        runs.append(job.id)
        if error is not None:
            errors[job.id] = error

    fires = bool(settings.get("run_scheduler"))
    if fires:
        settings.setdefault("scheduler_tick_ms", TICK_MS)
        if include_delayed:
            for queue in queues:
                await _make_schedules_due(queue)
    worker = Worker(queues, handler, after_job=record, **(QUICK | settings))
    running = asyncio.create_task(worker.run())
    try:
        await _until_done(queues, running, timeout, include_delayed=include_delayed, fires=fires)
    finally:
        await worker.close()
        await running
    if raise_errors:
        for queue, last_id in zip(queues, letters, strict=True):
            await _raise_new_letters(queue, last_id, errors)
    return len(runs)


async def _until_done(
    queues: tuple[Queue, ...], running: asyncio.Task[None], timeout_secs: float, *, include_delayed: bool, fires: bool
) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_secs
    while not running.done():
        # Check twice: between the two commands of one check, a job may move from the second place to the first.
        left = [await _left(queue, fires) + await _left(queue, fires) for queue in queues]
        if not any(left):
            if not any([await _make_due(queue, retries_only=not include_delayed) for queue in queues]):
                return
        elif loop.time() > deadline:
            names = ", ".join(queue.name for queue, count in zip(queues, left, strict=True) if count)
            raise TimeoutError(f"jobs are left in {names} after {timeout_secs:g} s")
        await asyncio.sleep(POLL_SECS)


async def _left(queue: Queue, fires: bool) -> int:
    """Return the number of jobs that are due, waiting or running, and of schedules that are due if they are fired."""
    client = queue.producer.ready_client()
    if await client.call("EXISTS", queue.keys.paused):
        return 0
    schedules: int = await client.call("ZCOUNT", queue.keys.repeat, "-inf", wall_clock_ms()) if fires else 0
    due: int = await client.call("ZCOUNT", queue.keys.delayed, "-inf", wall_clock_ms())
    there: int = await client.call("XLEN", queue.keys.stream)
    return schedules + due + there


async def _make_schedules_due(queue: Queue) -> None:
    client = queue.producer.ready_client()
    now_ms = await client.server_time_ms()
    for key in await client.call("ZRANGE", queue.keys.repeat, 0, -1):
        await client.call("ZADD", queue.keys.repeat, "XX", now_ms, key)


async def _make_due(queue: Queue, *, retries_only: bool) -> int:
    """Make delayed jobs due now and return how many."""
    client = queue.producer.ready_client()
    if await client.call("EXISTS", queue.keys.paused):
        return 0
    count = 0
    for member in await client.call("ZRANGE", queue.keys.delayed, 0, -1):
        job = decoded_member(member)[1]
        if not retries_only or (job is not None and job.attempt > 0):
            count += 1
            await client.call("ZADD", queue.keys.delayed, "XX", 0, member)
    return count


async def _raise_new_letters(queue: Queue, last_id: str, errors: dict[str, BaseException]) -> None:
    client = queue.producer.ready_client()
    async for entry_id, fields in stream_entries(client, queue.keys.dlq, f"({last_id}"):
        letter = decode_dlq_fields(entry_id.decode(), fields)
        job = decoded_job(letter.payload)
        job_id = "" if job is None else job.id
        if job_id in errors:
            raise errors[job_id]
        detail = letter.error or letter.detail
        text = f"job {job_id or letter.source_id} of {queue.name!r} was dead-lettered: {letter.reason} ({detail})"
        raise JobFailed(text, job_id=job_id, reason=letter.reason, detail=detail)


if pytest is not None:

    @pytest.fixture(scope="session")
    def tampu_server() -> Iterator[EmbeddedServer]:
        """Start an embedded Valkey for the whole session, with temporary data. All `embedded://` URLs use it."""
        server = acquire()
        yield server
        release(server)

    @pytest.fixture
    def tampu_clean(tampu_server: EmbeddedServer) -> EmbeddedServer:
        """Empty the embedded server: for queues of your application, whose names are the same in every test."""
        asyncio.run(_flush())
        return tampu_server

    @pytest.fixture
    def tampu_queue(tampu_server: EmbeddedServer) -> Iterator[Queue]:
        """Create an empty queue with a unique name, and delete it after the test."""
        queue = Queue(f"test-{uuid.uuid4().hex}", url="embedded://")
        yield queue
        asyncio.run(_forget(queue))


async def _flush() -> None:
    client = Client(parse_url("embedded://"), b"")
    try:
        await client.call("FLUSHALL")
    finally:
        await client.close()


async def _forget(queue: Queue) -> None:
    await delete_keys(queue.producer.ready_client(), queue.keys)
    await queue.close()
