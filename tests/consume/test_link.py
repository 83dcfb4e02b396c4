"""What a worker does with renewals and looks that a stall of the server, or of the process, has delayed."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from support.queues import QueueView
from tampu.config import ConsumerConfig
from tampu.consume import link as link_module
from tampu.consume.leases import Leases
from tampu.consume.link import ServerLink
from tampu.consume.pool import Pool
from tampu.consume.takeover import LATE_MS
from tampu.redis.calls import CONSUMER_SCRIPTS
from tampu.redis.client import Client
from tampu.redis.settings import parse_url
from tampu.wire.keys import QueueKeys

if TYPE_CHECKING:
    from servers.process import Server

KEYS = QueueKeys("q")


class Held(dict[bytes, Any]):
    """Entries in flight, and until when leases were known to be valid when some of them were found to be lost."""

    def __init__(self, *ids: bytes) -> None:
        super().__init__(dict.fromkeys(ids))
        self.leases: Leases | None = None
        self.valid_until_ns_when_lost: list[int] = []

    def lost(self, ids: list[bytes]) -> None:
        assert ids == [b"1-0"]
        assert self.leases is not None
        self.valid_until_ns_when_lost.append(self.leases.valid_until_ns)


async def test_a_renewal_lets_entries_start_only_after_lost_ones_are_marked(server: Server) -> None:
    QueueView(server, "q").client.xgroup_create(KEYS.stream, "default", mkstream=True)
    client = Client(parse_url(server.url), KEYS.tag.encode(), CONSUMER_SCRIPTS)
    held = Held(b"1-0")
    leases = held.leases = Leases(client, KEYS, ConsumerConfig(queue_name="q"), held)  # type: ignore[arg-type]
    try:
        lost, began_ns = await leases.renew(client)
        assert leases.valid_until_ns == 0
        leases.update(lost, began_ns)
    finally:
        await client.close()
    assert held.valid_until_ns_when_lost == [0]
    assert leases.valid_until_ns > began_ns


@pytest.mark.parametrize("is_late", [False, True])
async def test_a_look_that_a_stall_delayed_starts_no_takeover(
    server: Server, monkeypatch: pytest.MonkeyPatch, is_late: bool
) -> None:
    pool = Pool(1)
    link = ServerLink(parse_url(server.url), KEYS.tag, ConsumerConfig(queue_name="q"), pool)
    clock = 100.0
    monkeypatch.setattr(link_module, "time", SimpleNamespace(monotonic=lambda: clock))
    monkeypatch.setattr(link, "_pause", lambda secs: asyncio.sleep(0))
    started: list[float] = []

    async def call_each(commands: list[Any]) -> list[Any]:
        nonlocal clock
        clock += (LATE_MS + 1) / 1000 if is_late else 0.01
        return [[b"an expired lease"] for _ in commands]

    monkeypatch.setattr(link.client, "call_each", call_each)
    takeover = SimpleNamespace(can_poll=True, poll=("PING",), start=lambda: started.append(time.monotonic()))
    link.queues.append(SimpleNamespace(takeover=takeover))  # type: ignore[arg-type]
    await link._take_over()
    await pool.end()
    assert len(started) == (not is_late)
