"""A producer's life cycle: forks, event loops that end, cancelled callers, and closing with jobs in flight."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import pytest

from servers.process import eventually
from support.producers import open_producer, unopened_producer, use_patience, use_small_windows
from support.proxy import Proxy
from support.queues import QueueView
from support.waiting import until
from tampu.config import ProducerConfig
from tampu.errors import Error, OutcomeUnknownError, ShutdownError
from tampu.produce.adder import Minter
from tampu.produce.producer import Producer
from tampu.redis import client as client_module
from tampu.wire.ulid import decode_ulid_time

if TYPE_CHECKING:
    from pathlib import Path

    from servers.cluster import Cluster
    from servers.process import Server


def run_program(program: str, *arguments: str) -> Any:
    """Run a program in a separate process and return the JSON that it prints."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    return json.loads(done.stdout)


# --- forks

FORK = """
    import asyncio, json, os, sys
    import redis
    from tampu.config import ProducerConfig
    from tampu.produce.producer import Producer

    async def use(producer, who):
        ids = [await producer.add([who, number]) for number in range(20)]
        ids += await producer.add_bulk([[who, number] for number in range(20, 1000)])
        ids += [await producer.add_with_id(f"{who} {number}", [who, number]) for number in range(1000, 1020)]
        assert all(job_id.is_new for job_id in ids)
        return ids

    async def main():
        server = redis.Redis.from_url(sys.argv[1])
        producer = await Producer.connect(sys.argv[1], ProducerConfig(queue_name="q"))
        await producer.add(["before", 0])
        # Some windows are in flight during the fork: the server has them, and their replies are not read yet.
        flying = [asyncio.ensure_future(producer.add_bulk([["flying", n] for n in range(1000)])) for _ in range(2)]
        await asyncio.sleep(0)
        flying.append(asyncio.ensure_future(producer.add(["open window", 0])))
        await asyncio.sleep(0)
        while server.xlen(producer.stream_key) < 500:
            pass
        children = []
        for child in range(3):
            pid = os.fork()
            if pid == 0:
                with open(f"{sys.argv[2]}/{child}", "w") as report:
                    json.dump(asyncio.run(use(producer, f"child {child}")), report)
                os._exit(0)
            children.append(pid)
        ids = await use(producer, "parent")
        for flight in flying:
            result = await flight
            ids += result if isinstance(result, list) else [result]
        for pid in children:
            status = os.waitpid(pid, 0)[1]
            assert status == 0, status
        from_children = [json.load(open(f"{sys.argv[2]}/{child}")) for child in range(3)]
        await producer.close()
        print(json.dumps([ids, *from_children]))

    asyncio.run(main())
"""


def test_after_a_fork_each_process_has_its_own_connection_and_chain(server: Server, tmp_path: Path) -> None:
    view = QueueView(server, "q")
    before = view.connections_made()
    ids = [job_id for its_ids in run_program(FORK, server.url, str(tmp_path)) for job_id in its_ids]
    # Each process has its own socket and has not disturbed its parent's; one more belongs to the program's own client.
    assert view.connections_made() - before == 4 + 1
    assert len(view.chain_keys()) == 3  # the parent has closed its own
    assert len(ids) == len(set(ids)) == 2001 + 4 * 1020
    found = view.ids()
    assert len(found) == len(ids) + 1  # the one before the fork
    assert set(ids) < set(found)
    for name in ("parent", "child 0", "child 1", "child 2"):
        assert [number for who, number in view.payloads() if who == name] == list(range(1020))


MULTIPROCESSING = """
    import asyncio, json, multiprocessing, sys
    from tampu.config import ProducerConfig
    from tampu.produce.producer import Producer
    from tampu.redis.settings import parse_url

    producer = Producer(parse_url(sys.argv[1]), ProducerConfig(queue_name="q"))

    def work(number, answers):
        answers.put(asyncio.run(producer.add_bulk([[number, each] for each in range(500)])))

    if __name__ == "__main__":
        ids = asyncio.run(producer.add_bulk([["parent", each] for each in range(500)]))
        context = multiprocessing.get_context("fork")
        answers = context.Queue()
        processes = [context.Process(target=work, args=(number, answers)) for number in range(3)]
        for process in processes:
            process.start()
        ids += asyncio.run(producer.add_bulk([["parent", each] for each in range(500, 1000)]))
        for process in processes:
            ids += answers.get(timeout=30)
        for process in processes:
            process.join()
            assert process.exitcode == 0
        asyncio.run(producer.close())
        print(json.dumps(ids))
"""


