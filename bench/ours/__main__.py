"""tampu's program, with the same protocol as every peer."""

from __future__ import annotations

from bench.ours.adding import (
    one_add_beside_one_ping,
    queue_add,
    queue_add_bulk,
    queue_add_concurrent,
    queue_add_delayed,
    queue_add_delayed_concurrent,
    queue_add_iterator,
)
from bench.ours.cold_start import cold_start
from bench.ours.defaults import one_task_add_beside_one_ping, round_trip, worker_default
from bench.ours.latency import pickup_latency
from bench.ours.memory import memory_with_waiting, server_memory
from bench.ours.processes import worker_processes
from bench.ours.rsmq import receive_delete, send
from bench.ours.working import worker, worker_delayed, worker_many, worker_retry
from bench.program.driver import serve

SCENARIOS = {
    "cold-start": cold_start,
    "worker-default": worker_default,
    "round-trip": round_trip,
    "one-task-add-beside-one-ping": one_task_add_beside_one_ping,
    "queue-add": queue_add,
    "queue-add-bulk": queue_add_bulk,
    "queue-add-iterator": queue_add_iterator,
    "queue-add-concurrent": queue_add_concurrent,
    "queue-add-delayed": queue_add_delayed,
    "queue-add-delayed-concurrent": queue_add_delayed_concurrent,
    "one-add-beside-one-ping": one_add_beside_one_ping,
    "worker": worker,
    "worker-many": worker_many,
    "worker-delayed": worker_delayed,
    "worker-retry": worker_retry,
    "worker-processes": worker_processes,
    "pickup-latency": pickup_latency,
    "memory": memory_with_waiting,
    "server-memory": server_memory,
    "rsmq-send": send,
    "rsmq-receive-delete": receive_delete,
}

if __name__ == "__main__":
    serve(
        "tampu",
        SCENARIOS,
        packages=("tampu", "msgspec"),
        settings={
            "adding": "Producer, one process, uvloop, idempotency by windows and chains (the default)",
            "working": "`worker-default`, `round-trip`: Worker(queue) and @queue.task with default settings. Others: "
            "Consumer, one process, uvloop, 100 coroutines; batch=256 (the default), in `worker-generic` 64",
        },
    )
