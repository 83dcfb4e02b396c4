"""Worker of BullMQ's Python port as a program; it has no command line."""

import asyncio
import os

from bullmq import Worker

from bench.program.counter import tick


async def nothing(job, token):
    tick()


async def main():
    worker = Worker("bench", nothing, {"connection": os.environ["BENCH_URL"]})
    await asyncio.Event().wait()
    await worker.close()


if __name__ == "__main__":
    asyncio.run(main())