def test_processes_share_a_producer_made_before_they_started(server: Server) -> None:
    ids = run_program(MULTIPROCESSING, server.url)
    assert len(ids) == len(set(ids)) == 2500
    assert sorted(QueueView(server, "q").ids()) == sorted(ids)


def test_a_generated_id_holds_its_time_and_is_unique() -> None:
    minter = Minter(now_ms=lambda: 1794770167273, random_bytes=bytes)
    assert minter.mint() == ("01M7GA6SF90000000000000000", 1794770167273)
    (one, made_at_ms), (other, _) = Minter().mint(), Minter().mint()
    assert decode_ulid_time(one) == made_at_ms
    assert one != other


def test_a_child_of_a_fork_does_not_generate_its_parents_ids(server: Server) -> None:
    generated = run_program(
        """
        import json, os, sys
        from tampu.produce.adder import Minter
        minter = Minter(now_ms=lambda: 1)
        minter.mint()  # the block of random bits is drawn
        read_end, write_end = os.pipe()
        if os.fork() == 0:
            os.write(write_end, minter.mint()[0].encode())
            os._exit(0)
        os.wait()
        print(json.dumps([minter.mint()[0], os.read(read_end, 100).decode()]))
        """
    )
    assert generated[0] != generated[1]


# --- event loops


def test_a_producer_is_used_on_one_event_loop_after_another(server: Server) -> None:
    producer = unopened_producer(server.url)
    ids: list[str] = []

    async def use(number: int) -> None:
        ids.append(await producer.add(number))
        ids.extend(await producer.add_bulk([number] * 600))

    for number in range(3):
        asyncio.run(use(number))
    # The connections of loops that have ended are closed.
    eventually(lambda: len(QueueView(server, "q").connections()) == 1, "one connection is left")
    asyncio.run(producer.close())
    view = QueueView(server, "q")
    assert view.ids() == ids
    assert view.payloads() == [number for number in range(3) for _ in range(601)]


def test_adds_in_flight_when_their_loop_ends_do_not_affect_the_next(server: Server) -> None:
    producer = unopened_producer(server.url)

    async def leave() -> None:
        await producer.open()
        left = [asyncio.ensure_future(producer.add_bulk([f"left {number}"] * 300)) for number in range(5)]
        await asyncio.sleep(0)  # the loop ends with windows in flight, some not even sent
        assert not any(bulk.done() for bulk in left)

    asyncio.run(leave())

    async def use() -> list[str]:
        ids = await producer.add_bulk(range(600))
        await producer.close()
        return ids

    ids = asyncio.run(use())
    view = QueueView(server, "q")
    assert [job.id for job in view.jobs() if isinstance(job.payload, int)] == ids
    assert len(set(view.ids())) == view.length()


def test_a_producer_may_be_closed_on_another_loop(server: Server) -> None:
    producer = unopened_producer(server.url)
    asyncio.run(producer.add(1))
    asyncio.run(producer.close())
    eventually(lambda: QueueView(server, "q").connections() == [], "no connection is left")
    with pytest.raises(ShutdownError):
        asyncio.run(producer.add(2))


def test_an_open_window_of_a_loop_that_ended_is_not_sent_by_the_next(server: Server) -> None:
    producer = unopened_producer(server.url)

    async def leave() -> None:
        await producer.add("first")
        left = [asyncio.ensure_future(producer.add("flying"))]
        await asyncio.sleep(0)
        left.append(asyncio.ensure_future(producer.add("open")))
        await asyncio.sleep(0)
        assert not any(add.done() for add in left)
        asyncio.get_running_loop().stop()
        await asyncio.Event().wait()

    loop = asyncio.new_event_loop()
    main = loop.create_task(leave())
    loop.run_forever()
    main.cancel()
    pending = asyncio.all_tasks(loop)
    asyncio.run(producer.add("next"))
    for task in pending:
        task.cancel()
    loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
    loop.close()
    asyncio.run(producer.close())
    assert [payload for payload in QueueView(server, "q").payloads() if payload != "flying"] == ["first", "next"]


