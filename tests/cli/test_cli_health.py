"""The health endpoint returns 200 while the workers can work, and 503 while they cannot."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cli.lab import run_program, worker_program
from cli.test_cli_worker import APP, add, until_written
from servers.process import eventually
from tampu.cli.commands.worker.health import merge_metrics

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from cli.lab import WorkerProgram
    from servers.process import Server


@pytest.fixture
def app(tmp_path: Path) -> Path:
    (tmp_path / "app.py").write_text(APP)
    return tmp_path


def endpoint(worker: WorkerProgram) -> str:
    worker.until_logged("health endpoint at ")
    found = re.search(r"health endpoint at (http://\S+)/health", worker.log)
    assert found is not None
    return found[1]


def ask(base: str, path: str = "/health", method: str = "GET") -> tuple[int, str]:
    request = urllib.request.Request(base + path, method=method)
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def health(base: str) -> tuple[int, dict[str, Any]]:
    code, body = ask(base)
    return code, json.loads(body)


def silence(base: str) -> float:
    return health(base)[1]["processes"][0]["seconds_since_last_read"]


def test_health_follows_the_server(
    app: Path, fresh_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = fresh_server()
    monkeypatch.setenv("TAMPU_URL", server.url)
    with worker_program(app, "app:worker", "--health-port", "0", "--health-silence", "2s") as worker:
        base = endpoint(worker)
        eventually(lambda: health(base)[0] == 200, "it is healthy")
        told = health(base)[1]
        assert told["status"] == "ok"
        assert [(one["number"], one["state"], one["queues"]) for one in told["processes"]] == [(1, "running", ["q"])]
        eventually(lambda: health(base)[1]["processes"][0]["connections"] == 4, "all its connections are open")
        assert told["processes"][0]["slots"] >= 1
        assert told["processes"][0]["slots_used"] == {}
        assert told["processes"][0]["pid"] in worker.children()
        server.stop()
        eventually(lambda: health(base)[0] == 503, "it is unhealthy")
        assert "has not answered a read for" in health(base)[1]["problems"][0]
        server.start()
        eventually(lambda: health(base)[0] == 200, "it is healthy again")
        # A worker at full concurrency does not read, which is not a problem.
        for _ in range(3):
            add("wait_for", path=str(app / "go"))
        until_written(app, "started", times=3)
        eventually(lambda: silence(base) > 0.5, "it has not read for a while")
        eventually(lambda: silence(base) < 0.4, "but it has checked its server")
        (app / "go").touch()
        until_written(app, "done", times=3)
        # A handler that blocks the event loop is one.
        add("block", secs=60)
        until_written(app, "started", times=4)
        eventually(lambda: health(base)[1]["processes"][0]["blocked"], "the block is shown before the limit is reached")
        eventually(lambda: health(base)[0] == 503, "a blocked worker is unhealthy")
        [problem] = health(base)[1]["problems"]
        blocked = (
            r"worker-1: job block \S+ has blocked the event loop for \d+\.\d s at app\.py:\d+ in block \(limit 2 s\)"
        )
        assert re.fullmatch(blocked, problem)
        worker.until_logged("has blocked the event loop for 5.")
        worker.signal(signal.SIGTERM)


def test_a_suspended_process_is_reported_as_such(app: Path, url: str) -> None:
    with worker_program(app, "app:worker", "--health-port", "0", "--health-silence", "1s") as worker:
        base = endpoint(worker)
        eventually(lambda: health(base)[0] == 200, "it is healthy")
        [child] = worker.children()
        os.kill(child, signal.SIGSTOP)
        try:
            eventually(lambda: "the process has not reported for" in str(health(base)), "it is reported")
            assert health(base)[0] == 503
        finally:
            os.kill(child, signal.SIGCONT)
        eventually(lambda: health(base)[0] == 200, "it is healthy again")


def test_health_is_503_before_the_first_answer_and_while_draining(
    app: Path, fresh_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = fresh_server()
    server.stop()
    monkeypatch.setenv("TAMPU_URL", server.url)
    with worker_program(app, "app:worker", "--health-port", "0") as worker:
        base = endpoint(worker)
        assert health(base)[0] == 503
        eventually(lambda: "the server has not answered yet" in str(health(base)[1]), "it says why")
        server.start()
        eventually(lambda: health(base)[0] == 200, "it is healthy")
        add("wait_for", path=str(app / "go"))
        until_written(app, "started")
        worker.signal(signal.SIGTERM)
        eventually(lambda: "draining" in health(base)[1]["problems"], "it is draining")
        (app / "go").touch()
        assert worker.wait() == 0


def test_only_get_and_head_of_known_paths_are_answered(app: Path, url: str) -> None:
    with worker_program(app, "app:worker", "--health-port", "0") as worker:
        base = endpoint(worker)
        eventually(lambda: health(base)[0] == 200, "it is healthy")
        assert ask(base, "/health?full=1")[0] == 200
        assert ask(base, "/nothing")[0] == 404
        assert ask(base, method="POST")[0] == 405
        assert ask(base, method="HEAD") == (200, "")
        host, port = base.removeprefix("http://").split(":")
        for rubbish in (b"\x00\xff\r\n\r\n", b"GET", b"G" * 20_000 + b"\r\n\r\n"):
            with socket.create_connection((host, int(port)), 5) as connection:
                connection.sendall(rubbish)
                connection.shutdown(socket.SHUT_WR)
                assert connection.recv(100).split()[1] in (b"400", b"405")
        status, page = ask(base, "/metrics")
        assert status == 200
        assert 'process="1"' in page


def test_prometheus_can_read_the_jobs_of_all_processes(app: Path, url: str) -> None:
    with worker_program(app, "app:queue", "--health-port", "0", "--processes", "2") as worker:
        base = endpoint(worker)
        eventually(lambda: health(base)[0] == 200, "it is healthy")
        for _ in range(3):
            add("sleep", secs=0)
        add("fail")
        until_written(app, "done", 3)

        def runs(page: str) -> dict[tuple[str, str], float]:
            """Return the runs of all processes, by task and outcome."""
            counted: dict[tuple[str, str], float] = {}
            families = [one for one in text_string_to_metric_families(page) if one.name == "tampu_job_runs"]
            for sample in families[0].samples if families else ():
                if sample.name == "tampu_job_runs_total":
                    assert sample.labels["process"] in ("1", "2")
                    key = sample.labels["name"], sample.labels["outcome"]
                    counted[key] = counted.get(key, 0.0) + sample.value
            return counted

        wanted = {("sleep", "ok"): 3.0, ("fail", "err"): 1.0}
        eventually(lambda: runs(ask(base, "/metrics")[1]) == wanted, "all runs are counted")
        with ThreadPoolExecutor(4) as threads:  # several scrapers at the same time
            pages = [*threads.map(lambda _: ask(base, "/metrics"), range(8))]
        assert [(status, runs(page)) for status, page in pages] == [(200, wanted)] * 8


def test_a_port_in_use_is_reported_in_one_line(app: Path, url: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = run_program("worker", "app:worker", "--health-port", port, cwd=app)
    assert done.code == 1
    assert "the health endpoint cannot listen on" in done.complaint


def test_metrics_of_several_processes_are_merged() -> None:
    page = '# HELP jobs Jobs.\n# TYPE jobs counter\njobs_total{queue="a"} 1.0\n# HELP up Up.\n# TYPE up gauge\nup 1\n'
    assert merge_metrics({1: page, 2: page}).splitlines() == [
        "# HELP jobs Jobs.",
        "# TYPE jobs counter",
        'jobs_total{process="1",queue="a"} 1.0',
        'jobs_total{process="2",queue="a"} 1.0',
        "# HELP up Up.",
        "# TYPE up gauge",
        'up{process="1"} 1',
        'up{process="2"} 1',
    ]
