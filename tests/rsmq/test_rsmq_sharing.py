"""Many callers on one connection, or on a pool of them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from support.waiting import until
from tampu.errors import OutcomeUnknownError, ShutdownError
from tampu.redis.faults import ConnectionLost
from tampu.rsmq import MessageTooLong, PooledRsmq, PoolOptions, Rsmq
from tampu.rsmq import client as client_module
from tampu.rsmq.lanes import MOST_BYTES, MOST_CALLS, MOST_UNDER_WAY, Lane

if TYPE_CHECKING:
    from collections.abc import Sequence

    from servers.process import Server


class Ferry:
    """Carries what a lane gives it when the test lets it go."""

    def __init__(self) -> None:
        self.loads: list[list[Any]] = []
        self._harbours: list[asyncio.Future[None]] = []

    async def carry(self, items: Sequence[Any]) -> Sequence[Any]:
        self.loads.append(list(items))
        harbour = asyncio.get_running_loop().create_future()
        self._harbours.append(harbour)
        await harbour
        return [ValueError(item) if item == "bad" else f"{item}!" for item in items]

    async def arrive(self, error: BaseException | None = None) -> None:
        """Let the oldest load under way arrive."""
        harbour = self._harbours.pop(0)
        harbour.set_exception(error) if error else harbour.set_result(None)
        for _ in range(4):
            await asyncio.sleep(0)


async def call(lane: Lane[Any, Any], ferry: Ferry, item: Any) -> Any:
    """As a client does: alone if the lane is free, else together with others."""
    if not lane.enter():
        return await lane.join(item)
    try:
        (answer,) = await ferry.carry([item])
    finally:
        lane.leave()
    if isinstance(answer, Exception):
        raise answer
    return answer


async def start(lane: Lane[Any, Any], ferry: Ferry, *items: Any) -> list[asyncio.Task[Any]]:
    tasks = [asyncio.create_task(call(lane, ferry, item)) for item in items]
    await asyncio.sleep(0)
    return tasks


# --- lanes


async def test_the_first_calls_leave_at_once_and_the_others_together() -> None:
    ferry = Ferry()
    lane: Lane[Any, Any] = Lane(ferry.carry)
    calls = await start(lane, ferry, *range(10))
    assert ferry.loads == [[0], [1], [2], [3]]
    for _ in range(MOST_UNDER_WAY - 1):
        await ferry.arrive()
    late = await start(lane, ferry, 10)
    assert len(ferry.loads) == 4  # it may not overtake those who wait, and they go when all are back
    await ferry.arrive()
    assert ferry.loads[4:] == [[4, 5, 6, 7, 8, 9, 10]]
    await ferry.arrive()
    assert await asyncio.gather(*calls, *late) == [f"{number}!" for number in range(11)]
    assert lane.is_idle


async def test_in_a_crowd_those_who_were_just_answered_leave_together_again() -> None:
    ferry = Ferry()
    lane: Lane[Any, Any] = Lane(ferry.carry)

    async def calling_twice(item: int) -> list[Any]:
        return [await call(lane, ferry, item), await call(lane, ferry, item + 10)]

    callers = [asyncio.create_task(calling_twice(item)) for item in range(10)]
    await asyncio.sleep(0)
    for _ in range(MOST_UNDER_WAY):  # these went alone, and wait for the second time
        await ferry.arrive()
    assert ferry.loads[4:] == [[4, 5, 6, 7, 8, 9, 10, 11, 12, 13]]
    await ferry.arrive()
    assert ferry.loads[5:] == [[14, 15, 16, 17, 18, 19]]
    lone = await start(lane, ferry, 20)
    assert len(ferry.loads) == 6  # all but this one are under way
    await ferry.arrive()
    assert ferry.loads[6:] == [[20]]
    await ferry.arrive()
    assert lane.enter()  # the crowd is gone
    lane.leave()
    assert await asyncio.gather(*callers) == [[f"{item}!", f"{item + 10}!"] for item in range(10)]
    assert await asyncio.gather(*lone) == ["20!"]
    assert lane.is_idle


async def test_a_load_is_limited_in_calls_and_in_bytes() -> None:
    ferry = Ferry()
    lane: Lane[Any, Any] = Lane(ferry.carry, weigh=len)
    first = await start(lane, ferry, *["x"] * MOST_UNDER_WAY)
    calls = await start(lane, ferry, *["x"] * (MOST_CALLS + 1), "y" * MOST_BYTES, "z" * (MOST_BYTES + 1), "z")
    while ferry._harbours:
        await ferry.arrive()
    sizes = [[len(item) for item in load] for load in ferry.loads[MOST_UNDER_WAY:]]
    assert sizes == [[1] * MOST_CALLS, [1], [MOST_BYTES], [MOST_BYTES + 1], [1]]
    await asyncio.gather(*first, *calls)


async def test_an_error_of_one_call_is_its_own_and_an_error_of_a_trip_is_everybodys() -> None:
    ferry = Ferry()
    lane: Lane[Any, Any] = Lane(ferry.carry)
    calls = await start(lane, ferry, "bad", "good", "good", "good", "good", "bad", "good")
    while ferry._harbours:
        await ferry.arrive()
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert [isinstance(outcome, ValueError) for outcome in outcomes] == [True, False, False, False, False, True, False]

    lane = Lane(ferry.carry)
    calls = await start(lane, ferry, *range(7))
    await ferry.arrive(OSError("first"))
    for _ in range(MOST_UNDER_WAY - 1):
        await ferry.arrive()
    await ferry.arrive(OSError("the others"))
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert [str(outcome) for outcome in outcomes] == ["first", "1!", "2!", "3!"] + ["the others"] * 3
    assert lane.is_idle


async def test_whoever_is_cancelled_while_waiting_is_not_carried() -> None:
    ferry = Ferry()
    lane: Lane[Any, Any] = Lane(ferry.carry)
    calls = await start(lane, ferry, *range(8))
    calls[5].cancel()
    await asyncio.sleep(0)
    for _ in range(MOST_UNDER_WAY):
        await ferry.arrive()
    assert ferry.loads[4:] == [[4, 6, 7]]
    calls[6].cancel()  # under way: its answer is for nobody
    await asyncio.sleep(0)
    await ferry.arrive()
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert [outcome for outcome in outcomes if isinstance(outcome, str)] == ["0!", "1!", "2!", "3!", "4!", "7!"]
    assert lane.is_idle


async def test_a_lane_whose_waiting_callers_all_went_away_is_free_again() -> None:
    ferry = Ferry()
    lane: Lane[Any, Any] = Lane(ferry.carry)
    calls = await start(lane, ferry, *range(6))
    for call_ in calls[4:]:
        call_.cancel()
    await asyncio.sleep(0)
    for _ in range(MOST_UNDER_WAY):
        await ferry.arrive()
    assert len(ferry.loads) == 4
    assert lane.is_idle
    assert lane.enter()
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
    assert scripts() - before <= 3 * (MOST_UNDER_WAY + 1)
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


async def test_a_lost_trip_tells_each_caller_of_its_own_message(rsmq: Rsmq, monkeypatch: pytest.MonkeyPatch) -> None:
    async def lose(*_: Any) -> list[str]:
        raise OutcomeUnknownError("lost", ids=["one", "two"])

    monkeypatch.setattr(rsmq, "_put", lose)
    answers = await rsmq._put_for_all(rsmq._queues["q"], [(b"x", None), (b"y", None)], None)
    assert [answer.ids for answer in answers if isinstance(answer, OutcomeUnknownError)] == [["one"], ["two"]]


async def test_what_was_taken_reaches_those_who_came_first_when_the_connection_breaks_behind_it(
    rsmq: Rsmq, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = [[b"a", b"", 1, b"1"], [b"b", b"", 1, b"1"]]
    lost = ConnectionLost("lost")

    async def take(queue: Any, vt: Any, most: int) -> tuple[list[Any], float]:
        if most == 5:
            return found, 0.0
        raise lost

    monkeypatch.setattr(rsmq, "_take", take)
    answers = await rsmq._take_for_all(rsmq._queues["q"], "pop", 5)
    assert answers == [(found[0], 0.0), (found[1], 0.0), lost, lost, lost]


async def test_lanes_that_nobody_uses_are_thrown_away(rsmq: Rsmq, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "MOST_LANES", 5)
    await rsmq.create_queue("q")
    for delay in range(20):
        await rsmq.send_message("q", "x", delay=delay)
        assert len(rsmq._lanes) <= 5


# --- a pool


class Connections:
    """How many connections of ours there are more than at the start; other tests may have left some behind."""

    def __init__(self, server: Server) -> None:
        self._client = server.client()
        self._before = self._count()

    def _count(self) -> int:
        return sum(row["name"] == "tampu" for row in self._client.client_list())

    def more(self) -> int:
        return self._count() - self._before


async def test_a_pool_opens_what_it_keeps_ready_and_no_more_than_its_size(server: Server) -> None:
    connections = Connections(server)
    async with PooledRsmq(server.url, PoolOptions(max_size=4, min_idle=2)) as rsmq:
        assert connections.more() == rsmq.pool_size == 2
        await rsmq.create_queue("q", maxsize=-1)
        ids = await asyncio.gather(*(rsmq.send_message("q", "x" * 50_000) for _ in range(30)))
        assert len(set(ids)) == 30
        assert connections.more() == rsmq.pool_size == 4
    await until(lambda: connections.more() == 0, "all are closed")


async def test_a_pool_closes_what_nobody_needs_but_for_what_it_keeps_ready(server: Server) -> None:
    connections = Connections(server)
    async with PooledRsmq(server.url, PoolOptions(max_size=5, min_idle=1, idle_secs=0)) as rsmq:
        await asyncio.gather(*(rsmq.list_queues() for _ in range(5)))
        await rsmq.list_queues()
        await until(lambda: connections.more() == rsmq.pool_size == 1, "one is left")
        assert rsmq._pool.idle == 1


async def test_one_slow_operation_of_a_pool_does_not_hold_up_the_others(server: Server) -> None:
    """What the pool is for: on a shared connection the second would wait."""
    async with PooledRsmq(server.url, PoolOptions(max_size=2)) as rsmq:
        await rsmq.create_queue("q")
        async with rsmq._pool.pipe() as busy:
            blocked = asyncio.create_task(busy.call("BLPOP", "nothing", 30))
            await rsmq.send_message("q", "meanwhile")
            assert not blocked.done()
            blocked.cancel()
            await asyncio.gather(blocked, return_exceptions=True)


async def test_a_pool_that_is_closed_ends_those_who_wait_for_a_connection(server: Server) -> None:
    rsmq = await PooledRsmq.connect(server.url, PoolOptions(max_size=1))
    async with rsmq._pool.pipe():
        waiting = asyncio.create_task(rsmq.list_queues())
        await asyncio.sleep(0)
        await rsmq.close()
    with pytest.raises(ShutdownError):
        await waiting
