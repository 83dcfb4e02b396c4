"""A worker that finishes its running jobs on Ctrl-C or `kill`; jobs it has not started go back to the queue.

python examples/graceful_shutdown.py
"""

import asyncio
import os

from tampu import Job, Queue, Worker

queue = Queue("downloads", url=os.environ.get("TAMPU_URL", "embedded://"))


@queue.task
async def download(number: int) -> None:
    print(f"download {number} started", flush=True)
    await asyncio.sleep(1)
    print(f"download {number} finished", flush=True)


async def open_database() -> None:
    print("database opened; press Ctrl-C to stop", flush=True)


async def close_database() -> None:
    print("database closed", flush=True)


def log(job: Job[object], error: BaseException | None) -> None:
    print(f"{job.name} {'failed' if error else 'succeeded'}", flush=True)


if __name__ == "__main__":
    for number in range(4):
        download.sync.add(number)
    worker = Worker(
        queue,
        concurrency=2,
        on_startup=open_database,
        on_shutdown=close_database,
        after_job=log,
        shutdown_deadline_secs=20,  # jobs that run longer are abandoned, and another worker retries them
    )
    worker.run_sync()  # until SIGINT or SIGTERM; a second signal ends the process at once
    print("left for another worker:", queue.sync.purge(), flush=True)
    queue.sync.close()
