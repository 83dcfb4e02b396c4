"""What a run writes to the server: acknowledgement, result, retry, dead letter and events, field by field."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from consume.views import CREATED_AT_MS
from consume.workers import QUEUE, consuming, quick_config
from support.clients import StandInClient
from support.waiting import until
from tampu import ResultNotStored
from tampu.base.clock import wall_clock_ms
from tampu.consume.handlers import Cancel, HandlerError, Retry, UnrecoverableError
from tampu.consume.inflight import Delivery
from tampu.consume.outcomes import Retried
from tampu.consume.settle import Settler
from tampu.redis.scripts import SettleCode
from tampu.wire.dlq import DlqReason
from tampu.wire.envelope import decode_job
from tampu.wire.job import Job
from tampu.wire.keys import QueueKeys
from tampu.wire.payload import decode_result
from tampu.wire.retry import BackoffKind, BackoffSpec, JobRetryOverride, RetryConfig

if TYPE_CHECKING:
    from consume.views import WorkerView


async def noop(job: Job[Any]) -> None:
    return None


# --- success


@pytest.mark.servers
@pytest.mark.parametrize("events", [True, False], ids=["events", "no-events"])
async def test_a_success_leaves_nothing_behind_but_its_events(view: WorkerView, events: bool) -> None:
    seen: list[Job[Any]] = []

    async def handler(job: Job[Any]) -> None:
        seen.append(job)

    ids = [view.add({"n": number}, name="greet") for number in range(5)]
    async with consuming(view.server.url, handler, events_enabled=events):
        await until(lambda: len(seen) == 5 and view.is_settled(), "all are done")
    assert [job.payload for job in seen] == [{"n": number} for number in range(5)]
    assert [job.attempt for job in seen] == [0] * 5
    assert not view.dead_letters()
    assert sorted(event["id"] for event in view.events() if event["e"] == "completed") == (ids if events else [])
    left = set(view.all_keys())
    left -= {":alive:default", *(key for key in left if key.startswith(":meter"))}  # live for a day
    assert left <= {":stream", ":events"} if events else left <= {":stream"}


@pytest.mark.servers
async def test_the_events_of_a_success_have_the_wires_fields_in_order(view: WorkerView) -> None:
    before = wall_clock_ms()
    async with consuming(view.server.url, noop) as worker:
        named = view.add(1, name="greet")
        await until(view.is_settled, "it is done")
        nameless = view.add(1)
        await until(lambda: len(view.events(nameless)) == 2, "the event is written")
        name = worker.config.consumer_id
    after = wall_clock_ms()
    flat = {(fields[1], fields[3]): fields for fields in view.flat(view.keys.events)}
    tail = ["created_at_ms", str(CREATED_AT_MS), "worker", name]

    active = flat["active", named]
    assert active[:4] == ["e", "active", "id", named]
    assert active[4] == "ts"
    assert before <= int(active[5]) <= after
    assert active[6:] == ["n", "greet", "attempt", "1", *tail]

    completed = flat["completed", named]
    assert completed[:4] == ["e", "completed", "id", named]
    assert completed[6:11] == ["n", "greet", "attempt", "1", "duration_us"]
    assert completed[12:] == tail
    assert 0 <= int(completed[11]) < 5_000_000

    assert flat["active", nameless][6:] == ["attempt", "1", *tail]
    assert flat["completed", nameless][6:9] == ["attempt", "1", "duration_us"]


@pytest.mark.servers
async def test_a_result_is_stored_with_its_ttl_if_store_results_is_set(view: WorkerView) -> None:
    async def handler(job: Job[Any]) -> bytes:
        return b"result of " + job.id.encode()

    async with consuming(view.server.url, handler, store_results=True, result_ttl_secs=77):
        kept = view.add()
        await until(lambda: view.result(kept), "it is stored")
    async with consuming(view.server.url, handler, store_results=False):
        dropped = view.add()
        await until(lambda: "completed" in view.event_names(dropped), "it is done")
    assert view.result(kept) == b"result of " + kept.encode()
    assert 70 <= view.client.ttl(view.keys.result(kept)) <= 77
    assert view.result(dropped) is None
    assert view.event_names(kept) == ["active", "completed"]


async def test_an_empty_result_and_none_store_nothing(view: WorkerView) -> None:
    async def handler(job: Job[Any]) -> bytes | None:
        return job.payload

    async with consuming(view.server.url, handler, store_results=True):
        ids = [view.add(b""), view.add(None)]
        await until(view.is_settled, "both are done")
    assert [view.result(job_id) for job_id in ids] == [None, None]
    assert not view.dead_letters()


async def test_a_bytearray_and_a_memoryview_are_valid_results(view: WorkerView) -> None:
    async def handler(job: Job[Any]) -> Any:
        return job.payload and (bytearray(b"array") if job.payload == "array" else memoryview(b"view"))

    async with consuming(view.server.url, handler, store_results=True):
        array, memory = view.add("array"), view.add("view")
        await until(view.is_settled, "both are done")
    assert view.result(array) == b"array"
    assert view.result(memory) == b"view"


@pytest.mark.parametrize("result", ["text", 5, {"a": 1}, object()], ids=["text", "number", "dict", "object"])
async def test_a_result_that_is_not_bytes_fails_only_its_readers(view: WorkerView, result: Any) -> None:
    async def handler(job: Job[Any]) -> Any:
        return result

    async with consuming(view.server.url, handler, store_results=True, max_attempts=1):
        job_id = view.add()
        await until(view.is_settled, "nothing is left")
    assert not view.dead_letters()
    with pytest.raises(ResultNotStored, match="must return bytes or None"):
        decode_result(view.result(job_id) or b"")


# --- failure and retry


@pytest.mark.servers
async def test_a_failure_is_retried_from_the_delayed_set_and_then_succeeds(view: WorkerView) -> None:
    attempts: list[int] = []

    async def handler(job: Job[Any]) -> None:
        attempts.append(job.attempt)
        if job.attempt < 2:
            raise ValueError("not yet")

    async with consuming(view.server.url, handler) as worker:
        job_id = view.add({"k": 1}, name="flaky")
        await until(lambda: len(attempts) == 3 and view.is_settled(), "it is done")
        worker_name = worker.config.consumer_id
    assert attempts == [0, 1, 2]
    names = [event["e"] for event in view.events(job_id) if event["e"] not in ("waiting", "active")]
    assert names == ["failed", "retry-scheduled", "failed", "retry-scheduled", "completed"]
    failed, scheduled = (
        next(fields for fields in view.flat(view.keys.events) if fields[1] == kind)
        for kind in ("failed", "retry-scheduled")
    )
    tail = ["created_at_ms", str(CREATED_AT_MS), "worker", worker_name]
    assert failed[6:13] == ["n", "flaky", "attempt", "1", "reason", "ValueError: not yet", "duration_us"]
    assert failed[14:-1] == [*tail, "traceback"]
    assert failed[-1].startswith('  File "')
    assert failed[-1].endswith("ValueError: not yet")
    assert scheduled[6:] == ["n", "flaky", "attempt", "2", "backoff_ms", "1", *tail]
    assert [event["attempt"] for event in view.events(job_id) if event["e"] == "failed"] == ["1", "2"]


@pytest.mark.servers
@pytest.mark.parametrize("job_id", ["01M7GA6SF90W0P6H8NHCB3RCZJ", "mine"], ids=["generated", "explicit"])
async def test_a_retry_is_a_delayed_member_with_an_index_and_its_payload(view: WorkerView, job_id: str) -> None:
    async def handler(job: Job[Any]) -> None:
        raise ValueError("no")

    retry = JobRetryOverride(5, BackoffSpec.fixed(60_000, jitter_ms=0))
    slow = RetryConfig(max_backoff_ms=100_000)
    async with consuming(view.server.url, handler, retry=slow):
        before = view.now_ms()
        job_id = view.add({"k": b"\x00"}, job_id=job_id, name="flaky", retry=retry)
        await until(view.delayed, "it waits for its retry")
        after = view.now_ms()
        await until(lambda: view.length() == 0 and not view.pending(), "its entry is gone")
    (job,) = view.delayed_jobs()
    assert (job.id, job.name, job.attempt, job.created_at_ms) == (job_id, "flaky", 1, CREATED_AT_MS)
    assert (job.payload, job.retry) == ({"k": b"\x00"}, retry)
    ((member, score),) = view.delayed()
    assert before + 60_000 <= score <= after + 60_000
    index, due = view.keys.delayed_index(job_id), view.keys.due
    assert view.client.get(index) == (member if job_id == "mine" else None)
    assert view.client.hgetall(due) == (
        {} if job_id == "mine" else {job_id[-10:].encode(): int(score).to_bytes(6, "big")}
    )
    assert 3600 + 50 <= view.client.ttl(index if job_id == "mine" else due) <= 3600 + 60


@pytest.mark.servers
async def test_the_last_failure_becomes_a_dead_letter_with_all_fields(view: WorkerView) -> None:
    async def handler(job: Job[Any]) -> None:
        raise KeyError("missing")

    async with consuming(view.server.url, handler, max_attempts=3) as worker:
        before = wall_clock_ms()
        job_id = view.add({"k": 1}, name="doomed")
        await until(view.dead_letters, "it is dead-lettered")
        await until(view.is_settled, "nothing is left")
        name = worker.config.consumer_id
    flat = view.flat(view.keys.dlq)[0]
    assert [*flat[0:1], *flat[2::2]] == [
        *("d", "n", "source_id", "reason"),
        *("error_type", "error", "traceback", "attempts", "worker", "ts"),
    ]
    (letter,) = view.dead_letters()
    assert letter.reason == "retries_exhausted"
    assert letter.name == "doomed"
    assert letter.detail is None
    assert (letter.error_type, letter.error) == ("KeyError", "'missing'")
    assert letter.traceback is not None
    assert 'raise KeyError("missing")' in letter.traceback
    assert (letter.attempts, letter.worker) == (3, name)
    assert letter.failed_at_ms is not None
    assert before <= letter.failed_at_ms <= wall_clock_ms()
    assert int(letter.source_id.split("-")[0]) >= before - 1000
    job = decode_job(letter.payload, letter.name)
    assert (job.id, job.attempt, job.payload) == (job_id, 2, {"k": 1})
    dlq = next(fields for fields in view.flat(view.keys.events) if fields[1] == "dlq")
    assert dlq[2:4] == ["id", job_id]
    tail = ["created_at_ms", str(CREATED_AT_MS), "worker", name]
    assert dlq[6:] == ["n", "doomed", "attempt", "3", "reason", "retries_exhausted", *tail]
    assert view.event_names(job_id)[-2:] == ["failed", "dlq"]


async def test_error_texts_are_bounded_and_never_empty(view: WorkerView) -> None:
    async def handler(job: Job[Any]) -> None:
        raise ValueError("x" * job.payload)

    async with consuming(view.server.url, handler, max_attempts=1):
        long, empty = view.add(100_000), view.add(0)
        await until(lambda: len(view.dead_letters()) == 2, "both are dead-lettered")
    reasons = {event["id"]: event["reason"] for event in view.events() if event["e"] == "failed"}
    assert reasons[empty] == "ValueError"
    assert reasons[long].startswith("ValueError: xxx")
    assert len(reasons[long]) == 500
    letters = {decode_job(letter.payload).id: letter for letter in view.dead_letters()}
    assert len(letters[long].error) == 500
    assert len(letters[long].traceback) == 2000
    assert letters[empty].error == ""


async def test_an_error_whose_text_cannot_be_read_is_an_ordinary_failure(view: WorkerView) -> None:
    class HostileError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text for you")

    class SurrogateError(Exception):
        def __str__(self) -> str:
            return "lone \ud800 surrogate"

    async def handler(job: Job[Any]) -> None:
        raise HostileError if job.payload == "hostile" else SurrogateError

    async with consuming(view.server.url, handler, max_attempts=1, concurrency=1):
        view.add("hostile")
        view.add("surrogate")
        await until(lambda: len(view.dead_letters()) == 2, "both are dead-lettered")
        await until(view.is_settled, "nothing is left")
    hostile, surrogate = view.dead_letters()
    assert hostile.error_type == "HostileError"
    assert surrogate.error == "lone ? surrogate"


async def test_room_for_a_retry_passes_on_when_its_waiter_is_cancelled() -> None:
    client = StandInClient()
    settler = Settler(client, QueueKeys(QUEUE), quick_config(retry_inflight=1, ack_batch=1))  # type: ignore[arg-type]
    delivery = Delivery(b"1-0", Job("a", "", None, 0, 0), 0)
    settler.add(Retried(delivery, 0, 0, "failed", 100))
    (written,) = client.answers
    first, second = (asyncio.create_task(settler.wait_for_room(Retried)) for _ in range(2))
    await asyncio.sleep(0)
    assert not first.done()
    assert not second.done()
    written([SettleCode.WRITTEN.encode(), b""])  # the room is given to the first waiter
    first.cancel()
    await asyncio.wait_for(second, 10)
    assert first.cancelled()
    settler.close()


# --- attempts and backoff


@pytest.mark.servers
async def test_a_job_with_zero_attempts_is_dead_lettered_without_a_run(view: WorkerView) -> None:
    runs: list[str] = []

    async def handler(job: Job[Any]) -> None:
        runs.append(job.id)

    async with consuming(view.server.url, handler):
        job_id = view.add(1, name="never", retry=JobRetryOverride(0))
        await until(view.dead_letters, "it is dead-lettered")
        await until(view.is_settled, "nothing is left")
    (letter,) = view.dead_letters()
    assert (letter.reason, letter.name, letter.attempts) == ("retries_exhausted", "never", 0)
    assert decode_job(letter.payload).attempt == 0
    assert runs == []
    assert view.event_names(job_id) == ["dlq"]
    assert view.events(job_id)[0]["attempt"] == "0"


@pytest.mark.parametrize(("own", "queue_wide", "runs_expected"), [(1, 5, 1), (4, 2, 4), (None, 2, 2)])
async def test_attempts_come_from_the_job_or_else_from_the_worker(
    view: WorkerView, own: int | None, queue_wide: int, runs_expected: int
) -> None:
    attempts: list[int] = []

    async def handler(job: Job[Any]) -> None:
        attempts.append(job.attempt)
        raise ValueError

    async with consuming(view.server.url, handler, max_attempts=queue_wide):
        view.add(retry=None if own is None else JobRetryOverride(own))
        (letter,) = await until(view.dead_letters, "it is dead-lettered")
    assert attempts == list(range(runs_expected))
    assert letter.attempts == runs_expected


async def test_runs_before_this_worker_count(view: WorkerView) -> None:
    attempts: list[int] = []

    async def handler(job: Job[Any]) -> None:
        attempts.append(job.attempt)
        raise ValueError

    async with consuming(view.server.url, handler, max_attempts=5):
        view.add(attempt=3)
        spent = view.add(attempt=5)
        await until(lambda: len(view.dead_letters()) == 2, "both are dead-lettered")
    assert attempts == [3, 4]
    assert view.event_names(spent) == ["dlq"]


@pytest.mark.parametrize(
    ("backoff", "expected"),
    [
        (None, [100, 300, 900]),
        (BackoffSpec.fixed(70, jitter_ms=0), [70, 70, 70]),
        (BackoffSpec.exponential(10, multiplier=3, jitter_ms=0), [10, 30, 90]),
        (BackoffSpec.exponential(10, multiplier=10, max_ms=150, jitter_ms=0), [10, 100, 150]),
        (BackoffSpec(BackoffKind.UNKNOWN, 10), [10, 30, 90]),
        (BackoffSpec.fixed(100_000, jitter_ms=0), [1000, 1000, 1000]),
    ],
    ids=["queue-wide", "fixed", "exponential", "capped", "unknown", "fixed-capped-by-the-worker"],
)
async def test_each_retry_waits_for_its_backoff(
    view: WorkerView, backoff: BackoffSpec | None, expected: list[int]
) -> None:
    async def handler(job: Job[Any]) -> None:
        raise ValueError

    curve = RetryConfig(initial_backoff_ms=100, multiplier=3.0, max_backoff_ms=1000, jitter_ms=0)
    async with consuming(view.server.url, handler, retry=curve, delayed_enabled=False):
        for attempt in range(3):
            view.add(attempt=attempt, retry=JobRetryOverride(10, backoff))
            await until(lambda expected=attempt + 1: len(view.delayed()) == expected, "it waits for its retry")
    scheduled = [int(event["backoff_ms"]) for event in view.events() if event["e"] == "retry-scheduled"]
    assert scheduled == expected


async def test_jitter_is_added_on_top_and_stays_below_its_bound(view: WorkerView) -> None:
    async def handler(job: Job[Any]) -> None:
        raise ValueError

    curve = RetryConfig(initial_backoff_ms=1000, max_backoff_ms=1000, jitter_ms=50)
    async with consuming(view.server.url, handler, retry=curve, delayed_enabled=False):
        view.add_many([None] * 60)
        await until(lambda: len(view.delayed()) == 60, "all wait for their retries")
    waits = [int(event["backoff_ms"]) for event in view.events() if event["e"] == "retry-scheduled"]
    assert min(waits) >= 1000
    assert max(waits) < 1050
    assert len(set(waits)) > 5


# --- outcomes that a handler chooses


class PaymentError(UnrecoverableError):
    pass


def another_packages_error() -> BaseException:
    kind = type("UnrecoverableError", (Exception,), {"__module__": "chasquimq"})
    return type("CardDeclined", (kind,), {})("declined")


@pytest.mark.parametrize(
    ("make", "error_type", "text"),
    [
        (lambda: UnrecoverableError("never"), "UnrecoverableError", "never"),
        (lambda: PaymentError("never"), "PaymentError", "never"),
        (another_packages_error, "CardDeclined", "declined"),
        (lambda: HandlerError.unrecoverable(ValueError("bad input")), "HandlerError", "bad input"),
        (lambda: HandlerError.unrecoverable("bad input"), "HandlerError", "bad input"),
        (lambda: HandlerError.new(PaymentError("never")), "HandlerError", "never"),
    ],
    ids=["itself", "subclass", "another-package", "handler-error", "handler-error-of-text", "handler-error-around-one"],
)
async def test_an_unrecoverable_error_is_a_dead_letter_at_once(
    view: WorkerView, make: Any, error_type: str, text: str
) -> None:
    runs: list[str] = []

    async def handler(job: Job[Any]) -> None:
        runs.append(job.id)
        raise make()

    async with consuming(view.server.url, handler, max_attempts=9):
        job_id = view.add(name="pay")
        (letter,) = await until(view.dead_letters, "it is dead-lettered")
        await until(view.is_settled, "nothing is left")
    assert len(runs) == 1
    assert (letter.reason, letter.name, letter.attempts) == ("unrecoverable", "pay", 1)
    assert (letter.error_type, letter.error) == (error_type, text)
    assert decode_job(letter.payload).attempt == 0
    assert view.event_names(job_id) == ["active", "failed", "dlq"]


async def test_a_recoverable_handler_error_is_retried(view: WorkerView) -> None:
    runs: list[int] = []

    async def handler(job: Job[Any]) -> None:
        runs.append(job.attempt)
        if job.attempt == 0:
            raise HandlerError.new(OSError("again"))

    async with consuming(view.server.url, handler):
        job_id = view.add()
        await until(lambda: len(runs) == 2 and view.is_settled(), "it is done")
    assert next(event for event in view.events(job_id) if event["e"] == "failed")["reason"] == "HandlerError: again"


async def test_a_returned_retry_waits_for_its_delay_and_uses_an_attempt(view: WorkerView) -> None:
    runs: list[int] = []

    async def handler(job: Job[Any]) -> Retry | None:
        runs.append(job.attempt)
        return Retry(after=0.123) if job.attempt == 0 else None

    async with consuming(view.server.url, handler):
        job_id = view.add()
        await until(lambda: len(runs) == 2 and view.is_settled(), "it is done")
    assert runs == [0, 1]
    scheduled = next(event for event in view.events(job_id) if event["e"] == "retry-scheduled")
    assert scheduled["backoff_ms"] == "123"


async def test_a_returned_retry_without_attempts_left_is_a_dead_letter(view: WorkerView) -> None:
    async def handler(job: Job[Any]) -> Retry:
        return Retry(after=0)

    async with consuming(view.server.url, handler, max_attempts=3):
        view.add()
        (letter,) = await until(view.dead_letters, "it is dead-lettered")
    assert (letter.reason, letter.attempts) == ("retries_exhausted", 3)


async def test_a_returned_retry_with_an_invalid_delay_is_a_failure(view: WorkerView) -> None:
    async def handler(job: Job[Any]) -> Retry:
        return Retry(after=-1)

    async with consuming(view.server.url, handler, max_attempts=1, concurrency=1):
        view.add()
        view.add()
        letters = await until(lambda: len(view.dead_letters()) == 2 and view.dead_letters(), "both are dead-lettered")
    assert letters[0].error_type == "ConfigError"


async def test_a_returned_cancel_is_a_dead_letter_with_its_reason(view: WorkerView) -> None:
    async def handler(job: Job[Any]) -> Cancel:
        return Cancel("customer left")

    async with consuming(view.server.url, handler):
        job_id = view.add()
        (letter,) = await until(view.dead_letters, "it is dead-lettered")
    assert (letter.reason, letter.error) == ("unrecoverable", "customer left")
    assert view.events(job_id)[-2]["reason"].endswith("customer left")


# --- events


@pytest.mark.servers
async def test_only_the_run_that_acknowledged_the_entry_emits_completed(view: WorkerView) -> None:
    """Finding 29: an entry that another worker settled meanwhile does not complete twice."""
    release = asyncio.Event()

    async def handler(job: Job[Any]) -> None:
        await release.wait()

    async with consuming(view.server.url, handler, claim_min_idle_ms=60_000):
        job_id = view.add()
        (pending,) = await until(view.pending, "it runs")
        view.client.xack(view.keys.stream, "default", pending["message_id"])
        release.set()
        other = view.add()
        await until(lambda: "completed" in view.event_names(other), "the next one is done")
    assert view.event_names(job_id) == ["active"]


@pytest.mark.servers("valkey", "redis62", "redis70", "redis86")
@pytest.mark.parametrize("former", [b"first", None], ids=["result", "no-result"])
async def test_the_result_of_a_run_that_came_second_is_not_stored(view: WorkerView, former: bytes | None) -> None:
    release = asyncio.Event()

    async def handler(job: Job[Any]) -> bytes:
        await release.wait()
        return b"second"

    settings = {"store_results": True, "result_ttl_secs": 100, "claim_min_idle_ms": 60_000}
    async with consuming(view.server.url, handler, **settings):
        taken, kept = view.add(), view.add()
        pending = await until(lambda: len(view.pending()) == 2 and view.pending(), "both run")
        await until(lambda: view.event_names(kept) == ["active"], "both have started")
        view.client.xack(view.keys.stream, "default", pending[0]["message_id"])
        view.client.xdel(view.keys.stream, pending[0]["message_id"])
        if former is not None:
            view.client.set(view.keys.result(taken), former, ex=100)
        release.set()
        await until(lambda: "completed" in view.event_names(kept), "the window is written")
    assert view.result(taken) == former
    assert view.result(kept) == b"second"
    assert former is None or 0 < view.client.ttl(view.keys.result(taken)) <= 100
    assert view.event_names(taken) == ["active"]


async def test_a_flood_of_outcomes_is_settled_in_windows_of_ack_batch(view: WorkerView) -> None:
    ids = view.add_many([None] * 500)
    async with consuming(view.server.url, noop, ack_batch=7, ack_idle_ms=0):
        await until(view.is_settled, "all are done")
    assert sorted(event["id"] for event in view.events() if event["e"] == "completed") == sorted(ids)


@pytest.mark.servers
async def test_the_largest_window_is_written_whole(view: WorkerView) -> None:
    release = asyncio.Event()

    async def handler(job: Job[Any]) -> bytes:
        await release.wait()
        if job.payload % 10 == 0:
            raise UnrecoverableError
        return b"done"

    ids = view.add_many([*range(1000)])
    settings = {"concurrency": 1000, "batch": 1000, "ack_batch": 1000, "dlq_inflight": 1000, "store_results": True}
    async with consuming(view.server.url, handler, **settings):
        await until(lambda: len([each for each in view.events() if each["e"] == "active"]) == 1000, "all run", 30)
        release.set()
        await until(view.is_settled, "all are settled", 30)
    assert len(view.dead_letters()) == 100
    assert [view.result(job_id) for job_id in ids] == [None if n % 10 == 0 else b"done" for n in range(1000)]


async def test_large_results_are_split_over_windows(view: WorkerView) -> None:
    async def handler(job: Job[Any]) -> bytes:
        return b"x" * 200_000

    ids = view.add_many([None] * 10)
    async with consuming(view.server.url, handler, store_results=True, ack_idle_ms=50):
        await until(view.is_settled, "all are done")
    assert all(len(view.result(job_id) or b"") == 200_000 for job_id in ids)


def test_every_reason_is_in_the_wire_format() -> None:
    assert {reason.value for reason in DlqReason} == {
        *("retries_exhausted", "decode_failed", "malformed", "oversize_payload", "unrecoverable", "expired")
    }


async def test_small_outcomes_do_not_wait_for_a_large_result(view: WorkerView) -> None:
    started: list[str] = []
    together = asyncio.Event()

    async def handler(job: Job[Any]) -> bytes:
        started.append(job.id)
        await together.wait()
        return b"x" * (500_000 if job.payload == "large" else 5)

    async with consuming(view.server.url, handler, concurrency=20, store_results=True, ack_idle_ms=50):
        large = [view.add("large") for _ in range(2)]
        small = [view.add("small") for _ in range(5)]
        await until(lambda: len(started) == 7, "all run")
        together.set()
        await until(view.is_settled, "all are settled")
    completed = [fields[3] for fields in view.flat(view.keys.events) if fields[1] == "completed"]
    assert sorted(completed[:5]) == sorted(small)
    assert sorted(completed[5:]) == sorted(large)
