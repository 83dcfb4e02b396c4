"""Many callers on one connection, or on a connection pool."""

from __future__ import annotations

import asyncio
import gc
from typing import TYPE_CHECKING, Any

import pytest

from support.proxy import Proxy
from support.waiting import until
from tampu.base.checks import MAX_CALL_BYTES, MAX_CALL_ENTRIES
from tampu.errors import ShutdownError
from tampu.rsmq import MessageTooLong, PooledRsmq, PoolOptions, Rsmq
from tampu.rsmq import client as client_module
from tampu.rsmq.send import MAX_IN_FLIGHT, Batcher

if TYPE_CHECKING:
    from collections.abc import Sequence

    from servers.process import Server


class HeldCalls:
    """Holds batches until the test replies."""

    def __init__(self) -> None:
        self.batches: list[list[Any]] = []
        self.waiting: list[asyncio.Future[None]] = []

    async def send_batch(self, items: Sequence[Any]) -> Sequence[Any]:
        self.batches.append(list(items))
        reply = asyncio.get_running_loop().create_future()
        self.waiting.append(reply)
        await reply
        return [ValueError(item) if item == "bad" else f"{item}!" for item in items]

    async def reply(self, error: BaseException | None = None) -> None:
        """Reply to the oldest batch in flight."""
        reply = self.waiting.pop(0)
        reply.set_exception(error) if error else reply.set_result(None)
        for _ in range(4):
            await asyncio.sleep(0)


async def call(batcher: Batcher[Any, Any], held: HeldCalls, item: Any) -> Any:
    """Call as a client does: alone if the batcher is free, else in a batch."""
    if not batcher.start_alone():
        return await batcher.join(item)
    try:
        (answer,) = await held.send_batch([item])
    finally:
        batcher.finish()
    if isinstance(answer, Exception):
        raise answer
    return answer


async def start(batcher: Batcher[Any, Any], held: HeldCalls, *items: Any) -> list[asyncio.Task[Any]]:
    tasks = [asyncio.create_task(call(batcher, held, item)) for item in items]
    await asyncio.sleep(0)
    return tasks


# --- batches


async def test_the_first_calls_are_sent_at_once_and_the_others_together() -> None:
    held = HeldCalls()
    batcher: Batcher[Any, Any] = Batcher(held.send_batch)
    calls = await start(batcher, held, *range(10))
    assert held.batches == [[0], [1], [2], [3]]
    for _ in range(MAX_IN_FLIGHT - 1):
        await held.reply()
    late = await start(batcher, held, 10)
    assert len(held.batches) == 4  # it must not overtake waiting calls, which are sent when all in flight are back
    await held.reply()
    assert held.batches[4:] == [[4, 5, 6, 7, 8, 9, 10]]
    await held.reply()
    assert await asyncio.gather(*calls, *late) == [f"{number}!" for number in range(11)]
    assert batcher.is_idle


async def test_under_load_callers_that_just_got_a_reply_are_batched_again() -> None:
    held = HeldCalls()
    batcher: Batcher[Any, Any] = Batcher(held.send_batch)

    async def calling_twice(item: int) -> list[Any]:
        return [await call(batcher, held, item), await call(batcher, held, item + 10)]

    callers = [asyncio.create_task(calling_twice(item)) for item in range(10)]
    await asyncio.sleep(0)
    for _ in range(MAX_IN_FLIGHT):  # these were sent alone and now wait for their second call
        await held.reply()
    assert held.batches[4:] == [[4, 5, 6, 7, 8, 9, 10, 11, 12, 13]]
    await held.reply()
    assert held.batches[5:] == [[14, 15, 16, 17, 18, 19]]
    lone = await start(batcher, held, 20)
    assert len(held.batches) == 6  # all but this one are in flight
    await held.reply()
    assert held.batches[6:] == [[20]]
    await held.reply()
    assert batcher.start_alone()  # there is no load any more
    batcher.finish()
    assert await asyncio.gather(*callers) == [[f"{item}!", f"{item + 10}!"] for item in range(10)]
    assert await asyncio.gather(*lone) == ["20!"]
    assert batcher.is_idle


async def test_a_batch_is_limited_in_calls_and_in_bytes() -> None:
    held = HeldCalls()
    batcher: Batcher[Any, Any] = Batcher(held.send_batch, size_of=len)
    first = await start(batcher, held, *["x"] * MAX_IN_FLIGHT)
    calls = await start(
        batcher, held, *["x"] * (2 * MAX_CALL_ENTRIES), "y" * MAX_CALL_BYTES, "z" * (MAX_CALL_BYTES + 1), "z"
    )
    while held.waiting:
        await held.reply()
    sizes = [[len(item) for item in batch] for batch in held.batches[MAX_IN_FLIGHT:]]
    assert sizes == [*[[1] * MAX_CALL_ENTRIES] * 2, [MAX_CALL_BYTES], [MAX_CALL_BYTES + 1], [1]]
    await asyncio.gather(*first, *calls)


