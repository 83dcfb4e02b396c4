"""A worker process of the tests: `python -m consume.process_worker '{"url": ..., ...}'`; SIGTERM drains it."""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from consume.workers import Journal, quick_config
from tampu.base.event_loop import new_event_loop
from tampu.consume.consumer import Consumer

if TYPE_CHECKING:
    from tampu.wire.job import Job

journal = Journal(Path(os.environ["TAMPU_TEST_JOURNAL"]))


async def sleeping(job: Job[Any]) -> None:
    """Sleep for the seconds in the payload without blocking the event loop."""
    journal.write("started", job.id, os.getpid())
    await asyncio.sleep(job.payload)
    journal.write("done", job.id, os.getpid())


async def sleeping_after_quick(job: Job[Any]) -> None:
    """Sleep like `sleeping`, but write nothing for jobs of zero seconds, so that the worker is fast and reads ahead."""
    if job.payload:
        journal.write("started", job.id)
        await asyncio.sleep(job.payload)


async def blocking(job: Job[Any]) -> None:
    """Sleep and block the event loop."""
    journal.write("started", job.id, os.getpid())
    time.sleep(job.payload)  # noqa: ASYNC251 - blocks on purpose
    journal.write("done", job.id, os.getpid())


async def blocking_soon(job: Job[Any]) -> None:
    """Block the event loop, but only once the next read is in flight."""
    journal.write("started", job.id, os.getpid())
    await asyncio.sleep(0.1)
    journal.write("blocks", job.id)
    time.sleep(job.payload)  # noqa: ASYNC251


def in_a_thread(job: Job[Any]) -> None:
    """Sleep in a thread."""
    journal.write("started", job.id, os.getpid())
    time.sleep(job.payload)
    journal.write("done", job.id, os.getpid())


async def stubborn(job: Job[Any]) -> None:
    """Never end, not even when cancelled."""
    journal.write("started", job.id, os.getpid())
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            journal.write("cancelled", job.id)


async def of_a_tenant(job: Job[Any]) -> None:
    """Sleep for the seconds in the payload; fail the first attempt of every fifth job."""
    journal.write("started", job.key, job.payload["number"], os.getpid())
    await asyncio.sleep(job.payload["secs"])
    fails = job.payload["number"] % 5 == 0 and job.attempt == 0
    journal.write("failed" if fails else "done", job.key, job.payload["number"], os.getpid())
    if fails:
        raise ValueError("try again")


async def deadly(job: Job[Any]) -> None:
    """Kill this process if the payload says so."""
    journal.write("started", job.id, job.attempt)
    if job.payload == "poison":
        os._exit(9)
    await asyncio.sleep(job.payload)
    journal.write("done", job.id, job.attempt)


def hanging_child(job: Job[Any]) -> None:
    """Run in a separate process and never end."""
    journal.write("child", os.getpid())
    time.sleep(600)


def hanging_grandchild(job: Job[Any]) -> None:
    """Run in a separate process and wait for a program that never ends."""
    journal.write("child", os.getpid())
    with subprocess.Popen(["sleep", "600"]) as program:
        journal.write("grandchild", program.pid)


async def main(plan: dict[str, Any]) -> None:
    shutdown = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, shutdown.set)
    handler = globals()[plan["handler"]]
    process = plan["config"].pop("process", False)
    await Consumer(plan["url"], quick_config(**plan["config"])).run(handler, shutdown, process=process)
    journal.write("run", "ended")


if __name__ == "__main__":
    # Import this module by name: separate processes cannot find handlers of __main__.
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(threadName)s %(levelname)s %(message)s")
    plan = json.loads(sys.argv[1])
    factory = new_event_loop if plan["config"].pop("uvloop", False) else asyncio.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(importlib.import_module("consume.process_worker").main(plan))