# --- cancelled callers


async def test_cancelling_callers_affects_no_other_add(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_windows(monkeypatch, 4)
    async with Proxy(server.address) as proxy, open_producer(proxy.url) as producer:
        await producer.add_in(1000, "opens the chain")
        proxy.hold_replies()
        adds = [asyncio.ensure_future(producer.add(number)) for number in range(20)]
        bulk = asyncio.ensure_future(producer.add_bulk(range(100, 120)))
        await until(lambda: len(proxy.calls) > 1, "some are in flight")
        for add in adds[::2]:
            add.cancel()
        bulk.cancel()
        await asyncio.sleep(0)
        proxy.resume()
        kept = await asyncio.gather(*adds[1::2])
        outcomes = await asyncio.gather(*adds[::2], bulk, return_exceptions=True)
        assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)
        after = await producer.add("after")
        view = QueueView(server, "q")
        # Cancelling a caller does not remove its jobs.
        assert view.payloads() == [*range(20), *range(100, 120), "after"]
        assert set(kept) < set(view.ids())
        assert view.ids()[-1] == after


async def test_a_caller_cancelled_while_the_connection_is_down(server: Server) -> None:
    async with Proxy(server.address) as proxy, open_producer(proxy.url) as producer:
        proxy.shut()
        await until(lambda: producer.client.connection is None, "the cut is noticed")
        adds = [asyncio.ensure_future(producer.add(number)) for number in range(3)]
        await asyncio.sleep(0)
        adds[1].cancel()
        proxy.reopen()
        assert len(await asyncio.gather(adds[0], adds[2])) == 2
        assert QueueView(server, "q").payloads() == [0, 1, 2]


async def test_an_iterator_that_raises_leaves_a_producer_that_works(server: Server) -> None:
    def jobs() -> Any:
        yield from range(700)
        raise LookupError("the database went away")

    async with open_producer(server.url) as producer:
        with pytest.raises(LookupError, match="the database went away"):
            await producer.add_bulk(jobs())
        job_id = await producer.add("after")
        view = QueueView(server, "q")
        assert view.payloads() == [*range(512), "after"]
        assert view.ids()[-1] == job_id


# --- closing


