"""Outcomes that a server refuses or writes slowly: they delay no other job, and nothing is lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from consume.views import WorkerView
from consume.workers import QUEUE, consuming, reading_link
from support.proxy import Proxy
from support.waiting import until
from tampu import ResultNotStored
from tampu.wire.payload import decode_result

if TYPE_CHECKING:
    from collections.abc import Callable

    from servers.process import Server
    from tampu.wire.job import Job

MIB = 1024 * 1024


async def sized(job: Job[Any]) -> bytes:
    """Return as many bytes as the payload says."""
    return b"x" * job.payload


async def test_a_result_that_the_server_refuses_delays_no_other_job(view: WorkerView) -> None:
    view.server.config_set(proto_max_bulk_len=MIB)
    too_large = view.add(3 * MIB)
    others = view.add_many([10] * 50)
    async with consuming(view.server.url, sized, store_results=True, ack_batch=20):
        await until(lambda: all(map(view.result, others)), "the others are done", within_secs=30)
        await until(view.is_settled, "all are settled", within_secs=30)
    assert not view.dead_letters()
    with pytest.raises(ResultNotStored, match="the server refused its 3,145,728 bytes"):
        decode_result(view.result(too_large) or b"")


async def test_a_large_result_over_a_slow_link_is_written_once(view: WorkerView) -> None:
    """It takes longer than the response timeout, but its bytes are being sent."""
    runs: list[str] = []

    async def handler(job: Job[Any]) -> bytes:
        runs.append(job.id)
        return b"x" * job.payload

    async with Proxy(view.server.address) as proxy:
        proxy.request_bytes_per_sec = 2 * MIB
        async with consuming(f"{proxy.url}?response_timeout=1", handler, store_results=True):
            await reading_link(proxy)
            await until(lambda: any(b"XREAD" in link.commands for link in proxy.links), "it listens for wake-ups")
            before = len(proxy.links)
            large = view.add(8 * MIB)
            await until(lambda: view.result(large), "its result is stored", within_secs=30)
            await until(view.is_settled, "and it is acknowledged")
            assert len(proxy.links) == before, "no connection was given up"
    assert runs == [large]


@pytest.mark.parametrize("events", [True, False], ids=["events", "no-events"])
@pytest.mark.parametrize(("first", "second"), [("redis86", "redis62"), ("redis62", "redis86")])
async def test_another_server_at_the_address_is_probed_again(
    fresh_server: Callable[..., Server], first: str, second: str, events: bool
) -> None:
    """A server without XACKDEL replaces one with it: each failure is dead-lettered once."""
    server, other = fresh_server(first), fresh_server(second)
    other.stop()
    other.port = server.port

    async def handler(job: Job[Any]) -> None:
        if job.payload == "fail":
            raise ValueError("on purpose")

    view = WorkerView(server, QUEUE)
    async with consuming(server.url, handler, max_attempts=1, events_enabled=events) as worker:
        view.add("well")
        await until(view.is_settled, "the first server works")
        await until(lambda: worker.is_connected, "it waits for more")
        server.stop()
        other.start()
        view = WorkerView(other, QUEUE)
        view.add("fail")
        view.add("well")
        await until(lambda: view.dead_letters() and view.is_settled(), "the second works too", within_secs=30)
    assert len(view.dead_letters()) == 1
