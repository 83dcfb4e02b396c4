"""Celery on the Redis broker."""

import os
import sys

os.environ["BENCH_URL"] = sys.argv[1] if len(sys.argv) > 1 else ""

from bench.peers.celery_app import fails_once, nothing, send
from bench.program.counter import counting, drained_by, first_job_of, running, script_of
from bench.program.driver import serve
from bench.program.payloads import PAYLOAD
from bench.program.round_trips import time_round_trips_in_threads
from bench.program.stopwatch import Stopwatch

QUIET = ["--without-gossip", "--without-mingle", "--without-heartbeat", "--loglevel=CRITICAL"]


def drained(total, processes=2):
    command = [script_of("celery"), "-A", "bench.peers.celery_app", "worker", "-Q", "bench", "-P", "prefork"]
    return drained_by([*command, "-c", str(processes), *QUIET], total)


def cold_start(url, total=1):
    nothing.delay(PAYLOAD)
    command = [script_of("celery"), "-A", "bench.peers.celery_app", "worker", "-Q", "bench", "-c", "1"]
    return first_job_of(command)


def round_trip(url, total, callers=1):
    command = [script_of("celery"), "-A", "bench.peers.celery_app", "worker", "-Q", "bench", "-P", "prefork", "-c", "1"]
    with counting(), running([*command, *QUIET]):

        def once():
            send.delay(PAYLOAD).get(timeout=30)

        once()
        return time_round_trips_in_threads(once, total, callers)


def queue_add(url, total):
    nothing.delay(PAYLOAD)
    watch = Stopwatch()
    for _ in range(total):
        nothing.delay(PAYLOAD)
    return watch.stop(total)


def queue_add_delayed(url, total):
    nothing.apply_async((PAYLOAD,), countdown=3600)
    watch = Stopwatch()
    for _ in range(total):
        nothing.apply_async((PAYLOAD,), countdown=3600)
    return watch.stop(total)


def worker(url, total, concurrency=100):
    for _ in range(total):
        nothing.delay(PAYLOAD)
    return drained(total, 1 if concurrency == 1 else 2)


def worker_delayed(url, total):
    for _ in range(total):
        nothing.apply_async((PAYLOAD,), countdown=0.001)
    return drained(total)


def worker_retry(url, total):
    for _ in range(total):
        fails_once.delay(PAYLOAD)
    return drained(total)


if __name__ == "__main__":
    serve(
        "celery",
        {
            "queue-add": queue_add,
            "queue-add-delayed": queue_add_delayed,
            "cold-start": cold_start,
            "round-trip": round_trip,
            "worker": worker,
            "worker-delayed": worker_delayed,
            "worker-retry": worker_retry,
        },
        packages=("celery", "kombu"),
        settings={
            "adding": "task.delay, JSON, results ignored",
            "working": "prefork with 2 processes (one per core), prefetch multiplier 128, acks early (default), no "
            "results, no gossip, mingle, heartbeat or events; `round-trip`: one process, Redis result backend, get",
        },
    )
