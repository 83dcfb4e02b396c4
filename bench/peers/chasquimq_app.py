"""chasquimq worker as a program; it has no command line."""

import asyncio
import os

from chasquimq import Worker

from bench.program.counter import tick


async def nothing(job):
    tick()


if __name__ == "__main__":
    asyncio.run(Worker("bench", nothing, redis_url=os.environ["BENCH_URL"]).run())
