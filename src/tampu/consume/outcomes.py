"""Builds the outcome of one run of a job, as the settle script takes it. Runs once per job: a hot path."""

from __future__ import annotations

import linecache
from typing import TYPE_CHECKING

from tampu.base.checks import CANCEL_TTL_SECS, MAX_U32
from tampu.consume.handlers import RemoteError
from tampu.consume.processes import own_traceback, traceback_text
from tampu.redis.scripts import OutcomeKind
from tampu.wire.dlq import DlqEntry, DlqReason, encode_dlq_fields
from tampu.wire.entry import encode_delayed_member
from tampu.wire.envelope import ULID_BYTES, encode_envelope, encode_job

if TYPE_CHECKING:
    from collections.abc import Callable

    from tampu.consume.inflight import Delivery
    from tampu.consume.settle import SettleCall

#: Longest error text, and longest end of a traceback, that is stored, in characters.
MAX_ERROR_TEXT = 500
MAX_TRACEBACK_TEXT = 2000
#: Longest traceback in a `failed` event, in characters and in frames: there may be one for every attempt of every job.
MAX_EVENT_TRACEBACK = 1000
MAX_EVENT_FRAMES = 5
#: Largest envelope, and largest fields of a malformed entry, that a dead letter keeps, in bytes. Workers hold a few
#: letters in memory, and the server up to `dlq_max_stream_len`.
MAX_LETTER_BYTES = 4 * 1024 * 1024
#: How long the index key of a delayed retry outlives its due time, in seconds. Generated ids have none.
INDEX_TTL_SECS = 3600
#: Largest number that Lua holds exactly. A larger one, only found in corrupt envelopes, is sent as text.
MAX_LUA_NUMBER = 2**53


def error_type(error: BaseException) -> str:
    """Return the name of an error's type, also if it was raised in another process."""
    return error.error_type if isinstance(error, RemoteError) else type(error).__name__


def plain_text(error: BaseException) -> str:
    """Return the text of an error, bounded. Never raises."""
    try:
        return str(error)[:MAX_ERROR_TEXT]
    except Exception:
        return "(no text: the error's __str__ failed)"


def error_text(error: BaseException) -> str:
    """Return type and text of an error, bounded; never empty."""
    text = plain_text(error)
    name = error_type(error)
    return (f"{name}: {text}" if text else name)[:MAX_ERROR_TEXT]


class Outcome:
    """The end of one delivery. Each kind has its own class, which knows its size and how to write itself."""

    __slots__ = ("delivery", "duration_us", "finished_at_ms", "runs")

    #: The result to store, empty if there is none; None if the job did not succeed.
    result: bytes | None = None
    #: Where a meter counts it (`Counts.kinds`); None if it is not the end of a run.
    place: int | None = None

    def __init__(self, delivery: Delivery, finished_at_ms: int, duration_us: int) -> None:
        self.delivery = delivery
        self.finished_at_ms = finished_at_ms
        self.duration_us = duration_us
        #: Runs of the handler so far, this one included.
        self.runs = delivery.job.attempt + 1

    @property
    def ran(self) -> bool:
        """Return True if the handler ran."""
        return self.runs > self.delivery.job.attempt

    @property
    def size(self) -> int:
        """Return the bytes that this outcome adds to its window beyond a few numbers and names."""
        raise NotImplementedError

    def write(self, call: SettleCall) -> None:
        """Add the settle script's arguments for this outcome."""
        raise NotImplementedError

    def _write_other(self, call: SettleCall, kind: OutcomeKind, keys: tuple[str, ...], *values: object) -> None:
        delivery = self.delivery
        job = delivery.job
        started_at_ms, delivery.started_at_ms = delivery.started_at_ms, 0
        call.other_keys += keys
        call.others.append(
            (
                *(bytes(kind), delivery.entry_id, job.id, job.name, started_at_ms),
                *(self.finished_at_ms, self.runs, self.duration_us, for_lua(job.created_at_ms)),
                *values,
            )
        )


class Success(Outcome):
    """A job succeeded. `Settler._write` writes it, with the others of its window."""

    __slots__ = ("result",)

    result: bytes
    place = 0

    def __init__(self, delivery: Delivery, finished_at_ms: int, duration_us: int, result: bytes = b"") -> None:
        # Not by `super().__init__`, which takes as long as the rest.
        self.delivery = delivery
        self.finished_at_ms = finished_at_ms
        self.duration_us = duration_us
        self.runs = delivery.job.attempt + 1
        self.result = result

    @property
    def size(self) -> int:
        return len(self.result)


class Retried(Outcome):
    """A job runs again after `backoff_ms`. Without `counts` it uses up no attempt."""

    __slots__ = ("backoff_ms", "index_ttl_secs", "member", "place", "reason", "traceback")

    def __init__(
        self,
        delivery: Delivery,
        finished_at_ms: int,
        duration_us: int,
        reason: str,
        backoff_ms: int,
        *,
        counts: bool = True,
        traceback: str = "",
    ) -> None:
        super().__init__(delivery, finished_at_ms, duration_us)
        job = delivery.job
        attempt = min(job.attempt + 1, MAX_U32) if counts else job.attempt
        envelope = encode_envelope(job.id, job._slot, job.created_at_ms, attempt, job.retry) + job._tail
        self.backoff_ms = backoff_ms
        self.place = 1 if counts else None
        #: The member of the delayed set.
        self.member = encode_delayed_member(job.name, envelope)
        #: 0 for a generated ID, which has no index key.
        self.index_ttl_secs = 0 if len(job.id) == ULID_BYTES else backoff_ms // 1000 + INDEX_TTL_SECS
        #: Empty if the job did not fail.
        self.reason = reason.encode(errors="replace")
        self.traceback = traceback.encode(errors="replace")

    @property
    def size(self) -> int:
        return len(self.reason) + len(self.member) + len(self.traceback)

    def write(self, call: SettleCall) -> None:
        keys = (call.keys.delayed_index(self.delivery.job.id),) if self.index_ttl_secs else ()
        values = self.reason, self.backoff_ms, self.member, self.index_ttl_secs, self.traceback
        self._write_other(call, OutcomeKind.RETRY, keys, *values)


