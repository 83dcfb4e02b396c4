"""A rolling upgrade, and one that is rolled back: the previous release and this one on the same queue.

Producers, workers, schedulers and command lines of both releases take part. One worker is killed, so that the other
release takes its jobs over. Every confirmed job must end, and nothing may be left behind.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import pytest

from servers.process import eventually
from support.lines import whole_lines
from support.queues import QueueView
from upgrade.releases import previous_release, this_release

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator
    from pathlib import Path

    from servers.process import Server
    from upgrade.releases import Release

#: Rounds of each producer: 16 or 17 jobs each.
ROUNDS = 30
WITHIN_SECS = 60.0
#: The first process that is started: the worker that is killed.
KILLED = "0"


class Run(NamedTuple):
    """One line of the log."""

    event: str
    release: str
    process: str
    task: str
    job_id: str
    argument: str


class Fleet:
    """The processes of both releases on one server, and what they recorded."""

    def __init__(self, server: Server, folder: Path) -> None:
        self.url = server.url
        self.log = folder / "runs"
        self.confirmed: set[str] = set()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._threads: list[threading.Thread] = []
        self._errors: list[BaseException] = []

    def start(self, release: Release, *arguments: str) -> subprocess.Popen[bytes]:
        process = release.start(*arguments, url=self.url, log=self.log, process=str(len(self._processes)))
        self._processes.append(process)
        return process

    def produce(self, release: Release) -> None:
        """Add jobs from another process, while the test goes on."""

        def run() -> None:
            try:
                self.confirmed.update(release.app("produce", release.name, str(ROUNDS), url=self.url, log=self.log))
            except BaseException as error:
                self._errors.append(error)

        self._threads.append(threading.Thread(target=run))
        self._threads[-1].start()

    def await_producers(self) -> None:
        for thread in self._threads:
            thread.join()
        if self._errors:
            raise self._errors[0]

    def runs(self, event: str, **wanted: str) -> list[Run]:
        """The recorded runs with this event, and with these values: `runs("end", task="tick")`."""
        runs = [Run(*line.split()) for line in whole_lines(self.log)]
        return [run for run in runs if run.event == event and wanted.items() <= run._asdict().items()]

    def under_way(self, process: str) -> set[str]:
        """The ids of jobs that have begun in this process and not ended."""
        return {run.job_id for run in self.runs("begin", process=process)} - {run.job_id for run in self.runs("end")}

    def close(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for thread in self._threads:
            thread.join()


@contextlib.contextmanager
def running_fleet(server: Server, folder: Path) -> Iterator[Fleet]:
    fleet = Fleet(server, folder)
    try:
        yield fleet
    finally:
        fleet.close()


def terminate(*processes: subprocess.Popen[bytes]) -> None:
    """End them in good order, as a deployment does."""
    for process in processes:
        process.terminate()
    for process in processes:
        assert process.wait(30) == 0


@pytest.mark.servers("redis86", "redis62")
@pytest.mark.parametrize("order", ["upgrade", "rollback"])
def test_nothing_is_lost_or_stuck_while_releases_change(server: Server, tmp_path: Path, order: str) -> None:
    before, after = previous_release(), this_release()
    if order == "rollback":
        before, after = after, before
    view = QueueView(server, "fleet")
    with running_fleet(server, tmp_path) as fleet:
        # All of one release.
        first, second = fleet.start(before, "worker", "fleet:worker"), fleet.start(before, "worker", "fleet:worker")
        scheduler = fleet.start(before, "scheduler", "fleet")
        before.app("repeat", "repeat-before", url=fleet.url, log=fleet.log)
        fleet.produce(before)
        eventually(lambda: len(fleet.runs("end", release=before.name)) > 50, "jobs ran", WITHIN_SECS)

        # The other release joins, and a worker of the first is killed in the middle of its jobs.
        third = fleet.start(after, "worker", "fleet:worker")
        next_scheduler = fleet.start(after, "scheduler", "fleet")
        after.app("repeat", "repeat-after", url=fleet.url, log=fleet.log)
        fleet.produce(after)
        eventually(lambda: fleet.runs("end", release=after.name), "the other release took part", WITHIN_SECS)
        eventually(lambda: fleet.under_way(KILLED), "jobs are under way", WITHIN_SECS)
        os.killpg(first.pid, signal.SIGKILL)

        # Either command line sees what either release wrote, and stops and starts the workers of both.
        for release in (before, after):
            listed = release.cli("repeatable", "list", "fleet", url=fleet.url)
            assert {entry["key"] for entry in listed} == {"repeat-before", "repeat-after"}
        fleet.await_producers()
        before.cli("queue", "pause", "fleet", url=fleet.url)
        after.cli("queue", "resume", "fleet", url=fleet.url)

        # Only the other release is left.
        terminate(second, scheduler)
        at_the_change = len(fleet.runs("end", task="tick"))
        doomed = 2 * ROUNDS // 5
        eventually(lambda: len(view.dead_letters()) == doomed, "all doomed jobs are dead letters", WITHIN_SECS)
        (tmp_path / "repaired").touch()
        for release in (before, after):
            assert release.cli("dlq", "replay", "fleet", "--limit", str(doomed // 2), "--yes", url=fleet.url)
        eventually(lambda: len(fleet.runs("end", task="tick")) > at_the_change + 5, "schedules go on", WITHIN_SECS)
        before.cli("repeatable", "remove", "fleet", "repeat-after", "--yes", url=fleet.url)
        after.cli("repeatable", "remove", "fleet", "repeat-before", "--yes", url=fleet.url)

        # Nothing is lost: every job whose add was confirmed has ended.
        missing = fleet.confirmed.copy()

        def all_ended() -> bool:
            missing.difference_update(run.job_id for run in fleet.runs("end"))
            return not missing

        eventually(all_ended, f"every job ended; missing: {sorted(missing)[:5]}", WITHIN_SECS)
        # Nothing is stuck: no entry is left, waiting, delayed, pending or dead.
        eventually(lambda: view.is_settled() and not view.dead_letters(), "the queue is empty", WITHIN_SECS)
        terminate(third, next_scheduler)

    # A job runs twice only if the killed worker had begun it.
    ends = Counter(run.job_id for run in fleet.runs("end"))
    again = {job_id for job_id, count in ends.items() if count > 1}
    assert again <= {run.job_id for run in fleet.runs("begin", process=KILLED)}
    # Both releases added these ids, and both fired these schedules: each job was added once.
    unique = [run.job_id for run in fleet.runs("end") if run.argument.startswith("unique-")]
    assert set(unique) == {f"unique-{number}" for number in range(ROUNDS)}
    assert {run.argument for run in fleet.runs("end", task="tick")} == {"repeat-before", "repeat-after"}
    assert {run.release for run in fleet.runs("end")} == {"this", "previous"}
