"""`listen`: wakes for notifications, for messages that become due, and to poll."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any

import pytest

from support.proxy import Proxy
from support.waiting import until
from tampu.errors import ConfigError
from tampu.rsmq import CannotDecodeMessage, PooledRsmq, QueueNotFound, Rsmq, RsmqOptions
from tampu.rsmq import receive as receive_module

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from servers.cluster import Cluster
    from servers.process import Server
    from tampu.rsmq import RsmqMessage

#: A polling interval that makes tests fail which depend on polling.
NEVER = 3600.0


class Ear:
    """Listens in a task and keeps the messages."""

    def __init__(self, messages: AsyncIterator[RsmqMessage[Any]]) -> None:
        self.heard: list[Any] = []
        self.task = asyncio.create_task(self._listen(messages))

    async def _listen(self, messages: AsyncIterator[RsmqMessage[Any]]) -> None:
        async for message in messages:
            self.heard.append(message.message)

    async def stop(self) -> None:
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task


def subscribers(server: Server | Cluster, channel: str = "rsmq:rt:q") -> int:
    """Return the number of subscribers of the channel."""
    nodes = getattr(server, "nodes", [server])
    return sum(count for node in nodes for _, count in node.client().pubsub_numsub(channel))


@pytest.mark.servers
async def test_a_notified_listener_receives_until_the_queue_is_empty(server: Server | Cluster, ns: str) -> None:
    async with Rsmq(RsmqOptions(url=server.url, ns=ns, realtime=True)) as rsmq:
        await rsmq.create_queue("q")
        await rsmq.send_messages("q", ["there", "before"])
        ear = Ear(rsmq.listen("q", poll_secs=NEVER))
        await until(lambda: subscribers(server, f"{ns}:rt:q") == 1, "it listens")
        await until(lambda: len(ear.heard) == 2, "waiting messages are received")
        await rsmq.send_message("q", "one")
        await until(lambda: len(ear.heard) == 3, "it wakes")
        await rsmq.send_messages("q", ["two", "three"])
        await until(lambda: len(ear.heard) == 5, "it receives until the queue is empty")
        assert ear.heard == ["there", "before", "one", "two", "three"]
        await ear.stop()
        await until(lambda: subscribers(server, f"{ns}:rt:q") == 0, "the subscription ends with the listener")


@pytest.mark.servers
async def test_without_realtime_a_listener_polls(rsmq: Rsmq, server: Server | Cluster, ns: str) -> None:
    await rsmq.create_queue("q")
    ear = Ear(rsmq.listen("q", poll_secs=0.02))
    await until(lambda: subscribers(server, f"{ns}:rt:q") == 1, "it listens")
    await rsmq.send_message("q", "no notification")
    await until(lambda: ear.heard == ["no notification"], "it polls")
    await ear.stop()


@pytest.mark.slow
async def test_a_listener_wakes_when_a_message_becomes_due(rsmq: Rsmq) -> None:
    """There is no notification when a delay or a vt has passed."""
    await rsmq.create_queue("q")
    await rsmq.send_message("q", "delayed", delay=1)
    ear = Ear(rsmq.listen("q", vt=1, poll_secs=NEVER))
    await until(lambda: ear.heard == ["delayed", "delayed"], "it comes when it is due, and again after its vt")
    await ear.stop()


async def test_a_message_sent_just_after_a_receive_wakes_the_listener(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Rsmq(RsmqOptions(url=server.url, realtime=True)) as rsmq, Rsmq(rsmq.options) as sender:
        await rsmq.create_queue("q")
        receive = rsmq._receive
        receives = 0

        async def receive_and_miss(*arguments: Any) -> Any:
            nonlocal receives
            receives += 1
            reply = await receive(*arguments)
            if receives == 2:  # it is subscribed, and the queue is empty
                (wake,) = rsmq._listeners.values()
                await sender.send_message("q", "missed")
                await until(wake.is_set, "the notification arrives before the reply")
            return reply

        monkeypatch.setattr(rsmq, "_receive", receive_and_miss)
        ear = Ear(rsmq.listen("q", poll_secs=NEVER))
        await until(lambda: ear.heard == ["missed"], "it receives again")
        await ear.stop()


async def test_listening_in_batches(rsmq: Rsmq) -> None:
    await rsmq.create_queue("q")
    await rsmq.send_messages("q", [str(number) for number in range(25)])
    sizes = []
    async for batch in rsmq.listen_batches("q", max=10, decoder=int):
        sizes.append(len(batch))
        await rsmq.delete_messages("q", [message.id for message in batch])
        if batch[-1].message == 24:
            break
    assert sizes == [10, 10, 5]
    with pytest.raises(ConfigError, match="max"):
        rsmq.listen_batches("q", max=1000)


async def test_a_batch_publishes_one_notification_per_message(server: Server) -> None:
    async with Rsmq(RsmqOptions(url=server.url, realtime=True)) as rsmq:
        await rsmq.create_queue("q")
        pubsub = server.client().pubsub()
        pubsub.subscribe("rsmq:rt:q")
        await until(lambda: (pubsub.get_message(timeout=0) or {}).get("type") == "subscribe", "it is subscribed")
        await rsmq.send_messages("q", ["a", "b", "c"])
        heard: list[bytes] = []

        def listen() -> bool:
            message = pubsub.get_message(timeout=0)
            if message:
                heard.append(message["data"])
            return len(heard) == 3

        await until(listen, "three notifications come")
        assert heard == [b"1", b"2", b"3"]
        pubsub.close()


async def test_a_channel_that_an_acl_forbids_does_not_fail_the_send(server: Server) -> None:
    client = server.client()
    client.execute_command("ACL", "SETUSER", "mute", "on", ">secret", "~*", "+@all", "resetchannels")
    url = server.url.replace("redis://", "redis://mute:secret@")
    try:
        async with Rsmq(RsmqOptions(url=url, realtime=True)) as rsmq:
            await rsmq.create_queue("q")
            assert len(await rsmq.send_message("q", "x")) == 32
            ear = Ear(rsmq.listen("q", poll_secs=0.02))  # nor the listener, which polls
            await until(lambda: ear.heard == ["x"], "it is received")
            await ear.stop()
    finally:
        client.execute_command("ACL", "DELUSER", "mute")


async def test_a_broken_subscription_is_restored(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    async with Rsmq(RsmqOptions(url=server.url, realtime=True)) as rsmq:
        await rsmq.create_queue("q")
        ear = Ear(rsmq.listen("q", poll_secs=NEVER))
        for number in range(3):
            await until(lambda: subscribers(server) == 1, "it listens")
            await rsmq.send_message("q", number, encoder=str)
            await until(lambda number=number: len(ear.heard) == number + 1, "it wakes")
            server.client().client_kill_filter(_type="pubsub")
        await ear.stop()
    assert (
        sum("subscription to rsmq:rt:q lost; polling instead" in record.getMessage() for record in caplog.records) <= 3
    )


async def test_messages_missed_while_unsubscribed_are_received_on_resubscribe(server: Server) -> None:
    async with Proxy(server.address) as proxy, Rsmq(RsmqOptions(url=server.url, realtime=True)) as sender:
        await sender.create_queue("q")
        async with Rsmq(RsmqOptions(url=proxy.url)) as rsmq:
            ear = Ear(rsmq.listen("q", poll_secs=NEVER))
            await until(lambda: subscribers(server) == 1, "it listens")
            proxy.shut()
            await until(lambda: subscribers(server) == 0, "it is not subscribed")
            await sender.send_message("q", "meanwhile")
            proxy.reopen()
            await until(lambda: ear.heard == ["meanwhile"], "it receives when it is subscribed again")
            await ear.stop()


@pytest.mark.slow
async def test_a_subscription_to_a_hanging_server_times_out(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receive_module, "PING_EVERY_SECS", 0.1)
    async with Proxy(server.address) as proxy, Rsmq(RsmqOptions(url=server.url, realtime=True)) as sender:
        await sender.create_queue("q")
        async with Rsmq(RsmqOptions(url=proxy.url)) as rsmq:
            ear = Ear(rsmq.listen("q", poll_secs=NEVER))
            await until(lambda: subscribers(server) == 1, "it listens")
            connections = len(proxy.links)
            asked = proxy.link.request_bytes
            await until(lambda: proxy.link.request_bytes >= asked + 4 * len("*1\r\n$4\r\nPING\r\n"), "it asks")
            assert len(proxy.links) == connections  # a quiet channel must not look dead
            silent = next(link for link in proxy.links if not link.is_cut and link is proxy.link)
            silent.requests_held = True
            await until(lambda: len(proxy.links) > connections, "a new subscription is made")
            await until(lambda: subscribers(server) >= 1, "it listens again")
            await sender.send_message("q", "x")
            await until(lambda: ear.heard == ["x"], "it wakes")
            await ear.stop()


async def test_a_listener_continues_after_a_server_restart(fresh_server: Any, caplog: pytest.LogCaptureFixture) -> None:
    server: Server = fresh_server(appendonly="yes", appendfsync="always")
    async with Rsmq(RsmqOptions(url=server.url, realtime=True, patience_secs=0.2)) as rsmq:
        await rsmq.create_queue("q")
        ear = Ear(rsmq.listen("q", poll_secs=0.05))
        await until(lambda: subscribers(server) == 1, "it listens")
        server.stop()
        await until(lambda: "cannot receive from RSMQ queue q; retrying" in caplog.text, "it notices")
        server.start()
        sender = Rsmq(server.url)
        await sender.send_message("q", "after the restart")
        await sender.close()
        await until(lambda: ear.heard == ["after the restart"], "it continues")
        await ear.stop()
    levels = [
        record.levelno
        for record in caplog.records
        if "cannot receive from RSMQ queue q; retrying" in record.getMessage()
    ]
    assert levels == [logging.WARNING]  # logged once per outage


@pytest.mark.parametrize("client", [Rsmq, PooledRsmq])
async def test_closing_the_client_ends_its_listeners(server: Server, client: type[Rsmq | PooledRsmq]) -> None:
    rsmq = await client.connect(server.url)
    await rsmq.create_queue("q")
    ear = Ear(rsmq.listen("q", poll_secs=NEVER))
    await until(lambda: subscribers(server) == 1, "it listens")
    await rsmq.close()
    async with asyncio.timeout(5):
        await ear.task
    await until(lambda: subscribers(server) == 0, "the subscription is gone")


async def test_leaving_the_loop_and_closing_the_client_leaves_nothing_behind(server: Server) -> None:
    client = server.client()
    before = len(client.client_list())
    async with Rsmq(server.url) as rsmq:
        await rsmq.create_queue("q")
        await rsmq.send_message("q", "x")
        async for message in rsmq.listen("q"):
            assert message.message == "x"
            break
    await until(lambda: len(client.client_list()) == before, "no connection is left")


async def test_listening_to_a_missing_queue_raises(rsmq: Rsmq) -> None:
    with pytest.raises(QueueNotFound):
        async for _ in rsmq.listen("nope"):
            pass


async def test_a_message_that_cannot_be_decoded_raises_in_the_listener(rsmq: Rsmq) -> None:
    await rsmq.create_queue("q")
    await rsmq.send_message("q", "no number")
    with pytest.raises(CannotDecodeMessage):
        async for _ in rsmq.listen("q", decoder=int):
            pass
