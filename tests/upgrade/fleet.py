"""The application of the mixed fleet: it runs with either release, and records every run of a job.

    python fleet.py produce PREFIX COUNT     # adds jobs of every kind, prints the id of each that was confirmed
    python fleet.py repeat KEY               # registers a repeatable job
    tampu worker fleet:worker

FLEET_LOG gets a line `begin|end RELEASE PROCESS TASK JOB-ID ARGUMENT` for each begin and end of a run.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

from tampu import BackoffSpec, Queue, UnrecoverableError, Worker, current_job

queue = Queue("fleet")
RETRY: dict[str, Any] = {"attempts": 4, "backoff": BackoffSpec.fixed(50)}


def log(event: str, task: str, argument: str) -> None:
    release, process = os.environ["FLEET_RELEASE"], os.environ["FLEET_PROCESS"]
    line = f"{event} {release} {process} {task} {current_job().id} {argument}\n"
    descriptor = os.open(os.environ["FLEET_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


@queue.task(**RETRY)
async def plain(argument: str) -> None:
    log("begin", "plain", argument)
    log("end", "plain", argument)


@queue.task(**RETRY)
async def slow(argument: str) -> None:
    log("begin", "slow", argument)
    await asyncio.sleep(0.3)
    log("end", "slow", argument)


@queue.task(**RETRY)
async def flaky(argument: str) -> None:
    log("begin", "flaky", argument)
    if current_job().attempt == 0:
        raise ValueError("fails once")
    log("end", "flaky", argument)


@queue.task(**RETRY)
async def doomed(argument: str) -> None:
    """Fail for good until the file `repaired` is beside the log."""
    log("begin", "doomed", argument)
    if not Path(os.environ["FLEET_LOG"]).with_name("repaired").exists():
        raise UnrecoverableError("not repaired yet")
    log("end", "doomed", argument)


@queue.task(**RETRY)
async def tick(argument: str) -> None:
    log("begin", "tick", argument)
    log("end", "tick", argument)


worker = Worker(
    queue,
    concurrency=8,
    claim_min_idle_ms=2_000,
    read_block_ms=200,
    delayed_poll_interval_ms=20,
    scheduler_tick_ms=100,
)


async def produce(prefix: str, count: int) -> None:
    async with queue:
        for number in range(count):
            argument = f"{prefix}-{number}"
            jobs = [
                await plain.add(argument),
                *await plain.add_bulk([f"{argument}-bulk-{index}" for index in range(10)]),
                await plain.add_in(0.2, f"{argument}-later"),
                # Every producer adds these, of whichever release: they run once.
                await plain.add_unique(f"unique-{number}", f"unique-{number}"),
                await slow.add(f"{argument}-slow"),
                await flaky.add(f"{argument}-flaky"),
            ]
            if number % 5 == 0:
                jobs.append(await doomed.add(f"{argument}-doomed"))
            print(*(job.id for job in jobs), sep="\n", flush=True)


async def repeat(key: str) -> None:
    async with queue:
        print(await tick.every(0.2, {"argument": key}, key=key))


if __name__ == "__main__":
    if sys.argv[1] == "produce":
        asyncio.run(produce(sys.argv[2], int(sys.argv[3])))
    else:
        asyncio.run(repeat(sys.argv[2]))
