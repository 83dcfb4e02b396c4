"""Programs and processes that handlers in processes start."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from consume.workers import QUEUE, Journal, consuming
from servers.liveness import is_alive
from support.waiting import until
from tampu import Queue
from tampu.consume.pool import DaemonThreads
from tampu.consume.processes import Processes
from tampu.redis.calls import START_MARK
from tampu.wire.envelope import decode_job

if TYPE_CHECKING:
    from consume.views import WorkerView
    from consume.workers import Fleet
    from tampu.wire.job import Job


def run_a_program(job: Job[Any]) -> None:
    with subprocess.Popen(["sleep", "600"]) as program:
        Journal(Path(job.payload)).write("started", program.pid)


def leave_a_program_that_holds_the_pipe(job: Job[Any]) -> None:
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor that lists them
            os.set_inheritable(int(descriptor), True)
    program = subprocess.Popen(["sleep", "600"], close_fds=False, start_new_session=True)
    Journal(Path(job.payload)).write("started", program.pid)
    time.sleep(600)


def crash_beside_a_fork(job: Job[Any]) -> None:
    if (pid := os.fork()) == 0:
        os.setsid()
        time.sleep(600)
    Journal(Path(job.payload)).write("started", pid)
    os._exit(7)


def square(number: int) -> int:
    return number * number


def square_of_job(job: Job[Any]) -> int:
    return square(job.payload)


def sum_in_a_pool(job: Job[Any]) -> bytes:
    with ProcessPoolExecutor(2, multiprocessing.get_context(job.payload)) as pool:
        return str(sum(pool.map(square, range(4)))).encode()


async def test_a_timeout_kills_the_programs_that_the_handler_started(view: WorkerView, tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    async with consuming(view.server.url, run_a_program, process=True, timeout_secs=2, max_attempts=1):
        view.add(str(journal.path))
        (letter,) = await until(view.dead_letters, "it is dead-lettered", 60)
        (program,) = map(int, journal.of("started"))
        assert letter.error_type == "TimeoutError"
        await until(lambda: not is_alive(program), "the program is gone")


async def test_a_program_that_holds_the_pipe_blocks_neither_worker_nor_shutdown(
    view: WorkerView, tmp_path: Path
) -> None:
    journal = Journal(tmp_path / "journal")
    handler = leave_a_program_that_holds_the_pipe
    try:
        async with consuming(view.server.url, handler, process=True, timeout_secs=1, max_attempts=1, concurrency=1):
            view.add(str(journal.path))
            (letter,) = await until(view.dead_letters, "it is dead-lettered", 60)
            asked_at = time.monotonic()
        assert time.monotonic() - asked_at < 4
        assert letter.error_type == "TimeoutError"
    finally:
        for pid in journal.of("started"):
            os.kill(int(pid), signal.SIGKILL)


async def test_the_death_of_a_process_is_noticed_while_its_fork_lives(view: WorkerView, tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    try:
        async with consuming(view.server.url, crash_beside_a_fork, process=True, max_attempts=1):
            view.add(str(journal.path))
            (letter,) = await until(view.dead_letters, "it is dead-lettered", 60)
        assert (letter.error_type, letter.error) == ("ProcessDied", "the handler's process died with exit code 7")
    finally:
        for pid in journal.of("started"):
            os.kill(int(pid), signal.SIGKILL)


async def test_a_handler_in_a_process_may_use_multiprocessing(view: WorkerView) -> None:
    async with consuming(view.server.url, sum_in_a_pool, process=True, max_attempts=1, store_results=True):
        ids = [view.add("spawn"), view.add("fork")]
        await until(lambda: view.dead_letters() or view.is_settled(), "both have run", 60)
        assert not view.dead_letters()
    assert [view.result(job_id) for job_id in ids] == [b"14", b"14"]


def stop_what_it_started(job: Job[Any]) -> bytes:
    if (fork := os.fork()) == 0:
        time.sleep(600)
    program = subprocess.Popen(["sleep", "600"])
    program.terminate()
    os.kill(fork, signal.SIGTERM)  # perhaps before the fork has run anything
    os.waitpid(fork, 0)
    return str(program.wait(30)).encode()


async def test_what_a_handler_starts_does_not_ignore_sigterm(view: WorkerView) -> None:
    async with consuming(view.server.url, stop_what_it_started, process=True, max_attempts=1, store_results=True):
        job_id = view.add()
        await until(view.is_settled, "it has run", 60)
    assert view.result(job_id) == b"-15"


def test_a_program_that_leaves_its_handler_processes_running_can_exit() -> None:
    script = """
import asyncio
from consume.test_consumer_processes import square_of_job
from tampu.consume.pool import DaemonThreads
from tampu.consume.processes import Processes
from tampu.wire.job import Job

async def main():
    global processes
    processes = Processes(square_of_job, DaemonThreads(1, "t"))
    async with processes.reserve():
        pass

if __name__ == "__main__":
    asyncio.run(main())
