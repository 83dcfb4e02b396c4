"""Handlers that raise errors that usually end a program: only the job fails."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from consume.workers import consuming
from support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable

    from consume.views import WorkerView
    from tampu.wire.job import Job


async def exit_generator(job: Job[Any]) -> None:
    raise GeneratorExit("on my own")


async def await_generator_exit(job: Job[Any]) -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.get_loop().call_soon(future.set_exception, GeneratorExit("on my own"))
    await future


def exit_generator_in_thread(job: Job[Any]) -> None:
    raise GeneratorExit("on my own")


async def interrupt(job: Job[Any]) -> None:
    raise KeyboardInterrupt("on my own")


def interrupt_in_thread(job: Job[Any]) -> None:
    raise KeyboardInterrupt("on my own")


@pytest.mark.parametrize(
    ("handler", "error_type"),
    [
        (exit_generator, "GeneratorExit"),
        (exit_generator_in_thread, "RuntimeError"),
        (await_generator_exit, "GeneratorExit"),
        (interrupt, "KeyboardInterrupt"),
        (interrupt_in_thread, "RuntimeError"),
    ],
)
async def test_errors_that_would_end_a_program_only_fail_the_job(
    view: WorkerView, handler: Callable[..., Any], error_type: str
) -> None:
    async with consuming(view.server.url, handler, concurrency=1, max_attempts=2) as worker:
        for _ in range(3):  # more jobs than coroutines in the pool: each must survive
            view.add()
        letters = await until(lambda: len(found := view.dead_letters()) == 3 and found, "all are dead-lettered")
        await until(view.is_settled, "nothing is left")
        assert not worker.task.done()
    assert {(letter.error_type, letter.attempts) for letter in letters} == {(error_type, 2)}


INTERRUPTED = """
import asyncio, signal, sys, time
from tampu.config import ConsumerConfig
from tampu.consume.consumer import Consumer

async def handler(job):
    print("started", flush=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.raise_signal(signal.SIGINT)

consumer = Consumer(sys.argv[1], ConsumerConfig(queue_name="q", shutdown_deadline_secs=1))
asyncio.run(consumer.run(handler, asyncio.Event()))
"""


async def test_ctrl_c_in_the_main_thread_ends_the_worker(view: WorkerView) -> None:
    view.add()
    command = [sys.executable, "-c", INTERRUPTED, view.server.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)  # noqa: ASYNC221
    assert "started" in done.stdout
    assert done.returncode != 0
    assert "KeyboardInterrupt" in done.stderr
