"""Programs and processes that handlers in processes start."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from consume.workers import Journal, consuming
from servers.liveness import is_alive
from support.waiting import until

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


async def test_programs_of_a_handler_end_when_its_worker_is_killed(view: WorkerView, fleet: Fleet) -> None:
    worker = fleet.start(view.server.url, "hanging_grandchild", process=True)
    view.add()
    grandchild = int((await until(lambda: fleet.journal.of("grandchild"), "it runs"))[0])
    worker.kill()
    await until(lambda: not is_alive(grandchild), "the grandchild is gone too")
