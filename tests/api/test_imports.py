"""Importing tampu: names are loaded on first use, and a file that shadows a standard module is named."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

import tampu

if TYPE_CHECKING:
    from pathlib import Path


def test_every_public_name_can_be_imported_from_its_module() -> None:
    assert set(tampu.__all__) <= set(dir(tampu))
    scope: dict[str, object] = {}
    exec("from tampu import *", scope)
    assert set(tampu.__all__) <= set(scope)


def test_the_old_path_of_the_prometheus_sink_still_works() -> None:
    import tampu.engine.prometheus
    import tampu.prometheus

    assert tampu.engine.prometheus.PrometheusSink is tampu.prometheus.PrometheusSink


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(AttributeError, match="module 'tampu' has no attribute 'Quue'"):
        tampu.Quue  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'Quue'"):
        from tampu import Quue  # type: ignore[attr-defined]  # noqa: F401


def loaded_after(statement: str) -> list[str]:
    code = f"import sys; {statement}; print(*sys.modules)"
    plain = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}  # loads modules too
    run = subprocess.run([sys.executable, "-c", code], env=plain, capture_output=True, text=True, check=True)
    return run.stdout.split()


def test_the_processes_of_a_worker_load_only_what_they_need() -> None:
    supervisor = loaded_after("import tampu.cli.main, tampu.cli.commands.worker.command")
    assert not {"rich", "tampu.wire.payload", "tampu.redis.client"} & {*supervisor}
    child = loaded_after("import tampu.cli.commands.worker.child")
    assert not {"rich", "typer"} & {*child}


def test_cron_and_time_zones_are_loaded_on_first_use() -> None:
    loaded = loaded_after("from tampu import Queue, Worker")
    assert not {"zoneinfo", "tampu.wire.cron", "pydantic", "uvloop", "pyspark"} & {*loaded}
    assert len(loaded) < 360, "each module costs time at every start"


@pytest.mark.parametrize("text", ["from tampu import Queue", "things = []"])
def test_a_file_that_shadows_a_standard_module_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "queue.py").write_text(text)
    (tmp_path / "app.py").write_text("from tampu import Queue")
    done = subprocess.run([sys.executable, tmp_path / "app.py"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    last_line = done.stderr.splitlines()[-1]
    shadowing = f"{tmp_path / 'queue.py'} shadows the standard-library module of the same name; rename it"
    assert shadowing in last_line


#: In the process of a task, `embedded://` means the worker's server.
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


def test_a_task_in_a_process_uses_the_temporary_server_of_its_worker(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, tmp_path / "app.py"], capture_output=True, text=True, check=False, timeout=90
    )
    assert (done.stdout, done.stderr) == ("50\n", "")
