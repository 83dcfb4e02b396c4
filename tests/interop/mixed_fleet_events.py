"""Run chasquimq 1.3.0's QueueEvents, with the Python of its own virtual environment.

    python mixed_fleet_events.py REDIS_URL QUEUE

Prints every event of the queue, from the first one, as a line of JSON: [name, job id, job name, fields].
"""

from __future__ import annotations

import asyncio
import json
import sys

from chasquimq import QueueEvents


async def main(url: str, queue: str) -> None:
    events = QueueEvents(queue, redis_url=url, last_event_id="0", block_ms=50)
    print(json.dumps({"ready": True}), flush=True)

    async def show() -> None:
        async for event in events:
            print(json.dumps([event.name, event.job_id, event.job_name, event.fields]), flush=True)

    showing = asyncio.ensure_future(show())
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    showing.cancel()
    await asyncio.gather(showing, return_exceptions=True)
    await events.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
