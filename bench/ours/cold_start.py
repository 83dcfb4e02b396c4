"""Cold start: the time from starting a worker program until its first job has run.

`tampu worker bench.ours.cold_start:queue` is the command line, `python -m bench.ours.cold_start` a program that runs a
`Worker`, as peers without a command line do.
"""

from __future__ import annotations

import asyncio
import compileall
import os
import sys
from pathlib import Path

import tampu
from bench.ours.adding import QUEUE
from bench.program.counter import first_job_of, script_of, tick
from bench.program.payloads import PAYLOAD
from tampu import Queue, Worker

queue = Queue(QUEUE, url=os.environ.get("BENCH_URL", "redis://127.0.0.1:6379"))


@queue.task
async def nothing(to: str, subject: str, body: str) -> None:
    tick()


async def _add_one(url: str) -> None:
    async with Queue(QUEUE, url=url) as filled:
        await filled.add("nothing", PAYLOAD)


def cold_start(url: str, total: int = 1, how: str = "command line") -> dict[str, float]:
    """Add a job, start a worker, and measure until the job has run."""
    asyncio.run(_add_one(url))
    # pip compiles the packages that it installs; a checkout may not be compiled.
    compileall.compile_dir(Path(tampu.__file__).parent, quiet=2)
    os.environ["BENCH_URL"] = url
    module = "bench.ours.cold_start"
    command = [script_of("tampu"), "worker", f"{module}:queue"]
    return first_job_of(command if how == "command line" else [sys.executable, "-m", module])


if __name__ == "__main__":
    asyncio.run(Worker(queue).run())
