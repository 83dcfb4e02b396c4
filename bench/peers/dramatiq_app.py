"""dramatiq actors."""

import os

import dramatiq
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import CurrentMessage, Retries

from bench.program.counter import tick

broker = RedisBroker(url=os.environ["BENCH_URL"], middleware=[Retries(max_retries=3, min_backoff=1), CurrentMessage()])
dramatiq.set_broker(broker)


@dramatiq.actor(queue_name="bench")
def nothing(payload):
    tick()


@dramatiq.actor(queue_name="bench", max_retries=3, min_backoff=1, max_backoff=1)
def fails_once(payload):
    if "retries" not in CurrentMessage.get_current_message().options:
        raise ValueError("first run")
    tick()
