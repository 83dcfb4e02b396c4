"""dramatiq on the Redis broker."""

import os
import sys

os.environ["BENCH_URL"] = sys.argv[1] if len(sys.argv) > 1 else ""
os.environ["dramatiq_queue_prefetch"] = "256"  # noqa: SIM112 - dramatiq reads this name

from bench.peers.dramatiq_app import fails_once, nothing, send
from bench.program.counter import counting, drained_by, first_job_of, running, script_of
from bench.program.driver import serve
from bench.program.payloads import PAYLOAD
from bench.program.round_trips import time_round_trips_in_threads
from bench.program.stopwatch import Stopwatch


def drained(total, processes=2, threads=8):
    command = [script_of("dramatiq"), "bench.peers.dramatiq_app", "--processes", str(processes)]
    return drained_by([*command, "--threads", str(threads), "--skip-logging"], total)


def queue_add(url, total):
    nothing.send(PAYLOAD)
    watch = Stopwatch()
    for _ in range(total):
        nothing.send(PAYLOAD)
    return watch.stop(total)


def queue_add_delayed(url, total):
    nothing.send_with_options(args=(PAYLOAD,), delay=3_600_000)
    watch = Stopwatch()
    for _ in range(total):
        nothing.send_with_options(args=(PAYLOAD,), delay=3_600_000)
    return watch.stop(total)


def cold_start(url, total=1):
    nothing.send(PAYLOAD)
    return first_job_of([script_of("dramatiq"), "bench.peers.dramatiq_app", "--processes", "1"])


def round_trip(url, total, callers=1):
    command = [script_of("dramatiq"), "bench.peers.dramatiq_app", "--processes", "1", "--threads", "8"]
    with counting(), running([*command, "--skip-logging"]):

        def once():
            send.send(PAYLOAD).get_result(block=True, timeout=30_000)

        once()
        return time_round_trips_in_threads(once, total, callers)


def worker(url, total, concurrency=100):
    for _ in range(total):
        nothing.send(PAYLOAD)
    return drained(total, 1, 1) if concurrency == 1 else drained(total)


def worker_delayed(url, total):
    for _ in range(total):
        nothing.send_with_options(args=(PAYLOAD,), delay=1)
    return drained(total)


def worker_retry(url, total):
    for _ in range(total):
        fails_once.send(PAYLOAD)
    return drained(total)


if __name__ == "__main__":
    serve(
        "dramatiq",
        {
            "queue-add": queue_add,
            "queue-add-delayed": queue_add_delayed,
            "cold-start": cold_start,
            "round-trip": round_trip,
            "worker": worker,
            "worker-delayed": worker_delayed,
            "worker-retry": worker_retry,
        },
        packages=("dramatiq",),
        settings={
            "adding": "actor.send, JSON",
            "working": "2 processes (one per core, its default) of 8 threads (its default), queue prefetch 256, only "
            "the middleware needed for retries; `round-trip`: one process, Results with the Redis backend, get_result",
        },
    )
