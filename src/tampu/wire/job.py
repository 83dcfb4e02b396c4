"""The `Job` that producers create and handlers receive. Its payload is decoded on first use."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, cast

from tampu.base.checks import MAX_U32, MAX_U64, check_int, check_job_id, check_job_name, invalid
from tampu.base.clock import random_bytes, wall_clock_ms
from tampu.errors import DecodeError, JobCancelled, SoftTimeout
from tampu.wire.extras import JobExtras, decode_extras, encode_extras
from tampu.wire.payload import PayloadFormat, check_payload_format, decode_slot, encode_slot, slot_format
from tampu.wire.retry import JobRetryOverride
from tampu.wire.ulid import RANDOM_BYTES, encode_ulid

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

_NOT_DECODED: Any = object()


def _check_retry(value: object) -> JobRetryOverride:
    if not isinstance(value, JobRetryOverride):
        raise invalid("retry", value, "a JobRetryOverride")
    return value


def cancelled_error(job_id: str, reason: str) -> JobCancelled:
    """Return the error for a cancelled job."""
    text = f"job {job_id} was cancelled" + (f": {reason}" if reason else "")
    return JobCancelled(text, job_id=job_id, reason=reason)


def check_poll_interval(value: float) -> None:
    """Check `poll_interval`, which is accepted for compatibility: tampu does not poll, other implementations do."""
    if isinstance(value, bool) or not value > 0:
        raise invalid("poll_interval", value, "a number of seconds above 0")


class JobId(str):
    """The ID of an added job. `is_new` is False if the ID was a duplicate and nothing was added."""

    # A class attribute, so that the ids of a large bulk add take no more memory than their text.
    __slots__ = ()
    is_new: ClassVar[bool] = True


class DuplicateJobId(JobId):
    """The ID of a job that was not added, because its ID was a duplicate."""

    __slots__ = ()
    is_new = False


class Cancellation:
    """A request to cancel a running job. `reason` is None until there is one."""

    __slots__ = ("reason", "soft_timeout_at")

    def __init__(self, reason: str | None = None) -> None:
        self.reason = reason
        #: When the next check raises `SoftTimeout`, once, by the monotonic clock.
        self.soft_timeout_at: float | None = None


class Job(Generic[T]):
    """A job: `id`, `name`, `payload`, `created_at_ms`, `attempt` (number of failed attempts so far) and `retry`.

    `data` and `attempts_made` are aliases of `payload` and `attempt`.
    """

    __slots__ = (
        "_cancellation",
        "_context",
        "_decode",
        "_judged",
        "_payload",
        "_slot",
        "_tail",
        "attempt",
        "created_at_ms",
        "id",
        "name",
        "retry",
    )

    #: Set if a run fails: the error, and what the task's rules say about it.
    _judged: Any

    def __init__(
        self,
        id: str,  # noqa: A002 - the field's name on every level of the API
        name: str = "",
        data: T | None = None,
        attempt: int = 0,
        created_at_ms: int = 0,
        *,
        retry: JobRetryOverride | None = None,
        payload_format: PayloadFormat = "bin",
    ) -> None:
        self.id = check_job_id(id)
        self.name = check_job_name(name)
        self.attempt = check_int("attempt", attempt, high=MAX_U32)
        self.created_at_ms = check_int("created_at_ms", created_at_ms, high=MAX_U64)
        self.retry = None if retry is None else _check_retry(retry)
        self._slot = encode_slot(data, check_payload_format(payload_format))
        self._payload: T = cast("T", data)
        self._decode: Callable[[bytes], T] = decode_slot
        #: The queue that added the job (`wait_for_result`, `get_job`), or the worker that runs it (`report_progress`).
        self._context: Any = None
        self._cancellation: Cancellation | None = None
        self._tail = b""

    @classmethod
    def new(
        cls,
        payload: T,
        *,
        now_ms: Callable[[], int] = wall_clock_ms,
        random_bytes: Callable[[int], bytes] = random_bytes,
    ) -> Job[T]:
        """Return a job with a new ID, created now."""
        created_at_ms = now_ms()
        return cls(encode_ulid(created_at_ms, random_bytes(RANDOM_BYTES)), "", payload, 0, created_at_ms)

    @classmethod
    def with_id(cls, id: str, payload: T, *, now_ms: Callable[[], int] = wall_clock_ms) -> Job[T]:  # noqa: A002
        """Return a job with the given ID, created now."""
        return cls(id, "", payload, 0, now_ms())

    @classmethod
    def from_wire(
        cls,
        id: str,  # noqa: A002
        slot: bytes,
        created_at_ms: int,
        attempt: int,
        retry: JobRetryOverride | None,
        name: str = "",
        tail: bytes = b"",
    ) -> Job[T]:
        """Return a decoded job. Its fields are not checked, and the payload stays encoded until it is read."""
        job = cls.__new__(cls)
        job.id = id
        job.name = name
        job.attempt = attempt
        job.created_at_ms = created_at_ms
        job.retry = retry
        job._slot = slot
        job._payload = _NOT_DECODED
        job._decode = decode_slot
        job._context = None
        job._cancellation = None
        job._tail = tail
        return job

    @property
    def payload(self) -> T:
        """The value that was added with the job. Raises `DecodeError` if the bytes are not valid MessagePack."""
        if self._payload is _NOT_DECODED:
            try:
                self._payload = self._decode(self._slot)
            except DecodeError as error:
                error.job_id = self.id
                raise
        return self._payload

    @property
    def data(self) -> T:
        """Alias of `payload`."""
        return self.payload

    @property
    def attempts_made(self) -> int:
        """Alias of `attempt`."""
        return self.attempt

    async def result(self, timeout: float = 30.0) -> Any:  # noqa: ASYNC109 - the argument's name on this level
        """Wait for the job to finish and return the handler's return value.

        An event announces the result; a check once a second finds results whose event was lost.
        Works for jobs returned by `Queue.add` if the worker stores results. Raises `TimeoutError` after `timeout`
        seconds, `JobFailed` if the job was dead-lettered, and `JobCancelled` if it was cancelled.
        """
        wait_for_result = getattr(self._context, "wait_for_result", None)
        if wait_for_result is None:
            raise RuntimeError("call result() on a job returned by Queue.add: a handler cannot wait for its own job")
        if isinstance(timeout, bool) or not timeout > 0:
            raise invalid("timeout", timeout, "a number of seconds above 0")
        return await wait_for_result(self.id, timeout)

    async def wait_for_result(self, *, timeout: float = 30.0, poll_interval: float = 0.1) -> Any:  # noqa: ASYNC109
        """Call `result(timeout)`. `poll_interval` is accepted for compatibility and not used."""
        check_poll_interval(poll_interval)
        return await self.result(timeout)

    async def state(self) -> Any:
        """Return the job's current state, with its progress, result or dead letter: the `JobState` of `Queue.get_job`.

        Works for jobs returned by `Queue.add`, and by `Task.job` for an ID.
        """
        get_job = getattr(self._context, "get_job", None)
        if get_job is None:
            raise RuntimeError("call state() on a job returned by Queue.add; in a handler, call queue.get_job(job.id)")
        return await get_job(self.id)

    def progress(self, fraction: float, note: str = "") -> None:
        """Publish this job's progress (0 to 1). For handlers; safe to call often and from any thread.

        A number out of range is clamped: progress never fails the work.
        """
        report_progress = getattr(self._context, "report_progress", None)
        if report_progress is None:
            raise RuntimeError("this job is not running here; call progress() on the job that the handler received")
        report_progress(self, fraction, note)

    @property
    def headers(self) -> dict[str, str]:
        """The headers that the job was added with: `task.using(headers={"tenant": "acme"})`."""
        return dict(decode_extras(self._tail).headers)

    @property
    def key(self) -> str | None:
        """The key that the job was added with, by which limits count it: `task.using(key="acme")`."""
        return decode_extras(self._tail).key

    @property
    def extras(self) -> JobExtras:
        """Headers, timeout, expiry and key that the job was added with."""
        return decode_extras(self._tail)

    @property
    def is_cancelled(self) -> bool:
        """True once `cancel` was called for this running job; see `check_cancelled`."""
        return self._cancellation is not None and self._cancellation.reason is not None

    def check_cancelled(self) -> None:
        """Raise `JobCancelled` if this job was cancelled. Call it from time to time in a long-running `def` handler.

        It raises `SoftTimeout`, once, when the task's `soft_timeout` has passed. `async def` handlers are cancelled
        where they wait, and `process=True` handlers are killed: they need no check.
        """
        request = self._cancellation
        if request is None:
            return
        if request.reason is not None:
            raise cancelled_error(self.id, request.reason)
        if request.soft_timeout_at is not None and time.monotonic() >= request.soft_timeout_at:
            request.soft_timeout_at = None
            raise SoftTimeout("the handler reached its soft timeout")

    @property
    def stopping(self) -> bool:
        """True once the worker that runs this job was told to stop: save what is done and return `Snooze(0)`.

        At the shutdown deadline the job is cancelled and handed to another worker. Always False in a process of
        `process=True` tasks, which does not learn of it.
        """
        return bool(getattr(self._context, "is_stopping", bool)())

    @property
    def payload_slot(self) -> bytes:
        """The encoded payload, exactly as in the envelope."""
        return self._slot

    @property
    def payload_format(self) -> PayloadFormat:
        """The format of the encoded payload: 'bin' or 'inline'."""
        return slot_format(self._slot)

    def with_retry(self, retry: JobRetryOverride) -> Job[T]:
        """Return a copy with this retry override."""
        return self._replaced(retry=_check_retry(retry))

    def with_name(self, name: str) -> Job[T]:
        """Return a copy with this name."""
        return self._replaced(name=check_job_name(name))

    def with_attempt(self, attempt: int) -> Job[T]:
        """Return a copy that has failed `attempt` times."""
        return self._replaced(attempt=check_int("attempt", attempt, high=MAX_U32))

    def for_replay(self) -> Job[T]:
        """Return a copy with no failed attempts and no expiry: a replayed job is wanted now."""
        tail = encode_extras(self.extras._replace(expires_at_ms=None)) if self._tail else b""
        return self._replaced(attempt=0, _tail=tail)

    def _replaced(self, **changes: Any) -> Job[T]:
        job = type(self).__new__(type(self))
        for slot in Job.__slots__:
            setattr(job, slot, changes.get(slot, getattr(self, slot, None)))
        return job

    def _identity(self) -> tuple[object, ...]:
        return (self.id, self._slot, self.created_at_ms, self.attempt, self.retry, self.name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Job) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def __repr__(self) -> str:
        return f"Job(id={self.id!r}, name={self.name!r}, attempt={self.attempt}, created_at_ms={self.created_at_ms})"
