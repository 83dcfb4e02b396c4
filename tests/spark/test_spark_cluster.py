"""On a real standalone cluster of two workers: executors and drivers are killed, and nothing is lost or there twice."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from servers.process import eventually
from servers.require import require
from spark.conftest import SPARK_TIMEOUT_SECS
from spark.standalone import StandaloneCluster, kill_driver, start_driver
from tampu.config import ProducerConfig
from tampu.sync import SyncProducer

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from spark.filling import Filled

pytestmark = [pytest.mark.spark_cluster, pytest.mark.timeout(SPARK_TIMEOUT_SECS)]

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
    copy_events_with_killed_drivers(cluster.submit, filled, tmp_path)


@pytest.mark.spark_session
def test_the_sink_survives_it_on_one_machine_too(filled: Filled, tmp_path: Path) -> None:
    require("java")
    drivers: list[subprocess.Popen[bytes]] = []

    def submit(*arguments: str) -> subprocess.Popen[bytes]:
        drivers.append(start_driver(tmp_path / f"driver-{len(drivers)}.log", "local[2,4]", *arguments))
        return drivers[-1]

    try:
        copy_events_with_killed_drivers(submit, filled, tmp_path)
    finally:
        for driver in drivers:
            kill_driver(driver)


def copy_events_with_killed_drivers(
    submit: Callable[..., subprocess.Popen[bytes]], filled: Filled, tmp_path: Path
) -> None:
    """A streaming query turns events into jobs; its driver is killed in the middle of micro-batches."""
    rows = 8_000
    pipe = filled.client.pipeline(transaction=False)
    for number in range(1, rows + 1):
        pipe.execute_command("XADD", filled.keys().events, f"{number}-0", "e", "completed", "id", "x", "ts", number)
    pipe.execute()
    arguments = ("stream", filled.url, str(tmp_path / "checkpoint"))
    driver = submit(*arguments)
    until_some(filled, "copies", 2_500)
    kill_driver(driver)
    assert filled.client.xlen(filled.keys("copies").stream) < rows  # there was something left to do
    assert submit(*arguments).wait(PATIENCE_SECS) == 0
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
