"""Builds the outcome of one run of a job, as the settle script takes it. Runs once per job: a hot path."""

from __future__ import annotations

import linecache
from typing import TYPE_CHECKING, Any

from tampu.base.checks import MAX_U32
from tampu.base.limits import CANCEL_TTL_SECS
from tampu.consume.processes import RemoteError, own_traceback, traceback_text
from tampu.redis.codes import OutcomeKind
from tampu.wire.dlq import DlqEntry, DlqReason, encode_dlq_fields
from tampu.wire.entry import encode_delayed_member
from tampu.wire.envelope import ULID_BYTES, encode_envelope, encode_job

if TYPE_CHECKING:
    from tampu.consume.inflight import Delivery

_SUCCESS, _RESULT, _RETRY = OutcomeKind.SUCCESS, OutcomeKind.RESULT, OutcomeKind.RETRY  # globals: used once per job

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
    """The end of one delivery. `extra` holds the settle script's further arguments for this kind."""

    #: The dead letter, if this is one.
    letter: DlqEntry

    __slots__ = ("delivery", "dlq_reason", "duration_us", "extra", "finished_at_ms", "kind", "letter", "runs")

    def __init__(
        self, kind: OutcomeKind, delivery: Delivery, finished_at_ms: int, duration_us: int, extra: tuple[Any, ...]
    ) -> None:
        self.kind = kind
        self.delivery = delivery
        self.finished_at_ms = finished_at_ms
        self.duration_us = duration_us
        self.extra = extra
        #: Runs of the handler so far, this one included.
        self.runs = delivery.job.attempt + 1
        self.dlq_reason: DlqReason | None = None


def success(delivery: Delivery, finished_at_ms: int, duration_us: int) -> Outcome:
    """Return the outcome of a job that succeeded without a result to store."""
    return Outcome(_SUCCESS, delivery, finished_at_ms, duration_us, ())


def success_with_result(delivery: Delivery, finished_at_ms: int, duration_us: int, result: bytes) -> Outcome:
    """Return the outcome of a job that succeeded with a result to store."""
    return Outcome(_RESULT, delivery, finished_at_ms, duration_us, (result,))


def retry(
    delivery: Delivery,
    finished_at_ms: int,
    duration_us: int,
    reason: str,
    backoff_ms: int,
    *,
    counts: bool = True,
    traceback: str = "",
) -> Outcome:
    """Return the outcome of a job that runs again after `backoff_ms`. Without `counts` it uses up no attempt."""
    job = delivery.job
    attempt = min(job.attempt + 1, MAX_U32) if counts else job.attempt
    envelope = encode_envelope(job.id, job._slot, job.created_at_ms, attempt, job.retry) + job._tail
    member = encode_delayed_member(job.name, envelope)
    ttl_secs = 0 if len(job.id) == ULID_BYTES else backoff_ms // 1000 + INDEX_TTL_SECS
    texts = (reason.encode(errors="replace"), traceback.encode(errors="replace"))
    extra = (texts[0], backoff_ms, member, ttl_secs, texts[1])
    return Outcome(_RETRY, delivery, finished_at_ms, duration_us, extra)


def cancelled(delivery: Delivery, finished_at_ms: int, duration_us: int, reason: str, *, ran: bool) -> Outcome:
    """Return the outcome of a job that was cancelled, before or while it ran."""
    extra = (reason.encode(errors="replace"), CANCEL_TTL_SECS)
    outcome = Outcome(OutcomeKind.CANCELLED, delivery, finished_at_ms, duration_us, extra)
    if not ran:
        outcome.runs = delivery.job.attempt
    return outcome


def dead_letter(
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
) -> Outcome:
    """Return the outcome of a job that is not retried. `error` is its last error; only `malformed` has a `detail`."""
    job = delivery.job
    runs = job.attempt + (1 if ran else 0)
    payload = encode_job(job) if envelope is None else envelope
    size = len(payload) + sum(len(part) for pair in original or () for part in pair)
    if size > MAX_LETTER_BYTES:
        payload, original = b"", None
        dropped = f"{size:,} bytes are not kept, over {MAX_LETTER_BYTES:,}"
        detail = f"{detail}; {dropped}" if detail else dropped
    entry = DlqEntry(
        dlq_id="",
        source_id=delivery.entry_id.decode(),
        reason=reason.as_str(),
        detail=detail,
        payload=payload,
        name=job.name,
        error_type=None if error is None else error_type(error),
        error=None if error is None else plain_text(error),
        traceback=None if error is None else traceback_tail(error),
        attempts=runs,
        worker=worker,
        failed_at_ms=finished_at_ms,
        original=original,
    )
    fields = encode_dlq_fields(entry)
    reported = error_text(error).encode(errors="replace") if ran and error is not None else b""
    outcome = Outcome(
        OutcomeKind.DEAD_LETTER,
        delivery,
        finished_at_ms,
        duration_us,
        (reported, reason.as_str(), fields),
    )
    outcome.dlq_reason = reason
    outcome.letter = entry
    outcome.runs = runs
    return outcome


class ResultRefused(Exception):  # noqa: N818 - what dead letters show as the error's type
    """The error of a job whose result the server refused."""


def without_result(outcome: Outcome, worker: str, refusal: object) -> Outcome:
    """Return the dead letter of a job whose result the server refuses for good, so that waiting callers learn why."""
    size = len(outcome.extra[0])
    error = ResultRefused(f"the work is done, but the server refused its result of {size:,} bytes: {refusal}")
    return dead_letter(
        outcome.delivery,
        outcome.finished_at_ms,
        outcome.duration_us,
        reason=DlqReason.UNRECOVERABLE,
        worker=worker,
        error=error,
    )


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
