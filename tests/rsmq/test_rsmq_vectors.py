"""Replays every recording of the JavaScript client and compares replies, keys and notifications, on every server.

`EXCEPTIONS` lists the recordings that tampu does not follow, each with its reason; a test shows what happens instead.
"""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pytest
from rsmq_vectors import VECTORS, Replay, Vector, load, server_ms

from support.waiting import until
from tampu.rsmq import InvalidFormat, MessageTooLong, Rsmq, RsmqError, RsmqOptions
from tampu.rsmq.message import sent_ms

if TYPE_CHECKING:
    from servers.cluster import Cluster
    from servers.process import Server

JS = {vector.name: vector for file in ("rsmq_js.json", "rsmq_js_2.json") for vector in load(file)}

#: Recordings that tampu does not follow.
EXCEPTIONS = {
    "delete_QUEUES": "the name QUEUES is rejected, because deleting it destroys the index of all queues",
    "name_QUEUES_bug": "the name QUEUES is rejected, from creation to deletion",
    "phantom_pop": "a member without a body is not a message; it is removed, not returned with message null",
}
#: A recording that needs `size_unit="utf16"`; by default sizes are counted in bytes.
UTF16_ONLY = "send_len_is_utf16"
#: Recordings without a request to the server, because the queue name is not valid.
WITHOUT_OPERATION = "name_suffix_Q"

HELLO = "ho6yag5ayfEZw86ckNWMCLZXxAhVMyiA"
NOBODY = "a" * 32
ONE = "ho6ybm1nlq68Djuyy8T5X1c4iTTt9xva"
DELAYED = "ho6ybm81uacXUAPHeT2G47BltgqNiPek"
#: Stands for the id that the previous call returned.
LAST = object()

#: The calls of each recording, by its name. The rest is in `input`.
CALLS: dict[str, list[tuple[Any, ...]]] = {
    "list_empty": [("list_queues",)],
    "create_strings": [("create_queue", "q4", "7", "1abc", "1024")],
    "list": [("list_queues",)],
    "attrs_missing": [("get_queue_attributes", "nope")],
    "set_none": [("set_queue_attributes", "q1")],
    "set_vt": [("set_queue_attributes", "q1", 15)],
    "set_bad": [("set_queue_attributes", "q1", None, 5)],
    "set_missing": [("set_queue_attributes", "nope", 5)],
    "set_back": [("set_queue_attributes", "q1", 30, 65536, 0)],
    "send_unicode": [("send_message", "q1", "hé 世 🎉")],
    "send_empty": [("send_message", "q1", "")],
    "send_delay": [("send_message", "q1", "later", 5)],
    "send_max": [("send_message", "q1", "x" * 65536), ("delete_message", "q1", LAST)],
    "send_toolong": [("send_message", "q1", "x" * 65537)],
    "send_len_is_utf16": [
        ("create_queue", "u16", 30, 0, 1024),
        ("send_message", "u16", "€" * 1024),
        ("delete_queue", "u16"),
    ],
    "send_delay_bad": [("send_message", "q1", "x", -1)],
    "send_unlimited": [("send_message", "q3", "z" * 100_000), ("delete_message", "q3", LAST)],
    "attrs_after_send": [("get_queue_attributes", "q1")],
    "attrs_after_recv": [("get_queue_attributes", "q1")],
    "cmv": [("change_message_visibility", "q1", HELLO, 0)],
    "receive_again": [("receive_message", "q1", 60)],
    "cmv_missing": [("change_message_visibility", "q1", NOBODY, 10)],
    "cmv_badid": [("change_message_visibility", "q1", "short", 10)],
    "cmv_novt": [("change_message_visibility", "q1", NOBODY, None)],
    "delete_again": [("delete_message", "q1", HELLO)],
    "delete_badid": [("delete_message", "q1", "bad")],
    "delete_noq": [("delete_message", "nope", NOBODY)],
    "pop2": [("pop_message", "q1")],
    "pop_empty": [("pop_message", "q1")],
    "receive_empty": [("receive_message", "q1")],
    "realtime_send": [("send_message", "q2", "rt")],
    "order": [("send_message", "q3", f"m{number}") for number in range(10)],
    "order_pop": [("pop_message", "q3")] * 10,
    "binary_body": [("pop_message", "q3")],
    "rust_vt_ms": [("send_message", "q3", "m"), ("receive_message", "q3")],
    "delete_queue": [("delete_queue", "q2")],
    "delete_queue_again": [("delete_queue", "q2")],
    "list_three": [("list_queues",)],
    "send": [("send_message", "a", "m")],
    "receive1": [("receive_message", "a", 0)],
    "receive2": [("receive_message", "a")],
    "delete": [("delete_message", "a", ONE)],
    "send_delayed": [("send_message", "a", "d", 3)],
    "receive_delayed": [("receive_message", "a")],
    "cmv_delayed": [("change_message_visibility", "a", DELAYED, 0)],
    "pop_it": [("pop_message", "a")],
    "delete_queue_with_msgs": [("send_message", "b-2", "x"), ("delete_queue", "b-2")],
}

