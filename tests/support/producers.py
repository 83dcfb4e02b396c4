"""Producers for tests: closed afterwards, with small windows or a short timeout, and access to what they sent."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from support.resp import parse_request
from tampu.config import ProducerConfig
from tampu.errors import DecodeError
from tampu.produce.chain import Chain
from tampu.produce.producer import Producer
from tampu.redis.settings import parse_url
from tampu.wire.envelope import decode_job

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import pytest

QUEUE = "q"


@contextlib.asynccontextmanager
async def open_producer(
    url: str, *, settings: dict[str, Any] | None = None, credential_provider: Any = None, **config: Any
) -> AsyncIterator[Producer[Any]]:
    """Open a producer: `async with open_producer(server.url, max_stream_len=10) as producer:`.

    `settings` are those of the connection, `config` those of the producer.
    """
    connection = replace(parse_url(url, credential_provider=credential_provider), **(settings or {}))
    producer: Producer[Any] = Producer(connection, ProducerConfig(**({"queue_name": QUEUE} | config)))
    try:
        yield await producer.open()
    finally:
        await producer.close()


def unopened_producer(url: str, **config: Any) -> Producer[Any]:
    """Return a producer that connects on first use; the test must close it."""
    return Producer(parse_url(url), ProducerConfig(**({"queue_name": QUEUE} | config)))


def use_small_windows(monkeypatch: pytest.MonkeyPatch, jobs: int) -> None:
    """Limit windows to `jobs` jobs, so that a few jobs make many windows."""
    monkeypatch.setattr("tampu.produce.adder.MAX_CALL_ENTRIES", jobs)
    monkeypatch.setattr("tampu.produce.window.MAX_CALL_ENTRIES", jobs)


def use_patience(monkeypatch: pytest.MonkeyPatch, secs: float) -> None:
    """Make new producers give up after `secs`; `retry_for_secs` only takes whole seconds."""

    def make(*args: Any, **options: Any) -> Chain:
        return Chain(*args, **options | {"patience_secs": secs})

    monkeypatch.setattr("tampu.produce.producer.Chain", make)


def chain_of(producer: Producer[Any]) -> Chain:
    """Return the producer's chain, for its counters `windows_sent_again` and `windows_lost_by_server`."""
    return producer._chain


def ids_in(call: bytes) -> list[str]:
    """Return the IDs of the jobs in an encoded window, in order; empty for any other command."""
    ids = []
    for part in parse_request(call):
        with contextlib.suppress(DecodeError):
            ids.append(decode_job(part).id)
    return ids
