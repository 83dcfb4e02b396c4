"""The producer under uvloop, whose transports behave differently: the same guarantees."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from support.producers import QUEUE, open_producer, use_small_windows
from support.proxy import Proxy
from support.queues import QueueView
from tampu.config import ProducerConfig
from tampu.produce.producer import Producer
from tampu.redis import client as client_module
from tampu.redis.settings import parse_url

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from servers.process import Server

uvloop = pytest.importorskip("uvloop")


def test_a_bulk_through_a_connection_that_keeps_breaking(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "LAST_BACKOFF_SECS", 0.001)
    use_small_windows(monkeypatch, 20)
    chance = random.Random(7)

    async def main() -> list[str]:
        async with Proxy(server.address) as proxy, open_producer(proxy.url, retry_for_secs=60) as producer:
            greeting, greeted = proxy.link.request_bytes, proxy.link.reply_bytes
            for _ in range(40):
                proxy.next_budgets.append((greeting + chance.randrange(5_000), None))
                proxy.next_budgets.append((None, greeted + chance.randrange(100)))
            proxy.cut()
            ids = await producer.add_bulk(iter(range(5000)))
            assert not proxy.next_budgets
            return ids

    ids = uvloop.run(main())
    view = QueueView(server, "q")
    assert view.ids() == ids
    assert view.payloads() == list(range(5000))


@pytest.mark.filterwarnings(
    "ignore::ResourceWarning"
)  # uvloop warns about what it closes, and hangs if the warning is an error
def test_one_loop_after_another(server: Server) -> None:
    producer: Producer[Any] = Producer(parse_url(server.url), ProducerConfig(queue_name=QUEUE))
    ids: list[str] = []

    async def use() -> None:
        ids.extend(await producer.add_bulk(range(600)))

    for _ in range(3):
        uvloop.run(use())
    assert len(QueueView(server, "q").connections()) <= 1
    uvloop.run(producer.close())
    assert QueueView(server, "q").ids() == ids


def test_tls_and_a_unix_socket(fresh_server: Callable[..., Server], tmp_path: Path) -> None:
    server = fresh_server("redis86", tls=True, unixsocket=tmp_path / "s")

    async def main() -> None:
        async with open_producer(server.url) as over_tls, open_producer(f"unix://{tmp_path}/s") as over_a_socket:
            one = await over_tls.add_with_id("x", 1)
            other = await over_a_socket.add_with_id("x", 2)
            assert (one.is_new, other.is_new) == (True, False)

    uvloop.run(main())
