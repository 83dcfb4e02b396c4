"""Run a chasquimq 1.3.0 worker, with the Python of its own virtual environment.

    python chasquimq_worker.py REDIS_URL QUEUE '{"max_attempts": 3, ...}'

Prints one line of JSON for each run of its handler. The job's data controls the handler: {"fail": n} fails the first n
runs, {"give_up": true} is unrecoverable, and the value of "return" is returned. Exits when its input ends.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from typing import Any

import uvloop
from chasquimq import UnrecoverableError, Worker


async def main(url: str, queue: str, options: dict[str, Any]) -> None:
    runs: Counter[str] = Counter()

    async def handler(job: Any) -> Any:
        runs[job.id] += 1
        data = job.data if isinstance(job.data, dict) else {}
        line = {"id": job.id, "name": job.name, "data": job.data, "attempt": job.attempt, "created": job.created_at_ms}
        print(json.dumps(line), flush=True)
        if data.get("give_up"):
            raise UnrecoverableError("not worth another try")
        if runs[job.id] <= data.get("fail", 0):
            raise ValueError(f"failed on purpose, run {runs[job.id]}")
        return data.get("return")

    worker = Worker(queue, handler, redis_url=url, read_block_ms=50, scheduler_tick_ms=50, **options)
    running = asyncio.ensure_future(worker.run())
    print(json.dumps({"ready": True}), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await worker.close()
    await running


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3])))