#: Recordings that changed nothing: their state before is their state after, since other operations came in between.
CHANGED_NOTHING = {
    *(name for name, vector in JS.items() if vector.error),
    *("list", "list_three", "attrs_after_send", "attrs_after_recv"),
    *("cmv_missing", "delete_again", "delete_noq", "pop2", "pop_empty", "receive_empty", "receive_delayed"),
}


def calls_of(vector: Vector) -> list[tuple[Any, ...]]:
    if vector.name in CALLS:
        return CALLS[vector.name]
    assert vector.input is not None
    assert vector.name.startswith("create_")
    given = vector.input
    return [("create_queue", given["qname"], given.get("vt"), given.get("delay"), given.get("maxsize"))]


def before(vector: Vector) -> dict[str, Any]:
    """Return the state before an operation: the state after its predecessor, plus changes in between."""
    if vector.name in CHANGED_NOTHING:
        return vector.after
    state = json.loads(json.dumps(vector.before))
    match vector.name:
        case "create_v_name_rt":  # the queue QUEUES was made before it
            state = json.loads(json.dumps(vector.after))
            del state["rsmq:rt:Q"]
            state["rsmq:QUEUES"]["set"].remove("rt")
        case "send_unicode":  # another message was sent before it
            state["rsmq:q1"] = {"zset": {HELLO: vector.after["rsmq:q1"]["zset"][HELLO]}}
            state["rsmq:q1:Q"]["hash"] |= {HELLO: b"Hello World".hex(), "totalsent": b"1".hex()}
        case "binary_body":  # another client stored the bytes
            state["rsmq:q3"] = {"zset": {"0" * 32: vector.at_ms}}
            state["rsmq:q3:Q"]["hash"]["0" * 32] = "fffe00"
        case "rust_vt_ms":
            state["rsmq:q3:Q"]["hash"]["vt"] = b"30000".hex()
    return state


def as_js(reply: Any) -> Any:
    """Convert a reply to the form that JavaScript returns."""
    if reply is None:
        return {}
    if hasattr(reply, "rc"):
        return {"id": reply.id, "message": reply.message, "rc": reply.rc, "fr": reply.fr, "sent": reply.sent}
    if hasattr(reply, "hiddenmsgs"):
        fields = asdict(reply)
        return {name: fields[name] for name in fields if name not in ("visiblemsgs", "looks_like_milliseconds")}
    return reply


def check_reply(vector: Vector, reply: Any, replay: Replay, ended_ms: int) -> None:
    expected = vector.returned
    if isinstance(expected, dict) and "fr" in expected:
        fr, sent = reply.pop("fr"), reply.pop("sent")
        if expected["fr"] == replay.at_ms:  # it was received for the first time
            assert replay.now_ms <= fr <= ended_ms
        else:
            assert fr == expected["fr"] + replay.shift_ms
        assert math.isclose(sent, expected["sent"], abs_tol=0.0005)
        expected = {name: expected[name] for name in expected if name not in ("fr", "sent")}
    elif isinstance(expected, dict) and "created" in expected:
        created, modified = reply.pop("created"), reply.pop("modified")
        assert created == expected["created"] + replay.shift_ms // 1000
        assert modified - created == pytest.approx(expected["modified"] - expected["created"], abs=1)
        expected = {name: expected[name] for name in expected if name not in ("created", "modified")}
    elif isinstance(expected, str):  # a new id
        assert len(reply) == 32
        assert replay.now_ms <= sent_ms(reply) <= ended_ms + 1
        return
    elif isinstance(expected, list):
        expected = sorted(expected)
    assert reply == expected


def test_no_recording_is_forgotten() -> None:
    tested = {name for name in JS if name in CALLS or name.startswith("create_")}
    assert tested | set(EXCEPTIONS) | {WITHOUT_OPERATION} == set(JS)
    assert not tested & set(EXCEPTIONS)
    assert len(JS) == 70


