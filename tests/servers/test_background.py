"""A shell starts background jobs with SIGINT ignored, and every program that a test starts would inherit that."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

TESTS = Path(__file__).parents[1]

INNER = """
    import signal, subprocess, sys

    def test_interrupt():
        # In a loop: CPython 3.14 may begin a sleep although a signal has just arrived.
        code = "import time; print(flush=True)\\nwhile True: time.sleep(0.05)"
        command = [sys.executable, "-c", code]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as program:
            program.stdout.readline()
            program.send_signal(signal.SIGINT)
            try:
                assert program.wait(10) == -signal.SIGINT
            finally:
                program.kill()
"""


def test_programs_can_be_interrupted_in_a_background_run(tmp_path: Path) -> None:
    inner = tmp_path / "test_inner.py"
    inner.write_text(textwrap.dedent(INNER))
    options = ["-q", "-p", "no:cacheprovider", "-p", "conftest", "-c", str(TESTS.parent / "pyproject.toml")]
    options += ["--basetemp", str(tmp_path / "inner")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(inner)],
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
