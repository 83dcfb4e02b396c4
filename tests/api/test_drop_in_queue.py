"""`Queue` is compatible with chasquimq 1.3.0: arguments, errors, return values, and the data on the server."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from servers.process import eventually
from support.queues import QueueView
from tampu import (
    BackoffKind,
    BackoffSpec,
    ConfigError,
    EncodeError,
    Job,
    MissedFiresPolicy,
    Queue,
    QueueFullError,
    RedisError,
    RepeatableMeta,
    RepeatPattern,
)

if TYPE_CHECKING:
    from servers.process import Server


@pytest.fixture
def view(server: Server) -> QueueView:
    return QueueView(server, "q")


# --- invalid input: nothing is sent

REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"delay_ms": True}, TypeError, "delay_ms"),
    ({"delay_ms": "5"}, TypeError, "delay_ms"),
    ({"delay_ms": -1}, ValueError, "finite non-negative"),
    ({"delay_ms": float("nan")}, ValueError, "finite non-negative"),
    ({"delay_ms": float("inf")}, ValueError, "finite non-negative"),
    ({"delay": 5}, TypeError, "delay must be a timedelta"),
    ({"delay": timedelta(seconds=-1)}, ValueError, "non-negative"),
    ({"delay_ms": 5, "delay": timedelta(seconds=5)}, ValueError, "not both"),
    ({"delay_ms": datetime(2120, 1, 1)}, RuntimeError, "max_delay_secs"),
    ({"delay_ms": 10**12}, RuntimeError, "max_delay_secs"),
    ({"attempts": -1}, ValueError, "max_attempts"),
    ({"attempts": "3"}, ValueError, "max_attempts"),
    ({"attempts": 1.5}, ValueError, "max_attempts"),
    ({"attempts": 2**40}, ValueError, "max_attempts"),
    ({"backoff": True}, TypeError, "backoff"),
    ({"backoff": "x"}, TypeError, "backoff"),
    ({"backoff": 1.5}, TypeError, "backoff"),
    ({"backoff": -5}, ValueError, "backoff.delay_ms"),
    ({"backoff": {"kind": "linear", "delay_ms": 1}}, ValueError, "backoff.kind"),
    ({"backoff": {"delay_ms": 1}}, ValueError, "kind"),
    ({"backoff": {"kind": "fixed"}}, ValueError, "delay_ms"),
    ({"backoff": {"kind": "fixed", "delay_ms": "x"}}, ValueError, "delay_ms"),
    ({"job_id": ""}, ValueError, "job_id"),
    ({"job_id": "  "}, ValueError, "job_id"),
    ({"job_id": 5}, ValueError, "job_id"),
    ({"missed_fires": MissedFiresPolicy.skip()}, ValueError, "needs repeat"),
    ({"repeat": {"kind": "nope"}}, ValueError, "kind"),
    ({"repeat": "x"}, TypeError, "repeat"),
    ({"repeat": RepeatPattern.every(5), "missed_fires": {"kind": "xx"}}, ValueError, "missed_fires.kind"),
    ({"repeat": RepeatPattern.every(5), "missed_fires": "x"}, TypeError, "missed_fires"),
]


@pytest.mark.parametrize(("options", "error", "says"), REFUSED, ids=lambda part: str(part)[:40])
async def test_a_bad_option_is_refused_and_nothing_is_sent(
    queue: Queue, view: QueueView, options: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        await queue.add("n", {"a": 1}, **options)
    with pytest.raises(error, match=says):
        await queue.add_bulk([{"name": "n", "data": 1}, {"name": "n", "data": {"a": 1}, **options}])
    if "max_delay_secs" not in says:  # which is checked when each job is sent
        assert view.all_keys() == {}


@pytest.mark.parametrize(
    ("data", "error"),
    [({1, 2}, TypeError), (2**70, EncodeError), (datetime(2026, 1, 1), TypeError), ("\ud800", ValueError)],
)
async def test_data_that_messagepack_cannot_encode_is_refused(
    queue: Queue, view: QueueView, data: Any, error: type[Exception]
) -> None:
    with pytest.raises(error):
        await queue.add("n", data)
    with pytest.raises(error):
        await queue.add_bulk([{"name": "n", "data": 1}, {"name": "n", "data": data}])
    with pytest.raises(error):
        await queue.add_bulk([{"name": "n", "data": 1, "delay_ms": 5000}, {"name": "n", "data": data}])
    assert view.all_keys() == {}


@pytest.mark.parametrize(("name", "error"), [(5, ValueError), ("n" * 257, RuntimeError)])
async def test_a_bad_name_is_refused(queue: Queue, name: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="name"):
        await queue.add(name, {})


# --- add


async def test_add_returns_the_job(queue: Queue, view: QueueView) -> None:
    job = await queue.add("mail", {"to": "ada"})
    assert isinstance(job, Job)
    assert (job.name, job.data, job.attempt, job.attempts_made) == ("mail", {"to": "ada"}, 0, 0)
    assert abs(job.created_at_ms - view.now_ms()) < 60_000
    [sent] = view.jobs()
    assert (sent.id, sent.name, sent.payload, sent.attempt, sent.retry) == (job.id, "mail", {"to": "ada"}, 0, None)


async def test_a_job_without_a_name_has_none_on_the_wire(queue: Queue, view: QueueView) -> None:
    await queue.add("", 1)
    assert [fields[::2] for _, fields in view.entries()] == [[b"d"]]


@pytest.mark.parametrize(
    ("options", "after_ms"),
    [
        ({"delay_ms": 5000}, 5000),
        ({"delay_ms": 5000.9}, 5000),
        ({"delay_ms": timedelta(seconds=5)}, 5000),
        ({"delay": timedelta(seconds=5, microseconds=900)}, 5000),
        ({"delay": timedelta(minutes=1)}, 60_000),
    ],
)
async def test_a_delay_is_whole_milliseconds_by_the_servers_clock(
    queue: Queue, view: QueueView, options: dict[str, Any], after_ms: int
) -> None:
    before = view.now_ms()
    job = await queue.add("n", 1, **options)
    [(_, due)] = view.delayed()
    assert before + after_ms <= due <= view.now_ms() + after_ms
    assert view.delayed_ids() == [job.id]


async def test_a_datetime_is_an_instant_and_naive_means_utc(queue: Queue, view: QueueView) -> None:
    instant = datetime.now(UTC).replace(microsecond=0) + timedelta(hours=1)
    await queue.add("n", 1, delay_ms=instant)
    await queue.add("n", 2, delay_ms=instant.replace(tzinfo=None))
    assert [due for _, due in view.delayed()] == [int(instant.timestamp() * 1000)] * 2


@pytest.mark.parametrize("options", [{"delay_ms": 0}, {"delay_ms": 0.5}, {"delay": timedelta(0)}, {"delay_ms": None}])
async def test_no_delay_means_now(queue: Queue, view: QueueView, options: dict[str, Any]) -> None:
    await queue.add("n", 1, **options)
    assert view.length() == 1


async def test_an_instant_in_the_past_means_now_or_at_once(queue: Queue, view: QueueView) -> None:
    await queue.add("n", 1, delay_ms=datetime(2020, 1, 1))
    assert view.length() == 1 or view.delayed()[0][1] <= view.now_ms()


@pytest.mark.parametrize(
    ("backoff", "written"),
    [
        (250, BackoffSpec(BackoffKind.FIXED, 250)),
        (BackoffSpec.exponential(100, max_ms=900), BackoffSpec(BackoffKind.EXPONENTIAL, 100, 900, 2.0)),
        ({"kind": "fixed", "delay_ms": 7, "jitter_ms": 3}, BackoffSpec(BackoffKind.FIXED, 7, jitter_ms=3)),
    ],
)
async def test_attempts_and_backoff_are_stored_with_the_job(
    queue: Queue, view: QueueView, backoff: Any, written: BackoffSpec
) -> None:
    await queue.add("n", 1, attempts=7, backoff=backoff)
    await queue.add("n", 1, backoff=backoff)
    await queue.add("n", 1, attempts=7)
    overrides = [(job.retry.max_attempts, job.retry.backoff) for job in view.jobs() if job.retry is not None]
    assert overrides == [(7, written), (None, written), (7, None)]


# --- ids


async def test_an_id_is_added_once_by_any_producer(queue: Queue, server: Server, view: QueueView) -> None:
    first = await queue.add_unique("n", 1, job_id="order-7")
    again = await queue.add("n", 2, job_id="order-7")
    async with Queue("q", url=server.url) as other:
        third = await other.add_unique("n", 3, job_id="order-7", delay_ms=5000)
    assert [job.id for job in (first, again, third)] == ["order-7"] * 3
    assert [job.id.is_new for job in (first, again, third)] == [True, False, False]  # type: ignore[attr-defined]
    assert view.payloads() == [1]
    assert view.delayed() == []


@pytest.mark.parametrize("bad", [None, "", " ", 5])
async def test_add_unique_needs_an_id(queue: Queue, bad: Any) -> None:
    with pytest.raises(ValueError, match="job_id"):
        await queue.add_unique("n", 1, job_id=bad)
    with pytest.raises(TypeError):
        await queue.add_unique("n", 1)  # type: ignore[call-arg]


# --- bulks


async def test_a_bulk_of_plain_jobs_keeps_its_order(queue: Queue, view: QueueView) -> None:
    jobs = await queue.add_bulk([{"name": "a", "data": 1}, {"name": "", "data": 2}, {"name": None, "data": 3}])
    assert [(job.name, job.data) for job in jobs] == [("a", 1), ("", 2), ("", 3)]
    assert view.ids() == [job.id for job in jobs]
    assert [job.name for job in view.jobs()] == ["a", "", ""]
    assert await queue.add_bulk([]) == []


async def test_jobs_of_a_bulk_can_have_their_own_options(queue: Queue, view: QueueView) -> None:
    jobs = await queue.add_bulk(
        [
            {"name": "a", "data": 1, "attempts": 9},
            {"name": "b", "data": 2, "delay_ms": 60_000},
            {"name": "c", "data": 3, "job_id": "c-1", "backoff": 5},
            {"name": "d", "data": 4, "delay": timedelta(minutes=2)},
            {"name": "e", "data": 5, "repeat": RepeatPattern.every(60_000)},
            {"name": "f", "data": 6},
        ]
    )
    assert [job.data for job in jobs] == [1, 2, 3, 4, 5, 6]
    assert [(job.name, job.retry and job.retry.max_attempts) for job in view.jobs()] == [
        ("a", 9),
        ("c", None),
        ("f", None),
    ]
    assert view.delayed_ids() == [jobs[1].id, jobs[3].id]
    assert jobs[2].id == "c-1"
    assert jobs[4].id == "e::every:60000"


async def test_a_bulk_can_be_a_generator(queue: Queue, view: QueueView) -> None:
    """chasquimq exhausts a generator while it checks it, and adds nothing."""
    jobs = await queue.add_bulk({"name": "a", "data": number} for number in range(3))
    assert view.ids() == [job.id for job in jobs]
    assert len(jobs) == 3


async def test_an_unknown_option_is_refused_in_a_bulk(queue: Queue, view: QueueView) -> None:
    """A misspelt delay must not be ignored."""
    with pytest.raises(ConfigError, match="unknown key 'dealy_ms'"):
        await queue.add_bulk([{"name": "a", "data": 1}, {"name": "a", "data": 1, "dealy_ms": 5}])
    with pytest.raises(KeyError, match="data"):
        await queue.add_bulk([{"name": "a"}])
    assert view.all_keys() == {}


async def test_a_bulk_that_does_not_fit_names_the_jobs_that_were_added(server: Server, view: QueueView) -> None:
    async with Queue("q", url=server.url, max_stream_len=2) as queue:
        with pytest.raises(QueueFullError) as caught:
            await queue.add_bulk([{"name": "a", "data": number, "attempts": 2} for number in range(4)])
        assert [*caught.value.accepted] == view.ids()
        assert view.length() == 2


# --- cancelling, dead letters, results


async def test_a_delayed_job_can_be_cancelled_once(queue: Queue, view: QueueView) -> None:
    job = await queue.add("n", 1, delay_ms=60_000)
    assert await queue.cancel_delayed(job.id) is True
    assert await queue.cancel_delayed(job.id) is False
    assert await queue.cancel_delayed("nobody") is False
    assert view.delayed() == []


async def test_dead_letters_are_dicts(queue: Queue, server: Server) -> None:
    client = server.client()
    for number in range(30):
        client.xadd(queue.keys.dlq, {"d": b"bytes", "n": "mail", "source_id": f"{number}-0", "reason": "malformed"})
    letters = await queue.peek_dlq()
    assert len(letters) == 20
    assert {"dlq_id", "source_id", "reason", "detail", "payload", "name"} <= letters[0].keys()
    assert letters[0]["payload"] == b"bytes"
    assert [letter["source_id"] for letter in letters[:2]] == ["0-0", "1-0"]
    assert letters[0]["detail"] is None
    assert [letter["source_id"] for letter in await queue.peek_dlq(2)] == ["0-0", "1-0"]
    assert await queue.peek_dlq(0) == []


async def test_results_are_read_one_by_one_and_in_bulk(queue: Queue, server: Server) -> None:
    client = server.client()
    client.set(queue.keys.result("a"), b"\x81\xa1x\x01")
    client.set(queue.keys.result("b"), b"\xc0")
    assert await queue.get_job_result("a") == {"x": 1}
    assert await queue.get_job_result("nobody") is None
    assert await queue.get_job_result_bulk(["b", "a", "nobody"]) == [None, {"x": 1}, None]
    assert await queue.get_job_result_bulk([]) == []


# --- schedules


async def test_schedules_are_created_listed_and_removed(queue: Queue) -> None:
    by_add = await queue.add("tick", 1, repeat=RepeatPattern.every(60_000), attempts=3, backoff=5, job_id="ignored")
    assert isinstance(by_add, Job)
    assert by_add.id == "tick::every:60000"
    by_dict = await queue.add("tock", 1, repeat={"kind": "cron", "expression": "0 9 * * *", "tz": "America/Lima"})
    assert by_dict.id == "tock::cron:0 9 * * *:America/Lima"
    job = await queue.upsert_repeatable_job(
        "once",
        {"x": 1},
        repeat=RepeatPattern.every(30_000),
        limit=2,
        start_after_ms=1,
        end_before_ms=2**52,
        missed_fires=MissedFiresPolicy.fire_all(5),
    )
    found = await queue.get_repeatable_jobs()
    assert all(isinstance(meta, RepeatableMeta) for meta in found)
    assert [meta.next_fire_ms for meta in found] == sorted(meta.next_fire_ms for meta in found)
    once = next(meta for meta in found if meta.key == job.id)
    assert (once.job_name, once.pattern, once.limit) == ("once", RepeatPattern.every(30_000), 2)
    assert (once.start_after_ms, once.end_before_ms, once.missed_fires) == (1, 2**52, MissedFiresPolicy.fire_all(5))
    assert len(await queue.get_repeatable_jobs(1)) == 1
    assert await queue.remove_repeatable_by_key(job.id) is True
    assert await queue.remove_repeatable_by_key(job.id) is False


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: RepeatPattern.every(0), ValueError),
        (lambda: RepeatPattern.cron("nope"), RuntimeError),
        (lambda: RepeatPattern.cron("0 9 * * *", tz="Mars/Base"), RuntimeError),
        (lambda: MissedFiresPolicy.fire_all(0), ValueError),
        (lambda: MissedFiresPolicy.fire_all("x"), TypeError),  # type: ignore[arg-type]
        (lambda: MissedFiresPolicy.fire_all(True), TypeError),
        (lambda: MissedFiresPolicy.fire_all(2**40), ValueError),
        (lambda: BackoffSpec.fixed(-1), ValueError),
    ],
)
def test_invalid_patterns_are_refused_when_they_are_created(make: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        make()


# --- opening and closing


def test_a_closed_queue_opens_again_when_it_is_used(server: Server, view: QueueView) -> None:
    queue = Queue("q", url=server.url)
    assert (queue.name, queue.is_closed) == ("q", False)

    async def serve() -> None:  # as a web application whose tests start it more than once, each time in a new loop
        async with queue as entered:
            assert entered is queue
            await queue.add("n", 1)
            with pytest.raises(TimeoutError):
                await queue.wait_for_result("other", timeout_secs=0.01)
            seen.append(queue.is_closed)
        await queue.close()
        seen.append(queue.is_closed)

    seen: list[bool] = []
    asyncio.run(serve())
    asyncio.run(serve())
    assert seen == [False, True, False, True]
    assert view.length() == 2
    eventually(lambda: view.connections() == [], "no connection is left")


@pytest.mark.slow
async def test_a_missing_server_is_a_runtime_error_with_its_address() -> None:
    async with Queue("q", redis_url="redis://127.0.0.1:1", retry_for_secs=1) as queue:
        with pytest.raises(RedisError, match=r"127\.0\.0\.1:1") as caught:
            await queue.add("n", 1)
        assert isinstance(caught.value, RuntimeError)


def test_tls_changes_the_url_or_is_refused() -> None:
    assert Queue("q", redis_url="redis://h:1/0", tls=True).url == "rediss://h:1/0"
    assert Queue("q", redis_url="REDIS://h", tls=True).url == "rediss://h"
    assert Queue("q", redis_url="rediss://h", tls=True).url == "rediss://h"
    assert Queue("q", url="valkey://h", tls=True).url == "valkeys://h"
    assert Queue("q", url="redis+cluster://h", tls=True).url == "rediss+cluster://h"
    for url in ("unix:///s.sock", "embedded://"):
        with pytest.raises(ConfigError, match="tls=True"):
            Queue("q", url=url, tls=True)


def test_the_url_comes_from_the_arguments_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAMPU_URL", "redis://from-environment")
    assert Queue("q").url == "redis://from-environment"
    assert Queue("q", redis_url="redis://given").url == "redis://given"
    with pytest.raises(ConfigError, match="url and redis_url are aliases"):
        Queue("q", url="redis://a", redis_url="redis://b")


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"max_stream_len": -1}, ValueError, "max_stream_len must be"),
        ({"max_delay_secs": -1}, ValueError, "max_delay_secs must be"),
        ({"bogus": 1}, TypeError, r"Queue\(\) got an unexpected setting 'bogus'; ProducerConfig lists the valid ones"),
        ({"redis_url": "nonsense"}, RuntimeError, "url scheme must be"),
        ({"queue_name": "x"}, TypeError, "unexpected setting 'queue_name'"),
    ],
)
def test_invalid_settings_of_a_queue_are_refused(options: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        Queue("q", **options)


@pytest.mark.parametrize("name", [5, "", " ", "a{b"])
def test_an_invalid_queue_name_is_refused(name: Any) -> None:
    with pytest.raises(ConfigError, match="queue_name"):
        Queue(name)


async def test_settings_of_the_producer_are_accepted(server: Server) -> None:
    async with Queue("q", url=server.url, max_delay_secs=1, dedup_ttl_secs=5) as queue:
        with pytest.raises(RuntimeError, match="max_delay_secs"):
            await queue.add("n", 1, delay_ms=5000)
        await queue.add("n", 1, job_id="x")
        assert 0 < server.client().ttl(queue.keys.dedup_marker("x")) <= 5