@pytest.mark.servers
@pytest.mark.parametrize("name", [name for name in JS if name not in EXCEPTIONS and name != WITHOUT_OPERATION])
async def test_recorded_operations_give_the_same_replies_and_keys(server: Server | Cluster, name: str) -> None:
    vector = JS[name]
    client = server.client()
    options = RsmqOptions(
        url=server.url,
        ns="{rsmq}" if server.kind == "cluster86" else "rsmq",
        realtime=name == "realtime_send",
        size_unit="utf16" if name == UTF16_ONLY else "bytes",
    )
    async with Rsmq(options) as rsmq:
        replay = Replay(client, options.ns, vector.at_ms)
        replay.put(before(vector))
        replies, error = [], None
        for method, *arguments in calls_of(vector):
            arguments = [replies[-1] if argument is LAST else argument for argument in arguments]
            try:
                replies.append(await getattr(rsmq, method)(*arguments))
            except RsmqError as raised:
                error = {"name": raised.name, "message": str(raised)}
        ended_ms = server_ms(client)

    assert error == vector.error
    replay.check(before(vector), vector.after, ended_ms)
    if error is None:
        check_replies(vector, replies, replay, ended_ms)


def check_replies(vector: Vector, replies: list[Any], replay: Replay, ended_ms: int) -> None:
    js = [as_js(reply) for reply in replies]
    match vector.name:
        case "send_max" | "send_unlimited":
            assert js[1] is True
            check_reply(vector, js[0], replay, ended_ms)
        case "send_len_is_utf16":
            check_reply(vector, js[1], replay, ended_ms)
        case "order":
            assert js == sorted(js)
            assert len(set(js)) == 10
        case "order_pop":
            assert [reply["message"] for reply in js] == vector.returned
        case "rust_vt_ms":
            message_id, received = js
            assert received["id"] == message_id
            assert (received["message"], received["rc"]) == ("m", 1)
            (score,) = replay.dump()[replay.key("rsmq:q3")]["zset"].values()
            assert score - received["fr"] == vector.returned["hidden_for_seconds"] * 1000
        case _:
            check_reply(vector, js[-1], replay, ended_ms)


@pytest.mark.servers
async def test_a_realtime_send_publishes_what_was_recorded(server: Server | Cluster) -> None:
    """Recording realtime_send: check the channel and the size of the sorted set."""
    vector = JS["realtime_send"]
    ns = "{rsmq}" if server.kind == "cluster86" else "rsmq"
    async with Rsmq(RsmqOptions(url=server.url, ns=ns, realtime=True)) as rsmq:
        replay = Replay(server.client(), ns, vector.at_ms)
        replay.put(before(vector))
        (expected,) = vector.published
        pubsub = server.client().pubsub()
        pubsub.subscribe(replay.key(expected["channel"]))
        await until(lambda: (pubsub.get_message(timeout=0) or {}).get("type") == "subscribe", "it is subscribed")
        await rsmq.send_message("q2", "rt")
        heard = await until(lambda: pubsub.get_message(timeout=0), "a notification comes")
        assert heard["channel"].decode() == replay.key(expected["channel"])
        assert heard["data"].decode() == expected["message"]
        pubsub.close()


# --- the exceptions, and what happens instead


@pytest.mark.servers
async def test_finding_40_no_queue_can_be_called_queues(server: Server | Cluster) -> None:
    ns = "{rsmq}" if server.kind == "cluster86" else "rsmq"
    async with Rsmq(RsmqOptions(url=server.url, ns=ns)) as rsmq:
        await rsmq.create_queue("a")
        # As if the JavaScript client had made one.
        client = server.client()
        client.hset(f"{ns}:QUEUES:Q", mapping={"vt": 30, "delay": 0, "maxsize": 65536})
        some_id = "a" * 32
        for method, *arguments in (
            ("create_queue",),
            ("delete_queue",),
            ("send_message", "x"),
            ("send_messages", ["x"]),
            ("receive_message",),
            ("receive_messages",),
            ("pop_message",),
            ("delete_message", some_id),
            ("delete_messages", [some_id]),
            ("change_message_visibility", some_id, 1),
            ("get_queue_attributes",),
            ("set_queue_attributes", 1),
        ):
            with pytest.raises(InvalidFormat, match="Invalid qname format") as refused:
                await getattr(rsmq, method)("QUEUES", *arguments)
            assert str(refused.value) == "Invalid qname format"
            assert "index of all queues" in refused.value.__notes__[0]
        assert await rsmq.list_queues() == ["a"]