async def test_closing_waits_for_adds_in_flight(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_windows(monkeypatch, 4)
    async with Proxy(server.address) as proxy, open_producer(proxy.url) as producer:
        await producer.add_in(1000, "opens the chain")
        proxy.hold_replies()
        adds = [asyncio.ensure_future(producer.add(number)) for number in range(40)]
        bulk = asyncio.ensure_future(producer.add_bulk(range(40, 80)))
        await asyncio.sleep(0)
        closing = asyncio.ensure_future(producer.close())
        await until(lambda: QueueView(server, "q").length() > 0, "the first have arrived")
        assert not closing.done()
        proxy.resume()
        await closing
        ids = [*(await asyncio.gather(*adds)), *(await bulk)]
    assert QueueView(server, "q").ids() == ids


async def test_closing_without_a_server_fails_the_waiting_adds(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "LAST_BACKOFF_SECS", 0.01)
    async with Proxy(server.address) as proxy, open_producer(proxy.url, retry_for_secs=1) as producer:
        await producer.add_in(1000, "opens the chain")
        proxy.hold_replies()
        sent = asyncio.ensure_future(producer.add("sent"))
        await until(lambda: QueueView(server, "q").length() == 1, "it has arrived")
        proxy.shut()
        await until(lambda: producer.client.connection is None, "the cut is noticed")
        waiting = asyncio.ensure_future(producer.add("waiting"))
        await asyncio.sleep(0)
        async with asyncio.timeout(10):
            await producer.close()
        outcome, failure = await asyncio.gather(sent, waiting, return_exceptions=True)
        assert isinstance(outcome, OutcomeUnknownError)
        assert outcome.ids == QueueView(server, "q").ids()
        assert isinstance(failure, Error)
        assert not isinstance(failure, OutcomeUnknownError)


async def test_closing_during_silence_names_jobs_that_may_be_added(server: Server) -> None:
    async with Proxy(server.address) as proxy, open_producer(proxy.url, retry_for_secs=1) as producer:
        await producer.add_in(1000, "opens the chain")
        proxy.hold_replies()
        add = asyncio.ensure_future(producer.add("sent"))
        view = QueueView(server, "q")
        await until(lambda: view.length() == 1, "it has arrived")
        await producer.close()
        with pytest.raises(OutcomeUnknownError, match="closed before the server confirmed this job") as caught:
            await add
        assert caught.value.ids == view.ids()


@pytest.mark.servers
async def test_closing_deletes_the_state_of_the_chain(server: Server | Cluster) -> None:
    view = QueueView(server, "q")
    async with open_producer(server.url) as producer:
        await producer.add("job")
        assert len(view.chain_keys()) == 1
    assert view.chain_keys() == []


async def test_closing_keeps_the_chain_of_a_job_without_a_reply(server: Server) -> None:
    view = QueueView(server, "q")
    async with Proxy(server.address) as proxy, open_producer(proxy.url, retry_for_secs=1) as producer:
        await producer.add("before")
        proxy.hold_replies()
        add = asyncio.ensure_future(producer.add("sent"))
        await until(lambda: view.length() == 2, "it has arrived")
        await producer.close()
        with pytest.raises(OutcomeUnknownError):
            await add
        assert len(view.chain_keys()) == 1


async def test_closing_does_not_wait_for_a_silent_server(server: Server) -> None:
    async with Proxy(server.address) as proxy, open_producer(proxy.url, retry_for_secs=600) as producer:
        await producer.add("before")
        proxy.hold_requests()
        async with asyncio.timeout(10):
            await producer.close()


async def test_closing_takes_no_longer_than_the_adds_it_waits_for(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_patience(monkeypatch, 0.2)
    async with Proxy(server.address) as proxy, open_producer(proxy.url, retry_for_secs=600) as producer:
        proxy.shut()
        await until(lambda: producer.client.connection is None, "the cut is noticed")
        waiting = asyncio.ensure_future(producer.add("waiting"))
        await asyncio.sleep(0)
        async with asyncio.timeout(20):
            await producer.close()
        with pytest.raises(Error):
            await waiting


async def test_a_producer_may_be_closed_twice_and_then_raises(server: Server) -> None:
    async with open_producer(server.url) as producer:
        await producer.add(1)
        await asyncio.gather(producer.close(), producer.close())
        await producer.close()
        calls = [
            producer.add(1),
            producer.add_bulk([1]),
            producer.add_in(5, 1),
            producer.cancel_delayed("x"),
            producer.peek_dlq(),
            producer.replay_dlq(),
            producer.remove_dlq(),
            producer.list_repeatable(),
            producer.remove_repeatable("x"),
            producer.get_result("x"),
            producer.open(),
        ]
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(outcome, ShutdownError)
            assert outcome.code == "CMQ-005"
    eventually(lambda: QueueView(server, "q").connections() == [], "no connection is left")


async def test_a_producer_that_was_never_used_can_be_closed(server: Server) -> None:
    producer = unopened_producer(server.url)
    await producer.close()
    eventually(lambda: QueueView(server, "q").connections() == [], "no connection is left")


async def test_a_producer_that_cannot_connect_leaves_nothing_behind() -> None:
    config = ProducerConfig(retry_for_secs=1)
    with pytest.raises(Error, match="no connection to") as caught:
        await Producer.connect("redis://127.0.0.1:1", config)
    assert caught.value.code == "CMQ-001"
    assert not [task for task in asyncio.all_tasks() if "tampu" in task.get_name()]


async def test_an_add_connects_if_need_be(server: Server) -> None:
    producer = unopened_producer(server.url)
    assert QueueView(server, "q").length() == 0
    job_id = await producer.add(1)
    assert QueueView(server, "q").ids() == [job_id]
    await producer.close()
