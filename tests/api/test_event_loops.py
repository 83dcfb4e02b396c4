"""A module-level queue used by one event loop after another, and a queue without an installed server."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
import warnings
from typing import TYPE_CHECKING, Any

import pytest

from api.workers import working
from support.queues import QueueView
from tampu import Queue

if TYPE_CHECKING:
    from servers.process import Server


def test_a_queue_can_be_used_by_one_event_loop_after_another(server: Server) -> None:
    queue = Queue("q", url=server.url)

    @queue.task
    async def double(number: int) -> int:
        return 2 * number

    async def once(number: int) -> int:
        async with working(queue):
            return await (await double.add(number)).result(20)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [asyncio.run(once(number)) for number in range(3)] == [0, 2, 4]
        asyncio.run(queue.close())
    assert [str(one.message) for one in caught if "never awaited" in str(one.message)] == []
    assert QueueView(server, "q").length() == 0


def test_a_waiter_in_a_second_loop_is_woken_by_events(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tampu.events.SAFETY_NET_SECS", 3600.0)
    test_a_queue_can_be_used_by_one_event_loop_after_another(server)


def test_a_worker_in_another_thread_does_not_use_the_queues_connection(server: Server) -> None:
    """Progress is reported over a separate connection."""
    from api.test_sync import working as working_in_a_thread
    from tampu import current_job

    queue = Queue("q", url=server.url)

    @queue.task
    async def tell() -> str:
        current_job().progress(1.0)
        return "done"

    async def use() -> None:
        await queue.add("warm up", 1)
        await queue.purge()
        connection = queue.producer.client.connection
        assert connection is not None
        assert await (await tell.add()).result(20) == "done"
        assert queue.producer.client.connection is connection
        await queue.close()

    with working_in_a_thread(queue):
        asyncio.run(use())


async def test_an_embedded_queue_needs_no_server() -> None:
    async with Queue("q", url="embedded://") as queue:
        await queue.purge()

        @queue.task
        async def greet(name: str) -> str:
            return f"hello {name}"

        async with working(queue):
            assert await (await greet.add("ada")).result(20) == "hello ada"
            assert await asyncio.to_thread(lambda: greet.sync.add("grace").result(20)) == "hello grace"


def test_an_embedded_queue_keeps_its_jobs_in_a_folder(tmp_path: Any) -> None:
    script = textwrap.dedent(
        """
        import sys, asyncio
        from tampu import Queue
        queue = Queue("q", url=f"embedded://{sys.argv[1]}")
        if sys.argv[2] == "add":
            print(queue.sync.add("mail", {"to": "ada"}).id)
        else:
            print(queue.sync.get_job(sys.argv[3]).state)
        queue.sync.close()
        """
    )

    def run(*arguments: str) -> str:
        return subprocess.check_output([sys.executable, "-c", script, str(tmp_path), *arguments], text=True).strip()

    assert run("look", run("add")) == "waiting"


def test_one_loop_after_another_leaves_no_sockets_open(server: Server) -> None:
    """A synchronous view that calls asyncio.run on each request must not run out of file descriptors."""
    queue = Queue("q", url=server.url)

    async def use() -> None:
        with pytest.raises(TimeoutError):
            await (await queue.add("", 1)).result(0.01)

    for _ in range(3):
        asyncio.run(use())
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        asyncio.run(use())
    assert len(os.listdir("/proc/self/fd")) <= before
    asyncio.run(queue.close())
    assert QueueView(server, "q").connections() == []
