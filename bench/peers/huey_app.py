"""huey tasks."""

import os

from huey import RedisHuey

from bench.program.counter import tick

huey = RedisHuey("bench", url=os.environ["BENCH_URL"], results=False, store_none=False)


@huey.task()
def nothing(payload):
    tick()


@huey.task(retries=2, retry_delay=0, context=True)
def fails_once(payload, task=None):
    if task.retries == 2:
        raise ValueError("first run")
    tick()
