"""On a real standalone cluster of two workers: executors and drivers are killed, and nothing is lost or there twice."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from servers.process import eventually
from servers.require import require
from spark.standalone import StandaloneCluster, kill_driver
from tampu.engine.config import ProducerConfig
from tampu.engine.sync_producer import SyncProducer
from tampu.spark.lake.manifest import read_rows

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from spark.filling import Filled

pytestmark = pytest.mark.spark_cluster

PATIENCE_SECS = 400


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandaloneCluster]:
    require("java")
    with StandaloneCluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


def numbers(filled: Filled, queue: str) -> list[int]:
    return [payload["n"] for payload in filled.payloads(queue)]


def until_some(filled: Filled, queue: str, least: int) -> None:
    eventually(lambda: filled.client.xlen(filled.keys(queue).stream) >= least, f"{least} jobs", PATIENCE_SECS)


def test_the_sink_survives_an_executor_killed_with_sigkill(cluster: StandaloneCluster, filled: Filled) -> None:
    rows = 60_000
    driver = cluster.submit("sink", filled.url, str(rows))
    until_some(filled, "q", 10_000)
    cluster.kill_an_executor()
    assert driver.wait(PATIENCE_SECS) == 0
    found = numbers(filled, "q")
    assert len(found) == rows
    assert sorted(found) == list(range(rows))


def test_the_sink_survives_a_driver_killed_and_started_again(
    cluster: StandaloneCluster, filled: Filled, tmp_path: Path
) -> None:
    rows = 12_000
    pipe = filled.client.pipeline(transaction=False)
    for number in range(1, rows + 1):
        pipe.execute_command("XADD", filled.keys().events, f"{number}-0", "e", "completed", "id", "x", "ts", number)
    pipe.execute()
    arguments = ("stream", filled.url, str(tmp_path / "checkpoint"))
    for least in (3_000, 7_000):
        driver = cluster.submit(*arguments)
        until_some(filled, "copies", least)
        kill_driver(driver)
    assert cluster.submit(*arguments).wait(PATIENCE_SECS) == 0
    found = numbers(filled, "copies")
    assert len(found) == rows
    assert sorted(found) == list(range(1, rows + 1))


def test_the_worker_loses_nothing_through_killed_executors_and_drivers(
    cluster: StandaloneCluster, filled: Filled
) -> None:
    jobs = 3_000
    with SyncProducer(filled.url, ProducerConfig(queue_name="q")) as producer:
        producer.add_bulk([{"n": number} for number in range(jobs)])

    def ran() -> int:
        return filled.client.hlen("ran")

    driver = cluster.submit("worker", filled.url)
    eventually(lambda: ran() > 300, "some jobs ran", PATIENCE_SECS)
    cluster.kill_an_executor()
    eventually(lambda: ran() > 1_200, "more jobs ran", PATIENCE_SECS)
    kill_driver(driver)
    driver = cluster.submit("worker", filled.url)
    eventually(lambda: ran() == jobs, "all jobs ran", PATIENCE_SECS)
    eventually(lambda: filled.client.xlen(filled.keys().stream) == 0, "all jobs are settled", PATIENCE_SECS)
    driver.send_signal(signal.SIGTERM)
    assert driver.wait(PATIENCE_SECS) == 0
    assert filled.client.xlen(filled.keys().dlq) == 0


@pytest.mark.timeout(900)  # seven runs, each with a Spark session of its own
def test_the_pipeline_killed_five_times_gives_the_same_lake(filled: Filled, tmp_path: Path) -> None:
    from spark.test_spark_lake import NOON, History, ulid

    history = History(filled)
    for number in range(1_500):
        history.completed(ulid(number, NOON + number * 60_000), NOON + number * 60_000, wait_ms=number)
        if number % 10 == 0:
            history.failed(ulid(10_000 + number, NOON), NOON, NOON + number, 1, f"ValueError: {number}")

    def start(lake: Path) -> subprocess.Popen[bytes]:
        program = "from tampu.cli.pipeline import app; app()"
        options = ["run", "--queue", "q", "--lake", str(lake), "--url", filled.url, "--max-per-batch", "400"]
        command = [sys.executable, "-c", program, *options, "--master", "local[2,4]"]
        with (tmp_path / "pipeline.log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def rows_of(lake: Path, table: str) -> list[str]:
        return sorted(repr(sorted(row.items())) for row in read_rows(lake, table))

    began = time.monotonic()
    assert start(tmp_path / "whole").wait(PATIENCE_SECS) == 0
    took = time.monotonic() - began
    killed = 0
    for _ in range(5):
        driver = start(tmp_path / "cut")
        try:
            driver.wait(random.uniform(0.25, 0.95) * took)
        except subprocess.TimeoutExpired:
            killed += 1
        kill_driver(driver)
    assert killed >= 3
    assert start(tmp_path / "cut").wait(PATIENCE_SECS) == 0
    for table in ("silver/jobs", "gold/throughput", "gold/latency", "gold/failures", "gold/slo"):
        assert rows_of(tmp_path / "cut", table) == rows_of(tmp_path / "whole", table), table
    silver: list[dict[str, Any]] = read_rows(tmp_path / "whole", "silver/jobs")
    assert len(silver) == 1_650
