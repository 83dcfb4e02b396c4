"""A first job: one file, one terminal, no installed server.

python examples/first_job.py
"""

import asyncio
import os

from tampu import Queue, Worker

queue = Queue("emails", url=os.environ.get("TAMPU_URL", "embedded://"))


@queue.task
async def welcome(to: str, subject: str = "hi") -> str:
    print(f"sending {subject!r} to {to}")
    return f"sent to {to}"


async def main() -> None:
    async with queue, Worker(queue):
        job = await welcome.add("ada@example.com")
        print("added job", job.id)
        print("result:", await job.result(timeout=10))


if __name__ == "__main__":
    asyncio.run(main())
