"""The evidence driver on a small scale: `make chaos-lake` runs it with all kills and 300,000 events."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from servers.require import require
from spark.conftest import QUICK_JAVA

DRIVER = Path(__file__).with_name("lake_kills.py")


@pytest.mark.spark_session
@pytest.mark.timeout(900)  # four rounds, each with its own Spark session, while another one reads
@pytest.mark.parametrize("lake", ["folder", "s3"])
def test_a_pipeline_killed_at_chosen_moments_loses_and_doubles_nothing(lake: str) -> None:
    require("java")
    # In separate processes: a kill takes Java with it.
    moments = ("commit silver/jobs", "merge")
    done = subprocess.run(
        [sys.executable, str(DRIVER), "--events", "3000", "--lake", lake, "--moments", *moments],
        env=os.environ | {"JAVA_TOOL_OPTIONS": QUICK_JAVA},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 kills" in done.stdout
    assert "differences none, row counts that differ between readers none, orphans 0" in done.stdout
