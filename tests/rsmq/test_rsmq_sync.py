"""`RsmqSync`: synchronous code, threads and forks."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from tampu.base.event_loop import LoopThread
from tampu.errors import ShutdownError
from tampu.rsmq import InvalidFormat, QueueNotFound, RsmqConnectionSync, RsmqOptions, RsmqSync

if TYPE_CHECKING:
    from collections.abc import Iterator

    from servers.process import Server


@pytest.fixture
def rsmq_sync(options: RsmqOptions) -> Iterator[RsmqSync]:
    with RsmqSync(options) as rsmq:
        yield rsmq


@pytest.mark.servers
def test_all_operations_work_without_an_event_loop(rsmq_sync: RsmqSync) -> None:
    rsmq = rsmq_sync
    assert rsmq.create_queue("q", vt=5)
    assert rsmq.list_queues() == ["q"]
    message_id = rsmq.send_message("q", "hello")
    received = rsmq.receive_message("q")
    assert received is not None
    assert (received.id, received.message) == (message_id, "hello")
    assert rsmq.change_message_visibility("q", message_id, 0)
    popped = rsmq.pop_message("q")
    assert popped is not None
    assert popped.rc == 2
    assert rsmq.delete_message("q", message_id) is False
    ids = rsmq.send_messages("q", ["a", "b", "c"])
    assert [message.id for message in rsmq.receive_messages("q", max=2)] == ids[:2]
    assert rsmq.delete_messages("q", ids) == 3
    assert rsmq.set_queue_attributes("q", vt=7).vt == 7
    assert rsmq.get_queue_attributes("q").totalsent == 4
    assert rsmq.delete_queue("q")
    with pytest.raises(QueueNotFound):
        rsmq.pop_message("q")
    with pytest.raises(InvalidFormat):
        rsmq.send_message("a b", "x")


def test_the_synchronous_client_implements_the_protocol(rsmq_sync: RsmqSync) -> None:
    def accepts(connection: RsmqConnectionSync) -> None:
        assert isinstance(connection, RsmqConnectionSync)

    accepts(rsmq_sync)


def test_messages_may_be_of_any_type(rsmq_sync: RsmqSync) -> None:
    rsmq_sync.create_queue("q")
    rsmq_sync.send_message("q", {"n": 1}, encoder=json.dumps)
    rsmq_sync.send_messages("q", [{"n": 2}], encoder=json.dumps)
    received = rsmq_sync.receive_messages("q", decoder=json.loads)
    assert [message.message["n"] for message in received] == [1, 2]
    rsmq_sync.send_message("q", b"\xff")
    popped = rsmq_sync.pop_message("q", decoder=bytes)
    assert popped is not None
    assert popped.message == b"\xff"


def test_receiving_deletes_when_the_block_succeeds_only(rsmq_sync: RsmqSync) -> None:
    rsmq_sync.create_queue("q")
    rsmq_sync.send_message("q", "x")
    with pytest.raises(ZeroDivisionError), rsmq_sync.receiving("q", vt=0):
        raise ZeroDivisionError
    with rsmq_sync.receiving("q") as message:
        assert message is not None
        assert message.rc == 2
    with rsmq_sync.receiving("q") as message:
        assert message is None
    assert rsmq_sync.get_queue_attributes("q").msgs == 0


def test_listening_is_an_iterator(server: Server) -> None:
    with RsmqSync(RsmqOptions(url=server.url, realtime=True)) as rsmq:
        rsmq.create_queue("q")
        rsmq.send_messages("q", ["a", "b"])
        heard = []
        for message in rsmq.listen("q", poll_secs=3600):
            heard.append(message.message)
            rsmq.delete_message("q", message.id)
            if message.message == "b":
                threading.Timer(0.05, rsmq.send_message, ("q", "c")).start()
            if message.message == "c":
                break
        assert heard == ["a", "b", "c"]


def test_listening_ends_when_another_thread_closes_the_client(server: Server) -> None:
    rsmq = RsmqSync.connect(server.url)
    rsmq.create_queue("q")
    rsmq.send_message("q", "x")
    messages = rsmq.listen("q", poll_secs=3600)
    next(messages)
    closing = threading.Timer(0.05, rsmq.close)
    closing.start()
    assert list(messages) == []
    closing.join()


def test_listening_ends_when_the_client_was_closed_between_two_messages(server: Server) -> None:
    rsmq = RsmqSync.connect(server.url)
    rsmq.create_queue("q")
    rsmq.send_messages("q", ["a", "b"])
    messages = rsmq.listen("q")
    assert next(messages).message == "a"
    rsmq.close()
    assert list(messages) == []


def test_threads_share_one_client(rsmq_sync: RsmqSync) -> None:
    rsmq_sync.create_queue("q")
    with ThreadPoolExecutor(8) as threads:
        ids = list(threads.map(lambda number: rsmq_sync.send_message("q", str(number)), range(200)))
        received = list(threads.map(lambda _: rsmq_sync.receive_message("q"), range(200)))
    assert sorted(message.id for message in received if message) == sorted(ids)


def test_closing_a_client_ends_its_thread_and_later_calls_raise(server: Server) -> None:
    before = threading.active_count()
    rsmq = RsmqSync.connect(server.url)
    assert threading.active_count() == before + 1
    rsmq.quit()
    assert threading.active_count() == before
    with pytest.raises(ShutdownError):
        rsmq.list_queues()
    rsmq.close()
    assert threading.active_count() == before


def test_stopping_the_loop_releases_waiting_threads() -> None:
    loop = LoopThread()
    started = threading.Event()
    outcomes: list[BaseException] = []

    async def never() -> None:
        started.set()
        await asyncio.Event().wait()

    def wait() -> None:
        try:
            loop.run(never())
        except BaseException as error:
            outcomes.append(error)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    started.wait(30)
    loop.stop()
    waiting.join(30)
    assert [type(outcome) for outcome in outcomes] == [CancelledError]


def in_child(work: Any) -> dict[str, Any]:
    """Return the result of `work` in a forked child, or the error it raised."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            answer = {"answer": work()}
        except BaseException as error:
            answer = {"error": repr(error)}
        os.write(writing, json.dumps(answer).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return json.loads(said)


# Python 3.12 and later warn about forking a process with threads; these tests show that it works here.
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_opens_its_own_connection(rsmq_sync: RsmqSync, server: Server) -> None:
    rsmq_sync.create_queue("q")
    rsmq_sync.send_message("q", "of the parent")
    connected_before = server.client().info("stats")["total_connections_received"]

    def work() -> list[str]:
        return [rsmq_sync.send_message("q", "of the child") for _ in range(50)]

    children = in_child(work)["answer"]
    own = [rsmq_sync.send_message("q", "of the parent") for _ in range(50)]
    assert server.client().info("stats")["total_connections_received"] > connected_before
    assert len({message_id[10:] for message_id in [*children, *own]}) == 100  # no random part twice
    assert rsmq_sync.get_queue_attributes("q").msgs == 101


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_while_other_threads_are_sending_is_safe(rsmq_sync: RsmqSync) -> None:
    rsmq_sync.create_queue("q")
    stop = threading.Event()
    sent: list[str] = []

    def send() -> None:
        while not stop.is_set():
            sent.append(rsmq_sync.send_message("q", "x"))

    threads = [threading.Thread(target=send) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        answers = [in_child(lambda: rsmq_sync.send_message("q", "y")) for _ in range(5)]
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert all("answer" in answer for answer in answers), answers
    assert rsmq_sync.get_queue_attributes("q").msgs == len(sent) + 5
