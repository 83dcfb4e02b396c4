"""Producers for tests: closed in the end, with small windows and a view into what they meet."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tampu.engine.config import ProducerConfig
from tampu.engine.producer import Producer
from tampu.redis.settings import parse_url

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import pytest

QUEUE = "q"


@contextlib.asynccontextmanager
async def open_producer(
    url: str, *, settings: dict[str, Any] | None = None, credential_provider: Any = None, **config: Any
) -> AsyncIterator[Producer[Any]]:
    """`async with open_producer(server.url, max_stream_len=10) as producer:`; `settings`: the connection's."""
    connection = replace(parse_url(url, credential_provider=credential_provider), **(settings or {}))
    producer: Producer[Any] = Producer(connection, ProducerConfig(**({"queue_name": QUEUE} | config)))
    try:
        yield await producer.open()
    finally:
        await producer.close()


def use_small_windows(monkeypatch: pytest.MonkeyPatch, jobs: int) -> None:
    """Windows of so many jobs, so that a few jobs make many."""
    monkeypatch.setattr("tampu.engine.adder.MAX_JOBS", jobs)
    monkeypatch.setattr("tampu.engine.window.MAX_JOBS", jobs)


def errors_met(producer: Producer[Any], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds of errors that the producer's windows meet from now on, in order."""
    met: list[str] = []
    chain = producer._chain
    on_error = chain._on_error

    def note(window: Any, error: Any) -> None:
        met.append(getattr(error, "kind", type(error).__name__))
        on_error(window, error)

    monkeypatch.setattr(chain, "_on_error", note)
    return met
