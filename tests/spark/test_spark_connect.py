"""On a real Spark Connect server: the connector and the pipeline work with a session of the Connect client."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from servers.process import HOST, eventually, free_port
from servers.require import require
from spark.conftest import QUICK_JAVA
from spark.standalone import START_SECS, end, spark_home

if TYPE_CHECKING:
    from collections.abc import Iterator

#: In a separate process: one process cannot have sessions of both kinds.
CLIENT = Path(__file__).with_name("smoke.py")


@pytest.fixture
def connect_server(tmp_path: Path) -> Iterator[str]:
    """The address of a Spark Connect server with Spark's default settings."""
    require("java")
    port = free_port()
    conf = {
        "spark.connect.grpc.binding.address": HOST,
        "spark.connect.grpc.binding.port": str(port),
        "spark.ui.enabled": "false",
        "spark.driver.memory": "700m",
        "spark.sql.shuffle.partitions": "2",
    }
    command = [str(spark_home() / "bin" / "spark-submit"), "--master", "local[2,4]"]
    command += [part for key, value in conf.items() for part in ("--conf", f"{key}={value}")]
    command += ["--class", "org.apache.spark.sql.connect.service.SparkConnectServer", "spark-internal"]
    environment = os.environ | {"SPARK_LOCAL_IP": HOST, "PYSPARK_PYTHON": sys.executable}
    environment["JAVA_TOOL_OPTIONS"] = QUICK_JAVA
    with (tmp_path / "connect.log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    def is_listening() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex((HOST, port)) == 0

    try:
        eventually(is_listening, "a Spark Connect server", START_SECS)
        yield f"sc://{HOST}:{port}"
    finally:
        end(server)


@pytest.mark.spark_session
def test_the_connector_and_the_pipeline_work_on_spark_connect(connect_server: str) -> None:
    done = subprocess.run([sys.executable, str(CLIENT), connect_server], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
