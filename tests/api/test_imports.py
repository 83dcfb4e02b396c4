"""Importing tampu: names are loaded on first use, and a queue.py that shadows the standard one is named."""

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
def test_a_queue_py_that_shadows_the_standard_library_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "queue.py").write_text(text)
    (tmp_path / "app.py").write_text("from tampu import Queue")
    done = subprocess.run([sys.executable, tmp_path / "app.py"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "your own queue.py hides the standard library's; rename it" in done.stderr
    assert str(tmp_path / "queue.py") in done.stderr


@pytest.mark.parametrize("module", ["tampu", "tampu.cli"])
def test_python_m_imports_nothing_from_the_current_folder(tmp_path: Path, module: str) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", *arguments]
        # Without coverage, which imports modules before any other line runs.
        env = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=60)

    (tmp_path / "loaded.py").write_text("import sys\nprint(*sys.modules)")
    loaded_by_python = {*run("loaded").stdout.split()}  # before any line of the module runs
    for name in {*sys.stdlib_module_names, "typer", "rich", "redis", "hiredis", "msgpack"} - loaded_by_python:
        (tmp_path / f"{name}.py").write_text("import os; os._exit(9)")
    assert (tmp_path / "__future__.py").exists()
    done = run(module, "inspect", "--url", "embedded://")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert done.stderr.startswith("no queues yet")


def test_a_worker_of_python_m_still_loads_the_application_in_the_folder(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text("raise RuntimeError('it was imported')")
    command = [sys.executable, "-m", "tampu", "worker", "app:queue", "--url", "embedded://"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert "importing app failed: RuntimeError: it was imported" in done.stderr


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
