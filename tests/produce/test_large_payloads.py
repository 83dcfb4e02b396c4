"""Payloads that workers would dead-letter for their size are refused by the add, before anything is sent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from support.producers import open_producer
from support.queues import QueueView
from tampu import (
    AddOptions,
    ConfigError,
    ConsumerConfig,
    ProducerConfig,
    Queue,
    RepeatableSpec,
    RepeatPattern,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from servers.process import Server
    from tampu import Producer

LARGE = b"x" * 2_000_000

WAYS: dict[str, Callable[[Producer[Any]], Any]] = {
    "add": lambda producer: producer.add(LARGE),
    "with an id": lambda producer: producer.add_with_id("mine", LARGE),
    "with options": lambda producer: producer.add_with_options(LARGE, AddOptions(name="large")),
    "delayed": lambda producer: producer.add_in(60, LARGE),
    "at a time": lambda producer: producer.add_at(0, LARGE),
    "bulk": lambda producer: producer.add_bulk([*range(300), LARGE]),
    "named bulk": lambda producer: producer.add_bulk_named([("small", 1), ("large", LARGE)]),
    "delayed bulk": lambda producer: producer.add_in_bulk(60, [1, LARGE]),
    "delayed bulk with ids": lambda producer: producer.add_in_bulk_with_ids(60, [("a", 1), ("b", LARGE)]),
    "repeatable": lambda producer: producer.upsert_repeatable(
        RepeatableSpec("large", RepeatPattern.every(60_000), LARGE)
    ),
}


@pytest.mark.parametrize("way", WAYS)
async def test_a_payload_over_the_limit_is_refused_before_anything_is_sent(server: Server, way: str) -> None:
    async with open_producer(server.url) as producer:
        with pytest.raises(ConfigError, match=r"2,000,0\d\d bytes, over max_payload_bytes \(1,048,576\)") as caught:
            await WAYS[way](producer)
        assert "in the workers" in str(caught.value)
        assert server.client().keys() == []


async def test_the_error_names_the_position_of_a_payload_over_the_limit(server: Server) -> None:
    async with open_producer(server.url) as producer:
        with pytest.raises(ConfigError, match="payload 1 of this bulk"):
            await producer.add_bulk_named([("small", 1), ("large", LARGE)])
        with pytest.raises(ConfigError, match="payload 300 of this bulk") as caught:
            await producer.add_bulk(iter([*range(300), LARGE]))
        assert list(caught.value.accepted) == QueueView(server, "q").ids()
        assert len(caught.value.accepted) == 256


async def test_tasks_with_large_arguments_are_refused(server: Server) -> None:
    async with Queue("q", url=server.url) as queue:

        @queue.task
        async def store(data: bytes) -> None: ...

        for add in (
            store.add(LARGE),
            store.add_in(60, LARGE),
            store.add_bulk([(b"small",), (LARGE,)]),
            queue.add("s", LARGE),
        ):
            with pytest.raises(ConfigError, match="over max_payload_bytes"):
                await add
        assert QueueView(server, "q").length() == 0


@pytest.mark.parametrize("payload_format", ["bin", "inline"])
async def test_the_limit_applies_to_the_envelope_as_in_workers(server: Server, payload_format: Any) -> None:
    view = QueueView(server, "q")
    async with open_producer(server.url, payload_format=payload_format) as producer:
        await producer.add("x" * 700)
        [size] = [len(fields[b"d"]) for _, fields in view.client.xrange(view.keys.stream)]
    exact = {"payload_format": payload_format, "max_payload_bytes": size}
    async with open_producer(server.url, **exact) as producer:
        await producer.add("x" * 700)
        await producer.add_bulk(["x" * 700])
        await producer.add_bulk_named([("", "x" * 700)])
        with pytest.raises(ConfigError):
            await producer.add("x" * 701)
        with pytest.raises(ConfigError):
            await producer.add_bulk(["x" * 701])
        with pytest.raises(ConfigError):
            await producer.add_bulk_named([("", "x" * 701)])
    assert view.length() == 4


async def test_the_limit_can_be_raised_or_removed(server: Server) -> None:
    for limit in (3_000_000, 0):
        async with open_producer(server.url, max_payload_bytes=limit) as producer:
            await producer.add(LARGE)
            await producer.add_bulk([LARGE])
    assert QueueView(server, "q").length() == 4


def test_producers_and_workers_have_the_same_default_limit() -> None:
    assert ProducerConfig().max_payload_bytes == ConsumerConfig().max_payload_bytes
