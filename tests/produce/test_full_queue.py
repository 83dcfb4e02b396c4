"""A full queue: nothing is deleted to make room, XLEN meets the cap exactly, and every refused job is named."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import textwrap
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import pytest

from support.producers import ids_in, open_producer, use_small_windows
from support.proxy import Proxy
from support.queues import QueueView
from support.waiting import until
from tampu.config import ProducerConfig
from tampu.errors import ConfigError, Error, OutcomeUnknownError, QueueFullError, ShutdownError
from tampu.produce.options import AddOptions
from tampu.redis.faults import ServerError

if TYPE_CHECKING:
    from servers.cluster import Cluster
    from servers.process import Server
    from tampu.produce.producer import Producer

PRODUCERS = 8
CAP = 1000


# --- reject


async def bulk(producer: Producer[Any], payloads: Any) -> tuple[list[str], list[str]]:
    """(accepted, refused) of one bulk."""
    try:
        return list(await producer.add_bulk(payloads)), []
    except QueueFullError as error:
        return list(error.accepted), error.refused


@pytest.mark.servers
@pytest.mark.parametrize("form", ["list", "iterator", "singles", "named"])
async def test_eight_producers_meet_the_cap_exactly(server: Server | Cluster, form: str) -> None:
    async with AsyncExitStack() as stack:
        producers = [
            await stack.enter_async_context(open_producer(server.url, max_stream_len=CAP)) for _ in range(PRODUCERS)
        ]

        async def attempt(number: int) -> tuple[list[str], list[str]]:
            producer = producers[number]
            payloads = [[number, each] for each in range(200)]
            if form == "list":
                return await bulk(producer, payloads)
            if form == "iterator":
                return await bulk(producer, iter(payloads))
            adds = [
                producer.add(payload)
                if form == "singles"
                else producer.add_with_options(payload, AddOptions(id=str(payload), name="n"))
                for payload in payloads
            ]
            outcomes = await asyncio.gather(*adds, return_exceptions=True)
            accepted = [outcome for outcome in outcomes if isinstance(outcome, str)]
            refused = [outcome.refused[0] for outcome in outcomes if isinstance(outcome, QueueFullError)]
            return accepted, refused

        outcomes = await asyncio.gather(*(attempt(number) for number in range(PRODUCERS)))
        view = QueueView(server, "q")
        assert view.length() == CAP
        accepted = [job_id for accepted, _ in outcomes for job_id in accepted]
        refused = [job_id for _, refused in outcomes for job_id in refused]
        assert len(accepted) == CAP
        assert sorted(view.ids()) == sorted(accepted)
        assert not set(refused) & set(accepted)
        if form != "iterator":  # which stops reading when it is refused
            assert len(set(refused)) == len(refused) == PRODUCERS * 200 - CAP
        # In order: no job of a producer is there while one it added earlier was refused, its own window apart.
        for number, (mine, _) in enumerate(outcomes):
            there = [payload[1] for payload in view.payloads() if payload[0] == number]
            assert there == list(range(len(mine)))
        with pytest.raises(QueueFullError) as caught:
            await producers[0].add("one more")
        assert caught.value.code == "CMQ-006"
        assert len(caught.value.refused) == 1
        assert caught.value.refused[0] in str(caught.value)
        # As soon as there is room, there is room.
        view.client.xtrim(view.keys.stream, maxlen=CAP - 1, approximate=False)
        assert (await producers[7].add("fits")).is_new
        assert view.length() == CAP


def test_eight_processes_meet_the_cap_exactly(server: Server) -> None:
    program = textwrap.dedent("""
        import asyncio, json, sys
        from tampu.config import ProducerConfig
        from tampu.produce.producer import Producer
        from tampu.errors import QueueFullError
        async def main():
            config = ProducerConfig(queue_name="q", max_stream_len=1000)
            async with Producer.connect(sys.argv[1], config) as producer:
                print("ready", flush=True)
                sys.stdin.readline()
                try:
                    accepted, refused = await producer.add_bulk([None] * 200), []
                except QueueFullError as error:
                    accepted, refused = error.accepted, error.refused
                print(json.dumps([list(accepted), refused]))
        asyncio.run(main())
    """)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, server.url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(PRODUCERS)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        outcomes = []
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        outcomes = [json.loads(process.communicate(timeout=30)[0]) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    accepted = [job_id for accepted, _ in outcomes for job_id in accepted]
    refused = [job_id for _, refused in outcomes for job_id in refused]
    assert sorted(QueueView(server, "q").ids()) == sorted(accepted)
    assert len(accepted) == CAP
    assert len(refused) == len(set(refused)) == PRODUCERS * 200 - CAP


@pytest.mark.servers
async def test_a_bulk_takes_from_its_front_what_fits_and_names_the_rest(server: Server | Cluster) -> None:
    async with open_producer(server.url, max_stream_len=700) as producer:
        with pytest.raises(QueueFullError, match="300 of 1000 jobs were refused") as caught:
            await producer.add_bulk(range(1000))
        view = QueueView(server, "q")
        assert view.payloads() == list(range(700))
        assert caught.value.accepted == view.ids()
        assert len(set(caught.value.refused) - set(view.ids())) == 300


async def test_every_refused_job_of_an_iterator_is_named(server: Server) -> None:
    read = 0

    def jobs() -> Any:
        nonlocal read
        for number in range(1_000_000):
            read += 1
            yield number

    async with open_producer(server.url, max_stream_len=700) as producer:
        with pytest.raises(QueueFullError) as caught:
            await producer.add_bulk(jobs())
        assert QueueView(server, "q").ids() == caught.value.accepted
        assert len(caught.value.accepted) == 700
        # All that was read and is not there is named, and no more is read than was under way.
        assert len(set(caught.value.refused)) == read - 700
        assert read < 10_000


@pytest.mark.servers
async def test_delayed_jobs_and_duplicates_need_no_room(server: Server | Cluster) -> None:
    async with open_producer(server.url, max_stream_len=1) as producer:
        await producer.add_with_id("there", 1)
        assert (await producer.add_in(60, 2)).is_new
        assert (await producer.add_in_with_id("later", 60, 2)).is_new
        assert not (await producer.add_with_id("there", 1)).is_new
        with pytest.raises(QueueFullError):
            await producer.add_at_with_id("past", 1, 3)  # its time has come, so it needs room
        view = QueueView(server, "q")
        assert ":dlid:past" not in view.all_keys()
        view.client.delete(view.keys.stream)
        assert (await producer.add_at_with_id("past", 1, 3)).is_new


# --- wait


async def drain(view: QueueView, total: int, cap: int) -> list[Any]:
    """Takes jobs off the front, a few at a time, until so many were taken."""
    taken: list[Any] = []
    while len(taken) < total:
        await until(lambda: view.length() > 0, "there are jobs")
        assert view.length() <= cap
        some = min(7, total - len(taken))
        entries = view.entries()[:some]
        taken += view.jobs()[: len(entries)]
        view.client.xdel(view.keys.stream, *(entry_id for entry_id, _ in entries))
    return taken


@pytest.mark.servers
async def test_waiting_for_room_keeps_the_order_and_the_cap(
    server: Server | Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_small_windows(monkeypatch, 8)
    monkeypatch.setattr("tampu.redis.resend.POLL_SECS", 0.001)
    async with open_producer(server.url, max_stream_len=20, overflow="wait") as producer:
        bulk = asyncio.ensure_future(producer.add_bulk(range(150)))
        taken = await drain(QueueView(server, "q"), 150, 20)
        assert [job.payload for job in taken] == list(range(150))
        assert [job.id for job in taken] == await bulk


async def test_a_connection_that_breaks_while_waiting_for_room_repeats_nothing(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_small_windows(monkeypatch, 8)
    monkeypatch.setattr("tampu.redis.resend.POLL_SECS", 0.001)
    async with (
        Proxy(server.address) as proxy,
        open_producer(proxy.url, max_stream_len=20, overflow="wait") as producer,
    ):
        view = QueueView(server, "q")
        bulk = asyncio.ensure_future(producer.add_bulk(range(150)))
        taken: list[Any] = []
        for size in range(20):
            proxy.cut_requests_after(size * 37) if size % 2 else proxy.cut_replies_after(size)
            taken += await drain(view, 7, 20)
        taken += await drain(view, 150 - len(taken), 20)
        assert [job.payload for job in taken] == list(range(150))
        assert [job.id for job in taken] == await bulk
        assert producer.client.connections_made > 5


async def test_waiting_has_no_end_but_closing_does(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_windows(monkeypatch, 8)
    async with open_producer(server.url, max_stream_len=20, overflow="wait", retry_for_secs=1) as producer:
        bulk = asyncio.ensure_future(producer.add_bulk(range(40)))
        single = asyncio.ensure_future(producer.add("single"))
        view = QueueView(server, "q")
        await until(lambda: view.length() == 20, "the queue is full")
        await asyncio.sleep(1.5)  # longer than any fault is waited out
        assert not bulk.done()
        assert not single.done()
        await producer.close()
        with pytest.raises(ShutdownError, match="closed before this was confirmed") as caught:
            await bulk
        # What had found room is named, to the last job of the window that was taken in part.
        assert list(caught.value.accepted) == view.ids()
        assert view.payloads() == list(range(20))
        with pytest.raises(ShutdownError):
            await single


async def test_a_window_taken_in_part_and_then_refused_tells_which_part(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_small_windows(monkeypatch, 8)
    async with (
        Proxy(server.address) as proxy,
        open_producer(proxy.url, max_stream_len=4, overflow="wait") as producer,
    ):
        bulk = asyncio.ensure_future(producer.add_bulk(range(16)))
        view = QueueView(server, "q")
        await until(lambda: view.length() == 4, "half of the first window found room")
        proxy.refuse("OOM command not allowed")
        view_ids = view.ids()
        await until(lambda: not proxy.link.refusals_left, "the rest is refused")
        view.client.delete(view.keys.stream)
        with pytest.raises(ServerError, match="OOM") as caught:
            await asyncio.wait_for(_drained(bulk, view), 20)
        assert list(caught.value.accepted)[:4] == view_ids
        # The window behind it was not lost with it, nor taken for it.
        assert len(caught.value.accepted) == 12
        view.client.delete(view.keys.stream)
        assert (await producer.add("after")).is_new


async def _drained(bulk: asyncio.Future[Any], view: QueueView) -> Any:
    while not bulk.done():
        view.client.delete(view.keys.stream)
        await asyncio.sleep(0.01)
    return await bulk


async def test_only_the_first_window_asks_for_room_again_and_again(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_small_windows(monkeypatch, 2)
    monkeypatch.setattr("tampu.redis.resend.POLL_SECS", 0.001)
    async with (
        Proxy(server.address) as proxy,
        open_producer(proxy.url, max_stream_len=3, overflow="wait") as producer,
    ):
        bulk = asyncio.ensure_future(producer.add_bulk(range(12)))
        await until(lambda: len(proxy.calls) > 30, "it has asked many times")
        sent = [ids_in(call) for call in proxy.calls]
        # Behind the second, which found room for half of it, the third and the fourth came once.
        assert len({job_id for ids in sent[-20:] for job_id in ids}) == 2
        assert len(sent) - sum(ids == sent[-1] for ids in sent) <= 4
        taken = await drain(QueueView(server, "q"), 12, 3)
        assert [job.id for job in taken] == await bulk
        assert [job.payload for job in taken] == list(range(12))


async def test_a_window_taken_in_part_behind_one_that_is_unknown_is_not_begun_again(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_small_windows(monkeypatch, 2)
    monkeypatch.setattr("tampu.redis.resend.POLL_SECS", 0.001)
    async with (
        Proxy(server.address) as proxy,
        open_producer(proxy.url, max_stream_len=3, overflow="wait") as producer,
    ):
        view = QueueView(server, "q")
        proxy.hold_replies()
        bulk = asyncio.ensure_future(producer.add_bulk(range(4)))
        await until(lambda: view.length() == 3, "the first window is there, and half of the second")
        proxy.next_refusals.append(["NOPERM this user has no permissions"])
        proxy.cut()
        taken = await drain(view, 4, 3)
        with pytest.raises(OutcomeUnknownError) as caught:
            await bulk
        ids = [job.id for job in taken]
        assert caught.value.ids == ids[:2]
        assert list(caught.value.accepted) == ids[2:]
        assert [job.payload for job in taken] == list(range(4))
        after = await producer.add("after")
        assert view.ids() == [after]


async def test_single_adds_wait_for_room_too(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tampu.redis.resend.POLL_SECS", 0.001)
    async with open_producer(server.url, max_stream_len=2, overflow="wait") as producer:
        adds = [asyncio.ensure_future(producer.add(number)) for number in range(10)]
        later = asyncio.ensure_future(producer.add_in(60, "later"))
        taken = await drain(QueueView(server, "q"), 10, 2)
        assert [job.id for job in taken] == await asyncio.gather(*adds)
        await later


async def test_a_lost_connection_while_waiting_names_only_what_is_unknown(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_small_windows(monkeypatch, 8)
    async with (
        Proxy(server.address) as proxy,
        open_producer(proxy.url, max_stream_len=4, overflow="wait", retry_for_secs=1) as producer,
    ):
        bulk = asyncio.ensure_future(producer.add_bulk(range(8)))
        view = QueueView(server, "q")
        await until(lambda: len(proxy.calls) > 3, "it waits for room")
        proxy.shut()
        with pytest.raises(Error) as caught:
            await bulk
        assert list(caught.value.accepted) == view.ids()
        assert len(view.ids()) == 4
        if isinstance(caught.value, OutcomeUnknownError):
            assert len(caught.value.ids) == 4
            assert not set(caught.value.ids) & set(view.ids())


@pytest.mark.parametrize("idempotency", ["idmp", "off"])
def test_waiting_needs_numbered_windows(idempotency: str) -> None:
    with pytest.raises(ConfigError, match="idempotency must be 'sequence' with overflow 'wait'"):
        ProducerConfig(overflow="wait", idempotency=idempotency)  # type: ignore[arg-type]


# --- trim


@pytest.mark.servers
@pytest.mark.parametrize("idempotency", ["sequence", "off"])
async def test_only_if_asked_for_the_oldest_are_trimmed(server: Server | Cluster, idempotency: str) -> None:
    async with open_producer(server.url, max_stream_len=100, overflow="trim", idempotency=idempotency) as producer:
        ids = await producer.add_bulk(range(5000))
        view = QueueView(server, "q")
        # "About": the server drops whole nodes of the stream.
        assert 100 <= view.length() <= 300
        assert view.ids() == ids[-view.length() :]