@pytest.mark.servers
@pytest.mark.parametrize("operation", ["receive_message", "pop_message"])
async def test_finding_42_a_phantom_is_removed_and_the_next_message_received(
    server: Server | Cluster, operation: str
) -> None:
    """Recording phantom_pop: JavaScript returned `message: null`, Rust 16 returned nothing forever."""
    ns = "{rsmq}" if server.kind == "cluster86" else "rsmq"
    phantom = "p" * 32
    client = server.client()
    async with Rsmq(RsmqOptions(url=server.url, ns=ns)) as rsmq:
        await rsmq.create_queue("q3")
        client.zadd(f"{ns}:q3", {phantom: 1})
        client.hset(f"{ns}:q3:Q", mapping={f"{phantom}:rc": 1, f"{phantom}:fr": 1})
        await rsmq.send_message("q3", "behind it")
        message = await getattr(rsmq, operation)("q3")
        assert message is not None
        assert (message.message, message.rc) == ("behind it", 1)
        assert client.zscore(f"{ns}:q3", phantom) is None
        assert not [name for name in client.hkeys(f"{ns}:q3:Q") if name.startswith(b"p")]
        assert (await rsmq.get_queue_attributes("q3")).totalrecv == 1
        client.zadd(f"{ns}:q3", {phantom: 1})
        assert await getattr(rsmq, operation)("q3") is None


@pytest.mark.parametrize("operation", ["receive_message", "pop_message"])
async def test_more_phantoms_than_one_step_removes_do_not_hide_a_message(server: Server, operation: str) -> None:
    async with Rsmq(server.url) as rsmq:
        await rsmq.create_queue("q")
        server.client().zadd("rsmq:q", {f"{number:032}": 1 for number in range(2500)})
        await rsmq.send_message("q", "behind them")
        client = server.client()
        client.config_resetstat()
        message = await getattr(rsmq, operation)("q")
        assert message is not None
        assert message.message == "behind them"
        assert client.info("commandstats")["cmdstat_evalsha"]["calls"] == 3


async def test_finding_43_by_default_sizes_are_counted_in_bytes(server: Server) -> None:
    """Recording send_len_is_utf16 is followed with `size_unit="utf16"` only."""
    async with Rsmq(server.url) as rsmq:
        await rsmq.create_queue("u16", maxsize=1024)
        with pytest.raises(MessageTooLong, match=r"^Message too long$") as refused:
            await rsmq.send_message("u16", "€" * 342)  # 1026 bytes
        assert refused.value.size == 1026
        await rsmq.send_message("u16", "€" * 341)
        await rsmq.send_message("u16", b"\xff" * 1024)
    async with Rsmq(RsmqOptions(url=server.url, size_unit="utf16")) as rsmq:
        await rsmq.send_message("u16", "🎉" * 512)  # two units each
        with pytest.raises(MessageTooLong):
            await rsmq.send_message("u16", "🎉" * 513)


def test_recorded_ids_contain_the_time_they_were_sent() -> None:
    for recorded in json.loads((VECTORS / "codec.json").read_text())["rsmq_ids"]:
        assert sent_ms(recorded["id"]) * 1000 == pytest.approx(recorded["sent_us"], abs=0.5)
        if recorded["from"] != "send_delay":
            assert math.floor(sent_ms(recorded["id"])) == int(recorded["score_ms"])


@pytest.mark.servers
async def test_ids_carry_the_servers_time_in_base_36(server: Server | Cluster) -> None:
    ns = "{rsmq}" if server.kind == "cluster86" else "rsmq"
    client = server.client()
    async with Rsmq(RsmqOptions(url=server.url, ns=ns)) as rsmq:
        await rsmq.create_queue("q")
        started = server_ms(client)
        ids = [await rsmq.send_message("q", "x") for _ in range(5)]
        ids += await asyncio.gather(*(rsmq.send_message("q", "x") for _ in range(20)))
        ids += await rsmq.send_messages("q", ["x"] * 20)
        ended = server_ms(client)
        for message_id in ids:
            assert len(message_id) == 32
            assert message_id[:10] == message_id[:10].lower()
            assert started <= sent_ms(message_id) <= ended + 1
            assert int(client.zscore(f"{ns}:q", message_id)) <= sent_ms(message_id)
        assert len({message_id[10:] for message_id in ids}) == len(ids)
