"""taskiq tasks on Redis streams."""

import os

from taskiq import Context, SimpleRetryMiddleware, TaskiqDepends
from taskiq_redis import RedisAsyncResultBackend, RedisStreamBroker

from bench.program.counter import tick

# The queue is filled first, so the group must also read entries from before its creation.
broker = RedisStreamBroker(os.environ["BENCH_URL"], queue_name="bench", consumer_id="0", xread_count=256)
broker.add_middlewares(SimpleRetryMiddleware(default_retry_count=3))


# A second queue, with results, for round trips.
results = RedisAsyncResultBackend(os.environ["BENCH_URL"], result_ex_time=3600)
replying = RedisStreamBroker(os.environ["BENCH_URL"], queue_name="replying", consumer_id="0").with_result_backend(
    results
)


@replying.task("send")
async def send(payload: dict) -> dict:
    return {"sent": True}


@broker.task("nothing")
async def nothing(payload: dict) -> None:
    tick()


@broker.task("fails_once", retry_on_error=True)
async def fails_once(payload: dict, context: Context = TaskiqDepends()) -> None:  # noqa: B008 - taskiq requires this default
    if not context.message.labels.get("_retries"):
        raise ValueError("first run")
    tick()
