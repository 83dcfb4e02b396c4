"""Startup of the program: it loads only what it needs, and an early Ctrl-C prints one line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from cli.lab import PATIENCE_SECS, invoke, start, worker_program
from servers.process import eventually
from tampu.cli.commands import COMMANDS, Command
from tampu.cli.main import load_command

if TYPE_CHECKING:
    from pathlib import Path

#: A module that reports when it is loaded, and is slow to load.
SLOW = "import sys, time\nprint('loading', file=sys.stderr, flush=True)\ntime.sleep(60)\n"

#: Blocks a worker's child before any of our code runs in it.
HELD = """
import pathlib, sys, time
if "tampu.cli.commands.worker.child" in sys.orig_argv:
    pathlib.Path("child began").touch()
    while not pathlib.Path("go").exists():
        time.sleep(0.01)
"""


def first_in_path(folder: Path) -> str:
    """Return PYTHONPATH with a folder in front."""
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))


def test_ctrl_c_while_the_program_loads_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text(SLOW)
    with start("inspect", env=os.environ | {"PYTHONPATH": first_in_path(tmp_path)}) as program:
        assert program.stderr is not None
        assert program.stderr.readline() == b"loading\n"
        program.send_signal(signal.SIGINT)
        assert program.stderr.read() == b"tampu: interrupted\n"
        assert program.wait(PATIENCE_SECS) == 130


def test_ctrl_c_while_a_worker_process_loads_is_ignored(tmp_path: Path, url: str) -> None:
    """A terminal sends Ctrl-C to the whole process group, including a child that has not set its handlers yet.

    The test sends it to the child alone: with the supervisor stopping too, the child would rarely live long enough to
    write a traceback.
    """
    (tmp_path / "sitecustomize.py").write_text(HELD)
    (tmp_path / "app.py").write_text(
        "from tampu import Queue\nqueue = Queue('q')\nqueue.task(lambda: None, name='p')\n"
    )
    with worker_program(tmp_path, "app:queue", PYTHONPATH=first_in_path(tmp_path)) as worker:
        eventually((tmp_path / "child began").exists, "the child has begun")
        [child] = worker.children()
        os.kill(child, signal.SIGINT)
        (tmp_path / "go").touch()
        worker.until_logged(f"worker-1[{child}] worker started: queues q")
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 0
        assert "Traceback" not in worker.log


def loaded_by(statement: str) -> set[str]:
    """Return the modules loaded by a statement, in a separate Python process."""
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert loaded_by("import tampu") & {"asyncio", "redis", "msgspec", "tampu.worker"} == set()
    assert loaded_by("from tampu import Queue") & {"tampu.worker", "tampu.consume.consumer", "typer"} == set()
    # Only schedules need time zone data, which is slow to load.
    assert loaded_by("from tampu import Queue, Worker") & {"tampu.wire.cron.schedule", "zoneinfo"} == set()
    # redis-py is used for Sentinel, Cluster and the embedded server; it loads more slowly than all of these.
    assert "redis" not in loaded_by("from tampu import Producer, Queue, Worker; import tampu.rsmq")


def test_help_and_completion_need_no_redis_client() -> None:
    helped = loaded_by("from tampu.cli.main import run_command; run_command(['--help'])")
    assert helped & {"redis", "msgspec", "tampu.queue"} == set()


@pytest.mark.parametrize("entry", COMMANDS.values(), ids=lambda entry: entry.name)
def test_the_command_table_matches_the_docstrings(entry: Command) -> None:
    command = load_command(entry)
    first_paragraph = " ".join(command.help.partition("\n\n")[0].split())
    assert first_paragraph == entry.help
    assert command.name == entry.name


def test_every_command_has_help() -> None:
    shown = invoke("--help").out
    for name in COMMANDS:
        assert name in shown
        assert invoke(name, "--help").code == 0


def test_the_package_can_be_run_with_python_m() -> None:
    done = subprocess.run([sys.executable, "-m", "tampu", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("tampu ")