"""
    tests = str(Path(__file__).parents[1])
    subprocess.run([sys.executable, "-c", script], cwd=tests, check=True, timeout=30)


async def test_programs_of_a_handler_end_when_its_worker_is_killed(view: WorkerView, fleet: Fleet) -> None:
    worker = fleet.start(view.server.url, "hanging_grandchild", process=True)
    view.add()
    grandchild = int((await until(lambda: fleet.journal.of("grandchild"), "it runs"))[0])
    worker.kill()
    await until(lambda: not is_alive(grandchild), "the grandchild is gone too")


# --- jobs that wait for a process

PROCESSES = os.cpu_count() or 1


def has_start_mark(pending: dict[str, Any]) -> bool:
    return bool(pending["times_delivered"] >= START_MARK)


async def fill(view: WorkerView, journal: Journal, secs: float) -> tuple[list[str], list[str]]:
    """Add a job for each process and three more; return the IDs of those that run and of those that wait."""
    running = view.add_many([secs] * PROCESSES)
    await until(lambda: sorted(journal.of("started")) == sorted(running), "each process has a job", 60)
    waiting = view.add_many([0.01] * 3)
    await until(lambda: len(view.pending()) == PROCESSES + 3, "the others are delivered")
    return running, waiting


async def test_jobs_that_wait_for_a_process_are_not_dead_lettered(view: WorkerView, fleet: Fleet) -> None:
    settings: dict[str, Any] = {"claim_min_idle_ms": 1000, "max_attempts": 1, "concurrency": PROCESSES + 10}
    worker = fleet.start(view.server.url, "in_a_thread", process=True, **settings)
    running, waiting = await fill(view, fleet.journal, 600)
    await until(lambda: len([one for one in view.pending() if has_start_mark(one)]) == PROCESSES, "starts are recorded")
    worker.kill()

    async def handler(job: Job[Any]) -> None:
        fleet.journal.write("elsewhere", job.id)

    async with consuming(view.server.url, handler, **settings):
        await until(lambda: len(view.dead_letters()) + len(fleet.journal.of("elsewhere")) == PROCESSES + 3, "all end")
    assert sorted(fleet.journal.of("elsewhere")) == sorted(waiting)
    assert sorted(decode_job(letter.payload).id for letter in view.dead_letters()) == sorted(running)


async def test_a_suspended_worker_gives_no_process_to_jobs_taken_over(view: WorkerView, fleet: Fleet) -> None:
    settings: dict[str, Any] = {"claim_min_idle_ms": 1000, "concurrency": PROCESSES + 10}
    frozen = fleet.start(view.server.url, "in_a_thread", process=True, **settings)
    _, waiting = await fill(view, fleet.journal, 2)
    frozen.pause()

    async def handler(job: Job[Any]) -> None:
        fleet.journal.write("elsewhere", job.id)

    async with consuming(view.server.url, handler, **settings):
        await until(view.is_settled, "the other worker has run all")
    frozen.resume()
    last = view.add(0.01)
    await until(lambda: last in fleet.journal.of("started"), "it works again", 60)
    assert set(waiting) <= set(fleet.journal.of("elsewhere"))
    assert not set(waiting) & set(fleet.journal.of("started"))


async def test_a_job_that_waits_for_a_process_can_be_cancelled(view: WorkerView, tmp_path: Path) -> None:
    queue = Queue(QUEUE, url=view.server.url)
    journal = Journal(tmp_path / "journal")
    async with consuming(view.server.url, run_a_program, process=True, concurrency=PROCESSES + 10) as worker:
        view.add_many([str(journal.path)] * PROCESSES)
        await until(lambda: len(journal.lines()) == PROCESSES, "each process has a job", 60)
        job_id = view.add(str(journal.path))
        await until(lambda: worker.held == PROCESSES + 1, "one more waits")
        assert await queue.cancel(job_id, reason="not needed") == "requested"
        await until(lambda: len(view.pending()) == PROCESSES, "it is dropped while the others run")
        (event,) = [fields for fields in view.events() if fields["e"] == "cancelled"]
        assert (event["id"], event["reason"]) == (job_id, "not needed")
        assert len(journal.lines()) == PROCESSES
        for _, pid in journal.lines():
            os.kill(int(pid), signal.SIGKILL)
    await queue.close()


async def test_a_cancel_at_the_moment_a_process_becomes_free_loses_no_process() -> None:
    threads = DaemonThreads(2, "tests")
    processes = Processes(square_of_job, threads, limit=1)
    has_begun = False

    async def reserve() -> None:
        nonlocal has_begun
        async with processes.reserve():
            has_begun = True

    try:
        async with processes.reserve():
            cancelled = asyncio.create_task(reserve())
            await asyncio.sleep(0)  # it waits for the process
        cancelled.cancel()  # in the turn in which the process became free, before the waiter runs
        await asyncio.wait([cancelled])
        assert cancelled.cancelled()
        assert not has_begun
        (child,) = multiprocessing.active_children()
        await asyncio.wait_for(reserve(), 20)
        assert multiprocessing.active_children() == [child]
    finally:
        processes.close()
        threads.shutdown()


async def test_a_process_outlives_a_caller_that_is_cancelled_while_it_starts() -> None:
    threads = DaemonThreads(2, "tests")
    processes = Processes(square_of_job, threads, limit=1)

    async def reserve() -> None:
        async with processes.reserve():
            pass

    try:
        cancelled = asyncio.create_task(reserve())
        await until(multiprocessing.active_children, "the process starts")
        (child,) = multiprocessing.active_children()
        cancelled.cancel()
        await asyncio.wait([cancelled])
        await until(lambda: processes._free, "it is kept")
        await reserve()
        assert multiprocessing.active_children() == [child]
    finally:
        processes.close()
        threads.shutdown()
