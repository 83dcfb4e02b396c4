"""Follow the events of a queue, including progress, from any process.

python examples/events_follower.py
"""

import asyncio
import os

from tampu import Queue, QueueEvents, Worker, current_job

URL = os.environ.get("TAMPU_URL", "embedded://")
queue = Queue("videos", url=URL)


@queue.task
async def convert(name: str, failures: int = 0) -> None:
    job = current_job()
    for step in range(3):
        job.progress(step / 3, f"step {step + 1} of 3")  # limited to four events per second
        await asyncio.sleep(0.3)
    if job.attempt < failures:
        raise OSError("the disk is full")


async def follow(events: QueueEvents) -> None:
    async for event in events:
        about = {key: event.fields[key] for key in ("progress", "note", "reason", "backoff_ms") if key in event.fields}
        print(event.name, event.job_name, about or "", flush=True)
        if event.name == "completed":
            break


async def main() -> None:
    async with QueueEvents("videos", url=URL) as events:
        await events.pin()  # start here; last_event_id="0" would also replay past events that are still kept
        following = asyncio.create_task(follow(events))
        async with Worker(queue):
            await convert.add("holidays.mov", failures=1)
            await following
    await queue.close()


if __name__ == "__main__":
    asyncio.run(main())
