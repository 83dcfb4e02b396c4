"""The traceback in a dead letter starts at the user's code, because the frames before it are the same for every job."""

from __future__ import annotations

import importlib
import re
import sys
from typing import TYPE_CHECKING

import pytest

from api.workers import working
from tampu import JobFailed, Queue

if TYPE_CHECKING:
    from servers.process import Server


async def traceback_of(queue: Queue) -> list[str]:
    """Return the functions in the traceback of the only dead letter."""
    [letter] = await queue.peek_dlq()
    assert letter["traceback"].startswith("Traceback (most recent call last):\n")
    return re.findall(r"line \d+, in (\S+)", letter["traceback"])


def deeper() -> None:
    raise LookupError("far down")


async def test_traceback_of_a_coroutine(queue: Queue) -> None:
    @queue.task(attempts=1, timeout=10)
    async def work() -> None:
        deeper()

    async with working(queue):
        with pytest.raises(JobFailed):
            await (await work.add()).result(20)
    assert await traceback_of(queue) == ["work", "deeper"]


async def test_traceback_of_a_function_in_a_thread(queue: Queue) -> None:
    @queue.task(attempts=1)
    def work() -> None:
        deeper()

    async with working(queue, before_job=lambda job: None):
        with pytest.raises(JobFailed):
            await (await work.add()).result(20)
    assert await traceback_of(queue) == ["work", "deeper"]


@pytest.mark.parametrize("name", ["raises_deep_down", "raises_deep_down_later"])
async def test_traceback_of_a_task_in_a_process(server: Server, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("TAMPU_URL", server.url)
    monkeypatch.delitem(sys.modules, "api.process_tasks", raising=False)
    tasks = importlib.import_module("api.process_tasks")
    async with tasks.queue as queue, working(queue):
        with pytest.raises(JobFailed):
            await (await getattr(tasks, name).add()).result(60)
        assert await traceback_of(queue) == [name, "_raise_deep_down"]


async def test_traceback_of_an_error_inside_tampu_is_complete(queue: Queue) -> None:
    @queue.task(attempts=1)
    async def work(number: int) -> None: ...

    async with Queue("q", url=queue.url) as other:  # which does not know the task
        await other.add("work", {"number": "none"})
    async with working(queue):
        job = await work.add(1)
        await job.result(20)
    assert "decode" in await traceback_of(queue)
