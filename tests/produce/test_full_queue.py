"""A full queue: no job is deleted to make room, XLEN reaches exactly the cap, and every refused job is named."""

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
from tampu.errors import Error, OutcomeUnknownError, QueueFullError, ShutdownError
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
    """Add one bulk and return (accepted, refused)."""
    try:
        return list(await producer.add_bulk(payloads)), []
    except QueueFullError as error:
        return list(error.accepted), error.refused


@pytest.mark.servers
@pytest.mark.parametrize("form", ["list", "iterator", "singles", "named"])
async def test_eight_producers_fill_the_queue_exactly_to_its_cap(server: Server | Cluster, form: str) -> None:
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
        if form != "iterator":  # which stops reading its iterator when it is refused
            assert len(set(refused)) == len(refused) == PRODUCERS * 200 - CAP
        # In order: outside of one window, no job is there if an earlier job of its producer was refused.
        for number, (mine, _) in enumerate(outcomes):
            there = [payload[1] for payload in view.payloads() if payload[0] == number]
            assert there == list(range(len(mine)))
        with pytest.raises(QueueFullError) as caught:
            await producers[0].add("one more")
        assert caught.value.code == "CMQ-006"
        assert len(caught.value.refused) == 1
        assert caught.value.refused[0] in str(caught.value)
        # Jobs are accepted as soon as there is room.
        view.client.xtrim(view.keys.stream, maxlen=CAP - 1, approximate=False)
        assert (await producers[7].add("fits")).is_new
        assert view.length() == CAP


def test_eight_processes_fill_the_queue_exactly_to_its_cap(server: Server) -> None:
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
async def test_a_bulk_adds_the_jobs_that_fit_and_names_the_rest(server: Server | Cluster) -> None:
    async with open_producer(server.url, max_stream_len=700) as producer:
        with pytest.raises(QueueFullError, match="300 of 1000 jobs were not added") as caught:
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
        # Every job that was read and not added is named, and no more are read than were in flight.
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
            await producer.add_at_with_id("past", 1, 3)  # it is due now, so it needs room
        view = QueueView(server, "q")
        assert ":dlid:past" not in view.all_keys()
        view.client.delete(view.keys.stream)
        assert (await producer.add_at_with_id("past", 1, 3)).is_new


# --- wait


async def drain(view: QueueView, total: int, cap: int) -> list[Any]:
    """Remove jobs from the front, a few at a time, until this many were removed."""
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


async def test_a_connection_that_breaks_while_waiting_repeats_no_job(
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


async def test_waiting_for_room_has_no_timeout_but_closing_has(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_windows(monkeypatch, 8)
    async with open_producer(server.url, max_stream_len=20, overflow="wait", retry_for_secs=1) as producer:
        bulk = asyncio.ensure_future(producer.add_bulk(range(40)))
        single = asyncio.ensure_future(producer.add("single"))
        view = QueueView(server, "q")
        await until(lambda: view.length() == 20, "the queue is full")
        await asyncio.sleep(1.5)  # longer than the patience for faults
        assert not bulk.done()
        assert not single.done()
        await producer.close()
        with pytest.raises(ShutdownError, match="closed before the server confirmed this job") as caught:
            await bulk
        # The jobs that were added are named, to the last one of the window that was added in part.
        assert list(caught.value.accepted) == view.ids()
        assert view.payloads() == list(range(20))
        with pytest.raises(ShutdownError):
            await single


async def test_a_window_added_in_part_and_then_refused_names_that_part(
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
        # The next window was neither lost nor mistaken for it.
        assert len(caught.value.accepted) == 12
        view.client.delete(view.keys.stream)
        assert (await producer.add("after")).is_new


async def _drained(bulk: asyncio.Future[Any], view: QueueView) -> Any:
    while not bulk.done():
        view.client.delete(view.keys.stream)
        await asyncio.sleep(0.01)
    return await bulk


async def test_only_the_first_window_polls_for_room(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_windows(monkeypatch, 2)
    monkeypatch.setattr("tampu.redis.resend.POLL_SECS", 0.001)
    async with (
        Proxy(server.address) as proxy,
        open_producer(proxy.url, max_stream_len=3, overflow="wait") as producer,
    ):
        bulk = asyncio.ensure_future(producer.add_bulk(range(12)))
        await until(lambda: len(proxy.calls) > 30, "it has asked many times")
        sent = [ids_in(call) for call in proxy.calls]
        # Behind the second window, which was added in part, the third and fourth were sent once.
        assert len({job_id for ids in sent[-20:] for job_id in ids}) == 2
        assert len(sent) - sum(ids == sent[-1] for ids in sent) <= 4
        taken = await drain(QueueView(server, "q"), 12, 3)
        assert [job.id for job in taken] == await bulk
        assert [job.payload for job in taken] == list(range(12))


async def test_a_window_added_in_part_is_not_started_over(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_windows(monkeypatch, 2)
    monkeypatch.setattr("tampu.redis.resend.POLL_SECS", 0.001)
    async with (
        Proxy(server.address) as proxy,
        open_producer(proxy.url, max_stream_len=3, overflow="wait") as producer,
    ):
        view = QueueView(server, "q")
        await producer.add_in(1000, "opens the chain")
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


async def test_a_lost_connection_while_waiting_names_only_unknown_jobs(
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


# --- trim


@pytest.mark.servers
async def test_the_oldest_jobs_are_trimmed_only_with_overflow_trim(server: Server | Cluster) -> None:
    async with open_producer(server.url, max_stream_len=100, overflow="trim") as producer:
        ids = await producer.add_bulk(range(5000))
        view = QueueView(server, "q")
        # Approximately: the server drops whole nodes of the stream.
        assert 100 <= view.length() <= 300
        assert view.ids() == ids[-view.length() :]
