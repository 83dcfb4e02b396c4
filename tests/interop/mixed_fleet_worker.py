"""Run a chasquimq 1.3.0 worker of a mixed fleet, with the Python of its own virtual environment.

    python mixed_fleet_worker.py REDIS_URL QUEUE LOG '{"max_attempts": 3, ...}'

Appends one line to LOG for each run of its handler: job id, attempt. The job's data controls the handler: {"fail": n}
fails while its attempt is below n, {"give_up": true} is unrecoverable. Exits when its input ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

import uvloop
from chasquimq import UnrecoverableError, Worker


async def main(url: str, queue: str, log_path: str, options: dict[str, Any]) -> None:
    log = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    async def handler(job: Any) -> Any:
        os.write(log, f"{job.id} {job.attempt}\n".encode())
        if job.data.get("give_up"):
            raise UnrecoverableError("not worth another try")
        if job.attempt < job.data.get("fail", 0):
            raise ValueError("failed on purpose")
        return {"by": "chasquimq", "n": job.data.get("n")}

    worker = Worker(queue, handler, redis_url=url, read_block_ms=50, scheduler_tick_ms=50, **options)
    running = asyncio.ensure_future(worker.run())
    print(json.dumps({"ready": True}), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await worker.close()
    await running


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], sys.argv[2], sys.argv[3], json.loads(sys.argv[4])))
