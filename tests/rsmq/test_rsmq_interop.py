"""tampu and the real `rsmq` from npm on the same queues, in both directions."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pytest
from rsmq_peer import JsError, JsRsmq

from support.waiting import until
from tampu.rsmq import Rsmq, RsmqError, RsmqOptions

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from servers.process import Server

#: The JavaScript client does not support Cluster.
pytestmark = pytest.mark.servers("valkey", "redis62", "redis70", "redis86")


@pytest.fixture
async def js(server: Server) -> AsyncIterator[JsRsmq]:
    async with JsRsmq(server.port, realtime=True) as js:
        yield js


@pytest.fixture
async def ours(server: Server) -> AsyncIterator[Rsmq]:
    async with Rsmq(RsmqOptions(url=server.url, realtime=True)) as rsmq:
        yield rsmq


def as_js(message: Any) -> dict[str, Any]:
    return {"id": message.id, "message": message.message, "rc": message.rc, "fr": message.fr, "sent": message.sent}


def attributes_as_js(attributes: Any) -> dict[str, Any]:
    fields = asdict(attributes)
    # Fields that may differ if a new second starts between the two reads.
    return {name: fields[name] for name in fields if name not in ("visiblemsgs", "looks_like_milliseconds")}


async def both_read(js: JsRsmq, ours: Rsmq, qname: str) -> dict[str, Any]:
    """Return the attributes as both clients read them."""
    while True:
        first = attributes_as_js(await ours.get_queue_attributes(qname))
        theirs = await js.call("getQueueAttributes", qname=qname)
        if first == attributes_as_js(await ours.get_queue_attributes(qname)):
            assert theirs == first
            return first


async def test_we_use_a_queue_that_javascript_made(js: JsRsmq, ours: Rsmq) -> None:
    assert await js.call("createQueue", qname="theirs", vt=20, delay=0, maxsize=2048) == 1
    assert await ours.list_queues() == ["theirs"]
    attributes = await both_read(js, ours, "theirs")
    assert (attributes["vt"], attributes["delay"], attributes["maxsize"]) == (20, 0, 2048)

    sent = await js.call("sendMessage", qname="theirs", message="hé 世 🎉")
    received = await ours.receive_message("theirs")
    assert received is not None
    assert (received.id, received.message, received.rc) == (sent, "hé 世 🎉", 1)
    assert await js.call("receiveMessage", qname="theirs") == {}
    assert await ours.change_message_visibility("theirs", sent, 0)
    again = await js.call("receiveMessage", qname="theirs", vt=0)
    assert again == {**as_js(received), "rc": 2}
    assert (await both_read(js, ours, "theirs"))["totalrecv"] == 2
    assert await ours.delete_message("theirs", sent) is True
    assert await js.call("deleteMessage", qname="theirs", id=sent) == 0

    sent = await js.call("sendMessage", qname="theirs", message="pop me", delay=0)
    popped = await ours.pop_message("theirs")
    assert popped is not None
    assert (popped.id, popped.message, popped.rc) == (sent, "pop me", 1)
    changed = await ours.set_queue_attributes("theirs", vt=7, maxsize=-1, delay=2)
    assert await js.call("getQueueAttributes", qname="theirs") == attributes_as_js(changed)
    assert await ours.delete_queue("theirs")
    with pytest.raises(JsError, match="Queue not found"):
        await js.call("popMessage", qname="theirs")


async def test_javascript_uses_a_queue_that_we_made(js: JsRsmq, ours: Rsmq) -> None:
    assert await ours.create_queue("ours", vt=20, maxsize=2048)
    assert await js.call("listQueues") == ["ours"]
    await both_read(js, ours, "ours")

    sent = await ours.send_message("ours", "hé 世 🎉")
    received = await js.call("receiveMessage", qname="ours")
    assert (received["id"], received["message"], received["rc"]) == (sent, "hé 世 🎉", 1)
    assert await ours.receive_message("ours") is None
    assert await js.call("changeMessageVisibility", qname="ours", id=sent, vt=0) == 1
    again = await ours.receive_message("ours", vt=0)
    assert again is not None
    assert as_js(again) == {**received, "rc": 2}
    assert (await both_read(js, ours, "ours"))["totalrecv"] == 2
    assert await js.call("deleteMessage", qname="ours", id=sent) == 1
    assert await ours.delete_message("ours", sent) is False

    ids = await ours.send_messages("ours", [f"m{number}" for number in range(20)])
    popped = [await js.call("popMessage", qname="ours") for _ in range(20)]
    assert [message["id"] for message in popped] == ids
    assert [message["message"] for message in popped] == [f"m{number}" for number in range(20)]
    changed = await js.call("setQueueAttributes", qname="ours", vt=7, maxsize=-1, delay=2)
    assert attributes_as_js(await ours.get_queue_attributes("ours")) == changed
    assert await js.call("deleteQueue", qname="ours") == 1
    assert await ours.list_queues() == []


async def test_messages_of_both_come_in_the_order_they_were_sent(js: JsRsmq, ours: Rsmq) -> None:
    await ours.create_queue("q")
    sent: list[str] = []
    for _ in range(10):
        sent.append(await ours.send_message("q", "ours"))
        sent.append(await js.call("sendMessage", qname="q", message="theirs"))
        sent += await ours.send_messages("q", ["ours", "ours"])
    assert [message.id for message in await ours.receive_messages("q", max=100, vt=0)] == sent
    assert [(await js.call("popMessage", qname="q"))["id"] for _ in range(40)] == sent


@pytest.mark.slow
async def test_both_wait_out_the_delays_and_the_vt_of_the_other(js: JsRsmq, ours: Rsmq, server: Server) -> None:
    await ours.create_queue("q", delay=1)
    client = server.client()

    async def due(message_id: str) -> int:
        return int(client.zscore("rsmq:q", message_id)) - int(message_id[:10], 36) // 1000

    assert await due(await ours.send_message("q", "a")) == 1000
    assert await due(await js.call("sendMessage", qname="q", message="b")) == 1000
    assert await due(await ours.send_message("q", "c", delay=3)) == 3000
    assert await due(await js.call("sendMessage", qname="q", message="d", delay=3)) == 3000
    first = await until(lambda: js.call("receiveMessage", qname="q", vt=1), "ours is due for them")
    second = await until(lambda: ours.receive_message("q", vt=60), "theirs is due for us")
    assert (first["message"], second.message) == ("a", "b")
    again = await until(lambda: ours.receive_message("q", vt=60), "it comes again when their vt has passed")
    assert as_js(again) == {**first, "rc": 2}


#: Calls that fail, in tampu's and in JavaScript's form.
MISTAKES: list[tuple[str, str, dict[str, Any]]] = [
    ("create_queue", "createQueue", {"qname": "there"}),
    ("create_queue", "createQueue", {"qname": "a b"}),
    ("create_queue", "createQueue", {"qname": "q", "vt": -1}),
    ("create_queue", "createQueue", {"qname": "q", "maxsize": 5}),
    ("delete_queue", "deleteQueue", {"qname": "nope"}),
    ("get_queue_attributes", "getQueueAttributes", {"qname": "nope"}),
    ("set_queue_attributes", "setQueueAttributes", {"qname": "there"}),
    ("set_queue_attributes", "setQueueAttributes", {"qname": "nope", "vt": 5}),
    ("send_message", "sendMessage", {"qname": "nope", "message": "x"}),
    ("send_message", "sendMessage", {"qname": "there", "message": 5}),
    ("send_message", "sendMessage", {"qname": "there", "message": "x" * 65537}),
    ("send_message", "sendMessage", {"qname": "there", "message": "x", "delay": "soon"}),
    ("receive_message", "receiveMessage", {"qname": "nope"}),
    ("receive_message", "receiveMessage", {"qname": "there", "vt": 10_000_000}),
    ("pop_message", "popMessage", {"qname": "nope"}),
    ("pop_message", "popMessage", {"qname": ""}),
    ("delete_message", "deleteMessage", {"qname": "there", "id": "short"}),
    ("change_message_visibility", "changeMessageVisibility", {"qname": "nope", "id": "a" * 32, "vt": 1}),
    ("change_message_visibility", "changeMessageVisibility", {"qname": "there", "id": "a" * 32, "vt": None}),
]


async def test_errors_have_the_same_names_and_texts(js: JsRsmq, ours: Rsmq) -> None:
    await ours.create_queue("there")
    for method, js_method, arguments in MISTAKES:
        with pytest.raises(RsmqError) as error:
            await getattr(ours, method)(**arguments)
        with pytest.raises(JsError) as theirs:
            await js.call(js_method, **arguments)
        assert (error.value.name, str(error.value)) == (theirs.value.name, str(theirs.value)), method


async def test_realtime_both_ways(js: JsRsmq, ours: Rsmq, server: Server) -> None:
    await ours.create_queue("q")
    await js.subscribe("rsmq:rt:q")
    await ours.send_message("q", "a")
    await ours.send_messages("q", ["b", "c"])
    await until(lambda: len(js.heard) == 3, "they hear us")
    assert js.heard == [("rsmq:rt:q", "1"), ("rsmq:rt:q", "2"), ("rsmq:rt:q", "3")]

    heard: list[str] = []

    async def listen() -> None:
        async for message in ours.listen("q", poll_secs=3600):
            heard.append(message.message)
            await ours.delete_message("q", message.id)

    listening = asyncio.create_task(listen())
    await until(lambda: len(heard) == 3, "we receive what was there")
    await until(lambda: server.client().pubsub_numsub("rsmq:rt:q")[0][1] == 2, "we listen")
    await js.call("sendMessage", qname="q", message="d")
    await until(lambda: heard == ["a", "b", "c", "d"], "we hear them")
    listening.cancel()
    await asyncio.gather(listening, return_exceptions=True)


async def test_finding_40_javascripts_queue_named_queues_does_not_break_tampu(js: JsRsmq, ours: Rsmq) -> None:
    await ours.create_queue("q")
    await js.call("createQueue", qname="QUEUES")
    assert await ours.list_queues() == ["QUEUES", "q"]
    await ours.send_message("q", "x")
    assert (await js.call("popMessage", qname="q"))["message"] == "x"
