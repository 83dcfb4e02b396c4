"""The operations, one by one and in batches, on every server."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from rsmq_vectors import server_ms

from support.proxy import Proxy
from support.waiting import until
from tampu.base.checks import MAX_CALL_BYTES, MAX_CALL_ENTRIES
from tampu.errors import RedisError
from tampu.redis.faults import ServerError
from tampu.rsmq import (
    BatchInterrupted,
    CannotDecodeMessage,
    MessageTooLong,
    PooledRsmq,
    QueueExists,
    QueueNotFound,
    Rsmq,
    RsmqConnection,
    RsmqOptions,
)

if TYPE_CHECKING:
    from servers.cluster import Cluster
    from servers.process import Server

ID = "a" * 32


class Invoice(msgspec.Struct):
    number: int


# --- the life of a message


@pytest.mark.servers
async def test_a_message_is_sent_received_and_deleted(rsmq: Rsmq) -> None:
    assert await rsmq.create_queue("q") is True
    message_id = await rsmq.send_message("q", "hé 世 🎉")
    message = await rsmq.receive_message("q")
    assert message is not None
    assert (message.id, message.message, message.rc) == (message_id, "hé 世 🎉", 1)
    assert await rsmq.receive_message("q") is None
    assert await rsmq.delete_message("q", message_id) is True
    assert await rsmq.delete_message("q", message_id) is False
    attributes = await rsmq.get_queue_attributes("q")
    assert (attributes.msgs, attributes.totalsent, attributes.totalrecv) == (0, 1, 1)


@pytest.mark.slow
@pytest.mark.servers
async def test_a_message_that_is_not_deleted_comes_again_when_its_vt_has_passed(
    rsmq: Rsmq, server: Server | Cluster
) -> None:
    await rsmq.create_queue("q")
    await rsmq.send_message("q", "again")
    first = await rsmq.receive_message("q", vt=1)
    assert first is not None
    received_ms = first.fr
    again = await until(lambda: rsmq.receive_message("q", vt=1), "it comes again")
    assert server_ms(server.client()) >= received_ms + 1000
    assert (again.id, again.rc, again.fr) == (first.id, 2, first.fr)


@pytest.mark.slow
@pytest.mark.servers
async def test_a_delayed_message_comes_when_it_is_due(rsmq: Rsmq, server: Server | Cluster) -> None:
    await rsmq.create_queue("q", delay=1)
    sent = await rsmq.send_message("q", "by the queue's delay")
    at_once = await rsmq.send_message("q", "by its own", delay=0)
    message = await rsmq.receive_message("q")
    assert message is not None
    assert message.id == at_once
    assert await rsmq.pop_message("q") is None
    popped = await until(lambda: rsmq.pop_message("q"), "it is due")
    assert popped.id == sent
    assert popped.fr >= int(popped.sent) + 1000


@pytest.mark.servers
async def test_a_popped_message_is_gone(rsmq: Rsmq, server: Server | Cluster, ns: str) -> None:
    await rsmq.create_queue("q")
    await rsmq.send_message("q", "once")
    popped = await rsmq.pop_message("q")
    assert popped is not None
    assert popped.message == "once"
    client = server.client()
    assert not client.exists(f"{ns}:q")
    assert set(client.hkeys(f"{ns}:q:Q")) == {
        *(b"vt", b"delay", b"maxsize", b"created", b"modified", b"totalsent", b"totalrecv")
    }


@pytest.mark.servers
async def test_two_receivers_never_get_the_same_message(rsmq: Rsmq, options: RsmqOptions) -> None:
    await rsmq.create_queue("q")
    ids = await rsmq.send_messages("q", [str(number) for number in range(60)])
    async with Rsmq(options) as other, PooledRsmq(options) as pooled:
        clients: list[Rsmq | PooledRsmq] = [rsmq, other, pooled]
        received = await asyncio.gather(*(clients[n % 3].receive_message("q") for n in range(60)))
    assert sorted(message.id for message in received if message) == sorted(ids)


@pytest.mark.servers
async def test_messages_come_in_the_order_they_were_sent(rsmq: Rsmq) -> None:
    await rsmq.create_queue("q")
    sent = [await rsmq.send_message("q", str(number)) for number in range(20)]
    sent += await asyncio.gather(*(rsmq.send_message("q", str(number)) for number in range(20, 150)))
    sent += await rsmq.send_messages("q", [str(number) for number in range(150, 800)])
    received = await rsmq.receive_messages("q", max=1000)
    assert [message.message for message in received] == [str(number) for number in range(800)]
    assert [message.id for message in received] == sent


# --- queues


@pytest.mark.servers
async def test_a_queue_is_created_once_and_deleted_once(rsmq: Rsmq) -> None:
    await rsmq.create_queue("q", vt=5, delay=1, maxsize=-1)
    with pytest.raises(QueueExists, match=r"^Queue exists$"):
        await rsmq.create_queue("q", vt=99)
    attributes = await rsmq.get_queue_attributes("q")
    assert (attributes.vt, attributes.delay, attributes.maxsize) == (5, 1, -1)
    assert await rsmq.list_queues() == ["q"]
    assert await rsmq.delete_queue("q") is True
    assert await rsmq.list_queues() == []
    with pytest.raises(QueueNotFound, match=r"^Queue not found$"):
        await rsmq.delete_queue("q")


@pytest.mark.servers
@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("delete_queue", []),
        ("get_queue_attributes", []),
        ("set_queue_attributes", [5]),
        ("send_message", ["x"]),
        ("send_messages", [["x"]]),
        ("receive_message", []),
        ("receive_messages", []),
        ("pop_message", []),
        ("change_message_visibility", [ID, 5]),
    ],
)
async def test_finding_44_a_missing_queue_is_an_error_and_nothing_is_written(
    rsmq: Rsmq, server: Server | Cluster, method: str, arguments: list[Any]
) -> None:
    """JavaScript looks the queue up in a separate step: if it is deleted in between, orphaned keys remain."""
    with pytest.raises(QueueNotFound):
        await getattr(rsmq, method)("gone", *arguments)
    assert list(server.client().scan_iter("*")) == []


@pytest.mark.servers
async def test_finding_44_a_queue_missing_from_the_index_is_put_back(
    rsmq: Rsmq, server: Server | Cluster, ns: str
) -> None:
    """JavaScript adds it to the index in a separate step: after a crash in between the queue is not listed."""
    await rsmq.create_queue("q")
    server.client().delete(f"{ns}:QUEUES")
    with pytest.raises(QueueExists):
        await rsmq.create_queue("q")
    assert await rsmq.list_queues() == ["q"]


@pytest.mark.servers
async def test_attributes_are_set_and_returned(rsmq: Rsmq) -> None:
    await rsmq.create_queue("q")
    attributes = await rsmq.set_queue_attributes("q", vt=7, maxsize=2048, delay=3)
    assert (attributes.vt, attributes.maxsize, attributes.delay) == (7, 2048, 3)
    attributes = await rsmq.set_queue_attributes("q", delay=0)
    assert (attributes.vt, attributes.maxsize, attributes.delay) == (7, 2048, 0)


@pytest.mark.servers
async def test_finding_47_visible_messages_are_counted_exactly(rsmq: Rsmq) -> None:
    await rsmq.create_queue("q")
    await rsmq.send_messages("q", ["a", "b", "c"])
    await rsmq.send_message("q", "later", delay=100)
    await rsmq.receive_message("q")
    attributes = await rsmq.get_queue_attributes("q")
    assert (attributes.msgs, attributes.visiblemsgs) == (4, 2)
    assert attributes.hiddenmsgs >= 2


@pytest.mark.servers
async def test_hidden_messages_are_counted_as_javascript_counts_them(rsmq: Rsmq, server: Server | Cluster) -> None:
    """Those that became visible in the current second are included."""
    await rsmq.create_queue("q")
    client = server.client()
    while True:
        second = server_ms(client) // 1000
        await rsmq.send_message("q", "x")
        attributes = await rsmq.get_queue_attributes("q")
        if server_ms(client) // 1000 == second:
            break
        await rsmq.pop_message("q")
    assert (attributes.msgs, attributes.visiblemsgs, attributes.hiddenmsgs) == (1, 1, 1)


# --- what happens to a script, a queue or a server


@pytest.mark.servers
async def test_finding_46_operations_survive_a_script_flush(rsmq: Rsmq, server: Server | Cluster) -> None:
    await rsmq.create_queue("q")

    async def flushed(call: Any) -> Any:
        for node in getattr(server, "nodes", [server]):
            node.client().script_flush()
        return await call

    message_id = await flushed(rsmq.send_message("q", "x"))
    assert (await flushed(rsmq.receive_message("q"))).id == message_id
    assert await flushed(rsmq.change_message_visibility("q", message_id, 0))
    assert (await flushed(rsmq.pop_message("q"))).id == message_id
    assert await flushed(rsmq.delete_message("q", message_id)) is False
    assert (await flushed(rsmq.get_queue_attributes("q"))).totalrecv == 2
    assert await flushed(rsmq.delete_queue("q"))
    assert await flushed(rsmq.create_queue("q"))


async def test_every_operation_is_one_command(rsmq: Rsmq, server: Server) -> None:
    await rsmq.create_queue("warm")
    message_id = await rsmq.send_message("warm", "x")
    seen: list[str] = []
    with server.client().monitor() as monitor:

        def commands(mark: str) -> list[str]:
            server.client().echo(mark)
            while True:
                line = monitor.next_command()
                if line["command"].upper().startswith("ECHO"):
                    return seen.copy()
                if line["client_type"] != "lua" and not line["command"].startswith("CLIENT"):
                    seen.append(line["command"].split()[0])

        for method, *arguments in [
            ("create_queue", "q"),
            ("list_queues",),
            ("get_queue_attributes", "q"),
            ("set_queue_attributes", "q", 5),
            ("send_message", "q", "x"),
            ("send_messages", "q", ["x"] * MAX_CALL_ENTRIES),
            ("receive_message", "q"),
            ("receive_messages", "q", 100),
            ("change_message_visibility", "warm", message_id, 5),
            ("delete_message", "warm", message_id),
            ("delete_messages", "warm", [message_id] * MAX_CALL_ENTRIES),
            ("pop_message", "q"),
            ("delete_queue", "q"),
        ]:
            seen.clear()
            await getattr(rsmq, method)(*arguments)
            assert await asyncio.to_thread(commands, method) == ["SMEMBERS" if method == "list_queues" else "EVALSHA"]


@pytest.mark.servers
async def test_a_server_at_its_maxmemory_can_still_be_drained(rsmq: Rsmq, server: Server | Cluster) -> None:
    await rsmq.create_queue("q", vt=0)
    ids = await rsmq.send_messages("q", ["x"] * 4)
    server.config_set(maxmemory=1, maxmemory_policy="noeviction")
    with pytest.raises(ServerError, match=r"^OOM"):
        await rsmq.send_message("q", "too much")
    received = await rsmq.receive_message("q", vt=60)
    assert received is not None
    assert received.id == ids[0]
    assert len(await rsmq.receive_messages("q", 1, vt=60)) == 1
    assert await rsmq.change_message_visibility("q", ids[0], 100)
    assert (await rsmq.pop_message("q")) is not None
    assert await rsmq.delete_messages("q", ids) == 3
    assert (await rsmq.get_queue_attributes("q")).msgs == 0


@pytest.mark.parametrize("counter", ["totalrecv", "rc"])
async def test_a_corrupt_counter_does_not_lose_a_message(rsmq: Rsmq, server: Server, counter: str) -> None:
    await rsmq.create_queue("q")
    message_id = await rsmq.send_message("q", "x")
    field = counter if counter == "totalrecv" else f"{message_id}:rc"
    server.client().hset("rsmq:q:Q", mapping={field: "ruined", "totalsent": "ruined"})
    received = await rsmq.receive_message("q", vt=0)
    assert received is not None
    assert received.message == "x"
    assert len(await rsmq.send_message("q", "y")) == 32
    popped = await rsmq.pop_message("q")
    assert popped is not None
    assert server.client().hget("rsmq:q:Q", "totalsent") == b"ruined"  # its true value is unknown
    if counter == "totalrecv":
        assert server.client().hget("rsmq:q:Q", "totalrecv") == b"ruined"


@pytest.mark.parametrize("key", ["rsmq:QUEUES", "rsmq:q", "rsmq:q:Q"])
async def test_a_key_of_the_wrong_type_stops_every_operation_before_it_writes(
    rsmq: Rsmq, server: Server, key: str
) -> None:
    client = server.client()
    await rsmq.create_queue("q")
    message_id = await rsmq.send_message("q", "x")
    client.delete(key)
    client.set(key, "not what it should be")
    before = {name: client.dump(name) for name in client.scan_iter("*")}
    for method, *arguments in [
        ("create_queue", "q"),
        ("create_queue", "new"),
        ("delete_queue", "q"),
        ("set_queue_attributes", "q", 5),
        ("send_message", "q", "x"),
        ("receive_message", "q"),
        ("pop_message", "q"),
        ("change_message_visibility", "q", message_id, 5),
    ]:
        index_only = method in ("create_queue", "delete_queue")
        if index_only != (key == "rsmq:QUEUES"):
            continue
        if key == "rsmq:q" and method == "set_queue_attributes":
            continue  # it reads the sorted set only after it has done what was asked
        with pytest.raises(RedisError, match="WRONGTYPE"):
            await getattr(rsmq, method)(*arguments)
        assert {name: client.dump(name) for name in client.scan_iter("*")} == before, method


async def test_a_refused_command_is_not_sent_twice(rsmq: Rsmq, server: Server) -> None:
    client = server.client()
    client.set("rsmq:q:Q", "no hash")
    client.config_resetstat()
    with pytest.raises(RedisError, match="WRONGTYPE"):
        await rsmq.send_message("q", "x")
    assert client.info("commandstats")["cmdstat_evalsha"]["calls"] == 1


@pytest.mark.servers("cluster86")
async def test_a_cluster_with_the_url_of_one_node_needs_a_hash_tag(
    server: Cluster,
) -> None:
    from tampu.errors import ConfigError

    for node in server.masters:
        async with Rsmq(RsmqOptions(url=node.url, ns=f"{{n{node.port}}}")) as rsmq:
            await rsmq.create_queue("q")
            await rsmq.send_message("q", "x")
            assert await rsmq.pop_message("q") is not None
        async with Rsmq(RsmqOptions(url=node.url, ns="rsmq")) as rsmq:
            with pytest.raises(ConfigError, match="hash tag"):
                await rsmq.create_queue("q")


# --- batches


@pytest.mark.servers
async def test_batches_do_what_single_operations_do(rsmq: Rsmq) -> None:
    await rsmq.create_queue("q")
    ids = await rsmq.send_messages("q", (str(number) for number in range(5)))
    received = await rsmq.receive_messages("q", max=3)
    assert [(message.id, message.message, message.rc) for message in received] == [
        (ids[number], str(number), 1) for number in range(3)
    ]
    assert [message.id for message in await rsmq.receive_messages("q")] == ids[3:]
    assert await rsmq.receive_messages("q") == []
    assert await rsmq.delete_messages("q", [ids[0], ID, ids[1], ids[1]]) == 2
    attributes = await rsmq.get_queue_attributes("q")
    assert (attributes.msgs, attributes.totalsent, attributes.totalrecv) == (3, 5, 5)


async def test_empty_batches_are_nothing(rsmq: Rsmq) -> None:
    await rsmq.create_queue("q")
    assert await rsmq.send_messages("q", []) == []
    assert await rsmq.delete_messages("q", []) == 0


@pytest.mark.parametrize("own", [True, False])
async def test_a_batch_with_vt_0_has_each_message_once(rsmq: Rsmq, own: bool) -> None:
    await rsmq.create_queue("q", vt=0)
    ids = await rsmq.send_messages("q", ["x"] * (MAX_CALL_ENTRIES + 50))
    received = await rsmq.receive_messages("q", max=1000, vt=None if own else 0)
    assert len({message.id for message in received}) == len(received)
    assert {message.id for message in received} <= set(ids)
    assert len(received) >= MAX_CALL_ENTRIES


async def test_a_batch_of_large_messages_takes_several_calls(rsmq: Rsmq) -> None:
    await rsmq.create_queue("q", maxsize=-1)
    bodies = [bytes([number]) * (MAX_CALL_BYTES // 3) for number in range(7)] + [b"x" * (MAX_CALL_BYTES * 2)]
    ids = await rsmq.send_messages("q", bodies)
    received = []
    while batch := await rsmq.receive_messages("q", max=100, decoder=bytes):
        assert len(batch) == 1 or sum(len(message.body) for message in batch) <= MAX_CALL_BYTES
        received += batch
    assert [message.id for message in received] == ids
    assert [message.message for message in received] == bodies


async def test_a_message_too_long_anywhere_in_a_batch_stops_all_of_it(rsmq: Rsmq) -> None:
    await rsmq.create_queue("q", maxsize=1024)
    with pytest.raises(MessageTooLong):
        await rsmq.send_messages("q", ["x"] * (3 * MAX_CALL_ENTRIES) + ["x" * 1025])
    assert (await rsmq.get_queue_attributes("q")).msgs == 0


async def test_a_batch_that_fails_half_way_reports_what_was_sent(server: Server) -> None:
    async with Proxy(server.address) as proxy, Rsmq(proxy.url) as rsmq:
        await rsmq.create_queue("q")
        proxy.refuse("OOM command not allowed", skip=2)
        with pytest.raises(BatchInterrupted, match=f"^{2 * MAX_CALL_ENTRIES} of 1000 messages were sent") as failed:
            await rsmq.send_messages("q", ["x"] * 1000)
        assert isinstance(failed.value.__cause__, ServerError)
        received = await rsmq.receive_messages("q", max=1000)
        assert [message.id for message in received] == failed.value.ids

        await rsmq.send_messages("q", ["x"] * 600)
        proxy.refuse("OOM command not allowed", skip=1)
        assert len(await rsmq.receive_messages("q", max=600)) == MAX_CALL_ENTRIES  # those received are returned


# --- what a message is


async def test_messages_are_text_or_bytes(rsmq: Rsmq) -> None:
    await rsmq.create_queue("q")
    for sent in (b"\xff\xfe\x00", bytearray(b"\xff\xfe\x00"), memoryview(b"\xff\xfe\x00")):
        await rsmq.send_message("q", sent)  # type: ignore[arg-type]
        as_bytes = await rsmq.receive_message("q", vt=0, decoder=bytes)
        assert as_bytes is not None
        assert as_bytes.message == b"\xff\xfe\x00"
        as_text = await rsmq.pop_message("q")
        assert as_text is not None
        assert as_text.message == "\ufffd\ufffd\0"  # as JavaScript reads it
        assert as_text.body == b"\xff\xfe\x00"


async def test_messages_are_of_any_type_with_an_encoder_and_a_decoder(rsmq: Rsmq) -> None:
    await rsmq.create_queue("q")
    await rsmq.send_message("q", {"n": 1}, encoder=json.dumps)
    message = await rsmq.receive_message("q", vt=0, decoder=json.loads)
    assert message is not None
    assert message.message == {"n": 1}
    await rsmq.send_messages("q", [{"n": 2}, {"n": 3}], encoder=json.dumps)
    assert [found.message["n"] for found in await rsmq.receive_messages("q", decoder=json.loads)] == [1, 2, 3]


async def test_a_queue_may_have_an_encoder_and_a_decoder(rsmq: Rsmq) -> None:
    await rsmq.create_queue("invoices")
    invoices = rsmq.queue("invoices", encoder=msgspec.json.encode, decoder=msgspec.json.Decoder(Invoice).decode)
    assert invoices.qname == "invoices"
    await invoices.send(Invoice(1))
    await invoices.send_many([Invoice(2), Invoice(3), Invoice(4), Invoice(5)])
    first = await invoices.receive()
    assert first is not None
    assert first.message == Invoice(1)
    assert await invoices.delete(first)
    popped = await invoices.pop()
    assert popped is not None
    assert popped.message == Invoice(2)
    async with invoices.receiving() as third:
        assert third is not None
        assert third.message == Invoice(3)
    (fourth,) = await invoices.receive_many(1)
    assert await invoices.delete(fourth.id)
    async for fifth in invoices.listen():
        assert fifth.message == Invoice(5)
        break


@pytest.mark.parametrize("operation", ["receive_message", "pop_message", "receive_messages"])
async def test_a_body_that_cannot_be_decoded_still_reaches_the_caller(rsmq: Rsmq, operation: str) -> None:
    await rsmq.create_queue("q")
    message_id = await rsmq.send_message("q", "no json")
    with pytest.raises(CannotDecodeMessage, match=message_id) as failed:
        await getattr(rsmq, operation)("q", decoder=json.loads)
    assert failed.value.body == b"no json"
    assert failed.value.message_id == message_id


async def test_receiving_deletes_when_the_block_succeeds_only(rsmq: Rsmq) -> None:
    await rsmq.create_queue("q")
    async with rsmq.receiving("q") as message:
        assert message is None
    await rsmq.send_message("q", "x")
    with pytest.raises(ZeroDivisionError):
        async with rsmq.receiving("q", vt=0):
            raise ZeroDivisionError
    started = asyncio.Event()

    async def work() -> None:
        async with rsmq.receiving("q", vt=0):
            started.set()
            await asyncio.Event().wait()

    working = asyncio.create_task(work())
    await started.wait()
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    assert (await rsmq.get_queue_attributes("q")).msgs == 1
    async with rsmq.receiving("q") as message:
        assert message is not None
        assert message.rc == 3
    assert (await rsmq.get_queue_attributes("q")).msgs == 0


def test_the_clients_implement_the_protocol(options: RsmqOptions) -> None:
    def accepts(connection: RsmqConnection) -> None:
        assert isinstance(connection, RsmqConnection)

    accepts(Rsmq(options))
    accepts(PooledRsmq(options))
