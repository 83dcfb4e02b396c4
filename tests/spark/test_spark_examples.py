"""The examples of `examples/spark/` run as they stand, each in a process of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import pytest

from servers.require import require
from spark.conftest import QUICK_JAVA, SPARK_TIMEOUT_SECS
from spark.standalone import spark_home
from spark.test_spark_lake import fill
from tampu.spark.session import find_java_home

if TYPE_CHECKING:
    from spark.filling import Filled

pytestmark = [pytest.mark.spark_session, pytest.mark.timeout(SPARK_TIMEOUT_SECS)]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "spark"
PATIENCE_SECS = 400


def run(*command: str, cwd: Path) -> str:
    require("java")
    environment = os.environ | {
        "JAVA_TOOL_OPTIONS": QUICK_JAVA,
        "JAVA_HOME": find_java_home(),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        # The Spark Connect server of `spark-pipelines` takes a free port instead of 15002.
        "SPARK_TESTING": "1",
    }
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=PATIENCE_SECS)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_dead_letters_are_repaired_and_replayed(tmp_path: Path) -> None:
    said = run(sys.executable, str(EXAMPLES / "repair_dead_letters.py"), cwd=tmp_path)
    assert "could not convert string to float: <text>" in said
    assert '{"customer":"c0","amount":0.5}' in said
    assert "200 jobs are back in the queue, 5 letters are left," in said
    assert "200 replays are counted" in said


def test_the_tables_as_a_declarative_pipeline_run_twice(filled: Filled, tmp_path: Path) -> None:
    fill(filled)
    folder = tmp_path / "declarative"
    shutil.copytree(EXAMPLES / "declarative", folder)
    spec = folder / "spark-pipeline.yml"
    text = (
        spec.read_text().replace("redis://127.0.0.1:6379", filled.url).replace("tampu.queue: emails", "tampu.queue: q")
    )
    spec.write_text(text.replace("file:///tmp/tampu-declarative", tmp_path.as_uri()))
    for _ in range(2):  # the second finds the tables of the first
        program = str(spark_home() / "bin" / "spark-pipelines")
        run(program, "run", "--spec", str(spec), "--conf", "spark.sql.catalogImplementation=hive", cwd=folder)
    jobs = pq.read_table(folder / "spark-warehouse" / "silver_jobs").to_pylist()
    assert len(jobs) == 42
    assert sum(row["completed"] for row in pq.read_table(folder / "spark-warehouse" / "gold_slo").to_pylist()) == 40
