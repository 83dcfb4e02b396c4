"""The same consumer in several processes, which all start working at the same time."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from typing import Any

import uvloop

from bench.ours.adding import QUEUE
from bench.ours.working import fill
from bench.program.counter import counting, tick, total_of
from bench.program.stopwatch import Stopwatch
from tampu import Consumer, ConsumerConfig

#: How long they may take for all jobs, in seconds.
PATIENCE_SECS = 60.0


async def worker_processes(url: str, total: int, processes: int, batch: int = 256) -> dict[str, float]:
    """Measure from the start signal to the end of the last handler."""
    await fill(url, total)
    with counting() as counts:
        command = [sys.executable, "-m", "bench.ours.processes", url, str(batch)]
        workers = [_started(command) for _ in range(processes)]
        try:
            for worker in workers:
                worker.stdout.readline()  # type: ignore[union-attr]  # it is a pipe
            watch = Stopwatch([worker.pid for worker in workers])
            deadline = time.monotonic() + PATIENCE_SECS
            for worker in workers:
                worker.stdin.write(b"begin\n")  # type: ignore[union-attr]
                worker.stdin.flush()  # type: ignore[union-attr]
            while total_of(counts) < total:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{processes} processes did {total_of(counts)} of {total} jobs")
                time.sleep(0.001)  # noqa: ASYNC251 - nothing else runs here
            return watch.stop(total)
        finally:
            for worker in workers:
                worker.kill()
                worker.communicate()


def _started(command: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


async def count_job(job: Any) -> None:
    tick()


async def _consume(url: str, batch: int) -> None:
    config = ConsumerConfig(queue_name=QUEUE, block_ms=100, events_enabled=False, batch=batch)
    await Consumer(url, config).run(count_job, asyncio.Event())


def main() -> None:
    url, batch = sys.argv[1:]
    print("ready", flush=True)
    sys.stdin.readline()
    uvloop.run(_consume(url, int(batch)))


if __name__ == "__main__":
    main()
