"""dramatiq actors."""

import os

import dramatiq
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import CurrentMessage, Retries
from dramatiq.results import Results
from dramatiq.results.backends import RedisBackend

from bench.program.counter import tick

middleware = [
    Retries(max_retries=3, min_backoff=1),
    CurrentMessage(),
    Results(backend=RedisBackend(url=os.environ["BENCH_URL"])),
]
broker = RedisBroker(url=os.environ["BENCH_URL"], middleware=middleware)
dramatiq.set_broker(broker)


@dramatiq.actor(queue_name="bench", store_results=True)
def send(payload):
    return {"sent": True}


@dramatiq.actor(queue_name="bench")
def nothing(payload):
    tick()


@dramatiq.actor(queue_name="bench", max_retries=3, min_backoff=1, max_backoff=1)
def fails_once(payload):
    if "retries" not in CurrentMessage.get_current_message().options:
        raise ValueError("first run")
    tick()
