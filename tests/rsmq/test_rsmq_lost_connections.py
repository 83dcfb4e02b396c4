"""What happens when the connection breaks during an operation."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

import pytest

from support.proxy import Proxy
from support.waiting import until
from tampu.base.checks import MAX_CALL_ENTRIES
from tampu.errors import OutcomeUnknownError, ShutdownError
from tampu.redis.faults import Unreachable
from tampu.rsmq import BatchInterrupted, PooledRsmq, Rsmq, RsmqMessage, RsmqOptions
from tampu.rsmq.send import MAX_IN_FLIGHT, SendMarkers

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from servers.process import Server


@pytest.fixture
async def proxy(server: Server) -> AsyncIterator[Proxy]:
    async with Proxy(server.address) as proxy:
        yield proxy


def through(proxy: Proxy, **settings: Any) -> RsmqOptions:
    return RsmqOptions(url=proxy.url, **settings)


async def bodies(server: Server, qname: str = "q") -> list[str]:
    """Return all bodies in the queue, in order."""
    async with Rsmq(server.url) as rsmq:
        return [message.message for message in await rsmq.receive_messages(qname, max=10_000, vt=0)]


# --- send


async def test_a_send_whose_reply_is_lost_has_an_unknown_outcome(server: Server, proxy: Proxy) -> None:
    async with Rsmq(through(proxy)) as rsmq:
        await rsmq.create_queue("q")
        proxy.cut_replies_after(1)
        with pytest.raises(OutcomeUnknownError, match="may or may not have been sent") as unknown:
            await rsmq.send_message("q", "x")
        (part,) = unknown.value.ids
        # The random part in the error identifies the message.
        async with Rsmq(server.url) as other:
            message = await other.receive_message("q", vt=0)
        assert message is not None
        assert message.id.endswith(part)
        await rsmq.send_message("q", "the next one works")
    assert await bodies(server) == ["x", "the next one works"]


@pytest.mark.parametrize("client", [Rsmq, PooledRsmq])
async def test_with_send_once_a_send_whose_reply_is_lost_is_not_duplicated(
    server: Server, proxy: Proxy, client: type[Rsmq | PooledRsmq]
) -> None:
    async with client(through(proxy, send_once=True)) as rsmq:
        await rsmq.create_queue("q")
        before = await rsmq.send_message("q", "before")
        proxy.cut_replies_after(1)
        message_id = await rsmq.send_message("q", "x")
        assert len(proxy.links) == 2
        received = await rsmq.receive_messages("q", max=10)
        assert [message.id for message in received] == [before, message_id]
        assert (await rsmq.get_queue_attributes("q")).totalsent == 2


async def test_with_send_once_a_consumed_message_is_not_sent_again(server: Server, proxy: Proxy) -> None:
    async with Rsmq(through(proxy, send_once=True)) as rsmq, Rsmq(server.url) as consumer:
        await rsmq.create_queue("q")
        proxy.hold_replies()
        sending = asyncio.create_task(rsmq.send_message("q", "x"))
        popped = await until(lambda: consumer.pop_message("q"), "it is sent")
        proxy.cut()
        assert await sending == popped.id
        assert await consumer.pop_message("q") is None


async def test_with_send_once_a_send_that_never_arrived_is_sent_again(server: Server, proxy: Proxy) -> None:
    async with Rsmq(through(proxy, send_once=True)) as rsmq:
        await rsmq.create_queue("q")
        proxy.cut_requests_after(20)
        message_id = await rsmq.send_message("q", "x")
        received = await rsmq.receive_message("q")
        assert received is not None
        assert received.id == message_id
    assert len(proxy.links) == 2


async def test_with_send_once_many_sends_at_once_survive_cut_after_cut(server: Server, proxy: Proxy) -> None:
    async with Rsmq(through(proxy, send_once=True)) as rsmq:
        await rsmq.create_queue("q")

        async def send(number: int) -> str:
            return await rsmq.send_message("q", str(number), delay=number % 3 or None)

        sending = asyncio.gather(*(send(number) for number in range(300)))
        for cuts in range(1, 6):
            proxy.cut_replies_after(50 * cuts)
            await until(lambda cuts=cuts: len(proxy.links) > cuts or sending.done(), "it is cut")
        ids = await sending
        assert len(set(ids)) == 300
        assert (await rsmq.get_queue_attributes("q")).msgs == 300
        assert (await rsmq.get_queue_attributes("q")).totalsent == 300


async def test_with_send_once_a_batch_is_not_duplicated(server: Server, proxy: Proxy) -> None:
    async with Rsmq(through(proxy, send_once=True)) as rsmq:
        await rsmq.create_queue("q")
        proxy.cut_replies_after(1)
        ids = await rsmq.send_messages("q", [str(number) for number in range(300)])
        assert [message.id for message in await rsmq.receive_messages("q", max=1000)] == ids


async def test_the_marker_of_send_once_is_the_only_extra_key_and_expires(server: Server) -> None:
    client = server.client()
    async with Rsmq(RsmqOptions(url=server.url, send_once=True)) as rsmq:
        await rsmq.create_queue("q")
        await asyncio.gather(*(rsmq.send_message("q", "x") for _ in range(50)))
        for _ in range(20):
            await rsmq.send_message("q", "x")
    (marker,) = set(client.scan_iter("*")) - {b"rsmq:q", b"rsmq:q:Q", b"rsmq:QUEUES"}
    assert marker.startswith(b"rsmq:q:sent:")
    assert 0 < client.pttl(marker) <= 60_000
    assert client.hlen(marker) <= MAX_IN_FLIGHT + 1  # one slot for each send in flight


async def test_with_send_once_the_outcome_is_unknown_if_the_server_stays_down(server: Server, proxy: Proxy) -> None:
    async with Rsmq(through(proxy, send_once=True, patience_secs=0.3)) as rsmq:
        await rsmq.create_queue("q")
        proxy.hold_requests()
        sending = asyncio.create_task(rsmq.send_message("q", "x"))
        await until(lambda: proxy.link.has_held_requests, "it is under way")
        proxy.shut()
        with pytest.raises(OutcomeUnknownError):
            await sending
        with pytest.raises(Unreachable):  # this one was never sent, so its outcome is known
            await rsmq.send_message("q", "x")


def test_after_a_fork_the_child_leaves_the_parents_marker_alone() -> None:
    markers = SendMarkers()
    before = markers.sender
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.write(writing, markers.sender)
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 100) != before
    assert markers.sender == before
    os.close(reading)
    os.close(writing)


async def test_a_batch_without_send_once_reports_sent_and_unknown_messages(server: Server, proxy: Proxy) -> None:
    async with Rsmq(through(proxy)) as rsmq:
        await rsmq.create_queue("q")
        proxy.cut_replies_after(MAX_CALL_ENTRIES * 39 + 500)  # in the answer to the second step
        with pytest.raises(BatchInterrupted) as failed:
            await rsmq.send_messages("q", ["x"] * (3 * MAX_CALL_ENTRIES))
        assert len(failed.value.ids) == MAX_CALL_ENTRIES
        assert isinstance(failed.value.__cause__, OutcomeUnknownError)
        assert len(failed.value.__cause__.ids) == MAX_CALL_ENTRIES


async def test_each_caller_of_a_batch_gets_its_own_unknown_message(server: Server, proxy: Proxy) -> None:
    async with Rsmq(through(proxy)) as rsmq:
        await rsmq.create_queue("q")
        proxy.hold_replies()
        sending = [asyncio.create_task(rsmq.send_message("q", str(number))) for number in range(40)]
        async with Rsmq(server.url) as other:

            async def the_first_are_in() -> bool:
                return (await other.get_queue_attributes("q")).msgs == MAX_IN_FLIGHT

            await until(the_first_are_in, "the first are in, the others wait")
        proxy.cut()
        outcomes = await asyncio.gather(*sending, return_exceptions=True)
    unknown = [outcome for outcome in outcomes if isinstance(outcome, OutcomeUnknownError)]
    assert [len(error.ids) for error in unknown] == [1] * MAX_IN_FLIGHT
    assert await bodies(server) == [str(number) for number in range(40)]


async def test_a_lost_batch_reports_each_callers_own_message(server: Server, proxy: Proxy) -> None:
    async with Rsmq(through(proxy)) as rsmq:
        await rsmq.create_queue("q")
        before = proxy.link.reply_bytes
        await rsmq.send_message("q", "0")
        proxy.cut_replies_after(MAX_IN_FLIGHT * (proxy.link.reply_bytes - before) + 1)  # in the reply to the batch
        outcomes = await asyncio.gather(*(rsmq.send_message("q", "x") for _ in range(20)), return_exceptions=True)
    async with Rsmq(server.url) as other:
        ids = [message.id for message in await other.receive_messages("q", max=100)][1:]
    unknown = outcomes[MAX_IN_FLIGHT:]
    assert ids[:MAX_IN_FLIGHT] == outcomes[:MAX_IN_FLIGHT]
    assert [error.ids for error in unknown if isinstance(error, OutcomeUnknownError)] == [
        [message_id[-22:]] for message_id in ids[MAX_IN_FLIGHT:]
    ]
    assert len(ids) == 20


# --- pop, receive, delete, visibility


async def test_the_first_callers_get_what_was_popped_before_the_connection_broke(server: Server, proxy: Proxy) -> None:
    large = 100_000  # two of them fit one script call
    async with Rsmq(through(proxy)) as rsmq:
        await rsmq.create_queue("q", maxsize=-1)
        await rsmq.send_messages("q", ["x"] * MAX_IN_FLIGHT + ["x" * large] * 6)
        proxy.cut_replies_after(3 * large)  # in the reply to the second call of the batch
        popping = (rsmq.pop_message("q") for _ in range(MAX_IN_FLIGHT + 6))
        outcomes = await asyncio.gather(*popping, return_exceptions=True)
    popped = [outcome for outcome in outcomes if isinstance(outcome, RsmqMessage)]
    assert [len(message.body) for message in popped] == [1] * MAX_IN_FLIGHT + [large] * 2
    assert [type(outcome) for outcome in outcomes[len(popped) :]] == [OutcomeUnknownError] * 4
    assert len(await bodies(server)) == 2


async def test_a_pop_whose_reply_is_lost_is_not_repeated(server: Server, proxy: Proxy) -> None:
    async with Rsmq(through(proxy)) as rsmq:
        await rsmq.create_queue("q")
        await rsmq.send_messages("q", ["lost", "kept"])
        proxy.cut_replies_after(1)
        with pytest.raises(OutcomeUnknownError, match="may have been popped from queue 'q' and lost"):
            await rsmq.pop_message("q")
    assert await bodies(server) == ["kept"]


async def test_a_receive_whose_reply_is_lost_loses_nothing(server: Server, proxy: Proxy) -> None:
    async with Rsmq(through(proxy)) as rsmq:
        await rsmq.create_queue("q")
        first, second = await rsmq.send_messages("q", ["a", "b"])
        proxy.cut_replies_after(1)
        received = await rsmq.receive_message("q", vt=1)
        assert received is not None
        assert received.id == second
        again = await until(lambda: rsmq.receive_message("q", vt=60), "the first comes again")
        assert (again.id, again.rc) == (first, 2)


async def test_a_delete_or_change_whose_reply_is_lost_is_done(server: Server, proxy: Proxy) -> None:
    async with Rsmq(through(proxy)) as rsmq:
        await rsmq.create_queue("q")
        message_id = await rsmq.send_message("q", "x")
        proxy.cut_replies_after(1)
        assert await rsmq.change_message_visibility("q", message_id, 0) is True
        proxy.cut_replies_after(1)
        assert await rsmq.delete_message("q", message_id) is False  # the first attempt deleted it
        assert (await rsmq.get_queue_attributes("q")).msgs == 0


async def test_operations_wait_for_a_server_that_restarts(server: Server, proxy: Proxy) -> None:
    async with Rsmq(through(proxy)) as rsmq:
        await rsmq.create_queue("q")
        proxy.shut()
        await until(lambda: rsmq._client.connection is None, "the connection is lost")
        sending = asyncio.create_task(rsmq.send_message("q", "patience"))
        listing = asyncio.create_task(rsmq.list_queues())
        await asyncio.sleep(0)
        proxy.reopen()
        assert (await asyncio.gather(sending, listing))[1] == ["q"]
    assert await bodies(server) == ["patience"]


async def test_a_missing_server_is_reported_in_time() -> None:
    rsmq = Rsmq(RsmqOptions(url="redis://127.0.0.1:1", patience_secs=0.1))
    with pytest.raises(Unreachable, match=r"127\.0\.0\.1:1"):
        await rsmq.send_message("q", "x")
    with pytest.raises(Unreachable):
        await rsmq.open()


@pytest.mark.parametrize("client", [Rsmq, PooledRsmq])
async def test_a_closed_client_raises_shutdown_error(server: Server, client: type[Rsmq | PooledRsmq]) -> None:
    rsmq = await client.connect(server.url)
    await rsmq.create_queue("q")
    await rsmq.quit()
    with pytest.raises(ShutdownError):
        await rsmq.send_message("q", "x")


def test_a_client_may_be_used_in_one_event_loop_after_another(server: Server) -> None:
    rsmq = Rsmq(server.url)

    async def send_many() -> None:
        await asyncio.gather(*(rsmq.send_message("q", "x") for _ in range(20)))

    asyncio.run(rsmq.create_queue("q"))
    asyncio.run(send_many())
    asyncio.run(send_many())

    async def count() -> int:
        async with rsmq:
            return (await rsmq.get_queue_attributes("q")).msgs

    assert asyncio.run(count()) == 40


def test_calls_in_flight_in_a_closed_event_loop_do_not_block_the_next(server: Server) -> None:
    rsmq = Rsmq(server.url)
    asyncio.run(rsmq.create_queue("q"))
    ended_loop = asyncio.new_event_loop()
    sending: list[asyncio.Task[str]] = []

    async def send() -> str:
        async with asyncio.timeout(10):
            return await rsmq.send_message("q", "x")

    async def start_sending() -> None:
        await rsmq.open()
        sending.extend(asyncio.create_task(send()) for _ in range(2 * MAX_IN_FLIGHT))
        await asyncio.sleep(0.1)

    control = server.client()
    control.client_pause(60_000, all=False)
    try:
        ended_loop.run_until_complete(start_sending())
    finally:
        control.client_unpause()
    assert not any(task.done() for task in sending)
    assert len(asyncio.run(send())) == 32
    asyncio.run(rsmq.close())
    for task in sending:
        task.cancel()
    ended_loop.run_until_complete(asyncio.gather(*sending, return_exceptions=True))
    ended_loop.close()
