"""Bad input raises a clear error with its code, sends nothing, and leaves the producer usable."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from support.producers import open_producer
from support.queues import QueueView
from tampu.errors import ConfigError, EncodeError, Error
from tampu.produce.options import AddOptions
from tampu.produce.producer import Producer
from tampu.wire.envelope import decode_job, encode_job
from tampu.wire.job import Job, JobId
from tampu.wire.retry import JobRetryOverride

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    from servers.process import Server

LONG_NAME = "ä" * 128 + "x"  # 257 bytes
BAD = object()
WITH_ID = AddOptions(id="x")


async def async_payloads() -> AsyncIterator[int]:
    yield 1


REFUSED: list[tuple[str, type[Error], str, Callable[[Producer[Any]], Awaitable[Any]]]] = [
    # description, error class, part of its text, call
    ("a payload without a form", EncodeError, "no faithful", lambda p: p.add(BAD)),
    ("a payload without a form, delayed", EncodeError, "no faithful", lambda p: p.add_in(5, BAD)),
    ("a payload without a form, with an id", EncodeError, "no faithful", lambda p: p.add_with_id("x", BAD)),
    ("one of a list", EncodeError, "payload 700 of this bulk", lambda p: p.add_bulk([1] * 700 + [BAD])),
    ("one of a delayed list", EncodeError, "payload 2 of this bulk", lambda p: p.add_in_bulk(5, [1, 2, BAD])),
    ("one of a named bulk", EncodeError, "no faithful", lambda p: p.add_bulk_named([("a", 1)] * 600 + [("b", BAD)])),
    ("one of a bulk with ids", EncodeError, "no faithful", lambda p: p.add_in_bulk_with_ids(5, [("a", 1), ("b", BAD)])),
    ("the first of an iterator", EncodeError, "payload 0 of this bulk", lambda p: p.add_bulk(iter([BAD]))),
    (
        "a name of 257 bytes",
        ConfigError,
        "at most 256 bytes",
        lambda p: p.add_bulk_named([(LONG_NAME, 1)]),
    ),
    ("a long name in a bulk", ConfigError, "at most 256", lambda p: p.add_bulk_named([("a", 1), (LONG_NAME, 1)])),
    ("a name that is not text", ConfigError, "name must be a str", lambda p: p.add_bulk_named([(7, 1)])),  # type: ignore[list-item]
    ("a name with NUL", ConfigError, "without NUL", lambda p: p.add_bulk_named([("a\x00", 1)])),
    ("an empty id", ConfigError, "id must be text that is not blank", lambda p: p.add_with_id("", 1)),
    ("a blank id", ConfigError, "not blank", lambda p: p.add_with_id(" \t", 1)),
    ("an id with NUL", ConfigError, "without NUL", lambda p: p.add_with_id("a\x00b", 1)),
    ("an id UTF-8 cannot carry", ConfigError, "surrogates", lambda p: p.add_with_id("\ud800", 1)),
    ("an id that is not text", ConfigError, "id must be a str", lambda p: p.add_with_id(7, 1)),  # type: ignore[arg-type]
    (
        "an id for many",
        ConfigError,
        "one ID cannot be used for 2",
        lambda p: p.add_bulk_with_options([1, 2], AddOptions(id="x")),
    ),
    (
        "an id for an iterator",
        ConfigError,
        "one ID cannot be used for",
        lambda p: p.add_bulk_with_options(iter("ab"), WITH_ID),
    ),
    (
        "an id for an async one",
        ConfigError,
        "cannot have an ID",
        lambda p: p.add_bulk_with_options(async_payloads(), WITH_ID),
    ),
    ("a negative delay", ConfigError, "delay must be", lambda p: p.add_in(-1, 1)),
    ("a negative timedelta", ConfigError, "delay must be", lambda p: p.add_in(timedelta(days=-1), 1)),
    ("a delay that is not a number", ConfigError, "delay must be", lambda p: p.add_in(float("nan"), 1)),
    ("an endless delay", ConfigError, "delay must be", lambda p: p.add_in(float("inf"), 1)),
    ("a delay of text", ConfigError, "delay must be", lambda p: p.add_in("5", 1)),  # type: ignore[arg-type]
    ("a delay of True", ConfigError, "delay must be", lambda p: p.add_in(True, 1)),
    ("too long a delay", ConfigError, "max_delay_secs", lambda p: p.add_in(timedelta(days=31), 1)),
    ("too long for a bulk", ConfigError, "max_delay_secs", lambda p: p.add_in_bulk(10**9, [1])),
    ("too long with ids", ConfigError, "max_delay_secs", lambda p: p.add_in_bulk_with_ids(10**9, [("a", 1)])),
    ("too far in the future", ConfigError, "max_delay_secs", lambda p: p.add_at(datetime(2100, 1, 1), 1)),
    ("a time that is not a number", ConfigError, "run_at must be", lambda p: p.add_at(float("nan"), 1)),
    ("a time given as text", ConfigError, "run_at must be", lambda p: p.add_at("now", 1)),  # type: ignore[arg-type]
    ("a str for a bulk", ConfigError, "payloads must be an iterable", lambda p: p.add_bulk("abc")),
    ("bytes for a bulk", ConfigError, "payloads must be an iterable", lambda p: p.add_bulk(b"abc")),
    ("a dict for a bulk", ConfigError, "payloads must be an iterable", lambda p: p.add_bulk({"a": 1})),
    ("a number for a bulk", ConfigError, "payloads must be an iterable", lambda p: p.add_bulk(5)),  # type: ignore[arg-type]
    ("a str with an id", ConfigError, "payloads must be", lambda p: p.add_bulk_with_options("a", AddOptions(id="x"))),
    ("a str for a delayed bulk", ConfigError, "payloads must be an iterable", lambda p: p.add_in_bulk(5, "abc")),
    ("no pairs", ConfigError, r"pairs of \(name, payload\)", lambda p: p.add_bulk_named(["ab"])),  # type: ignore[list-item]
    ("a dict for pairs", ConfigError, "items must be an iterable", lambda p: p.add_bulk_named({"a": 1})),  # type: ignore[arg-type]
    ("triples", ConfigError, r"pairs of \(id, payload\)", lambda p: p.add_in_bulk_with_ids(5, [("a", 1, 2)])),  # type: ignore[list-item]
    ("an id of a pair", ConfigError, "id must be", lambda p: p.add_in_bulk_with_ids(5, [("a", 1), ("", 2)])),
    ("options of another type", ConfigError, "opts must be", lambda p: p.add_with_options(1, {"name": "x"})),  # type: ignore[arg-type]
    ("options of a bulk", ConfigError, "opts must be", lambda p: p.add_bulk_with_options([1], None)),  # type: ignore[arg-type]
    ("options of a delayed add", ConfigError, "opts must be", lambda p: p.add_in_with_options(5, 1, "x")),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("error", "said", "call"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
async def test_bad_input_is_refused_and_nothing_is_sent(
    server: Server, error: type[Error], said: str, call: Callable[[Producer[Any]], Awaitable[Any]]
) -> None:
    async with open_producer(server.url) as producer:
        with pytest.raises(error, match=said) as caught:
            await call(producer)
        assert caught.value.code == {EncodeError: "CMQ-002", ConfigError: "CMQ-004"}[error]
        assert list(caught.value.accepted) == []
        assert server.client().dbsize() == 0
        job_id = await producer.add("works")
        assert QueueView(server, "q").ids() == [job_id]


def test_options_are_checked_in_their_constructor() -> None:
    with pytest.raises(ConfigError, match="retry must be a JobRetryOverride"):
        AddOptions(retry=3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="max_attempts"):
        JobRetryOverride(max_attempts=-1)
    with pytest.raises(ConfigError, match="id must be"):
        AddOptions().with_id("")
    with pytest.raises(ConfigError, match=r"at most 256 bytes of UTF-8 \(it has 257\)"):
        AddOptions(name=LONG_NAME)
    assert AddOptions(name="ä" * 128).name == "ä" * 128


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_bad_payload_of_an_iterator_names_the_jobs_added_before(server: Server, is_async: bool) -> None:
    def payloads() -> Iterator[Any]:
        yield from range(1000)
        yield BAD
        yield from range(1001, 100_000)

    async def slowly() -> AsyncIterator[Any]:
        for payload in payloads():
            yield payload

    async with open_producer(server.url) as producer:
        with pytest.raises(EncodeError, match="payload 1000 of this bulk") as caught:
            await producer.add_bulk(slowly() if is_async else payloads())
        view = QueueView(server, "q")
        accepted = list(caught.value.accepted)
        assert accepted == view.ids()
        assert len(accepted) == 768  # whole windows
        assert view.payloads() == list(range(768))
        job_id = await producer.add("works")
        assert view.ids() == [*accepted, job_id]


async def test_a_bad_single_add_fails_only_its_own_caller(server: Server) -> None:
    async with open_producer(server.url) as producer:
        outcomes = await asyncio.gather(
            producer.add(1), producer.add(BAD), producer.add_with_id("", 1), producer.add(2), return_exceptions=True
        )
        assert [type(outcome).__name__ for outcome in outcomes] == ["JobId", "EncodeError", "ConfigError", "JobId"]
        assert QueueView(server, "q").payloads() == [1, 2]


@pytest.mark.parametrize(
    "url", ["redis://h:port", "http://h", "redis+sentinel://h", "redis://h?x=1", "embedded:///tmp/x?ssl_certfile=y"]
)
async def test_a_bad_url_is_refused_before_anything_else(url: str) -> None:
    with pytest.raises(ConfigError, match="url") as caught:
        Producer.connect(url)
    assert caught.value.code == "CMQ-004"


def test_the_id_of_another_job_is_accepted_as_an_id() -> None:
    assert decode_job(encode_job(Job(JobId("x"), "", 1))).id == "x"
