"""A test run that a shell started in the background: it ignores SIGINT, and so would every program that a test starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).parents[2]


def test_programs_can_be_interrupted_in_a_background_run() -> None:
    chosen = ["tests/api/test_run_sync.py", "-k", "2", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        ["sh", "-c", "trap '' INT; exec \"$@\"", "sh", sys.executable, "-m", "pytest", *chosen],
        cwd=PROJECT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
