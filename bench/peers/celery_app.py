"""Celery application: tasks that do nothing, with settings for throughput."""

import os

from celery import Celery

from bench.program.counter import tick

app = Celery("bench", broker=os.environ["BENCH_URL"], backend=os.environ["BENCH_URL"])
app.conf.update(
    task_ignore_result=True,
    task_store_errors_even_if_ignored=False,
    task_serializer="json",
    accept_content=["json"],
    worker_prefetch_multiplier=128,
    worker_disable_rate_limits=True,
    worker_send_task_events=False,
    task_default_queue="bench",
    broker_connection_retry_on_startup=True,
    broker_pool_limit=1,
)


@app.task(ignore_result=False)
def send(payload):
    return {"sent": True}


@app.task
def nothing(payload):
    tick()


@app.task(bind=True, max_retries=3)
def fails_once(self, payload):
    if self.request.retries == 0:
        raise self.retry(countdown=0)
    tick()
