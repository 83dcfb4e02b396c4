"""`make test` runs a part of the Spark tests in a real session; this test says what must be in it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_the_slice_reads_writes_builds_a_lake_and_runs_a_worker() -> None:
    here = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", str(here), "-m", "spark_slice", "--collect-only", "-q", "-p", "no:xdist"]
    done = subprocess.run(command, cwd=here.parents[1], capture_output=True, text=True)
    tests = [line for line in done.stdout.splitlines() if "::" in line]
    assert len(tests) >= 40, done.stdout + done.stderr
    for part in ("connector", "servers", "lake", "worker"):
        assert any(f"test_spark_{part}" in test for test in tests), f"no test of {part} in the slice: {tests}"
