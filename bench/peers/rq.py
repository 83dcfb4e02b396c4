"""RQ, with workers that do not fork for each job."""

from datetime import timedelta

import redis
from rq import Queue, Retry

from bench.peers.rq_jobs import fails_once, nothing
from bench.program.counter import drained_by, script_of
from bench.program.driver import serve
from bench.program.payloads import PAYLOAD
from bench.program.stopwatch import Stopwatch

NO_RESULT = {"result_ttl": 0, "failure_ttl": 0}


def queue_at(url):
    return Queue("bench", connection=redis.Redis.from_url(url))


def drained(url, total, workers=2):
    simple = ["-w", "rq.worker.SimpleWorker", "-u", url, "-q", "bench"]
    if workers == 1:
        return drained_by([script_of("rq"), "worker", *simple], total)
    return drained_by([script_of("rq"), "worker-pool", "-n", str(workers), *simple], total)


def queue_add(url, total):
    queue = queue_at(url)
    queue.enqueue(nothing, PAYLOAD, **NO_RESULT)
    watch = Stopwatch()
    for _ in range(total):
        queue.enqueue(nothing, PAYLOAD, **NO_RESULT)
    return watch.stop(total)


def queue_add_bulk(url, total, size):
    queue = queue_at(url)
    watch = Stopwatch()
    for _ in range(total // size):
        queue.enqueue_many([Queue.prepare_data(nothing, (PAYLOAD,), **NO_RESULT) for _ in range(size)])
    return watch.stop(total)


def queue_add_delayed(url, total):
    queue = queue_at(url)
    delay = timedelta(hours=1)
    queue.enqueue_in(delay, nothing, PAYLOAD, **NO_RESULT)
    watch = Stopwatch()
    for _ in range(total):
        queue.enqueue_in(delay, nothing, PAYLOAD, **NO_RESULT)
    return watch.stop(total)


def worker(url, total, concurrency=100):
    queue_at(url).enqueue_many([Queue.prepare_data(nothing, (PAYLOAD,), **NO_RESULT) for _ in range(total)])
    return drained(url, total, 1 if concurrency == 1 else 2)


def worker_retry(url, total):
    queue = queue_at(url)
    for _ in range(total):
        queue.enqueue(fails_once, PAYLOAD, retry=Retry(max=1), **NO_RESULT)
    return drained(url, total)


if __name__ == "__main__":
    serve(
        "rq",
        {
            "queue-add": queue_add,
            "queue-add-bulk": queue_add_bulk,
            "queue-add-delayed": queue_add_delayed,
            "worker": worker,
            "worker-retry": worker_retry,
        },
        packages=("rq",),
        settings={
            "adding": "enqueue, enqueue_many; result_ttl=0; hiredis",
            "working": "worker pool of 2 (one per core) SimpleWorkers, which do not fork for each job",
        },
    )