class Cancelled(Outcome):
    """A job was cancelled, before or while it ran."""

    __slots__ = ("place", "reason")

    def __init__(self, delivery: Delivery, finished_at_ms: int, duration_us: int, reason: str, *, ran: bool) -> None:
        super().__init__(delivery, finished_at_ms, duration_us)
        self.place = 3 if ran else None
        self.reason = reason.encode(errors="replace")
        if not ran:
            self.runs -= 1

    @property
    def size(self) -> int:
        return len(self.reason)

    def write(self, call: SettleCall) -> None:
        job_id = self.delivery.job.id
        keys = call.keys.cancel_mark(job_id), call.keys.cancel_marks, call.keys.dedup_marker(job_id)
        self._write_other(call, OutcomeKind.CANCELLED, keys, self.reason, CANCEL_TTL_SECS)


class DeadLetter(Outcome):
    """A job is not retried. `error` is its last error; only `malformed` has a `detail`."""

    __slots__ = ("fields", "letter", "place", "reason", "reported")

    def __init__(
        self,
        delivery: Delivery,
        finished_at_ms: int,
        duration_us: int,
        *,
        reason: DlqReason,
        worker: str,
        error: BaseException | None = None,
        detail: str | None = None,
        ran: bool = True,
        envelope: bytes | None = None,
        original: tuple[tuple[bytes, bytes], ...] | None = None,
    ) -> None:
        super().__init__(delivery, finished_at_ms, duration_us)
        job = delivery.job
        if not ran:
            self.runs -= 1
        payload = encode_job(job) if envelope is None else envelope
        size = len(payload) + sum(len(part) for pair in original or () for part in pair)
        if size > MAX_LETTER_BYTES:
            payload, original = b"", None
            dropped = f"{size:,} bytes are not kept, over {MAX_LETTER_BYTES:,}"
            detail = f"{detail}; {dropped}" if detail else dropped
        self.place = 2 if ran else None
        self.reason = reason
        self.letter = DlqEntry(
            dlq_id="",
            source_id=delivery.entry_id.decode(),
            reason=reason.as_str(),
            detail=detail,
            payload=payload,
            name=job.name,
            error_type=None if error is None else error_type(error),
            error=None if error is None else plain_text(error),
            traceback=None if error is None else traceback_tail(error),
            attempts=self.runs,
            worker=worker,
            failed_at_ms=finished_at_ms,
            original=original,
        )
        self.fields = encode_dlq_fields(self.letter)
        #: The text of the `failed` event; empty if the handler did not run.
        self.reported = error_text(error).encode(errors="replace") if ran and error is not None else b""

    @property
    def size(self) -> int:
        return len(self.reported) + sum(map(len, self.fields))

    def write(self, call: SettleCall) -> None:
        self._write_other(call, OutcomeKind.DEAD_LETTER, (), self.reported, self.reason.as_str(), self.fields)


def for_lua(number: int) -> int | str:
    """Return a number as Lua can hold it exactly."""
    return number if number < MAX_LUA_NUMBER else str(number)


class Observers:
    """What is called when jobs of one queue arrive, start, succeed or end otherwise, and when an outcome was written.

    Its log, metrics and events are observers. They are called on the event loop, for every job: they return quickly and
    do not raise.
    """

    __slots__ = ("failed", "received", "recovered", "settled", "snoozed", "started", "succeeded")

    def __init__(self) -> None:
        #: Called with the number of entries that a read returned, and of those that had been delivered before.
        self.received: list[Callable[[int, int], None]] = []
        self.started: list[Callable[[Delivery], None]] = []
        #: Called with a success at the first attempt, and with one at a later attempt.
        self.succeeded: list[Callable[[Success], None]] = []
        self.recovered: list[Callable[[Success], None]] = []
        #: Called when the handler has returned `Snooze`.
        self.snoozed: list[Callable[[Retried], None]] = []
        #: Called with any other outcome, and the error if there is one.
        self.failed: list[Callable[[Outcome, BaseException | None], None]] = []
        #: Called with any other outcome that was written.
        self.settled: list[Callable[[Outcome], None]] = []


def traceback_tail(error: BaseException) -> str | None:
    """Return the end of an error's traceback, bounded; None if it has no traceback."""
    if isinstance(error, RemoteError):
        return error.remote_traceback[-MAX_TRACEBACK_TEXT:]
    if error.__traceback__ is None:
        return None
    return traceback_text(error)[-MAX_TRACEBACK_TEXT:]


def event_traceback(error: BaseException) -> str:
    """Return the innermost frames of an error's traceback, for a `failed` event.

    Not by the `traceback` module, which takes 40 us: a storm of failures writes one for every attempt.
    """
    if isinstance(error, RemoteError):
        return error.remote_traceback[-MAX_EVENT_TRACEBACK:].partition("\n")[2]
    frames = []
    trace = own_traceback(error)
    while trace is not None:
        frames.append((trace.tb_frame.f_code, trace.tb_lineno))
        trace = trace.tb_next
    lines = []
    for code, number in frames[-MAX_EVENT_FRAMES:]:
        source = linecache.getline(code.co_filename, number).strip()
        lines.append(f'  File "{code.co_filename}", line {number}, in {code.co_name}\n    {source}\n')
    return f"{''.join(lines)}{error_text(error)}"[-MAX_EVENT_TRACEBACK:] if lines else ""
