"""A short chaos run that is part of `make test`: most faults once, with a fixed seed.

It ends when every fault was injected, not after a fixed time, so on a busy machine it only takes longer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from chaos import run as chaos_run
from chaos.checker import check
from chaos.records import Recorder, read_history
from chaos.run import KEYS, QUEUE, Setup, run
from tampu import Queue

if TYPE_CHECKING:
    from pathlib import Path

    from servers.process import Server

#: Each fault takes some seconds, and the machine may be busy with other tests.
PATIENCE_SECS = 400

SLICES = {
    "single": Setup(
        seed=16,
        kinds=(
            *("kill", "stop", "term", "roll", "fds", "server-kill", "client-pause", "oom", "evict", "script-flush"),
            *("clock-forward", "cut", "partition"),
        ),
    ),
    "sentinel": Setup("sentinel", seed=16, kinds=("failover", "kill")),
    "cluster": Setup("cluster", seed=16, kinds=("slot-move", "kill")),
}


@pytest.mark.timeout(PATIENCE_SECS)
@pytest.mark.parametrize("topology", SLICES)
async def test_no_promise_is_broken_under_any_fault(topology: str, tmp_path: Path) -> None:
    setup = SLICES[topology]
    # 200 jobs a second, for as long as it takes.
    setup.seconds, setup.jobs, setup.cycles = PATIENCE_SECS, 200 * PATIENCE_SECS, 1
    setup.pause_secs, setup.poison, setup.workers = 0.4, False, 3
    report = await run(setup, tmp_path / "run")
    assert report.is_clean, "\n".join(report.lines())
    assert report.kinds_missed(1) == [], "\n".join(report.lines())


async def test_a_run_sees_that_schedules_have_stopped(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chaos_run, "FIRE_SECS", 0.1)
    async with Queue(QUEUE, url=server.url) as queue:
        specs = await chaos_run._start_schedules(queue, Setup(schedules=1, broken_schedules=1))
        [(spec, (interval_ms, first))] = specs.items()
        first -= 5000  # as if it had been due for 4 s, and nothing had fired
        await queue.producer.ready_client().call("ZADD", KEYS.repeat, first, spec)
        await chaos_run._stop_schedules(queue, Recorder(tmp_path, "injector"), {spec: (interval_ms, first)})
    violations = check(read_history(tmp_path, 4.0))
    assert {violation.rule for violation in violations} == {"schedule"}
    assert len(violations) >= 4
