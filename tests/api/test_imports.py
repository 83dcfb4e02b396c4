"""Importing tampu: names come when they are used, and a file in the way is named."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

import tampu

if TYPE_CHECKING:
    from pathlib import Path


def test_every_public_name_is_offered_and_comes_from_where_it_is_said_to() -> None:
    assert set(tampu.__all__) <= set(dir(tampu))
    scope: dict[str, object] = {}
    exec("from tampu import *", scope)
    assert set(tampu.__all__) <= set(scope)


def test_the_old_path_of_the_prometheus_sink_still_works() -> None:
    import tampu.engine.prometheus
    import tampu.prometheus

    assert tampu.engine.prometheus.PrometheusSink is tampu.prometheus.PrometheusSink


def test_a_name_that_is_not_there_is_an_error() -> None:
    with pytest.raises(AttributeError, match="module 'tampu' has no attribute 'Quue'"):
        tampu.Quue  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'Quue'"):
        from tampu import Quue  # type: ignore[attr-defined]  # noqa: F401


@pytest.mark.parametrize("text", ["from tampu import Queue", "things = []"])
def test_a_file_in_the_way_of_a_module_of_python_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "queue.py").write_text(text)
    (tmp_path / "app.py").write_text("from tampu import Queue")
    done = subprocess.run([sys.executable, tmp_path / "app.py"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    last_line = done.stderr.splitlines()[-1]
    assert f"{tmp_path / 'queue.py'} takes the place of a module of Python's own of that name: rename it" in last_line


#: `embedded://` in a process of a task means the worker's server.
SCRIPT = """
import asyncio
from tampu import Queue, Worker

jobs = Queue("jobs", url="embedded://")


@jobs.task
def small(number: int) -> int:
    return number + 1


@jobs.task(process=True)
def square(number: int) -> str:
    return small.sync.add(number * number).id


async def main() -> None:
    worker = Worker(jobs)
    running = asyncio.create_task(worker.run())
    follower = await (await square.add(7)).result(30)
    print(await jobs.wait_for_result(follower, 30))
    await worker.close()
    await running
    await jobs.close()


if __name__ == "__main__":
    asyncio.run(main())
"""


def test_a_task_in_a_process_adds_to_the_throw_away_server_of_its_worker(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, tmp_path / "app.py"], capture_output=True, text=True, check=False, timeout=90
    )
    assert (done.stdout, done.stderr) == ("50\n", "")