async def test_many_calls_are_sent_as_two_batches_of_the_same_size() -> None:
    held = HeldCalls()
    batcher: Batcher[Any, Any] = Batcher(held.send_batch)
    calls = await start(batcher, held, *range(MAX_IN_FLIGHT + 100))
    for _ in range(MAX_IN_FLIGHT):
        await held.reply()
    assert [len(batch) for batch in held.batches[MAX_IN_FLIGHT:]] == [51, 49]
    # The callers of the first one call again: they need not wait for the second.
    await held.reply()
    calls += await start(batcher, held, *range(51))
    await until(lambda: len(held.batches) > MAX_IN_FLIGHT + 2, "they are sent")
    assert [len(batch) for batch in held.batches[MAX_IN_FLIGHT + 2 :]] == [50]
    while held.waiting:
        await held.reply()
    assert [item for batch in held.batches for item in batch] == [*range(MAX_IN_FLIGHT + 100), *range(51)]
    await asyncio.gather(*calls)
    assert batcher.is_idle


async def test_a_calls_error_affects_one_caller_and_a_batchs_error_all() -> None:
    held = HeldCalls()
    batcher: Batcher[Any, Any] = Batcher(held.send_batch)
    calls = await start(batcher, held, "bad", "good", "good", "good", "good", "bad", "good")
    while held.waiting:
        await held.reply()
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert [isinstance(outcome, ValueError) for outcome in outcomes] == [True, False, False, False, False, True, False]

    batcher = Batcher(held.send_batch)
    calls = await start(batcher, held, *range(7))
    await held.reply(OSError("first"))
    for _ in range(MAX_IN_FLIGHT - 1):
        await held.reply()
    await held.reply(OSError("the others"))
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert [str(outcome) for outcome in outcomes] == ["first", "1!", "2!", "3!"] + ["the others"] * 3
    assert batcher.is_idle


async def test_a_caller_cancelled_while_waiting_is_not_sent() -> None:
    held = HeldCalls()
    batcher: Batcher[Any, Any] = Batcher(held.send_batch)
    calls = await start(batcher, held, *range(8))
    calls[5].cancel()
    await asyncio.sleep(0)
    for _ in range(MAX_IN_FLIGHT):
        await held.reply()
    assert held.batches[4:] == [[4, 6, 7]]
    calls[6].cancel()  # in flight: its reply is dropped
    await asyncio.sleep(0)
    await held.reply()
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert [outcome for outcome in outcomes if isinstance(outcome, str)] == ["0!", "1!", "2!", "3!", "4!", "7!"]
    assert batcher.is_idle


async def test_a_batcher_whose_callers_were_all_cancelled_is_free_again() -> None:
    held = HeldCalls()
    batcher: Batcher[Any, Any] = Batcher(held.send_batch)
    calls = await start(batcher, held, *range(6))
    for call_ in calls[4:]:
        call_.cancel()
    await asyncio.sleep(0)
    for _ in range(MAX_IN_FLIGHT):
        await held.reply()
    assert len(held.batches) == 4
    assert batcher.is_idle
    assert batcher.start_alone()
    await asyncio.gather(*calls, return_exceptions=True)


# --- one connection


async def test_a_hundred_callers_need_a_few_scripts(rsmq: Rsmq, server: Server) -> None:
    client = server.client()

    def scripts() -> int:
        return int(client.info("commandstats").get("cmdstat_evalsha", {}).get("calls", 0))

    await rsmq.create_queue("q")
    before = scripts()
    ids = await asyncio.gather(*(rsmq.send_message("q", str(number)) for number in range(100)))
    received = await asyncio.gather(*(rsmq.receive_message("q") for _ in range(100)))
    assert [message.id for message in received if message] == ids
    deleted = await asyncio.gather(*(rsmq.delete_message("q", message_id) for message_id in [*ids, "a" * 32]))
    assert deleted == [True] * 100 + [False]
    assert scripts() - before <= 3 * (MAX_IN_FLIGHT + 2)
    assert (await rsmq.get_queue_attributes("q")).msgs == 0


