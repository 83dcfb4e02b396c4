"""huey on Redis."""

import os
import sys

os.environ["BENCH_URL"] = sys.argv[1] if len(sys.argv) > 1 else ""

from bench.peers.huey_app import fails_once, nothing
from bench.program.counter import drained_by, script_of
from bench.program.driver import serve
from bench.program.payloads import PAYLOAD
from bench.program.stopwatch import Stopwatch


def drained(total, workers=2):
    command = [script_of("huey_consumer"), "bench.peers.huey_app.huey", "-w", str(workers), "-k", "process"]
    return drained_by([*command, "-q", "-C", "-n"], total)


def queue_add(url, total):
    nothing(PAYLOAD)
    watch = Stopwatch()
    for _ in range(total):
        nothing(PAYLOAD)
    return watch.stop(total)


def queue_add_delayed(url, total):
    # The adding application leaves scheduling to the consumer: a delayed task is enqueued like any other.
    nothing.schedule(args=(PAYLOAD,), delay=3600)
    watch = Stopwatch()
    for _ in range(total):
        nothing.schedule(args=(PAYLOAD,), delay=3600)
    return watch.stop(total)


def worker(url, total, concurrency=100):
    for _ in range(total):
        nothing(PAYLOAD)
    return drained(total, 1 if concurrency == 1 else 2)


def worker_retry(url, total):
    for _ in range(total):
        fails_once(PAYLOAD)
    return drained(total)


if __name__ == "__main__":
    serve(
        "huey",
        {
            "queue-add": queue_add,
            "queue-add-delayed": queue_add_delayed,
            "worker": worker,
            "worker-retry": worker_retry,
        },
        packages=("huey",),
        settings={
            "adding": "calling the task; pickle; hiredis",
            "working": "2 worker processes (one per core), blocking reads (its default), no results",
        },
    )
