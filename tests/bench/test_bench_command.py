"""`tampu bench` measures a server and leaves nothing behind."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tampu.cli.main import run_command

if TYPE_CHECKING:
    from servers.process import Server


@pytest.mark.servers("valkey", "redis62", "redis86", "cluster86")
def test_it_measures_every_scenario_and_removes_its_queue(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.client().set("somebody-elses", "stays")
    assert run_command(["bench", "--url", server.url, "--jobs", "200", "--rounds", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    names = {"ping", "queue-add", "queue-add-bulk-50", "queue-add-concurrent", "worker-concurrent", "pickup-p99"}
    assert names <= found["scenarios"].keys()
    assert all(figures["median"] > 0 for figures in found["scenarios"].values())
    assert found["queue"].startswith("tampu-bench-")
    assert list(server.client().scan_iter()) == [b"somebody-elses"]


def test_without_json_it_prints_a_table(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "--url", server.url, "--jobs", "100", "--rounds", "1", "--only", "queue-add,worker-concurrent"]
    assert run_command(command) == 0
    out = capsys.readouterr().out
    assert out.split()[:4] == ["scenario", "median", "lowest", "highest"]
    assert [line.split()[0] for line in out.splitlines()[1:]] == ["queue-add", "worker-concurrent"]


def test_an_unknown_scenario_is_refused_with_the_valid_ones(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["bench", "--url", server.url, "--only", "queue-sub"]) == 2
    assert "no such scenario: queue-sub; choose from ping, queue-add" in capsys.readouterr().err


def test_a_missing_server_is_reported_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["bench", "--url", "redis://127.0.0.1:1", "--timeout", "0.5"]) == 1
    assert "check that a server is running there, or set --url or TAMPU_URL" in capsys.readouterr().err
