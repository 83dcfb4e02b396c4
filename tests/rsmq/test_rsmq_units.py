"""Queues with other units: Rust's milliseconds in the hash, and scores in microseconds (break-js-comp)."""

from __future__ import annotations

import logging
import math
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from rsmq_vectors import server_ms

from support.waiting import until
from tampu.rsmq import InvalidValue, Rsmq, RsmqOptions
from tampu.rsmq.options import looks_like_milliseconds

if TYPE_CHECKING:
    from servers.cluster import Cluster
    from servers.process import Server


def rust_16_creates(server: Server | Cluster, ns: str, qname: str, vt_ms: int, delay_ms: int = 0) -> None:
    """Create a queue as rsmq_async 16 does: with milliseconds, and with counters from the start."""
    client = server.client()
    now = server_ms(client) // 1000
    fields = {"vt": vt_ms, "delay": delay_ms, "maxsize": 65536, "created": now, "modified": now}
    client.hset(f"{ns}:{qname}:Q", mapping={**fields, "totalrecv": 0, "totalsent": 0})
    client.sadd(f"{ns}:QUEUES", qname)


@pytest.mark.parametrize("value", [1000, 30_000, 86_400_000, 10_000_000, 18_000])
def test_values_that_look_like_milliseconds(value: int) -> None:
    assert looks_like_milliseconds(value)
    assert looks_like_milliseconds(30, value)


@pytest.mark.parametrize("value", [0, 30, 999, 1001, 3600, 86_400, 604_800, 9_999_999])
def test_values_that_look_like_seconds(value: int) -> None:
    assert not looks_like_milliseconds(value)


@pytest.mark.servers
async def test_finding_41_a_queue_of_rust_16_is_read_with_a_warning(
    rsmq: Rsmq, server: Server | Cluster, ns: str, caplog: pytest.LogCaptureFixture
) -> None:
    rust_16_creates(server, ns, "rusty", 30_000)
    assert await rsmq.list_queues() == ["rusty"]
    attributes = await rsmq.get_queue_attributes("rusty")
    assert attributes.looks_like_milliseconds
    assert (attributes.vt, attributes.totalrecv, attributes.totalsent) == (30_000, 0, 0)
    message_id = await rsmq.send_message("rusty", "x")
    for _ in range(3):
        assert await rsmq.receive_message("rusty") is not None
        await rsmq.change_message_visibility("rusty", message_id, 0)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1  # once, not for each message
    assert "rusty has vt = 30000" in warnings[0]
    assert "duration_unit='ms'" in warnings[0]


