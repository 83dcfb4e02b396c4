"""A worker that finishes its running jobs on Ctrl-C or `kill`, and hands back the jobs it has not started.

python examples/graceful_shutdown.py
"""

import asyncio
import os

from tampu import Job, Queue, Worker

queue = Queue("downloads", url=os.environ.get("TAMPU_URL", "embedded://"))


@queue.task
async def download(number: int) -> None:
    print(f"download {number} begins", flush=True)
    await asyncio.sleep(1)
    print(f"download {number} is complete", flush=True)


async def open_database() -> None:
    print("the database is open; press Ctrl-C to stop", flush=True)


async def close_database() -> None:
    print("the database is closed", flush=True)


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
        shutdown_deadline_secs=20,  # jobs that take longer are abandoned; another worker runs them again
    )
    worker.run_sync()  # until SIGINT or SIGTERM; a second signal stops it immediately
    print("still waiting for another worker:", queue.sync.purge(), flush=True)
    queue.sync.close()
