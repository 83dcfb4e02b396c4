"""arq worker, as its command line loads it."""

import os

from arq import func
from arq.connections import RedisSettings

from bench.program.counter import tick


async def nothing(ctx, payload):
    tick()


class WorkerSettings:
    functions = (func(nothing, name="nothing"),)
    redis_settings = RedisSettings.from_dsn(os.environ["BENCH_URL"])
