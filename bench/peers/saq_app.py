"""SAQ worker, as its command line loads it."""

import os

from saq import Queue

from bench.program.counter import tick


async def nothing(ctx, *, payload):
    tick()


settings = {"queue": Queue.from_url(os.environ["BENCH_URL"]), "functions": [("nothing", nothing)]}