async def test_a_message_too_long_is_refused_and_its_neighbours_are_sent(rsmq: Rsmq) -> None:
    await rsmq.create_queue("q", maxsize=1024)
    bodies = ["x" * 2000 if number % 10 == 5 else str(number) for number in range(60)]
    outcomes = await asyncio.gather(*(rsmq.send_message("q", body) for body in bodies), return_exceptions=True)
    assert [isinstance(outcome, MessageTooLong) for outcome in outcomes] == [len(body) > 1024 for body in bodies]
    received = await rsmq.receive_messages("q", max=100)
    assert [message.message for message in received] == [body for body in bodies if len(body) <= 1024]
    assert [message.id for message in received] == [outcome for outcome in outcomes if isinstance(outcome, str)]


@pytest.mark.parametrize("operation", ["receive_message", "pop_message"])
async def test_more_callers_than_messages_get_what_there_is(rsmq: Rsmq, operation: str) -> None:
    await rsmq.create_queue("q")
    ids = await rsmq.send_messages("q", [str(number) for number in range(30)])
    received = await asyncio.gather(*(getattr(rsmq, operation)("q") for _ in range(80)))
    assert [message.id for message in received if message] == ids
    assert received[30:] == [None] * 50


async def test_large_messages_reach_all_of_many_callers(rsmq: Rsmq) -> None:
    await rsmq.create_queue("q", maxsize=-1)
    body = "x" * 100_000
    ids = await asyncio.gather(*(rsmq.send_message("q", body) for _ in range(20)))
    popped = await asyncio.gather(*(rsmq.pop_message("q") for _ in range(20)))
    assert [message.id for message in popped if message] == ids


@pytest.mark.slow
async def test_idle_batchers_are_dropped(rsmq: Rsmq, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "MAX_BATCHERS", 5)
    await rsmq.create_queue("q")
    gc.collect()

    def count() -> int:
        return sum(type(each) is Batcher for each in gc.get_objects())

    before = count()
    for delay in range(20):
        await rsmq.send_message("q", "x", delay=delay)
        assert count() <= before + 5


# --- a pool


class Connections:
    """Counts tampu's connections since the start of the test; earlier tests may have left some open."""

    def __init__(self, server: Server) -> None:
        self._client = server.client()
        self._before = self._count()

    def _count(self) -> int:
        return sum(row["name"] == "tampu" for row in self._client.client_list())

    def more(self) -> int:
        return self._count() - self._before

    def ever_made(self) -> int:
        return int(self._client.info("stats")["total_connections_received"])


async def test_a_pool_opens_min_idle_and_at_most_max_size_connections(server: Server) -> None:
    connections = Connections(server)
    async with PooledRsmq(server.url, PoolOptions(max_size=4, min_idle=2)) as rsmq:
        assert connections.more() == rsmq.pool_size == 2
        await rsmq.create_queue("q", maxsize=-1)
        ids = await asyncio.gather(*(rsmq.send_message("q", "x" * 50_000) for _ in range(30)))
        assert len(set(ids)) == 30
        assert connections.more() == rsmq.pool_size == 4
    await until(lambda: connections.more() == 0, "all are closed")


async def test_a_pool_closes_idle_connections_down_to_min_idle(server: Server) -> None:
    connections = Connections(server)
    async with PooledRsmq(server.url, PoolOptions(max_size=5, min_idle=1, idle_secs=0)) as rsmq:
        await asyncio.gather(*(rsmq.list_queues() for _ in range(5)))
        await rsmq.list_queues()
        await until(lambda: connections.more() == rsmq.pool_size == 1, "one is left")
        made = connections.ever_made()
        await rsmq.list_queues()
        assert connections.ever_made() == made  # the remaining connection is reused


async def test_a_slow_operation_of_a_pool_does_not_block_the_others(server: Server) -> None:
    """On a shared connection the second operation would wait for the first."""
    async with Proxy(server.address) as proxy, PooledRsmq(proxy.url, PoolOptions(max_size=2)) as rsmq:
        await rsmq.create_queue("q")
        first = proxy.link
        first.replies_held = True
        slow = asyncio.create_task(rsmq.list_queues())
        await until(lambda: b"SMEMBERS" in first.commands, "the first operation is in flight")
        await rsmq.send_message("q", "meanwhile")
        assert not slow.done()
        first.resume()
        assert await slow == ["q"]


async def test_closing_a_pool_ends_operations_that_wait_for_a_connection(server: Server) -> None:
    async with Proxy(server.address) as proxy:
        rsmq = await PooledRsmq.connect(proxy.url, PoolOptions(max_size=1))
        proxy.hold_replies()
        calls = [asyncio.create_task(rsmq.list_queues()) for _ in range(2)]
        await until(lambda: b"SMEMBERS" in proxy.link.commands, "one is in flight, the other waits")
        await rsmq.close()
        for call in calls:
            with pytest.raises(ShutdownError):
                await call