async def test_finding_41_a_delay_in_milliseconds_is_logged_too(
    rsmq: Rsmq, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    rust_16_creates(server, "rsmq", "rusty", 30, 5000)
    await rsmq.send_message("rusty", "x", delay=1)
    assert not caplog.records
    await rsmq.send_message("rusty", "x")
    assert "delay = 5000" in caplog.text


@pytest.mark.parametrize("item", ["vt", "delay"])
async def test_a_stored_value_out_of_range_is_rejected_as_in_javascript(rsmq: Rsmq, server: Server, item: str) -> None:
    rust_16_creates(server, "rsmq", "rusty", 30, 0)
    server.client().hset("rsmq:rusty:Q", item, 86_400_000)
    call = rsmq.receive_message if item == "vt" else rsmq.send_message
    arguments = [] if item == "vt" else ["x"]
    with pytest.raises(InvalidValue) as refused:
        await call("rusty", *arguments)  # type: ignore[operator]
    assert str(refused.value) == f"{item} must be between 0 and 9999999"
    assert "duration_unit='ms'" in refused.value.__notes__[0]
    assert not server.client().exists("rsmq:rusty")


@pytest.mark.servers
async def test_with_duration_unit_ms_a_queue_of_rust_16_means_what_rust_means(
    server: Server | Cluster, ns: str, caplog: pytest.LogCaptureFixture
) -> None:
    rust_16_creates(server, ns, "rusty", 30_000, 1500)
    client = server.client()
    async with Rsmq(RsmqOptions(url=server.url, ns=ns, duration_unit="ms")) as rsmq:
        attributes = await rsmq.get_queue_attributes("rusty")
        assert (attributes.vt, attributes.delay, attributes.looks_like_milliseconds) == (30, 1.5, False)
        message_id = await rsmq.send_message("rusty", "x")
        sent_ms = int(message_id[:10], 36) // 1000
        assert client.zscore(f"{ns}:rusty", message_id) == sent_ms + 1500
        await rsmq.change_message_visibility("rusty", message_id, 0)
        received = await rsmq.receive_message("rusty")
        assert received is not None
        assert client.zscore(f"{ns}:rusty", message_id) == received.fr + 30_000
        await rsmq.set_queue_attributes("rusty", vt=timedelta(milliseconds=2500))
        assert client.hget(f"{ns}:rusty:Q", "vt") == b"2500"
        await rsmq.create_queue("ours", vt=7)
        assert client.hget(f"{ns}:ours:Q", "vt") == b"7000"
    assert not caplog.records


@pytest.mark.servers
async def test_with_precision_us_scores_are_microseconds(server: Server | Cluster, ns: str) -> None:
    """Rust's feature break-js-comp: scores, and the time of the first receive; ids are the same."""
    client = server.client()
    async with Rsmq(RsmqOptions(url=server.url, ns=ns, precision="us")) as rsmq:
        await rsmq.create_queue("q", vt=30)
        assert client.hget(f"{ns}:q:Q", "vt") == b"30000"  # as Rust writes it
        message_id = await rsmq.send_message("q", "x")
        sent_us = int(message_id[:10], 36)
        assert client.zscore(f"{ns}:q", message_id) == sent_us
        received = await rsmq.receive_message("q")
        assert received is not None
        assert sent_us <= received.fr < sent_us + 60_000_000
        assert client.zscore(f"{ns}:q", message_id) == received.fr + 30_000_000
        delayed = await rsmq.send_message("q", "later", delay=5)
        assert client.zscore(f"{ns}:q", delayed) == int(delayed[:10], 36) + 5_000_000
        attributes = await rsmq.get_queue_attributes("q")
        assert (attributes.vt, attributes.msgs, attributes.hiddenmsgs, attributes.visiblemsgs) == (30, 2, 2, 0)
        await rsmq.change_message_visibility("q", message_id, 0)
        attributes = await rsmq.get_queue_attributes("q")
        assert (attributes.hiddenmsgs, attributes.visiblemsgs) == (1, 1)
        popped = await rsmq.pop_message("q")
        assert popped is not None
        assert (popped.id, popped.rc, popped.fr) == (message_id, 2, received.fr)


async def test_with_precision_us_a_short_vt_passes(server: Server) -> None:
    async with Rsmq(RsmqOptions(url=server.url, precision="us", duration_unit="ms")) as rsmq:
        await rsmq.create_queue("q", vt=0.05)
        message_id = await rsmq.send_message("q", "x")
        assert await rsmq.receive_message("q") is not None
        again = await until(lambda: rsmq.receive_message("q"), "it comes again after 50 ms")
        assert (again.id, again.rc) == (message_id, 2)


async def test_the_default_duration_unit_depends_on_the_precision() -> None:
    assert RsmqOptions().unit == "s"
    assert RsmqOptions(precision="us").unit == "ms"
    assert RsmqOptions(precision="us", duration_unit="s").unit == "s"


async def test_corrupt_attributes_are_still_returned(rsmq: Rsmq, server: Server) -> None:
    await rsmq.create_queue("q")
    server.client().hset("rsmq:q:Q", mapping={"vt": "soon", "totalsent": "many"})
    attributes = await rsmq.get_queue_attributes("q")
    assert math.isnan(attributes.vt)
    assert attributes.totalsent == 0
