"""A chasquimq 1.3.0 worker in the fleet, run with the Python of its own virtual environment: no import of tampu.

Its handlers write the same records as those of `worker.py`, and support `ok`, `nap`, `fail`, `never` and `die`.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import uvloop
from chasquimq import Worker

from chaos.records import Recorder

PLAN: dict[str, Any] = json.loads(os.environ["CHAOS_PLAN"])
RECORDER = Recorder(Path(PLAN["folder"]) / "records", PLAN["name"])


async def handler(job: Any) -> str | None:
    token = job.data["token"]
    what, _, detail = job.data["do"].partition(":")
    RECORDER.write("start", token, job.attempt)
    if what == "die":
        os._exit(9)
    if what == "nap":
        await asyncio.sleep(int(detail) / 1000)
    if what == "never" or (what == "fail" and job.attempt < int(detail)):
        RECORDER.write("end", token, job.attempt, "fail")
        raise ValueError(token)
    RECORDER.write("end", token, job.attempt, "ok")
    return f"{token}/{job.id}" if what == "result" else None


def end_with_the_run() -> None:
    sys.stdin.read()
    os._exit(1)


async def main() -> None:
    worker = Worker(
        PLAN["queue"],
        handler,
        redis_url=PLAN["url"],
        consumer_id=PLAN["name"],
        concurrency=PLAN["concurrency"],
        claim_min_idle_ms=PLAN["lease_ms"],
        read_block_ms=100,
        max_attempts=3,
        store_results=True,
    )
    closing: list[asyncio.Task[None]] = []
    asyncio.get_running_loop().add_signal_handler(
        signal.SIGTERM, lambda: closing.append(asyncio.create_task(worker.close()))
    )
    await worker.run()


if __name__ == "__main__":
    threading.Thread(target=end_with_the_run, daemon=True).start()
    uvloop.run(main())
