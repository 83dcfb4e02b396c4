"""The connection is cut at every byte of a window and of its reply: each job is added once.

A proxy on the same event loop cuts. Windows are small, so that a few bytes are a few windows.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from support.producers import chain_of, open_producer, use_small_windows
from support.proxy import Proxy
from support.queues import QueueView
from tampu.produce import chain as chain_module
from tampu.produce.options import AddOptions
from tampu.redis import client as client_module

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from servers.cluster import Cluster
    from servers.process import Server
    from tampu.produce.producer import Producer

IN_FLIGHT = 4


async def cut_everywhere(
    server: Server,
    add_four_windows: Callable[[Producer[Any]], Awaitable[list[str]]],
    *,
    first: int = 0,
    count: int = 4,
) -> list[str]:
    """Add four windows or more for each place to cut at. Return all confirmed ids in order.

    The places are all bytes of `count` windows, starting with number `first`, and all bytes of all replies.
    """
    async with Proxy(server.address) as proxy, open_producer(proxy.url) as producer:
        confirmed = list(await add_four_windows(producer))
        windows, replies = len(proxy.link.calls), proxy.link.reply_bytes
        confirmed += await add_four_windows(producer)
        replies = proxy.link.reply_bytes - replies
        sizes = [len(call) for call in proxy.link.calls[windows:]]
        start, end = sum(sizes[:first]), sum(sizes[: first + count])
        requests = end - start
        for offset in range(start, end + 1):
            proxy.cut_requests_after(offset)
            confirmed += await add_four_windows(producer)
        for offset in range(replies + 1):
            proxy.cut_replies_after(offset)
            confirmed += await add_four_windows(producer)
        assert proxy.most_unanswered == IN_FLIGHT
        assert len(proxy.links) >= requests + replies
        assert chain_of(producer).windows_lost_by_server == 0
        return confirmed


async def test_a_bulk_cut_at_every_byte_of_four_windows_in_flight(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_small_windows(monkeypatch, 2)
    confirmed = await cut_everywhere(server, lambda producer: producer.add_bulk(range(8)))
    assert len(confirmed) > 8 * 1100
    assert QueueView(server, "q").ids() == confirmed


async def test_every_kind_of_job_cut_at_every_byte_of_a_window(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_windows(monkeypatch, 4)
    number = 0

    async def add_four_windows(producer: Producer[Any]) -> list[str]:
        nonlocal number
        number += 1
        named = AddOptions(name="mail")
        adds = [
            producer.add(number),
            producer.add_with_id(f"now {number}", number),
            producer.add_in(1000, number),
            producer.add_in_with_options(1000, number, named.with_id(f"later {number}")),
            *(producer.add(number) for _ in range(13)),
        ]
        ids = await asyncio.gather(*adds)
        assert all(job_id.is_new for job_id in ids)  # a job that was sent again is not a duplicate
        return ids

    # The first job is sent alone; the next three and one more form a window with every kind.
    confirmed = await cut_everywhere(server, add_four_windows, first=1, count=1)
    view = QueueView(server, "q")
    delayed = [job_id for rank, job_id in enumerate(confirmed) if rank % 17 in (2, 3)]
    assert view.ids() == [job_id for rank, job_id in enumerate(confirmed) if rank % 17 not in (2, 3)]
    assert sorted(view.delayed_ids()) == sorted(delayed)
    assert len(set(confirmed)) == len(confirmed)


@pytest.mark.servers
@pytest.mark.parametrize("seed", [1, 2])
async def test_ten_thousand_jobs_through_a_connection_that_keeps_breaking(
    server: Server | Cluster, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(client_module, "LAST_BACKOFF_SECS", 0.001)
    use_small_windows(monkeypatch, 50)
    chance = random.Random(seed)
    view = QueueView(server, "q")
    async with Proxy(view.node.address) as proxy, open_producer(proxy.url, retry_for_secs=60) as producer:
        greeting, greeted = proxy.link.request_bytes, proxy.link.reply_bytes
        for _ in range(80):
            if chance.random() < 0.5:
                proxy.next_budgets.append((greeting + chance.randrange(15_000), None))
            else:
                proxy.next_budgets.append((None, greeted + chance.randrange(30)))
        proxy.cut()
        ids = await producer.add_bulk({"number": number, "text": "x" * 50} for number in range(10_000))
        assert not proxy.next_budgets  # all cuts were made
        assert proxy.most_unanswered == IN_FLIGHT
        assert chain_of(producer).windows_sent_again >= 80
    assert len(ids) == len(set(ids)) == 10_000
    assert view.ids() == ids
    assert [payload["number"] for payload in view.payloads()] == list(range(10_000))


async def test_single_adds_through_a_connection_that_keeps_breaking(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "LAST_BACKOFF_SECS", 0.001)
    chance = random.Random(3)
    async with Proxy(server.address) as proxy, open_producer(proxy.url) as producer:

        async def user(number: int) -> list[str]:
            ids = []
            for step in range(40):
                ids.append(await producer.add([number, step]))
                if chance.random() < 0.1:
                    proxy.cut_requests_after(chance.randrange(400))
                elif chance.random() < 0.1:
                    proxy.cut_replies_after(chance.randrange(10))
            return ids

        by_user = await asyncio.gather(*(user(number) for number in range(25)))
    jobs = QueueView(server, "q").jobs()
    assert Counter(job.id for job in jobs) == Counter(job_id for ids in by_user for job_id in ids)
    for number, ids in enumerate(by_user):  # each user's jobs in the order they were confirmed
        assert [job.id for job in jobs if job.payload[0] == number] == ids


async def test_the_script_remembers_more_replies_than_windows_in_flight() -> None:
    assert chain_module.MAX_IN_FLIGHT <= 8  # `r0` to `r7` of the chain's hash
