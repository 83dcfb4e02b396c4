"""A worker process of the fleet. Its plan is in `CHAOS_PLAN`.

The handlers record their starts and ends themselves. What one does is its argument `do`:

| do                | the handler                                                                                     |
|-------------------|-------------------------------------------------------------------------------------------------|
| `ok`, `result`    | returns at once, `result` with a value                                                          |
| `nap:MS`          | waits                                                                                           |
| `thread:MS`       | waits in a thread                                                                               |
| `fail:N`          | raises while its attempt is below N                                                             |
| `never`, `give-up` | always raises; `give-up` says that it is unrecoverable                                         |
| `die`, `die-once` | ends its worker with `os._exit`, each time or the first time                                    |
| `hang`            | never ends in its first attempt, which its timeout cancels                                      |
| `raise:NAME`      | raises this BaseException in its first attempt                                                  |
| `block:MS`        | blocks the event loop                                                                           |
| `process`         | runs in a child process                                                                         |
| `process-exit`, `process-hang` | runs in a child process, which exits or hangs in the first attempt                 |

A line `fds SECS` on its standard input uses up all file descriptors for a while. It exits when the input ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import resource
import sys
import threading
import time
from pathlib import Path
from typing import Any

from chaos.records import Recorder
from tampu import Queue, UnrecoverableError, Worker, current_job
from tampu.config import SchedulerConfig
from tampu.wire.retry import RetryConfig
from tampu.wire.ulid import decode_ulid_time

PLAN: dict[str, Any] = json.loads(os.environ["CHAOS_PLAN"])
FOLDER = Path(PLAN["folder"])
RECORDER = Recorder(FOLDER / "records", PLAN["name"])
RUNS = threading.Event()
#: How late the watchdog may wake up before it records a stall, in seconds.
STALL_SECS = 0.5

queue = Queue(PLAN["queue"], url=PLAN["url"])


class OnPurposeError(Exception):
    """Raised by handlers that fail on purpose."""


BASE_EXCEPTIONS: dict[str, type[BaseException]] = {
    "KeyboardInterrupt": KeyboardInterrupt,
    "SystemExit": SystemExit,
    "GeneratorExit": GeneratorExit,
    "BaseException": BaseException,
}


def started(token: str) -> tuple[str, int]:
    """Record a start; return the job's token, which for a fire names its due time, and its attempt."""
    job = current_job()
    if token.startswith("schedule-"):
        token = f"{token}@{decode_ulid_time(job.id)}"
    RECORDER.write("start", token, job.attempt)
    return token, job.attempt


@queue.task
async def work(token: str, do: str) -> str | None:
    token, attempt = started(token)
    try:
        if do not in ("ok", "result"):
            await act(token, do, attempt)
    except BaseException:
        RECORDER.write("end", token, attempt, "fail")
        raise
    RECORDER.write("end", token, attempt, "ok")
    return f"{token}/{current_job().id}" if do == "result" else None


@queue.task(timeout=1.0)
async def hurried(token: str, do: str) -> None:
    await work(token, do)


@queue.task
def in_thread(token: str, do: str) -> None:
    token, attempt = started(token)
    what, _, detail = do.partition(":")
    if what == "thread":
        time.sleep(int(detail) / 1000)
    elif attempt == 0:
        RECORDER.write("end", token, attempt, "fail")
        raise BASE_EXCEPTIONS[detail](f"raised by {token}")
    RECORDER.write("end", token, attempt, "ok")


@queue.task(process=True, timeout=2.0)
def in_process(token: str, do: str) -> None:
    token, attempt = started(token)
    if attempt == 0 and do == "process-exit":
        os._exit(3)
    if attempt == 0 and do == "process-hang":
        os.fork()  # a grandchild that holds the pipe to the worker
        time.sleep(3600)
    RECORDER.write("end", token, attempt, "ok")


async def act(token: str, do: str, attempt: int) -> None:
    what, _, detail = do.partition(":")
    match what:
        case "nap":
            await asyncio.sleep(int(detail) / 1000)
        case "fail" if attempt < int(detail):
            raise OnPurposeError(token)
        case "never":
            raise OnPurposeError(token)
        case "give-up":
            raise UnrecoverableError(token)
        case "die":
            os._exit(9)
        case "die-once":
            with contextlib.suppress(FileExistsError):
                os.close(os.open(FOLDER / f"died-{token}", os.O_CREAT | os.O_EXCL))
                os._exit(9)
        case "hang" if attempt == 0:
            await asyncio.Event().wait()
        case "raise" if attempt == 0:
            raise BASE_EXCEPTIONS[detail](f"raised by {token}")
        case "block":
            time.sleep(int(detail) / 1000)  # noqa: ASYNC251 - that is the point


def watch_for_stalls() -> None:
    """Record when this process did not run for a while: on a busy machine, that is a cause of reruns too."""
    last = time.monotonic()
    while True:
        time.sleep(0.1)
        now = time.monotonic()
        if now - last > STALL_SECS:
            RECORDER.write("stalled", int((now - last) * 1000))
        last = now


def obey() -> None:
    """Execute the commands on the standard input until it ends."""
    RUNS.wait()  # inject faults only once the worker runs
    for line in sys.stdin:
        command, seconds = line.split()
        if command == "fds":
            take_all_descriptors(float(seconds))
    os._exit(1)


def take_all_descriptors(seconds: float) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, hard), hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        time.sleep(seconds)
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def main() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    threading.Thread(target=watch_for_stalls, daemon=True).start()
    threading.Thread(target=obey, daemon=True).start()
    Worker(
        queue,
        consumer_id=PLAN["name"].partition(".")[0],  # the next process in this place has the same
        concurrency=PLAN["concurrency"],
        claim_min_idle_ms=PLAN["lease_ms"],
        read_block_ms=1000,
        max_attempts=3,
        store_results=True,
        result_ttl_ms=PLAN["kept_secs"] * 1000,
        shutdown_deadline_secs=20,
        retry=RetryConfig(initial_backoff_ms=50, max_backoff_ms=500, jitter_ms=50),
        scheduler=SchedulerConfig(tick_interval_ms=200, lock_ttl_secs=2),
        delayed_lock_ttl_secs=2,
        events_max_stream_len=1000,
        on_startup=RUNS.set,
    ).run_sync()


if __name__ == "__main__":
    main()
