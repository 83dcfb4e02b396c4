"""Schedules: by a cron expression with a time zone, and with a limit.

python examples/cron.py
"""

import asyncio
import os
from datetime import UTC, datetime

from tampu import Queue, Worker

queue = Queue("reports", url=os.environ.get("TAMPU_URL", "embedded://"))
fired = asyncio.Event()


@queue.task
async def report(region: str) -> None:
    print("report for", region)
    fired.set()


async def main() -> None:
    # Run this every time your program starts; an existing identical schedule is left unchanged.
    await report.cron("0 9 * * MON-FRI", {"region": "Lima"}, tz="America/Lima")
    # Six fields start with seconds; `limit` is the maximum number of fires.
    await report.cron("* * * * * *", {"region": "everywhere"}, key="every second", limit=1)

    for schedule in await queue.get_repeatable_jobs():
        next_fire = datetime.fromtimestamp(schedule.next_fire_ms / 1000, UTC)
        print(f"{schedule.key}: {schedule.pattern.expression}, next at {next_fire:%H:%M:%S} UTC")

    async with Worker(queue):  # workers fire schedules; only one at a time is the scheduler
        await fired.wait()

    await queue.remove_repeatable_by_key("report::cron:0 9 * * MON-FRI:America/Lima")
    print("left:", await queue.get_repeatable_jobs())
    await queue.close()


if __name__ == "__main__":
    asyncio.run(main())
